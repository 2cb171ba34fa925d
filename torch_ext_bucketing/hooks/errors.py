"""What can go wrong while the hooks are put into a torch."""

from __future__ import annotations

from collections.abc import Sequence


class HooksError(RuntimeError):
    """The hooks could not be put into torch, or taken out; the message says what was changed,
    which is nothing unless it says otherwise."""


class PatchDoesNotApplyError(HooksError):
    """At least one hunk of the series does not fit the torch source.

    Attributes:
        failures: one line for each hunk that failed: file, hunk header, first line that differs.
    """

    def __init__(self, failures: Sequence[str]) -> None:
        message = f"{len(failures)} hunk(s) of the torch patch do not fit this torch:"
        super().__init__("\n  ".join([message, *failures]))
        self.failures = tuple(failures)


class ImportedTooEarlyError(HooksError):
    """A module that the patch changes was imported before ``hooks.install()``."""
