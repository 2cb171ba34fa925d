"""What torch would do over and over when it merges a bucket, done once.

The one place that touches ``bucketing._trace`` and ``bucketing.NodeSource``.

torch merges a bucket by tracing a small function on its members' fake tensors and copying the
traced nodes into the graph. Most of the time goes into the tracing, and a model has few different
buckets, repeated layer after layer. Within :func:`shared_traces` the tracing is :mod:`._record`'s,
and the second bucket of the same function, shapes and dtypes takes the first one's nodes; only the
fake tensors are made anew, by running the nodes in the fake mode, so that no two buckets share a
storage::

    a1, b1 -> trace -> nodes -> copy          a2, b2 -> (the same nodes, own values) -> copy

torch also writes into every new node where it comes from, one record per member, made anew for each
pair: in a bucket of ``n`` members ``O(n * n)`` equal records, or half of the time for ``n = 90``.
Here every member has one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

from ._record import record

__all__ = ["shared_traces"]

_log = logging.getLogger(__name__)

_Trace = Callable[[Callable[..., Any], Any], fx.GraphModule]


@contextlib.contextmanager
def shared_traces() -> Iterator[None]:
    """While this lasts, torch's merge functions trace each kind of bucket once, and say once where
    a member comes from. Within another one the traces are the other one's."""
    from torch._inductor.fx_passes import bucketing

    trace, source = bucketing._trace, bucketing.NodeSource
    if isinstance(trace, _Traces):
        yield
        return
    bucketing._trace, bucketing.NodeSource = _Traces(trace), _Sources(source)
    try:
        yield
    finally:
        bucketing._trace, bucketing.NodeSource = trace, source


class _Sources:
    """Stands in for ``bucketing.NodeSource``. Nothing changes a record once it is made."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._known: dict[tuple[Any, ...], Any] = {}

    def __call__(self, node: fx.Node, pass_name: str, action: Sequence[Any]) -> Any:
        key = (node, pass_name, tuple(action))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._make(node, pass_name, action)
        return found


class _Traces:
    """Stands in for ``bucketing._trace``."""

    def __init__(self, trace: _Trace) -> None:
        self._trace = trace
        self._known: dict[tuple[Any, ...], fx.GraphModule] = {}

    def _recorded(self, function: Callable[..., Any], inputs: Any) -> fx.GraphModule:
        try:
            return record(function, inputs)
        except Exception:  # what torch's own trace does not like either, that raises again
            _log.debug("a bucket is traced in full", exc_info=True)
            return self._trace(function, inputs)

    def __call__(self, function: Callable[..., Any], inputs: Any) -> fx.GraphModule:
        flat, spec = pytree.tree_flatten(inputs)
        tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        described = [_describe(value) for value in flat]
        # A trace tells its inputs apart by identity: with one tensor twice it is another trace.
        if None in described or len({id(t) for t in tensors}) < len(tensors):
            return self._trace(function, inputs)
        key = (function, spec, *described)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._recorded(function, inputs)
        else:
            _renew_values(known.graph, tensors)
        return known


def _describe(value: Any) -> tuple[Any, ...] | None:
    """What of an input decides about the trace; None where that can't be said (symbolic sizes)."""
    if isinstance(value, FakeTensor):
        layout = (*value.shape, *value.stride(), value.storage_offset())
        if not all(isinstance(n, int) for n in layout):
            return None
        return (FakeTensor, layout, value.dtype, value.device, id(value.fake_mode))
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return (type(value), value)
    return None


def _renew_values(graph: fx.Graph, tensors: list[torch.Tensor]) -> None:
    """Run a traced graph on other fake tensors and leave the results in ``meta["val"]``."""
    assert isinstance(tensors[0], FakeTensor)
    values: dict[fx.Node, Any] = {}
    inputs = iter(tensors)
    with tensors[0].fake_mode:
        for node in graph.nodes:
            if node.op == "placeholder":
                # Only tensors are used by the traced nodes; other inputs are constants in them.
                values[node] = (
                    next(inputs) if isinstance(node.meta.get("val"), torch.Tensor) else None
                )
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                node.meta["val"] = values[node] = node.target(*args, **kwargs)
            elif node.op != "output":
                raise AssertionError(
                    f"unexpected {node.op} in the trace of a bucket: {node.format_node()}"
                )
