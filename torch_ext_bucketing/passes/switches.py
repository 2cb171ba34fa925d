"""``TORCH_EXT_BUCKETING_DISABLE``: switch passes off by name, to find which is to blame."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from .base import GraphPass

__all__ = ["DISABLE", "switched_off"]

DISABLE = "TORCH_EXT_BUCKETING_DISABLE"
"""Environment variable: names of classes of passes, separated by commas."""


def switched_off(passes: Iterable[Any]) -> tuple[str, ...]:
    """Names of the classes among ``passes`` that are switched off, each once.

    A class's subclasses stay: ``Schedule`` does not stand for ``BucketAndSchedule``.

    Raises:
        ValueError: :data:`DISABLE` has a name that neither this package nor ``passes`` has.
    """
    wanted = [name.strip() for name in os.environ.get(DISABLE, "").split(",") if name.strip()]
    if not wanted:
        return ()
    given = dict.fromkeys(type(p).__name__ for p in passes)
    known = sorted({*given, *_names_of_passes()})
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"{DISABLE} names {', '.join(unknown)}; the passes are {', '.join(known)}")
    return tuple(name for name in given if name in wanted)


def _names_of_passes() -> Iterator[str]:
    # So that all of the package's are there.
    from . import bucketing, resharding, scheduling, separate_groups, tagging  # noqa: F401

    def below(cls: type[Any]) -> Iterator[type[Any]]:
        child: type[Any]
        for child in cls.__subclasses__():
            yield child
            yield from below(child)

    package = __package__.partition(".")[0]
    for cls in below(GraphPass):
        if cls.__module__.startswith(f"{package}.passes."):
            yield cls.__name__
