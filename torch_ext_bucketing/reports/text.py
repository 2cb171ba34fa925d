"""Format numbers and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def change(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    # Imports torch, which the command line does without until a command runs.
    from ..graph.collectives import COLLECTIVES

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
