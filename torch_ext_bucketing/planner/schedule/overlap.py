"""The policy that hides communication under computation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch.fx as fx

from ...graph.collectives import kind_of
from ...graph.tags import member_tags, tag_of
from .model import Model
from .options import Options
from .policy import Case, Policy

_WINDOWS = (0, 8, 16, 40, 100)
_QUICK_WINDOWS = (0, 16, 100)


@dataclass(frozen=True)
class Overlap(Policy):
    """Launch gathers before their use and wait late for reductions, for :func:`.schedule`.

    Several orders are tried on the cost model, from the graph's own order of kernels to one that
    runs the critical path first. The fastest within the bounds is chosen.

    Args:
        depth: gathers of one process group that may be in flight or unused when the next launches.
        window: compute nodes that a kernel may overtake to fill a wait or to launch communication
            earlier. 0 keeps the order of kernels. Without a bound, memory may grow several times.
        max_prefetch: compute nodes that a gather may be ahead of its use.
        prefetch_under: modules or parameters to gather while others compute, as in
            ``{"layers.4": "layers.3"}``: ``layers.4`` is gathered while ``layers.3`` computes.

    Raises:
        TypeError: ``prefetch_under`` does not map names to names.
        ValueError: a number is negative or fractional.
    """

    depth: int = 1
    window: int = 100
    max_prefetch: int = 100
    prefetch_under: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("depth", "window", "max_prefetch"):
            _check_count(name, getattr(self, name))
        under = self.prefetch_under
        if not isinstance(under, Mapping) or not all(
            isinstance(name, str) for name in (*under, *under.values())
        ):
            raise TypeError(f"prefetch_under must map names to names, got {under!r}")

    def candidates(self, case: Case, quick: bool) -> Iterable[tuple[str, Options]]:
        """Yield windows up to :attr:`window`, depths up to twice :attr:`depth`, and deadlines."""
        under, _ = self._launch_places(case.model)
        given = _QUICK_WINDOWS if quick else _WINDOWS
        windows = tuple(dict.fromkeys(min(w, self.window) for w in given))
        found = [(w, self.depth, True) for w in windows]
        if not quick:
            found += [(w, 2 * self.depth, True) for w in windows if self.depth]
            found += [(w, 0, True) for w in windows[:1] if self.depth]
        found += [(w, self.depth, False) for w in windows[:1]]
        for (window, depth, deadlines), hold in itertools.product(found, (True, False)):
            yield (
                f"window {window}, depth {depth}{', by deadline' if deadlines else ''}"
                f"{'' if hold else ', no kernel held back'}",
                Options(
                    window=window,
                    fill=self.window,
                    depth=depth,
                    max_prefetch=self.max_prefetch,
                    deadlines=deadlines,
                    hold=hold,
                    under=under,
                ),
            )

    def notes(self, case: Case) -> Iterable[str]:
        """Yield a text for each name in :attr:`prefetch_under` without effect in this graph."""
        return self._launch_places(case.model)[1]

    def spare_bytes(self, case: Case) -> int:
        """Return the bytes of the collectives in flight, each as large as the largest."""
        return (self.depth + 1) * case.fact(_largest_collective)

    def _launch_places(self, model: Model) -> tuple[dict[int, int], list[str]]:
        """Map each gather of :attr:`prefetch_under` to the kernel to launch it before."""
        if not self.prefetch_under:
            return {}, []
        uses = model.analysis.first_uses()
        nodes = model.dependencies.nodes
        gathers = {
            i: _fqns(model.members.get(i, (nodes[i],)))
            for i in uses
            if kind_of(nodes[i]) == "all_gather"
        }
        found, notes = {}, []
        for name, other in self.prefetch_under.items():
            mine = [i for i, fqns in gathers.items() if _covers(name, fqns)]
            theirs = [uses[i] for i, fqns in gathers.items() if _covers(other, fqns)]
            if not mine or not theirs:
                missing = name if not mine else other
                notes.append(f"prefetch_under: no gather in this graph serves {missing}")
                continue
            for i in mine:
                if min(theirs) < uses[i]:
                    found[i] = min(theirs)
                else:
                    notes.append(f"prefetch_under: {name} is used before {other} in this graph")
        return found, notes


def _largest_collective(model: Model) -> int:
    """Return the most bytes that a collective reads and writes."""
    liveness = model.liveness
    starts = [i for i, group in enumerate(model.group) if group is not None]
    return max((sum(liveness.size[s] for s in liveness.touches[i]) for i in starts), default=0)


def _fqns(starts: Iterable[fx.Node]) -> tuple[str, ...]:
    tags = [t for s in starts for t in (*member_tags(s), tag_of(s)) if t is not None]
    return tuple(dict.fromkeys(f for t in tags for f in t.fqns))


def _covers(name: str, fqns: Iterable[str]) -> bool:
    return any(f == name or f.startswith(f"{name}.") for f in fqns)


def _check_count(name: str, number: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"{name} must be a whole number of at least 0, got {number!r}")
