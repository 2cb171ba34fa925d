"""A strict unified-diff reader and in-memory applier.

It takes what ``git format-patch`` writes and does what ``git apply`` does, with three
differences, all on the careful side. A hunk whose lines moved is taken only when there
is exactly one place where *all* of its context and removed lines match; ``git`` takes the
nearest of several. A hunk made for the beginning or the end of a file is taken only
there; ``git`` tries elsewhere next. And whatever ``git`` can do beyond text edits, new and
deleted files (renames, copies, binary patches, mode changes) is refused, not half done.

Everything is bytes: a source file's encoding and line endings are none of our business.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .errors import PatchDoesNotApplyError, SeriesError

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_UNSUPPORTED = (
    b"rename from",
    b"rename to",
    b"copy from",
    b"copy to",
    b"old mode",
    b"new mode",
    b"GIT binary patch",
    b"Binary files",
)


@dataclass(frozen=True)
class Hunk:
    """One ``@@`` block.

    ``before`` and ``after`` are lines with their line ends: the context and removed lines,
    and the context and added lines.
    """

    header: str
    old_start: int
    new_start: int
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]
    trailing_context: int


@dataclass(frozen=True)
class FileDiff:
    """The changes of one patch to one file, named by its path from the repository root."""

    path: str
    hunks: tuple[Hunk, ...]
    is_new: bool = False
    is_deleted: bool = False


@dataclass(frozen=True)
class Patch:
    """One ``.patch`` file: its name, its subject line and its file diffs."""

    name: str
    subject: str
    diffs: tuple[FileDiff, ...]


@dataclass(frozen=True)
class FileChange:
    """A file before and after the series; ``None`` stands for a file that does not exist."""

    path: str
    before: bytes | None
    after: bytes | None


def split_lines(data: bytes) -> list[bytes]:
    r"""Lines with their ends, cut at ``\n`` only (``splitlines`` also cuts at ``\f``)."""
    lines = data.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])


def parse_patch(name: str, data: bytes) -> Patch:
    """Read one ``git format-patch`` file (or plain ``git diff`` output).

    Args:
        name: the file's name, for error messages.
        data: its bytes.

    Raises:
        SeriesError: it is malformed, cut short, or asks for more than text edits.
    """
    return _Parser(name, data).parse()


class _Parser:
    def __init__(self, name: str, data: bytes) -> None:
        self.name = name
        self.lines = split_lines(data)
        self.at = 0

    def fail(self, what: str) -> SeriesError:
        return SeriesError(f"{self.name}, line {self.at + 1}: {what}")

    def parse(self) -> Patch:
        subject = ""
        diffs: list[FileDiff] = []
        while self.at < len(self.lines):
            line = self.lines[self.at]
            if not diffs and not subject and line.startswith(b"Subject: "):
                subject = self._subject()
                continue
            if line.startswith(b"diff --git "):
                diffs.append(self._file())
                continue
            if line.startswith((b"@@ -", b"--- a/", b"+++ b/")) and diffs:
                raise self.fail("a hunk outside a file's diff: an earlier hunk is too short")
            self.at += 1
        return Patch(self.name, subject, tuple(diffs))

    def _subject(self) -> str:
        parts = [self.lines[self.at][len(b"Subject: ") :]]
        self.at += 1
        while self.at < len(self.lines) and self.lines[self.at].startswith(b" "):
            parts.append(self.lines[self.at])
            self.at += 1
        return b" ".join(part.strip() for part in parts).decode("utf-8", "replace")

    def _file(self) -> FileDiff:
        start = self.at
        match = re.fullmatch(rb"diff --git a/(.+) b/(.+)", self.lines[start].rstrip(b"\n"))
        if match is None or match[1] != match[2]:
            raise self.fail("expected 'diff --git a/PATH b/PATH' with the same path twice")
        path = match[1].decode("utf-8", "replace")
        parts = path.split("/")
        if ".." in parts or "." in parts or "" in parts or "\\" in path or ".git" in parts:
            raise self.fail(f"refusing to touch the path {path!r}")
        is_new = is_deleted = False
        hunks: list[Hunk] = []
        self.at += 1
        while self.at < len(self.lines):
            line = self.lines[self.at]
            if line.startswith(_UNSUPPORTED):
                raise self.fail(f"{line.strip().decode('utf-8', 'replace')!r} is not supported")
            if line.startswith(b"new file mode "):
                # 120000 is a symbolic link, 160000 a submodule.
                if line.strip() not in (b"new file mode 100644", b"new file mode 100755"):
                    raise self.fail("only regular files can be added")
                is_new = True
            elif line.startswith(b"deleted file mode "):
                is_deleted = True
            elif line.startswith(b"--- "):
                self._expect_path(b"--- ", None if is_new else b"a/" + match[1])
            elif line.startswith(b"+++ "):
                self._expect_path(b"+++ ", None if is_deleted else b"b/" + match[1])
            elif line.startswith(b"@@ "):
                hunks.append(self._hunk())
                continue
            elif not line.startswith(b"index "):
                break
            self.at += 1
        if not hunks and not is_new and not is_deleted:
            self.at = start
            raise self.fail(f"no change for {path}")
        return FileDiff(path, tuple(hunks), is_new, is_deleted)

    def _expect_path(self, prefix: bytes, path: bytes | None) -> None:
        found = self.lines[self.at][len(prefix) :].rstrip(b"\n").rstrip(b"\t")
        if found != (b"/dev/null" if path is None else path):
            raise self.fail(f"unexpected path {found.decode('utf-8', 'replace')!r}")

    def _hunk(self) -> Hunk:
        header = self.lines[self.at].rstrip(b"\n")
        match = _HUNK.match(header)
        if match is None:
            raise self.fail("malformed hunk header")
        old_start, new_start = int(match[1]), int(match[3])
        old_left = 1 if match[2] is None else int(match[2])
        new_left = 1 if match[4] is None else int(match[4])
        before: list[bytes] = []
        after: list[bytes] = []
        trailing = 0
        self.at += 1
        while old_left or new_left:
            if self.at >= len(self.lines):
                raise self.fail("the hunk is cut short")
            line = self.lines[self.at]
            # A context line that is empty may have lost its leading blank in the mail.
            kind, text = (b" ", line) if line == b"\n" else (line[:1], line[1:])
            if kind not in (b" ", b"-", b"+"):
                raise self.fail("the hunk is cut short")
            self.at += 1
            if self.at < len(self.lines) and self.lines[self.at].startswith(b"\\ "):
                text = text.removesuffix(b"\n")
                self.at += 1
            trailing = trailing + 1 if kind == b" " else 0
            if kind != b"+":
                before.append(text)
                old_left -= 1
            if kind != b"-":
                after.append(text)
                new_left -= 1
            if old_left < 0 or new_left < 0:
                raise self.fail("the hunk is longer than its header says")
        return Hunk(
            _HUNK.match(header)[0].decode(),  # type: ignore[index]
            old_start,
            new_start,
            tuple(before),
            tuple(after),
            trailing,
        )


def _matches(lines: list[bytes], at: int, wanted: tuple[bytes, ...]) -> bool:
    return tuple(lines[at : at + len(wanted)]) == wanted


def _places(lines: list[bytes], hunk: Hunk, expected: int, earliest: int) -> list[int]:
    """Every place where the hunk fits; only the expected one when it fits there.

    A hunk that starts at line 1 belongs at the beginning of the file, and one that ends without
    context at its end.
    """
    last = len(lines) - len(hunk.before)
    if hunk.old_start <= 1:
        candidates: Sequence[int] = [0] if earliest == 0 else []
    else:
        candidates = range(earliest, last + 1)

    def fits(at: int) -> bool:
        at_end = at == last if hunk.trailing_context == 0 else at <= last
        return at_end and _matches(lines, at, hunk.before)

    if expected in candidates and fits(expected):  # so it is in almost every import
        return [expected]
    return [at for at in candidates if fits(at)]


def _first_difference(lines: list[bytes], hunk: Hunk, expected: int, earliest: int) -> str:
    """Say where the hunk fits best and which line spoils it there."""

    def common(at: int) -> int:
        count = 0
        for wanted, found in zip(hunk.before, lines[at:], strict=False):
            if wanted != found:
                break
            count += 1
        return count

    best = min(
        range(min(earliest, len(lines)), len(lines) + 1),
        key=lambda at: (-common(at), abs(at - expected)),
    )
    count = common(best)
    number = best + count + 1
    if count == len(hunk.before):
        edge = "beginning" if hunk.old_start <= 1 else "end"
        return f"its lines are found, but not at the {edge} of the file"
    wanted = hunk.before[count].decode("utf-8", "replace").rstrip("\n")
    if number > len(lines):
        return f"line {number}: expected {wanted!r}, found the end of the file"
    found = lines[number - 1].decode("utf-8", "replace").rstrip("\n")
    return f"line {number}: expected {wanted!r}, found {found!r}"


def apply_hunks(data: bytes, diff: FileDiff) -> tuple[bytes, list[str]]:
    """Apply the hunks of one diff to a file's bytes.

    Returns:
        The new bytes, and for each hunk that did not apply (it is then left out) one line that
        names the file, the hunk and the first line that differs.
    """
    lines = split_lines(data)
    failures: list[str] = []
    earliest = 0  # hunks come in file order and must not overlap what is patched already
    drift = 0
    for hunk in diff.hunks:
        # A hunk without old lines ("-7,0") goes after the line that it names.
        start = hunk.old_start - (1 if hunk.before else 0)
        expected = max(start, 0) + drift
        places = _places(lines, hunk, expected, earliest)
        if len(places) != 1:
            if places:
                found = ", ".join(str(at + 1) for at in places[:5])
                why = f"its lines moved and are found at lines {found}: ambiguous"
            else:
                why = _first_difference(lines, hunk, expected, earliest)
            failures.append(f"{diff.path}: {hunk.header}: {why}")
            continue
        (at,) = places
        lines[at : at + len(hunk.before)] = hunk.after
        earliest = at + len(hunk.after)
        drift += at - expected + len(hunk.after) - len(hunk.before)
    return b"".join(lines), failures


def apply_patches(
    patches: Iterable[Patch],
    read: Callable[[str], bytes | None],
    wanted: Callable[[str], bool] = lambda path: True,
) -> Mapping[str, FileChange]:
    """Apply patches one after the other, in memory.

    Args:
        patches: in order; several may change the same file.
        read: gives a file's present bytes by its path in the repository; ``None``: no such file.
        wanted: paths for which this is false are passed over.

    Returns:
        The changes by path, in the order in which the patches first touch them.

    Raises:
        PatchDoesNotApplyError: with every hunk that failed, not just the first.
    """
    before: dict[str, bytes | None] = {}
    now: dict[str, bytes | None] = {}
    failures: list[str] = []
    for patch in patches:
        for diff in patch.diffs:
            path = diff.path
            if not wanted(path):
                continue
            if path not in before:
                before[path] = now[path] = read(path)
            content = now[path]
            if diff.is_new:
                if content is not None:
                    failures.append(f"{path}: {patch.name} adds this file, but it is there already")
                    continue
                content = b""
            elif content is None:
                failures.append(f"{path}: {patch.name} changes this file, but there is none")
                continue
            result, failed = apply_hunks(content, diff)
            failures.extend(failed)
            if diff.is_deleted and not failed and result:
                failures.append(f"{path}: {patch.name} deletes this file, but it holds more lines")
            now[path] = None if diff.is_deleted else result
    if failures:
        raise PatchDoesNotApplyError(
            f"{len(failures)} hunk(s) of the torch patch do not fit this torch:", tuple(failures)
        )
    return {path: FileChange(path, before[path], now[path]) for path in before}
