"""Name a model's units: by globs, or one per transformer block."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch.nn as nn
from torch.nn.utils.parametrize import type_before_parametrizations

from .._torch.dynamo import names_are_relative_to
from ..errors import check_argument
from ..fqns import canonical_fqn, canonical_modules, has_parameters, nearest_names, unwrapped
from .units import Units, find_units


def manual_plan(modules: Sequence[str | Sequence[str]], model: nn.Module) -> Units:
    """Find the modules that globs name. Parameters outside all units are not bucketed.

    Grammar of an entry::

        entry := names | [names, ...]      a list is one unit with all the modules named
        names := glob ("+" glob)*          with "+", one unit with all the modules named;
                                           without, one unit per module that the glob names
        glob  := an FQN, "" for the model itself; "*" stands for any text without a dot,
                 "[a-b]" for each number from a to b, both included

    Examples::

        "layers.[0-2]"                  three units: layers.0, layers.1, layers.2
        "layers.*"                      one unit per child of layers, in registration order
        "norm+output"                   one unit, like fully_shard([norm, output])
        ["norm", "output"]              the same
        "layers.[0-1]+layers.[2-3]"     one unit of four layers
        "encoder_layer_[0-11]"          works inside a component

    A module must exist for every number of a range. A ``*`` skips modules without parameters. Inner
    modules come first, as with ``fully_shard``, and each module is in one unit. Names may contain
    wrappers' names, which are dropped (``fqns.canonical_fqn``).
    """
    if isinstance(modules, str) or not isinstance(modules, Sequence):
        raise TypeError(f"modules must be a list of names, got {modules!r}")
    check_argument("model", model, nn.Module)
    by_name = canonical_modules(model)
    units: list[tuple[str, ...]] = []
    for entry in modules:
        if isinstance(entry, str):
            globs = entry.split("+")
        elif isinstance(entry, Sequence) and all(isinstance(names, str) for names in entry):
            globs = [glob for names in entry for glob in names.split("+")]
        else:
            raise TypeError(
                f"an entry of the plan must be a string or a list of strings, got {entry!r}"
            )
        single = isinstance(entry, str) and len(globs) == 1
        if not single and not all(glob.strip() for glob in globs):
            raise ValueError(f"plan: {entry!r} joins modules, but one of their names is empty")
        names = [name for glob in globs for name in _matches(glob.strip(), by_name)]
        units += [(name,) for name in names] if single else [tuple(names)]
    return _checked(units, model)


def _checked(units: Sequence[tuple[str, ...]], model: nn.Module) -> Units:
    """Check that all units have parameters, and make parameters' names relative to ``model``."""
    for unit, modules in find_units(model, units):
        if not any(map(has_parameters, modules)):
            raise ValueError(f"units: {'+'.join(unit)!r} has no parameters: leave it out")
    names_are_relative_to(model)
    return Units.of_modules(units)


_RANGE = re.compile(r"\[(\d+)-(\d+)\]")


def _matches(glob: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """List the modules that a glob names: ranges ascending, ``*`` in registration order."""
    if glob in modules:
        return [glob]
    if "" in glob.split("."):
        raise ValueError(
            f"plan: {glob!r} has an empty component: a leading, trailing or doubled '.'"
        )
    names: list[str] = []
    # The first number without a module ends the search, however long the range is.
    for name in _numbered(canonical_fqn(glob), glob):
        pattern = re.compile(r"[^.]*".join(map(re.escape, name.split("*"))))
        matched = [name] if name in modules else []
        if "*" in name:
            matched = [n for n, m in modules.items() if pattern.fullmatch(n) and has_parameters(m)]
        if not matched:
            lacks = f"nothing, the model lacks module {name!r}"
            lacks = "no module with parameters" if "*" in name else lacks
            raise ValueError(f"plan: {glob!r} matches {lacks}" + nearest_names(name, modules))
        names += matched
    return names


def _numbered(text: str, glob: str) -> Iterator[str]:
    """Yield ``text``, a part of ``glob``, for each combination of the numbers in its ranges."""
    match = _RANGE.search(text)
    if match is None:
        if "[" in text or "]" in text:
            raise ValueError(
                f"plan: {glob!r} has a malformed range: write [a-b] with two numbers, as in "
                "layers.[0-5]"
            )
        yield text
        return
    first, last = int(match[1]), int(match[2])
    if first > last:
        raise ValueError(
            f"plan: the range {match[0]} in {glob!r} is reversed: write [{last}-{first}]"
        )
    for number in range(first, last + 1):
        for tail in _numbered(text[match.end() :], glob):
            yield f"{text[: match.start()]}{number}{tail}"


def transformer_block_plan(model: nn.Module) -> Units:
    """Find the units that eager FSDP2 trainers use: one per repeated block, and the rest.

    **Blocks** are the children of block lists. A block list is a ``ModuleList``, ``ModuleDict`` or
    ``Sequential`` of any name whose children are alike: classes that occur twice or more have more
    than half of the children and of the parameters (hybrids interleave two kinds of block). In a
    ``Sequential`` all children must have one class; otherwise it is a pipeline. Children that are
    plain ``Sequential``s must also have equal parameter names, and a child that can't be called (a
    ``ModuleList``) is not a block. Among several lists:

    * The outermost one wins, so lists of experts or heads inside blocks are not block lists.
    * The children of a list are stages, not blocks (Swin), if in each of them inner block lists
      hold more than two thirds of the parameters. Inner blocks must have children with children,
      and not be named experts.
    * Lists of leaf modules (``Linear``) only count if no list has composite ones.
    * A ``ModuleList`` or ``ModuleDict`` with one composite child counts if nothing outside it is
      repeated. Further lists of modules of a block's class count at any length (multi-token
      prediction).

    **The rest** follows torchtitan's ``apply_fsdp`` (llama3) and ``apply_fsdp_to_decoder`` (0.3):

    1. Each module registered before the first block list is a unit: ``tok_embeddings``.
    2. Each block is a unit, in order. Modules between two block lists form one unit there, but
       embeddings one each.
    3. The modules after the last block list form one unit: ``[norm, output]``. It includes a head
       and a final norm that are registered before the blocks. A ``Linear`` with the weight shape of
       an embedding is a head.
    4. Parameters that modules around the blocks own themselves (``pos_embed``, ``cls_token``) are
       in the root unit ``""``, like those of the final ``fully_shard(model)``.

    Modules of 1 to 3 that share a parameter become one unit at the place of the first, which FSDP2
    requires: ``[tok_embeddings, norm, output]``. Units are in the order of use, for prefetching.

    ``model`` may be on any device, wrapped or not. No blocks are a ``ValueError``.
    """
    check_argument("model", model, nn.Module)
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters to plan for")
    tree = _ModuleTree(model)
    lists = _block_lists(tree)
    if not lists:
        raise ValueError(
            f"no repeated blocks found in {type(model).__name__}: it needs a ModuleList, "
            "ModuleDict or Sequential with alike children that hold parameters. Name the units "
            "with manual_plan, or bucket by size, with BucketByCap"
        )
    # Modules around the blocks are merged in one pass, since any two of them may share a parameter;
    # then blocks and their sections take turns.
    front, sections, tail = _around(tree, lists)
    blocks = [[name for name, _ in tree.children(path)] for path in lists]
    side = [*([name] for name in front), *itertools.chain(*sections), tail]
    merged = iter(_merge_shared(side, tree))
    units: list[tuple[str, ...]] = [tuple(next(merged)) for _ in front]
    for index, names in enumerate(blocks):
        units += [(name,) for name in names]
        for _ in sections[index] if index < len(sections) else []:
            units.append(tuple(next(merged)))
    units.append(tuple(next(merged)))
    units = [unit for unit in units if unit]
    if Units(tuple(units)).uncovered(model):
        units.append(("",))
    return _checked(units, model)


class _ModuleTree:
    """The module tree by canonical FQN, without wrappers and modules without parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {name: unwrapped(m) for name, m in canonical_modules(model).items()}
        self.children = functools.cache(self._children)
        self.depth = functools.cache(self._depth)

    def _children(self, path: str) -> list[tuple[str, nn.Module]]:
        """List FQN and module of the children with parameters, each module once."""
        return [
            (f"{path}.{key}" if path else key, unwrapped(child))
            for key, child in self.modules[path].named_children()
            # ``torch.nn.utils.parametrize`` moves a module's own parameters into that child.
            if key != "parametrizations" and has_parameters(child)
        ]

    def below(self, path: str) -> Iterator[str]:
        """Yield the FQNs of all modules with parameters below ``path``, parents first."""
        for name, _ in self.children(path):
            yield name
            yield from self.below(name)

    def _depth(self, path: str) -> int:
        """Count the levels of modules with parameters below a module: 0 for a leaf."""
        return max((1 + self.depth(name) for name, _ in self.children(path)), default=0)

    def size(self, *paths: str) -> int:
        """Count the parameter elements in modules, shared parameters once."""
        params = (parameter for path in paths for parameter in self.modules[path].parameters())
        return sum(parameter.numel() for parameter in dict.fromkeys(params))


def _is_plain_container(module: nn.Module) -> bool:
    """Return whether a module can't be called; ``fully_shard`` refuses such containers, too."""
    return (
        isinstance(module, nn.ModuleList | nn.ModuleDict)
        and type(module).forward is nn.Module.forward
    )


def _class_of(module: nn.Module) -> object:
    """Return a key of alike modules: the class, and parameter names for a plain ``Sequential``."""
    # parametrize() gives each module a class of its own; fully_shard and SimpleFSDP one per class.
    kind = type_before_parametrizations(module)
    if kind is nn.Sequential:
        return kind, tuple(canonical_fqn(name) for name, _ in module.named_parameters())
    return kind


def _is_block_list(tree: _ModuleTree, path: str, least: int) -> bool:
    module = tree.modules[path]
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return False
    children = tree.children(path)
    if not children or any(_is_plain_container(child) for _, child in children):
        return False
    counts = Counter(_class_of(child) for _, child in children)
    repeated = [name for name, child in children if counts[_class_of(child)] >= 2]
    if isinstance(module, nn.Sequential):
        # A member without parameters (an activation) makes it a pipeline, too.
        alike = len(counts) == 1 and all(has_parameters(m) for m in module.children())
        return alike and len(repeated) >= 2
    if len(children) == 1:
        return least == 1 and tree.depth(path) >= 2
    # Hybrids interleave two kinds of block, and a list may end with another module.
    return 2 * len(repeated) > len(children) and 2 * tree.size(*repeated) > tree.size(path)


def _block_lists(tree: _ModuleTree) -> list[str]:
    """Find the block lists in registration order; see :func:`transformer_block_plan`."""
    lists = _outermost_lists(tree, "", least=2)
    single = [p for p in _outermost_lists(tree, "", least=1) if len(tree.children(p)) == 1]
    # Experts or heads of the only block are repeated, but they are not blocks.
    lists = [p for p in lists if not any(_inside(p, s) for s in single)] or single or lists
    # Lists of leaf modules only count if no list has composite ones.
    lists = [p for p in lists if tree.depth(p) >= 2] or lists
    # Further lists of the blocks' classes, at any length: multi-token prediction.
    classes = {_class_of(child) for path in lists for _, child in tree.children(path)}
    further = [
        path
        for path in tree.below("")
        if _is_plain_container(tree.modules[path])
        and not any(path == p or _inside(path, p) for p in lists)
        and all(_class_of(child) in classes for _, child in tree.children(path))
    ]
    position = {path: index for index, path in enumerate(["", *tree.below("")])}
    return sorted([*lists, *further], key=position.__getitem__)


def _outermost_lists(tree: _ModuleTree, path: str, least: int) -> list[str]:
    if not _is_block_list(tree, path, least):
        return [p for child, _ in tree.children(path) for p in _outermost_lists(tree, child, least)]
    inner = {name: _inner_lists(tree, name) for name, _ in tree.children(path)}
    # In Swin the blocks of a stage have three quarters of its parameters: 24 C^2, and 8 C^2 reduce.
    stages = all(
        lists and 3 * tree.size(*lists) > 2 * tree.size(name) for name, lists in inner.items()
    )
    return [p for lists in inner.values() for p in lists] if stages else [path]


def _inner_lists(tree: _ModuleTree, path: str) -> list[str]:
    """Find the block lists of a stage, without experts and lists of shallow modules."""
    return [
        inner
        for inner in _outermost_lists(tree, path, least=2)
        if "expert" not in inner[len(path) :].lower() and tree.depth(inner) >= 3
    ]


def _inside(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))


def _around(
    tree: _ModuleTree, lists: list[str]
) -> tuple[list[str], list[list[list[str]]], list[str]]:
    """Find the modules before the first list, the units between lists, and the modules after."""
    slots: list[list[str]] = [[]]
    visited: set[nn.Module] = set()  # a module with two names (a shared embedding) counts once

    def visit(path: str) -> None:
        for name, module in tree.children(path):
            if module in visited:
                continue
            visited.add(module)
            if name in lists:
                slots.append([])
            elif any(_inside(block, name) for block in lists) or _is_plain_container(module):
                visit(name)
            else:
                slots[-1].append(name)

    if lists == [""]:
        return [], [], []
    visit("")
    front, *between, tail = slots
    # A head may be registered before the blocks: a Linear with the shape of an embedding's weight.
    shape = {name: next(tree.modules[name].parameters()).shape for name in front}
    shapes = {shape[name] for name in front if _is_embedding(tree.modules[name])}
    linear = [name for name in front if isinstance(tree.modules[name], nn.Linear)]
    heads = [name for name in linear if shape[name] in shapes]
    # A norm in front is the final one only if the head is in front, too, and no norm comes after.
    moved = heads
    if heads and not any(_is_norm(tree.modules[name]) for name in tail):
        moved = [name for name in front if name in heads or _is_norm(tree.modules[name])]
        moved.sort(key=lambda name: name in heads)
    front = [name for name in front if name not in moved]
    sections = []
    for names in between:
        embeddings = [[name] for name in names if _is_embedding(tree.modules[name])]
        section = [name for name in names if not _is_embedding(tree.modules[name])]
        sections.append([*([section] if section else []), *embeddings])
    return front, sections, [*tail, *moved]


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _merge_shared(units: list[list[str]], tree: _ModuleTree) -> list[list[str]]:
    """Join units that share a parameter at the place of the first; the others become empty."""
    result = [list(unit) for unit in units]
    owner: dict[nn.Parameter, int] = {}
    for index, unit in enumerate(result):
        params = [p for name in unit for p in tree.modules[name].parameters()]
        firsts = sorted({owner[p] for p in params if p in owner})
        target = firsts[0] if firsts else index
        for source in [*firsts[1:], index] if firsts else []:
            result[target].extend(result[source])
            result[source] = []
        for name in result[target]:
            owner.update(dict.fromkeys(tree.modules[name].parameters(), target))
    return result
