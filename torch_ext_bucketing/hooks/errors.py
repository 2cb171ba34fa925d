"""What can go wrong while the hooks are put into a torch."""

from __future__ import annotations


class HooksError(RuntimeError):
    """The hooks could not be put into torch, or are not there; nothing was changed."""


class SeriesError(HooksError):
    """The patch series is missing, incomplete or not a patch this package can read."""


class UnsupportedTorchError(HooksError):
    """No series is meant for this torch, or the directory given is no torch."""


class PatchDoesNotApplyError(HooksError):
    """At least one hunk of the series does not fit the torch source.

    Attributes:
        failures: one line for each hunk that failed: file, hunk header, first line that differs.
    """

    def __init__(self, message: str, failures: tuple[str, ...]) -> None:
        super().__init__("\n  ".join([message, *failures]))
        self.failures = failures


class ImportedTooEarlyError(HooksError):
    """A module that the patch changes was imported before this package."""


class EditedFileError(HooksError):
    """A file is neither what the patch was made for nor what it made."""


class NotAppliedError(HooksError):
    """There is nothing to revert."""


class BusyError(HooksError):
    """Another process is patching the same torch."""


class WriteError(HooksError):
    """The operating system refused a change (permissions, disk full)."""


class HooksWarning(RuntimeWarning):
    """Issued once at import when this torch has no hooks and can't be given them."""
