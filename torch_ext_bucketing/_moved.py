"""Modules under the names that they had before the package got its folders.

``torch_ext_bucketing.caps`` is ``torch_ext_bucketing.bucketing.caps`` today. Code that imports the
old name goes on working: the old module is made when it is imported, holds nothing, and asks the
new ones for each attribute. Where a folder has the name of an old module (``passes``), the folder
answers in the same way.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["OLD_NAMES", "forward", "install"]

OLD_NAMES: dict[str, tuple[str, ...]] = {
    "auto_cap": ("scheduling.cap_search",),
    "buckets": ("bucketing.merge", "bucketing.plan", "bucketing.units", "bucketing.members"),
    "caps": ("bucketing.caps",),
    "cost": ("scheduling.cost",),
    "groups": ("bucketing.groups",),
    "launches": ("agreement.launches",),
    "memory": ("scheduling.memory",),
    "order": ("plans.order",),
    "overlap": ("scheduling.overlap",),
    "report": ("reports.compile", "reports.graph", "reports.buckets", "reports.schedule"),
    "ring_sum": ("testing.sums",),
    "scheduling_passes": ("passes.scheduling",),
    "separate_groups": ("passes.separate_groups",),
    "simple_fsdp": ("plans.simple_fsdp",),
    "tags": ("tagging.tags", "tagging.tag_graph", "graph.collectives"),
    "timeline": ("scheduling.timeline", "scheduling.model"),
}
"""Old module, and the modules that have what it had, both below this package."""


def forward(package: str, modules: Sequence[str]) -> Callable[[str], Any]:
    """A module's ``__getattr__`` that looks for public names in ``modules``, below ``package``.

    Raises:
        AttributeError: from the result, for a name that none of them has in its ``__all__``.
    """

    def get(name: str) -> Any:
        names: list[str] = []
        for module in modules:
            found = importlib.import_module(f"{package}.{module}")
            if name in found.__all__:
                return getattr(found, name)
            names += found.__all__
        if name == "__all__":
            return names
        raise AttributeError(f"none of {', '.join(modules)} in {package} has {name!r}")

    return get


class _OldNames:
    """Finds and makes the old modules."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """The spec of an old module, or None."""
        package, _, module = name.rpartition(".")
        if package != self._package or module not in OLD_NAMES:
            return None
        return ModuleSpec(name, self, origin=", ".join(OLD_NAMES[module]))  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make it."""

    def exec_module(self, module: ModuleType) -> None:
        """Let it ask the new ones."""
        modules = OLD_NAMES[module.__name__.rpartition(".")[2]]
        module.__getattr__ = forward(self._package, modules)  # type: ignore[method-assign]


def install() -> None:
    """Let old names be imported; again does nothing."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.append(_OldNames(__package__))  # type: ignore[arg-type]
