"""What the commands of this folder share: options, progress, headings, files. No torch in here."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["add_number", "heading", "names_of", "now", "parser_of", "sayer", "write_json"]


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


def names_of(values: Sequence[str]) -> Callable[[str], list[str]]:
    """Parses names out of ``values``, separated by commas."""

    def parse(given: str) -> list[str]:
        names = [part.strip() for part in given.split(",")]
        for part in names:
            if part not in values:
                raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(values)}")
        return names

    return parse


def now() -> str:
    """The date, for results."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def command_line(name: str, argv: Sequence[str] | None) -> str:
    """The command that was given."""
    return " ".join([name, *(sys.argv[1:] if argv is None else argv)])


def heading(name: str, argv: Sequence[str] | None, torch: str) -> str:
    """Date, versions and command, in two lines."""
    return (
        f"{now()}, torch {torch}, Python {platform.python_version()}, {os.cpu_count()} CPUs\n"
        f"command: {command_line(name, argv)}"
    )


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
