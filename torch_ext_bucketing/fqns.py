"""Names of modules and parameters (FQNs), as everybody in the package spells them.

A wrapper puts its own attribute into every name below it: ``torch.compile(block)`` turns
``layers.0.wq.weight`` into ``layers.0._orig_mod.wq.weight``. The canonical name, on which plans,
tags and orders agree, is the one before anything was wrapped.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # names can be had without importing torch
    import torch.nn as nn

# Attribute under which each wrapper keeps the module that it wraps: ``torch.compile``
# (OptimizedModule), ``torch.distributed.algorithms._checkpoint.checkpoint_wrapper``, FSDP1.
_WRAPPER_ATTRIBUTES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def canonical_fqn(fqn: str) -> str:
    """``fqn`` of a module or parameter without the names that wrappers put into it, and without
    those by which ``torch.nn.utils.parametrize`` moves a parameter.

    A parametrization that keeps several tensors (``original0``, ``original1``: weight norm) has no
    single parameter to name: those stay. What is no string is a TypeError.

    >>> canonical_fqn("_orig_mod.layers.0._checkpoint_wrapped_module.wq.weight")
    'layers.0.wq.weight'
    >>> canonical_fqn("wq.parametrizations.weight.original")
    'wq.weight'
    """
    if not isinstance(fqn, str):
        raise TypeError(f"an FQN must be a string, got {fqn!r}")
    parts = [part for part in fqn.split(".") if part not in _WRAPPER_ATTRIBUTES]
    if len(parts) >= 3 and parts[-3] == "parametrizations" and parts[-1] == "original":
        parts[-3:] = [parts[-2]]
    return ".".join(parts)


def canonical_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module of ``model`` by canonical FQN, in registration order, the root as ``""``:
    several entries where it has several names. A wrapper and the module inside it share one name,
    which stands for the wrapper: that is what callers of ``fully_shard`` pass."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        modules.setdefault(canonical_fqn(name), module)
    return modules


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside the wrappers (checkpointing, ``torch.compile``) around it, or itself."""
    for attribute in _WRAPPER_ATTRIBUTES:
        inner = module._modules.get(attribute)
        if inner is not None:
            return unwrapped(inner)
    return module


def has_parameters(module: nn.Module) -> bool:
    """Whether a module or one below it has a parameter of its own."""
    # Asked of every module: ``module.parameters()`` would walk the whole subtree by name.
    return any(p is not None for p in module._parameters.values()) or any(
        has_parameters(child) for child in module.children()
    )


def parameter_names(model: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    """Canonical FQNs of every parameter of ``model``: several for a shared (tied) one.

    The first name is the one that ``model.named_parameters()`` gives, which is also what FSDP2
    calls the parameter (``FSDPState._init_fqns``).
    """
    names: dict[nn.Parameter, dict[str, None]] = {}
    for fqn, parameter, _ in parameters_by_name(model):
        names.setdefault(parameter, {})[fqn] = None
    return {parameter: tuple(fqns) for parameter, fqns in names.items()}


def parameters_by_name(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    """Canonical FQN, parameter and owner of every place that a parameter has in ``model``. None is
    read as an attribute, which gathers one that is parametrized by its class (SimpleFSDP's)."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield canonical_fqn(f"{path}.{name}".lstrip(".")), parameter, module


def format_names(names: Collection[str], shown: int = 4) -> str:
    """The first of some names, and how many more there are.

    >>> format_names(["a", "b", "c"], shown=2)
    'a, b and 1 more'
    """
    first = ", ".join(itertools.islice(names, shown))
    return first + (f" and {len(names) - shown} more" if len(names) > shown else "")


def nearest_names(name: str, known: Iterable[str]) -> str:
    """The end of an error message about the unknown ``name``: up to three near names among
    ``known``. Names that end alike count as near, too: ``layers.3`` where blocks are
    ``model.layers.3``."""
    candidates = [candidate for candidate in known if candidate]
    near = difflib.get_close_matches(name, candidates, n=3, cutoff=0.6)
    tails = [c for c in candidates if name and c.endswith("." + name) and c not in near]
    near = (tails[:2] + near)[:3]
    if not near:
        near = [c for c in candidates if "." not in c][:8]
        return f"; the top-level names are {', '.join(map(repr, near))}" if near else ""
    return f"; did you mean {' or '.join(map(repr, near))}?"
