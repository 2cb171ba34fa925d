"""Count the operations and loads of a value that Inductor computes inside its readers.

Inductor runs the body of a value symbolically. An operation counts once for each index at which it
computes an element, a load once for each index at which it reads a buffer, and a constant once
(``ops_handler.py:OpCounterCSE``, ``dependencies.py``). The index changes where a view, a broadcast
or an operator such as a concatenation stands in between::

    i = iota(n)   i[:, None] <= i[None, :]          3 operations: i of rows, i of columns, <=
    x  cat(x[:, h:] * c, x[:, :h] * c)              4 loads, 2 of them of x
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from .nodes import tensors_in
from .operators import CASTS, INDEXED, REARRANGES, Operators, is_reduction

_aten = torch.ops.aten
_MEANS = frozenset({_aten.mean.default, _aten.mean.dim})
"""Operators that are a sum, and a division in each reader."""


class Count(NamedTuple):
    """The counts of one value."""

    operations: int  # with loads and constants
    loads: int
    varying: int  # loads that are not the same for all elements


class Inlined:
    """Counts the values of a walk over a graph that have no buffer.

    ``root`` maps views to the values that they show.
    """

    def __init__(self, operators: Operators, root: Mapping[fx.Node, fx.Node]) -> None:
        self._operators, self._root = operators, root
        # Counts that may be too high: an operation is in them once for each way to it.
        self._most: dict[fx.Node, Count] = {}

    def add(self, node: fx.Node) -> None:
        """Add a value, after the values that it reads."""
        operator, most = self._operators[node], self._most
        operations, loads = operator.operations + len(operator.constants), 0
        for value in operator.inputs:
            root = self._root.get(value, value)
            inner = most.get(root)
            if inner is not None:
                operations += inner.operations + 1  # with a cast
                loads += inner.loads
            else:
                operations += 4 if root.target in _MEANS else 2
                loads += 1
        terms = operator.terms
        most[node] = Count(operations * terms, loads * terms, loads * terms)

    def remove(self, node: fx.Node) -> None:
        """Remove a value that has a buffer now."""
        del self._most[node]

    def count(
        self, node: fx.Node, buffers: Iterable[fx.Node], operations: int, loads: int
    ) -> Count:
        """Return the counts of a value that reads some buffers.

        They are exact if one of them may be above a limit.
        """
        most = self._most[node]
        if most.operations > operations or most.loads > loads:
            # Walks over a graph differ in few buffers, and these decide what is computed.
            known, key = self._operators.counts, (node, *buffers)
            if key not in known:
                known[key] = self._exactly(node)
            most = self._most[node] = known[key]
        return most

    def _exactly(self, node: fx.Node) -> Count:
        found, stack = dict[Any, int](), list[tuple[fx.Node, Any]]([(node, None)])
        loads, varying = 0, 0
        while stack:
            key = stack.pop()
            if key in found:
                continue
            reader, index = key
            operator = self._operators[reader]
            if reader not in self._most:
                found[key] = 1
                loads += 1
                varying += operator.numel > 1
                if reader.target in _MEANS:  # the buffer has the sum
                    found |= {("mean", key): 1, operator.terms: 1}
                continue
            found[key] = operator.operations * max(operator.terms - 1, 1)
            found |= dict.fromkeys(operator.constants, 1)
            dtype = _computed_in(reader)
            for i, value in enumerate(operator.inputs):
                if not isinstance(tensor := value.meta.get("val"), torch.Tensor):
                    found[value] = 1  # a size
                    continue
                step = self._step(reader, value, i)
                for term in range(operator.terms):
                    inner = index if step is None else (step, term, index)
                    stack.append((self._root.get(value, value), inner))
                    if dtype is not None and tensor.dtype not in (dtype, torch.bool):
                        found[dtype, stack[-1]] = 1
        return Count(sum(found.values()), loads, varying)

    def _step(self, reader: fx.Node, value: fx.Node, place: int) -> Any:
        """Return how the index changes from a reader to an input; None: it stays."""
        operators, root = self._operators, self._root.get(value, value)
        if operators[reader].terms > 1 or reader.target is _aten.cat.default:
            return reader, place
        if reader.target in REARRANGES and not (place and reader.target in INDEXED):
            return reader, place
        numel = operators[value].numel
        plain = value is root or (
            numel == operators[root].numel
            and operators.is_contiguous(value)
            and operators.is_contiguous(root)
        )
        if plain and numel == operators[reader].numel:
            return None
        return _strides(value, reader) or value


def _strides(value: fx.Node, reader: fx.Node) -> tuple[int, ...]:
    """Return where a reader's elements are in the memory of ``value``; empty if unknown."""
    (tensor,), (result, *_) = map(tensors_in, (value.meta["val"], reader.meta["val"]))
    missing = [1] * (result.dim() - tensor.dim())
    numbers = (
        (tensor.storage_offset(),),
        (*result.shape,),
        (*missing, *tensor.shape),
        (*missing, *tensor.stride()),
    )
    if not all(isinstance(number, int) for one in numbers for number in one):
        return ()
    (offset,), *dims = numbers
    rows = ((n, stride * (own > 1)) for n, own, stride in zip(*dims, strict=True) if n > 1)
    return offset, *itertools.chain(*rows)


def _computed_in(node: fx.Node) -> torch.dtype | None:
    """Return the dtype that an operator casts numbers to; None: it takes them as they are."""
    if node.target in CASTS or node.target in REARRANGES or is_reduction(node):
        return None
    dtype: torch.dtype | None = node.meta["val"].dtype
    if dtype is torch.bool:
        tensors = [t for a in node.all_input_nodes for t in tensors_in(a.meta.get("val"))]
        dtypes = [t.dtype for t in tensors if t.dtype is not torch.bool]
        dtype = functools.reduce(torch.promote_types, dtypes) if dtypes else None
    return dtype
