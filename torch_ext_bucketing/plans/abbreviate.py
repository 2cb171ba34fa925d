"""Units as a person would write them, the reverse of :func:`.manual_plan`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["abbreviated"]


def abbreviated(units: Iterable[Sequence[str]]) -> list[str]:
    """Units as entries for :func:`manual_plan`, those with consecutive numbers as one entry.

    >>> abbreviated([("emb",), ("layers.0",), ("layers.1",), ("norm", "head")])
    ['emb', 'layers.[0-1]', 'norm+head']
    """
    runs: list[list[Any]] = []  # head, first number, last number, tail
    for unit in units:
        name = "+".join(unit)
        match = _NUMBERED.fullmatch(name) if len(unit) == 1 else None
        if match is None:
            runs.append([name, None, None, ""])
            continue
        head, number, tail = match[1], int(match[2]), match[3]
        if runs and runs[-1][0::3] == [head, tail] and runs[-1][2] == number - 1:
            runs[-1][2] = number
        else:
            runs.append([head, number, number, tail])
    return [
        f"{head}{'' if first is None else first if first == last else f'[{first}-{last}]'}{tail}"
        for head, first, last, tail in runs
    ]


_NUMBERED = re.compile(r"((?:.*\.)?)(0|[1-9]\d*)((?:\..*)?)")
