"""Define options of commands, and load the functions and files that they name.

torch is imported only when a function here needs it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

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


def option(
    default: Any, text: str, metavar: str | None = "N", choices: Sequence[str] | None = None
) -> Any:
    """Define a dataclass field that is also a command's option."""
    about = {"help": text, "choices": choices, "metavar": None if choices else metavar}
    return field(default=default, metadata=about)


def add_options(parser: argparse.ArgumentParser, kind: Any) -> None:
    """Add a dataclass's options, and ``--json`` for the result."""
    for f in fields(kind):
        if f.metadata:
            default = "the parameters'" if f.default is None else f.default
            about = {**f.metadata, "help": f"{f.metadata['help']} (default: {default})"}
            about["type"] = str if f.default is None else type(f.default)
            name = f.name.removesuffix("_s").replace("_", "-")
            parser.add_argument(f"--{name}", dest=f.name, default=f.default, **about)
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the result to FILE"
    )


def check_options(options: Any) -> None:
    """Check that numbers are positive (0 if that is the default), and that choices are known.

    Raises:
        ValueError: a value is out of range. The message begins with the field's name.
    """
    for f in fields(options):
        value, choices = getattr(options, f.name), f.metadata.get("choices")
        if choices and value not in choices and (value is not None or f.default is not None):
            raise ValueError(f"{f.name} must be one of {', '.join(choices)}, got {value!r}")
        if isinstance(f.default, int | float) and f.default > 0 and value <= 0:
            raise ValueError(f"{f.name} must be positive, got {value:g}")
        if f.name in ("nodes", "replicas") and options.ranks % value:
            raise ValueError(f"{f.name} must divide ranks ({options.ranks}) evenly, got {value}")


def options_of(args: argparse.Namespace, kind: Callable[..., T]) -> T:
    """Create the dataclass of parsed arguments; its ``ValueError`` is a usage error, status 2."""
    values = {f.name: getattr(args, f.name) for f in fields(kind) if hasattr(args, f.name)}  # type: ignore[arg-type]
    try:
        return kind(**values)
    except ValueError as error:
        args.parser.error(str(error))
        raise


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
