"""Reports of the rewrites of the joint graph."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from .base import LeftAlone, Report
from .text import size_text


class RewriteReport(Report):
    """The report of one rewrite of the joint graph.

    Subclasses are dataclasses with ``left``: what the rewrite did not touch.
    """

    derived: ClassVar[tuple[str, ...]] = ("rewrite",)
    rewrite: ClassVar[str]
    heading: ClassVar[str]
    left: tuple[LeftAlone, ...]

    def to_text(self) -> str:
        """A line for each change, and for each thing left alone; empty where there is nothing to
        say."""
        said = self._lines()
        said += [f"left alone: {', '.join(x.fqns) or '-'}: {x.reason}" for x in self.left]
        return "".join([f"{self.heading}:\n", *(f"  {line}\n" for line in said)]) if said else ""

    @abstractmethod
    def _lines(self) -> list[str]:
        """What was done, in words."""


@dataclass(frozen=True)
class CombinedUses:
    """One parameter, or several that are gathered as one: the numbers of its all-gathers, and of
    gradients that are reduced on their own, before and after. ``added_dtype`` is where the
    gradients of the uses are added now, None where there was nothing to add; ``saved_bytes`` what a
    rank no longer sends and receives, counted per collective as its larger side."""

    fqns: tuple[str, ...]
    gathers: tuple[int, int]
    reductions: tuple[int, int]
    added_dtype: str | None
    saved_bytes: int


@dataclass(frozen=True)
class CombineReport(RewriteReport):
    """The result of :class:`.CombineUses` on one graph: parameters with fewer collectives than
    before, and parameters whose uses are still gathered or reduced on their own. Where it is the
    reductions, their gradients are not eager FSDP2's bit for bit."""

    rewrite = "combine uses"
    heading = "uses combined"
    combined: tuple[CombinedUses, ...] = ()
    left: tuple[LeftAlone, ...] = ()

    def _lines(self) -> list[str]:
        lines = []
        for c in self.combined:
            said = []
            if c.gathers[0] != c.gathers[1]:
                said.append(f"{c.gathers[0]} gathers -> {c.gathers[1]}")
            if c.reductions[0] != c.reductions[1]:
                said.append(
                    f"{c.reductions[0]} reductions -> {c.reductions[1]}, added in {c.added_dtype}"
                )
            lines.append(
                f"{', '.join(c.fqns)}: {'; '.join(said)}; saves {size_text(c.saved_bytes)}"
            )
        return lines


@dataclass(frozen=True)
class AmaxReport(RewriteReport):
    """The result of :class:`.MergeAmax` on one graph: the number of all-reduces that became one,
    for each one, and those that are in none, with the parameters whose gathers wait for them."""

    rewrite = heading = "largest values merged"
    merged: tuple[int, ...] = ()
    left: tuple[LeftAlone, ...] = ()

    def _lines(self) -> list[str]:
        return [f"{number} all-reduces -> 1" for number in self.merged]


@dataclass(frozen=True)
class ReducedShard:
    """A gradient that is now scattered over the shards before it is reduced over the replicas;
    ``replica_bytes`` are of the all-reduce's input, before and after."""

    fqns: tuple[str, ...]
    replica_bytes: tuple[int, int]


@dataclass(frozen=True)
class ScatterReport(RewriteReport):
    """The result of :class:`.ReduceScatterFirst` on one graph: the gradients that are swapped, in
    graph order, and all-reduces that are followed by a reduce-scatter still."""

    derived = ("rewrite", "replica_bytes")
    rewrite = heading = "reduce-scatter first"
    swapped: tuple[ReducedShard, ...] = ()
    left: tuple[LeftAlone, ...] = ()

    @property
    def replica_bytes(self) -> tuple[int, int]:
        """Bytes of the inputs of all swapped all-reduces, before and after."""
        each = [s.replica_bytes for s in self.swapped]
        return sum(before for before, _ in each), sum(after for _, after in each)

    def _lines(self) -> list[str]:
        """The total."""
        before, after = map(size_text, self.replica_bytes)
        said = f"{len(self.swapped)} gradients; all-reduced over the replicas: {before} -> {after}"
        return [said] if self.swapped else []


@dataclass(frozen=True)
class Resharded:
    """A gather whose result is sharded over a smaller group after forward: the parameters, the
    number of ranks that forward gathers them from, and what this rank keeps from forward to
    backward."""

    fqns: tuple[str, ...]
    ranks: int
    saved_bytes: int


@dataclass(frozen=True)
class ReshardReport(RewriteReport):
    """The result of :class:`.ReshardAfterForward` with ``to=`` on one graph: the size of the
    smaller group, what is gathered there, and what is gathered again over its own group."""

    rewrite = heading = "reshard after forward"
    ranks: int
    resharded: tuple[Resharded, ...] = ()
    left: tuple[LeftAlone, ...] = ()

    def _lines(self) -> list[str]:
        """The total."""
        nbytes = sum(r.saved_bytes for r in self.resharded)
        said = f"{len(self.resharded)} gathers of backward among {self.ranks} ranks; kept for them:"
        return [f"{said} {size_text(nbytes)}"] if self.resharded else []


@dataclass(frozen=True)
class AddedByUnit:
    """An activation whose gradients are added unit by unit: the node that makes it, the FQN of the
    module around that where it is known, and the number of sums of units that are added to what
    came before where autograd would have added use by use."""

    node: str
    module: str | None
    sums: int


@dataclass(frozen=True)
class AddReport(RewriteReport):
    """The result of :class:`.AddByUnit` on one graph, in the order of backward. Activations whose
    gradients are added in the same order either way are not among them."""

    rewrite = heading = "added by unit"
    added: tuple[AddedByUnit, ...] = ()
    left: tuple[LeftAlone, ...] = ()

    def _lines(self) -> list[str]:
        return [
            f"gradients of {a.node}{f', made in {a.module}' if a.module else ''}: {a.sums} sums"
            for a in self.added
        ]
