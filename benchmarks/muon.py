"""Count and time the exchanges of Muon's matrices on a cost model, and balance their owners.

    python -m benchmarks.muon
    python -m benchmarks.muon --json results/muon.json

The first table has the work of the busiest rank over the mean, and a lower bound for any owners of
whole matrices. With experts, each is a matrix and has a home, by expert parallelism on as many
ranks as divide the experts. The last column has the share that stays there. The second table has
one optimizer step on nodes of eight H100s, FSDP over all ranks:

- ``owners`` is what ``train_step`` plans. A bucket travels under backward unless it has matrices
  of the first block, whose gradients come last;
- ``owners, clipped`` begins after backward: no gradient may travel before the norm is there;
- ``small gathered``: beside that, every rank computes the cheapest matrices from one gather, those
  of as many costs as make the step shortest, but at least of one;
- ``per block`` has an exchange per transformer block, in float32, on the same owners, as
  torchtitan's DistMuon can be configured. Its code is not run: it needs CUDA;
- ``gathers`` gathers every gradient in float32, and every rank computes all matrices;
- ``adamw`` is AdamW on the same shards, memory-bound.

A collective's time is that of the busiest rank. Ranks compute while the network is busy, and wait
for what they need. ``alone`` is the larger of all exchanges and of the busiest rank's kernels.
``chain`` is the time of the costliest matrix of the first block, there, computed and back, which no
owners of whole matrices shorten.

Exit status: 0.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch_ext_bucketing.planner.cost.machine import H100
from torch_ext_bucketing.reports.base import columns
from torch_ext_bucketing.step.matrix import EXCHANGE_BYTES, LEAST_BYTES
from torch_ext_bucketing.step.owners import (
    Matrix,
    Rectangle,
    Routes,
    choose_buckets,
    choose_owners,
    newton_schulz_flops,
)

from .command import add_json, document_of, parser_of, write_results

MACHINE = H100
RANKS = (8, 64, 512)
BALANCED = (64, 128, 256, 512)
STEPS = 5

Shape = tuple[int, int]


def _llama(layers: int, dim: int, key_value: int, hidden: int) -> list[list[Shape]]:
    block = [(dim, dim), (key_value, dim), (key_value, dim), (dim, dim)]
    return [[*block, (hidden, dim), (dim, hidden), (hidden, dim)]] * layers


def _mlp(dim: int, hidden: int) -> list[Shape]:
    return [(hidden, dim), (dim, hidden), (hidden, dim)]


def _sparse(
    attention: list[Shape], layers: int, dim: int, dense: int, shared: int, experts: int
) -> list[list[Shape]]:
    rest = [*attention, (experts, dim), *_mlp(dim, shared)]
    return [[*attention, *_mlp(dim, dense)], *([rest] * (layers - 1))]


# [rows, columns] of the matrices of each block, of published configurations.
_DEEPSEEK = [(3072, 2048), (576, 2048), (4096, 512), (2048, 2048)]
_KIMI = [(1536, 7168), (12288, 1536), (576, 7168), (16384, 512), (7168, 8192)]
MODELS = {
    "LLaMA-3 8B": _llama(32, 4096, 1024, 14336),
    "LLaMA-3 70B": _llama(80, 8192, 1024, 28672),
    "DeepSeek-V3 16B": _sparse(_DEEPSEEK, 27, 2048, 10944, 2816, 64),
    "Kimi-K2-like": _sparse(_KIMI, 61, 7168, 18432, 2048, 384),
}
# The matrices of a routed expert, their number in a layer, layers.
ROUTED = {
    "DeepSeek-V3 16B": (_mlp(2048, 1408), 64, 26),
    "Kimi-K2-like": (_mlp(7168, 2048), 384, 60),
}
TIMED = ("LLaMA-3 8B", "LLaMA-3 70B")


class Step(NamedTuple):
    """A modelled optimizer step: collectives, bytes that a rank sends, milliseconds."""

    way: str
    collectives: int
    sent: float
    network_ms: float
    kernels_ms: float
    ms: float

    @property
    def over_alone(self) -> float:
        """The step over the larger of network and kernels alone."""
        return self.ms / max(self.network_ms, self.kernels_ms)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = parser_of("python -m benchmarks.muon", __doc__)
    add_json(parser)
    args = parser.parse_args(argv)
    balance = [row for name in MODELS for row in _balance(name, False)]
    balance += [row for name in ROUTED for row in _balance(name, True)]
    steps = [
        (name, ranks, step)
        for name in TIMED
        for ranks in RANKS
        for step in _steps(MODELS[name], ranks)
    ]
    heading = ["model", "matrices", "ranks", "idle", "busiest / mean", "lower bound", "at home"]
    first = [heading]
    for name, count, ranks, idle, found, least, home in balance:
        shown = [f"{found:.3f}", f"{least:.3f}", "-" if home is None else f"{home:.1%}"]
        first.append([name, str(count), str(ranks), str(idle), *shown])
    second = [
        [
            "model",
            "ranks",
            "way",
            "collectives",
            "MiB sent",
            "network ms",
            "kernels ms",
            "ms",
            "/ alone",
            "chain ms",
        ]
    ]
    chains = {(name, n): _chain_ms(MODELS[name][0], n) for name in TIMED for n in RANKS}
    for name, ranks, s in steps:
        numbers = [f"{s.sent / 2**20:.0f}", f"{s.network_ms:.1f}", f"{s.kernels_ms:.1f}"]
        shown = [*numbers, f"{s.ms:.1f}", f"{s.over_alone:.2f}"]
        second.append([name, str(ranks), s.way, str(s.collectives), *shown])
        second[-1].append(f"{chains[name, ranks]:.1f}" if "owners" in s.way else "-")
    document = document_of("python -m benchmarks.muon", argv)
    document["balance"] = balance
    document["steps"] = [[name, ranks, *s, s.over_alone] for name, ranks, s in steps]
    write_results(args.json, document, f"{columns(first)}\n\n{columns(second)}")
    return 0


def _costs(shapes: Sequence[Shape]) -> list[int]:
    return [newton_schulz_flops(*shape, STEPS) for shape in shapes]


def _arriving(blocks: Sequence[Sequence[Shape]]) -> list[Shape]:
    return [shape for block in reversed(blocks) for shape in reversed(block)]


def _loads(costs: Sequence[int], owners: Sequence[int], ranks: int) -> list[int]:
    loads = [0] * ranks
    for owner, cost in zip(owners, costs, strict=True):
        loads[owner] += cost
    return loads


def _balance(
    name: str, routed: bool
) -> Iterator[tuple[str, int, int, int, float, float, float | None]]:
    dense = _costs(_arriving(MODELS[name]))
    mlp, experts, layers = ROUTED[name] if routed else ([], 1, 0)
    each = _costs(mlp)
    costs = dense + each * experts * layers
    ordered, mean = sorted(costs, reverse=True), sum(costs)
    for ranks in BALANCED:
        loads, home = [0] * ranks, None
        choose_owners(dense, loads)
        if routed:
            # Expert parallelism on as many ranks as divide the experts; FSDP on the rest.
            parallel = math.gcd(experts, ranks)
            at = [
                range(e * parallel // experts, ranks, parallel)
                for _ in range(layers)
                for _ in mlp
                for e in range(experts)
            ]
            stacked = [c for _ in range(layers) for c in each for _ in range(experts)]
            owners = choose_owners(stacked, loads, at)
            home = sum(o in h for o, h in zip(owners, at, strict=True)) / len(at)
        # One rank has the costliest matrix, and one has k + 1 of the first k * ranks + 1.
        floor = [1.0] + [
            (k + 1) * ordered[k * ranks] * ranks / mean for k in range(-(-len(costs) // ranks))
        ]
        shown = f"{name} with experts" if routed else name
        busiest = max(loads) * ranks / mean
        yield shown, len(costs), ranks, loads.count(0), busiest, max(floor), home


def _kernel_ms(nbytes: float) -> float:
    return nbytes / MACHINE.bandwidth * 1e3


def _ns_ms(flops: float) -> float:
    return flops / MACHINE.flops["bfloat16"] * 1e3


def _network_ms(kind: str, ranks: int, nbytes: int) -> float:
    ms = MACHINE.network_ms(kind, range(ranks), nbytes)
    assert ms is not None
    return ms


def _steps(blocks: Sequence[Sequence[Shape]], ranks: int) -> Iterator[Step]:
    shapes = _arriving(blocks)
    costs, elements = _costs(shapes), sum(rows * columns for rows, columns in shapes)
    owners = choose_owners(costs, [0] * ranks)
    nbytes = [2 * rows * columns for rows, columns in shapes]
    given = shapes, costs, owners, ranks
    buckets = choose_buckets(costs, nbytes, owners, EXCHANGE_BYTES, LEAST_BYTES)
    yield _exchanged("owners", *given, buckets, 2, len(shapes) - len(blocks[0]))
    yield _exchanged("owners, clipped", *given, buckets, 2)
    tried = [_small_gathered(shapes, ranks, most) for most in sorted(set(costs))[:-1]]
    yield min(tried, key=lambda step: step.ms)
    sizes = [len(block) for block in reversed(blocks)]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    by_block = [list(range(s, s + n)) for s, n in zip(starts, sizes, strict=True)]
    yield _exchanged("per block", *given, by_block, 4)
    gathers = [
        _network_ms("all_gather", ranks, 4 * r * c * (ranks + 1) // ranks) for r, c in shapes
    ]
    kernels = _ns_ms(sum(costs)) + _kernel_ms(24 * elements / ranks)
    network = sum(gathers)
    end = free = 0.0
    for gather, cost in zip(gathers, costs, strict=True):
        free += gather
        end = max(end, free) + _ns_ms(cost)
    total = end + _kernel_ms(24 * elements / ranks)
    yield Step("gathers", len(shapes), 4 * elements / ranks * (ranks - 1), network, kernels, total)
    # Reads parameter, gradient and two moments in float32, writes all but the gradient.
    adamw = _kernel_ms(28 * elements / ranks)
    yield Step("adamw", 0, 0, 0, adamw, adamw)


def _small_gathered(shapes: Sequence[Shape], ranks: int, most: int) -> Step:
    """Follow a step after backward. All ranks compute the matrices of at most a cost."""
    small = [shape for shape in shapes if newton_schulz_flops(*shape, STEPS) <= most]
    rest = [shape for shape in shapes if newton_schulz_flops(*shape, STEPS) > most]
    costs = _costs(rest)
    owners = choose_owners(costs, [0] * ranks)
    nbytes = [2 * rows * columns for rows, columns in rest]
    buckets = choose_buckets(costs, nbytes, owners, EXCHANGE_BYTES, LEAST_BYTES)
    bytes_each = sum(2 * rows * columns for rows, columns in small)
    gather = _network_ms("all_gather", ranks, bytes_each * (ranks + 1) // ranks)
    kernels = _ns_ms(sum(_costs(small))) + _kernel_ms(24 * bytes_each / 2 / ranks)
    way = "small gathered"
    step = _exchanged(way, rest, costs, owners, ranks, buckets, 2, extra=(gather, kernels))
    return step._replace(sent=step.sent + bytes_each / ranks * (ranks - 1))


def _chain_ms(block: Sequence[Shape], ranks: int) -> float:
    """Time the costliest matrix of a block alone, from its shards to its owner and back."""
    times = []
    for shape in block:
        exchange = Routes([_matrix(shape, 0, ranks)], (ranks,), (0,))
        stages = [*exchange.to_owners(), *exchange.to_shards()]
        travel = (_network_ms("all_to_all", ranks, 2 * sum(s.most)) for s in stages)
        times.append(sum(travel) + _ns_ms(newton_schulz_flops(*shape, STEPS)))
    return max(times)


def _exchanged(
    way: str,
    shapes: Sequence[Shape],
    costs: Sequence[int],
    owners: Sequence[int],
    ranks: int,
    buckets: Sequence[Sequence[int]],
    itemsize: int,
    under_backward: int = 0,
    extra: tuple[float, float] = (0.0, 0.0),
) -> Step:
    """Follow the nodes of :mod:`torch_ext_bucketing.step.matrix`, rank by rank."""
    there, back = list[float](), list[float]()
    packs, adds, work = list[float](), list[float](), list[list[float]]()
    sent = 0
    for of in buckets:
        matrices = [_matrix(shapes[i], owners[i], ranks) for i in of]
        exchange = Routes(matrices, (ranks,), (0,))
        for stages, times in ((exchange.to_owners(), there), (exchange.to_shards(), back)):
            (stage,) = stages
            times.append(_network_ms("all_to_all", ranks, itemsize * sum(stage.most)))
            sent += itemsize * stage.most[0]
        part = sum(shapes[i][0] * shapes[i][1] for i in of) / ranks
        packs.append(_kernel_ms((12 + itemsize) * part))
        adds.append(_kernel_ms((8 + itemsize) * part))
        loads = _loads([costs[i] for i in of], [owners[i] for i in of], ranks)
        work.append([_ns_ms(flops) for flops in loads])
    packed, network = 0.0, extra[0]
    arrived, returned = list[float](), list[float]()
    for of, pack, time in zip(buckets, packs, there, strict=True):
        # Under backward, which ends at 0, if no gradient is of the block that comes last.
        if under_backward and all(i < under_backward for i in of):
            arrived.append(0.0)
        else:
            packed += pack
            network = max(network, packed) + time
            arrived.append(network)
    free = [max(packed, extra[0]) + extra[1]] * ranks
    for k, times in enumerate(work):
        free = [max(f, arrived[k]) + t for f, t in zip(free, times, strict=True)]
        network = max(network, max(free)) + back[k]
        returned.append(network)
    end = max(free)
    for arrival, add in zip(returned, adds, strict=True):
        end = max(end, arrival) + add
    busiest = max(map(sum, zip(*work, strict=True))) + sum(packs) + sum(adds) + extra[1]
    both = sum(there) + sum(back) + extra[0]
    return Step(way, 2 * len(buckets) + bool(extra[0]), sent, both, busiest, end)


def _matrix(shape: Shape, owner: int, ranks: int) -> Matrix:
    rows, columns = shape
    each = -(-rows // ranks)
    blocks: dict[tuple[int, ...], Rectangle] = {
        (r,): Rectangle(min(r * each, rows), 0, max(0, min(each, rows - r * each)), columns)
        for r in range(ranks)
    }
    return Matrix(rows, columns, (True,), blocks, (owner,))


if __name__ == "__main__":
    sys.exit(main())
