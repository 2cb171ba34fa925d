"""Reports of the rewrites of the joint graph."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from .base import LeftAlone, Report
from .text import size_text


class RewriteReport(Report):
    """The report of one rewrite of the joint graph; subclasses are dataclasses."""

    derived: ClassVar[tuple[str, ...]] = ("rewrite",)
    rewrite: ClassVar[str]
    heading: ClassVar[str]
    left: tuple[LeftAlone, ...]
    """What the rewrite did not touch."""

    def to_text(self) -> str:
        """Format a line for each change, and for each thing left alone."""
        lines = self._lines()
        lines += [f"left alone: {', '.join(x.fqns) or '-'}: {x.reason}" for x in self.left]
        return "".join([f"{self.heading}:\n", *(f"  {x}\n" for x in lines)]) if lines else ""

    @abstractmethod
    def _lines(self) -> list[str]:
        """Describe the changes, a line each."""


@dataclass(frozen=True)
class CombinedUses:
    """A parameter, or several that are gathered as one, with fewer collectives.

    Args:
        gathers: number of all-gathers, before and after.
        reductions: number of reductions, before and after.
        added_dtype: dtype of the sum of the gradients; None if there was nothing to add.
        saved_bytes: larger side of each collective that is gone.
    """

    fqns: tuple[str, ...]
    gathers: tuple[int, int]
    reductions: tuple[int, int]
    added_dtype: str | None
    saved_bytes: int


@dataclass(frozen=True)
class CombineReport(RewriteReport):
    """The result of :class:`.CombineUses` on one graph.

    Args:
        left: parameters whose uses are gathered or reduced one by one. Gradients that are reduced
            one by one do not match eager FSDP2's bit for bit.
    """

    rewrite = "combine uses"
    heading = "uses combined"
    combined: tuple[CombinedUses, ...] = ()
    left: tuple[LeftAlone, ...] = ()

    def _lines(self) -> list[str]:
        lines = []
        for c in self.combined:
            parts = []
            if c.gathers[0] != c.gathers[1]:
                parts.append(f"{c.gathers[0]} gathers -> {c.gathers[1]}")
            if c.reductions[0] != c.reductions[1]:
                parts.append(
                    f"{c.reductions[0]} reductions -> {c.reductions[1]}, added in {c.added_dtype}"
                )
            parts.append(f"saves {size_text(c.saved_bytes)}")
            lines.append(f"{', '.join(c.fqns)}: {'; '.join(parts)}")
        return lines


@dataclass(frozen=True)
class AmaxReport(RewriteReport):
    """The result of :class:`.MergeAmax` on one graph.

    Args:
        merged: number of all-reduces in each merged one.
        left: other all-reduces, with the parameters whose gathers wait for them.
    """

    rewrite = heading = "largest values merged"
    merged: tuple[int, ...] = ()
    left: tuple[LeftAlone, ...] = ()

    def _lines(self) -> list[str]:
        return [f"{number} all-reduces -> 1" for number in self.merged]


@dataclass(frozen=True)
class ReducedShard:
    """A gradient that is scattered over the shards before it is reduced over the replicas.

    ``replica_bytes`` is the size of the all-reduce's input, before and after.
    """

    fqns: tuple[str, ...]
    replica_bytes: tuple[int, int]


@dataclass(frozen=True)
class ScatterReport(RewriteReport):
    """The result of :class:`.ReduceScatterFirst` on one graph.

    Args:
        swapped: in graph order.
        left: all-reduces that a reduce-scatter still follows.
    """

    derived = ("rewrite", "replica_bytes")
    rewrite = heading = "reduce-scatter first"
    swapped: tuple[ReducedShard, ...] = ()
    left: tuple[LeftAlone, ...] = ()

    @property
    def replica_bytes(self) -> tuple[int, int]:
        """Sum over the swapped gradients, before and after."""
        each = [s.replica_bytes for s in self.swapped]
        return sum(before for before, _ in each), sum(after for _, after in each)

    def _lines(self) -> list[str]:
        before, after = map(size_text, self.replica_bytes)
        line = f"{len(self.swapped)} gradients; all-reduced over the replicas: {before} -> {after}"
        return [line] if self.swapped else []


@dataclass(frozen=True)
class Resharded:
    """Parameters that are sharded over a smaller group after forward.

    Args:
        ranks: number of ranks that forward gathers from.
        saved_bytes: bytes that this rank keeps from forward to backward.
    """

    fqns: tuple[str, ...]
    ranks: int
    saved_bytes: int


@dataclass(frozen=True)
class ReshardReport(RewriteReport):
    """The result of ``ReshardAfterForward(to=...)`` on one graph.

    Args:
        ranks: size of the smaller group.
        left: parameters that backward gathers over their own group.
    """

    rewrite = heading = "reshard after forward"
    ranks: int
    resharded: tuple[Resharded, ...] = ()
    left: tuple[LeftAlone, ...] = ()

    def _lines(self) -> list[str]:
        nbytes = sum(r.saved_bytes for r in self.resharded)
        line = f"{len(self.resharded)} gathers of backward among {self.ranks} ranks; kept for them:"
        return [f"{line} {size_text(nbytes)}"] if self.resharded else []


@dataclass(frozen=True)
class AddedByUnit:
    """An activation whose gradients are added unit by unit.

    Args:
        node: name of the node that computes it.
        module: FQN of the module of that node, if known.
        sums: number of units whose sum is added where autograd would add use by use.
    """

    node: str
    module: str | None
    sums: int


@dataclass(frozen=True)
class AddReport(RewriteReport):
    """The result of :class:`.AddByUnit` on one graph.

    ``added`` has the activations whose gradients are added in another order now, in backward order.
    """

    rewrite = heading = "added by unit"
    added: tuple[AddedByUnit, ...] = ()
    left: tuple[LeftAlone, ...] = ()

    def _lines(self) -> list[str]:
        return [
            f"gradients of {a.node}{f', made in {a.module}' if a.module else ''}: {a.sums} sums"
            for a in self.added
        ]
