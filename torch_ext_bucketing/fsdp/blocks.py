"""Units found in the model itself: one per transformer block."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator

import torch.nn as nn
from torch.nn.utils.parametrize import type_before_parametrizations

from ..fqns import canonical_fqn, canonical_modules, has_parameters, unwrapped
from .units import UnitSpec, spec_of_units


def transformer_block_plan(model: nn.Module, *, moe_experts: bool | str = False) -> UnitSpec:
    """The units that eager FSDP2 trainers make: one per repeated block, and the rest around them.

    **Blocks** are the children of block lists: of a ``ModuleList``, ``ModuleDict`` or
    ``Sequential``, under any name, whose children with parameters are alike: more than half of
    them, and of the parameters, are of classes that occur twice or more (hybrids interleave two
    kinds of block). In a ``Sequential`` all are of one class, or else it is a pipeline of different
    modules. Children that are plain ``Sequential``s also need the same parameter names, and a child
    that can't be called (a ``ModuleList``) is no block. Lists are looked for from the root down:

    * the outermost one wins, so lists of experts or heads inside blocks are not block lists;
    * but the children of a list are stages, not blocks (Swin), when in each of them further block
      lists hold more than two thirds of its parameters (in Swin three quarters, 24 C^2 of two
      blocks beside the 8 C^2 of a reduction), of modules as deep as blocks are (with children that
      have children) and not named experts;
    * lists of leaf modules (``Linear``) only count where no list has composite ones;
    * a ``ModuleList`` or ``ModuleDict`` with a single composite child counts where nothing outside
      it is repeated; a further list of modules of a block's class counts whatever its length
      (multi-token prediction).

    **The rest** goes where torchtitan's ``apply_fsdp`` (llama3, earlier) and
    ``apply_fsdp_to_decoder`` (0.3) put it, in this order:

    1. each module registered before the first block list is a unit: ``tok_embeddings``;
    2. each block is a unit, in order; modules between two block lists form one unit there,
       embeddings one each;
    3. the modules after the last block list form one unit together: ``[norm, output]``. So do a
       head and a final norm that are registered before the blocks: a ``Linear`` with the weight
       shape of an embedding is a head;
    4. parameters that modules around the blocks own themselves (``pos_embed``, ``cls_token``) are
       in the root unit ``""``, as by the final ``fully_shard(model)``.

    Modules of 1 to 3 that share a parameter become one unit at the place of the first, as FSDP2
    needs it and torchtitan has it for tied embeddings: ``[tok_embeddings, norm, output]``. The plan
    is in the order of use, by which prefetching goes, not of torchtitan 0.3's calls.

    Args:
        model: The model, on any device, wrapped or not.
        moe_experts: Make the routed experts of each block a unit of their own, before the block's,
            as trainers do when experts have another mesh: the outermost module inside the block
            whose name has "experts" in it but not "shared", or is the one given here; narrowed to
            the child that holds all its parameters (``moe.routed_experts.inner_experts``).

    Raises:
        ValueError: no parameters, no blocks, or ``moe_experts`` with no experts in any block.
    """
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters to plan for")
    tree = _ModuleTree(model)
    lists = _block_lists(tree)
    if not lists:
        raise ValueError(
            f"no repeated blocks found in {type(model).__name__}: there is no ModuleList, "
            "ModuleDict or Sequential with alike children that hold parameters. Name the units "
            "with manual_plan, or bucket by size, with BucketByCap"
        )
    front, sections, tail = _around(tree, lists)
    blocks = [[name for name, _ in tree.children(path)] for path in lists]
    side = [*([name] for name in front), *itertools.chain(*sections), tail]
    merged = iter(_merge_shared(side, tree))
    units: list[tuple[str, ...]] = [tuple(next(merged)) for _ in front]
    found_experts = False
    for index, names in enumerate(blocks):
        for name in names:
            experts = _experts(name, tree, moe_experts) if moe_experts else []
            found_experts = found_experts or bool(experts)
            units.extend((expert,) for expert in experts)
            units.append((name,))
        for _ in sections[index] if index < len(sections) else []:
            units.append(tuple(next(merged)))
    units.append(tuple(next(merged)))
    if moe_experts and not found_experts:
        wanted = '"experts"' if moe_experts is True else repr(moe_experts)
        raise ValueError(
            f"moe_experts: no block holds a module named {wanted}; the first block is "
            f"{blocks[0][0]!r}. Name the experts' module with moe_experts=NAME, or leave the "
            "option out"
        )
    units = [unit for unit in units if unit]
    if UnitSpec(tuple(units)).uncovered(model):
        units.append(("",))
    return spec_of_units(units, model)


class _ModuleTree:
    """The module tree without wrappers and modules that hold no parameters, by canonical FQN."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {name: unwrapped(m) for name, m in canonical_modules(model).items()}
        self.children = functools.cache(self._children)
        self.depth = functools.cache(self._depth)

    def _children(self, path: str) -> list[tuple[str, nn.Module]]:
        """(FQN, module) of the children with parameters. One that is there twice is listed once."""
        return [
            (f"{path}.{key}" if path else key, unwrapped(child))
            for key, child in self.modules[path].named_children()
            # What ``torch.nn.utils.parametrize`` moved into a child is still the module's own.
            if key != "parametrizations" and has_parameters(child)
        ]

    def below(self, path: str) -> Iterator[str]:
        """FQNs of all modules with parameters below ``path``, parents first."""
        for name, _ in self.children(path):
            yield name
            yield from self.below(name)

    def _depth(self, path: str) -> int:
        """Levels of modules with parameters below a module: 0 for a leaf."""
        return max((1 + self.depth(name) for name, _ in self.children(path)), default=0)

    def size(self, *paths: str) -> int:
        """Number of parameter elements in modules, shared ones counted once."""
        params = (parameter for path in paths for parameter in self.modules[path].parameters())
        return sum(parameter.numel() for parameter in dict.fromkeys(params))


def _is_plain_container(module: nn.Module) -> bool:
    """Whether it is a container that can't be called: ``fully_shard`` refuses those, too."""
    return (
        isinstance(module, nn.ModuleList | nn.ModuleDict)
        and type(module).forward is nn.Module.forward
    )


def _class_of(module: nn.Module) -> object:
    """A key that alike modules share: the class, and for a bare ``Sequential`` parameter names."""
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
        # Members without parameters (an activation) make it a pipeline, too.
        alike = len(counts) == 1 and all(has_parameters(m) for m in module.children())
        return alike and len(repeated) >= 2
    if len(children) == 1:
        return least == 1 and tree.depth(path) >= 2
    return 2 * len(repeated) > len(children) and 2 * tree.size(*repeated) > tree.size(path)


def _block_lists(tree: _ModuleTree) -> list[str]:
    """Paths of the block lists, in registration order, by ``transformer_block_plan``'s rule."""
    lists = _outermost_lists(tree, "", least=2)
    single = [p for p in _outermost_lists(tree, "", least=1) if len(tree.children(p)) == 1]
    # The experts or heads of the only block are repeated, but are not the blocks.
    lists = [p for p in lists if not any(_inside(p, s) for s in single)] or single or lists
    lists = [p for p in lists if tree.depth(p) >= 2] or lists
    classes = {_class_of(child) for path in lists for _, child in tree.children(path)}
    more = [
        path
        for path in tree.below("")
        if _is_plain_container(tree.modules[path])
        and not any(path == p or _inside(path, p) for p in lists)
        and all(_class_of(child) in classes for _, child in tree.children(path))
    ]
    position = {path: index for index, path in enumerate(["", *tree.below("")])}
    return sorted([*lists, *more], key=position.__getitem__)


def _outermost_lists(tree: _ModuleTree, path: str, least: int) -> list[str]:
    if not _is_block_list(tree, path, least):
        return [p for child, _ in tree.children(path) for p in _outermost_lists(tree, child, least)]
    inner = {name: _inner_lists(tree, name) for name, _ in tree.children(path)}
    stages = all(
        lists and 3 * tree.size(*lists) > 2 * tree.size(name) for name, lists in inner.items()
    )
    return [p for lists in inner.values() for p in lists] if stages else [path]


def _inner_lists(tree: _ModuleTree, path: str) -> list[str]:
    """The block lists of a stage: no experts, and no lists of mere pairs of layers."""
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
    """The modules before the first list, per gap between lists its units, those after the last."""
    slots: list[list[str]] = [[]]
    seen: set[nn.Module] = set()  # a module that is there twice (a shared embedding) counts once

    def visit(path: str) -> None:
        for name, module in tree.children(path):
            if module in seen:
                continue
            seen.add(module)
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
        rest = [name for name in names if not _is_embedding(tree.modules[name])]
        sections.append([*([rest] if rest else []), *embeddings])
    return front, sections, [*tail, *moved]


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _merge_shared(units: list[list[str]], tree: _ModuleTree) -> list[list[str]]:
    """Joins units that share a parameter, at the place of the first: the others become empty."""
    result = [list(unit) for unit in units]
    owner: dict[nn.Parameter, int] = {}
    for index, unit in enumerate(result):
        params = [p for name in unit for p in tree.modules[name].parameters()]
        firsts = sorted({owner[p] for p in params if p in owner})
        target = firsts[0] if firsts else index
        for other in [*firsts[1:], index] if firsts else []:
            result[target].extend(result[other])
            result[other] = []
        for name in result[target]:
            owner.update(dict.fromkeys(tree.modules[name].parameters(), target))
    return result


def _experts(block: str, tree: _ModuleTree, moe_experts: bool | str) -> list[str]:
    found: list[str] = []
    for name, _ in tree.children(block):
        key = name.rpartition(".")[2]
        if key == moe_experts or (moe_experts is True and "experts" in key and "shared" not in key):
            found.append(_narrowed(name, tree))
        else:
            found += _experts(name, tree, moe_experts)
    return found


def _narrowed(path: str, tree: _ModuleTree) -> str:
    """The innermost module that holds all parameters of this one."""
    children = tree.children(path)
    if len(children) == 1 and not _is_plain_container(tree.modules[path]):
        name, child = children[0]
        if set(child.parameters()) == set(tree.modules[path].parameters()):
            return _narrowed(name, tree)
    return path
