"""A warning for units whose gradients are reduced in several graphs, or several times in one.

A graph break divides what one step runs into graphs, and a bucket lies within one of them::

    unit [embed, norm, head]      eager FSDP2    one reduce-scatter: embed norm head
    graph break before norm       graph 1        reduce-scatter: embed
                                  graph 2        reduce-scatter: norm head

Each payload is the unit's own, but its offsets are others, and so are the bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx as fx

from ..bucketing.units import UnitIndex
from ..tagging.tags import member_tags
from .base import Compilation

__all__ = ["DividedUnitWarning", "DividedUnits", "some"]

_SHOWN = 4


class DividedUnitWarning(UserWarning):
    """One unit's gradients are not reduced in one payload, as eager FSDP2 reduces them."""


class DividedUnits:
    """What was reduced in the graphs of the compiles so far.

    Args:
        units: which parameter is in which unit.
    """

    def __init__(self, units: UnitIndex) -> None:
        self._units = units
        self._seen: dict[int, dict[int, tuple[str, ...]]] = {}  # unit -> frame -> parameters

    def look(self, graph: fx.Graph, compilation: Compilation) -> None:
        """Note what ``graph`` reduces; warn, once per compile, where that divides a unit.

        A graph of code that was compiled before stands for that, and one with the same parameters
        of a unit takes turns with it (``ReduceOnce``). Gathers don't count: they copy, wherever
        they lie.
        """
        if compilation.frame is None:
            return
        here: dict[int, dict[str, None]] = {}
        reduced: dict[tuple[str, str], int] = {}
        for node in graph.nodes:
            for tag in member_tags(node):
                if tag is not None and tag.kind != "all_gather":
                    for fqn in tag.fqns:
                        unit = self._units.unit_of(fqn)
                        if unit is not None:
                            here.setdefault(unit, {})[fqn] = None
                            reduced[tag.kind, fqn] = reduced.get((tag.kind, fqn), 0) + 1
        several = [fqn for (_, fqn), times in reduced.items() if times > 1]
        if several:
            compilation.warn(
                f"{some(several)} have several uses in one graph, whose gradients are reduced one "
                "by one, where eager FSDP2 adds them and reduces once, so their weights are not "
                "eager FSDP2's bit for bit. Put CombineUses() first among the passes, which "
                "recipe() has; where it is, the report says why it left them",
                DividedUnitWarning,
            )
        divided = []
        for unit, fqns in here.items():
            frames = self._seen.setdefault(unit, {})
            frames[compilation.frame] = tuple(fqns)
            elsewhere = [f for f in frames.values() if set(f) != set(fqns)]
            if elsewhere:
                divided.append((elsewhere[-1], tuple(fqns)))
        if divided:
            (there, these), more = divided[0], len(divided) - 1
            compilation.warn(
                f"one unit's gradients are reduced in several graphs: {some(there)} in an earlier "
                f"one, {some(these)} in this one"
                + (f"; and so are those of {more} more unit(s)" if more else "")
                + ". A step that runs both has a payload in each, where eager FSDP2 has one, so "
                "its weights are not eager FSDP2's bit for bit. Mend the graph break between them "
                "(torch.compile(..., fullgraph=True) says where it is), or make each side's "
                "parameters a unit of its own, in eager FSDP2 as well",
                DividedUnitWarning,
            )


def some(names: Sequence[str], shown: int = _SHOWN) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
