"""Format numbers and tables.

The base classes of reports, and the record of what was left alone.
"""

from __future__ import annotations

import enum
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar


def change(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    # Imports torch, which the command line does without until a command runs.
    from ..graph.nodes import COLLECTIVES

    kinds = [k for k in COLLECTIVES if before.get(k) or after.get(k)]
    if not kinds:
        return "no collectives"
    return ", ".join(f"{k} {before.get(k, 0)} -> {after.get(k, 0)}" for k in kinds)


def size_text(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def sizes_text(*sizes: int) -> list[str]:
    """Format sizes in the unit of the largest, with enough digits to tell them apart.

    Five decimals are the limit; beyond that, all are in bytes.
    """
    most = max(map(abs, sizes), default=0)
    unit, factor = next(
        ((u, f) for u, f in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)) if most >= f), ("B", 1)
    )
    for digits in range(3, 6) if factor > 1 else ():
        texts = [f"{size / factor:.{digits}f} {unit}" for size in sizes]
        if len(set(texts)) == len(set(sizes)):
            return texts
    return [f"{size} B" for size in sizes]


def table(
    columns: Mapping[str, Callable[[Any], object]], items: Iterable[Any], right: Sequence[int] = ()
) -> list[str]:
    """Format aligned lines: the columns' names, and a row for each item."""
    rows = [[str(cell(item)) for cell in columns.values()] for item in items]
    return aligned([list(columns), *rows], right)


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


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
