"""Backward's gathers in a smaller group (``ReshardAfterForward(to=...)``): bits, memory and time.

    python -m benchmarks.keep_to ranks                      real ranks, beside eager FSDP2
    python -m benchmarks.keep_to estimate                   graphs of real size, on a cost model
    python -m benchmarks.keep_to estimate --layers 4        with fewer layers, in a minute
    python -m benchmarks.keep_to estimate --between 10      with 10 GB/s of each rank between nodes

``ranks`` trains models on four ranks of two simulated nodes: eager FSDP2 with
``reshard_after_forward=2``, and compiled with ``to=2`` and eager's buckets, on ``aot_eager``. After
every step the hash of all ranks' weights is compared, and what both launch per step is counted by
the ranks of its group.

``estimate`` traces forward and backward in three ways (gathered again over all ranks, again inside
a node, and kept gathered), buckets and schedules each on a machine with two network levels, and
prints the time of forward and backward and the larger of their peaks. Parameters that backward does
not read are added to its peak, for they are there as well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
import torch.nn as nn

import torch_ext_bucketing as teb
from torch_ext_bucketing.fsdp.tags import tag_of
from torch_ext_bucketing.testing.demo.table import columns
from torch_ext_bucketing.testing.ranks import Rank, preload, run_ranks

from .machines import MACHINE, nodes

__all__ = ["MACHINE", "Estimate", "estimate"]

GIB = 2**30

CONFIGS = ("llama3_8b_fsdp64", "deepseek_v3_fsdp64_ep8")
MODELS = ("llama", "moe", "vit", "uneven", "tied_chunked", "checkpointed")
RANKS, NODES, TO = 4, 2, 2


@dataclass(frozen=True)
class Estimate:
    """One way to train one model.

    Args:
        graph: name of the configuration, of :data:`.graphs.CONFIGS`.
        way: what becomes of gathered parameters after forward.
        forward_ms: the scheduled forward.
        backward_ms: the scheduled backward.
        peak_bytes: the larger of the two peaks.
        backward_gathers: number of backward's gathers by the ranks of their group, unbucketed.
    """

    graph: str
    way: str
    forward_ms: float
    backward_ms: float
    peak_bytes: int
    backward_gathers: dict[int, int]

    @property
    def step_ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms


def estimate(
    name: str, layers: int | None = None, machine: teb.Machine = MACHINE
) -> list[Estimate]:
    """The three ways of one configuration. Starts the fake world that it belongs to.

    Args:
        name: of :data:`.graphs.CONFIGS`; its ``fsdp`` ranks must be neighbours.
        layers: instead of the model's own number.
        machine: has ``ranks_per_node``, the ranks that backward gathers among.
    """
    from .graphs import CONFIGS
    from .models import DeepSeek, DeepSeekConfig, Llama, LlamaConfig
    from .parallel import shard_deepseek, shard_llama, start_world
    from .tracing import Progress, trace_model

    config = CONFIGS[name]
    world = start_world(config.layout)
    model = config.model if layers is None else replace(config.model, layers=layers)

    def build() -> nn.Module:
        if isinstance(model, LlamaConfig):
            llama = Llama(model)
            shard_llama(llama, world)
            return llama
        assert isinstance(model, DeepSeekConfig)
        assert world.expert is not None
        deepseek = DeepSeek(model, world.expert.get_group())
        shard_deepseek(deepseek, world)
        return deepseek

    node = machine.ranks_per_node
    ways = {
        "again, all ranks": [teb.ReshardAfterForward()],
        f"again, {node} ranks": [teb.ReshardAfterForward(to=node)],
        "kept": [],
    }
    graphs = trace_model(build, (model.batch, model.seq), Progress(name, model.layers), ways)
    found = []
    for way in ways:
        forward, backward = graphs["forward", way], graphs["backward", way]
        gathers = Counter(_gather_sizes(backward))
        idle = _left_out(forward, backward)
        (forward_ms, forward_peak), (backward_ms, backward_peak) = (
            _scheduled(gm, machine) for gm in (forward, backward)
        )
        peak = max(forward_peak, backward_peak + idle)
        found.append(Estimate(name, way, forward_ms, backward_ms, peak, dict(gathers)))
    return found


def _gather_sizes(gm: fx.GraphModule) -> Iterator[int]:
    from torch_ext_bucketing.graph.collectives import group_size, kind_of

    for node in gm.graph.nodes:
        if kind_of(node) == "all_gather" and tag_of(node) is not None:
            yield group_size(node)


def _left_out(forward: fx.GraphModule, backward: fx.GraphModule) -> int:
    """Bytes of forward's inputs that are none of backward's."""
    there = {n.name for n in backward.graph.find_nodes(op="placeholder")}
    values = (
        n.meta["val"]
        for n in forward.graph.find_nodes(op="placeholder")
        if n.name not in there and isinstance(n.meta.get("val"), torch.Tensor)
    )
    return sum(v.numel() * v.element_size() for v in values)


def _scheduled(gm: fx.GraphModule, machine: teb.Machine) -> tuple[float, int]:
    """Milliseconds and peak bytes of a graph, bucketed up to chosen caps and scheduled."""
    one = teb.BucketAndSchedule([teb.Overlap(), teb.PeakMemory(ratio=1.02)], machine=machine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", teb.BoundNotKeptWarning)
        one(gm)
    report = one.last_report
    assert report is not None
    return report.step_ms[1], report.peak_bytes[1]


# --- real ranks --------------------------------------------------------------------------


@contextlib.contextmanager
def _eager_launches() -> Iterator[Counter[tuple[str, int]]]:
    """What eager FSDP2 launches in the block, by kind and ranks."""
    found: Counter[tuple[str, int]] = Counter()
    names = {
        "all_gather_into_tensor": "all_gather",
        "all_gather_single": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "reduce_scatter_single": "reduce_scatter",
    }
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[names[name], kwargs["group"].size()] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _compare(rank: Rank, models: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """One rank's digests and launches, model by model."""
    from benchmarks.parity_cells import CHANNELS, CHUNK_BYTES
    from torch_ext_bucketing.testing.ring import RingTopology, ring_rank

    topology = RingTopology(RANKS // NODES, CHANNELS, CHUNK_BYTES, NODES)
    with ring_rank(rank, topology):
        return _compare_in_group(rank, models, steps)


def _compare_in_group(rank: Rank, models: Sequence[str], steps: int) -> list[dict[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from benchmarks import parity_ranks as ranks
    from benchmarks.parity_cells import Cell
    from benchmarks.parity_models import batch_of, build, unit_names
    from torch_ext_bucketing.graph.collectives import group_size, kind_of
    from torch_ext_bucketing.testing.training import train

    def trained(model: nn.Module, run: Any) -> list[str]:
        def step(number: int) -> Any:
            loss = run(*batch_of(number, rank.rank))
            loss.backward()
            return loss

        return train(model, step, steps).digests

    rows = []
    for name in models:
        mesh = init_device_mesh("cpu", (RANKS,))
        reference = Cell(name, NODES, RANKS, "aot_eager", "fsdp", "bf16").reference
        eager = build(name, layers=2)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, cast_forward_inputs=False)
        for unit in unit_names(name, eager):
            fully_shard(
                eager.get_submodule(unit), mesh=mesh, mp_policy=policy, reshard_after_forward=TO
            )
        with _eager_launches() as launched:
            expected = trained(eager, eager)

        model, order = ranks.compilable_model(reference, mesh, 2)
        reshard = teb.ReshardAfterForward(to=TO)
        passes = [*ranks.rewrites(), reshard, ranks.bucket_units(order, True)]
        sent: Counter[tuple[str, int]] = Counter()

        def counted(gm: fx.GraphModule, inputs: Any, sent: Any = sent) -> Any:
            starts = [n for n in gm.graph.nodes if kind_of(n) is not None]
            each = Counter((str(kind_of(n)), group_size(n)) for n in starts)

            def run(*args: Any) -> Any:
                sent.update(each)
                return gm.forward(*args)

            return run

        torch._dynamo.reset()
        compiler = teb.backend(counted, passes, model)
        found = trained(model, torch.compile(model, backend=compiler, fullgraph=True))
        assert reshard.last_report is not None
        rows.append(
            {
                "model": name,
                "equal": [a == b for a, b in zip(expected, found, strict=True)],
                "eager": {f"{k} {n}": c / steps for (k, n), c in sorted(launched.items())},
                "ours": {f"{k} {n}": c / steps for (k, n), c in sorted(sent.items())},
                "units": len(order.units),
                "kept_bytes": sum(r.saved_bytes for r in reshard.last_report.resharded),
            }
        )
    return rows


def compare(models: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """Train on real ranks; a row per model, and the steps after which all had eager's bits."""
    by_rank = run_ranks(_compare, RANKS, tuple(models), steps, timeout_s=3000)
    rows = []
    for same in zip(*by_rank, strict=True):
        first = same[0]
        equal = sum(all(of_step) for of_step in zip(*(r["equal"] for r in same), strict=True))
        rows.append({**first, "equal": equal, "steps": steps})
    return rows


# --- command line ------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.keep_to", description=(__doc__ or "").split("\n\n", 1)[0]
    )
    parser.add_argument("what", choices=("ranks", "estimate"))
    parser.add_argument("--only", metavar="NAMES", help="models or configurations, by commas")
    parser.add_argument("--steps", type=int, default=25, help="of a real run (default: 25)")
    parser.add_argument("--layers", type=int, help="of an estimate, instead of each model's own")
    parser.add_argument(
        "--between", type=float, default=40.0, help="GB/s of a rank between nodes (default: 40)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args(arguments)
    known = MODELS if options.what == "ranks" else CONFIGS
    names = options.only.split(",") if options.only else list(known)
    unknown = [n for n in names if n not in known]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    print(f"torch {torch.__version__}", flush=True)
    if options.what == "ranks":
        rows = compare(names, options.steps)
        lines = [["model", "steps equal", "units", "kept, B", "eager, per step", "ours, per step"]]
        for row in rows:
            said = [", ".join(f"{k}: {c:g}" for k, c in row[w].items()) for w in ("eager", "ours")]
            equal = f"{row['equal']} of {row['steps']}"
            lines.append([row["model"], equal, str(row["units"]), str(row["kept_bytes"]), *said])
        failed = any(row["equal"] != row["steps"] for row in rows)
    else:
        machine = nodes(options.between)
        found = [e for name in names for e in estimate(name, options.layers, machine)]
        lines = [
            ["graph", "gathered", "forward ms", "backward ms", "step ms", "peak GiB", "gathers"]
        ]
        for e in found:
            gathers = ", ".join(f"{n} of {k}" for k, n in sorted(e.backward_gathers.items()))
            times = [f"{ms:.1f}" for ms in (e.forward_ms, e.backward_ms, e.step_ms)]
            lines.append([e.graph, e.way, *times, f"{e.peak_bytes / GIB:.2f}", gathers or "-"])
        rows, failed = [asdict(e) for e in found], False
    print(columns(lines))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "rows": rows}, file, indent=1)
    return int(failed)


if __name__ == "__main__":
    preload("benchmarks.parity_ranks")
    sys.exit(main())
