"""Writing the hooks into a torch on disk, and taking them out again.

All files or none: everything that can fail (reading, applying, disk space) is done while torch is
still untouched; then each file is replaced by a rename, which is one step for everybody who looks.
What has been replaced when one of these fails is put back. A kill between two renames leaves some
files patched and others original. That torch imports, because of the order: ``config.py`` first, as
nobody minds unused entries; then each file before those that import it. Reverting goes the other
way round.

What ``apply`` leaves in a torch directory to find its way back::

    torch/.torch_ext_bucketing/     it appears in one rename, before the first file is replaced,
                                    and goes after the last one was put back
        record.json                 version of torch, series, and digests of each file, in order
        before/                     the originals, moved back by revert
        after/                      the patched files, moved into place by apply

Which files are patched is told by their bytes, so no kill can leave a record that is wrong. Files
are never written in place: package managers that link files from a cache (uv, conda) share the
inode with other environments. Torch's ``RECORD`` keeps its hashes.
"""

from __future__ import annotations

import contextlib
import errno
import graphlib
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from ..errors import HooksError
from .patches import FileChange, apply_patches, digest_of
from .series import CONFIG_PATH, TorchTree, choose_series, find_torch

STATE_DIR = ".torch_ext_bucketing"


@dataclass(frozen=True)
class Record:
    """What was patched: the version of that torch, the series, and for each file, in the order in
    which they are replaced, its SHA-256 before and after."""

    torch_version: str
    series: str
    files: dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Found:
    """What is on disk: ``"not applied"``, ``"applied"``, ``"native"``, ``"interrupted"`` (some
    files are patched, others not) or ``"edited"`` (a patched file was changed by somebody else),
    and the same in a sentence or two, with what to do; what ``apply`` left, ``None`` where there is
    nothing that counts; and the files that are patched."""

    state: Literal["not applied", "applied", "native", "interrupted", "edited"]
    message: str
    record: Record | None = None
    patched: Sequence[str] = ()


def look(tree: TorchTree) -> Found:
    """Look at the files of a torch, and change nothing; a ``HooksError`` where what ``apply`` left
    can't be read."""
    record = _read_record(tree)
    files = record.files if record else {}
    now = {path: digest_of(tree.read(path) or b"") for path in files}
    patched = [path for path in files if now[path] == files[path][1]]
    edited = [path for path in files if now[path] not in files[path]]
    # Installing another torch over a patched one replaces its files and leaves ours.
    if record is None or (record.torch_version != tree.version and not patched):
        if tree.has_hook_entries():
            return Found("native", f"{tree} has the hooks natively; nothing to do.")
        return Found("not applied", f"{tree} is not patched.")
    if edited:
        message = (
            f"{tree}: changed by somebody since 'patch apply': {', '.join(edited)}. Undo that "
            f"edit, or keep it and delete {tree.torch_dir / STATE_DIR} to make this package forget "
            "the patch."
        )
        return Found("edited", message, record, patched)
    total = len(record.files)
    if not patched:
        return Found("not applied", f"{tree} is not patched.", record)
    if len(patched) == total:
        message = f"{tree} is patched with series {record.series} ({total} files)."
        return Found("applied", message, record, patched)
    message = (
        f"{tree}: {len(patched)} of {total} files are patched; a patch command was interrupted, or "
        "torch installed again over a patched one. It imports as it is; run 'torch-ext-bucketing "
        "patch apply' or 'patch revert' to finish."
    )
    return Found("interrupted", message, record, patched)


def status(torch_dir: str | Path | None = None) -> Found:
    """:func:`look`, once no other command is at work on that torch, which is found by
    :func:`.find_torch`."""
    tree = find_torch(torch_dir)
    with _locked(tree):
        return look(tree)


def apply(torch_dir: str | Path | None = None) -> str:
    """Write the patch into a torch, also into one that an earlier command left half done, and say
    in a sentence what was done. Applying twice does nothing.

    Raises:
        HooksError: no torch there; a hunk that does not fit (``PatchDoesNotApplyError``); a patched
            file was changed since; the operating system refused a change.
    """
    tree = find_torch(torch_dir)
    with _locked(tree):
        found = look(tree)
        if found.state == "native":
            return found.message
        if found.state == "edited":
            raise HooksError(found.message)
        series = choose_series(tree.version)
        old = found.record

        def original(path: str) -> bytes | None:
            return _original(tree, old, path) if old and path in found.patched else tree.read(path)

        changes = apply_patches(series.diffs, original)
        for path, change in changes.items():
            check_compiles(path, change.after)
        order = in_import_order(changes)
        files = {p: (digest_of(changes[p].before), digest_of(changes[p].after)) for p in order}
        record = Record(tree.version, series.name, files)
        if found.state == "applied" and old == record:
            return f"{tree} is patched already; nothing to do."
        if old is not None and found.patched:  # by another edition, or not to the end
            _restore(tree, old)
        _store(tree, record, changes)
        try:
            for path in record.files:
                _move(_kept(tree, "after", path), tree.path(path))
        except BaseException:
            _restore(tree, record)
            raise
        shutil.rmtree(tree.torch_dir / STATE_DIR / "after", ignore_errors=True)
        return f"{tree}: patched {len(changes)} files with series {series.name}."


def revert(torch_dir: str | Path | None = None) -> str:
    """Put the original bytes, modes and modification times back, and say so in a sentence.

    Raises:
        HooksError: there is nothing to revert; no torch there; a patched file was changed since;
            the operating system refused a change.
    """
    tree = find_torch(torch_dir)
    with _locked(tree):
        found = look(tree)
        if found.state == "edited":
            raise HooksError(found.message)
        if found.record is None or not found.patched:
            _forget(tree)
            why = "has the hooks natively" if found.state == "native" else "is not patched"
            raise HooksError(f"{tree} {why}; nothing to revert.")
        _restore(tree, found.record)
        return f"{tree}: put the original {len(found.record.files)} files back."


def check_compiles(path: str, source: bytes) -> None:
    """Raise a ``HooksError`` where a patched source is no Python."""
    try:
        compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise HooksError(f"the patched {path} does not compile: {error}") from None


def in_import_order(changes: Mapping[str, FileChange]) -> list[str]:
    """Paths: config first, then each file before those that import it, else as the series has them.

    Imports inside functions count where they don't contradict those that run on loading.
    """

    def needs(path: str, indent: bytes) -> list[str]:
        statement = rb"^%s(?:from|import)\b(?:[^(\n]|\([^)]*\))*" % indent
        text = b"\n".join(re.findall(statement, changes[path].after, re.MULTILINE))
        words = set(re.findall(rb"\w+", text))
        return [p for p in changes if p != path and Path(p).stem.encode() in words]

    paths = list(changes)
    for indent in (rb"\s*", b""):
        sorter = graphlib.TopologicalSorter({path: needs(path, indent) for path in changes})
        with contextlib.suppress(graphlib.CycleError):
            paths = list(sorter.static_order())
            break
    return sorted(paths, key=lambda path: path != CONFIG_PATH)


@contextlib.contextmanager
def _locked(tree: TorchTree) -> Iterator[None]:
    """One command at a time on one torch; the lock goes with the process that holds it. Of an
    ``OSError`` it is said how that left torch."""
    import fcntl

    fd = os.open(tree.torch_dir, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    except OSError as error:
        raise HooksError(f"torch can't be changed ({error}). {look(tree).message}") from error
    finally:
        os.close(fd)


def _read_record(tree: TorchTree) -> Record | None:
    path = tree.torch_dir / STATE_DIR / "record.json"
    try:
        record = Record(**json.loads(path.read_text(encoding="utf-8")))
        return replace(record, files={p: (old, new) for p, (old, new) in record.files.items()})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise HooksError(f"{path} can't be read: {error}. Install torch again.") from None


def _kept(tree: TorchTree, side: Literal["before", "after"], path: str) -> Path:
    return tree.torch_dir / STATE_DIR / side / path.replace("/", "+")


def _original(tree: TorchTree, record: Record, path: str) -> bytes:
    """The original of a file that is patched; a ``HooksError`` where that is gone or damaged."""
    kept = _kept(tree, "before", path)
    # What a symbolic link says counts from where it was.
    source = tree.path(path).parent / (kept.readlink() if kept.is_symlink() else kept)
    data = source.read_bytes() if source.exists() else b""
    if digest_of(data) != record.files[path][0]:
        raise HooksError(f"{kept}, the original of {path}, is damaged; install torch again.")
    return data


def _store(tree: TorchTree, record: Record, changes: Mapping[str, FileChange]) -> None:
    """Write originals, patched files and record; they appear in one step, all or none."""
    _forget(tree)
    _check_writable(tree, changes)
    new = tree.torch_dir / f"{STATE_DIR}-new"
    try:
        for side in ("before", "after"):
            (new / side).mkdir(parents=True)
        for path, change in changes.items():
            source, name = tree.path(path), path.replace("/", "+")
            shutil.copy2(source, new / "before" / name, follow_symlinks=False)
            (new / "after" / name).write_bytes(change.after)
            shutil.copymode(source, new / "after" / name)
        (new / "record.json").write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")
        for written in new.rglob("*"):
            if written.is_file() and not written.is_symlink():
                with written.open("rb") as file:
                    os.fsync(file.fileno())
        os.rename(new, tree.torch_dir / STATE_DIR)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _check_writable(tree: TorchTree, paths: Iterable[str]) -> None:
    for folder in {tree.torch_dir, *(tree.path(path).parent for path in paths)}:
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def _restore(tree: TorchTree, record: Record) -> None:
    """Put back what is patched, in reverse order, and forget it."""
    patched = [
        p for p, (_, after) in record.files.items() if digest_of(tree.read(p) or b"") == after
    ]
    _check_writable(tree, patched)
    for path in patched:
        _original(tree, record, path)
    for path in reversed(patched):
        _move(_kept(tree, "before", path), tree.path(path))
    _forget(tree)


def _forget(tree: TorchTree) -> None:
    """Remove what ``apply`` leaves, where no file is patched: the record before what it names."""
    state = tree.torch_dir / STATE_DIR
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(state / "record.json")
    for leftover in (state, state.with_name(f"{STATE_DIR}-new")):
        shutil.rmtree(leftover, ignore_errors=True)


def _move(source: Path, target: Path) -> None:
    """Replace a file of torch, and remove every interpreter's byte code of the one that was there:
    some (PEP 552) is never compared with its source, the rest by its size and seconds only."""
    os.replace(source, target)
    cached = list((target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"))
    # Elsewhere, if PYTHONPYCACHEPREFIX is set.
    for path in (*cached, Path(importlib.util.cache_from_source(str(target)))):
        with contextlib.suppress(OSError):
            path.unlink()
