"""The demo's progress line. No torch in here."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

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
        self._start = time.monotonic()
        self._shards: dict[tuple[int, str], dict[int, str]] = {}
        self._equal: dict[str, int] = {}
        self._say(f"starting {settings.ranks} ranks")

    def on_message(self, rank: int, message: tuple[int, str, str]) -> None:
        """Take one rank's ``(step, run, digest)``; step 0 means that the run is about to start."""
        step, run, digest = message
        if run not in self._equal:
            self._equal[run] = 0
            self._say(f"first step of: {label(run)}")
        shards = self._shards.setdefault((step, run), {})
        shards[rank] = digest
        if step == 0 or len(shards) < self._settings.ranks:
            return
        self._equal[run] += shards == self._shards[step, "eager"]
        often = step % max(1, self._settings.steps // 5) == 0 or step == self._settings.steps
        if run == list(self._equal)[-1] and (self._terminal or often):
            equal = [f"{label(name)}: {n}" for name, n in self._equal.items() if name != "eager"]
            steps = self._settings.steps
            self._say(f"step {step} of {steps}, equal to eager so far: {'; '.join(equal)}")

    def end(self) -> None:
        """Clear the line, so that what is printed next starts on an empty one."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _say(self, text: str) -> None:
        line = f"[{time.monotonic() - self._start:4.0f} s] {text}"
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[K{line[:width]}")
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()
