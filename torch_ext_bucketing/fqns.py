"""Find canonical names (FQNs) of modules and parameters.

A wrapper puts its own attribute into every name below it: ``torch.compile(block)`` turns
``layers.0.wq.weight`` into ``layers.0._orig_mod.wq.weight``. Plans, tags and orders use the
canonical name, which has no wrappers.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # this module does not import torch
    import torch.nn as nn

# Attribute under which each wrapper keeps the module that it wraps: ``torch.compile``
# (OptimizedModule), ``torch.distributed.algorithms._checkpoint.checkpoint_wrapper``, FSDP1.
_WRAPPER_ATTRIBUTES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def canonical_fqn(fqn: str) -> str:
    """Remove the names of wrappers and of ``torch.nn.utils.parametrize`` from an FQN.

    A parametrization with several tensors (``original0``, ``original1``: weight norm) stays, since
    it does not have one parameter to name.

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
    """Map all canonical FQNs of modules to them, in registration order, the root as ``""``."""
    # A wrapper and the module inside share a name. The wrapper is the one that users pass to
    # ``fully_shard``.
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        modules.setdefault(canonical_fqn(name), module)
    return modules


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers (checkpointing, ``torch.compile``), or ``module``."""
    for attribute in _WRAPPER_ATTRIBUTES:
        inner = module._modules.get(attribute)
        if inner is not None:
            return unwrapped(inner)
    return module


def outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that lie inside no other one of ``modules``, each once."""
    distinct = dict.fromkeys(modules)
    inside = {child for m in distinct for child in m.modules() if child is not m}
    return [m for m in distinct if m not in inside]


def modules_of_call(
    modules: Iterable[nn.Module], wrapped: Collection[nn.Module]
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules of one ``fully_shard`` call, and all that the call manages, in its order.

    The call drops modules inside others (``_get_root_modules``), and stops at those ``wrapped`` by
    earlier calls.
    """
    visited = set(wrapped)

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        visited.add(module)
        for child in module.children():
            if child not in visited:
                yield from visit(child)
        yield module

    roots = outermost(modules)
    return roots, [module for root in roots for module in visit(root)]


def has_parameters(module: nn.Module) -> bool:
    """Return whether a module or one below it has a parameter of its own."""
    # Called for every module, and ``module.parameters()`` would walk the whole subtree by name.
    return any(p is not None for p in module._parameters.values()) or any(
        has_parameters(child) for child in module.children()
    )


def parameter_names(model: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    """Map each parameter to its canonical FQNs, first the one that FSDP2 uses, too."""
    names: dict[nn.Parameter, dict[str, None]] = {}
    for fqn, parameter, _ in parameters_by_name(model):
        names.setdefault(parameter, {})[fqn] = None
    return {parameter: tuple(fqns) for parameter, fqns in names.items()}


def parameters_by_name(
    model: nn.Module, registered: bool = False
) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    """Yield canonical FQN, parameter and owner of every place of a parameter in ``model``.

    The parameters are shards; with ``registered`` those that the modules have now, which may be
    FSDP2's full ones.
    """
    # Not read as attributes, which would gather the parameters of SimpleFSDP's classes.
    for path, module in model.named_modules(remove_duplicate=False):
        unshards = vars(module).get("_unshards", {})
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if name in unshards and not registered:
                parameter = unshards[name].shard_of(parameter)
            yield canonical_fqn(f"{path}.{name}".lstrip(".")), parameter, module


def format_names(names: Collection[str], shown: int = 4) -> str:
    """Join the first names, with the number of the others.

    >>> format_names(["a", "b", "c"], shown=2)
    'a, b and 1 more'
    """
    first = ", ".join(itertools.islice(names, shown))
    return first + (f" and {len(names) - shown} more" if len(names) > shown else "")


def nearest_names(name: str, names: Iterable[str]) -> str:
    """Format up to three names in ``names`` that are close to an unknown one, for a message."""
    candidates = [candidate for candidate in names if candidate]
    near = difflib.get_close_matches(name, candidates, n=3, cutoff=0.6)
    tails = [c for c in candidates if name and c.endswith("." + name) and c not in near]
    near = (tails[:2] + near)[:3]
    if not near:
        near = [c for c in candidates if "." not in c][:8]
        return f"; the top-level names are {', '.join(map(repr, near))}" if near else ""
    return f"; did you mean {' or '.join(map(repr, near))}?"
