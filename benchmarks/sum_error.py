"""Simulate the error of bfloat16 gradients against float64, by the way they are summed.

    python benchmarks/sum_error.py
    python benchmarks/sum_error.py --ranks 8,64,512 --plot error.png

Rings add in NCCL's order over nodes of eight ranks and round every partial sum, simulated
(:mod:`torch_ext_bucketing.testing.differences`); an all-to-all adds in float32, in order of the
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
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it (needs matplotlib)")
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
    if args.plot is not None:
        plot(found, args.plot)
    return 0


def plot(found: dict[float, dict[int, dict[str, float]]], path: Path) -> None:
    """Plot errors over ranks, a figure for each mean."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(9, 3.6), sharey=True)
    for ax, (mean, by_ranks) in zip(axes, found.items(), strict=True):
        for way, style in zip(WAYS, ("o-", "s-", "k:"), strict=True):
            ax.loglog(list(by_ranks), [of[way] for of in by_ranks.values()], style, label=way)
        ax.set_xscale("log", base=2)
        ax.set_title(f"values: normal around {mean:g}")
        ax.set_xlabel("ranks")
    axes[0].set_ylabel("relative error")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
