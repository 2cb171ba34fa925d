"""The command line: ``python -m torch_ext_bucketing``, also installed as ``torch-ext-bucketing``.

A subcommand is a module with ``add_parser(subparsers)``, which sets ``run`` (takes the parsed
arguments, returns the exit status) as a default of its parser. ``add_parser`` must import
nothing heavy: every command line pays for it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__, explain, measure
from .patching import HooksError, command, ensure_hooks
from .testing.demo import cli as demo


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    Args:
        argv: the arguments without the program's name; ``sys.argv[1:]`` by default.
    """
    parser = argparse.ArgumentParser(
        prog="torch-ext-bucketing",
        description="Collective bucketing policies for compiled PyTorch training.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for subcommand in (command, demo, explain, measure):
        subcommand.add_parser(subparsers)
    args = parser.parse_args(argv)
    if getattr(args, "needs_hooks", True):
        # Importing the package left that to us, see torch_ext_bucketing/__init__.py.
        try:
            ensure_hooks()
        except (HooksError, ModuleNotFoundError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
