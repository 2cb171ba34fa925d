"""Choose the rank that computes each matrix's update, and plan how its parts travel.

An optimizer such as Muon computes with whole matrices. One rank, the owner, gets the whole of a
matrix, so that its bits are those of one device. All is planned from shapes, alike on every rank.

A part is a block of rows and columns that one rank holds of a matrix. Parts travel along one mesh
dimension after the other, in one all-to-all each. With two dimensions and the owner at (1, 0)::

    (0,0) (0,1)                  .     .                      .     .
                 along dim 0                   along dim 1
    (1,0) (1,1)     --->      2 parts 2 parts     --->      whole   .

Updates come back the same way, last dimension first. Where a dimension holds copies, the owner
takes those in its own place, and the update goes to every copy.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

BALANCED = 1.05  # of the mean work; with more on the busiest rank, matrices leave their homes


def newton_schulz_flops(rows: int, columns: int, steps: int) -> int:
    """Count the floating-point operations of Newton-Schulz on one matrix."""
    # Each step has three products: ``A = X X^T``, ``A A`` and ``B X``. torch transposes a tall
    # ``X``.
    m, n = sorted((rows, columns))
    return steps * (4 * m * m * n + 2 * m**3)


def choose_owners(
    costs: Sequence[int], loads: list[int], homes: Sequence[Sequence[int]] | None = None
) -> list[int]:
    """Give each matrix to the rank with the least load, the costliest matrices first.

    From no load on and without homes, the busiest rank has at most 4/3 of the least possible load
    (Graham's bound). With fewer matrices than ranks, each has a rank of its own, and the last ranks
    are idle: a matrix is never divided, because its bits would then depend on the number of ranks.

    A matrix with a home, one or more ranks, goes there, as less of it has to travel. As many leave
    again as the balance needs (:data:`BALANCED`). The work of ``costs`` is added to ``loads`` in
    place. Of equal costs the first goes first: that of the first gradient to arrive.
    """
    least = [(load, rank) for rank, load in enumerate(loads)]
    heapify(least)
    owners, at_home = [0] * len(costs), [list[int]() for _ in loads]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        while least[0][0] != loads[least[0][1]]:
            heappop(least)  # this rank has more by now
        _, owner = least[0]
        if homes and homes[i]:
            owner = min(homes[i], key=lambda r: (loads[r], r))
            at_home[owner].append(i)
        owners[i] = owner
        loads[owner] += costs[i]
        heappush(least, (loads[owner], owner))
    # Matrices leave home again, the busiest rank's cheapest first, to the rank with the least load.
    while homes:
        busiest = max(range(len(loads)), key=loads.__getitem__)
        free = min(range(len(loads)), key=loads.__getitem__)
        if loads[busiest] * len(loads) <= BALANCED * sum(loads) or not at_home[busiest]:
            break
        i = at_home[busiest].pop()
        if loads[free] + costs[i] >= loads[busiest]:
            break
        owners[i] = free
        loads[busiest] -= costs[i]
        loads[free] += costs[i]
    return owners


def choose_buckets(
    costs: Sequence[int],
    nbytes: Sequence[int],
    owners: Sequence[int],
    cap: int,
    least: int,
    most: int = 3,
    stacks: Sequence[int] | None = None,
) -> list[list[int]]:
    """Divide matrices into buckets; the matrices of a bucket are exchanged at once.

    Every owner has about the same part of its work in a bucket, the costliest first, so that it
    computes while the next bucket travels.

    Args:
        nbytes: bytes of each whole matrix in the buffer of its owner; see :func:`choose_owners`.
        cap: bytes that an owner may receive in one bucket; a single stack may have more.
        least: bytes below which the busiest owner's part is not divided for overlap.
        most: number of buckets, unless ``cap`` makes it more.
        stacks: per matrix, the number of its stack, whose matrices stay together; None: each matrix
            is alone.
    """
    # The middle of a matrix's work among its owner's, the costliest matrix first.
    middle, load, received = [0.0] * len(costs), Counter[int](), Counter[int]()
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        middle[i] = load[owners[i]] + costs[i] / 2
        load[owners[i]] += costs[i]
        received[owners[i]] += nbytes[i]
    stacks = range(len(costs)) if stacks is None else stacks
    together: dict[int, list[int]] = {}
    for i, stack in enumerate(stacks):
        together.setdefault(stack, []).append(i)
    place = [sum(middle[i] for i in together[s]) / len(together[s]) for s in stacks]

    def fits(bucket: Sequence[int]) -> bool:
        nbytes_of, stacks_of = Counter[int](), dict[int, set[int]]()
        for i in bucket:
            nbytes_of[owners[i]] += nbytes[i]
            stacks_of.setdefault(owners[i], set()).add(stacks[i])
        return all(n <= cap or len(stacks_of[owner]) == 1 for owner, n in nbytes_of.items())

    # A bucket is the same slice of every owner's work; more slices until each fits.
    span = max(load.values(), default=0) or 1
    count = max(1, min(most, max(received.values(), default=0) // least))
    while count <= 4 * len(together):
        buckets: dict[int, list[int]] = {}
        for i, position in enumerate(place):
            buckets.setdefault(int(count * position / span), []).append(i)
        if all(map(fits, buckets.values())):
            return [buckets[k] for k in sorted(buckets)]
        count += 1
    return sorted(together.values(), key=lambda members: place[members[0]])


Coordinate = tuple[int, ...]
"""A rank's place in a mesh."""


class Rectangle(NamedTuple):
    """A rectangle of a matrix."""

    row: int
    column: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.rows * self.columns


class Piece(NamedTuple):
    """A matrix, by its place, and the coordinate that holds the part; 0 where copies are."""

    matrix: int
    at: Coordinate


class Hop(NamedTuple):
    """The exchange of one rank along one mesh dimension."""

    dim: int | None  # the dimension; None: nothing is sent, parts are only chosen
    sent: list[Piece]  # the parts in the buffer that is sent, for one peer after the other
    sent_to: list[int]  # number of elements for each peer; so is ``received_from``
    received: list[Piece]  # the parts in the buffer that is received
    received_from: list[int]
    most: tuple[int, int]  # the most elements that any rank sends, and that any receives


@dataclass(frozen=True)
class Matrix:
    """A matrix of whole ``rows`` and ``columns`` on a mesh."""

    rows: int
    columns: int
    # Whether it is divided over each mesh dimension; else that holds copies.
    sharded: tuple[bool, ...]
    # The part at each coordinate that has one; a coordinate is 0 where copies are.
    blocks: Mapping[Coordinate, Rectangle]
    owner: Coordinate = ()  # the coordinate that computes its update
    # The ranks, by their place in the mesh, that no part has to reach along some dimension, since
    # no other coordinate has any; empty: all ranks are alike.
    home: Sequence[int] = ()


def tiles(rows: int, columns: int, blocks: Iterable[Rectangle]) -> bool:
    """Return whether blocks cover a matrix exactly."""
    pieces = {b for b in blocks if b.size}
    spans = {(b.row, b.rows) for b in pieces}, {(b.column, b.columns) for b in pieces}
    for intervals, whole in zip(spans, (rows, columns), strict=True):
        end = 0
        for start, size in sorted(intervals):
            if start != end:
                return False
            end += size
        if end != whole:
            return False
    return len(pieces) == len(spans[0]) * len(spans[1])


@dataclass(frozen=True)
class Routes:
    """The matrices of one bucket, on a mesh of a shape, seen from the rank ``at`` a coordinate."""

    matrices: Sequence[Matrix]
    mesh: Coordinate
    at: Coordinate

    def to_owners(self) -> list[Hop]:
        """Plan how parts get to owners."""

        def goes(part: Piece, source: int, target: int, d: int) -> bool:
            m = self.matrices[part.matrix]
            return m.owner[d] == target and (m.sharded[d] or source == target)

        return [self._hop(d, d, goes) for d in range(len(self.mesh))]

    def to_shards(self) -> list[Hop]:
        """Plan how updates get from owners to all that have a part."""

        def goes(part: Piece, source: int, target: int, d: int) -> bool:
            return not self.matrices[part.matrix].sharded[d] or part.at[d] == target

        return [self._hop(d, d + 1, goes) for d in reversed(range(len(self.mesh)))]

    def held(self, coordinate: Coordinate, dims: int) -> list[Piece]:
        """List the parts at ``coordinate`` once they travelled along ``dims`` dimensions."""
        held = []
        for i, m in enumerate(self.matrices):
            if coordinate[:dims] == m.owner[:dims]:
                places = [
                    (range(self.mesh[d]) if d < dims else (c,)) if m.sharded[d] else (0,)
                    for d, c in enumerate(coordinate)
                ]
                held += [Piece(i, c) for c in itertools.product(*places) if c in m.blocks]
        return held

    def elements(self, parts: Iterable[Piece]) -> int:
        """Count the elements of parts."""
        return sum(self.matrices[p.matrix].blocks[p.at].size for p in parts)

    def _holders(self, part: Piece, dims: int) -> Iterator[Coordinate]:
        """List the ranks that hold a part once it travelled along ``dims`` dimensions."""
        m = self.matrices[part.matrix]
        dims_left = range(dims, len(self.mesh))
        places = [(part.at[d],) if m.sharded[d] else range(self.mesh[d]) for d in dims_left]
        return itertools.product(*((c,) for c in m.owner[:dims]), *places)

    def _hop(self, d: int, dims: int, goes: Callable[[Piece, int, int, int], bool]) -> Hop:
        # Totals of all ranks, not of this one: the cost model's times must be alike on every rank.
        back, moves = dims > d, False
        sending, receiving = Counter[Coordinate](), Counter[Coordinate]()
        for i, m in enumerate(self.matrices):
            for c, block in m.blocks.items():
                copies = self.mesh[d] if back and not m.sharded[d] else 1
                moves = moves or copies > 1 or (m.sharded[d] and c[d] != m.owner[d])
                for rank in self._holders(Piece(i, c), dims):
                    sending[rank] += copies * block.size
                for rank in self._holders(Piece(i, c), d if back else d + 1):
                    receiving[rank] += block.size
        at, peers = self.at, range(self.mesh[d]) if moves else (self.at[d],)
        parts = self.held(at, dims)
        sent = [[p for p in parts if goes(p, at[d], peer, d)] for peer in peers]
        received = [
            [p for p in self.held((*at[:d], s, *at[d + 1 :]), dims) if goes(p, s, at[d], d)]
            for s in peers
        ]
        return Hop(
            d if moves else None,
            list(itertools.chain(*sent)),
            list(map(self.elements, sent)),
            list(itertools.chain(*received)),
            list(map(self.elements, received)),
            (max(sending.values(), default=0), max(receiving.values(), default=0)),
        )
