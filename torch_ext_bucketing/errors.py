"""Define errors and warnings of the package, with one base class each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import UnionType
from typing import Any


def check_argument(name: str, value: object, kinds: Any) -> None:
    """Raise a TypeError that names an argument of another type than ``kinds``."""
    if not isinstance(value, kinds):
        names = [k.__name__ for k in (kinds.__args__ if isinstance(kinds, UnionType) else (kinds,))]
        accepted = " or ".join(names).replace("NoneType", "None")
        article = "an" if accepted[0] in "AEIOUaeiou" else "a"
        raise TypeError(f"{name} must be {article} {accepted}, got {value!r}")


def check_count(name: str, value: object, least: int = 0) -> None:
    """Raise a ValueError unless an argument is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def check_positive(name: str, value: object, kind: str = "number") -> None:
    """Raise a ValueError unless an argument is a finite number above 0; ``kind`` names its unit."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{name} must be a positive {kind}, got {value!r}")


class BucketingError(RuntimeError):
    """Base class of the package's errors that are not about an argument's type or value."""


class UnknownTorchError(BucketingError):
    """The installed torch lacks a private function that the package calls."""


class AgreementError(BucketingError):
    """The ranks could not make sure that they launch the same collectives."""


class PlanMismatchError(AgreementError):
    """Ranks are about to launch different collectives.

    The message shows the first difference, in each version, with the ranks that have it.
    """


class RankMissingError(AgreementError):
    """Some ranks did not join the comparison in time; the message names them."""


class TuningError(BucketingError):
    """A rank failed, or was late, while candidates were measured; the weights are consistent.

    Attributes:
        candidate: the name of the candidate.
        ranks: the ranks that failed or are late; empty where unknown.
    """

    def __init__(self, message: str, candidate: str = "", ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.candidate, self.ranks = candidate, tuple(ranks)


class RecomputeError(BucketingError):
    """Backward recomputed a value with other bits than forward; the message has its place.

    Attributes:
        node: name of the node in the graph.
    """

    def __init__(self, message: str, node: str = "") -> None:
        super().__init__(message)
        self.node = node


class NoUuidError(Exception):
    """No cache key can be made of an object; the message names it and the reason."""


class PassOrderError(ValueError):
    """A list of passes can't run: one undoes another's work, or two decide the same.

    Attributes:
        working: the passes to give instead, in an order that works; empty where none is known.
    """

    def __init__(self, message: str, working: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.working = tuple(working)


class HooksError(BucketingError):
    """The hooks could not be installed in torch; the message lists the changes."""


class PatchDoesNotApplyError(HooksError):
    """Hunks of the patch series do not fit the torch source.

    Attributes:
        failures: a line for each hunk with its file, its header, and its first line that differs.
    """

    def __init__(self, failures: Sequence[str]) -> None:
        message = f"{len(failures)} hunk(s) of the torch patch do not fit this torch:"
        super().__init__("\n  ".join([message, *failures]))
        self.failures = tuple(failures)


class ImportedTooEarlyError(HooksError):
    """A module that the series changes was imported before ``hooks.install()``."""


class BucketingWarning(UserWarning):
    """Base class of the package's warnings."""


class NotBucketedWarning(BucketingWarning):
    """Collectives of a compiled graph were not bucketed.

    Nothing was merged although the graph has collectives, or nothing of one kind of reduction; or
    there is nothing to bucket because parameters are not sharded.
    """


class UncoveredParametersWarning(BucketingWarning):
    """Some parameters are in no unit; their collectives stay one each."""


class GuessedNamesWarning(BucketingWarning):
    """Names of sharded parameters are guesses, or missing; units may be planned wrong."""


class PayloadOrderWarning(BucketingWarning):
    """Buckets are not packed in the payload order that was given."""


class DividedUnitWarning(BucketingWarning):
    """A unit's gradients are not reduced in one payload, as eager FSDP2 reduces them."""


class AddedByGraphWarning(BucketingWarning):
    """Gradients of one activation are added graph by graph, in another order than eager's."""


class UnevenShardsWarning(BucketingWarning):
    """Gathers carry much padding, and ranks hold unequal shards."""


class NothingKeptWarning(BucketingWarning):
    """No unit's gathered parameters could stay from forward to backward."""


class BoundNotKeptWarning(BucketingWarning):
    """A bound on memory could not be kept, or a graph could not be scheduled."""


class EagerOptimizerWarning(BucketingWarning):
    """An optimizer's step is not in the planned graphs; it runs after them."""
