"""Scheduling policies: a new one is one class, in this package or in yours.

The scheduler (:mod:`.scheduler`) knows no policy by name. It asks each one, in this
order:

- :meth:`.Policy.candidates`: which orders to try, as :class:`.Options` of the list scheduler;
- :meth:`.Policy.ask`: what bound each of them has to keep on the way;
- :meth:`.Policy.misses`: by how much an order that came out misses the bound;
- :meth:`.Policy.report` and :meth:`.Policy.notes`: what to tell about the order that was taken.

Taken is the order that misses the bounds of all policies together least, the fastest among equals.
A policy that bounds the number of collectives under way, as an example::

    @dataclass(frozen=True)
    class InFlight(Policy):
        most: int = 4

        def candidates(self, case, quick):
            yield "one gather ahead", Options(depth=1)
            yield "gathers at their use", Options(depth=0, deadlines=False)

        def misses(self, case, timeline):
            return max(0, in_flight(case.model, timeline.order) - self.most) / self.most

        def report(self, case, timeline):
            reached = in_flight(case.model, timeline.order)
            return PolicyReport(repr(self), {"in_flight": reached}, f"{reached} in flight")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..._source import note_sources
from ...reports.schedule import PolicyReport
from .model import Model
from .options import Options
from .timeline import Timeline

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Case:
    """One graph that is to be ordered.

    Args:
        model: the graph's, with times, dependencies and bytes.
        given: the timeline of the order that the graph came with.
        reference_bytes: the peak that ratios refer to; see :func:`.schedule`.
    """

    model: Model
    given: Timeline
    reference_bytes: int
    _facts: dict[Callable[[Model], Any], Any] = field(default_factory=dict, repr=False)

    def fact(self, of: Callable[[Model], T]) -> T:
        """``of(model)``, computed once."""
        if of not in self._facts:
            self._facts[of] = of(self.model)
        found: T = self._facts[of]
        return found


class Policy:
    """A bound or a preference for orders: the base class of policies for :func:`.schedule`.

    Subclasses are frozen dataclasses whose fields are plain values: the fields, and the source of
    the modules that define the class, are its part of the cache keys. A policy whose fields are
    something else has a method ``uuid() -> str`` instead. All methods only read what they are
    given, and answer the same in every process and on every rank.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        note_sources(cls)

    def candidates(self, case: Case, quick: bool) -> Iterable[tuple[str, Options]]:
        """Orders to try for the sake of speed: a name for the report, and how to make it. Where no
        policy names any, the graph's order is changed only if it misses a bound.

        Args:
            case: the graph.
            quick: few of them, for a choice of units that schedules many graphs.
        """
        return ()

    def ask(self, case: Case, options: Options) -> Options:
        """``options`` with this policy's bound added. Called once for each order that is tried,
        policy after policy; a policy tightens what the ones before asked for and loosens nothing.
        """
        return options

    def misses(self, case: Case, timeline: Timeline) -> float:
        """By how much an order misses the bound, as a part of the bound; 0: it is kept."""
        return 0.0

    def report(self, case: Case, timeline: Timeline) -> PolicyReport:
        """Figures of the order that was taken, and a warning where it misses the bound."""
        return PolicyReport(repr(self))

    def notes(self, case: Case) -> Iterable[str]:
        """Texts about what was asked for and does not apply to this graph."""
        return ()

    def spare_bytes(self, case: Case) -> int:
        """Bytes above the reference that it makes good use of; for graphs whose memory no policy
        bounds."""
        return 0

    def max_bucket_run(self) -> int | None:
        """The bound ``max_compute_run`` of :class:`.ByCap` that helps to keep this one where
        :class:`.BySearch` plans; None: none does. Of several the smallest holds."""
        return None


def policies_of(policy: Policy | Iterable[Policy]) -> tuple[Policy, ...]:
    """One policy or several as a tuple.

    Raises:
        TypeError: something is no policy.
        ValueError: two policies of one class.
    """
    given = tuple(policy) if isinstance(policy, Iterable) else (policy,)
    found: dict[type, Policy] = {}
    for p in given:
        if not isinstance(p, Policy):
            raise TypeError(
                f"{p!r} is no policy: give Overlap, MaxComputeRun, PeakMemory or other Policy "
                "objects"
            )
        if type(p) in found:
            raise ValueError(f"two {type(p).__name__} policies: {found[type(p)]!r} and {p!r}")
        found[type(p)] = p
    return given
