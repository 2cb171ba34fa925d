"""What the commands of this folder share: options, progress, headings, files. No torch in here."""

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
    """A parser whose help is the module's docstring as it is written."""
    return argparse.ArgumentParser(
        prog=name, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_number(parser: argparse.ArgumentParser, name: str, value: int, text: str) -> None:
    """An option for a whole number."""
    parser.add_argument(
        f"--{name}", type=int, default=value, metavar="N", help=f"{text} (default: {value})"
    )


def add_json(parser: argparse.ArgumentParser, text: str = "also write the figures to FILE") -> None:
    """The option for the file of the results."""
    parser.add_argument("--json", type=Path, metavar="FILE", help=text)


def add_names(
    parser: argparse.ArgumentParser,
    name: str,
    values: Sequence[str],
    text: str,
    default: Sequence[str] | None = None,
) -> None:
    """An option for names out of ``values``, separated by commas (all, or ``default``)."""
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
    """The names that one of the patterns matches; a usage error where there is none."""
    found = [name for name in names if any(fnmatchcase(name, p) for p in patterns)]
    if not found:
        parser.error(f"nothing matches {' '.join(patterns)}; there are {', '.join(names)}")
    return found


# --- results -----------------------------------------------------------------------------


def now() -> str:
    """The date, for results."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def document_of(name: str, argv: Sequence[str] | None) -> dict[str, Any]:
    """What belongs to any result: the command, the date, and what it ran on."""
    return {
        "command": " ".join([name, *(sys.argv[1:] if argv is None else argv)]),
        "date": now(),
        "torch": version("torch"),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }


def title(document: dict[str, Any]) -> str:
    """Two lines above a table."""
    on = f"torch {document['torch']}, Python {document['python']}, {document['cpus']} CPUs"
    return f"{document['date']}, {on}\ncommand: {document['command']}"


def sayer(start: float) -> Callable[[str], None]:
    """Prints a line of progress, with the seconds since ``start`` of ``time.monotonic()``."""

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:5.0f} s] {text}", file=sys.stderr, flush=True)

    return say


def write_json(path: Path | None, document: Any) -> None:
    """Write ``document`` where there is a path; whoever reads it meanwhile sees the last one."""
    if path is not None:
        partial = path.with_name(path.name + ".part")
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)


def write_results(path: Path | None, document: Any, text: str) -> None:
    """Print ``text``, and write both where there is a path, the text beside the JSON."""
    print(text)
    write_json(path, document)
    if path is not None:
        path.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
