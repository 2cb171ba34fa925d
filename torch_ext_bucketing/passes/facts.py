"""Facts about a graph.

A pass names the facts that it requires, provides and conflicts with. :class:`.Pipeline` checks a
list of passes by them before anything is compiled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch

if TYPE_CHECKING:
    from ..bucketing.plan import BucketPlanner
    from ..fsdp.units import Units
    from ..graph.nodes import Kind


@dataclass(frozen=True)
class Fact:
    """A property of a graph that holds once a pass has run."""

    text: ClassVar[str] = ""
    """The fact in messages, such as "the order of the nodes"."""
    once: ClassVar[bool] = True
    """Whether only one pass may provide it."""

    @property
    def planned_with(self) -> str:
        """A short text for the times and size hints of the plan. Ranks compare it."""
        return ""


@dataclass(frozen=True)
class Tags(Fact):
    """Collectives carry a tag with the parameters that they serve."""

    text = "the tags of collectives"


@dataclass(frozen=True)
class Regathers(Fact):
    """The parameters that backward gathers again are chosen."""

    text = "which parameters backward gathers again"


@dataclass(frozen=True)
class Buckets(Fact):
    """Collectives of ``kinds`` are merged: by unit, or by size where ``units`` is None.

    Args:
        planner: plans the buckets; None: a search, which is too slow to be a part of another one.
    """

    text = "which collectives are merged"
    once = False
    kinds: tuple[Kind, ...] = ()
    units: Units | None = None
    planner: BucketPlanner | None = None


@dataclass(frozen=True)
class RankOrder(Fact):
    """Gradients are added in rank order, in dtype ``accumulate``; no reduction is left to merge."""

    text = "how gradients are added up"
    accumulate: torch.dtype = torch.float32

    @property
    def planned_with(self) -> str:
        """The dtype of the sums."""
        return f"sums in rank order in {self.accumulate}"


@dataclass(frozen=True)
class Order(Fact):
    """The nodes are in execution order, which the compiler must keep."""

    text = "the order of the nodes"


@dataclass(frozen=True)
class Baseline(Fact):
    """The memory of a graph before the first pass of its stage.

    The pipeline measures it if a pass requires it; no pass provides it.

    Args:
        peak_bytes: estimated peak of live bytes; None if the estimate failed.
        external_live_bytes: bytes that are live while the graph runs and are not its inputs: what
            the allocator holds beside it (:mod:`.beside`), and for a backward graph the forward
            inputs that it does not read, such as shards of parameters that were saved gathered,
            unless the forward graph was cached.
    """

    text = "what the graph took as it was"
    peak_bytes: int | None = None
    external_live_bytes: int = 0


F = TypeVar("F", bound=Fact)


def last_fact(facts: Iterable[Fact], kind: type[F]) -> F | None:
    """Return the last fact of class ``kind``, or None."""
    return next((fact for fact in reversed(list(facts)) if isinstance(fact, kind)), None)
