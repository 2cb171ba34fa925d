"""Find why gradients differ by experiments that each change one thing.

All compute the gradients of one step from the same weights. Experiments on one rank, rank 0 with
its inputs, are about the model and its compiler. Experiments on all ranks change the passes, one by
one, to those that do as eager FSDP2.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor

from .._torch.fsdp2 import REDUCES_BY_GRAD_DTYPE
from ..fqns import canonical_fqn, format_names
from ..fsdp.units import FSDPParamOrder
from ..graph.nodes import KINDS
from ..passes.add_by_unit import AddByUnit
from ..passes.backends import BucketingBackend, backend
from ..passes.base import BUCKETS, ORDER, RANK_ORDER, GraphPass
from ..passes.bucketing import BucketByUnit
from ..passes.combine_uses import CombineReport
from ..passes.pipeline import MatchFSDP2, in_order
from ..passes.reduce_scatter_first import ScatterReport
from ..reports.compile import BucketReport
from .comparison import Cause, CompareOptions, Comparison
from .ranks import Rank
from .trial import Hashes, Passes, Run, Trial, hash_of, unlike, unsharded_state

_SAME_INPUTS = (
    "all ranks have the same inputs, which hides the order of additions: pass a callable of step "
    "and rank as inputs"
)


def compare_on_rank(rank: Rank, options: CompareOptions) -> Comparison:
    """Compare on the ranks of the default group; every rank calls this."""
    trial, steps = Trial(rank, options), options.steps
    inputs = trial.from_all(hash_of(trial.batch(0)))
    notes = dict.fromkeys([_SAME_INPUTS] if len(set(inputs)) < rank.world_size else [])
    trial.say(f"eager FSDP2: {steps} steps")
    model = trial.wrapped()
    eager, eager_gradients = trial.train(model, model, steps)
    trial.say(f"compiled with {options.backend}")
    model, compiler, run = trial.ours()
    compiled, gradients = trial.train(model, run, steps, stop_unlike=eager.digests)
    notes |= dict.fromkeys(text for report in compiler.reports for text in report.warnings)
    last = len(compiled.digests) - 1
    if not trial.differing({"": compiled.digests[last]}, {"": eager.digests[last]}):
        return Comparison(True, steps, notes=tuple(notes))
    trial.say(f"weights differ after step {last + 1}")
    search = _Experiments(trial, last, eager_gradients[last], gradients[last], model, compiler)
    causes = tuple(search.causes())
    differ = search.ordered(trial.differing(eager_gradients[last], gradients[last]))
    return Comparison(False, steps, last + 1, differ, causes, (*notes, *search.failed))


@dataclass
class _Experiments:
    """The state of the experiments on the first step after which weights differ."""

    trial: Trial
    step: int
    eager: Hashes  # that step's gradients by eager FSDP2
    gradients: Hashes  # gradients with ``passes``; ``compiler`` compiled ``model`` with them
    model: nn.Module
    compiler: BucketingBackend
    order: list[str] = field(default_factory=list)  # parameters in the order of backward
    # Gradients on one rank, by key of ``_WAYS``.
    on_one_by_way: dict[str, Hashes] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)  # descriptions of experiments that raised
    mended: int = 0  # number of changes of ``passes`` that changed gradients

    def __post_init__(self) -> None:
        self.passes: Passes = self.trial.passes

    def causes(self) -> Iterator[Cause]:
        """Run all experiments; every rank yields the same causes."""
        trial = self.trial
        # If eager differs from itself, no experiment can show a cause.
        trial.say("eager FSDP2 once more")
        model = trial.wrapped()
        trial.train(model, model, self.step)
        trial.state = unsharded_state(model)
        if names := trial.differing(self.eager, trial.gradients(model, model, self.step)):
            yield _cause("nondeterminism", names)
            return
        causes: list[Cause] = []
        if trial.rank.rank == 0:  # the others wait for rank 0's causes below
            self.order = self._backward_order()
            for name, on_one in _ON_ONE_RANK.items():
                try:
                    causes += on_one(self)
                except Exception as error:
                    self.failed.append(f"looking for {name} failed: {error}")
        self.order, causes, self.failed = trial.from_rank_0((self.order, causes, self.failed))
        if trial.options.backend == "inductor":
            trial.say("all ranks: aot_eager")
            if names := self.take(trial.passes):
                causes.append(_cause("Inductor", names))
        for on_all in _ON_ALL_RANKS:
            causes += on_all(self)
        yield from causes
        unlike_eager = self.ordered(trial.differing(self.eager, self.gradients))
        if unlike_eager and len(causes) == self.mended:
            yield _cause("unknown", unlike_eager)

    def _backward_order(self) -> list[str]:
        model, order = self.trial.plain(), dict[str, None]()
        names = {p: canonical_fqn(n) for n, p in model.named_parameters() if p.requires_grad}
        for parameter in names:
            parameter.register_post_accumulate_grad_hook(lambda p: order.setdefault(names[p]))
        self.trial.gradients(model, model, self.step)
        return list(order)

    def ordered(self, names: Sequence[str]) -> tuple[str, ...]:
        """Sort names in the order of backward, names without a gradient last."""
        place = {name: number for number, name in enumerate(self.order)}
        return tuple(sorted(names, key=lambda name: place.get(name, len(place))))

    def on_one(self, way: str) -> Hashes:
        """Compute gradients on this rank alone, in one of ``_WAYS``."""
        if way not in self.on_one_by_way:
            self.trial.say(f"one rank: {way}")
            torch.compiler.reset()
            model = self.trial.plain()
            self.on_one_by_way[way] = self.trial.gradients(model, _WAYS[way](model), self.step)
        return self.on_one_by_way[way]

    def take(self, passes: Passes) -> tuple[str, ...]:
        """Change the passes; return the names of gradients that this changes on some rank."""
        self.model, self.compiler, run = self.trial.ours(passes, "aot_eager")
        gradients = self.trial.gradients(self.model, run, self.step)
        names = self.trial.differing(self.gradients, gradients)
        self.passes, self.gradients = passes, gradients
        self.mended += bool(names)
        return self.ordered(names)


# ---- experiments on one rank --------------------------------------------------------------------

_WAYS: dict[str, Callable[[nn.Module], Run]] = {
    "eager": lambda model: model,
    "Dynamo": lambda model: torch.compile(model, backend="eager"),
    "AOTAutograd": lambda model: torch.compile(model, backend=backend("aot_eager", agree=False)),
}
"""Stages of the compiler that a model runs through."""


def _traced(name: str, before: str, after: str, search: _Experiments) -> Iterator[Cause]:
    if names := search.ordered(unlike(search.on_one(before), search.on_one(after))):
        search.trial.say(f"one rank: the first module that {after} changes")
        module = _first_module(search, (before, after))
        where = f"module {module}" if module else "no module by itself"
        yield _cause(name, names, f". The first is {where}")


def _first_module(search: _Experiments, ways: tuple[str, str]) -> str:
    """Find the first innermost module whose outputs or gradients differ between two ways."""
    # Each module is called by itself, with the arguments of its first call in the model.
    calls: dict[str, tuple[nn.Module, Any]] = {}

    def note(name: str, module: nn.Module, args: Any, keywords: Any) -> None:
        if name not in calls:
            calls[name] = module, _detached((args, keywords))

    model = search.trial.plain()
    handles = [
        module.register_forward_pre_hook(partial(note, canonical_fqn(name)), with_kwargs=True)
        for name, module in model.named_modules()
        if name
    ]
    search.trial.backward(model, search.step)
    for handle in handles:
        handle.remove()
    module, inside = "", list(calls)
    while inside:
        outermost = [c for c in inside if not any(c.startswith(f"{outer}.") for outer in inside)]
        differs = (c for c in outermost if len({_alone(c, *calls[c], way) for way in ways}) > 1)
        module, before = next(differs, ""), module
        if not module:
            return before
        inside = [c for c in inside if c.startswith(f"{module}.")]
    return module


def _detached(tree: Any) -> Any:
    def detach(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return pytree.tree_map_only(torch.Tensor, detach, tree)


def _alone(name: str, module: nn.Module, arguments: Any, way: str) -> str:
    """Hash a module's outputs and gradients; empty if the module can't be called by itself."""
    torch.compiler.reset()
    args, keywords = copies = _detached(arguments)
    module.zero_grad()
    torch.manual_seed(0)
    try:
        outputs = pytree.tree_leaves(_WAYS[way](module)(*args, **keywords))
        outputs = [x for x in outputs if isinstance(x, torch.Tensor)]
        torch.manual_seed(0)
        for output in (x for x in outputs if x.requires_grad):
            output.backward(torch.randn_like(output), retain_graph=True)
    except Exception as error:
        warnings.warn(f"{name} can't be called by itself: {error}", stacklevel=2)
        return ""
    leaves = [x for x in pytree.tree_leaves(copies) if isinstance(x, torch.Tensor)]
    return hash_of([outputs, *(x.grad for x in (*leaves, *module.parameters()))])


# ---- experiments on all ranks -------------------------------------------------------------------


def _no_collective(search: _Experiments) -> Iterator[Cause]:
    named = search.model.named_parameters()
    trained = [(canonical_fqn(name), p) for name, p in named if p.requires_grad]
    if plain := [name for name, p in trained if not isinstance(p, DTensor)]:
        yield _cause("no collective", search.ordered(plain))


def _additions(search: _Experiments) -> Iterator[Cause]:
    """Check whether passes that add as eager FSDP2 does are missing, or skipped collectives."""
    passes, units = search.passes, search.trial.units
    kinds = tuple(type(part) for part in MatchFSDP2(search.model, units).parts)
    present = {type(p) for p in passes(search.model)}
    if missing := [kind.__name__ for kind in kinds if kind not in present]:

        def with_all(model: nn.Module) -> list[GraphPass]:
            others = [p for p in passes(model) if not isinstance(p, kinds)]
            return in_order([MatchFSDP2(model, units), *others], model)

        search.trial.say("all ranks: with MatchFSDP2()")
        if names := search.take(with_all):
            yield _cause("additions", names, f". The passes lack {', '.join(missing)}")
    rewrites = [r for report in search.compiler.reports for r in report.rewrites]
    reports = [r for r in rewrites if isinstance(r, CombineReport | ScatterReport)]
    if skipped := [x for r in reports for x in r.left]:
        why = "; ".join(f"{format_names(x.fqns)}: {x.reason}" for x in skipped)
        names = search.ordered([fqn for x in skipped for fqn in x.fqns])
        yield _cause("additions", names, f". Skipped: {why}", "see its reasons")


def _rank_order(search: _Experiments) -> Iterator[Cause]:
    passes = search.passes
    if any(RANK_ORDER in p.provides for p in passes(search.model)):
        search.trial.say("all ranks: reductions over rings")
        if names := search.take(lambda m: [p for p in passes(m) if RANK_ORDER not in p.provides]):
            yield _cause("rank order", names)


def _payloads(search: _Experiments) -> Iterator[Cause]:
    """Yield a cause if weights are equal with eager FSDP2's payload order."""
    order, differences, same_units = _layout(search)
    if not differences:
        return
    passes = search.passes

    def with_eagers(model: nn.Module) -> list[GraphPass]:
        listed = [
            AddByUnit(model, search.trial.units) if isinstance(p, AddByUnit) else p
            for p in passes(model)
        ]
        places = (n for n, p in enumerate(listed) if {BUCKETS, ORDER} & p.provides)
        place = next(places, len(listed))
        others_after = [p for p in listed[place:] if BUCKETS not in p.provides]
        return [*listed[:place], BucketByUnit(order, KINDS), *others_after]

    search.trial.say("all ranks: with eager FSDP2's payloads")
    if names := search.take(with_eagers):
        further = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        shown = f": {'; '.join(differences[:3])}{further}"
        yield _cause("payload order" if same_units else "units", names, shown)


def _layout(search: _Experiments) -> tuple[FSDPParamOrder, list[str], bool]:
    """Return eager FSDP2's order, how reductions differ from it, and whether units are equal."""
    trial = search.trial
    model = trial.wrapped()
    order = FSDPParamOrder.from_fsdp(model)
    dtype = next(model.parameters()).dtype
    gathered = trial.param_dtype or dtype
    # Eager FSDP2 reduces no parameter without a gradient.
    units = [[n for n in unit if search.eager.get(n)] for unit in order.reduce_units or order.units]
    eager = fsdp_payloads(
        model,
        FSDPParamOrder.from_fqns([unit for unit in units if unit]),
        shards=trial.rank.world_size // trial.options.replicas,
        param_dtype=gathered,
        reduce_dtype=trial.reduce_dtype or (dtype if REDUCES_BY_GRAD_DTYPE else gathered),
        replicas=trial.options.replicas,
    )
    buckets = [b for report in search.compiler.reports for b in report.buckets]
    # The order in a gather's payload changes no bits.
    sides = [
        [p for p in payloads if p.kind != "all_gather" and len(p.members) > 1]
        for payloads in (eager, bucket_payloads(buckets))
    ]
    keys = [{payload.key for payload in side} for side in sides]
    return order, layout_differences(*sides), keys[0] == keys[1]


_Experiment = Callable[[_Experiments], Iterator[Cause]]
_ON_ONE_RANK: dict[str, _Experiment] = {
    "Dynamo": partial(_traced, "Dynamo", "eager", "Dynamo"),
    "decompositions": partial(_traced, "decompositions", "Dynamo", "AOTAutograd"),
}
_ON_ALL_RANKS: Sequence[_Experiment] = (
    _no_collective,
    _additions,
    _rank_order,
    _payloads,
)


def _cause(name: str, names: tuple[str, ...], detail: str = "", advice: str = "") -> Cause:
    """Create a cause from ``_WORDS``, with ``detail`` appended to the observation."""
    return Cause(name, names, _WORDS[name][0] + detail, advice or _WORDS[name][1])


_WORDS: dict[str, tuple[str, str]] = {
    "nondeterminism": (
        "eager FSDP2, trained twice from the same weights and inputs, differs from itself",
        "seed random numbers of the model and its inputs by step and rank (torch's generator is), "
        "and use deterministic kernels (torch.use_deterministic_algorithms)",
    ),
    "Dynamo": (
        'torch.compile(backend="eager") on one rank differs from eager: Dynamo traces another '
        "branch than eager runs",
        "look there for torch.compiler.is_compiling() and similar checks, and take the same branch "
        'both times; for transformers, attn_implementation="eager" in place of "sdpa"',
    ),
    "decompositions": (
        "AOTAutograd on one rank differs from what Dynamo traced: it decomposes an operator that "
        "eager runs as one kernel",
        "write that operator in elementary ones, like RMSNorm in testing.training",
    ),
    "Inductor": (
        "Inductor's fused kernels keep values in float32 that eager rounds",
        "set torch._inductor.config.emulate_precision_casts = True if eager's bits are needed, or "
        "compare with aot_eager",
    ),
    "no collective": (
        "trained parameters are not sharded, so no collective reduces their gradients",
        "shard the whole model, data_parallel(model, mesh)",
    ),
    "additions": (
        "gradients are added in another order than by eager FSDP2, which adds an activation's unit "
        "by unit, a parameter's before they are reduced, and shards before replicas",
        "add MatchFSDP2(model, units) to the passes, as recipe() does",
    ),
    "rank order": (
        "all-to-alls add gradients in rank order, eager FSDP2 adds over rings",
        "compare without FixedOrderReduce; to train eager FSDP2 on the same bits, pass "
        "teb.fsdp.AllToAllReduceScatter() to set_custom_reduce_scatter() of each of its modules",
    ),
    "units": (
        "reductions group parameters differently than eager FSDP2",
        "recipe(model, units=[...]) with the modules of each fully_shard() call, or "
        "recipe(model, reference=...) with the wrapped model",
    ),
    "payload order": (
        "reductions have eager FSDP2's parameters in another order",
        "BucketByUnit(FSDPParamOrder.from_model(model, units=[...])), as recipe() does",
    ),
    "unknown": (
        "gradients still differ after all changes by the experiments, which found nothing on one "
        "rank with rank 0's inputs",
        "compare with other inputs, and with fewer passes",
    ),
}
"""The observation and the advice of each cause."""


# ---- payloads ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """Bytes ``[offset, offset + nbytes)`` of a parameter in one rank's part of a buffer."""

    fqn: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Payload:
    """One collective of the step, its members in payload order."""

    kind: str
    members: tuple[Span, ...]

    @property
    def key(self) -> tuple[str, frozenset[str]]:
        """Kind and parameters, whatever their order."""
        return self.kind, frozenset(m.fqn for m in self.members)


def fsdp_payloads(
    model: torch.nn.Module,
    order: FSDPParamOrder,
    *,
    shards: int,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    replicas: int = 1,
    gathered: Mapping[str, Sequence[int]] | None = None,
) -> list[Payload]:
    """Compute the payloads of eager FSDP2's collectives from its param groups.

    A rank's part has each parameter's shard, padded to rank 0's rows (``all_gather_copy_in``, and
    ``chunk_cat`` in ``foreach_reduce``). Frozen parameters are only gathered. HSDP all-reduces the
    reduce-scatter's output. ``shards`` ranks share a parameter, in ``replicas`` groups.
    ``gathered``: bytes per rank of each tensor that a parameter with an all-gather extension sends.
    """
    numels, trained = {}, set()
    for name, parameter in model.named_parameters():
        rows = -(-parameter.shape[0] // shards)
        numels[canonical_fqn(name)] = rows * parameter.shape[1:].numel()
        if parameter.requires_grad:
            trained.add(canonical_fqn(name))
    reduced = [[f for f in u if f in trained] for u in order.reduce_units or order.units]
    kinds = [("all_gather", order.units, param_dtype), ("reduce_scatter", reduced, reduce_dtype)]
    if replicas > 1:
        kinds.append(("all_reduce", reduced, reduce_dtype))
    payloads = []
    for kind, units, dtype in kinds:
        for unit in filter(None, units):
            members, offset = [], 0
            for fqn in unit:
                sent_nbytes = gathered.get(fqn) if gathered and kind == "all_gather" else None
                for nbytes in sent_nbytes or (numels[fqn] * dtype.itemsize,):
                    members.append(Span(fqn, offset, nbytes))
                    offset += nbytes
            payloads.append(Payload(kind, tuple(members)))
    return payloads


def bucket_payloads(buckets: Iterable[BucketReport]) -> list[Payload]:
    """Convert the buckets of compiled graphs; "+" joins the parameters of one member."""
    return [
        Payload(b.kind, tuple(Span("+".join(m.fqns), m.offset, m.nbytes) for m in b.members))
        for b in buckets
    ]


def layout_differences(eager: Sequence[Payload], run: Sequence[Payload]) -> list[str]:
    """Describe payloads that only ``run``, or only eager FSDP2 has, compared byte by byte."""
    eager_by_key = {p.key: p for p in eager}
    texts = []
    for payload in run:
        names = ", ".join(m.fqn for m in payload.members[:3])
        names += ", ..." if len(payload.members) > 3 else ""
        if payload.key not in eager_by_key:
            texts.append(f"{payload.kind} of {names}: no unit of eager FSDP2 has these members")
            continue
        pairs = zip(payload.members, eager_by_key[payload.key].members, strict=True)
        if differs := next(((span, eagers) for span, eagers in pairs if span != eagers), None):
            span, eagers = differs
            texts.append(
                f"{payload.kind} of {names}: byte {span.offset} is {span.fqn} ({span.nbytes} "
                f"bytes), eager has {eagers.fqn} at byte {eagers.offset} ({eagers.nbytes} bytes)"
            )
    missing = eager_by_key.keys() - {payload.key for payload in run}
    # One with a single member may be missing: it needs no bucket.
    for kind, members in ((p.kind, p.members) for p in eager if p.key in missing):
        if len(members) > 1:
            texts.append(
                f"{kind} of {members[0].fqn}, ...: eager FSDP2 has this payload, the compiled "
                "graphs do not"
            )
    return texts
