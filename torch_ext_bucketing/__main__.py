"""Run the command line: ``python -m torch_ext_bucketing``, installed as ``torch-ext-bucketing``.

A subcommand is a module with ``add_parser(subparsers)``, which sets ``run`` (takes the parsed
arguments, returns the exit status) as a default of its parser. ``add_parser`` must import nothing
heavy: every command line pays for it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .commands import demo, explain, measure
from .testing import compare_cli
from .testing.ranks import RankError
from .testing.target import TargetError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, ``sys.argv[1:]`` by default; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="torch-ext-bucketing",
        description="Collective bucketing policies for compiled PyTorch training.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(required=True, metavar="command", dest="command")
    for subcommand in (demo, compare_cli, explain, measure):
        subcommand.add_parser(subparsers)
    args = parser.parse_args(argv)
    command = f"{parser.prog} {args.command}"
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        return 130
    except (TargetError, RankError, OSError) as error:
        print(f"{command}: error: {error}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    raise SystemExit(main())
