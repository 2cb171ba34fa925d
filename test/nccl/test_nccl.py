"""Parity with eager FSDP2 on real NCCL: ``benchmarks/parity.py --device cuda`` as a person runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "parity.py"

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason=f"torch {torch.__version__} sees no CUDA device; test_parity.py runs on the CPU",
    ),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL"),
]


@pytest.mark.parametrize(
    "only", ["llama/1x2/*/fsdp/bf16", "llama/2x2/*/hsdp/bf16", "llama/4x2/aot_eager/fsdp/bf16"]
)
def test_parity(tmp_path: Path, only: str) -> None:
    path = tmp_path / "cells.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cuda", "--topologies", "1x2,2x2,4x2"]
        + ["--only", only, "--steps", "5", "--json", str(path), "--timeout", "300"],
        capture_output=True,
        text=True,
        timeout=330,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cells = json.loads(path.read_text())
    assert cells
    for cell in cells:
        assert (cell["device"], cell["layout_differences"]) == ("cuda", [])
