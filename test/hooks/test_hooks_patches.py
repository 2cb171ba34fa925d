"""Git patches applied in memory give the result of ``git apply``."""

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ext_bucketing.errors import HooksError, PatchDoesNotApplyError
from torch_ext_bucketing.hooks.patches import apply_patches, parse_patch, split_lines
from torch_ext_bucketing.hooks.series import list_series

pytestmark = pytest.mark.hooks

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


def diff_of(old: bytes, new: bytes, folder: Path, context: int = 3) -> bytes:
    """Return the output of ``git diff`` for ``torch/f``."""
    for side, data in (("a", old), ("b", new)):
        (folder / side / "torch").mkdir(parents=True, exist_ok=True)
        (folder / side / "torch" / "f").write_bytes(data)
    return git("diff", "--no-index", f"-U{context}", "--no-prefix", "a", "b", cwd=folder).stdout


def apply(diff: bytes, data: bytes | None) -> bytes:
    changes = apply_patches(parse_patch("p", diff), {"torch/f": data}.get)
    return changes["torch/f"]


@needs_git
@settings(max_examples=60)
@given(old=TEXT, new=TEXT, context=st.integers(1, 4))
def test_what_git_writes_is_applied(old: bytes, new: bytes, context: int, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("git")
    diff = diff_of(old, new, folder, context)
    if old == new:
        assert diff == b""
        return
    assert apply(diff, old) == new


# On files that end in a newline: where one is missing git is not exact (see the test after this).
LINES = TEXT.map(lambda text: text + b"\n" if text and not text.endswith(b"\n") else text)


@needs_git
@settings(max_examples=60)
@given(old=LINES, new=LINES, other=LINES, above=LINES)
def test_on_a_changed_file_it_agrees_with_git_apply_or_refuses(
    old, new, other, above, tmp_path_factory
) -> None:
    folder = tmp_path_factory.mktemp("git")
    diff = diff_of(old, new, folder)
    if old == new:
        return
    for target in (other, above + old, old + other):
        (folder / "torch").mkdir(exist_ok=True)
        (folder / "torch" / "f").write_bytes(target)
        (folder / "d").write_bytes(diff)
        by_git = git("apply", "d", cwd=folder).returncode == 0
        try:
            ours = apply(diff, target)
        except PatchDoesNotApplyError as error:
            # git takes the nearest of several places, and gives up the ends of the file.
            careful = "ambiguous" in str(error) or ", but not at the " in str(error)
            assert not by_git or careful
        else:
            assert by_git
            assert ours == (folder / "torch" / "f").read_bytes()


@needs_git
def test_a_missing_final_newline_is_matched_exactly(tmp_path: Path) -> None:
    """Git accepts a line with a final newline for one without, and can join two lines by that."""
    more = diff_of(b"a\n" * 4 + b"a", b"a\n" * 5 + b"a", tmp_path)
    assert apply(more, b"a\n" * 5 + b"a") == b"a\n" * 6 + b"a"
    with pytest.raises(PatchDoesNotApplyError, match="line 1"):
        apply(diff_of(b"a", b"a\na", tmp_path), b"a\n")


DIFF = b"""diff --git a/torch/f b/torch/f
--- a/torch/f
+++ b/torch/f
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
    head = DIFF[: DIFF.index(b"@@")]
    second = parse_patch("2", head + b"@@ -10,3 +10,2 @@\n line 10\n-new\n line 11\n")
    old = b"moved\n" * 5 + numbered(30)
    files = apply_patches([*parse_patch("1", DIFF), *second], {"torch/f": old}.get)
    assert files == {"torch/f": old.replace(b"line 20\n", b"")}


def test_only_torch_is_changed() -> None:
    tests = b"diff --git a/test/t.py b/test/t.py\nnew file mode 100644\n--- /dev/null\n+++ b/test/t.py\n@@ -0,0 +1 @@\n+pass\n"
    assert parse_patch("p", tests + DIFF) == parse_patch("p", DIFF)
    with pytest.raises(PatchDoesNotApplyError, match="torch/f: the file does not exist"):
        apply(DIFF, None)


def test_every_hunk_that_fails_is_named() -> None:
    old = numbered(30).replace(b"line 10\n", b"line ten\n").replace(b"line 20\n", b"line twenty\n")
    with pytest.raises(PatchDoesNotApplyError) as caught:
        apply(DIFF, old)
    assert caught.value.failures == (
        "torch/f: @@ -9,3 +9,4 @@: line 10: expected 'line 10', found 'line ten'",
        "torch/f: @@ -19,3 +20,2 @@: line 20: expected 'line 20', found 'line twenty'",
    )


def test_lines_that_moved_to_two_places_are_ambiguous() -> None:
    with pytest.raises(PatchDoesNotApplyError, match=r"found at lines 10, 40: ambiguous"):
        apply(DIFF, b"top\n" + numbered(30) + numbered(18))


def test_hunks_never_go_backwards() -> None:
    swapped = b"".join(split_lines(numbered(30))[15:] + split_lines(numbered(30))[:15])
    with pytest.raises(PatchDoesNotApplyError, match=r"^1 hunk"):
        apply(DIFF, swapped)


@pytest.mark.parametrize(
    ("diff", "message"),
    [
        (DIFF[:-9], "cut short"),
        (DIFF.replace(b"+9,4 @@", b"+9,3 @@"), "longer than its header"),
        (DIFF.replace(b"+20,2 @@", b"+20,1 @@"), "longer than its header"),
        (DIFF.replace(b"a/torch/f b/torch/f", b"a/torch/f b/torch/g"), "same path twice"),
        (DIFF.replace(b"--- a/torch/f", b"rename from f"), "not supported"),
        (DIFF.replace(b"--- a/torch/f", b"new file mode 100644"), "not supported"),
        (DIFF.replace(b"--- a/torch/f", b"deleted file mode 100644"), "not supported"),
        (DIFF.replace(b"--- a/torch/f", b"new mode 100755"), "not supported"),
        (DIFF.replace(b"@@ -19,3", b"@@ -x,3"), "malformed hunk header"),
    ],
)
def test_bad_patches_are_refused(diff: bytes, message: str) -> None:
    with pytest.raises(HooksError, match=rf"^p, line \d+: .*({message})"):
        parse_patch("p", diff)


@pytest.mark.parametrize("series", list_series(), ids=lambda series: series.name)
def test_the_series_are_read_whole(series) -> None:
    """As many lines are added and removed as the files have."""
    parsed = sum(len(h.after) - len(h.before) for _, hunks in series.diffs for h in hunks)
    counted = 0
    for patch in sorted(series.folder.rglob("000[1-9]-*.patch")):
        for diff in patch.read_text().split("\ndiff --git a/torch/")[1:]:
            lines = diff.split("\ndiff --git ")[0].split("\n-- \n")[0].split("\n")
            counted += sum(
                (x[:1] == "+") - (x[:1] == "-") for x in lines if x[:3] not in ("+++", "---")
            )
    assert parsed == counted != 0
