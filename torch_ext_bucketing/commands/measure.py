"""Run ``torchrun ... -m torch_ext_bucketing measure``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from ..testing.target import TargetError, add_command

_DESCRIPTION = """\
Measure the collectives of each group of a mesh, and the rates of products and copies: NCCL with
GPUs, gloo without. Start it like the training, with torchrun and one process per GPU. Rank 0 writes
a file for torch_ext_bucketing.Machine.load."""


def add_parser(subparsers: Any) -> None:
    """Add ``measure`` to a command's subparsers."""
    about = "measure the collectives of a mesh for the cost model, under torchrun"
    parser = add_command(subparsers, "measure", _run, help=about, description=_DESCRIPTION)
    parser.add_argument("--mesh", required=True, metavar="2x4", help="sizes of the mesh dimensions")
    parser.add_argument("--out", required=True, metavar="FILE", help="the file to write, JSON")


def _run(args: argparse.Namespace) -> int:
    import torch.distributed as dist

    from ..planner.cost.measure import measure

    def say(text: str) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(text, file=sys.stderr, flush=True)

    try:
        sizes = args.mesh.split("x")
        if not all(size.isdecimal() and int(size) for size in sizes):
            raise ValueError(f"--mesh must be sizes such as 8 or 2x4, got {args.mesh!r}")
        _start()
        machine = measure([*map(int, sizes)], say=say)
        if dist.get_rank() == 0:
            machine.save(args.out)
            say(f"written to {Path(args.out).resolve()}")
        return 0
    except ValueError as error:
        raise TargetError(str(error)) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _start() -> None:
    """Join the process group of the launcher."""
    import torch
    import torch.distributed as dist

    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} not set: start it under torchrun, as in torchrun "
            "--nproc-per-node 8 -m torch_ext_bucketing measure --mesh 8 --out machine.json"
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
