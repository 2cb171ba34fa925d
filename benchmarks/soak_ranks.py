"""What each rank of ``benchmarks/soak.py`` does: case after case, against eager FSDP2, in one
process, whose memory must stay flat."""

from __future__ import annotations

import ctypes
import gc
import math
import random
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo.guards import CheckFunctionManager
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from benchmarks.parity_ranks import DTYPES, wrap_units
from benchmarks.soak_cases import Case, coarser, random_case
from benchmarks.soak_models import batch, build, tied
from torch_ext_bucketing._torch.fsdp2 import REDUCES_BY_GRAD_DTYPE
from torch_ext_bucketing.fsdp.order import FSDPParamOrder
from torch_ext_bucketing.fsdp.simple_fsdp import data_parallel
from torch_ext_bucketing.passes.backends import backend
from torch_ext_bucketing.passes.base import GraphPass
from torch_ext_bucketing.passes.bucketing import BucketByCap, BucketUnits
from torch_ext_bucketing.passes.scheduling import BucketAndSchedule, Schedule
from torch_ext_bucketing.reports.compile import CompileReport
from torch_ext_bucketing.rewrites.resharding import ReshardAfterForward
from torch_ext_bucketing.scheduling.memory import CapComputeRun, PeakMemory
from torch_ext_bucketing.scheduling.overlap import Overlap
from torch_ext_bucketing.testing.payloads import (
    Payload,
    bucket_payloads,
    fsdp_payloads,
    layout_differences,
)
from torch_ext_bucketing.testing.ranks import Rank
from torch_ext_bucketing.testing.ring import RingTopology, ring_rank
from torch_ext_bucketing.testing.training import Trained, train

_BOUNDS: dict[str, Callable[..., Any]] = {
    "Overlap": Overlap,
    "PeakMemory": PeakMemory,
    "CapComputeRun": CapComputeRun,
}


@dataclass(frozen=True)
class Soak:
    """What to run.

    Attributes:
        models: number of cases.
        steps: optimizer steps of each.
        seed: of all cases.
        first: number of the first case.
        minutes: no case starts after so many.
        inductor_every: every so many cases one is for Inductor; 0: none.
        wrong_order: the control: pack buckets in the reverse of FSDP2's order.
    """

    models: int
    steps: int
    seed: int
    first: int
    minutes: float
    inductor_every: int
    wrong_order: bool


@dataclass
class CaseReport:
    """One case on one rank.

    Attributes:
        index: the case's number.
        text: the case in words.
        steps: that were trained.
        buckets: that were merged, in all graphs.
        collectives: before and after bucketing.
        mismatches: in words.
        kept_alive: what of the case was still referred to after it, traced graphs among it.
        rss_bytes: resident memory after it.
        seconds: what it took.
    """

    index: int
    text: str
    steps: int = 0
    buckets: int = 0
    collectives: tuple[int, int] = (0, 0)
    mismatches: list[str] = field(default_factory=list)
    kept_alive: list[str] = field(default_factory=list)
    rss_bytes: int = 0
    seconds: float = 0.0


class ReversedOrder:
    """An order that is wrong on purpose."""

    def __init__(self, order: FSDPParamOrder) -> None:
        self._order = order

    def __call__(self, start: fx.Node) -> Any:
        key = self._order(start)
        return None if key is None else tuple(-part for part in key)

    def uuid(self) -> str:
        """A cache key, as hooks have it."""
        return f"reversed {self._order.uuid()}"


def soak_rank(rank: Rank, soak: Soak) -> None:
    """Entry point of a rank. Sends ``("start", text)`` and a :class:`CaseReport` of each case."""
    warnings.simplefilter("ignore")  # bounds that can't be kept are part of the cases
    topology = RingTopology(ranks_per_node=rank.world_size // 2, channels=4, chunk_bytes=16)
    deadline = time.monotonic() + 60 * soak.minutes
    with ring_rank(rank, topology):
        mesh = init_device_mesh("cpu", (rank.world_size,))
        for index in range(soak.first, soak.first + soak.models):
            late = torch.tensor([int(time.monotonic() > deadline)])
            dist.broadcast(late, 0)  # all ranks stop before the same case
            if late.item():
                break
            case = random_case(soak.seed, index, soak.inductor_every)
            rank.send(("start", case.text))
            rank.send(_one_case(case, soak, mesh, rank.rank))


def _one_case(case: Case, soak: Soak, mesh: DeviceMesh, rank: int) -> CaseReport:
    clock = time.perf_counter()
    graphs = _graphs()
    report = CaseReport(case.index, case.text, soak.steps)
    watched = _run_case(case, soak, mesh, rank, report)
    torch._dynamo.reset()
    _forget_what_torch_keeps()
    gc.collect()
    gc.collect()  # what finalizers have let go of since
    report.kept_alive = [what for what, reference in watched.items() if reference() is not None]
    more = _graphs() - max(graphs, 1)  # Inductor keeps its last one
    if more > 0:
        report.kept_alive.append(f"{more} graphs")
    ctypes.CDLL(None).malloc_trim(0)
    report.rss_bytes = _resident_bytes()
    report.seconds = time.perf_counter() - clock
    return report


def _graphs() -> int:
    return sum(type(thing) is fx.Graph for thing in gc.get_objects())


def _forget_what_torch_keeps() -> None:
    """Drop what torch keeps of every compile, with this package or without, so that growth is ours.

    Measured with torch 2.13.0 and plain ``torch.compile`` of six small layers, ``aot_eager``, with
    ``torch._dynamo.reset()`` after each: 0.48 MiB more per compile. A guard on a type's identity
    leaves a finalizer on that type, which lives on, and with it all guards and their stacks; fake
    tensors and DTensor keep what they found for every new shape.
    """
    FakeTensorMode.cache_clear()
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    for finalizer, info in list(weakref.finalize._registry.items()):  # type: ignore[attr-defined]
        method = getattr(info.func, "func", info.func)
        if getattr(method, "__func__", None) is CheckFunctionManager.invalidate:
            finalizer.detach()


def _run_case(
    case: Case, soak: Soak, mesh: DeviceMesh, rank: int, report: CaseReport
) -> dict[str, weakref.ref[Any]]:
    eager, units = build(case)
    kept_dtype = DTYPES[case.store_dtype]
    param_dtype = None if case.param_dtype is None else DTYPES[case.param_dtype]
    reduce_dtype = None if case.reduce_dtype is None else DTYPES[case.reduce_dtype]
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)
    options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": case.reshard}
    wrap_units(eager, units, **options)
    real_order = FSDPParamOrder.from_fsdp(eager)
    expected = _train(case, eager, eager, soak.steps, rank)

    model, _ = build(case)
    order = FSDPParamOrder.from_model(model, units=units)
    if order != real_order:
        report.mismatches.append(f"from_model gives {order.units}, FSDP2 has {real_order.units}")
    shared = tied(model)
    if shared:
        # One reduction per use, where eager FSDP2 adds up first: equal bits are promised to the
        # same model uncompiled.
        plain, _ = build(case)
        data_parallel(plain, mesh, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        per_use = _train(case, plain, plain, soak.steps, rank)
        _compare(report, "per-use reductions", per_use, expected, exact=False)
        expected = per_use
    data_parallel(model, mesh, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    key: Any = ReversedOrder(order) if soak.wrong_order else order
    compiler = backend(case.backend, passes=_passes(case, order, key), model=model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=compiler, fullgraph=True)
    found = _train(case, model, compiled, soak.steps, rank)
    if len(compiler.reports) != 1:
        raise RuntimeError(f"case {case.text}: compiled {len(compiler.reports)} times")
    # Among more than two ranks the place in the buffer decides the order of addition.
    ordered = case.policy in ("units", "units_scheduled", "none")
    exact = case.backend == "aot_eager" and (ordered or dist.get_world_size() == 2)
    _compare(report, case.policy, found, expected, exact)
    last = compiler.last_report()
    gather_dtype = param_dtype or kept_dtype
    if reduce_dtype is None:
        reduce_dtype = kept_dtype if REDUCES_BY_GRAD_DTYPE else gather_dtype
    payloads = fsdp_payloads(
        eager, order, shards=mesh.size(), param_dtype=gather_dtype, reduce_dtype=reduce_dtype
    )
    report.mismatches += _layout_mismatches(case, last, order, payloads, exact_places=not shared)
    report.buckets = len(last.buckets)
    before, after = last.collectives_before, last.collectives_after
    report.collectives = (sum(before.values()), sum(after.values()))
    return {"the compiled model": weakref.ref(model), "the backend": weakref.ref(compiler)}


def _passes(case: Case, order: FSDPParamOrder, key: Any) -> list[GraphPass]:
    options = dict(case.options)
    bounds = [_BOUNDS[name](**given) for name, given in options.pop("bounds", ())]
    ordered = options.pop("payload_order", True)
    passes: list[GraphPass] = [ReshardAfterForward()] if case.reshard else []
    if case.policy.startswith("units"):
        passes.append(BucketUnits(order, payload_order=key))
    elif case.policy == "coarse_units":
        plan = coarser([tuple(u) for u in order.units], random.Random(case.unit_seed))
        passes.append(BucketUnits(plan, payload_order=key))
    elif case.policy.startswith("cap"):
        kinds: Any = ("all_gather", "reduce_scatter")
        passes.append(BucketByCap(kinds=kinds, payload_order=key if ordered else None, **options))
    elif case.policy == "auto":
        return [
            *passes,
            BucketAndSchedule(bounds, payload_order=key if ordered else None, **options),
        ]
    return [*passes, Schedule(bounds)] if bounds else passes


def _train(
    case: Case,
    model: nn.Module,
    forward: Callable[[torch.Tensor], torch.Tensor],
    steps: int,
    rank: int,
) -> Trained:
    def step(number: int) -> torch.Tensor:
        tokens, targets = batch(case, number, rank)
        loss = F.cross_entropy(forward(tokens).float().flatten(0, 1), targets.flatten())
        loss.backward()
        return loss

    return train(model, step, steps, lr=1e-2)


def _compare(report: CaseReport, what: str, mine: Trained, theirs: Trained, exact: bool) -> None:
    for step, (a, b) in enumerate(zip(mine.digests, theirs.digests, strict=True), 1):
        if exact and a != b:
            report.mismatches.append(f"{what}: weights differ after step {step}")
            break
    for step, (x, y) in enumerate(zip(mine.loss, theirs.loss, strict=True), 1):
        if (exact and x != y) or not math.isclose(x, y, rel_tol=0.05):
            report.mismatches.append(f"{what}: loss {x!r} for {y!r} at step {step}")
            break


def _layout_mismatches(
    case: Case,
    report: CompileReport,
    order: FSDPParamOrder,
    payloads: Sequence[Payload],
    exact_places: bool,
) -> list[str]:
    if case.policy == "none" or not case.options.get("payload_order", True):
        return []
    aliases = dict(order.aliases)
    reduced = order.reduce_units or order.units
    found = []
    for bucket in report.buckets:
        units = order.units if bucket.kind == "all_gather" else reduced
        in_order = [fqn for unit in units for fqn in unit]
        names = [aliases.get(m.fqns[0], m.fqns[0]) for m in bucket.members]
        if names != sorted(names, key=in_order.index):
            members = ", ".join(names[:4])
            found.append(f"{bucket.kind} of {members}: members are not in eager FSDP2's order")
    if not case.policy.startswith("units") or not exact_places or found:
        return found
    # Backward gathers again only what backward reads, and a parameter alone is in no bucket.
    mine = [
        bucket
        for graph in report.graphs
        for bucket in graph.buckets
        if not (graph.stage == "backward" and bucket.kind == "all_gather")
    ]
    return layout_differences(payloads, bucket_payloads(mine))


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
