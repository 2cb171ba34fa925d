"""The demo's progress line. No torch in here."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

from ..payloads import whole_digest
from .settings import Settings
from .table import label


class Progress:
    """One line on a terminal, rewritten in place; elsewhere a line every few steps.

    Args:
        settings: of the demo.
        stream: where to write; standard error by default.
    """

    def __init__(self, settings: Settings, stream: TextIO | None = None) -> None:
        self._settings = settings
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._every = max(1, settings.steps // 5)
        self._start = time.monotonic()
        self._shards: dict[tuple[int, str], dict[int, str]] = {}
        self._equal: dict[str, int] = {}
        self._announced: dict[str, None] = {}

    def start(self) -> None:
        """Say that the ranks are being started."""
        self._say(f"starting {self._settings.ranks} ranks")

    def on_message(self, rank: int, message: tuple[int, str, str]) -> None:
        """Take one rank's ``(step, run, digest)``; step 0 means that the run is about to start."""
        step, run, digest = message
        if step == 0:
            if run not in self._announced:
                self._announced[run] = None
                self._say(f"first step of: {label(run)}")
            return
        shards = self._shards.setdefault((step, run), {})
        shards[rank] = digest
        if len(shards) == self._settings.ranks:
            self._finished(step, run)

    def end(self) -> None:
        """Clear the line, so that what is printed next starts on an empty one."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _finished(self, step: int, run: str) -> None:
        eager = self._whole(step, "eager")
        if run != "eager" and eager is not None:
            self._equal[run] = self._equal.get(run, 0) + (self._whole(step, run) == eager)
        if run != list(self._announced)[-1] or run == "eager":
            return
        if self._terminal or step % self._every == 0 or step == self._settings.steps:
            equal = "; ".join(f"{label(name)}: {n}" for name, n in self._equal.items())
            self._say(f"step {step} of {self._settings.steps}, equal to eager so far: {equal}")

    def _whole(self, step: int, run: str) -> str | None:
        shards = self._shards.get((step, run), {})
        if len(shards) < self._settings.ranks:
            return None
        return whole_digest([shards[rank] for rank in range(self._settings.ranks)])

    def _say(self, text: str) -> None:
        line = f"[{time.monotonic() - self._start:4.0f} s] {text}"
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[K{line[:width]}")
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()
