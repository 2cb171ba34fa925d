"""Append the norm of the gradients and the optimizer's updates to a backward graph.

Before buckets are planned, every gradient gets nodes of its own, and is not an output any more::

    reduce_scatter -> wait -> grad                          grad of w: output

    reduce_scatter -> wait -> grad -> update_([w], [grad], [state])          grad of w: freed

With clipping, updates wait for the norm, one all-reduce per mesh dimension (:mod:`.norm`)::

    grad -> _foreach_norm -> stack -> pow -> all_reduce -> wait -> pow -> vector_norm -> coefficient
    grad, coefficient -> _foreach_mul_ -> update_

A loss scale divides gradients before their norm, and updates wait for its
search for infinite values.

After buckets are merged, :func:`group_calls` joins the nodes of each bucket's gradients. Those that
wait for the norm are joined across buckets, up to a number of bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn

from .._torch.aot import BufferAOTInput, ParamAOTInput, mark_backward
from .._torch.fsdp2 import largest_shard_bytes, largest_shard_numel, shard_of
from ..fqns import parameter_names
from ..graph.nodes import OPTIMIZER, buffer_bytes, is_wait, note, set_updates, updates_of
from ..graph.sizes import Work, set_work
from ..passes.base import Choice
from ..reports.compile import Owners, StepReport
from .matrix import Update, append_matrices, bytes_within
from .norm import (
    ANY,
    CLAMP,
    NORMS,
    NOT_FINITE,
    UNSCALE,
    Norm,
    append_norms,
    append_unscale,
    by_mesh,
    inverse_scale,
)
from .rules import BY_NAME, UPDATE, MatrixRule, Rule, one_by_one, rule_of, state_of

_aten = torch.ops.aten
_LISTS = (UPDATE, NORMS, UNSCALE, CLAMP, _aten._foreach_mul_.Tensor)
# Per gradient and before the norm: these wait for one bucket alone.
_AT_ONCE = (NORMS, UNSCALE, CLAMP)
# Buffers of a call that waits for the norm. AdamW's foreach kernels gain nothing from larger calls
# (python -m benchmarks.step --calls).
_CALL_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class Group:
    """A group of parameters of an optimizer, by number: checkpoints replace the group."""

    optimizer: torch.optim.Optimizer
    number: int
    rule_name: str

    @property
    def given(self) -> dict[str, Any]:
        """The group itself."""
        return self.optimizer.param_groups[self.number]

    @property
    def rule(self) -> Rule:
        """How the optimizer updates."""
        return BY_NAME[self.rule_name]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors of a parameter's state."""
        return self.rule.state(self.given)


def groups_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[Group]:
    """List the groups of optimizers with a rule, which graphs update."""
    return [
        Group(optimizer, number, name)
        for optimizer in optimizers
        if (name := rule_of(optimizer)) is not None
        for number in range(len(optimizer.param_groups))
    ]


@dataclass(frozen=True, eq=False)
class Trained:
    """A parameter with a gradient; ``place`` is that among all trained parameters of the model.

    ``optimizer`` may have no rule; then there is no ``group``, and the gradient stays an output.
    """

    fqn: str
    parameter: nn.Parameter
    place: int
    group: Group | None = None
    optimizer: torch.optim.Optimizer | None = None


class Epilogue:
    """Nodes that update a model's parameters, appended to the backward graph of a compile.

    Args:
        norm: how gradients are clipped; None: not at all.
        accumulated: FQNs whose ``grad`` has the sum of earlier microbatches.
        exchange_bytes: see :func:`.train_step`.
        scaler: has scaled the loss, and decides which optimizers are skipped; None: no loss scale.
        clip_value: clips each element of the gradients; None: not at all.
        watched: orders of further norms.
        hooked: FQNs whose gradients have hooks. They stay outputs, and are not updated.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        norm: Norm | None,
        accumulated: frozenset[str] = frozenset(),
        exchange_bytes: int | None = None,
        scaler: torch.amp.GradScaler | None = None,
        clip_value: float | None = None,
        watched: Sequence[float] = (),
        hooked: frozenset[str] = frozenset(),
    ) -> None:
        self.norm, self.accumulated, self.scaler = norm, accumulated, scaler
        self.clip_value, self.watched = clip_value, watched
        # By order, vectors of norms with the FQNs of their parameters.
        self.norms: dict[float, list[tuple[torch.Tensor, list[str]]]] = {}
        self.exchange_bytes = exchange_bytes
        self.limit_bytes: int | None = None
        owner = {p: o for o in optimizers for g in o.param_groups for p in g["params"]}
        group_of = {p: group for group in groups_of(optimizers) for p in group.given["params"]}
        names = parameter_names(model)
        # By canonical FQN, in the model's order; those with a group are updated.
        self.trained = {
            fqns[0]: Trained(
                fqns[0], p, place, None if fqns[0] in hooked else group_of.get(p), owner.get(p)
            )
            for place, (p, fqns) in enumerate(names.items())
        }
        self._aliases = {fqn: fqns[0] for fqns in names.values() for fqn in fqns[1:]}
        self.updated, self.gradients = list[Trained](), list[Trained]()
        self.owners: tuple[Owners, ...] = ()
        self.total_norm: torch.Tensor | None = None
        # By optimizer a scalar, above zero where ``scaler`` skips it.
        self.found_inf: dict[torch.optim.Optimizer, torch.Tensor] = {}
        self.ran = self._reported = False
        self._shards: dict[str, fx.Node] = {}
        self._seen: list[Any] | None = None
        self._inputs: list[Callable[[], torch.Tensor]] = []
        self._new = set[str]()
        self._states: dict[str, list[torch.Tensor]] = {}

    def append(
        self,
        graph: fx.Graph,
        inputs: Mapping[str, fx.Node],
        gradients: Sequence[tuple[fx.Node, str]],
        choice: Choice | None = None,
    ) -> list[fx.Node]:
        """Append the nodes to a graph with gradients, in place; return its new inputs."""
        self.limit_bytes = None if choice is None else choice.limit_bytes
        # A backward graph has the shards that it reads by the same names as the forward graph.
        self._shards = {**inputs, **self._shards}
        named = [(value, self._aliases.get(fqn, fqn)) for value, fqn in gradients]
        trained = [(value, self.trained[fqn]) for value, fqn in named if fqn in self.trained]
        return _Appending(self, graph, trained).run() if trained else []

    def merged(self, graph: fx.Graph) -> StepReport | None:
        """Join the nodes of each bucket; with clipping or a loss scale, across buckets."""
        group_calls(graph, self.norm is not None or self.scaler is not None)
        reported, self._reported = self._reported, bool(self.updated)
        if reported or not self.updated:
            return None
        updates = [n for n in graph.nodes if updates_of(n)]
        reductions, alike = None, set()
        if self.norm is not None:
            parameters = [p.parameter for p in self.gradients]
            reductions = sum(len(dims) for dims, _ in by_mesh(parameters))
            alike = {(p.device, p.dtype) for p in parameters}
        return StepReport(
            gradients=len(self.gradients),
            updates=tuple(map(updates_of, updates)),
            eager_updates=len({p.group for p in self.updated}),
            norm_kernels=sum(n.target is NORMS for n in graph.nodes),
            eager_norms=len(alike),
            norm_reductions=reductions,
            state_bytes=self.extra_bytes,
            buffer_bytes=max(map(buffer_bytes, graph.nodes), default=0),
            owners=self.owners,
        )

    @property
    def extra_bytes(self) -> int:
        """Bytes of optimizer state on the rank with most."""
        numel = {fqn: largest_shard_numel(p.parameter) for fqn, p in self.trained.items()}
        return sum(
            t.element_size() * (numel[fqn] if t.dim() else 1)
            for fqn, tensors in self._states.items()
            for t in tensors
        )

    def values(self) -> list[torch.Tensor]:
        """Return the values of the new inputs for a step, after making state that is missing."""
        self.read_state()
        self.ran = True
        return [read() for read in self._inputs]

    def skips(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the step that ran changed nothing of an optimizer; waits for the step."""
        by_norm = self.norm is not None and self.norm.skip and self.total_norm is not None
        if by_norm and not self.total_norm.isfinite().item():  # type: ignore[union-attr]
            return True
        flag = self.found_inf.get(optimizer)
        return flag is not None and bool(flag.item())

    def finish(self) -> None:
        """Drop used gradients, and new state of optimizers that did not update, after each run."""
        updated = [p.parameter for p in self.updated]
        torch.autograd.graph.increment_version(updated)
        for parameter in updated:
            parameter.grad = None
        new = {self.trained[fqn].optimizer for fqn in self._new}
        skipped = {o for o in new if o is not None and self.skips(o)}
        self._new = {fqn for fqn in self._new if self.trained[fqn].optimizer in skipped}
        self.forget_new()

    def forget_new(self) -> None:
        """Drop state that was made for a step that did not update: the next one may be eager."""
        for p in (self.trained[fqn] for fqn in self._new):
            assert p.group is not None
            del p.group.optimizer.state[p.parameter]
        self._new, self.ran = set(), False

    def state(self, fqn: str, k: int) -> torch.Tensor:
        """Return one of the tensors of a parameter's state, as :meth:`read_state` found it."""
        return self._states[fqn][k]

    def read_state(self) -> None:
        """Look up the state of all parameters, which a checkpoint may have replaced."""
        optimizers = dict.fromkeys(p.group.optimizer for p in self.updated if p.group)
        present = _values_in(optimizers)
        cached = self._seen
        if cached is not None and len(present) == len(cached) and all(map(is_, present, cached)):
            return
        for p in self.updated:
            assert p.group is not None
            names = p.group.names
            tensors, new = state_of(p.group.optimizer, p.group.given, p.parameter, names)
            self._check(p, names, tensors)
            self._states[p.fqn] = [shard_of(t) for t in tensors]
            if new:
                self._new.add(p.fqn)
        self._seen = _values_in(optimizers)

    def _check(self, p: Trained, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Raise a ValueError if a tensor of the state has another dtype than was compiled."""
        for name, was, t in zip(names, self._states.get(p.fqn, tensors), tensors, strict=True):
            if was.dtype != t.dtype:
                raise ValueError(
                    f"{name} of {p.fqn} is {t.dtype}, and the step was compiled for {was.dtype}: "
                    "a checkpoint or other code has replaced the optimizer's state. Cast it, or "
                    "make a new train_step()"
                )


def _note_largest(node: fx.Node, p: Trained) -> None:
    """Note the bytes of a shard or gradient on the rank with most: they differ between ranks."""
    set_work(node, Work(largest_shard_numel(p.parameter) * node.meta["val"].itemsize))


def _values_in(optimizers: Iterable[torch.optim.Optimizer]) -> list[Any]:
    return [v for o in optimizers for state in o.state.values() for v in state.values()]


class _Appending:
    """One call of :meth:`Epilogue.append`."""

    def __init__(
        self, epilogue: Epilogue, graph: fx.Graph, trained: list[tuple[fx.Node, Trained]]
    ) -> None:
        self.epilogue, self.graph, self.trained = epilogue, graph, trained
        self.output = next(iter(reversed(graph.nodes)))
        self.inputs: list[fx.Node] = []
        self.made: list[fx.Node] = []
        self.given = {n.name: n for n in graph.find_nodes(op="placeholder")}
        # New inputs stand after the others: AOTAutograd counts on the places of its own.
        self.last = list(self.given.values())[-1]
        self.mode = trained[0][0].meta["val"].fake_mode

    def run(self) -> list[fx.Node]:
        epilogue = self.epilogue
        with self.graph.inserting_before(self.output):
            gradients = self._gradients()
            epilogue.gradients = list(gradients)
            epilogue.updated = [p for p in gradients if p.group is not None]
            epilogue.read_state()  # the inputs below are made of the tensors that it finds
            found_inf = self._unscale(gradients)
            coefficient, skip = self._clip(gradients)
            if epilogue.clip_value is not None:
                for gradient in gradients.values():
                    self.call(CLAMP, [gradient], epilogue.clip_value)
            for gradient in gradients.values() if coefficient is not None else ():
                self.call(_aten._foreach_mul_.Tensor, [gradient], coefficient)
            if skip is not None:  # by the norm, for all optimizers
                flags = {o: self.call(ANY, [flag, skip]) for o, flag in found_inf.items()}
                optimizers = {p.optimizer for p in epilogue.updated}
                found_inf = dict.fromkeys(optimizers, skip) | flags  # type: ignore[arg-type]
            shards = self._update(gradients, found_inf) if epilogue.updated else {}
            # A compile is not a step.
            epilogue.forget_new()
        # AOTAutograd expects gradients. The step drops these, which take no memory.
        dropped = {value: shards[p] for value, p in self.trained if p in shards}
        self.output.args = fx.map_arg(self.output.args, lambda n: dropped.get(n, n))
        mark_backward(self.made)
        for node in self.made:
            note(node, OPTIMIZER, True)
        return self.inputs

    def _gradients(self) -> dict[Trained, fx.Node]:
        """Return the gradients, plus earlier microbatches' gradients, in the model's order."""
        gradients: dict[Trained, fx.Node] = {}
        for value, p in self.trained:
            # A trace without Dynamo has a gradient for each name of a parameter.
            gradients[p] = (
                self.call(_aten.add.Tensor, gradients[p], value) if p in gradients else value
            )
            _note_largest(gradients[p], p)
        for fqn in sorted(self.epilogue.accumulated):
            p = self.epilogue.trained[fqn]
            read = functools.partial(lambda p: shard_of(p.parameter.grad), p)
            earlier = self._input_of(p, "grad", read, shard_of(p.parameter))
            value = gradients.get(p)
            gradients[p] = (
                earlier if value is None else self.call(_aten.add_.Tensor, earlier, value)
            )
            _note_largest(gradients[p], p)
        return dict(sorted(gradients.items(), key=lambda item: item[0].place))

    def _unscale(self, gradients: dict[Trained, fx.Node]) -> dict[Any, fx.Node]:
        """Divide gradients by the loss scale; return, by optimizer, whether any is not finite."""
        epilogue = self.epilogue
        scaler = epilogue.scaler
        if scaler is None:
            return {}
        device = next(iter(gradients.values())).meta["val"].device
        inverse = self._input("inverse_scale", lambda: inverse_scale(scaler, device))
        parameters = [p.parameter for p in gradients]
        optimizers = [p.optimizer for p in gradients]
        nodes = list(gradients.values())
        flags = append_unscale(self.call, inverse, nodes, parameters, optimizers)
        for i, (optimizer, node) in enumerate(flags.items()):
            epilogue.found_inf[optimizer] = torch.zeros((), device=device)
            read = functools.partial(epilogue.found_inf.__getitem__, optimizer)
            buffer = self._input(f"found_inf_{i}", read)
            self.call(_aten.copy_.default, buffer, node)
        return flags

    def _clip(self, gradients: dict[Trained, fx.Node]) -> tuple[fx.Node | None, fx.Node | None]:
        norm = self.epilogue.norm
        nodes, parameters = list(gradients.values()), [p.parameter for p in gradients]
        names = [p.fqn for p in gradients]
        vectors = {}
        for order in dict.fromkeys(
            [*([] if norm is None else [norm.norm_type]), *self.epilogue.watched]
        ):
            norms = append_norms(self.call, nodes, parameters, order)
            vectors[order] = [vector for vector, _ in norms]
            buffers = [self._keep(f"norms_{len(vectors)}_{k}", v) for k, (v, _) in enumerate(norms)]
            fqns = [[names[i] for i in places] for _, places in norms]
            self.epilogue.norms[order] = list(zip(buffers, fqns, strict=True))
        if norm is None:
            return None, None
        total = norm.total(self.call, vectors[norm.norm_type])
        self.epilogue.total_norm = self._keep("total_norm", total)
        skip = self.call(NOT_FINITE, total) if norm.skip else None
        return norm.coefficient(self.call, total), skip

    def _keep(self, name: str, node: fx.Node) -> torch.Tensor:
        """Return a tensor that each step copies the value of a node to."""
        value = node.meta["val"]
        tensor = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
        self.call(_aten.copy_.default, self._input(name, lambda: tensor), node)
        return tensor

    def _update(
        self, gradients: dict[Trained, fx.Node], skips: dict[Any, fx.Node]
    ) -> dict[Trained, fx.Node]:
        """Append an update per parameter; return the inputs with their shards.

        ``skips``: by optimizer whether the step changes nothing of its parameters.
        """
        epilogue = self.epilogue
        groups = dict.fromkeys(p.group for p in epilogue.updated if p.group is not None)
        numbers = {group: self._numbers(group, i) for i, group in enumerate(groups)}
        fresh = None
        if any(group.rule.copies_at_first and group.names for group in groups):
            fresh = self._input(
                "fresh", lambda: torch.tensor([fqn in epilogue._new for fqn in epilogue.trained])
            )
        shards: dict[Trained, fx.Node] = {}
        matrices: dict[fx.Node | None, list[Update]] = {}  # by the node that skips them
        for p in epilogue.updated:
            group = p.group
            assert group is not None
            shards[p] = shard = self._shard(p)
            skip = skips.get(p.optimizer)
            state = [
                self._input_of(p, name, functools.partial(epilogue.state, p.fqn, k))
                for k, name in enumerate(group.names)
            ]
            if isinstance(group.rule, MatrixRule):
                nodes = (shard, gradients[p], *state, numbers[group][0])
                update = Update(p.fqn, p.parameter, group.given, *nodes)
                matrices.setdefault(skip, []).append(update)
                continue
            first = fresh if group.rule.copies_at_first else None
            arguments = (*numbers[group], skip, first, [p.place], group.rule_name)
            options = group.rule.options_of(group.given)
            node = self.call(UPDATE, [shard], [gradients[p]], state, *arguments, options)
            single = one_by_one(options, shard_of(p.parameter).device)
            nbytes = group.rule.copies(group.given, single) * largest_shard_bytes(p.parameter)
            set_updates(node, (p.fqn,), nbytes)
        # Gradients of the last layers arrive first.
        cap, limit = epilogue.exchange_bytes, epilogue.limit_bytes
        if cap is None and limit is not None and matrices:
            held = [*epilogue.trained.values(), *epilogue.gradients]
            room = limit - sum(largest_shard_bytes(p.parameter) for p in held)
            cap = bytes_within(
                room, [u.parameter for updates in matrices.values() for u in updates]
            )
        for skip, updates in matrices.items():
            epilogue.owners += append_matrices(self.call, updates[::-1], skip, cap)
        return shards

    def _numbers(self, group: Group, i: int) -> tuple[fx.Node, fx.Node | None]:
        """Return inputs with the numbers of a parameter group, and with its ``lr`` if a tensor."""

        def read() -> torch.Tensor:
            return torch.tensor(group.rule.numbers_of(group.given), dtype=torch.float64)

        node = self._input(f"numbers_{i}", read)
        if isinstance(group.rule, MatrixRule) or not isinstance(group.given["lr"], torch.Tensor):
            return node, None
        return node, self._input(f"lr_{i}", lambda: group.given["lr"])

    def _shard(self, p: Trained) -> fx.Node:
        """Return the input with a parameter's shard, a new one if the graph does not read it."""
        forward = self.epilogue._shards.get(p.fqn)
        if forward is not None and (node := self.given.get(forward.name)) is not None:
            _note_largest(node, p)
            return node
        node = self._input_of(p, "", lambda: shard_of(p.parameter))
        node.meta["desc"] = ParamAOTInput(p.fqn)
        if forward is not None:
            # The same fake tensor: what forward saved may be a view of it. The same name: memory
            # of forward's inputs counts once.
            node.meta["val"] = forward.meta["val"]
            node.name = node.target = forward.name
        return node

    def _input_of(
        self,
        p: Trained,
        name: str,
        read: Callable[[], torch.Tensor],
        like: torch.Tensor | None = None,
    ) -> fx.Node:
        """Return a new input: a tensor of a parameter's state or gradient by name, or a shard."""
        node = self._input(f"{p.fqn}.{name}" if name else p.fqn, read, like)
        if node.meta["val"].dim():
            _note_largest(node, p)
        return node

    def _input(
        self, name: str, read: Callable[[], torch.Tensor], like: torch.Tensor | None = None
    ) -> fx.Node:
        """Append an input to the graph that ``read`` gives in each step."""
        with self.graph.inserting_after(self.last):
            node = self.last = self.graph.placeholder("step_" + name.replace(".", "_"))
        node.meta |= {
            "desc": BufferAOTInput(name),
            "val": self.mode.from_tensor(read() if like is None else like),
        }
        self.inputs.append(node)
        self.epilogue._inputs.append(read)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Append a call, with its value computed on fake tensors."""
        node = self.graph.call_function(target, args, kwargs)
        with self.mode, torch.no_grad():
            values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
            node.meta["val"] = None if target is UPDATE else target(*values[0], **values[1])
        if target in _LISTS:
            set_work(node, Work(0))
        self.made.append(node)
        return node


def group_calls(graph: fx.Graph, clipped: bool) -> None:
    """Join nodes of gradients that one collective reduces, in place, once buckets are merged."""
    # With clipping or a loss scale, updates wait for all reductions, so a call covers several
    # buckets; without, a call follows one reduction, whose gradients it frees.
    calls: list[list[fx.Node]] = []
    open_calls: dict[Any, tuple[list[fx.Node], int]] = {}
    for node in graph.nodes:
        if node.target not in _LISTS:
            continue
        gradient = node.args[1 if node.target is UPDATE else 0][0]
        waits = clipped and node.target not in _AT_ONCE
        value, reduction = gradient.meta["val"], None if waits else _reduction_of(gradient)
        scalars = [a for a in node.args if not isinstance(a, list | tuple)]
        key = (node.target, reduction, value.dtype, value.device, *scalars)
        members, nbytes = open_calls.get(key, ([], 0))
        nbytes = _together(node)((nbytes, buffer_bytes(node)))
        if not members or (waits and nbytes > _CALL_BYTES):
            members, nbytes = [], buffer_bytes(node)
            calls.append(members)
        members.append(node)
        open_calls[key] = members, nbytes
    for members in calls:
        _merge_calls(graph, members)


def _reduction_of(value: fx.Node) -> fx.Node:
    """Return the wait that a gradient comes from, or the first node that computes it."""
    while not is_wait(value):
        sources = [n for n in value.all_input_nodes if n.op != "placeholder"]
        if len(sources) != 1:
            break
        value = sources[0]
    return value


def _together(node: fx.Node) -> Callable[[Iterable[int]], int]:
    """Return ``max`` or ``sum``, which combines the members' scratch bytes."""
    # A kernel per tensor takes the buffers of the largest, one after the other. But the first step
    # of SGD copies all gradients before it returns.
    if node.target is not UPDATE:
        return sum
    params, *_, fresh, _, _, options = node.args
    single = fresh is None and one_by_one(options, params[0].meta["val"].device)  # type: ignore[arg-type,index,union-attr]
    return max if single else sum


def _merge_calls(graph: fx.Graph, calls: Sequence[fx.Node]) -> None:
    """Merge calls of one operator into the last one, which gets the items of all their lists.

    ::

        before    update([a]) ... update([b])        norms([a]) -> item 0 ... norms([b]) -> item 0
        after     ... update([a, b])                 ... norms([a, b]) -> item 0, item 1
    """
    if len(calls) == 1:
        return
    last = calls[-1]
    last.args = tuple(
        [x for call in calls for x in call.args[i]] if isinstance(a, list | tuple) else a  # type: ignore[union-attr]
        for i, a in enumerate(last.args)
    )
    if last.target is UPDATE:
        fqns = [fqn for call in calls for fqn in updates_of(call)]
        set_updates(last, fqns, _together(last)(map(buffer_bytes, calls)))
    if last.target is NORMS:  # a result for each gradient
        last.meta["val"] = [v for call in calls for v in call.meta["val"]]
        before = last  # items follow the merged call, in the order of the gradients
        for i, item in [(i, user) for i, call in enumerate(calls) for user in call.users]:
            item.args = (last, i)
            before.append(item)
            before = item
    for call in calls[:-1]:
        call.replace_all_uses_with(last)  # the flag of a loss scale
        graph.erase_node(call)
