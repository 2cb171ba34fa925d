"""What torch would do over and over when it merges a bucket, done once.

The one place that touches ``bucketing._trace``, ``NodeSource`` and ``_sort_bucket_region``.

torch merges a bucket by tracing a small function on its members' fake tensors and copying the
traced nodes into the graph. Most of the time goes into the tracing, and a model has few different
buckets, repeated layer after layer. Within :func:`shared_traces` the tracing is
:mod:`._torch.record`'s, and the second bucket of the same function, shapes and dtypes takes the
first one's nodes; only the fake tensors are made anew, so that no two buckets share a storage::

    a1, b1 -> trace -> nodes -> copy          a2, b2 -> (the same nodes, own values) -> copy

torch also writes into every new node where it comes from, one record per member, made anew for each
pair: in a bucket of ``n`` members ``O(n * n)`` equal records, or half of the time for ``n = 90``.
Here every member has one.

And it sorts what lies between each bucket and its inputs. One sort after all buckets does the same.
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
from torch.utils._python_dispatch import _disable_current_modes

from .record import record

__all__ = [
    "shared_traces",
]

_log = logging.getLogger(__name__)

_Trace = Callable[[Callable[..., Any], Any], fx.GraphModule]


@contextlib.contextmanager
def shared_traces() -> Iterator[None]:
    """While this lasts, torch's merge functions trace each kind of bucket once, say once where a
    member comes from, and leave the sorting to the caller. Within another one the traces are the
    other one's."""
    from torch._inductor.fx_passes import bucketing

    if isinstance(bucketing._trace, _Traces):
        yield
        return
    stand_ins = {
        "_trace": _Traces(bucketing._trace),
        "NodeSource": _Sources(bucketing.NodeSource),
        "_sort_bucket_region": _leave_unsorted,
    }
    originals = {name: getattr(bucketing, name) for name in stand_ins if hasattr(bucketing, name)}
    for name in originals:
        setattr(bucketing, name, stand_ins[name])
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(bucketing, name, original)


def _leave_unsorted(*region: Any) -> None:
    """Stands in for ``bucketing._sort_bucket_region``."""


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
        tensors = [value for value in flat if isinstance(value, FakeTensor)]
        described = [_describe(value) for value in flat]
        # A trace tells its inputs apart by identity: with one tensor twice it is another trace.
        if None in described or len({id(t) for t in tensors}) < len(tensors):
            return self._trace(function, inputs)
        if len({t.untyped_storage()._cdata for t in tensors}) < len(tensors):
            return self._recorded(function, inputs)  # what lies in whose storage is its own affair
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


def _renew_values(graph: fx.Graph, tensors: Sequence[FakeTensor]) -> None:
    """Give a traced graph's ``meta["val"]`` other inputs and storages of its own.

    The layouts are the same, so nothing has to be computed: what lay in one storage does so again,
    and what lay in an input's lies in the new input's.
    """
    mode = tensors[0].fake_mode
    storages: dict[int, torch.UntypedStorage] = {}
    new: dict[int, FakeTensor] = {}  # by the id of the old one, of which a node may be a copy
    inputs = iter(tensors)

    def renewed(old: Any) -> Any:
        if isinstance(old, (list, tuple)):
            return type(old)(map(renewed, old))
        if not isinstance(old, FakeTensor):
            return old
        found = new.get(id(old))
        if found is None:
            storage = old.untyped_storage()
            mine = storages.get(storage._cdata)
            if mine is None:
                mine = storages[storage._cdata] = torch.UntypedStorage(
                    storage.nbytes(), device="meta"
                )
            meta = torch.empty(0, dtype=old.dtype, device="meta")
            meta.set_(mine, old.storage_offset(), old.shape, old.stride())
            found = new[id(old)] = FakeTensor(mode, meta, old.device)
        return found

    with torch.no_grad(), _disable_current_modes():
        for node in graph.nodes:
            val = node.meta.get("val")
            if node.op == "placeholder" and isinstance(val, FakeTensor):
                fresh = next(inputs)
                storages[val.untyped_storage()._cdata] = fresh.untyped_storage()
                node.meta["val"] = new[id(val)] = fresh
            elif val is not None:
                node.meta["val"] = renewed(val)
