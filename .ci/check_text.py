"""Check docstrings, comments, messages and documentation against a short list of phrases.

    python .ci/check_text.py [FILE ...]     # every tracked Python and Markdown file by default

Prints one line per finding, with what to write instead. Exit status: 0 without findings, else 1.
ruff checks the form of docstrings (D205, D400, D401); it accepts headlines that begin with a noun
phrase or a clause, and it does not read comments, messages or Markdown.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PHRASES = {
    # A negated noun makes the reader look for the noun that is meant.
    r"\b(?:is|are|was|were) no (?!longer\b|more than\b|less than\b)[a-z]": '"is not a ..."',
    # Only lawyers date things this way; elsewhere it means "see" or "like".
    r"\bas of\b": '"see", "like" or "since"',
    # The subject arrives after the clause that needs it.
    r"\b(?:of|by|for|from|to|with|in|on) (?:which|whom)\b": "two sentences, subject first",
    # "Behind" is a place, not a time.
    r"\bbehind\b": '"after"',
    # Code does not speak.
    r"\b(?:asks|says|tells)\b": '"requires", "reports", "returns", "names" or "shows"',
    # The noun is missing.
    r"\b(?:so many|which others|it is neither)\b": "the noun that is meant",
    # A pronoun for a person or a caller that nobody named.
    r"\b(?:who wants|whoever|nobody asked|who asks)\b": '"users who", "callers that"',
}
"""Regular expressions, each with what to write instead."""

_NOT_VERBS = (
    "a an the this that these those its it each every all any some one two no none both either "
    "what which who whose why how when where whether while if of by from for in on at as per to "
    "with without between among through number bytes milliseconds names units"
)
NOT_IMPERATIVE = frozenset(_NOT_VERBS.split())
"""First words of docstrings that describe a value; a function's headline describes an action."""


VAGUE = re.compile(r"\b(?:what|those)\b")
"""Words in the place of a noun, in headlines of the package."""


def vague_headlines(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and word of each headline with a vague word; code in backticks does not count."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            headline = (ast.get_docstring(node) or "").partition("\n")[0]
            match = VAGUE.search(re.sub(r"``.*?``|`[^`]*`", "", headline))
            if match:
                yield node.body[0].lineno, match[0]


def headlines(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and first word of each function's docstring, properties and tests left out."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = " ".join(map(ast.unparse, node.decorator_list))
        if "property" in decorators or "fixture" in decorators or node.name.startswith("test_"):
            continue
        text = ast.get_docstring(node)
        if text:
            yield node.body[0].lineno, text.split(maxsplit=1)[0]


def python_text(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every comment and string of a Python file."""
    # From Python 3.12 on, the text of an f-string is a token of its own.
    kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in kinds:
            yield token.start[0], token.string


def markdown_text(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of Markdown outside code blocks."""
    text = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), source, flags=re.M | re.S)
    yield 1, re.sub(r"`[^`\n]*`", "``", text)


PACKAGE = "torch_ext_bucketing"


def findings(path: Path) -> Iterator[str]:
    """Yield what to change in one file."""
    source = path.read_text(encoding="utf-8")
    is_python = path.suffix == ".py"
    for line, text in (python_text if is_python else markdown_text)(source):
        for pattern, instead in PHRASES.items():
            # A phrase may be broken over two lines.
            for match in re.finditer(pattern.replace(" ", r"\s+"), text, re.I):
                at = line + text.count("\n", 0, match.start())
                yield f"{path}:{at}: {' '.join(match[0].split())!r}: write {instead}"
    if is_python:
        for line, word in headlines(ast.parse(source)):
            if word.strip("`:;,.").lower() in NOT_IMPERATIVE or word.startswith(("``", ":")):
                yield f"{path}:{line}: {word!r}: begin with a verb that says what the function does"
        for line, word in vague_headlines(ast.parse(source)) if path.parts[0] == PACKAGE else ():
            yield f"{path}:{line}: {word!r} in a headline: write the noun that is meant"


def main(names: list[str]) -> int:
    """Print the findings in ``names``, or in all tracked files; return the exit status."""
    if not names:
        listed = subprocess.run(
            ["git", "ls-files", "--", "*.py", "*.md"], capture_output=True, text=True, check=True
        )
        names = listed.stdout.splitlines()
    own = Path(__file__).name
    paths = [Path(n) for n in names if Path(n).name != own and not n.startswith("torch_patches/")]
    found = [finding for path in paths for finding in findings(path)]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
