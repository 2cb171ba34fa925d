"""Choose kept units on real ranks; compare with eager FSDP2 that keeps the same units.

    python -m benchmarks.keep_ranks                         a minute on idle cores
    python -m benchmarks.keep_ranks --backend inductor      beside the same units kept by name
    python -m benchmarks.keep_ranks --activations           activations are recomputed, too
    python -m benchmarks.keep_ranks --device cuda           on NCCL, with GPUs or on one
    python -m benchmarks.keep_ranks --json out.json

The demo's model trains on ranks of a ring group (:mod:`torch_ext_bucketing.testing.ring`), compiled
with ``ReshardAfterForward("auto")``, ``BucketByUnit`` and ``Schedule``; and as eager FSDP2,
``reshard_after_forward=False`` on the units that were kept. It compares

- the bits of losses and weights after some steps;
- the collectives of a step, as the profiler counts them, with the plan;
- the largest number of bytes that the allocator of rank 0 holds in a step, as the profiler reports
  them, above what it held before the model was made, with the estimated peak. A ring group holds
  all ranks' contributions between a start and its wait, so this is measured again on gloo, and on
  a fake group, whose collectives hold nothing of their own. With GPUs the ranks talk over NCCL, the
  model is larger, the bytes are those asked of CUDA's allocator, and no other group is tried.

Inductor's kernels round differently than eager's. With it losses and weights are compared with
those of the same compile that keeps the same units by name.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_ext_bucketing as teb
from benchmarks.command import add_json, add_number, parser_of, write_json
from benchmarks.eager_parity.devices import start
from torch_ext_bucketing.passes.combine_uses import CombineUses
from torch_ext_bucketing.reports.planner import KeepReport
from torch_ext_bucketing.testing.ranks import Rank, run_ranks
from torch_ext_bucketing.testing.ring import ring_rank
from torch_ext_bucketing.testing.training import ModelConfig, Transformer, digest

Backend = Literal["aot_eager", "inductor"]
WORLD = 4
STEPS = 5
LAYERS = 4
CONFIGS = {
    "cpu": ModelConfig(vocab=512, dim=256, layers=LAYERS, hidden=768, max_seq=64),
    "cuda": ModelConfig(8192, 1024, LAYERS, heads=8, kv_heads=4, hidden=2816, max_seq=256),
}
BATCH = 2
_REQUESTED = "requested_bytes.all"
UNITS = [["embed"], *([f"blocks.{i}"] for i in range(LAYERS)), ["norm", "output"]]


class Loss(Transformer):
    """A loss that is compiled with the model: no estimate covers memory outside of the graphs."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens).float().square().mean()


def _model(device: str) -> Loss:
    torch.manual_seed(0)
    return Loss(CONFIGS[device]).to(device)


def _tokens(rank: int, step: int, device: str) -> torch.Tensor:
    config = CONFIGS[device]
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(config.vocab, (BATCH, config.max_seq), generator=generator).to(device)


def _train(run: Any, model: Loss, rank: int, steps: int, first: int = 0) -> list[float]:
    """Run plain gradient descent, without momentum: the optimizer holds nothing."""
    losses, parameters = [], list(model.parameters())
    for step in range(first, first + steps):
        loss = run(_tokens(rank, step, parameters[0].device.type))
        loss.backward()
        losses.append(loss.item())
        del loss
        with torch.no_grad():
            for p in parameters:
                p.sub_(p.grad, alpha=0.1)
                p.grad = None
    return losses


def profiled(run: Any) -> tuple[dict[str, int], int]:
    """Return collectives by kind, and the most bytes allocated above those at the start."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()[f"{_REQUESTED}.current"]
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=not cuda) as profile:
        run()
    starts = [event.name.removeprefix("_c10d_functional::") for event in profile.events()]
    kinds = ("all_gather_into_tensor", "reduce_scatter_tensor")
    counts = {kind: sum(name.startswith(kind) for name in starts) for kind in kinds}
    if cuda:
        return counts, torch.cuda.memory_stats()[f"{_REQUESTED}.peak"] - before
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = most = 0
    for _, nbytes in memory:
        held += nbytes
        most = max(most, held)
    return counts, most


def _rank(
    rank: Rank, group: str, world: int, backend: Backend, reshard: teb.ReshardAfterForward
) -> Any:
    """Compare on a ring group or NCCL; on gloo or a fake group measure only the peak."""
    device = "cuda" if group == "nccl" else "cpu"
    if group == "ring":
        with ring_rank(rank):
            return _compare(rank.rank, backend, reshard, device)
    if group == "fake":
        torch.set_num_threads(1)
        dist.init_process_group("fake", rank=rank.rank, world_size=world)
    else:
        start(rank, group)
    try:
        if group == "nccl":
            return _compare(rank.rank, backend, reshard, device)
        return int(_train_ours(rank.rank, backend, reshard, device)[-1])
    finally:
        dist.destroy_process_group()


def _train_ours(
    rank: int, backend: Backend, reshard: teb.ReshardAfterForward, device: str
) -> tuple[Any, ...]:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch._dynamo.reset()
    ours = teb.data_parallel(_model(device), mesh)
    order = teb.FSDPParamOrder.from_model(ours, units=UNITS)
    passes = [CombineUses(), reshard, teb.BucketByUnit(order), teb.Schedule(teb.Overlap())]
    compiler = teb.backend(backend, passes, ours)
    compiled = torch.compile(ours, backend=compiler)
    losses = _train(compiled, ours, rank, STEPS)
    weights = digest(ours)
    inputs = sum(p._local_tensor.nbytes for p in ours.parameters())  # type: ignore[attr-defined]
    counts, above = profiled(lambda: _train(compiled, ours, rank, 1, STEPS))
    buffers = sum(b.nbytes for b in ours.buffers())
    tokens = _tokens(0, 0, device).nbytes
    return compiler, losses, weights, counts, inputs + buffers + tokens + above


def _train_eager(rank: int, kept: Sequence[str], device: str) -> tuple[list[float], str]:
    """Train FSDP2 that keeps some units gathered."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    eager = _model(device)
    for unit in UNITS:
        modules = [eager.get_submodule(name) for name in unit]
        fully_shard(modules, mesh=mesh, reshard_after_forward=", ".join(unit) not in kept)
    fully_shard(eager, mesh=mesh)
    return _train(eager, eager, rank, STEPS), digest(eager)


def _compare(
    rank: int, backend: Backend, reshard: teb.ReshardAfterForward, device: str
) -> dict[str, Any]:
    compiler, losses, weights, counts, peak = _train_ours(rank, backend, reshard, device)
    choice = next(r for r in compiler.last_report().rewrites if isinstance(r, KeepReport))
    gathered = [u for u in choice.units if u.parameters]
    kept = [u.name for u in gathered if u.kept]
    if backend == "inductor":
        names = [n for unit in kept for n in unit.split(", ")]
        _, expected, values, *_ = _train_ours(
            rank, backend, teb.ReshardAfterForward(keep=names), device
        )
    else:
        expected, values = _train_eager(rank, kept, device)
    same = (losses, weights) == (expected, values)
    report = compiler.last_report()
    gathers = sum(r.collectives_after.get("all_gather", 0) for r in report.graphs)
    return {
        "backend": backend,
        "kept": list(choice.kept),
        "units": len(gathered),
        "same_bits": same,
        "planned_gathers": len(UNITS) + len(gathered) - len(kept),
        "gathers_in_graphs": gathers,
        "counts": counts,
        "estimated_peak": max(s.peak_bytes[1] for s in report.schedules),
        "estimate_of_choice": choice.peak_bytes[1],
        "bound": choice.bound_bytes,
        "measured_peak": peak,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status, 1 if something differs."""
    parser = parser_of("python -m benchmarks.keep_ranks", __doc__)
    add_number(parser, "world", WORLD, "ranks")
    parser.add_argument("--backend", choices=("aot_eager", "inductor"), default="aot_eager")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ratios", type=float, nargs="+", default=[1.02, 1.06, 2.0])
    parser.add_argument("--activations", action="store_true", help="choose what is saved, too")
    add_json(parser)
    args = parser.parse_args(arguments)
    found = []
    for ratio in args.ratios:
        memory = teb.PeakMemory(ratio=ratio)
        reshard = teb.ReshardAfterForward("auto", memory=memory, activations=args.activations)
        given = args.world, args.backend, reshard
        group = "nccl" if args.device == "cuda" else "ring"
        by_rank = run_ranks(_rank, args.world, group, *given, timeout_s=600)
        first = by_rank[0]
        first["ratio"] = ratio
        first["same_bits"] = all(r["same_bits"] for r in by_rank)
        first["same_choice"] = all(r["kept"] == first["kept"] for r in by_rank)
        first["measured_over_estimate"] = first["measured_peak"] / first["estimate_of_choice"]
        first["measured_over_scheduled"] = first["measured_peak"] / first["estimated_peak"]
        others = (("gloo", args.world), ("fake", 1)) if args.device == "cpu" else ()
        for group, ranks in others:
            peak, *_ = run_ranks(_rank, ranks, group, *given, timeout_s=600)
            first[f"over_estimate_on_{group}"] = peak / first["estimate_of_choice"]
        found.append(first)
        print(json.dumps(first), flush=True)
    write_json(args.json, found)
    good = all(r["same_bits"] and r["same_choice"] for r in found)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
