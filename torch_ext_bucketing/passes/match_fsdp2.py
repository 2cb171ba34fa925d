"""The rewrites that give a joint graph eager FSDP2's collectives and sums, as one pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import ClassVar

import torch.nn as nn

from ..graph.nodes import GraphLike
from .add_by_unit import AddByUnit
from .base import GraphPass, Stage
from .combine_uses import CombineUses
from .compilation import Compilation
from .facts import Tags
from .merge_amax import MergeAmax
from .reduce_scatter_first import ReduceScatterFirst


@dataclass(frozen=True, eq=False, repr=False)
class MatchFSDP2(GraphPass):
    """Give the joint graph eager FSDP2's collectives, and its order of additions.

    Stands for four passes, in this order. Each changes only graphs that have its pattern:

    - :class:`.AddByUnit` adds the gradients of an activation that several units read unit by unit;
      only with ``model`` and ``units``.
    - :class:`.CombineUses` leaves one all-gather and one reduction per parameter and step.
    - :class:`.MergeAmax` merges the all-reduces of amax that 8-bit all-gathers wait for.
    - :class:`.ReduceScatterFirst` reduce-scatters HSDP's gradients before it all-reduces them.

    Reports, traces and ``TORCH_EXT_BUCKETING_DISABLE`` name the four.

    Args:
        model: the model that ``units`` belong to. It is not kept alive.
        units: FQNs of the modules of each ``fully_shard()`` call, in the order of the calls; see
            :meth:`.FSDPParamOrder.from_model`.

    Raises:
        TypeError: ``units`` without ``model``, or ``model`` without ``units``.
        ValueError: ``units`` do not fit ``model``.
    """

    stage: ClassVar[Stage] = "joint"
    requires = (Tags,)
    model: InitVar[nn.Module | None] = None
    units: Iterable[str | Sequence[str]] | None = None
    _passes: tuple[GraphPass, ...] = field(init=False)

    def __post_init__(self, model: nn.Module | None) -> None:
        if (model is None) != (self.units is None):
            raise TypeError("give model and units, or neither: MatchFSDP2(model, units)")
        passes: list[GraphPass] = [CombineUses(), MergeAmax(), ReduceScatterFirst()]
        if model is not None and self.units is not None:
            add_by_unit = AddByUnit(model, self.units)
            self._set(units=add_by_unit.units)
            passes.insert(0, add_by_unit)
        self._set(_passes=tuple(passes))

    def expanded(self) -> tuple[GraphPass, ...]:
        """Return the passes that this one stands for."""
        return self._passes

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        """Run the passes one after the other."""
        for each in self._passes:
            each.run(graph, compilation)
            compilation.changed()

    def __repr__(self) -> str:
        """Return the code that makes this pass."""
        return "MatchFSDP2()" if self.units is None else f"MatchFSDP2(model, {self.units!r})"
