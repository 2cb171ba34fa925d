"""Group elementwise operators and reductions into kernels as Inductor does.

Values are walked in the order of the graph. An elementwise value is computed inside its readers
until it must be written, once in each::

    x -> cast -> square -> mean -> rsqrt -> mul(cast, rsqrt) -> mm
    [           one kernel: reads x, writes mul            ]

What is written joins a kernel that touches one of its buffers if both have one iteration space and
no other kernel has to run between them. A reduction of ``n`` rows of ``r`` elements shares its
space with elementwise operators of ``n`` or of ``n * r`` elements. Everything else, products among
it, is a kernel of its own. The rules, with their numbers, are those of torch 2.15's
``_inductor/ir.py`` (what is written), ``choices.py`` (split reductions) and ``scheduler.py``; a
cycle through several joined kernels isn't looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from ...graph.collectives import is_collective, is_compute, is_view, tensors_in

_aten = torch.ops.aten
_MORE_POINTWISE = frozenset(
    {
        _aten.cat.default,
        _aten.clone.default,
        _aten.constant_pad_nd.default,
        _aten.copy_.default,
        _aten.embedding.default,
        _aten.full.default,
        _aten.gather.default,
        _aten.index.Tensor,
        _aten.repeat.default,
        _aten.scalar_tensor.default,
        _aten.slice_copy.Tensor,
        _aten.slice_scatter.default,
        torch.ops.prims.convert_element_type.default,
        torch.ops.prims.iota.default,
    }
)
_SCATTERS = {
    _aten._unsafe_masked_index_put_accumulate.default: 3,
    _aten.index_put.default: 2,
    _aten.index_put_.default: 2,
    _aten.scatter_add.default: 3,
}
"""Operators that add to a copy of their first argument, and the place of the added values."""
_HEAVY = frozenset({"exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"})
"""On the CPU, results of these are written if several nodes read them."""
_READS_REUSED = 4
"""The most buffers of a value that several readers compute again."""
_READS = {"cuda": 8, "cpu": 12}
"""The most buffers of a value that isn't written."""
_MOST_FUSED = 64
_CAT = 8
"""The most inputs of a concatenation that is computed inside its readers."""
_SPLIT_ROWS, _SPLIT_COLUMNS, _SPLIT_FROM = 264, 8448, 32
"""Reductions to fewer results than these, of rows or of columns, run in two kernels, if each result
has more than ``_SPLIT_FROM`` terms: 2 and 64 for each of the H100's 132 multiprocessors."""
_LONG_ROW = 8192
"""Rows up to this length are reduced in one kernel."""


@dataclass
class Kernel:
    """A kernel.

    Args:
        space: the number of rows, and of the elements in each; of an elementwise one, all and 1.
        shares: bytes that it reads and writes, by the node that they are written for; each buffer
            counts once.
    """

    space: tuple[int, int]
    shares: dict[fx.Node, int] = field(default_factory=dict)
    buffers: dict[fx.Node, int] = field(default_factory=dict)
    closed: bool = False
    flat: bool = False

    @property
    def nbytes(self) -> int:
        return sum(self.shares.values())


def kernels_of(
    nodes: Sequence[fx.Node], size: Callable[[fx.Node], int], absent: Collection[fx.Node] = ()
) -> list[Kernel]:
    """Group the elementwise operators and reductions among ``nodes``.

    Args:
        nodes: nodes of a graph that run here, in order. What others of the graph read is written.
        size: the bytes of a node's result.
        absent: nodes that count as no reader and no kernel, as they differ from rank to rank.
    """
    return _Walk(nodes, size, absent).kernels


class _Walk:
    """The walk over the nodes of a graph."""

    def __init__(
        self, nodes: Sequence[fx.Node], size: Callable[[fx.Node], int], absent: Collection[fx.Node]
    ) -> None:
        self.kernels: list[Kernel] = []
        self._inside = dict.fromkeys(nodes)
        self._absent, self._bytes = absent, size
        self._sizes: dict[fx.Node, int] = {}
        self._root: dict[fx.Node, fx.Node] = {}
        self._inline: dict[fx.Node, dict[fx.Node, int]] = {}  # value -> bytes of each buffer
        self._heavy: set[fx.Node] = set()
        self._made_by: dict[fx.Node, int] = {}  # buffer -> kernel, which may be another library's
        self._before: list[int] = []  # by kernel, a bit set of those it needs
        self._at: list[Kernel | None] = []
        self._touching: dict[fx.Node, list[int]] = {}
        self._left: set[fx.Node] = set()  # buffers that other kernels read
        self._written: list[tuple[int, fx.Node]] = []
        found = (t for n in nodes for t in tensors_in(n.meta.get("val")))
        self._cpu = next((t.device.type for t in found), "cuda") == "cpu"
        for node in nodes:
            if node not in absent:
                self._visit(node)
        for node in [n for n in self._inline if self._is_read_outside(n)]:
            self._write(node)
        self._left.update(n for _, n in self._written if self._is_read_outside(n))
        for number, node in self._written:
            kernel = self._at[number]
            if kernel is not None and node in self._left:
                kernel.shares[node] = kernel.shares.get(node, 0) + self._size(node)

    def _size(self, node: fx.Node) -> int:
        if node not in self._sizes:
            self._sizes[node] = self._bytes(node)
        return self._sizes[node]

    def _numel(self, node: fx.Node) -> int:
        """Return the elements of a result, by its bytes: sizes may depend on data."""
        value = node.meta.get("val")
        return self._size(node) // value.dtype.itemsize if isinstance(value, torch.Tensor) else 0

    def _is_read_outside(self, node: fx.Node) -> bool:
        """Return whether a value outlives the nodes; views are looked through."""
        users = [u for u in node.users if u not in self._absent]
        return not users or any(
            u not in self._inside or (is_view(u) and self._is_read_outside(u)) for u in users
        )

    def _visit(self, node: fx.Node) -> None:
        target: Any = node.target
        inputs = node.all_input_nodes
        if is_view(node):
            if inputs:
                first = self._root.get(inputs[0], inputs[0])
                several = first in self._made_by and not isinstance(
                    first.meta.get("val"), torch.Tensor
                )
                self._root[node] = node if several else first
                if several:
                    self._made_by[node] = self._made_by[first]
                self._settle(node)
        elif not is_fused(node):
            self._call(node)
        elif target in _SCATTERS:
            self._scatter(node, _SCATTERS[target])
        elif is_reduction(node):
            self._reduce(node)
        else:
            self._compute(node)

    def _reads(self, inputs: Sequence[fx.Node]) -> dict[fx.Node, int]:
        """Return the bytes that a kernel with these inputs reads of each buffer."""
        found: dict[fx.Node, int] = {}
        for node in inputs:
            root = self._root.get(node, node)
            mine = self._inline.get(root)
            if mine is None:
                mine = {root: self._size(node)}
            elif node is not root and (part := self._size(node)) < (all_ := self._size(root)):
                mine = {buffer: nbytes * part // all_ for buffer, nbytes in mine.items()}
            for buffer, nbytes in mine.items():
                found[buffer] = min(found.get(buffer, 0) + nbytes, self._size(buffer))
        return found

    def _compute(self, node: fx.Node) -> None:
        inputs, target = node.all_input_nodes, node.target
        if target is _aten.copy_.default:
            self._join(node, self._reads(inputs[1:]), (self._numel(node), 1), into=inputs[0])
            return
        if target in (_aten.embedding.default, _aten.index.Tensor, _aten.gather.default):
            reads = self._reads(inputs)  # of the table, no more than is returned
            first = self._root.get(inputs[0], inputs[0])
            if first in reads:
                reads[first] = min(reads[first], self._size(node))
        else:
            reads = self._reads(inputs)
        if target is _aten.cat.default and (self._cpu or len(inputs) > _CAT):
            for part in inputs:
                space, nbytes = (self._numel(part), 1), self._size(part)
                self._join(node, self._reads([part]), space, nbytes=nbytes, alone=self._cpu)
            return
        self._inline[node] = reads
        name = getattr(target, "_opname", "")
        if name in _HEAVY or any(self._root.get(n, n) in self._heavy for n in inputs):
            self._heavy.add(node)
        self._settle(node)

    def _settle(self, node: fx.Node) -> None:
        """Write an elementwise value if that is better than to compute it in each reader."""
        root = self._root.get(node, node)
        reads = self._inline.get(root)
        if reads is None:
            return
        users = [u for u in node.users if u not in self._absent]
        again = len(users) > 1 and (
            len(reads) > _READS_REUSED
            or (self._cpu and root in self._heavy)
            or (
                bool(reads)
                and any(
                    u not in self._inside
                    or (len(reads) > 1 and (is_compute(u) or is_collective(u)))
                    for u in users
                )
            )
        )
        if again or len(reads) > _READS["cpu" if self._cpu else "cuda"]:
            self._write(root)

    def _write(self, node: fx.Node) -> None:
        reads = self._inline.pop(node)
        self._join(node, reads, (self._numel(node), 1))

    def _call(self, node: fx.Node) -> None:
        """Add a kernel of another library, or any other operator."""
        for value in node.all_input_nodes:
            root = self._root.get(value, value)
            if root in self._inline:
                self._write(root)
        roots = [self._root.get(n, n) for n in node.all_input_nodes]
        self._left.update(roots)
        self._made_by[node] = self._number(None, roots)
        if node.meta.get("val") is None:  # it writes to its inputs
            self._made_by.update(dict.fromkeys(roots, self._made_by[node]))

    def _scatter(self, node: fx.Node, place: int) -> None:
        base, values = node.args[0], node.args[place]
        assert isinstance(base, fx.Node)
        assert isinstance(values, fx.Node)
        if not str(node.target).partition(".")[0].endswith("put_"):
            self._join(node, self._reads([base]), (self._numel(node), 1))
        rest = [n for n in node.all_input_nodes if n is not base]
        moved = min(self._numel(values) * node.meta["val"].dtype.itemsize, self._size(node))
        if "index_put" not in str(node.target) or "accumulate" in str(node.target) or node.args[3:]:
            moved *= 2  # each value is added to what is there
        self._join(node, self._reads(rest), (self._numel(values), 1), into=node, nbytes=moved)
        root = self._root.get(base, base)
        if root in self._made_by:
            self._made_by[root] = self._made_by[node]

    def _reduce(self, node: fx.Node) -> None:
        first = node.all_input_nodes[0]
        whole, results = self._numel(first), max(self._numel(node), 1)
        terms = max(whole // results, 1)
        reads = self._reads(node.all_input_nodes)
        by_rows = reduces_rows(node)
        least = _SPLIT_ROWS if by_rows else _SPLIT_COLUMNS
        long = terms > (_LONG_ROW if by_rows else _SPLIT_FROM)
        if self._cpu or results >= least or not long:
            self._join(node, reads, (results, terms))
            return
        # Parts are reduced in one kernel, with rows of the same values if these are columns, and
        # the parts' results in a second one.
        self._join(node, reads, (terms, results), nbytes=0, closed=by_rows)
        number = self._made_by.pop(node)
        self._left.add(node)
        self._made_by[node] = self._number(Kernel((results, _SPLIT_FROM)), ())
        self._before[-1] |= self._before[number] | 1 << number
        self._touching[node] = [len(self._at) - 1]
        self._written.append((self._made_by[node], node))

    def _number(self, kernel: Kernel | None, needs: Collection[fx.Node]) -> int:
        before = 0
        for buffer in needs:
            number = self._made_by.get(buffer)
            if number is not None:
                before |= self._before[number] | 1 << number
        self._at.append(kernel)
        self._before.append(before)
        if kernel is not None:
            self.kernels.append(kernel)
        return len(self._at) - 1

    def _join(
        self,
        node: fx.Node,
        reads: dict[fx.Node, int],
        space: tuple[int, int],
        *,
        into: fx.Node | None = None,
        nbytes: int | None = None,
        closed: bool = False,
        alone: bool = False,
    ) -> None:
        """Write ``node`` in a kernel that touches one of its buffers, or in a new one."""
        shared: dict[int, int] = {}
        for buffer, n in reads.items() if not alone else ():
            for number in self._touching.get(buffer, ()):
                shared[number] = shared.get(number, 0) + n
        needs = {self._made_by[b] for b in reads if b in self._made_by}
        filled = -1  # the kernel that writes first what this one writes a part of
        if into is not None and (root := self._root.get(into, into)) in self._made_by:
            needs.add(filled := self._made_by[root])
        at = -1
        for number in sorted(shared, key=lambda k: (-shared[k], -k)):
            kernel = self._at[number]
            assert kernel is not None
            both = _common(kernel.space, space)
            if self._cpu and kernel.flat and space[1] > 1:
                both = None
            open_ = not kernel.closed and len(kernel.shares) < _MOST_FUSED
            between = any(self._before[k] >> number & 1 for k in needs if k != number)
            if both and open_ and not between and number != filled:
                at, kernel.space, kernel.closed = number, both, closed
                break
        if at < 0:
            flat = all(n == self._size(b) and self._numel(b) == space[0] for b, n in reads.items())
            at = self._number(Kernel(space, closed=closed, flat=flat and space[1] == 1), ())
        kernel = self._at[at]
        assert kernel is not None
        for k in needs - {at}:
            self._before[at] |= self._before[k] | 1 << k
        read = 0
        for buffer, n in reads.items():
            if self._made_by.get(buffer) != at:
                self._left.add(buffer)
                if buffer not in kernel.buffers:
                    read += n
            kernel.buffers[buffer] = n
            touching = self._touching.setdefault(buffer, [])
            if touching[-1:] != [at]:
                touching.append(at)
        made = node if into is None else self._root.get(into, into)
        self._made_by[node] = self._made_by[made] = at
        self._touching.setdefault(made, []).append(at)
        if into is not None and nbytes is None:
            nbytes = self._size(node)
        if nbytes is None:
            self._written.append((at, node))
        kernel.shares[node] = kernel.shares.get(node, 0) + read + (nbytes or 0)


def _common(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int] | None:
    """Return the iteration space of two kernels together; None if they can't be one."""
    if a == b:
        return a
    (n, r), (m, s) = a, b
    if r > 1 and s > 1:
        return None
    if s > 1:
        n, r, m = m, s, n
    return (n, r) if r > 1 and m in (n, n * r) else None


def is_fused(node: fx.Node) -> bool:
    """Return whether a node is part of a kernel that Inductor generates."""
    target, is_tensor = node.target, isinstance(node.meta.get("val"), torch.Tensor)
    if is_view(node) or not is_tensor:
        return False
    return target in _SCATTERS or is_pointwise(node) or is_reduction(node)


def is_pointwise(node: fx.Node) -> bool:
    """Return whether an operator computes each element of its result by itself."""
    target = node.target
    return target in _MORE_POINTWISE or torch.Tag.pointwise in getattr(target, "tags", ())


def is_reduction(node: fx.Node) -> bool:
    """Return whether an operator reduces its input."""
    return torch.Tag.reduction in getattr(node.target, "tags", ())


def reduces_rows(node: fx.Node) -> bool:
    """Return whether a reduction runs over its input's last dimension."""
    value = node.all_input_nodes[0].meta["val"]
    dims = node.args[1] if len(node.args) > 1 else None
    if dims is None or dims == []:
        return True
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    return value.dim() - 1 in [d % max(value.dim(), 1) for d in dims if isinstance(d, int)]
