"""Write ``torch_ext_bucketing/docs/api.md`` from the docstrings of the public names.

    python .ci/make_api.py            # write it
    python .ci/make_api.py --check    # exit status 1 if it is not up to date

Needs a torch, whichever version: importing the public names imports it.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "torch_ext_bucketing" / "docs" / "api.md"
MODULES = ("errors", "hooks", "fsdp", "testing")
_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")


def markdown(docstring: str) -> str:
    """Convert a docstring: roles, sections with their items, and literal blocks."""
    text = re.sub(r":\w+:`~?\.?([^`]*)`", r"`\1`", docstring).replace("``", "`")
    lines: list[str] = []
    in_items = False
    for line in text.splitlines():
        if section := _SECTION.match(line):
            in_items = True
            lines += [f"**{section[1]}**", ""]
        elif in_items and re.match(r"    \S", line):
            name, colon, rest = line.strip().partition(": ")
            lines.append(f"- `{name}`: {rest}" if colon else f"- {line.strip()}")
        elif in_items and line.strip():
            lines.append("  " + line.strip())
        else:
            in_items = in_items and not line
            # An indented block after a blank line is code in Markdown, too.
            lines.append("" if line == "::" else re.sub(r"::$", ":", line))
    return "\n".join(lines).strip()


def signature(name: str, value: Any) -> str:
    """Return a class's or function's signature, without annotations."""
    given = inspect.signature(value)
    bare = [p.replace(annotation=p.empty) for p in given.parameters.values()]
    text = str(given.replace(parameters=bare, return_annotation=given.empty))
    return re.sub(r"<(?:factory|object object) ?[^>]*>", "...", f"{name}{text}")


def entries() -> Iterator[str]:
    """Yield the page's parts."""
    teb = importlib.import_module("torch_ext_bucketing")
    yield (
        "# API\n\n`python .ci/make_api.py` makes this page from docstrings. Wrong arguments raise "
        "a `TypeError` or a `ValueError` that names the argument; other errors are listed."
    )
    for name in teb.__all__:
        value = getattr(teb, name)
        code = f"```python\nteb.{signature(name, value)}\n```"
        yield f"## {name}\n\n{code}\n\n{markdown(inspect.getdoc(value) or '')}"
    for module_name in MODULES:
        module = importlib.import_module(f"torch_ext_bucketing.{module_name}")
        names = getattr(module, "__all__", None) or list(vars(module))
        yield f"## teb.{module_name}\n\n{markdown(inspect.getdoc(module) or '')}"
        for name in names:
            value = getattr(module, name)
            if is_listed(module_name, value):
                yield f"### teb.{module_name}.{name}\n\n{markdown(inspect.getdoc(value) or '')}"


def is_listed(module_name: str, value: Any) -> bool:
    """Return whether a module's part has the value: errors and warnings are in theirs alone."""
    if module_name == "errors":
        return inspect.isclass(value) and issubclass(value, Exception)
    listed = inspect.isclass(value) or inspect.isfunction(value)
    return listed and not value.__module__.endswith(".errors")


def main() -> int:
    """Write or check the page; return the exit status."""
    sys.path.insert(0, str(ROOT))
    text = "\n\n".join(entries()) + "\n"
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
