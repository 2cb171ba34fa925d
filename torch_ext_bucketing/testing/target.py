"""Define options of commands, and load the functions and files that they name.

torch is imported only when a function here needs it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Layers, width, heads and inner width; 8 heads of keys and values, 128,256 tokens in all: table 3
# of "The Llama 3 Herd of Models".
LLAMA3 = {
    "llama3-8b": (32, 4096, 32, 14336),
    "llama3-70b": (80, 8192, 64, 28672),
    "llama3-405b": (126, 16384, 128, 53248),
}
MESH = ("replicate", "fsdp", "tp")
"""The dimensions of a mesh in words, outermost first."""


class TargetError(Exception):
    """A command's argument can't be used. The message has the reason and a remedy."""


def add_command(
    subparsers: Any, name: str, run: Callable[[argparse.Namespace], int], **texts: str
) -> argparse.ArgumentParser:
    """Add a command, with ``texts`` of ``add_parser``; arguments get ``run`` and ``parser``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, formatter_class=argparse.RawDescriptionHelpFormatter, **texts
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_numbers(parser: argparse.ArgumentParser, kind: Any, texts: Mapping[str, str]) -> None:
    """Add options for numbers that are fields of a dataclass, which has their defaults."""
    for name, text in texts.items():
        default = getattr(kind, name)
        parser.add_argument(
            f"--{name.removesuffix('_s')}",
            dest=name,
            type=type(default),
            default=default,
            metavar="S" if name.endswith("_s") else "N",
            help=f"{text} (default: {default})",
        )


def check_numbers(options: Any, *names: str, divide_ranks: Sequence[str]) -> None:
    """Raise a ValueError for a number that is not positive, or should divide ``ranks``."""
    for name in names:
        value = getattr(options, name)
        if value <= 0:
            raise ValueError(f"{name} must be positive, got {value:g}")
        if name in divide_ranks and options.ranks % value:
            raise ValueError(f"{name} must divide ranks ({options.ranks}) evenly, got {value}")


def load_target(target: str) -> Any:
    """Import the callable that ``"module:function"`` names.

    Raises:
        TargetError: it can't be imported, or is not callable.
    """
    module_name, colon, function_name = target.partition(":")
    if not colon or not module_name or not function_name:
        raise TargetError(
            f"{target!r} is not a MODULE:FUNCTION, such as my_package.my_module:make_model"
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise TargetError(
                f"no module is named {missing!r}: run this where Python can import it, or set "
                "PYTHONPATH"
            ) from error
        raise TargetError(
            f"importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    function: Any = module
    for part in function_name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        from ..fqns import nearest_names

        functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        has = "has no" if function is None else "has no function"
        raise TargetError(
            f"module {module_name} {has} {function_name}" + nearest_names(function_name, functions)
        )
    return function


def build(make: Callable[..., Any], name: str, *args: Any, loss: bool = False) -> tuple[Any, ...]:
    """Call ``make``, which must return a model and inputs, and optionally a ``loss``.

    Args:
        args: its arguments.

    Raises:
        TargetError: it raises, or returns something else. The message has its ``name``.
    """
    import torch.nn as nn

    try:
        result = make(*args)
    except TargetError:
        raise
    except Exception as error:
        raise TargetError(f"{name} raised {type(error).__name__}: {error}") from error
    sizes = (2, 3) if loss else (2,)
    if (
        not isinstance(result, tuple)
        or len(result) not in sizes
        or not isinstance(result[0], nn.Module)
    ):
        raise TargetError(
            f"{name} must return (model, inputs){' or (model, inputs, loss)' if loss else ''}, a "
            f"torch.nn.Module and what it is called with; it returned {type(result).__name__}"
        )
    return result


def call(run: Callable[..., Any], inputs: Any) -> Any:
    """Call ``run`` with a dict as keywords, a tuple or list as arguments, or one argument."""
    if isinstance(inputs, dict):
        return run(**inputs)
    return run(*inputs) if isinstance(inputs, (tuple, list)) else run(inputs)


def mesh_of(text: str) -> dict[str, int]:
    """Convert an option such as ``replicate=4,fsdp=16`` to sizes by dimension, outermost first."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = map(str.strip, part.partition("="))
        if name not in MESH or name in sizes or not size.isdecimal() or not int(size):
            raise argparse.ArgumentTypeError(
                f"{text!r}: give sizes of some of {', '.join(MESH)}, each once, as in "
                "replicate=4,fsdp=16"
            )
        sizes[name] = int(size)
    if "fsdp" not in sizes:
        raise argparse.ArgumentTypeError(f"{text!r} has no fsdp=, the ranks that share parameters")
    return {name: sizes[name] for name in MESH if name in sizes}


def output_file(text: str) -> Path:
    """Convert an option that names a file to write, and check that the file can be written."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"the folder {path.parent} does not exist; create it first"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"no permission to write {path}")
    return path
