"""Run torch's bucketing passes on a set of graphs and print all nodes as JSON.

If torch has the entries of the patch series, the passes also run with all of them set; ``--set``
runs only these. One graph has uneven shards and runs on two ranks. ``test_patch_neutrality.py``
runs this on the unpatched torch and on the patched one.
"""

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from collective_graphs import (
    GROUP_FILTER,
    MAX_BETWEEN,
    PAYLOAD_ORDER,
    all_gather,
    all_reduce,
    reduce_scatter,
    trace,
)
from torch._inductor import config
from torch.testing._internal.distributed.fake_pg import FakeStore

WORLD = 4
LAST = WORLD - 1  # the rank with the short shards, which it pads


def describe(gm: fx.GraphModule) -> list[Any]:
    """Describe each node by everything that a pass can change, keys of metadata included."""
    return [
        [
            n.name,
            n.op,
            str(n.target),
            repr(n.args),
            repr(n.kwargs),
            sorted(n.meta),
            repr(n.meta.get("custom")),
            repr(n.meta.get("bucketing_custom_sources")),
            repr(getattr(n.meta.get("val"), "shape", None)),
        ]
        for n in gm.graph.nodes
    ]


def parameters(dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> list[torch.Tensor]:
    shapes = [(8, 3), (8, 2), (4, 5), (16,), (8, 1), (4, 4), (12, 2), (4,)]
    return [torch.zeros(s, dtype=dtypes[i % len(dtypes)]) for i, s in enumerate(shapes)]


def uneven_step(rank: int, group: dist.ProcessGroup) -> tuple[Callable[..., Any], list[Any]]:
    """Make a step with DTensor's uneven shards of a few rows, and writes to a counter."""
    rows = (3, 8, 5, 2, 9, 4)

    def shard(n: int) -> tuple[int, int]:
        each = -(-n // WORLD)
        return max(0, min(n, each * (rank + 1)) - each * rank), each

    def step(counter: torch.Tensor, *shards: torch.Tensor) -> Any:
        grads = []
        for n, x in zip(rows, shards, strict=True):
            mine, each = shard(n)
            x = torch.ops.prims.convert_element_type(x, torch.bfloat16)
            counter.add_(1)
            if mine < each:
                x = torch.ops.aten.constant_pad_nd(x, [0, 0, 0, each - mine])
            full = all_gather(x, group)[:n]
            grad = torch.cat([full * full.sum(), torch.zeros(each * WORLD - n, 2)])
            grad = reduce_scatter(grad, group)
            grads.append(grad[:mine] if mine < each else grad)
        return grads

    return step, [torch.zeros(()), *(torch.zeros(shard(n)[0], 2) for n in rows)]


def build(rank: int) -> dict[str, tuple[Callable[..., Any], list[torch.Tensor]]]:
    dp, ep, tp = (
        dist.group.WORLD,
        dist.new_group(range(WORLD), group_desc="ep"),
        dist.new_group([0, WORLD - 1]),
    )

    def gathers(*xs: torch.Tensor) -> Any:
        return [all_gather(x, dp) + 1 for x in xs]

    def casting_gathers(*xs: torch.Tensor) -> Any:
        cast = torch.ops.prims.convert_element_type
        return [all_gather(cast(x, torch.bfloat16), dp) * 2 for x in xs]

    def scatters(*xs: torch.Tensor) -> Any:
        return [reduce_scatter(x + 1, dp, "avg") for x in xs]

    def reductions(*xs: torch.Tensor) -> Any:
        return [all_reduce(x * 2, dp) for x in xs]

    def hybrid_step(*xs: torch.Tensor) -> Any:
        full = [all_gather(x, dp) for x in xs]
        act = full[0].sum() + sum((f * 2).sum() for f in full)
        shards = [reduce_scatter(f * act, dp, "avg") for f in full]
        return [all_reduce(s, ep) for s in shards]

    def interleaved(*xs: torch.Tensor) -> Any:
        """Run FSDP on two meshes, with a tensor-parallel collective per layer between them."""
        act = torch.zeros(8, 8)
        grads = []
        for i, x in enumerate(xs):
            w = all_gather(x, ep if i % 3 == 0 else dp)
            act = all_reduce(act @ torch.ones(8, 8) + w.sum(), tp)
            grads.append(reduce_scatter(w * act.sum(), ep if i % 3 == 0 else dp))
        return grads

    def dependent(*xs: torch.Tensor) -> Any:
        """Gather an activation between gathers of parameters, so that buckets must split."""
        first = all_gather(xs[0], dp)
        second = all_gather(first[:4] + 1, dp)
        rest = [all_gather(x, dp) for x in xs[1:]]
        return [second, *rest, reduce_scatter(second, dp)]

    def scatters_need_gathers(x: torch.Tensor, y: torch.Tensor) -> Any:
        """Make merged gathers leave a scatter ahead of the gather that it needs."""
        return reduce_scatter(all_gather(x, dp), dp), all_gather(reduce_scatter(y, dp), dp)

    def layers(*xs: torch.Tensor) -> Any:
        """Gather for each layer and scatter in reverse, so that both kinds are merged."""
        full = [all_gather(x, dp) for x in xs]
        act = torch.ones(())
        for f in full:
            act = all_reduce(act * f.sum(), tp)
        return [reduce_scatter(f * act, dp) for f in reversed(full)]

    def recomputed(*xs: torch.Tensor) -> Any:
        """Gather, read and scatter by layers, so that readers stay ahead of merged gathers."""
        act, grads = torch.ones(()), []
        for x in xs:
            full = all_gather(x, dp)
            act = all_reduce(act * full.sum(), tp)
            grads.append(reduce_scatter(full * act, dp))
        return grads

    def uneven_copy(x: torch.Tensor, y: torch.Tensor) -> Any:
        """Copy what is gathered on one rank, as for a short shard."""
        first = all_gather(x, dp)
        mine = first.clone() if rank else first
        scattered = [(first * 2, ep), (mine * 3, dp), (first * 4, dp)]
        return *(reduce_scatter(t, group) for t, group in scattered), all_gather(y, dp)

    fp32, mixed = parameters(), parameters((torch.float32, torch.bfloat16))
    return {
        "gathers": (gathers, fp32),
        "gathers_mixed_dtypes": (gathers, mixed),
        "casting_gathers": (casting_gathers, fp32),
        "reduce_scatters": (scatters, fp32),
        "reduce_scatters_mixed_dtypes": (scatters, mixed),
        "all_reduces": (reductions, mixed),
        "hybrid_step": (hybrid_step, fp32),
        "interleaved": (interleaved, fp32),
        "dependent": (dependent, fp32),
        "scatters_need_gathers": (scatters_need_gathers, fp32[:2]),
        "layers": (layers, fp32),
        "recomputed": (recomputed, fp32),
        "uneven_copy": (uneven_copy, fp32[:2]),
        "uneven_with_writes": uneven_step(rank, dp),
    }


def passes() -> dict[str, Callable[[fx.GraphModule], Any]]:
    from torch._inductor.fx_passes import bucketing, fsdp
    from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing
    from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing
    from torch._inductor.pattern_matcher import stable_topological_sort

    def small(_: int) -> float:
        return 600 / 2**20

    def greedy(mode: str, cap: Callable[[int], float]) -> Callable[[fx.GraphModule], None]:
        def run(gm: fx.GraphModule) -> None:
            bucketing.bucket_reduce_scatter(gm, cap, mode.replace("_multidtype", ""))
            bucketing.bucket_all_reduce(gm, cap)
            bucketing.bucket_all_gather(gm, cap, mode)
            stable_topological_sort(gm.graph)

        return run

    def fsdp_passes(gm: fx.GraphModule) -> None:
        fsdp.bucket_fsdp_reduce_scatter(gm, small)
        fsdp.bucket_fsdp_all_gather(gm, small)

    def overlap(gm: fx.GraphModule) -> None:
        schedule_overlap_bucketing(
            gm,
            collective_bucketing=True,
            insert_overlap_deps=False,
            custom_runtime_estimation=lambda node, size: 1.0,
            pre_bucketing_fsdp_collectives=True,
            pre_bucketing_fsdp_collectives_bucket_cap_mb=600 / 2**20,
        )

    def pre_bucket(gm: fx.GraphModule) -> None:
        fsdp.pre_bucket_fsdp_collectives(gm, "custom_ops", 0.001)
        stable_topological_sort(gm.graph)  # as the overlap scheduler does

    def pre_bucket_unsorted(gm: fx.GraphModule) -> None:
        fsdp.pre_bucket_fsdp_collectives(gm, "default", 0.001)

    def manual(gm: fx.GraphModule) -> None:
        for i, node in enumerate(gm.graph.nodes):
            layer = f"layers.{i * 3 // len(gm.graph.nodes)}"
            node.meta["nn_module_stack"] = {layer: (layer, torch.nn.Module)}
        manual_overlap_bucketing(
            gm, ["layers.0", ["layers.1", "layers.2"]], insert_overlap_deps=False
        )

    return {
        "default": greedy("default", lambda _: 100.0),
        "default_small": greedy("default", small),
        "custom_ops": greedy("custom_ops", lambda _: 100.0),
        "multidtype": greedy("custom_ops_multidtype", small),
        "coalesced": greedy("coalesced", lambda _: 100.0),
        "fsdp": fsdp_passes,
        "pre_bucket": pre_bucket,
        "pre_bucket_unsorted": pre_bucket_unsorted,
        "overlap": overlap,
        "manual": manual,
    }


def results_of(rank: int, **options: Any) -> dict[str, Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    results: dict[str, Any] = {}
    for graph, (fn, inputs) in build(rank).items():
        if rank == LAST and "uneven" not in graph:
            continue  # the graph is the same on all ranks
        traced = trace(fn, *inputs)
        for name, run in passes().items():
            copied = fx.Graph()
            copied.output(copied.graph_copy(traced.graph, {}))
            gm = fx.GraphModule(traced, copied)
            for i, node in enumerate(gm.graph.nodes):
                node.meta["custom"] = {"index": i}
                node.meta["order"] = -i
            try:
                with config.patch(options) if options else contextlib.nullcontext():
                    run(gm)
            except Exception as e:
                # Some passes fail on some graphs; both torches must fail alike.
                results[f"{graph}/{name}"] = [type(e).__name__, str(e).splitlines()[:1]]
            else:
                results[f"{graph}/{name}"] = describe(gm)
    dist.destroy_process_group()
    return results


def main() -> None:
    results: dict[str, Any] = {}
    if "--set" not in sys.argv:
        results = results_of(0)
        results |= {f"{name} on {LAST}": nodes for name, nodes in results_of(LAST).items()}
    has_entries = hasattr(config.aten_distributed_optimizations, "bucket_payload_order_key")
    options = {PAYLOAD_ORDER: "order", GROUP_FILTER: ["default_pg", "ep"], MAX_BETWEEN: None}
    with_all = results_of(0, **options) if has_entries else {}
    print(json.dumps({"unset": results, "set": with_all}))


if __name__ == "__main__":
    main()
