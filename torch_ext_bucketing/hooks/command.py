"""The ``patch`` part of the command line."""

from __future__ import annotations

import argparse
import sys

EXIT_CODES = """\
exit status:
  0  done, or nothing was left to do (status: torch has the hooks)
  1  refused; the message says why, and nothing was changed
  2  wrong arguments
  3  status: torch does not have the hooks
  4  status: a command was interrupted; run apply or revert to finish it
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``patch`` to the command line."""
    parser = subparsers.add_parser(
        "patch",
        help="write the hooks into a torch on disk, or take them out",
        description="Write the bucketing hooks into an installed torch or a source checkout, take "
        "them out again, or tell whether they are there. Programs that import "
        "torch_ext_bucketing need neither it nor the hooks for this package's own passes.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("apply", "revert", "status"))
    parser.add_argument(
        "--torch-dir",
        metavar="DIR",
        help="a torch directory, the directory that holds it, or a source checkout "
        "(default: the torch that this Python imports)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run ``patch`` with parsed arguments; returns the exit status."""
    from . import disk
    from .patches import HooksError

    try:
        if args.action == "status":
            found = disk.status(args.torch_dir)
            print(found.message)
            exits = {"applied": 0, "native": 0, "not applied": 3, "interrupted": 4, "edited": 1}
            return exits[found.state]
        act = disk.apply if args.action == "apply" else disk.revert
        print(act(args.torch_dir))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("error: torch is not installed; name one with --torch-dir.", file=sys.stderr)
        return 1
    except (HooksError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
