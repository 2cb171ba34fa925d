"""What ``patch apply`` leaves in a torch directory to find its way back.

::

    torch/.torch_ext_bucketing/      the leading dot keeps it from being a package
        lock                         held (flock) by the command at work
        journal.json                 which files, their hashes, and the phase
        before/0000, 0001, ...       the original bytes, in the journal's order
        after/0000, 0001, ...        the patched bytes

The journal is only ever replaced as a whole, so that it is always one of these phases:

====================  =========================================================================
no journal            torch is original (the directory is a leftover or there is none)
``staging``           torch is original; backups and new files are being written
``applying``          files are being replaced, in the journal's order
``applied``           torch is patched
``reverting``         originals are being put back, in reverse order
====================  =========================================================================
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .errors import HooksError

STATE_DIR = ".torch_ext_bucketing"
JOURNAL = "journal.json"
PHASES = ("staging", "applying", "applied", "reverting")


def sha256(data: bytes | None) -> str | None:
    """SHA-256 in hex; ``None`` (no such file) stays ``None``."""
    return None if data is None else hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class FileRecord:
    """One file: its path in the repository and what it is on either side of the patch.

    ``before`` and ``after`` are SHA-256 digests, ``None`` where the file does not exist. ``mode``
    and ``mtime_ns`` are the original's; ``link`` is where it pointed if it was a symbolic link.
    """

    path: str
    before: str | None
    after: str | None
    mode: int | None = None
    mtime_ns: int | None = None
    link: str | None = None


@dataclass(frozen=True)
class Journal:
    """The state of one patched torch. ``digest`` is that of the series' files."""

    phase: str
    torch_version: str
    series: str
    digest: str
    files: tuple[FileRecord, ...]
    created_dirs: tuple[str, ...] = ()

    def at(self, phase: str) -> Journal:
        return replace(self, phase=phase)


def source_digest(files: dict[str, str | None]) -> str:
    """One digest for a set of patched files of ``torch/``, the same in memory and on disk."""
    lines = [f"{path} {files[path]}\n" for path in sorted(files) if path.startswith("torch/")]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def load_journal(torch_dir: Path) -> Journal | None:
    """Read the journal of a torch directory; ``None`` where there is none.

    Raises:
        HooksError: it can't be read. It is only ever replaced as a whole, so somebody changed it.
    """
    path = torch_dir / STATE_DIR / JOURNAL
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        files = tuple(FileRecord(**record) for record in raw.pop("files"))
        dirs = tuple(raw.pop("created_dirs"))
        journal = Journal(files=files, created_dirs=dirs, **raw)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise HooksError(f"the patch journal {path} can't be read: {error}") from None
    if journal.phase not in PHASES:
        raise HooksError(f"the patch journal {path} has an unknown phase {journal.phase!r}")
    return journal


def store_journal(torch_dir: Path, journal: Journal) -> None:
    """Replace the journal, durably and as a whole."""
    state = torch_dir / STATE_DIR
    data = json.dumps(asdict(journal), indent=1).encode()
    write_durably(state / f"{JOURNAL}.new", data)
    os.replace(state / f"{JOURNAL}.new", state / JOURNAL)
    sync_dir(state)


def write_durably(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file anew and wait until it is on the disk."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), mode)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_dir(path: Path) -> None:
    """Make renames in a directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
