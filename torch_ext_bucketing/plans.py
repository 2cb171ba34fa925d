"""Bucket plans: which modules' parameters share a bucket, by name, checked before any tracing.

    plan = transformer_block_plan(model)  # finds the blocks itself
    plan = manual_plan(["tok_embeddings", "layers.[0-5]", "norm+output"], model)  # names them
    order = FSDPParamOrder.from_model(model, units=plan)

A plan is a list of units in the order of the `fully_shard` calls that it stands for: inner modules
before those around them, and a module's parameters belong to the innermost unit that it lies in.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch.nn as nn
from torch.nn.utils.parametrize import type_before_parametrizations

from ._source import package_digest
from .fqns import WRAPPER_ATTRIBUTES, canonical_fqn, canonical_modules, nearest_names

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
DEFAULT_KINDS = ("all_gather", "reduce_scatter")
MODES = ("none", "transformer_block", "auto", "manual")

_VERSION = 1

Units = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class BucketPlan:
    """Units of modules, in the order of `fully_shard` calls: a hashable, picklable value.

    Iterating gives the units, so a plan can be passed wherever a list of units is taken.

    Raises:
        TypeError: a name is no string.
        ValueError: an unknown mode or kind, no kind, a plan by modules without units, a plan of
            mode "none" or "auto" with units, an empty unit, or a module in two units.
    """

    mode: str
    """`"none"`: nothing is bucketed. `"auto"`: buckets by byte cap only. `"transformer_block"`,
    `"manual"`: by `units`."""
    units: Units = ()
    """Per unit its module FQNs, in the order in which `fully_shard([...])` would get them; `""` is
    the model."""
    kinds: tuple[str, ...] = DEFAULT_KINDS
    """What is bucketed, of "all_gather", "reduce_scatter" and "all_reduce" (HSDP's and DDP's: only
    when asked for)."""
    head: str | None = None
    """The module that makes the logits, where known: its unit is the one that chunked losses use as
    "loss"."""
    cover: Units = ()
    """Per unit, modules that hold its parameters and don't overlap with those of any other unit.
    Differs from `units` where units are nested: a block whose experts are a unit of their own is
    covered by its other children."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(
                f"no bucketing mode is named {self.mode!r}; the modes are "
                f"{', '.join(map(repr, MODES))}"
            )
        object.__setattr__(self, "kinds", _checked_kinds(self.kinds))
        units = tuple(
            tuple(canonical_fqn(name) for name in ((unit,) if isinstance(unit, str) else unit))
            for unit in self.units
        )
        if self.mode in ("none", "auto") and units:
            raise ValueError(
                f'a plan of mode "{self.mode}" names no modules, got {len(units)} units'
            )
        if self.mode in ("transformer_block", "manual") and not units:
            raise ValueError(
                f'a plan of mode "{self.mode}" needs at least one unit: the plan is empty'
            )
        unit_of: dict[str, int] = {}
        for index, unit in enumerate(units):
            if not unit:
                raise ValueError(f"unit {index} of the plan is empty")
            for name in unit:
                if name in unit_of:
                    raise ValueError(
                        f"module {name!r} is in two buckets, unit {unit_of[name]} "
                        f"{units[unit_of[name]]} and unit {index} {unit}"
                    )
                unit_of[name] = index
        if self.head is not None and self.head not in unit_of:
            raise ValueError(
                f"head: module {self.head!r} is in no unit" + nearest_names(self.head, unit_of)
            )
        cover = tuple(tuple(names) for names in self.cover) or units
        if len(cover) != len(units):
            raise ValueError(f"cover has {len(cover)} entries for {len(units)} units")
        object.__setattr__(self, "units", units)
        object.__setattr__(self, "cover", cover)

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter(self.units)

    def module_bucket_plans(self, chunked_loss: bool = False) -> list[list[str] | str]:
        """The plan for torch's own `manual_overlap_bucketing(module_bucket_plans=...)`.

        That pass finds a bucket's collectives by the module that they were traced in, asks for
        buckets that don't overlap (so nested units are spelled out: `cover`) and has no name for
        the parameters that a module owns beside its children: those of the root and of modules
        around another unit stay unbucketed there.

        Args:
            chunked_loss: The loss is computed in chunks, with the head's weight used under the
                module name "loss": the bucket of the head (`head`, or else the last one) names
                "loss", too.

        Returns:
            Per bucket a module FQN or a list of them, in the plan's order. `[]` for mode "none".

        Raises:
            ValueError: mode "auto", which has no modules.
        """
        if self.mode == "auto":
            raise ValueError(
                'mode "auto" buckets by size, not by module, so manual_overlap_bucketing has no '
                'use for it: take mode "transformer_block" or "manual"'
            )
        named = [
            (unit, [name for name in cover if name])
            for unit, cover in zip(self.units, self.cover, strict=True)
        ]
        named = [(unit, names) for unit, names in named if names]
        if chunked_loss and named:
            ends = [names for unit, names in named if self.head in unit]
            if not ends:
                ends = [names for unit, names in named if unit != ("",)] or [named[-1][1]]
            ends[-1].append("loss")
        return [names[0] if len(names) == 1 else names for _, names in named]

    def uncovered(self, model: nn.Module) -> tuple[str, ...]:
        """FQNs of the parameters of `model` that no unit holds, in `named_parameters()` order.

        Empty for mode "auto", which leaves none out; all of them for mode "none".

        Raises:
            ValueError: a unit of the plan is not in `model`.
        """
        if self.mode == "auto":
            return ()
        known = canonical_modules(model)
        held: set[nn.Parameter] = set()
        for unit in self.units:
            for name in unit:
                held.update(_module(name, known).parameters())
        return tuple(canonical_fqn(fqn) for fqn, p in model.named_parameters() if p not in held)

    def uuid(self) -> str:
        """A name (hex) of the plan for Inductor's caches: equal plans have it in every process."""
        contents = json.dumps([_VERSION, self.mode, self.units, self.kinds, self.head, self.cover])
        return hashlib.sha256(f"{package_digest()}\0{contents}".encode()).hexdigest()


def make_plan(
    mode: str,
    model: nn.Module | None = None,
    *,
    modules: Sequence[str | Sequence[str]] | None = None,
    kinds: Iterable[str] = DEFAULT_KINDS,
    moe_experts: bool | str = False,
) -> BucketPlan:
    """The plan of a named mode.

    Args:
        mode: "none" (nothing is bucketed), "auto" (by byte cap only, no units), "transformer_block"
            (`transformer_block_plan(model)`) or "manual" (`manual_plan(modules, model)`).
        model: For the last two.
        modules: For "manual".
        kinds: See `BucketPlan.kinds`.
        moe_experts: For "transformer_block".

    Raises:
        ValueError: an unknown mode, an argument that the mode lacks or has no use for, or what the
            mode's function raises.
    """
    if mode not in MODES:
        raise ValueError(
            f"no bucketing mode is named {mode!r}; the modes are {', '.join(map(repr, MODES))}"
        )
    if modules is not None and mode != "manual":
        raise ValueError(f'modules= names the units of mode "manual", but the mode is "{mode}"')
    if moe_experts and mode != "transformer_block":
        raise ValueError(
            f'moe_experts= belongs to mode "transformer_block", but the mode is "{mode}"'
        )
    if mode in ("none", "auto"):
        return BucketPlan(mode=mode, kinds=_checked_kinds(kinds))
    if model is None:
        raise ValueError(f'mode "{mode}" needs the model')
    if mode == "transformer_block":
        return transformer_block_plan(model, moe_experts=moe_experts, kinds=kinds)
    if modules is None:
        raise ValueError('mode "manual" needs modules=, the list of units')
    return manual_plan(modules, model, kinds=kinds)


# ------------------------------------------------------------------------------
# Manual plans


def manual_plan(
    modules: Sequence[str | Sequence[str]],
    model: nn.Module,
    *,
    kinds: Iterable[str] = DEFAULT_KINDS,
) -> BucketPlan:
    """A plan from names with abbreviations.

    Parameters outside the units are not bucketed (`BucketPlan.uncovered` lists them).
    Grammar of an entry::

        entry     := names | [names, ...]      a list is one unit with all the modules named
        names     := path ("+" path)*          with "+", one unit with all the modules named;
                                               without, one unit per module that the path names
        path      := "" | component ("." component)*       "" is the model itself
        component := text in which "[a-b]" stands for each number from a to b, both included,
                     and "*" for any text inside this one component

    Examples::

        "layers.[0-2]"                  three units: layers.0, layers.1, layers.2
        "layers.*"                      one unit per child of layers, in registration order
        "norm+output"                   one unit, like fully_shard([norm, output])
        ["norm", "output"]              the same
        "layers.[0-1]+layers.[2-3]"     one unit of four layers
        "encoder_layer_[0-11]"          works inside a component

    Every number of a range has to exist. A `*` passes over modules without parameters. Names are
    canonical ones, without wrappers' (`fqns.canonical_fqn`), and may be given with them.

    Raises:
        TypeError: `modules` is a string, or an entry is neither a string nor a list of strings.
        ValueError: an empty plan or unit, a name that matches nothing, a range that is reversed or
            malformed, a module in two units, a unit inside an earlier one (inner modules come
            first, as with `fully_shard`), or one without parameters.
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
            if not paths:
                raise ValueError(
                    "an entry of the plan is an empty list: name its modules or leave it out"
                )
        else:
            raise TypeError(
                f"an entry of the plan must be a string or a list of strings, got {entry!r}"
            )
        if not all(path.strip() for path in paths):
            raise ValueError(f"plan: {entry!r} joins modules, but one of their names is empty")
        units.append(tuple(name for path in paths for name in _expand(path, known)))
    if not units:
        raise ValueError('the plan is empty: name at least one module, or take mode "none"')
    return _plan_of("manual", units, model, kinds=kinds)


_RANGE = re.compile(r"\[(\d+)-(\d+)\]")


def _expand(path: str, known: dict[str, nn.Module]) -> list[str]:
    """The modules that a path stands for: ranges ascending, `*` in registration order."""
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
    """One by one: the first number that no module has ends a range that is too long."""
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
    """Children of module `prefix` whose name is `text`, in which `*` is any text."""
    start = f"{prefix}." if prefix else ""
    if "*" not in text:
        name = start + text
        if name not in known:
            raise ValueError(
                f"plan: {path!r} matches nothing, there is no module {name!r}"
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
        and _has_parameters(module)
    ]


# ------------------------------------------------------------------------------
# Plans by transformer block


def transformer_block_plan(
    model: nn.Module,
    *,
    moe_experts: bool | str = False,
    kinds: Iterable[str] = DEFAULT_KINDS,
) -> BucketPlan:
    """The units that eager FSDP2 trainers make: one per repeated block, and the rest around them.

    **Blocks** are the children of block lists. A block list is a `ModuleList`, `ModuleDict` or
    `Sequential`, under any name, whose children with parameters are alike: more than half of them,
    and of the parameters, are of classes that occur twice or more (hybrids interleave two kinds of
    block). In a `Sequential` all are of one class, or else it is a pipeline of different modules.
    Children that are plain `Sequential`s also need the same parameter names, and a child that can't
    be called (a `ModuleList`) is no block. Lists are looked for from the root down, and

    * the outermost one wins, so lists of experts or heads inside blocks are not block lists,
    * except that the children of a list are stages, not blocks (Swin), when in each of them further
      block lists hold more than two thirds of its parameters (in Swin three quarters, 24 C^2 of two
      blocks beside the 8 C^2 of a reduction), of modules as deep as blocks are (with children that
      have children) and not named experts,
    * lists of leaf modules (`Linear`, `Embedding`) only count where no list has composite ones, and
    * a `ModuleList` or `ModuleDict` with a single composite child counts where nothing outside it
      is repeated.

    Encoder and decoder each have their own list. A further list of modules of a block's class
    counts whatever its length (multi-token prediction).

    **The rest** goes where torchtitan's `apply_fsdp` (llama3, earlier) and
    `apply_fsdp_to_decoder` (0.3) put it, in this order:

    1. each module registered before the first block list is a unit: `tok_embeddings`;
    2. each block is a unit, in order; modules between two block lists form one unit there,
       embeddings one each;
    3. the modules after the last block list form one unit together: `[norm, output]`. So do a head
       and a final norm that are registered before the blocks: a `Linear` with the weight shape of
       an embedding is a head;
    4. parameters that modules around the blocks own themselves (`pos_embed`, `cls_token`) are in
       the root unit `""`, as by the final `fully_shard(model)`.

    Modules of 1 to 3 that share a parameter become one unit at the place of the first, as FSDP2
    needs it and torchtitan has it for tied embeddings: `[tok_embeddings, norm, output]`.
    (torchtitan 0.3 calls `fully_shard([norm, lm_head])` before the blocks. The payloads are the
    same; here the plan keeps the order of use, by which prefetching goes.)

    Args:
        model: The model, on any device, wrapped or not.
        moe_experts: Make the routed experts of each block a unit of their own, before the block's,
            as trainers do when experts have another mesh. They are the outermost module inside the
            block whose name has "experts" in it but not "shared", or that is called by the name
            given here; narrowed to the one child that holds all its parameters (torchtitan 0.3:
            `moe.routed_experts.inner_experts`).
        kinds: See `BucketPlan.kinds`.

    Raises:
        ValueError: no parameters, no blocks, or `moe_experts` with no experts in any block.
    """
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters to plan for")
    tree = _Tree(model)
    lists = _block_lists(tree)
    if not lists:
        raise ValueError(
            f"no repeated blocks found in {type(model).__name__}: there is no ModuleList, "
            "ModuleDict or Sequential with alike children that hold parameters. Name the units "
            'with manual_plan, or take mode "auto"'
        )
    front, sections, tail = _around(tree, lists)
    blocks = [[name for name, _ in tree.children(path)] for path in lists]
    side = [[name] for name in front]
    for between in sections:
        side.extend(between)
    side.append(tail)
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
    plan = BucketPlan(mode="manual", units=tuple(units))
    if plan.uncovered(model):
        units.append(("",))
    return _plan_of("transformer_block", units, model, kinds=kinds, head=_head(tree, front, tail))


class _Tree:
    """The module tree without wrappers and modules that hold no parameters, by canonical FQN."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = canonical_modules(model)
        self._children: dict[str, list[tuple[str, nn.Module]]] = {}
        self._depth: dict[str, int] = {}

    def children(self, path: str) -> list[tuple[str, nn.Module]]:
        """(FQN, module) of the children with parameters. One that is there twice is listed once."""
        if path in self._children:
            return self._children[path]
        seen: set[nn.Module] = set()
        result = []
        for key, child in unwrapped(self.modules[path]).named_children():
            # What `torch.nn.utils.parametrize` moved into a child is still the module's own.
            if key != "parametrizations" and child not in seen and _has_parameters(child):
                seen.add(child)
                result.append((f"{path}.{key}" if path else key, child))
        self._children[path] = result
        return result

    def below(self, path: str) -> Iterator[str]:
        """FQNs of all modules with parameters below `path`, parents first."""
        for name, _ in self.children(path):
            yield name
            yield from self.below(name)

    def depth(self, path: str) -> int:
        """Levels of modules with parameters below a module: 0 for a leaf."""
        if path not in self._depth:
            below = (1 + self.depth(name) for name, _ in self.children(path))
            self._depth[path] = max(below, default=0)
        return self._depth[path]

    def size(self, *paths: str) -> int:
        """Number of parameter elements in modules, shared ones counted once."""
        params = (parameter for path in paths for parameter in self.modules[path].parameters())
        return sum(parameter.numel() for parameter in dict.fromkeys(params))


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside the wrappers (checkpointing, `torch.compile`) around it, or itself."""
    for attribute in WRAPPER_ATTRIBUTES:
        inner = module._modules.get(attribute)
        if inner is not None:
            return unwrapped(inner)
    return module


def _plain_container(module: nn.Module) -> bool:
    """A `ModuleList` or `ModuleDict` that can't be called: `fully_shard` refuses those, too."""
    return (
        isinstance(module, nn.ModuleList | nn.ModuleDict)
        and type(module).forward is nn.Module.forward
    )


def _has_parameters(module: nn.Module) -> bool:
    # Asked of every module: `module.parameters()` would walk the whole subtree by name.
    return any(p is not None for p in module._parameters.values()) or any(
        _has_parameters(child) for child in module.children()
    )


def _class_of(module: nn.Module) -> object:
    """What alike modules have in common: the class, and for a bare `Sequential` parameter names."""
    inner = unwrapped(module)
    # parametrize() gives each module a class of its own; fully_shard and SimpleFSDP one per class.
    kind = type_before_parametrizations(inner)
    if kind is nn.Sequential:
        return kind, tuple(canonical_fqn(name) for name, _ in inner.named_parameters())
    return kind


def _is_block_list(tree: _Tree, path: str, least: int) -> bool:
    module = unwrapped(tree.modules[path])
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return False
    children = tree.children(path)
    if not children or any(_plain_container(unwrapped(child)) for _, child in children):
        return False
    counts = Counter(_class_of(child) for _, child in children)
    repeated = [name for name, child in children if counts[_class_of(child)] >= 2]
    if isinstance(module, nn.Sequential):
        # Members without parameters (an activation) make it a pipeline, too.
        alike = len(counts) == 1 and all(_has_parameters(m) for m in module.children())
        return alike and len(repeated) >= 2
    if len(children) == 1:
        return least == 1 and tree.depth(path) >= 2
    return 2 * len(repeated) > len(children) and 2 * tree.size(*repeated) > tree.size(path)


def _block_lists(tree: _Tree) -> list[str]:
    """Paths of the block lists, in registration order, by `transformer_block_plan`'s rule."""
    lists = _outermost_lists(tree, "", least=2)
    single = [p for p in _outermost_lists(tree, "", least=1) if len(tree.children(p)) == 1]
    # The experts or heads of the only block are repeated, but are not the blocks.
    lists = [p for p in lists if not any(_inside(p, s) for s in single)] or single or lists
    lists = [p for p in lists if tree.depth(p) >= 2] or lists
    classes = {_class_of(child) for path in lists for _, child in tree.children(path)}
    more = [
        path
        for path in tree.below("")
        if _plain_container(unwrapped(tree.modules[path]))
        and not any(path == p or _inside(path, p) for p in lists)
        and all(_class_of(child) in classes for _, child in tree.children(path))
    ]
    position = {path: index for index, path in enumerate(["", *tree.below("")])}
    return sorted([*lists, *more], key=position.__getitem__)


def _outermost_lists(tree: _Tree, path: str, least: int) -> list[str]:
    if not _is_block_list(tree, path, least):
        return [p for child, _ in tree.children(path) for p in _outermost_lists(tree, child, least)]
    inner = {name: _inner_lists(tree, name) for name, _ in tree.children(path)}
    stages = all(
        lists and 3 * tree.size(*lists) > 2 * tree.size(name) for name, lists in inner.items()
    )
    return [p for lists in inner.values() for p in lists] if stages else [path]


def _inner_lists(tree: _Tree, path: str) -> list[str]:
    """What may be the block lists of a stage: no experts, and no lists of mere pairs of layers."""
    return [
        inner
        for inner in _outermost_lists(tree, path, least=2)
        if "expert" not in inner[len(path) :].lower() and tree.depth(inner) >= 3
    ]


def _inside(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))


def _around(tree: _Tree, lists: list[str]) -> tuple[list[str], list[list[list[str]]], list[str]]:
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
            elif any(_inside(block, name) for block in lists) or _plain_container(
                unwrapped(module)
            ):
                visit(name)
            else:
                slots[-1].append(name)

    if lists == [""]:
        return [], [], []
    visit("")
    front, *between, tail = slots
    shapes = {
        tuple(_weight(tree.modules[n]).shape) for n in front if _is_embedding(tree.modules[n])
    }
    heads = [
        name
        for name in front
        if isinstance(unwrapped(tree.modules[name]), nn.Linear)
        and tuple(_weight(tree.modules[name]).shape) in shapes
    ]
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


def _weight(module: nn.Module) -> nn.Parameter:
    return next(iter(unwrapped(module).parameters()))


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(unwrapped(module), nn.Embedding | nn.EmbeddingBag)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(unwrapped(module)).__name__.lower()


def _merge_shared(units: list[list[str]], tree: _Tree) -> list[list[str]]:
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


def _head(tree: _Tree, front: list[str], tail: list[str]) -> str | None:
    """The last module after the blocks, unless that is a norm."""
    names = [name for name in tail if not _is_norm(tree.modules[name])]
    return names[-1] if names else None


def _experts(block: str, tree: _Tree, moe_experts: bool | str) -> list[str]:
    found: list[str] = []

    def visit(path: str) -> None:
        for name, _ in tree.children(path):
            key = name.rpartition(".")[2]
            if key == moe_experts or (
                moe_experts is True and "experts" in key and "shared" not in key
            ):
                found.append(_narrowed(name))
            else:
                visit(name)

    def _narrowed(path: str) -> str:
        children = tree.children(path)
        if len(children) == 1 and not _plain_container(unwrapped(tree.modules[path])):
            name, child = children[0]
            if set(child.parameters()) == set(tree.modules[path].parameters()):
                return _narrowed(name)
        return path

    visit(block)
    return found


# ------------------------------------------------------------------------------
# Shared


def _plan_of(
    mode: str,
    units: list[tuple[str, ...]],
    model: nn.Module,
    *,
    kinds: Iterable[str],
    head: str | None = None,
) -> BucketPlan:
    """Checks the units against the model and makes the plan."""
    known = canonical_modules(model)
    unit_of: dict[nn.Module, str] = {}
    inside: dict[nn.Module, str] = {}  # modules that an earlier unit holds
    for unit in units:
        label = "+".join(unit)
        for name in unit:
            module = _module(name, known)
            if module in unit_of:
                raise ValueError(
                    f"plan: module {name!r} is in two buckets, {unit_of[module]!r} and {label!r}"
                )
            if module in inside:
                raise ValueError(
                    f"plan: {label!r} lies inside the earlier {inside[module]!r}: list inner "
                    "modules before those around them, as with fully_shard"
                )
            unit_of[module] = label
        for name in unit:
            for module in known[name].modules():
                inside.setdefault(module, label)
        if not any(_has_parameters(known[name]) for name in unit):
            raise ValueError(f"plan: unit {label!r} has no parameters: leave it out")
    return BucketPlan(
        mode=mode,
        units=tuple(units),
        kinds=_checked_kinds(kinds),
        head=head,
        cover=_cover(units, model),
    )


def _cover(units: list[tuple[str, ...]], model: nn.Module) -> Units:
    """Per unit the outermost modules that hold nothing of another unit. See `BucketPlan.cover`."""
    tree = _Tree(model)
    names = {name for unit in units for name in unit}

    def spell(path: str, unit: tuple[str, ...]) -> Iterator[str]:
        prefix = f"{path}." if path else ""
        if not any(n != path and n.startswith(prefix) and n not in unit for n in names):
            yield path
            return
        for child, _ in tree.children(path):
            if child not in names:
                yield from spell(child, unit)

    covers = []
    for unit in units:
        # A module inside another of the same unit is named by that one.
        outer = [
            n for n in unit if not any(o != n and n.startswith(f"{o}." if o else "") for o in unit)
        ]
        covers.append(tuple(piece for name in outer for piece in spell(name, unit)))
    return tuple(covers)


def _module(name: str, known: dict[str, nn.Module]) -> nn.Module:
    if name not in known:
        raise ValueError(f"plan: no module is named {name!r}" + nearest_names(name, known))
    return known[name]


def _checked_kinds(kinds: Iterable[str]) -> tuple[str, ...]:
    given = [kinds] if isinstance(kinds, str) else list(kinds)
    for kind in given:
        if kind not in KINDS:
            raise ValueError(
                f"kinds: {kind!r} is no kind of collective; the kinds are "
                f"{', '.join(map(repr, KINDS))}"
            )
    if not given:
        raise ValueError('kinds is empty: for a plan that buckets nothing take mode "none"')
    return tuple(kind for kind in KINDS if kind in given)
