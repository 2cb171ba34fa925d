"""Describe how collectives are packed into one buffer.

This is the only description of a bucket. :mod:`.bucketing.pack` draws the nodes and makes them of a
:class:`Layout`; estimates make times and bytes of it: of packing (:mod:`.planner.cost.cost`), of
the merged graph (:mod:`.planner.schedule.merged_model`) and of fused kernels (:mod:`.liveness`).
At the end are the functions that find the packing again in a graph of any maker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
import torch.fx as fx

from .nodes import Kind, group_size, is_view, kind_of
from .operators import CASTS, read_once
from .values import is_move

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

BytesOf: TypeAlias = Callable[[fx.Node], int]
"""Count the bytes of a node's result."""


class Piece(NamedTuple):
    """One member of a bucket.

    Args:
        start: the collective that the bucket replaces.
        value: what packing reads for it: the input of the member's cast, if packing casts.
        copied: whether its result is copied out of the buffer; if not, it is a view.
    """

    start: fx.Node
    value: fx.Node
    copied: bool

    @property
    def sent(self) -> fx.Node:
        """The input of the collective that the bucket replaces."""
        return self.start.all_input_nodes[0]

    @property
    def cast(self) -> fx.Node | None:
        """The cast that packing does instead."""
        return None if self.sent is self.value else self.sent

    @property
    def writer(self) -> fx.Node | None:
        """The result of a fused kernel that nothing but packing reads."""
        return read_once(self.sent)


class Packing(NamedTuple):
    """The kernels that pack: bytes that each reads and writes, and the number of launches."""

    moved: tuple[int, ...]
    launches: int


@dataclass(frozen=True, eq=False)
class Layout:
    """Pieces of one buffer, in the order of their bytes in each rank's part of the buffer.

    Args:
        as_bytes: whether pieces have several dtypes, and are packed as ``uint8``.
    """

    kind: Kind
    ranks: int
    pieces: tuple[Piece, ...]
    as_bytes: bool

    @staticmethod
    def of(starts: Sequence[fx.Node]) -> Layout:
        """Lay out collectives of one bucket key, in this order."""
        kind, ranks = kind_of(starts[0]), group_size(starts[0])
        assert kind is not None
        mixed = len(dict.fromkeys(start.meta["val"].dtype for start in starts)) > 1
        # Gathered parameters interleave in the buffer, one part for each rank.
        copied = kind == "all_gather" and (ranks > 1 or mixed)
        pieces = []
        for start in starts:
            cast = None if mixed else merged_cast(start)
            value = (start if cast is None else cast).all_input_nodes[0]
            pieces.append(Piece(start, value, copied))
        return Layout(kind, ranks, tuple(pieces), mixed)

    @property
    def dtype(self) -> torch.dtype:
        """The buffer's dtype."""
        dtype: torch.dtype = self.pieces[0].start.meta["val"].dtype
        return torch.uint8 if self.as_bytes else dtype

    @property
    def rows(self) -> int | None:
        """Number of ranks whose rows of all pieces lie together in the input; None: no rows."""
        return self.ranks if self.kind == "reduce_scatter" else None

    @property
    def in_place(self) -> bool:
        """Whether packing allocates the buffer of the results, and writes into it."""
        return self.kind == "all_gather"

    def read(self, bytes_of: BytesOf) -> int:
        """Count the bytes that packing reads, and concatenates before it casts them."""
        return sum(bytes_of(piece.value) for piece in self.pieces)

    def sent(self, bytes_of: BytesOf) -> int:
        """Count the bytes of a rank's input of the collective."""
        return sum(bytes_of(piece.sent) for piece in self.pieces)

    def received(self, bytes_of: BytesOf) -> int:
        """Count the bytes of the collective's result."""
        return sum(bytes_of(piece.start) for piece in self.pieces)

    def packing(self, bytes_of: BytesOf, fuses: bool) -> Packing:
        """List the kernels that pack; ``fuses``: whether Inductor makes them.

        A fused kernel writes a reduced value into the buffer, if nothing else reads the value::

            mm -> cast -> rs(a)        mm -> cast, into the buffer -> RS
        """
        if self.kind == "all_gather":
            return gather_packing(self.read(bytes_of), self.sent(bytes_of))
        copied = [bytes_of(p.value) for p in self.pieces if not (fuses and p.writer)]
        moved = (2 * sum(copied),) if sum(copied) else ()
        return Packing(moved, len(copied) if fuses else min(1, len(copied)))


def gather_packing(read: int, sent: int) -> Packing:
    """List the kernels that pack a gather, of ``read`` bytes before and ``sent`` after casts."""
    # One concatenates, the other one casts and copies into this rank's part of the buffer.
    return Packing((2 * read, read + 2 * sent), 2)


def merged_cast(start: fx.Node) -> fx.Node | None:
    """Find the cast before a gather that the copy into the buffer can do instead, or None."""
    cast = start.args[0]
    if (
        start.target is not _c10d.all_gather_into_tensor.default
        or not isinstance(cast, fx.Node)
        or cast.target not in CASTS
        or len(cast.users) != 1
    ):
        return None
    source = cast.args[0]
    assert isinstance(source, fx.Node)
    return cast if source.meta["val"].device == cast.meta["val"].device else None


def fills_buffer(node: fx.Node) -> bool:
    """Return whether a node before a gather only moves values into the buffer."""
    return is_move(node) or node.target is _aten.copy_.default


def pack_of(start: fx.Node) -> fx.Node | None:
    """Find the ``cat`` that packs the buffer of a collective and of nothing else.

    ::

        cat -> view -> reduce_scatter        cat -> copy_(part of a buffer, cat) -> all_gather
    """
    node = start
    while node is start or is_view(node) or node.target == _aten.copy_.default:
        inputs = node.all_input_nodes
        if not inputs:
            return None
        node = inputs[-1 if node.target == _aten.copy_.default else 0]
        if len(node.users) > 1:
            return None
    return node if node.target == _aten.cat.default else None
