"""Show what becomes of each attention kernel if backward recomputes all that it can.

    python -m benchmarks.attention

Each kernel stands in a small sharded transformer, compiled by ``backend(passes=recipe(model,
"speed", memory=...))`` under a bound that no choice keeps, up to the partitioner of ``"aot_eager"``
and of ``"inductor"``: fake tensors on the CPU call CUDA's operators, so no card is needed. A row is
a kernel; ``recomputed``, ``saved``, or the error before the partitioner. The table of torch 2.11 to
2.15 in the page on memory is one run with each.
"""

import sys
import warnings
from collections.abc import Sequence

import torch
from collective_graphs import fake_group
from cuda_attention import KERNELS, fused, outcome

from torch_ext_bucketing.reports.base import columns

from .command import parser_of

COMPILERS = ("aot_eager", "inductor")


def main(argv: Sequence[str]) -> None:
    parser_of("python -m benchmarks.attention", __doc__).parse_args(argv)
    warnings.simplefilter("ignore")
    kernels = {**KERNELS, "cudnn, with dropout": fused("cudnn", 0.1)}
    rows: list[tuple[str, ...]] = [(f"torch {torch.__version__}", *COMPILERS)]
    with fake_group(2):
        for name, attend in kernels.items():
            rows.append((name, *(outcome(attend, compiler) for compiler in COMPILERS)))
    print(columns(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
