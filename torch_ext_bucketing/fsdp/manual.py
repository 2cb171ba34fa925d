"""Parse units from module names with abbreviations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch.nn as nn

from ..fqns import canonical_fqn, canonical_modules, has_parameters, nearest_names
from .units import UnitSpec, spec_of_units


def manual_plan(modules: Sequence[str | Sequence[str]], model: nn.Module) -> UnitSpec:
    """Parse units from module names. Parameters outside all units are not bucketed.

    Grammar of an entry::

        entry     := names | [names, ...]      a list is one unit with all the modules named
        names     := path ("+" path)*          with "+", one unit with all the modules named;
                                               without, one unit per module that the path names
        path      := "" | component ("." component)*       "" is the model itself
        component := text; "[a-b]" stands for each number from a to b, both included,
                     and "*" for any text inside this component

    Examples::

        "layers.[0-2]"                  three units: layers.0, layers.1, layers.2
        "layers.*"                      one unit per child of layers, in registration order
        "norm+output"                   one unit, like fully_shard([norm, output])
        ["norm", "output"]              the same
        "layers.[0-1]+layers.[2-3]"     one unit of four layers
        "encoder_layer_[0-11]"          works inside a component

    Every number of a range must exist. A ``*`` skips modules without parameters. Names may contain
    wrappers' names, which are dropped (``fqns.canonical_fqn``).

    Raises:
        TypeError: ``modules`` is a string, or an entry is neither a string nor a list of strings.
        ValueError: an empty plan or unit, a name that matches nothing, a range that is reversed or
            malformed, a module in two units, a unit inside an earlier one (inner modules come
            first, as with ``fully_shard``), or one without parameters.
    """
    if isinstance(modules, str) or not isinstance(modules, Sequence):
        raise TypeError(f"modules must be a list of names, got {modules!r}")
    known = canonical_modules(model)
    units: list[tuple[str, ...]] = []
    for entry in modules:
        if isinstance(entry, str):
            paths = entry.split("+")
            if len(paths) == 1:
                units.extend((name,) for name in _expand(entry, known))
                continue
        elif isinstance(entry, Sequence) and all(isinstance(names, str) for names in entry):
            paths = [path for names in entry for path in names.split("+")]
        else:
            raise TypeError(
                f"an entry of the plan must be a string or a list of strings, got {entry!r}"
            )
        if not all(path.strip() for path in paths):
            raise ValueError(f"plan: {entry!r} joins modules, but one of their names is empty")
        units.append(tuple(name for path in paths for name in _expand(path, known)))
    return spec_of_units(units, model)


_RANGE = re.compile(r"\[(\d+)-(\d+)\]")


def _expand(path: str, known: dict[str, nn.Module]) -> list[str]:
    """List the modules that a path names: ranges ascending, ``*`` in registration order."""
    path = path.strip()
    if path in known:
        return [path]
    found = [""]
    for component in canonical_fqn(path).split("."):
        if not component:
            raise ValueError(
                f"plan: {path!r} has an empty component: a leading, trailing or doubled '.'"
            )
        found = [
            name
            for prefix in found
            for text in _expand_ranges(component, path)
            for name in _children(prefix, text, path, known)
        ]
    if not found:
        raise ValueError(
            f"plan: {path!r} matches no module with parameters" + nearest_names(path, known)
        )
    return found


def _expand_ranges(component: str, path: str) -> Iterator[str]:
    """Yield a path's component once for each combination of the numbers in its ranges."""
    # A generator, so that a range that is far too long fails at the first missing module.
    match = _RANGE.search(component)
    if match is None:
        if "[" in component or "]" in component:
            raise ValueError(
                f"plan: {path!r} has a malformed range: write [a-b] with two numbers, as in "
                "layers.[0-5]"
            )
        yield component
        return
    first, last = int(match[1]), int(match[2])
    if first > last:
        raise ValueError(
            f"plan: the range {match[0]} in {path!r} is reversed: write [{last}-{first}]"
        )
    for number in range(first, last + 1):
        for tail in _expand_ranges(component[match.end() :], path):
            yield f"{component[: match.start()]}{number}{tail}"


def _children(prefix: str, text: str, path: str, known: dict[str, nn.Module]) -> list[str]:
    """List the children of module ``prefix`` that match ``text``, where ``*`` is any text."""
    start = f"{prefix}." if prefix else ""
    if "*" not in text:
        name = start + text
        if name not in known:
            raise ValueError(
                f"plan: {path!r} matches nothing, the model lacks module {name!r}"
                + nearest_names(name, known)
            )
        return [name]
    pattern = re.compile(".*".join(map(re.escape, text.split("*"))))
    return [
        name
        for name, module in known.items()
        if name.startswith(start)
        and name != prefix
        and "." not in (key := name[len(start) :])
        and pattern.fullmatch(key)
        and has_parameters(module)
    ]
