"""Parity with eager FSDP2 on real NCCL: ``benchmarks/nccl.py`` as a person runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "nccl.py"

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason=f"torch {torch.__version__} sees no CUDA device; test_nccl_script.py runs gloo",
    ),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL"),
]


@pytest.mark.parametrize(
    ("ranks", "only"),
    [(2, "2/fsdp/*/ours"), (4, "4/hsdp/*/ours"), (8, "8/fsdp/aot_eager/ours")],
)
def test_parity(tmp_path: Path, ranks: int, only: str) -> None:
    path = tmp_path / "nccl.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--ranks", str(ranks), "--only", only]
        + ["--steps", "5", "--json", str(path), "--timeout", "300"],
        capture_output=True,
        text=True,
        timeout=330,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    assert document["problems"] == []
    assert document["gpus"] == torch.cuda.device_count()
    for run in document["runs"]:
        assert run["peak_bytes"] > 0, run["name"]
        assert run["layout_differences"] == [], run["name"]
