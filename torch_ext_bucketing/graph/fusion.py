"""Group elementwise operators and reductions into kernels as Inductor does.

Values are walked in the order of the graph. An elementwise value is computed inside its readers
until it must be written, once in each::

    x -> cast -> square -> mean -> rsqrt -> mul(cast, rsqrt) -> mm
    [           one kernel: reads x, writes mul            ]

What is written joins a kernel that touches one of its buffers if both have one iteration space and
no other kernel has to run between them. A reduction of ``n`` rows of ``r`` elements shares its
space with elementwise operators of ``n`` or of ``n * r`` elements, and on CUDA with sums over the
``n`` elements of each column, if neither reads results of the other::

    y -> sum(y, rows)    y -> sum(y, columns)          [ one kernel: reads y once ]

Readers of one buffer that are far away from each other share no kernel. Everything else, products
among it, is a kernel of its own, and products run in graph order (:mod:`.passes.pin`)::

    h  mm1(h)  mm2  exp(mm2, h)      h and exp in one kernel would run after mm2, and before mm1

The rules, with their numbers, are those of torch 2.15's ``_inductor/ir.py`` (what is written) and
``scheduler.py``; a cycle through several joined kernels isn't looked for, and a long reduction is
one kernel, where Inductor splits some in two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from .._torch.without_device import stands_for_cuda
from .inlined import Inlined
from .nodes import is_collective, is_compute, is_wait, tensors_in
from .operators import INDEXED, REARRANGES, SCATTERS, SUMS, Operators, adds_to_larger

_aten = torch.ops.aten
_LONGEST_PERSISTENT = 1024
"""The most elements of a row that a kernel holds in registers (``triton_heuristics``)."""
_MOST_LOADS_OF_SHARED = 4
"""The most loads of a value that several readers compute again."""
_MOST_CAT_INPUTS = 8
"""The most inputs of a concatenation that is computed inside its readers on CUDA."""
_MOST_LOADS = 8, 12
"""The most loads of a value that isn't written, on CUDA and on the CPU."""
_MOST_OPERATIONS = 30, 50
"""The most operations of such a value."""
_FEWEST_TERMS = 8
"""Reductions of fewer elements are elementwise (``unroll_reductions_threshold``)."""
_LEAST_MIXED = 5 * 2**20
"""The fewest elements that a kernel sums over both rows and columns (``MixOrderReduction``)."""
_LEAST_ROWS = 4096
"""The fewest rows of such a kernel."""
_LONGEST_ROW = 16 * 1024
"""The most elements of a row of such a kernel."""
_MOST_MIXED_READS = 10
"""The most buffers that such a kernel reads if more than two nodes join it."""
_FARTHEST = 64
"""The most operations of Inductor from one to another that joins its kernel and needs none of its
results (``scheduler.py:are_long_distant_nodes``)."""


class Space(NamedTuple):
    """The iteration space of a kernel."""

    rows: int  # of an elementwise one, all elements
    length: int = 1  # elements of a row
    columns: bool = False  # whether it reduces columns: elements of a row lie apart
    sums: bool = True  # whether columns are reduced by sums alone
    mixed: bool = False  # whether it reduces the rows, and the columns as well


@dataclass
class Kernel:
    """A kernel."""

    space: Space
    # Bytes that it reads and writes, by the node that they are written for; each buffer counts
    # once.
    shares: dict[fx.Node, int] = field(default_factory=dict)
    buffers: dict[fx.Node, int] = field(default_factory=dict)
    flat: bool = False  # whether each thread reads one element of every whole buffer

    @property
    def nbytes(self) -> int:
        return sum(self.shares.values())


@dataclass
class Fused:
    """The kernels of some nodes, and the buffers that these read and write."""

    kernels: list[Kernel] = field(default_factory=list)
    # Nodes whose results are in no buffer: they are computed inside the readers, or read by their
    # own kernel alone.
    within: set[fx.Node] = field(default_factory=set)
    # Nodes that a kernel writes, into buffers or into its inputs.
    written: set[fx.Node] = field(default_factory=set)
    # By one node of each kernel, the buffers that the kernel reads. The node is the first one that
    # has all of them before it.
    reads: dict[fx.Node, dict[fx.Node, None]] = field(default_factory=dict)
    # By node that a kernel writes, the node where the kernel runs, if that is earlier.
    runs_at: dict[fx.Node, fx.Node] = field(default_factory=dict)
    # Nodes that are written only where a later node needs them in memory.
    late: set[fx.Node] = field(default_factory=set)
    # By node that a kernel writes, buffers of the same size that it may write it into, as each
    # element is read for the same element alone.
    reused: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)


def fused(
    nodes: Sequence[fx.Node],
    operators: Operators,
    absent: Collection[fx.Node] = (),
    kept: Callable[[fx.Node], bool] | None = None,
) -> Fused:
    """Group the elementwise operators and reductions among ``nodes``, in graph order.

    Nodes ``absent`` are neither readers nor kernels, since they differ from rank to rank. Values
    that ``kept`` accepts outlive the nodes and are written; None: those that other nodes read.
    """
    return _Walk(nodes, operators, absent, kept).result()


class _Walk:
    """Walk over the nodes of a graph."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        operators: Operators,
        absent: Collection[fx.Node],
        kept: Callable[[fx.Node], bool] | None,
    ) -> None:
        self.kernels: list[Kernel] = []
        self._inside = {node: i for i, node in enumerate(nodes)}  # with their places
        self._kept = kept
        self._absent, self._operators = absent, operators
        self._root: dict[fx.Node, fx.Node] = {}
        self._inline: dict[fx.Node, dict[fx.Node, int]] = {}  # value -> bytes of each buffer
        self._counts = Inlined(operators, self._root)  # of the same values
        # Value -> buffers read element by element. Not sets, whose order differs between ranks.
        self._aligned: dict[fx.Node, dict[fx.Node, None]] = {}
        # A kernel, a node that it writes, and the bytes that it reads of each buffer for that node.
        self._joined: list[tuple[int, fx.Node, dict[fx.Node, int]]] = []
        self._made_by: dict[fx.Node, int] = {}  # buffer -> kernel, which may be another library's
        self._before: list[int] = []  # by kernel, a bit set of those it needs
        self._kernel: list[Kernel | None] = []
        self._operation = 0  # the next of Inductor's operations: each writes a buffer
        self._products: list[int] = []  # kernels of products, attention and convolutions
        self._first: list[int] = []  # by kernel, its first operation
        self._touching: dict[fx.Node, list[int]] = {}
        # Values that are added to a copy of a constant -> the buffers that they are computed from.
        self._added: dict[fx.Node, dict[fx.Node, int]] = {}
        self._read_elsewhere: set[fx.Node] = set()  # buffers that other kernels read
        self._written: list[tuple[int, fx.Node]] = []
        tensors = (t for n in nodes for t in tensors_in(n.meta.get("val")))
        device = next((t.device.type for t in tensors), "cuda")
        self._cpu = device == "cpu" and not stands_for_cuda()
        self._late = set[fx.Node]()
        self._visited: fx.Node | None = None
        for self._visited in nodes:
            if self._visited not in absent:
                self._visit(self._visited)
        self._visited = None
        for node in [n for n in self._inline if self._is_read_outside(n)]:
            self._write(node)
        # Whether a buffer exists is known only now: a result that just its own kernel reads stays
        # in registers and costs no bytes, unless the kernel goes over long rows again.
        self._read_elsewhere.update(n for _, n in self._written if self._is_read_outside(n))
        self._read_elsewhere.update(self._read_in_later_loops())
        for number, node in self._written:
            kernel = self._kernel[number]
            if kernel is not None and node in self._read_elsewhere:
                kernel.shares[node] = kernel.shares.get(node, 0) + self._size(node)

    def _read_in_later_loops(self) -> list[fx.Node]:
        """Return results that their own kernel reads after a reduction of long rows.

        ::

            x -> sub -> amax -> exp(sub - amax)      for x: write sub, amax   for sub: exp
        """
        if self._cpu:
            return []
        place = self._inside
        last_read: dict[tuple[int, fx.Node], int] = {}
        reductions: dict[int, list[int]] = {}
        for number, node, reads in self._joined:
            kernel = self._kernel[number]
            assert kernel is not None
            if kernel.space.length > _LONGEST_PERSISTENT:
                for buffer in reads:
                    key = number, buffer
                    last_read[key] = max(last_read.get(key, -1), place[node])
                if self._operators[node].reduces:
                    reductions.setdefault(number, []).append(place[node])
        return [
            node
            for number, node in self._written
            if not self._operators[node].reduces
            and any(
                place[node] < reduced < last_read.get((number, node), -1)
                for reduced in reductions.get(number, ())
            )
        ]

    def result(self) -> Fused:
        """Return the kernels, with their buffers."""
        result = Fused(self.kernels)
        result.written = {node for _, node, _ in self._joined}
        result.within = {n for n in self._inline if n not in result.written}
        result.within.update(n for _, n in self._written if n not in self._read_elsewhere)
        result.late = self._late
        place = self._inside
        members: dict[int, dict[fx.Node, None]] = {}
        inputs: dict[int, dict[fx.Node, int]] = {}  # with the number of members that read each
        for number, node, reads in self._joined:
            members.setdefault(number, {})[node] = None
            reads_of_kernel = inputs.setdefault(number, {})
            for buffer in reads:
                if self._made_by.get(buffer) != number:
                    reads_of_kernel[buffer] = reads_of_kernel.get(buffer, 0) + 1
        for number, reads_of_kernel in inputs.items():
            # The kernel runs where its last input is there: at the first of its nodes after that.
            ready = max((place.get(b, -1) for b in reads_of_kernel), default=-1)
            together = sorted(members[number], key=place.__getitem__)
            first = next((n for n in together if place[n] > ready), together[-1])
            result.reads.setdefault(first, {}).update(dict.fromkeys(reads_of_kernel))
            later = together[together.index(first) + 1 :]
            result.runs_at.update(dict.fromkeys(later, first))
        for node, values in self._added.items():
            # The copy of a constant waits for nothing, and Inductor may run it before the kernels
            # of the values that are added.
            made = [b for b in values if place.get(b, -1) >= 0]
            if made:
                last = max(made, key=place.__getitem__)
                result.runs_at.setdefault(node, result.runs_at.get(last, last))
        for number, node, reads in self._joined:
            if node in result.within:
                continue
            aligned = [
                b
                for b in self._aligned.get(node, ())
                if inputs[number].get(b) == 1 and b in reads and self._size(b) == self._size(node)
                if b.target not in SCATTERS  # Inductor writes over no buffer that was added to
            ]
            if aligned:
                result.reused[node] = sorted(aligned, key=lambda b: place.get(b, -1))
        return result

    def _size(self, node: fx.Node) -> int:
        return self._operators[node].size

    def _numel(self, node: fx.Node) -> int:
        return self._operators[node].numel

    def _aligned_buffers(self, node: fx.Node, value: fx.Node) -> dict[fx.Node, None]:
        """Return the buffers that elementwise ``node`` reads, by ``value``, in its own order."""
        root = self._root.get(value, value)
        if not self._numel(node) == self._numel(value) == self._numel(root):
            return {}
        if not all(map(self._operators.is_contiguous, (node, value, root))):
            return {}
        return self._aligned.get(root, {}) if root in self._inline else {root: None}

    def _users(self, node: fx.Node) -> list[fx.Node]:
        readers = self._inside if self._kept is not None else node.users
        return [u for u in node.users if u in readers and u not in self._absent]

    def _is_read_outside(self, node: fx.Node) -> bool:
        """Return whether a value outlives the nodes; views are looked through."""
        if self._kept is not None:
            return self._kept(node)
        users = self._users(node)
        return not users or any(
            u not in self._inside or (self._operators[u].view and self._is_read_outside(u))
            for u in users
        )

    def _visit(self, node: fx.Node) -> None:
        target: Any = node.target
        operator = self._operators[node]
        inputs = operator.inputs
        if operator.view:
            if inputs:
                first = self._root.get(inputs[0], inputs[0])
                # A view of a whole value stands for the value itself.
                whole = self._operators[first]
                if first not in self._inline and (whole.several or operator.size < whole.size):
                    # Readers of different results, or parts, share nothing.
                    self._read_elsewhere.add(first)
                    self._operation += whole.several
                    if first in self._made_by:
                        self._made_by[node] = self._made_by[first]
                else:
                    self._root[node] = first
                    self._settle(node)
        elif not operator.fused:
            self._call(node)
        elif target in SCATTERS:
            self._scatter(node, SCATTERS[target])
        elif operator.reduces and operator.terms >= _FEWEST_TERMS:
            # Always written: Inductor computes no reduction inside its readers.
            columns, sums = not _reduces_rows(node), node.target in SUMS
            space = Space(max(operator.numel, 1), operator.terms, columns, sums)
            self._join(node, self._reads(inputs), space)
        else:
            self._compute(node)

    def _reads(self, inputs: Sequence[fx.Node]) -> dict[fx.Node, int]:
        """Return the bytes that a kernel with these inputs reads of each buffer."""
        nbytes_of: dict[fx.Node, int] = {}
        for node in inputs:
            root = self._root.get(node, node)
            bytes_of_buffer = self._inline.get(root)
            if bytes_of_buffer is None:
                bytes_of_buffer = {root: self._size(node)}
            elif node is not root and (part := self._size(node)) < (all_ := self._size(root)):
                bytes_of_buffer = {
                    buffer: nbytes * part // all_ for buffer, nbytes in bytes_of_buffer.items()
                }
            for buffer, nbytes in bytes_of_buffer.items():
                nbytes_of[buffer] = min(nbytes_of.get(buffer, 0) + nbytes, self._size(buffer))
        return nbytes_of

    def _compute(self, node: fx.Node) -> None:
        inputs, target = self._operators[node].inputs, node.target
        if target is _aten.copy_.default:
            self._join(node, self._reads(inputs[1:]), Space(self._numel(node)), into=inputs[0])
            return
        if target in INDEXED:
            reads = self._reads(inputs)  # of the table, no more than is returned
            first = self._root.get(inputs[0], inputs[0])
            if first in reads:
                reads[first] = min(reads[first], self._size(node))
        else:
            reads = self._reads(inputs)
        if target is _aten.cat.default and (self._cpu or len(inputs) > _MOST_CAT_INPUTS):
            # One kernel copies the graph's inputs, one each other part.
            whole = [n for n in inputs if self._root.get(n, n).op != "call_function"]
            whole = [] if self._cpu else whole
            for parts in filter(None, [whole, *([n] for n in inputs if n not in whole)]):
                nbytes = sum(map(self._size, parts))
                space = Space(sum(map(self._numel, parts)))
                self._join(node, self._reads(parts), space, nbytes=nbytes, alone=True)
            return
        self._inline[node] = reads
        self._counts.add(node)
        if target not in REARRANGES and not self._operators[node].reduces:
            for value in inputs:
                same_order = self._aligned_buffers(node, value)
                self._aligned.setdefault(node, {}).update(same_order)
        self._settle(node)

    def _settle(self, node: fx.Node) -> None:
        """Write an elementwise value if that is better than to compute it in each reader."""
        root = self._root.get(node, node)
        reads = self._inline.get(root)
        if reads is None:
            return
        users = self._users(node) if len(node.users) > 1 else []
        again = len(users) > 1
        operations, loads = _MOST_OPERATIONS[self._cpu], _MOST_LOADS[self._cpu]
        limit = _MOST_LOADS_OF_SHARED if again else loads
        count = self._counts.count(root, reads, operations, limit)
        # As Inductor's `should_realize_on_reuse` and `has_exceeded_max_reads` decide.
        large = count.operations > operations
        write = again and (large or count.loads > limit)
        write = write or (count.varying > 1 and (large or count.loads > loads))
        if again and reads and not write:
            # Whether another graph, or a later part of this one, reads the value.
            kept = self._kept
            write = kept(root) if kept is not None else any(u not in self._inside for u in users)
        if write:
            self._write(root)

    def _write(self, node: fx.Node) -> None:
        reads = self._inline.pop(node)
        self._counts.remove(node)
        if node is not self._visited:
            self._late.add(node)
        self._join(node, reads, Space(self._numel(node)))

    def _call(self, node: fx.Node) -> None:
        """Add a kernel of another library, or any other operator."""
        # Such a kernel reads memory, so its inputs are written.
        for value in self._operators[node].inputs:
            root = self._root.get(value, value)
            if root in self._inline:
                self._write(root)
        roots = [self._root.get(n, n) for n in self._operators[node].inputs]
        self._read_elsewhere.update(roots)
        needs = self._makers(roots)
        number = self._made_by[node] = self._number(None)
        # Collectives and waits are not counted: with their copies into and out of buckets, merged
        # and unmerged graphs have about as many operations then.
        self._operation += not (is_collective(node) or is_wait(node))
        self._stands_after(number, needs)
        if is_compute(node):  # products keep their order
            self._stands_after(number, self._products[-1:])
            self._products.append(number)
        if node.meta.get("val") is None:  # it writes to its inputs
            self._made_by.update(dict.fromkeys(roots, number))

    def _scatter(self, node: fx.Node, place: int) -> None:
        """Add the kernels of a node that writes values into a copy of its first input."""
        # Two kernels: a copy of the base, and one thread per added value.
        base, values = node.args[0], node.args[place]
        assert isinstance(base, fx.Node)
        assert isinstance(values, fx.Node)
        read, alone = self._reads([base]), adds_to_larger(node)
        self._join(node, read, Space(self._numel(node)), alone=alone)
        if not read and not alone:
            self._added[node] = self._reads([values])
        rest = [n for n in node.all_input_nodes if n is not base]
        moved = min(self._numel(values) * node.meta["val"].dtype.itemsize, self._size(node))
        overwrites = node.target is _aten.index_put.default and not node.args[3:]
        if not overwrites and node.target is not _aten.scatter.src:
            moved *= 2  # each value is added to the present one
        space = Space(self._numel(values))
        self._join(node, self._reads(rest), space, into=node, nbytes=moved, alone=alone)

    def _number(self, kernel: Kernel | None) -> int:
        self._first.append(self._operation)
        self._kernel.append(kernel)
        self._before.append(0)
        if kernel is not None:
            self.kernels.append(kernel)
        return len(self._kernel) - 1

    def _stands_after(self, number: int, needs: Collection[int]) -> None:
        for k in needs:
            if k != number:
                self._before[number] |= self._before[k] | 1 << k

    def _makers(self, buffers: Iterable[fx.Node]) -> set[int]:
        """Return the kernels that write some buffers."""
        return {self._made_by[b] for b in buffers if b in self._made_by}

    def _find_kernel(
        self, reads: Mapping[fx.Node, int], space: Space, needs: Collection[int]
    ) -> int:
        """Return the kernel that a node joins, with its new space; -1: none."""
        # Inductor tries pairs by the bytes that they share, of equals the nearest. Producers, and
        # reductions of the same elements in another order, may be far away.
        shared: dict[int, int] = {}
        nearest, reduces = self._operation - _FARTHEST, space.length > 1
        for buffer, n in reads.items():
            for number in self._touching.get(buffer, ()):
                if reduces or self._first[number] >= nearest or number in needs:
                    shared[number] = shared.get(number, 0) + n
        for number in sorted(shared, key=lambda k: (-shared[k], -k)):
            kernel = self._kernel[number]
            assert kernel is not None
            both = None
            if self._first[number] >= nearest or number in needs:
                both = _common(kernel.space, space)
            if reduces and number not in needs and not self._cpu:
                both = both or self._mixed(kernel, space, reads)
            if both is None or (self._cpu and kernel.flat and space.length > 1):
                continue
            if kernel.space.mixed and len({**kernel.buffers, **reads}) > _MOST_MIXED_READS:
                continue
            # A kernel that has to run in between would close a cycle.
            if not any(self._before[k] >> number & 1 for k in needs if k != number):
                kernel.space = both
                return number
        return -1

    def _mixed(self, kernel: Kernel, space: Space, reads: Iterable[fx.Node]) -> Space | None:
        """Return the space of a kernel that also sums the same elements in the other order."""
        rows, columns = kernel.space, space
        if rows.columns:
            rows, columns = columns, rows
        if rows.columns or not columns.columns or (rows.length, rows.rows) != columns[:2]:
            return None
        numel = rows.rows * rows.length
        small = numel < _LEAST_MIXED or rows.rows < _LEAST_ROWS or rows.length > _LONGEST_ROW
        if small or not columns.sums:
            return None
        whole = any(b in kernel.buffers and self._numel(b) == numel for b in reads)
        return rows._replace(mixed=True) if whole else None

    def _join(
        self,
        node: fx.Node,
        reads: dict[fx.Node, int],
        space: Space,
        *,
        into: fx.Node | None = None,
        nbytes: int | None = None,
        alone: bool = False,
    ) -> None:
        """Write ``node`` in a kernel that touches one of its buffers, or in a new one.

        With ``alone`` the kernel is new, and none that reads the result joins it.
        """
        result = node if into is None else self._root.get(into, into)
        needs = self._makers([*reads, result])
        joined = -1 if alone else self._find_kernel(reads, space, needs)
        if joined < 0:
            flat = all(
                n == self._size(b) and self._numel(b) == space.rows for b, n in reads.items()
            )
            joined = self._number(Kernel(space, flat=flat and space.length == 1))
        kernel = self._kernel[joined]
        assert kernel is not None
        self._operation += 1
        self._stands_after(joined, needs)
        self._joined.append((joined, node, reads))
        read = 0  # a buffer that the kernel has written or read before costs no bytes
        for buffer, n in reads.items():
            if self._made_by.get(buffer) != joined:
                self._read_elsewhere.add(buffer)
                if buffer not in kernel.buffers:
                    read += n
            kernel.buffers[buffer] = n
            touching = self._touching.setdefault(buffer, [])
            if touching[-1:] != [joined]:
                touching.append(joined)
        self._made_by[node] = self._made_by[result] = joined
        if not alone:
            self._touching.setdefault(result, []).append(joined)
        if nbytes is None:  # written only if another kernel reads it, which later nodes show
            self._written.append((joined, node))
        kernel.shares[node] = kernel.shares.get(node, 0) + read + (nbytes or 0)


def _reduces_rows(node: fx.Node) -> bool:
    """Return whether a reduction adds up elements that lie next to each other."""
    value, dims = node.args[0], node.args[1] if len(node.args) > 1 else ()
    assert isinstance(value, fx.Node)
    shape = value.meta["val"].shape
    if not isinstance(dims, (list, tuple)) or not dims:
        return True
    reduced = {d % len(shape) for d in dims if isinstance(d, int)}
    long = [i in reduced for i, n in enumerate(shape) if n != 1]
    return long == sorted(long)


def _common(a: Space, b: Space) -> Space | None:
    """Return the iteration space of two kernels together; None if they can't be one."""
    if a.length > 1 and b.length > 1:
        return a._replace(sums=a.sums and b.sums) if a[:3] == b[:3] else None
    if b.length > 1:
        a, b = b, a
    return a if b.rows in (a.rows, a.rows * a.length) else None
