"""What the arguments of a command line name: functions and files. No torch in here."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any


class TargetError(Exception):
    """The target can't be taken; the message says why and what to do."""


def load_target(target: str) -> Any:
    """The callable that ``target``, a ``"module:function"``, names.

    Raises:
        TargetError: nothing can be imported by that name, or what is there can't be called.
    """
    module_name, colon, function_name = target.partition(":")
    if not colon or not module_name or not function_name:
        raise TargetError(
            f"{target!r} is no MODULE:FUNCTION, such as my_package.my_module:make_model"
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise TargetError(
                f"no module is named {missing!r}: run this where Python can import it, or set "
                "PYTHONPATH"
            ) from error
        raise TargetError(f"importing {module_name} failed: {error}") from error
    except Exception as error:
        raise TargetError(
            f"importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    found: Any = module
    for part in function_name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        from ..fqns import nearest_names

        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        what = "has no" if found is None else "has no function"
        raise TargetError(
            f"module {module_name} {what} {function_name}" + nearest_names(function_name, known)
        )
    return found


def output_file(text: str) -> Path:
    """``type=`` of an option that names a file to write: it fails before the work, not after."""
    path, wrong = Path(text), ""
    if path.is_dir():
        wrong = f"{path} is a folder; name a file"
    elif not path.parent.is_dir():
        wrong = f"the folder {path.parent} does not exist; create it first"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        wrong = f"no permission to write {path}"
    if wrong:
        raise argparse.ArgumentTypeError(wrong)
    return path
