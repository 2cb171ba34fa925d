"""Writing the hooks into a torch on disk, and taking them out again.

All files or none: everything that can fail (reading, applying, disk space, permissions) is
done while torch is still untouched; then each file is replaced by a rename, which is one step
for everybody who looks. A kill between two renames leaves some files patched and others
original. That torch imports and works, because of the order:

- ``config.py`` first: the other files read the new entries, nobody minds unused ones;
- a file before the files that import it: new helpers are there before their callers, and what
  the patch adds to existing functions is optional;
- reverting goes the other way round.

The journal (see ``journal``) tells the next command what was going on, and it finishes that first.

Files are never written in place. Package managers that link files from a cache (uv, conda)
share the inode with every other environment; a rename gives the name a new inode and leaves the
others alone. The hashes in torch's ``RECORD`` are left alone too: ``pip check`` does not
look at them, and ``revert`` makes them right again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import (
    BusyError,
    EditedFileError,
    HooksError,
    NotAppliedError,
    PatchDoesNotApplyError,
    UnsupportedTorchError,
    WriteError,
)
from .file_order import in_import_order
from .journal import (
    JOURNAL,
    STATE_DIR,
    FileRecord,
    Journal,
    load_journal,
    sha256,
    store_journal,
    sync_dir,
    write_durably,
)
from .series import CONFIG_PATH, TorchTree, choose_series, find_torch, has_hook_entries
from .unified import FileChange

LOCK_TIMEOUT_S = 10.0
"""How long a command waits for another one at work on the same torch, in seconds."""

Side = Literal["before", "after"]


@dataclass(frozen=True)
class InstallStatus:
    """What is on disk.

    Attributes:
        state: ``"not applied"``, ``"applied"``, ``"native"``, ``"interrupted"`` (some files are
            patched, others not) or ``"edited"`` (a patched file was changed by somebody else).
        message: the same in a sentence or two, with what to do.
    """

    state: Literal["not applied", "applied", "native", "interrupted", "edited"]
    message: str


def status(torch_dir: str | Path | None = None) -> InstallStatus:
    """Look at the files of a torch, not only at the journal; change nothing.

    Raises:
        HooksError: no torch there, or a journal that can't be read.
        ModuleNotFoundError: no directory given and torch is not installed.
    """
    tree = find_torch(torch_dir)
    where = f"torch {tree.version} in {tree.torch_dir}"
    _wait_for_others(tree)
    journal = _current(tree)
    if journal is None or journal.phase == "staging":
        if _is_native(tree):
            return InstallStatus("native", f"{where} has the hooks natively; nothing to do.")
        return InstallStatus("not applied", f"{where} is not patched.")
    edited, done = _survey(tree, journal)
    total = len(journal.files)
    if edited:
        return InstallStatus("edited", f"{where}: {_edited_message(tree, journal, edited)}")
    if len(done) == total:
        note = {
            "applied": "",
            "applying": " The command was interrupted at its very end; 'patch apply' finishes.",
            "reverting": " 'patch revert' was interrupted before it changed anything.",
        }
        return InstallStatus(
            "applied",
            f"{where} is patched with series {journal.series} ({total} files)."
            f"{note[journal.phase]}",
        )
    if not done and journal.phase in ("applying", "reverting"):
        return InstallStatus(
            "not applied",
            f"{where} is not patched. An interrupted command left its notes; "
            "'patch revert' removes them.",
        )
    verb = {"applying": "apply", "reverting": "revert"}.get(journal.phase)
    what = (
        f"'patch {verb}' was interrupted"
        if verb
        else "some files were put back after 'patch apply' (was torch installed again?)"
    )
    return InstallStatus(
        "interrupted",
        f"{where}: {what}; {len(done)} of {total} files are patched. "
        "It imports as it is; run 'patch apply' or 'patch revert' to finish.",
    )


def apply(torch_dir: str | Path | None = None) -> str:
    """Write the patch into a torch; finish whatever an earlier command left half done.

    Returns:
        What was done, as a sentence. Applying twice does nothing and says so.

    Raises:
        PatchDoesNotApplyError: a file is not what the series was made for.
        EditedFileError: a patched file was changed since.
        WriteError: the operating system refused a change.
        BusyError, SeriesError, UnsupportedTorchError, ModuleNotFoundError
    """
    tree = find_torch(torch_dir)
    where = f"torch {tree.version} in {tree.torch_dir}"
    refusal = None
    if _current(tree) is None:
        # Refuse what can be refused by looking, with no need to write.
        if _is_native(tree):
            return f"{where} has the hooks natively; nothing to do."
        series = choose_series(tree.version)
        try:
            tree.apply(series)
        except PatchDoesNotApplyError as error:
            # Or another command began since we looked for its journal: the lock will tell.
            refusal = error
    with _locked(tree, create=True, refusal=refusal):
        journal = _current(tree)
        if journal is not None and journal.phase == "reverting":
            _switch(tree, journal, "before")
            journal = None
        if journal is not None and journal.phase != "staging":
            edited, done = _survey(tree, journal)
            if edited:
                raise EditedFileError(_edited_message(tree, journal, edited))
            if journal.phase == "applied" and len(done) == len(journal.files):
                newest = choose_series(tree.version)
                if newest.digest != journal.digest:
                    raise HooksError(
                        f"{where} is patched with another edition of series {journal.series}; "
                        "run 'patch revert', then 'patch apply'."
                    )
                return f"{where} is patched already; nothing to do."
            _switch(tree, journal, "after")
            return f"{where}: finished an interrupted patch ({len(journal.files)} files)."
        _discard_state(tree, journal)
        # Again, and under the lock this time.
        if has_hook_entries(tree.read(CONFIG_PATH) or b""):
            return f"{where} has the hooks natively; nothing to do."
        series = choose_series(tree.version)
        changes = tree.apply(series)
        for change in changes.values():
            if change.path.endswith(".py") and change.after is not None:
                _check_compiles(change)
        journal = _stage(tree, series.name, series.digest, changes)
        _switch(tree, journal, "after")
        return f"{where}: patched {len(journal.files)} files with series {series.name}."


def revert(torch_dir: str | Path | None = None) -> str:
    """Put the original bytes, modes and modification times back.

    Returns:
        What was done, as a sentence.

    Raises:
        NotAppliedError: there is nothing to revert.
        EditedFileError: a patched file was changed since; nothing is changed.
        WriteError, BusyError, UnsupportedTorchError, ModuleNotFoundError
    """
    tree = find_torch(torch_dir)
    where = f"torch {tree.version} in {tree.torch_dir}"
    if not (tree.torch_dir / STATE_DIR).is_dir():
        raise NotAppliedError(_nothing_to_revert(tree))
    with _locked(tree, create=False):
        journal = _current(tree)
        if journal is None or journal.phase == "staging":
            _discard_state(tree, journal)
            raise NotAppliedError(_nothing_to_revert(tree))
        edited, _ = _survey(tree, journal)
        if edited:
            raise EditedFileError(_edited_message(tree, journal, edited))
        _switch(tree, journal, "before")
        return f"{where}: put the original {len(journal.files)} files back."


def _nothing_to_revert(tree: TorchTree) -> str:
    why = "has the hooks natively" if _is_native(tree) else "is not patched"
    return f"torch {tree.version} in {tree.torch_dir} {why}; nothing to revert."


# ---------------------------------------------------------------- looking


def _is_native(tree: TorchTree) -> bool:
    """Whether torch has the hooks and not from us: another command may have begun meanwhile."""
    return has_hook_entries(tree.read(CONFIG_PATH) or b"") and _current(tree) is None


def _current(tree: TorchTree) -> Journal | None:
    """The journal, unless it tells of another torch that was replaced since.

    Installing another torch over a patched one replaces its files and leaves ours.
    """
    journal = load_journal(tree.torch_dir)
    if journal is None or journal.phase == "staging" or journal.torch_version == tree.version:
        return journal
    if any(sha256(tree.read(record.path)) == record.after for record in journal.files):
        return journal
    return None


def _survey(tree: TorchTree, journal: Journal) -> tuple[list[str], list[str]]:
    """Paths that are on neither side of the patch, and paths that are patched."""
    edited, done = [], []
    for record in journal.files:
        digest = sha256(tree.read(record.path))
        if digest == record.after:
            done.append(record.path)
        elif digest != record.before:
            edited.append(record.path)
    return edited, done


def _edited_message(tree: TorchTree, journal: Journal, edited: list[str]) -> str:
    other = (
        f" It was patched as torch {journal.torch_version}."
        if journal.torch_version != tree.version
        else ""
    )
    return (
        f"changed by somebody since 'patch apply': {', '.join(edited)}. Nothing was done.{other} "
        "Undo that edit, or keep it and delete "
        f"{tree.torch_dir / STATE_DIR} to make this package forget the patch."
    )


def _check_compiles(change: FileChange) -> None:
    try:
        compile(change.after or b"", change.path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise UnsupportedTorchError(
            f"the patched {change.path} would not compile: {error}; nothing was changed"
        ) from None


# ---------------------------------------------------------------- changing


@contextlib.contextmanager
def _locked(tree: TorchTree, *, create: bool, refusal: HooksError | None = None) -> Iterator[None]:
    """Hold the state directory's lock; an empty state directory is removed at the end.

    Raises:
        BusyError: another command holds it for more than ``LOCK_TIMEOUT_S``.
        WriteError: it can't be created or locked; or ``refusal``, if there is one.
    """
    import fcntl

    state = tree.torch_dir / STATE_DIR
    lock = state / "lock"
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            if create:
                state.mkdir(exist_ok=True)
            fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        except (FileNotFoundError, FileExistsError) as error:
            if not create:  # somebody has just reverted
                raise NotAppliedError(_nothing_to_revert(tree)) from None
            if state.is_file():
                raise refusal or _refused(error) from error
            if time.monotonic() > deadline:
                raise BusyError(f"{state} keeps vanishing; try again later.") from None
            continue  # removed between the two calls, or inside mkdir
        except OSError as error:
            raise refusal or _refused(error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before us may have removed the file we have locked.
            if _same_inode(fd, lock):
                break
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(fd)
                raise BusyError(
                    f"another patch command is at work in {tree.torch_dir}; try again later."
                ) from None
            time.sleep(0.05)
        except OSError as error:
            os.close(fd)
            raise refusal or _refused(error) from error
        os.close(fd)
    try:
        yield
    finally:
        if not (state / JOURNAL).exists():
            shutil.rmtree(state, ignore_errors=True)
        os.close(fd)


def _wait_for_others(tree: TorchTree) -> None:
    """Let a command at work finish, where that can be seen; looking needs no permission."""
    import fcntl

    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with contextlib.suppress(OSError), open(tree.torch_dir / STATE_DIR / "lock", "rb") as lock:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
            else:
                return
        raise BusyError(f"another patch command is at work in {tree.torch_dir}; try again later.")


def _same_inode(fd: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _refused(error: OSError, changed: str = "nothing was changed") -> WriteError:
    what = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    return WriteError(f"torch can't be changed ({what}); {changed}.")


def _staged(tree: TorchTree, record: FileRecord) -> Path:
    """Beside its target: the rename stays in one file system, and the directory is proven
    writable. Not ``*.py``, so that nobody takes it for a module."""
    target = tree.path(record.path)
    return target.with_name(f".{target.name}{STATE_DIR}-new")


def _stage(tree: TorchTree, series: str, digest: str, changes: Mapping[str, FileChange]) -> Journal:
    """Write backups and new versions; torch is untouched.

    Raises:
        WriteError: no space or no permission; what was written is removed again.
    """
    ordered = in_import_order(changes)
    records, missing_dirs = [], []
    for change in ordered:
        target = tree.path(change.path)
        if change.before is None:
            records.append(FileRecord(change.path, None, sha256(change.after)))
            parent = target.parent
            while not parent.exists():
                missing_dirs.append(str(parent.relative_to(tree.torch_dir.parent)))
                parent = parent.parent
            continue
        info = target.stat()
        link = os.readlink(target) if target.is_symlink() else None
        records.append(
            FileRecord(
                change.path,
                sha256(change.before),
                sha256(change.after),
                stat.S_IMODE(info.st_mode),
                info.st_mtime_ns,
                link,
            )
        )
    # Deepest first, as they have to be removed.
    dirs = tuple(sorted(dict.fromkeys(missing_dirs), key=lambda path: (-len(path), path)))
    journal = Journal("staging", tree.version, series, digest, tuple(records), dirs)
    state = tree.torch_dir / STATE_DIR
    try:
        store_journal(tree.torch_dir, journal)
        for side in ("before", "after"):
            (state / side).mkdir()
            for index, change in enumerate(ordered):
                data = change.before if side == "before" else change.after
                if data is not None:
                    write_durably(state / side / f"{index:04}", data)
            sync_dir(state / side)
    except OSError as error:
        _discard_state(tree, journal)
        raise _refused(error) from error
    return journal


def _discard_state(tree: TorchTree, journal: Journal | None) -> None:
    """Remove leftovers while torch is original: the journal before what it speaks of."""
    state = tree.torch_dir / STATE_DIR
    for record in journal.files if journal else ():
        with contextlib.suppress(OSError):
            _staged(tree, record).unlink(missing_ok=True)
    for directory in journal.created_dirs if journal else ():
        with contextlib.suppress(OSError):
            (tree.torch_dir.parent / directory).rmdir()
    for name in (JOURNAL, f"{JOURNAL}.new", "before", "after"):
        path = state / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _switch(tree: TorchTree, journal: Journal, side: Side) -> None:
    """Bring every file to one side of the patch and complete the journal.

    Each file must be on one of the two sides (``_survey``). Staging comes first, for all files,
    so that a full disk or a read-only directory shows before the first one is replaced.

    Raises:
        WriteError: the operating system refused; the files replaced by this call are put back.
    """
    indices = range(len(journal.files))
    order = list(indices if side == "after" else reversed(indices))
    pending = [i for i in order if _digest(tree, journal, i) != _goal(journal, i, side)]
    began = journal.phase
    try:
        for directory in reversed(journal.created_dirs if side == "after" else ()):
            (tree.torch_dir.parent / directory).mkdir(exist_ok=True)
        for index in pending:
            _prepare(tree, journal, index, side)
        if side == "before" or began != "applied":
            # From here a kill leaves something to finish.
            store_journal(
                tree.torch_dir, journal.at("applying" if side == "after" else "reverting")
            )
    except BaseException as error:
        for index in pending:
            with contextlib.suppress(OSError):
                _staged(tree, journal.files[index]).unlink(missing_ok=True)
        if began == "staging":
            _discard_state(tree, journal)
        if isinstance(error, OSError):
            raise _refused(error, "no file of torch was changed") from error
        raise
    done: list[int] = []
    try:
        for index in pending:
            done.append(index)
            _replace(tree, journal.files[index], _goal(journal, index, side))
    except BaseException as error:
        _take_back(tree, journal, done, "before" if side == "after" else "after", began)
        if isinstance(error, OSError):
            raise _refused(error, "every file is as it was before") from error
        raise
    try:
        if side == "after":
            store_journal(tree.torch_dir, journal.at("applied"))
        else:
            _discard_state(tree, journal)
    except OSError as error:
        raise _refused(error, "the files were changed; run the command again to finish") from error


def _goal(journal: Journal, index: int, side: Side) -> str | None:
    record = journal.files[index]
    return record.after if side == "after" else record.before


def _digest(tree: TorchTree, journal: Journal, index: int) -> str | None:
    return sha256(tree.read(journal.files[index].path))


def _take_back(tree: TorchTree, journal: Journal, done: list[int], side: Side, began: str) -> None:
    """Undo part of a switch. If that fails as well, the journal says what is left to do."""
    try:
        for index in reversed(done):
            if _digest(tree, journal, index) != _goal(journal, index, side):
                _prepare(tree, journal, index, side)
                _replace(tree, journal.files[index], _goal(journal, index, side))
        for record in journal.files:
            _staged(tree, record).unlink(missing_ok=True)
        if began == "staging":
            _discard_state(tree, journal)
        else:
            store_journal(tree.torch_dir, journal.at(began))
    except OSError as error:
        raise _refused(
            error, "and neither could the first files be put back; run 'patch revert' when it can"
        ) from error


def _prepare(tree: TorchTree, journal: Journal, index: int, side: Side) -> None:
    """Put the wanted version of a file beside it, ready to be renamed."""
    record = journal.files[index]
    goal = _goal(journal, index, side)
    if goal is None:
        return
    staged = _staged(tree, record)
    if side == "before" and record.link is not None:
        staged.unlink(missing_ok=True)
        os.symlink(record.link, staged)
        return
    source = tree.torch_dir / STATE_DIR / side / f"{index:04}"
    data = source.read_bytes()
    if sha256(data) != goal:
        raise HooksError(f"{source} is damaged; install torch again. Nothing was changed.")
    write_durably(staged, data)
    if record.mode is not None:
        os.chmod(staged, record.mode)
    if record.mtime_ns is not None:
        # Python takes a .pyc for current when the source's size and its time in whole seconds
        # agree, so the two versions must differ in that.
        ours = max(time.time_ns(), record.mtime_ns + 2_000_000_000)
        mtime = record.mtime_ns if side == "before" else ours
        os.utime(staged, ns=(mtime, mtime))
    fd = os.open(staged, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _replace(tree: TorchTree, record: FileRecord, goal: str | None) -> None:
    target = tree.path(record.path)
    # Before: a .pyc that does not check its source (PEP 552) must not outlive it.
    _drop_bytecode(target)
    if goal is None:
        target.unlink(missing_ok=True)
    else:
        os.replace(_staged(tree, record), target)
    sync_dir(target.parent)
    # After: somebody may have imported the old source in between.
    _drop_bytecode(target)


def _drop_bytecode(source: Path) -> None:
    """Remove every interpreter's ``.pyc`` of a source; one that can't be removed is outdated."""
    if source.suffix != ".py":
        return
    cached = list((source.parent / "__pycache__").glob(f"{source.stem}.*.pyc"))
    # Elsewhere, if PYTHONPYCACHEPREFIX is set.
    cached.append(Path(importlib.util.cache_from_source(str(source))))
    for path in cached:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
