"""Facts about a graph, by which passes say where in a list they may stand.

A pass names the facts that it requires, provides and conflicts with; :class:`.Pipeline` checks a
list of passes by these before anything is compiled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch

if TYPE_CHECKING:
    from ..bucketing.plan import BucketPlanner
    from ..fsdp.units import Units
    from ..graph.collectives import Kind


@dataclass(frozen=True)
class Fact:
    """Something that holds of a graph once a pass has run."""

    text: ClassVar[str] = ""
    """The fact in messages, such as "the order of the nodes"."""
    once: ClassVar[bool] = True
    """Whether one pass alone may provide it."""

    @property
    def planned_with(self) -> str:
        """Return in short what the graph was planned with, for ranks to compare."""
        return ""


@dataclass(frozen=True)
class Tags(Fact):
    """Collectives carry a tag: the parameters that they serve."""

    text = "the tags of collectives"


@dataclass(frozen=True)
class Regathers(Fact):
    """It is decided which parameters backward gathers again."""

    text = "which parameters backward gathers again"


@dataclass(frozen=True)
class Buckets(Fact):
    """Collectives of ``kinds`` are merged: one bucket per unit; or, where ``units`` is None, by
    size. ``planner`` is what plans them; None: a search, which other searches can't afford."""

    text = "which collectives are merged"
    once = False
    kinds: tuple[Kind, ...] = ()
    units: Units | None = None
    planner: BucketPlanner | None = None


@dataclass(frozen=True)
class RankOrder(Fact):
    """Gradients are added in the order of the ranks, in the dtype ``accumulate``; no reduction is
    left to be merged."""

    text = "how gradients are added up"
    accumulate: torch.dtype = torch.float32

    @property
    def planned_with(self) -> str:
        """Return the dtype of the sums."""
        return f"sums in rank order in {self.accumulate}"


@dataclass(frozen=True)
class Order(Fact):
    """The nodes stand in the order in which they are to run, and the compiler has to keep it."""

    text = "the order of the nodes"


@dataclass(frozen=True)
class Baseline(Fact):
    """The memory of a graph before the first pass of its stage changed it. No pass gives it: the
    pipeline measures it where a pass needs it.

    Args:
        peak_bytes: estimated peak of live bytes; None where no estimate can be made.
        external_live_bytes: bytes in memory while the graph runs that are none of its inputs: the
            forward graph's inputs that its backward graph does not read, such as the shards of
            parameters that were saved gathered. 0 for other graphs than backward ones, and where
            the forward graph came from a cache.
    """

    text = "what the graph took as it was"
    peak_bytes: int | None = None
    external_live_bytes: int = 0


F = TypeVar("F", bound=Fact)


def last_fact(facts: Iterable[Fact], kind: type[F]) -> F | None:
    """The last fact of a class; None where there is none."""
    return next((fact for fact in reversed(list(facts)) if isinstance(fact, kind)), None)
