"""Simulate the error of bfloat16 gradients against float64, by the way they are summed.

    python benchmarks/sum_error.py
    python benchmarks/sum_error.py --ranks 8,64,512

Rings add in NCCL's order over nodes of eight ranks and round every partial sum, simulated
(:mod:`torch_ext_bucketing.testing.experiments`); an all-to-all adds in float32, in order of the
ranks and is rounded once. Error: the root mean square of the difference from the mean of the same
bfloat16 values in float64, over that of the mean. "rounded once" is the least that a result in
bfloat16 can have.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from benchmarks.command import document_of, parser_of, title
from torch_ext_bucketing.fsdp.rank_order import sum_in_rank_order
from torch_ext_bucketing.reports.base import columns
from torch_ext_bucketing.testing.sums import RingTopology, simulate_reduce_scatter

WAYS = ("bf16 rings", "bf16 wire, fp32 sums in rank order", "rounded once")
RANKS = (8, 16, 32, 64, 128, 256, 512)
ELEMENTS = 2**15
"""Of the buffer, about."""
MEANS = (0.0, 1.0)
"""Of all ranks' values, in their standard deviations around it: noise, and a gradient in it."""


def errors(ranks: int, mean: float) -> dict[str, float]:
    """Return the error of each way, for one buffer of normally distributed values."""
    generator = torch.Generator().manual_seed(ranks)
    size = max(1, ELEMENTS // ranks) * ranks
    gradients = (torch.randn(ranks, size, generator=generator) + mean).bfloat16()
    exact = torch.zeros(size, dtype=torch.float64)
    for gradient in gradients:
        exact += gradient.double()
    exact /= ranks
    rings = simulate_reduce_scatter(list(gradients), RingTopology(8), op=dist.ReduceOp.AVG)
    sums = sum_in_rank_order(gradients.flatten(), ranks, torch.float32, average=True)
    found = dict(zip(WAYS, (torch.cat(rings), sums, exact.bfloat16()), strict=True))
    return {
        way: float((x.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())
        for way, x in found.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = parser_of("sum_error.py", __doc__)
    parser.add_argument(
        "--ranks",
        type=lambda given: [int(n) for n in given.split(",")],
        default=list(RANKS),
        metavar="LIST",
        help=f"multiples of 8 (default: {','.join(map(str, RANKS))})",
    )
    args = parser.parse_args(argv)
    if any(n < 8 or n % 8 for n in args.ranks):
        parser.error("--ranks: nodes have eight ranks")
    found = {mean: {n: errors(n, mean) for n in args.ranks} for mean in MEANS}
    rows = [["mean", "ranks", *WAYS, "rings / sums"]]
    for mean, by_ranks in found.items():
        for n, of in by_ranks.items():
            ratio = of[WAYS[0]] / of[WAYS[1]]
            rows.append([f"{mean:g}", str(n), *(f"{of[w]:.2e}" for w in WAYS), f"{ratio:.1f}"])
    print(f"{title(document_of('benchmarks/sum_error.py', argv))}\n\n{columns(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
