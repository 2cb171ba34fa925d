"""The base classes of reports, and the record of what was left alone."""

from __future__ import annotations

import enum
import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar


class Record:
    """A dataclass of plain data."""

    derived: ClassVar[tuple[str, ...]] = ()
    """Attributes that JSON has besides the fields."""

    def as_dict(self) -> dict[str, Any]:
        """Return the data for JSON."""
        names = [*self.derived, *(f.name for f in fields(self))]  # type: ignore[arg-type]
        return {name: _plain(getattr(self, name)) for name in names}


class Report(Record):
    """A report of what was done to a graph, as text and as JSON."""

    def to_json(self) -> str:
        """Dump :meth:`as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=2)

    @abstractmethod
    def to_text(self) -> str:
        """Format the report: lines that end with a newline each, or an empty string."""


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.as_dict()
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


class Cause(enum.Enum):
    """Why something was left alone, for code that depends on it."""

    UNTAGGED = "untagged"
    WRITTEN = "written"
    OTHER = "other"


@dataclass(frozen=True)
class LeftAlone:
    """A collective, or the collectives of some parameters, that a pass did not change.

    Args:
        fqns: its parameters; empty if it has no tag.
        reason: why, in words. Code depends on ``cause`` only.
        node: name of its start; empty for several collectives.
    """

    fqns: tuple[str, ...]
    reason: str
    node: str = ""
    cause: Cause = field(default=Cause.OTHER, kw_only=True)
