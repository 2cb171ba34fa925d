"""Reports of the rewrites of the joint graph."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from .base import LeftAlone, Report


class RewriteReport(Report):
    """The report of one rewrite of the joint graph; subclasses are dataclasses."""

    derived: ClassVar[tuple[str, ...]] = ("rewrite",)
    rewrite: ClassVar[str]
    heading: ClassVar[str]
    left: tuple[LeftAlone, ...]
    """Collectives that the rewrite did not touch."""

    def to_text(self) -> str:
        """Format a line for each change, and for each thing left alone."""
        lines = self._lines()
        lines += [f"left alone: {', '.join(x.fqns) or '-'}: {x.reason}" for x in self.left]
        return "".join([f"{self.heading}:\n", *(f"  {x}\n" for x in lines)]) if lines else ""

    @abstractmethod
    def _lines(self) -> list[str]:
        """Describe the changes, a line each."""
