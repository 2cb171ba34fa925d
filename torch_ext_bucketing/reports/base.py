"""The base of all reports, and the record of what was left alone."""

from __future__ import annotations

import json
from abc import abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, cast

__all__ = ["LeftAlone", "Report"]


class Report:
    """A report of what was done to a graph: a dataclass of plain data, as text and as JSON."""

    def as_dict(self) -> dict[str, Any]:
        """The data, for JSON."""
        return asdict(cast("Any", self))

    def to_json(self, indent: int | None = 2) -> str:
        """:meth:`as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=indent)

    @abstractmethod
    def to_text(self) -> str:
        """The report in words; empty, or lines that end with a newline each."""


@dataclass(frozen=True)
class LeftAlone:
    """A collective, or the collectives of some parameters, that a pass did not change.

    Args:
        fqns: the parameters that it serves; empty when it has no tag.
        reason: why, in words.
        node: name of its start; empty where several are meant.
    """

    fqns: tuple[str, ...]
    reason: str
    node: str = ""
