"""What each rank of ``benchmarks/soak.py`` does: one random case after the other, against eager
FSDP2, in one process, whose memory must stay flat.

A case is a model, its units, dtypes and a policy: a function of the seed and its number, the same
on every rank and in every process. Every operator of its model lowers to the ATen calls of eager,
so that ``aot_eager`` can give eager's bits.
"""

import argparse
import ctypes
import gc
import math
import random
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

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

import torch_ext_bucketing as teb
from benchmarks.parity_ranks import DTYPES, wrap_units
from torch_ext_bucketing._torch.fsdp2 import REDUCES_BY_GRAD_DTYPE
from torch_ext_bucketing.testing.model import RMSNorm
from torch_ext_bucketing.testing.payloads import (
    Payload,
    bucket_payloads,
    fsdp_payloads,
    layout_differences,
)
from torch_ext_bucketing.testing.ranks import Rank
from torch_ext_bucketing.testing.ring import RingTopology, ring_rank
from torch_ext_bucketing.testing.training import Trained, train

Item: TypeAlias = tuple[Any, ...]
"""``("scale",)``, ``("shift",)`` and ``("gain",)``: a parameter of the node itself, of ``dim``
elements or one; ``("matrix", rows)`` and ``("experts", count)``: one of two or three dimensions;
``("norm",)``, ``("mlp", hidden, bias)``: a child; ``("node", items)``: a node below."""

_DTYPES = ("fp32", "bf16")
POLICIES = ("units", "units_scheduled", "coarse_units", "cap", "cap_scheduled", "auto", "none")


@dataclass(frozen=True)
class Case:
    """One model and how it is trained; dtypes of None are FSDP2's defaults.

    Attributes:
        tree: the items of the node between embedding and head.
        tied: the head uses the embedding's weight.
        tied_matrices: two matrices of one unit are one parameter, where two are alike.
        frozen: one parameter in so many is frozen; 0: none.
        unit_seed: draws the units, once the module names are known.
        reshard: whether gathered parameters are freed after forward.
        policy: out of :data:`POLICIES`.
    """

    index: int
    tree: tuple[Item, ...]
    dim: int
    vocab: int
    tied: bool
    tied_matrices: bool
    frozen: int
    unit_seed: int
    store_dtype: str
    param_dtype: str | None
    reduce_dtype: str | None
    reshard: bool
    policy: str
    options: dict[str, Any] = field(default_factory=dict)
    backend: Literal["aot_eager", "inductor"] = "aot_eager"

    @property
    def text(self) -> str:
        """One line for people."""
        dtypes = f"{self.store_dtype}/{self.param_dtype or '-'}/{self.reduce_dtype or '-'}"
        ties = " tied" if self.tied or self.tied_matrices else ""
        return (
            f"{self.index}: {self.backend}, {self.policy} {self.options}, width {self.dim}, "
            f"{dtypes}{ties}{'' if self.reshard else ', kept gathered'}"
        )


def random_case(seed: int, index: int, inductor_every: int = 0) -> Case:
    """The case of that number; every ``inductor_every``-th is for Inductor, 0: none."""
    rng = random.Random(f"{seed}/{index}")
    items = _items(rng, depth=rng.randint(1, 3))
    policy = rng.choice(POLICIES)
    return Case(
        index=index,
        tree=items,
        dim=rng.choice((4, 6, 7, 9, 16, 17)),
        vocab=rng.randint(5, 23),
        tied=rng.random() < 0.15,
        tied_matrices=rng.random() < 0.15,
        frozen=rng.choice((0, 0, 0, 3)),
        unit_seed=rng.randrange(2**32),
        store_dtype=rng.choice(_DTYPES),
        param_dtype=rng.choice((None, "bf16", "bf16", "fp32")),
        reduce_dtype=rng.choice((None, *_DTYPES)),
        reshard=rng.random() < 0.7,
        policy=policy,
        options=_options(rng, policy),
        backend="inductor" if inductor_every and index % inductor_every == 0 else "aot_eager",
    )


def random_units(names: list[str], rng: random.Random) -> list[str | list[str]]:
    """Units as calls of ``fully_shard``, inner ones first, the root last, of the modules that hold
    parameters: ``names`` in ``named_modules`` order, without the root."""
    chosen = [name for name in names if rng.random() < 0.35]
    chosen.sort(key=lambda name: -name.count("."))
    units: list[str | list[str]] = []
    while chosen:
        unit = [chosen.pop(0)]
        parent = unit[0].rpartition(".")[0]
        siblings = [name for name in chosen if name.rpartition(".")[0] == parent]
        if siblings and rng.random() < 0.4:
            more = rng.sample(siblings, rng.randint(1, min(2, len(siblings))))
            chosen = [name for name in chosen if name not in more]
            unit += more
            rng.shuffle(unit)
        units.append(unit[0] if len(unit) == 1 else unit)
    return [*units, ""]


def coarser(units: list[tuple[str, ...]], rng: random.Random) -> list[tuple[str, ...]]:
    """Some units put together, in a random order: a plan that eager FSDP2 does not have."""
    parts = [[unit] for unit in units]
    rng.shuffle(parts)
    while len(parts) > 1 and rng.random() < 0.7:
        parts[rng.randrange(len(parts) - 1)] += parts.pop()
    return [tuple(fqn for unit in part for fqn in unit) for part in parts]


def _items(rng: random.Random, depth: int) -> tuple[Item, ...]:
    found: list[Item] = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.choice(("scale", "shift", "gain", "matrix", "experts", "norm", "mlp", "node"))
        if kind == "matrix":
            found.append((kind, rng.choice((1, 3, 3, 8))))
        elif kind == "experts":
            found.append((kind, rng.randint(1, 3)))
        elif kind == "mlp":
            found.append((kind, rng.randint(1, 24), rng.random() < 0.5))
        elif kind == "node" and depth:
            found.append((kind, _items(rng, depth - 1)))
        elif kind != "node":
            found.append((kind,))
    return tuple(found) or (("scale",),)


def _options(rng: random.Random, policy: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if policy in ("cap", "cap_scheduled"):
        options["cap_mb"] = rng.choice((0.0001, 0.0005, 0.002, 0.01, 1.0, None))
        options["non_adjacent"] = rng.random() < 0.8
    if policy == "auto":
        options["caps_mb"] = rng.choice(((0.0005, 0.005), (0.001, 0.01, 1.0), (25.0,)))
    if policy in ("cap", "cap_scheduled", "auto"):
        options["payload_order"] = rng.random() < 0.7
    if policy in ("units_scheduled", "cap_scheduled", "auto"):
        bounds: list[tuple[str, dict[str, Any]]] = []
        if rng.random() < 0.8:
            depth, window = rng.randint(0, 2), rng.choice((0, 4, 100))
            bounds.append(("Overlap", {"depth": depth, "window": window}))
        if rng.random() < 0.5:
            bounds.append(("PeakMemory", {"ratio": rng.choice((1.0, 1.02, 1.3))}))
        if rng.random() < 0.5:
            bounds.append(("CapComputeRun", {"max_consecutive": rng.choice((1, 2, 8))}))
        options["bounds"] = tuple(bounds) or (("Overlap", {}),)
    return options


# --- models --------------------------------------------------------------------------------------


class Node(nn.Module):
    """Applies its items one after the other to ``[batch, seq, dim]``. Owns parameters and has
    children, in whatever order the items come."""

    def __init__(self, items: Sequence[Item], dim: int) -> None:
        super().__init__()
        self.names: list[tuple[str, str]] = []
        for position, (kind, *rest) in enumerate(items):
            name = f"{kind}{position}"
            self.names.append((kind, name))
            if kind == "node":
                self.add_module(name, Node(rest[0], dim))
            elif kind == "mlp":
                hidden, bias = rest
                up, down = nn.Linear(dim, hidden, bias), nn.Linear(hidden, dim, bias=False)
                self.add_module(name, nn.Sequential(up, nn.SiLU(), down))
            elif kind == "norm":
                self.add_module(name, RMSNorm(dim))
            else:
                shape = {
                    "scale": (dim,),
                    "shift": (dim,),
                    "gain": (1,),
                    "matrix": (*rest, dim),
                    "experts": (*rest, dim, dim),
                }[kind]
                self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for kind, name in self.names:
            item = getattr(self, name)
            if kind in ("scale", "gain"):
                x = x * item
            elif kind == "shift":
                x = x + item
            elif kind == "matrix":
                x = x + torch.relu(x @ item.t()) @ item
            elif kind == "mlp":
                x = x + item(x)
            elif kind == "experts":
                rows = x.flatten(0, 1).unsqueeze(0).expand(item.shape[0], -1, -1)
                x = x + torch.bmm(rows, item).sum(0).view(x.shape)
            else:
                x = item(x)
        return x


class Model(nn.Module):
    """Token ids ``[batch, seq]`` int64 to logits ``[batch, seq, vocab]``."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed = nn.Embedding(case.vocab, case.dim)
        self.body = Node(case.tree, case.dim)
        self.head = nn.Linear(case.dim, case.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)))


def build(case: Case) -> tuple[Model, list[str | list[str]]]:
    """The model, with the same weights at every call, and its units."""
    model = Model(case)
    holders = [n for n, m in model.named_modules() if n and next(m.parameters(), None) is not None]
    units = random_units(holders, random.Random(case.unit_seed))
    unit_of = _unit_finder(units)
    # FSDP2 takes a shared parameter only where all its users are in one unit.
    if case.tied and unit_of("embed.weight") == unit_of("head.weight"):
        model.head.weight = model.embed.weight
    if case.tied_matrices:
        _tie_matrices(model, unit_of)
    generator = torch.Generator().manual_seed(case.unit_seed)
    parameters = list(model.parameters())
    for parameter in parameters:
        drawn = torch.randn(parameter.shape, generator=generator)
        around = 1.0 if parameter.dim() == 1 else 0.0
        scale = 0.3 / max(1, parameter.shape[-1]) ** 0.5
        parameter.data = (around + scale * drawn).to(DTYPES[case.store_dtype])
    if case.frozen:
        for parameter in parameters[:: case.frozen]:
            if parameter is not model.embed.weight:
                parameter.requires_grad_(False)
    return model, units


def tied(model: nn.Module) -> bool:
    """Whether a parameter is shared."""
    return len(list(model.named_parameters(remove_duplicate=False))) != len([*model.parameters()])


def batch(case: Case, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, ``[2, 5]`` int64 each: a function of the arguments alone."""
    generator = torch.Generator().manual_seed((case.unit_seed << 12) ^ (step << 6) ^ rank)
    tokens = torch.randint(case.vocab, (2, 6), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _unit_finder(units: Sequence[str | list[str]]) -> Callable[[str], int]:
    listed = [[unit] if isinstance(unit, str) else unit for unit in units]
    index = {name: i for i, unit in enumerate(listed) for name in unit}

    def unit_of(fqn: str) -> int:
        while fqn not in index:
            fqn = fqn.rpartition(".")[0]
        return index[fqn]

    return unit_of


def _tie_matrices(model: Model, unit_of: Callable[[str], int]) -> None:
    seen: dict[tuple[Any, ...], nn.Parameter] = {}
    for fqn, parameter in list(model.named_parameters()):
        owner, _, name = fqn.rpartition(".")
        if name.startswith("matrix"):
            first = seen.setdefault((unit_of(fqn), tuple(parameter.shape)), parameter)
            setattr(model.get_submodule(owner), name, first)


# --- a case on a rank ----------------------------------------------------------------------------


_BOUNDS: dict[str, Callable[..., Any]] = {
    "Overlap": teb.Overlap,
    "PeakMemory": teb.PeakMemory,
    "CapComputeRun": teb.CapComputeRun,
}


@dataclass
class CaseReport:
    """One case on one rank: buckets in all graphs, collectives before and after bucketing,
    mismatches in words, what of the case was still referred to after it, and resident memory after
    it."""

    index: int
    text: str
    steps: int = 0
    buckets: int = 0
    collectives: tuple[int, int] = (0, 0)
    mismatches: list[str] = field(default_factory=list)
    kept_alive: list[str] = field(default_factory=list)
    rss_bytes: int = 0
    seconds: float = 0.0


def soak_rank(rank: Rank, soak: argparse.Namespace) -> None:
    """Entry point of a rank, with the command's options. Sends ``("start", text)`` and a
    :class:`CaseReport` of each case."""
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


def _one_case(case: Case, soak: argparse.Namespace, mesh: DeviceMesh, rank: int) -> CaseReport:
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
    case: Case, soak: argparse.Namespace, mesh: DeviceMesh, rank: int, report: CaseReport
) -> dict[str, weakref.ref[Any]]:
    eager, units = build(case)
    names = (case.store_dtype, case.param_dtype, case.reduce_dtype)
    kept_dtype, param_dtype, reduce_dtype = (name and DTYPES[name] for name in names)
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)
    options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": case.reshard}
    wrap_units(eager, units, **options)
    real_order = teb.FSDPParamOrder.from_fsdp(eager)
    expected = _train(case, eager, eager, soak.steps, rank)

    model, _ = build(case)
    order = teb.FSDPParamOrder.from_model(model, units=units)
    if order != real_order:
        report.mismatches.append(f"from_model gives {order.units}, FSDP2 has {real_order.units}")
    shared = tied(model)
    if shared:
        # One reduction per use, where eager FSDP2 adds up first: equal bits are promised to the
        # same model uncompiled.
        plain, _ = build(case)
        teb.data_parallel(plain, mesh, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        per_use = _train(case, plain, plain, soak.steps, rank)
        _compare(report, "per-use reductions", per_use, expected, exact=False)
        expected = per_use
    teb.data_parallel(model, mesh, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    key = order
    if soak.wrong_order:
        gathered, reduced = (
            tuple(unit[::-1] for unit in payloads) for payloads in (order.units, order.reduce_units)
        )
        key = replace(order, units=gathered, reduce_units=reduced)
    compiler = teb.backend(case.backend, passes=_passes(case, order, key), model=model)
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


def _passes(case: Case, order: teb.FSDPParamOrder, key: teb.FSDPParamOrder) -> list[teb.GraphPass]:
    options = dict(case.options)
    bounds = [_BOUNDS[name](**given) for name, given in options.pop("bounds", ())]
    by_cap = key if options.pop("payload_order", True) else None
    passes: list[teb.GraphPass] = [teb.ReshardAfterForward()] if case.reshard else []
    if case.policy.startswith("units"):
        passes.append(teb.BucketUnits(order, payload_order=key))
    elif case.policy == "coarse_units":
        plan = coarser([tuple(u) for u in order.units], random.Random(case.unit_seed))
        passes.append(teb.BucketUnits(plan, payload_order=key))
    elif case.policy.startswith("cap"):
        kinds: Any = ("all_gather", "reduce_scatter")
        passes.append(teb.BucketByCap(kinds=kinds, payload_order=by_cap, **options))
    elif case.policy == "auto":
        return [*passes, teb.BucketAndSchedule(bounds, payload_order=by_cap, **options)]
    return [*passes, teb.Schedule(bounds)] if bounds else passes


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
    report: teb.CompileReport,
    order: teb.FSDPParamOrder,
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
