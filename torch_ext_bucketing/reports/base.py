"""Render reports as text and JSON, and record collectives left alone."""

from __future__ import annotations

import enum
import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, TypeAlias


def change(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Format numbers of collectives before and after, by kind."""
    # Imports torch, which the command line does without until a command runs.
    from ..graph.nodes import COLLECTIVES

    kinds = [k for k in COLLECTIVES if before.get(k) or after.get(k)]
    texts = [f"{k} {before.get(k, 0)} -> {after.get(k, 0)}" for k in kinds]
    return ", ".join(texts) or "no collectives"


_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def size_text(nbytes: int) -> str:
    """Format a size with one decimal, in its largest unit."""
    unit, factor = next(((u, f) for u, f in _UNITS if nbytes >= f), _UNITS[-1])
    return f"{nbytes / factor:.{int(factor > 1)}f} {unit}"


def sizes_text(*sizes: int) -> list[str]:
    """Format sizes in the unit of the largest, with enough digits to tell sizes apart.

    Five decimals are the limit; beyond that, all are in bytes.
    """
    most = max(map(abs, sizes), default=0)
    unit, factor = next(((u, f) for u, f in _UNITS if most >= f), _UNITS[-1])
    for digits in range(3, 6) if factor > 1 else ():
        texts = [f"{size / factor:.{digits}f} {unit}" for size in sizes]
        if len(set(texts)) == len(set(sizes)):
            return texts
    return [f"{size} B" for size in sizes]


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Format rows as lines with aligned columns; the columns in ``right`` are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Format rows with the first column flush left and the others flush right."""
    return "\n".join(aligned(rows, right=range(1, len(rows[0]))))


Columns: TypeAlias = Mapping[str, Callable[[Any], Any]]
"""The columns of a table: by name, a function of a row's item.

A type after a colon in the name is ``b`` for bytes, ``ms`` for milliseconds, ``n`` for other
numbers, which are flush right; text has none. Reports and pages show a value by its type.
"""
_CELLS: dict[str, Callable[[Any], str]] = {
    "": str,
    "b": size_text,
    "ms": "{:.3f}".format,
    "n": str,
}


def table(columns: Columns, items: Iterable[Any], join: str | None = None) -> list[str]:
    """Format the columns' names, and a row for each item, as :func:`aligned` lines.

    Rows that are alike but for one number in column ``join`` are one row, at the first one's place.
    """
    names, _, types = zip(*(name.partition(":") for name in columns), strict=True)
    show = [(_CELLS[kind], value) for kind, value in zip(types, columns.values(), strict=True)]
    rows = [[text(value(item)) for text, value in show] for item in items]
    if join is not None:
        rows = _joined(rows, names.index(join))
    head = [f"{n}, ms" if kind == "ms" else n for n, kind in zip(names, types, strict=True)]
    return aligned([head, *rows], [i for i, kind in enumerate(types) if kind])


_ALIKE = 3
"""Rows that become one: a table of two blocks is easier to read whole."""
_SPANS = 6
"""Ranges of numbers that are named; more are counted."""


def _joined(rows: list[list[str]], column: int) -> list[list[str]]:
    groups: dict[tuple[str, ...], list[tuple[int, list[str]]]] = {}
    for row in rows:
        before, number, after = re.fullmatch(r"(\D*)(\d*)(.*)", row[column]).groups()  # type: ignore[union-attr]
        cells = (*row[:column], before, after, *row[column + 1 :])
        key = cells if number else tuple(row)
        groups.setdefault(key, []).append((int(number or 0), row))
    joined: dict[int, list[str]] = {}
    for members in groups.values():
        first = members[0][1]
        if len(members) < _ALIKE:
            joined |= {id(row): row for _, row in members}
            continue
        spans: list[list[int]] = []
        for number in sorted(number for number, _ in members):
            if spans and number == spans[-1][1] + 1:
                spans[-1][1] = number
            else:
                spans.append([number, number])
        shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in spans]
        if len(shown) > _SPANS:
            shown = [*shown[: _SPANS - 2], "...", shown[-1]]
        text = ", ".join(shown) + (f" ({len(members)})" if "..." in shown else "")
        name = re.sub(r"\d+", f"[{text}]", first[column], count=1)
        joined[id(first)] = [*first[:column], name, *first[column + 1 :]]
    return [joined[id(row)] for row in rows if id(row) in joined]


class Record:
    """A dataclass of plain data."""

    derived: ClassVar[tuple[str, ...]] = ()
    """Attributes that JSON has besides the fields."""

    def as_dict(self) -> dict[str, Any]:
        """Return the data for JSON."""
        names = [*self.derived, *(f.name for f in fields(self))]  # type: ignore[arg-type]
        return {name: _plain(getattr(self, name)) for name in names}


class Report(Record):
    """A report of a pass or compile, as text and as JSON."""

    def to_json(self) -> str:
        """Dump :meth:`as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=2)

    def to_text(self, members: bool = True) -> str:
        """Format the report in lines, with each bucket's ``members`` and their byte offsets."""
        return "".join(f"{line}\n" for line in self.lines(members))

    @abstractmethod
    def lines(self, members: bool = True) -> Iterable[str]:
        """List the lines of :meth:`to_text`; reports without buckets ignore ``members``."""


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


class LeftCause(enum.Enum):
    """The cause of a collective's being left alone, for code that depends on it."""

    UNTAGGED = "untagged"
    WRITTEN = "written"
    OTHER = "other"


@dataclass(frozen=True)
class LeftAlone:
    """A collective, or the collectives of some parameters, that a pass did not change.

    ``reason`` is for readers; code depends on ``cause`` only. ``node`` is the name of the start;
    empty for several collectives.
    """

    fqns: tuple[str, ...]
    reason: str
    node: str = ""
    cause: LeftCause = field(default=LeftCause.OTHER, kw_only=True)
