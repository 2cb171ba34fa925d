"""Give numbers to sizes that depend on data or on the rank, so that all ranks estimate alike.

A size that is known only when the graph runs, such as the number of tokens of an expert, is an
expression of symbols (``8*u0``). Each symbol gets one number: the caller's, or torch's hint
(``torch._dynamo.decorators.mark_unbacked``), or :data:`DEFAULT`, clamped to the range that torch
knows for the symbol. So sizes stay in proportion. Only orders and byte caps depend on the numbers.

Shards of parameters whose rows do not divide evenly differ between ranks: the last ranks have fewer
rows, or none. They pad a shard before it is gathered, and cut gradients::

    rank 0    w [3] -> to bf16 ----------> all_gather      reduce_scatter -> wait ----------> output
    rank 1    w [2] -> to bf16 -> pad 1 -> all_gather      reduce_scatter -> wait -> [0:2] -> output

So if a graph has such parameters, estimates ignore how a rank handles its own shards
(:func:`shard_side`): the nodes take no time, a shard has the bytes of the largest rank's (the rows
after the pad, or before the cut), and copies between a shard and its gather have no bytes, except
before a pad. Ranks with full shards find such parameters, too, since all ranks cut gathered
parameters and pad gradients. The norm of gradients and updates have the largest rank's cost instead
(:class:`Work`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.fx as fx

from .._torch.aot import size_with, symbol_facts
from .nodes import group_size, is_compute, is_wait, kind_of, note, noted, tensors_in
from .values import is_move

DEFAULT = 8192
"""Inductor's default, too (``torch._inductor.config.unbacked_symint_fallback``)."""

GivenHints: TypeAlias = "int | Callable[[Any], int] | None"


def check_size_hints(given: object) -> None:
    """Raise a TypeError or ValueError for wrong ``size_hints`` of :func:`.backend`."""
    if given is None or callable(given):
        return
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(
            f"size_hints must be a whole number or a callable of an expression, got {given!r}"
        )
    if given < 0:
        raise ValueError(f"size_hints must be at least 0, got {given!r}")


class SizeHints:
    """Replace symbolic sizes by numbers.

    Args:
        given: a number for every symbol that depends on data, or a callable that returns one for a
            symbol, given as a sympy expression (``u0``). See :func:`check_size_hints`.

    Attributes:
        used: the number of each symbol that was needed, by name.
        problems: errors of the callable, each replaced by the default.
    """

    def __init__(self, given: GivenHints = None) -> None:
        check_size_hints(given)
        self.given = given
        self.used: dict[str, int] = {}
        self.problems: list[str] = []

    @staticmethod
    def of(given: SizeHints | GivenHints) -> SizeHints:
        """Return ``given`` as size hints."""
        return given if isinstance(given, SizeHints) else SizeHints(given)

    def __call__(self, size: Any) -> int:
        """Return ``size`` as a number of at least 0."""
        if isinstance(size, int):
            return size
        try:
            return max(0, size_with(size, self._number))
        except (ArithmeticError, TypeError, ValueError):
            return DEFAULT  # for instance a division by a symbol whose number is 0

    def concrete(self, value: Any) -> Any:
        """Replace symbolic sizes in ``value`` by numbers; a tensor with some becomes meta."""
        if isinstance(value, torch.SymInt):
            return self(value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.concrete, value))
        if not isinstance(value, torch.Tensor) or all(isinstance(n, int) for n in value.shape):
            return value
        return torch.empty(tuple(map(self, value.shape)), dtype=value.dtype, device="meta")

    def _number(self, symbol: Any, env: Any) -> int:
        """Return the number that stands for a symbol, within its bounds."""
        name = str(symbol)
        if name not in self.used:
            hint, least, most = symbol_facts(symbol, env)
            number = self._given(symbol)
            if number is None:
                number = DEFAULT if hint is None else int(hint)
            number = max(number, least)
            self.used[name] = number if most is None else min(number, most)
        return self.used[name]

    def _given(self, symbol: Any) -> int | None:
        """Return the user's hint for a symbol; None without one."""
        if not callable(self.given):
            return self.given
        try:
            number = self.given(symbol)
            check_size_hints(number)
        except Exception as error:  # an estimate must not fail the compile
            self.problems.append(f"size_hints({symbol}): {type(error).__name__}: {error}")
            return None
        return None if callable(number) else number

    def to_text(self) -> str:
        """Format the numbers used for symbols in one line; empty without symbols."""
        if not self.used:
            return ""
        by_number: dict[int, list[str]] = {}
        for name in sorted(self.used, key=lambda n: (len(n), n)):
            by_number.setdefault(self.used[name], []).append(name)
        parts = []
        for number, names in by_number.items():
            shown = names if len(names) <= 4 else [*names[:3], f"... {len(names)} in all"]
            parts.append(f"{number} for {', '.join(shown)}")
        source = "by default" if self.given is None else "as given"
        return f"sizes that depend on data, {source}: {'; '.join(parts)}"


_WORK_KEY = "bucketing_work"


class Work(NamedTuple):
    """The cost of a node on the most expensive rank."""

    result: int  # bytes of its result
    # Bytes that it reads and writes; None: those of its inputs and its result.
    moved: int | None = None
    flops: int = 0  # floating-point operations in bfloat16, where ``moved`` is given


def set_work(node: fx.Node, work: Work) -> None:
    """Note the cost of ``node``, in place of the cost of its own sizes."""
    note(node, _WORK_KEY, work)


def work_of(node: fx.Node) -> Work | None:
    """Return the noted cost; None for nodes whose sizes give it."""
    return noted(node, _WORK_KEY)


def result_bytes(node: fx.Node, hints: SizeHints) -> int:
    """Count the bytes of the tensors that a node returns."""
    work = work_of(node)
    if work is not None:
        return work.result
    values = tensors_in(node.meta.get("val"))
    return sum(hints(t.numel()) * t.dtype.itemsize for t in values)


_aten = torch.ops.aten
_Elements = Callable[[fx.Node], int]
"""The number of elements of a node's result."""


@dataclass(frozen=True)
class ShardSide:
    """The nodes of a graph that may be different on other ranks; none if all shards are even."""

    # The nodes that only handle this rank's shards, inputs included: those before gathers without
    # computation, and those between reductions and the outputs.
    nodes: dict[fx.Node, None] = field(default_factory=dict)
    # Maps nodes to the number of elements that the largest rank has of the parameter or gradient.
    # Nodes that only some ranks have, and unused inputs, have no entry.
    elements: dict[fx.Node, int] = field(default_factory=dict)


def shard_side(graph: fx.Graph, hints: SizeHints | None = None) -> ShardSide:
    """Find the nodes of a graph that may be different on other ranks."""

    def elements(node: fx.Node) -> int:
        value = node.meta.get("val")
        return numbers(value.numel()) if isinstance(value, torch.Tensor) else 0

    numbers = hints or SizeHints()
    nodes = list(graph.nodes)
    starts = [n for n in nodes if kind_of(n) is not None]
    # With even shards all ranks have one graph, and every node has its own cost.
    if all(unpadded_rows(start) is None for start in starts):
        return ShardSide()
    free: dict[fx.Node, bool] = {}  # depends on neither computation nor communication
    reduced: dict[fx.Node, None] = {}  # made from the result of one reduction alone
    for node in nodes:
        inputs = node.all_input_nodes
        if node.op != "call_function":
            free[node] = node.op in ("placeholder", "get_attr")
        elif is_wait(node):
            free[node] = False
            if kind_of(inputs[0]) in ("reduce_scatter", "all_reduce"):
                reduced[node] = None
        else:
            local = kind_of(node) is None and not is_compute(node)
            free[node] = local and all(free.get(n) for n in inputs)
            if local and len(inputs) == 1 and inputs[0] in reduced:
                reduced[node] = None
    # Backwards: a node belongs to the shard's side if all readers do, or send or update the shard.
    ours: dict[fx.Node, bool] = {}
    for node in reversed(nodes):
        local = free[node] or (node in reduced and not is_wait(node))
        ours[node] = local and all(
            user.op == "output"
            or ours.get(user)
            or kind_of(user) == "all_gather"
            or work_of(user) is not None
            for user in node.users
        )
    # A gather's output buffer has the same size on every rank.
    buffers = dict.fromkeys(n.kwargs.get("out") for n in starts)
    side = {n: None for n in nodes if ours[n] and n not in buffers}
    return ShardSide(side, _parameters(side, elements) | _gradients(side, reduced, elements))


def _parameters(ours: dict[fx.Node, None], elements: _Elements) -> dict[fx.Node, int]:
    """Map each input to its largest number of elements on the way to its pack or gather."""
    largest: dict[fx.Node, int] = {}
    for node in reversed(ours):
        onwards = (user for user in node.users if _is_pad(user) or _one_to_one(user, elements))
        largest[node] = max([elements(node), *(largest.get(user, 0) for user in onwards)])
    return {n: largest[n] for n in ours if n.op in ("placeholder", "get_attr") and n.users}


def _gradients(
    ours: dict[fx.Node, None], reduced: dict[fx.Node, None], elements: _Elements
) -> dict[fx.Node, int]:
    """Map each gradient to its number of elements before it is cut."""
    whole: dict[fx.Node, int] = {}
    for node in ours:
        if node in reduced:
            whole[node] = elements(node)
            if _is_cut(node) or _one_to_one(node, elements):
                source = node.all_input_nodes[0]
                whole[node] = whole.get(source) or elements(source)
    return whole


def _one_to_one(node: fx.Node, elements: _Elements) -> bool:
    """Return whether ``node`` has the elements of its only input, in another shape or dtype."""
    if len(node.all_input_nodes) != 1 or not is_move(node):
        return False
    return elements(node) == elements(node.all_input_nodes[0])


def unpadded_rows(start: fx.Node) -> int | None:
    """Return the rows that a gather's result is cut to, or that a gradient has before padding.

    None without padding. In a bucket they are those of one member.
    """
    # Less than one row per rank is cut, alone or in a bucket. All ranks decide alike.
    kind = kind_of(start)
    if kind == "all_gather":
        stack = [start]
        while stack:
            node = stack.pop()
            for user in node.users:
                if _is_cut(user) and _misses_rows(node, user, group_size(start)):
                    return int(user.meta["val"].shape[0])
                if is_move(user):
                    stack.append(user)
    elif kind == "reduce_scatter":
        stack = list(start.all_input_nodes)
        while stack:
            node = stack.pop()
            if _is_pad(node):
                computed = (n for n in node.all_input_nodes if n.op == "call_function")
                new = [n for n in computed if not n.all_input_nodes]
                return sum(
                    int(n.meta["val"].shape[0]) for n in node.all_input_nodes if n not in new
                )
            if is_move(node):
                stack += node.all_input_nodes
    return None


def _is_cut(node: fx.Node) -> bool:
    """Return whether ``node`` slices the first rows of its input."""
    return node.target is _aten.slice.Tensor and (*node.args, 0, 0)[1:3] == (0, 0)


def _is_pad(node: fx.Node) -> bool:
    """Return whether ``node`` pads its input, or concatenates it with a new tensor."""
    if node.target is _aten.cat.default:
        return any(not n.all_input_nodes and n.op == "call_function" for n in node.all_input_nodes)
    return node.target is _aten.constant_pad_nd.default


def _misses_rows(whole: fx.Node, cut: fx.Node, fewer_than: int) -> bool:
    """Return whether ``cut`` has fewer rows than ``whole``, but not by ``fewer_than`` or more."""
    before, after = (n.meta["val"].shape[0] for n in (whole, cut))
    if not isinstance(before, int) or not isinstance(after, int):
        return False  # an activation; a parameter's sizes are numbers
    return 0 < before - after < fewer_than
