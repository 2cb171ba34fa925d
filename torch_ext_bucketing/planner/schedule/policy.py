"""Scheduling policies. A new one is one class, in this package or in yours.

The scheduler (:mod:`.scheduler`) calls the methods of each policy in this order:

- :meth:`.Policy.candidates`: orders to try, as :class:`.Options` of the list scheduler;
- :meth:`.Policy.ask`: the bound to keep while an order is made;
- :meth:`.Policy.misses`: how far an order misses the bound;
- :meth:`.Policy.report` and :meth:`.Policy.notes`: texts about the order that was chosen.

It chooses the order that misses all bounds together least, and the fastest of equals. This policy,
for example, bounds the number of collectives in flight::

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
    """One graph to order.

    Args:
        model: the graph's times, dependencies and bytes.
        given: the timeline of the graph's own order.
        reference_bytes: the peak that ratios refer to; see :func:`.schedule`.
    """

    model: Model
    given: Timeline
    reference_bytes: int
    _facts: dict[Callable[[Model], Any], Any] = field(default_factory=dict, repr=False)

    def fact(self, of: Callable[[Model], T]) -> T:
        """Compute ``of(model)`` once."""
        if of not in self._facts:
            self._facts[of] = of(self.model)
        found: T = self._facts[of]
        return found


class Policy:
    """A bound or a preference for orders: the base class of policies for :func:`.schedule`.

    Subclasses are frozen dataclasses whose fields are plain values. Cache keys contain the fields
    and the source of the modules that define the class. A policy with other fields has a method
    ``uuid() -> str`` instead. Methods must not change their arguments, and must return the same in
    every process and on every rank.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        note_sources(cls)

    def candidates(self, case: Case, quick: bool) -> Iterable[tuple[str, Options]]:
        """Yield orders to try for speed, each as a name for the report and its options.

        Without any, the graph's order changes only if it misses a bound.

        Args:
            case: the graph.
            quick: yield few, for searches that schedule many graphs.
        """
        return ()

    def ask(self, case: Case, options: Options) -> Options:
        """Return ``options`` with this policy's bound added, and no other bound loosened."""
        return options

    def misses(self, case: Case, timeline: Timeline) -> float:
        """Return how far an order misses the bound, relative to the bound; 0 if it is kept."""
        return 0.0

    def report(self, case: Case, timeline: Timeline) -> PolicyReport:
        """Report figures of the order that was chosen, and a warning if it misses the bound."""
        return PolicyReport(repr(self))

    def notes(self, case: Case) -> Iterable[str]:
        """Yield a text for each option that does not apply to this graph."""
        return ()

    def spare_bytes(self, case: Case) -> int:
        """Return the bytes above the reference to allow where no policy bounds memory."""
        return 0

    def max_bucket_run(self) -> int | None:
        """Return the ``max_compute_run`` of :class:`.ByCap` that helps to keep this bound.

        :class:`.BySearch` takes the smallest of all policies. None: buckets don't matter.
        """
        return None


def policies_of(policy: Policy | Iterable[Policy]) -> tuple[Policy, ...]:
    """Return one policy or several as a tuple.

    Raises:
        TypeError: an object is not a policy.
        ValueError: two policies of one class.
    """
    given = tuple(policy) if isinstance(policy, Iterable) else (policy,)
    found: dict[type, Policy] = {}
    for p in given:
        if not isinstance(p, Policy):
            raise TypeError(
                f"{p!r} is not a policy: give Overlap, MaxComputeRun, PeakMemory or other Policy "
                "objects"
            )
        if type(p) in found:
            raise ValueError(f"two {type(p).__name__} policies: {found[type(p)]!r} and {p!r}")
        found[type(p)] = p
    return given
