"""Share options, progress, headings and files among the commands. Import no torch."""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

# --- options -----------------------------------------------------------------------------


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """Make a parser whose help is the module's docstring as it is written."""
    return argparse.ArgumentParser(
        prog=name, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_number(parser: argparse.ArgumentParser, name: str, value: int, text: str) -> None:
    """Add an option for a whole number."""
    parser.add_argument(
        f"--{name}", type=int, default=value, metavar="N", help=f"{text} (default: {value})"
    )


def add_json(parser: argparse.ArgumentParser, text: str = "also write the figures to FILE") -> None:
    """Add the option for the file of the results."""
    parser.add_argument("--json", type=Path, metavar="FILE", help=text)


def parser_of_graphs(
    name: str,
    description: str | None,
    only: Sequence[str] = ("*",),
    layers: int | None = None,
) -> argparse.ArgumentParser:
    """Make a parser with options for graphs by name, their number of layers, and a file."""
    parser = parser_of(name, description)
    about = "names, with * for any part"
    parser.add_argument("--only", nargs="+", default=only, metavar="NAME", help=about)
    about = "with fewer layers" if layers is None else f"of each (default: {layers})"
    parser.add_argument("--layers", type=int, default=layers, metavar="N", help=about)
    add_json(parser)
    return parser


def add_between(parser: argparse.ArgumentParser) -> None:
    """Add the option for a network between nodes, which :func:`.nodes` takes."""
    about = "of each rank between nodes of 8 H100s (default: 42)"
    parser.add_argument("--between", type=float, metavar="GB/S", help=about)


def add_names(
    parser: argparse.ArgumentParser,
    name: str,
    values: Sequence[str],
    text: str,
    default: Sequence[str] | None = None,
) -> None:
    """Add an option for names from ``values``, separated by commas (all, or ``default``)."""
    given = list(values if default is None else default)

    def parse(text: str) -> list[str]:
        names = [part.strip() for part in text.split(",")]
        for part in names:
            if part not in values:
                raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(values)}")
        return names

    shown = f"{text}, separated by commas (default: {','.join(given)})"
    parser.add_argument(f"--{name}", type=parse, default=given, metavar="LIST", help=shown)


def matching(
    parser: argparse.ArgumentParser, names: Sequence[str], patterns: Sequence[str]
) -> list[str]:
    """Return the names that a pattern matches; exit with a usage error if there is none."""
    found = [name for name in names if any(fnmatchcase(name, p) for p in patterns)]
    if not found:
        parser.error(f"nothing matches {' '.join(patterns)}; there are {', '.join(names)}")
    return found


def words(**given: object) -> list[str]:
    """Return options as a command's words; leave out what is None, 0 or False."""
    pairs = ((f"--{name}", value) for name, value in given.items() if value)
    return [word for name, value in pairs for word in (name, str(value))[: 2 - (value is True)]]


# --- results -----------------------------------------------------------------------------


def now() -> str:
    """Return the date and time in UTC, for results."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def document_of(name: str, argv: Sequence[str] | None) -> dict[str, Any]:
    """Return the command, the date and the versions, which belong to any result."""
    return {
        "command": " ".join([name, *(sys.argv[1:] if argv is None else argv)]),
        "date": now(),
        "torch": version("torch"),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }


def title(document: dict[str, Any]) -> str:
    """Format two lines to stand above a table."""
    on = f"torch {document['torch']}, Python {document['python']}, {document['cpus']} CPUs"
    return f"{document['date']}, {on}\ncommand: {document['command']}"


def sayer(start: float) -> Callable[[str], None]:
    """Return a function that prints progress and the seconds since ``start`` of ``monotonic()``."""

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:5.0f} s] {text}", file=sys.stderr, flush=True)

    return say


def write_json(path: Path | None, document: Any) -> None:
    """Write ``document`` if there is a path, atomically: a reader never gets half of it."""
    if path is not None:
        partial = path.with_name(path.name + ".part")
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)


def write_results(path: Path | None, document: dict[str, Any], text: str) -> None:
    """Print a title and ``text``; write all if there is a path, the text beside the JSON."""
    text = f"{title(document)}\n\n{text}"
    print(text)
    write_json(path, document)
    if path is not None:
        path.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
