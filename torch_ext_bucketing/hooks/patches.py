"""Apply git patches in memory, where ``git`` may not be installed.

The parser reads what ``git format-patch`` writes. Applying gives the result of ``git apply`` or
refuses, in more cases than ``git``: a hunk whose lines moved must fit in exactly one place, with
*all* of its context and removed lines (``git`` takes the nearest place), and a hunk made for the
beginning or the end of a file fits only there. Everything is bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ..errors import HooksError, PatchDoesNotApplyError

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_FILE = re.compile(rb"diff --git a/([^\n]+) b/\1\n?")
_NOT_TEXT = re.compile(rb"(new|deleted) file|(old|new) mode|rename|copy|GIT binary|Binary files")


@dataclass
class Hunk:
    """One ``@@`` block; lines keep their line ends.

    ``before`` has context and removed lines, the first with number ``start``, from 1, in the old
    file; ``after`` has context and added lines, the first with number ``new_start`` in the new one.
    """

    header: str
    start: int
    new_start: int
    before: list[bytes]
    after: list[bytes]
    trailing_context: int = 0


FileDiff = tuple[str, list[Hunk]]
"""A file's path from the repository's root, and its hunks."""


def split_lines(data: bytes) -> list[bytes]:
    r"""Split at ``\n`` only (``splitlines`` also splits at ``\f``); keep line ends."""
    return re.findall(rb"[^\n]*\n|[^\n]+", data)


def parse_patch(name: str, data: bytes) -> list[FileDiff]:
    """Parse one patch, leaving out changes outside ``torch/``, which are tests.

    A malformed patch, or one that does more to torch than edit text, is a ``HooksError``.
    """
    lines = split_lines(data)
    diffs: list[FileDiff] = []
    number = 0

    def fail(reason: str) -> HooksError:
        return HooksError(f"{name}, line {number + 1}: {reason}")

    while number < len(lines):
        line = lines[number]
        if diffs and line.startswith(b"@@ "):
            head = _HUNK.match(line)
            if head is None:
                raise fail("malformed hunk header")
            old, new = (int(count or 1) for count in head.group(2, 4))
            hunk = Hunk(head[0].decode(), int(head[1]), int(head[3]), [], [])
            diffs[-1][1].append(hunk)
            number += 1
            while old > 0 or new > 0:
                # An empty context line may have lost its leading blank in the mail.
                line = lines[number] if number < len(lines) else b""
                kind, text = (b" ", line) if line == b"\n" else (line[:1], line[1:])
                if kind not in (b" ", b"-", b"+"):
                    raise fail("the hunk is cut short")
                number += 1
                if lines[number : number + 1] and lines[number].startswith(b"\\ "):
                    text = text.removesuffix(b"\n")
                    number += 1
                hunk.trailing_context = hunk.trailing_context + 1 if kind == b" " else 0
                if kind != b"+":
                    hunk.before.append(text)
                    old -= 1
                if kind != b"-":
                    hunk.after.append(text)
                    new -= 1
            follows = lines[number] if number < len(lines) else b"-- "
            if old or new or not follows.startswith((b"@@ ", b"diff --git ", b"-- ")):
                raise fail("the hunk is longer than its header")
            continue
        if line.startswith(b"diff --git "):
            match = _FILE.fullmatch(line)
            if match is None:
                raise fail("expected 'diff --git a/PATH b/PATH' with the same path twice")
            diffs.append((match[1].decode(), []))
        elif diffs and diffs[-1][0].startswith("torch/") and _NOT_TEXT.match(line):
            raise fail(f"{line.strip().decode('utf-8', 'replace')!r} is not supported")
        number += 1
    return [diff for diff in diffs if diff[0].startswith("torch/")]


def reverse(diffs: Iterable[FileDiff]) -> list[FileDiff]:
    """Return the diffs that undo these."""
    return [
        (
            path,
            [
                replace(h, start=h.new_start, new_start=h.start, before=h.after, after=h.before)
                for h in hunks
            ],
        )
        for path, hunks in reversed(list(diffs))
    ]


def apply_patches(
    diffs: Iterable[FileDiff], read: Callable[[str], bytes | None]
) -> dict[str, bytes]:
    """Apply diffs one after the other; several may change the same file.

    ``read`` returns a file's bytes by its path in the repository, ``None`` if it does not exist.
    Returns new bytes by path, in the order of the diffs that first touch them. A
    ``PatchDoesNotApplyError`` lists every hunk that failed, not just the first.
    """
    files: dict[str, bytes] = {}
    failures: list[str] = []
    for path, hunks in diffs:
        data = files.get(path, read(path))
        if data is None:
            failures.append(f"{path}: the file does not exist")
            continue
        files[path], failed = _apply(data, hunks)
        failures += [f"{path}: {line}" for line in failed]
    if failures:
        raise PatchDoesNotApplyError(failures)
    return files


def _apply(data: bytes, hunks: list[Hunk]) -> tuple[bytes, list[str]]:
    """Apply the hunks that fit; return the new bytes and a line for each hunk that does not."""
    lines = split_lines(data)
    failures = []
    earliest = drift = 0  # hunks come in file order and don't overlap
    for hunk in hunks:
        # A hunk without old lines ("-7,0") goes after the line that it names.
        expected = max(hunk.start - bool(hunk.before), 0) + drift
        places = [expected] if _fits(lines, hunk, expected, earliest) else []
        if not places:
            places = [p for p in range(len(lines) + 1) if _fits(lines, hunk, p, earliest)]
        if len(places) != 1:
            lines_text = ", ".join(str(place + 1) for place in places[:5])
            why = (
                f"its lines moved and are found at lines {lines_text}: ambiguous"
                if places
                else _first_difference(lines, hunk, expected, earliest)
            )
            failures.append(f"{hunk.header}: {why}")
            continue
        (place,) = places
        lines[place : place + len(hunk.before)] = hunk.after
        earliest = place + len(hunk.after)
        drift += place - expected + len(hunk.after) - len(hunk.before)
    return b"".join(lines), failures


def _fits(lines: list[bytes], hunk: Hunk, start: int, earliest: int) -> bool:
    end = start + len(hunk.before)
    return (
        earliest <= start
        and lines[start:end] == hunk.before
        and (hunk.start > 1 or start == 0)
        and (hunk.trailing_context > 0 or end == len(lines))
    )


def _first_difference(lines: list[bytes], hunk: Hunk, expected: int, earliest: int) -> str:
    """Name the first line that differs where the longest beginning of the hunk is found."""

    def common(place: int) -> int:
        same = 0
        for old_line, actual in zip(hunk.before, lines[place:], strict=False):
            if old_line != actual:
                break
            same += 1
        return same

    places = range(min(earliest, len(lines)), len(lines) + 1)
    best = min(places, key=lambda place: (-common(place), abs(place - expected)))
    number = best + common(best)
    if common(best) == len(hunk.before):
        return "its lines are found, but not at the beginning or the end of the file"
    old_line = hunk.before[common(best)].decode("utf-8", "replace").rstrip("\n")
    if number == len(lines):
        return f"line {number + 1}: expected {old_line!r}, found the end of the file"
    actual = lines[number].decode("utf-8", "replace").rstrip("\n")
    return f"line {number + 1}: expected {old_line!r}, found {actual!r}"
