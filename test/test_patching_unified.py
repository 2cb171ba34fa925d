"""The unified-diff reader and applier against ``git``."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ext_bucketing.hooks import PatchDoesNotApplyError, SeriesError
from torch_ext_bucketing.hooks.series import list_series
from torch_ext_bucketing.hooks.unified import apply_patches, parse_patch, split_lines

pytestmark = pytest.mark.once

GIT = shutil.which("git")
needs_git = pytest.mark.skipif(GIT is None, reason="git is not installed")

# Lines that repeat, empty ones, ones with carriage returns and form feeds, none at the end.
LINE = st.sampled_from(
    [
        b"a",
        b"b",
        b"",
        b"x\r",
        b"\x0cpage",
        b"- minus",
        b"+ plus",
        b"@@ -1 +1 @@",
        b"-- ",
        "\u2028ü".encode(),
    ]
)
TEXT = st.tuples(st.lists(LINE, max_size=30), st.booleans()).map(
    lambda t: b"\n".join(t[0]) + (b"\n" if t[0] and t[1] else b"")
)


def git(*args: str, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([GIT, *args], cwd=cwd, capture_output=True, check=False)


def numbered(count: int) -> bytes:
    return b"".join(b"line %d\n" % i for i in range(1, count + 1))


def diff_of(old: bytes | None, new: bytes, folder: Path, context: int = 3) -> bytes:
    folder.mkdir(exist_ok=True)
    for side, data in (("a", old), ("b", new)):
        (folder / side).mkdir(exist_ok=True)
        (folder / side / "f").unlink(missing_ok=True)
        if data is not None:
            (folder / side / "f").write_bytes(data)
    return git("diff", "--no-index", f"-U{context}", "--no-prefix", "a", "b", cwd=folder).stdout


def apply(diff: bytes, **files: bytes | None) -> dict[str, bytes | None]:
    changes = apply_patches([parse_patch("p", diff)], files.get)
    return {path: change.after for path, change in changes.items()}


@needs_git
@settings(max_examples=60, deadline=None)
@given(old=TEXT, new=TEXT, context=st.integers(1, 4))
def test_what_git_writes_is_applied(old: bytes, new: bytes, context: int, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("git")
    diff = diff_of(old, new, folder, context)
    if old == new:
        assert diff == b""
        return
    assert apply(diff, f=old) == {"f": new}


# On files that end in a newline: where one is missing git is not exact (see the test after this).
LINES = TEXT.map(lambda text: text + b"\n" if text and not text.endswith(b"\n") else text)


@needs_git
@settings(max_examples=60, deadline=None)
@given(old=LINES, new=LINES, other=LINES, above=LINES)
def test_on_a_changed_file_it_agrees_with_git_apply_or_refuses(
    old, new, other, above, tmp_path_factory
) -> None:
    folder = tmp_path_factory.mktemp("git")
    diff = diff_of(old, new, folder)
    if old == new:
        return
    for target in (other, above + old, old + other):
        (folder / "f").write_bytes(target)
        (folder / "d").write_bytes(diff)
        by_git = git("apply", "d", cwd=folder).returncode == 0
        try:
            ours = apply(diff, f=target)["f"]
        except PatchDoesNotApplyError as error:
            # git takes the nearest of several places, and gives up the ends of the file.
            careful = "ambiguous" in str(error) or ", but not at the " in str(error)
            assert not by_git or careful
        else:
            assert by_git
            assert ours == (folder / "f").read_bytes()


@needs_git
def test_a_missing_final_newline_is_matched_exactly(tmp_path: Path) -> None:
    """Git takes a line with a final newline for one without, and can join two lines by that."""
    more = diff_of(b"a\n" * 4 + b"a", b"a\n" * 5 + b"a", tmp_path)
    assert apply(more, f=b"a\n" * 5 + b"a") == {"f": b"a\n" * 6 + b"a"}
    with pytest.raises(PatchDoesNotApplyError, match="line 1"):
        apply(diff_of(b"a", b"a\na", tmp_path), f=b"a\n")


@needs_git
def test_new_and_deleted_files(tmp_path: Path) -> None:
    def run(*args: str) -> bytes:
        done = git("-c", "user.name=n", "-c", "user.email=e@e", *args, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("init", "-q")
    (tmp_path / "gone").write_text("a\nb")
    run("add", ".")
    run("commit", "-qm", "one")
    (tmp_path / "gone").unlink()
    (tmp_path / "empty").touch()
    (tmp_path / "fresh").write_text("x\ny\n")
    run("add", "-A")
    run("commit", "-qm", "two")
    patch = run("format-patch", "-1", "--stdout")
    assert parse_patch("p", patch).subject == "[PATCH] two"
    assert apply(patch, gone=b"a\nb") == {"gone": None, "empty": b"", "fresh": b"x\ny\n"}
    with pytest.raises(PatchDoesNotApplyError, match=r"fresh: p adds this file, but it is there"):
        apply(patch, gone=b"a\nb", fresh=b"")
    with pytest.raises(
        PatchDoesNotApplyError, match=r"gone: p changes this file, but there is none"
    ):
        apply(patch)


DIFF = b"""diff --git a/f b/f
--- a/f
+++ b/f
@@ -9,3 +9,4 @@ def heading():
 line 9
 line 10
+new
 line 11
@@ -19,3 +20,2 @@
 line 19
-line 20
 line 21
"""


def test_several_patches_on_one_file_and_offsets() -> None:
    first = parse_patch("1", DIFF)
    second = parse_patch(
        "2", b"diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -10,3 +10,2 @@\n line 10\n-new\n line 11\n"
    )
    old = b"moved\n" * 5 + numbered(30)
    change = apply_patches([first, second], {"f": old}.get)["f"]
    assert change.before == old
    assert change.after == old.replace(b"line 20\n", b"")


def test_every_hunk_that_fails_is_named() -> None:
    old = numbered(30).replace(b"line 10\n", b"line ten\n").replace(b"line 20\n", b"line twenty\n")
    with pytest.raises(PatchDoesNotApplyError) as caught:
        apply(DIFF, f=old)
    assert caught.value.failures == (
        "f: @@ -9,3 +9,4 @@: line 10: expected 'line 10', found 'line ten'",
        "f: @@ -19,3 +20,2 @@: line 20: expected 'line 20', found 'line twenty'",
    )


def test_lines_that_moved_to_two_places_are_ambiguous() -> None:
    with pytest.raises(PatchDoesNotApplyError, match=r"found at lines 10, 40: ambiguous"):
        apply(DIFF, f=b"top\n" + numbered(30) + numbered(18))


def test_hunks_never_go_backwards() -> None:
    swapped = b"".join(split_lines(numbered(30))[15:] + split_lines(numbered(30))[:15])
    with pytest.raises(PatchDoesNotApplyError, match=r"^1 hunk"):
        apply(DIFF, f=swapped)


@pytest.mark.parametrize(
    ("diff", "message"),
    [
        (DIFF[:-9], r"cut short"),
        (DIFF.replace(b"+9,4 @@", b"+9,3 @@"), r"longer than its header|outside a file"),
        (DIFF.replace(b"a/f b/f", b"a/f b/g"), r"same path twice"),
        (DIFF.replace(b"a/f b/f", b"a/../f b/../f"), r"refusing to touch"),
        (DIFF.replace(b"--- a/f", b"--- a/g"), r"unexpected path"),
        (DIFF.replace(b"--- a/f", b"rename from f"), r"not supported"),
        (b"diff --git a/f b/f\nold mode 100644\nnew mode 100755\n", r"not supported"),
        (b"diff --git a/f b/f\nindex 1..2\n", r"no change for f"),
        (DIFF.replace(b"@@ -19,3", b"@@ -x,3"), r"malformed hunk header"),
        (b"diff --git a/l b/l\nnew file mode 120000\n", r"only regular files"),
    ],
)
def test_bad_patches_are_refused(diff: bytes, message: str) -> None:
    with pytest.raises(SeriesError, match=rf"^p, line \d+: .*({message})"):
        parse_patch("p", diff)


@pytest.mark.parametrize("series", list_series(), ids=lambda series: series.name)
def test_the_series_are_read_whole(series) -> None:
    """Counts in each patch's diffstat equal what was parsed."""
    import re

    for (name, data), patch in zip(series._files, series.patches, strict=True):
        added = sum(len(h.after) - len(h.before) for d in patch.diffs for h in d.hunks)
        stat = re.search(
            rb"(\d+) files? changed(?:, (\d+) insertions?...)?(?:, (\d+) deletions?...)?", data
        )
        assert stat is not None, name
        assert int(stat[1]) == len(patch.diffs)
        assert int(stat[2] or 0) - int(stat[3] or 0) == added
