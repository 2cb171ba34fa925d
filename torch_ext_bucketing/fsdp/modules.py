"""Decide where a sharded parameter is whole: the one state of a unit, and the classes that read it.

A unit is one call of ``fully_shard``, and torch's own FSDP2 runs it wherever nothing is traced. Its
parameters lie in ``module._parameters``, where FSDP2 exchanges the shards and the full tensors.
:attr:`Unit.phase` adds what FSDP2 does not know, code that Dynamo traces::

                  forward begins                      forward ends, FSDP2 reshards
    "shards" ---- not traced: FSDP2's hooks ---> "whole" --------------------------> "shards"
             ---- traced: no hook runs --------> "graph" --------------------------> "shards"

    code that runs    phase               an attribute is
    traced            "whole"             the full parameter that FSDP2 gathered around that code
    traced            "shards", "graph"   a gather in the graph, and a reduction in backward
    not traced        "shards", "whole"   the parameter that FSDP2 has registered: the shard, or
                                          after ``unshard()`` and until ``reshard()`` the full one
    not traced        "graph"             a gather: code between two graphs of one forward

The unit of ``data_parallel``, a whole model, is in ``"graph"`` while its forward runs, in any case.

A block that is compiled alone runs inside FSDP2's hooks, if a module around it does: it is gathered
while the block before it computes, and its graph has no collectives (:func:`_call`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Literal

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule as EagerFSDPModule
from torch.distributed.fsdp import UnshardHandle

from .._torch.dynamo import (
    branch_while_tracing,
    local_while_tracing,
    while_tracing,
    wrapped_by_compile,
)
from .._torch.fsdp2 import (
    Casts,
    FSDPParamGroup,
    FSDPState,
    ParamGroup,
    eager_settings,
    groups_of,
    has_not_run,
    is_distributed,
    is_inner_state,
    places_of,
    prepare_group,
    read_param_groups,
    refuse_deepcopy,
    reshard_after_traced_backward,
    state_of,
    take_hooks,
    unsharded_parameter,
)
from .gather import Unshard
from .unit_inputs import cast_inputs, cast_outputs

Phase = Literal["shards", "whole", "graph"]


@dataclass(eq=False)
class Unit:
    """One call of ``fully_shard`` or ``data_parallel``.

    Attributes:
        modules: of the call, without modules inside others.
        ignored: the ``ignored_params`` of the call.
        is_named: whether recipes take the call as a unit. That of ``data_parallel`` is the whole
            model, and recipes divide it.
    """

    state: FSDPState
    modules: tuple[nn.Module, ...]
    ignored: frozenset[nn.Parameter]
    is_named: bool
    casts: Casts
    phase: Phase = "shards"
    # FSDP2's own hooks before and after forward, by module.
    hooks: dict[nn.Module, tuple[Any, Any]] = field(default_factory=dict, repr=False)
    is_read: bool = False  # whether a recipe was made of it
    is_traced: bool = False  # whether a graph has its gathers
    was_whole: bool = False  # whether FSDP2 has gathered it

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Run FSDP2's hook before forward: gather, and cast inputs."""
        if not self.is_named:  # all of a model at once would not fit
            self.phase = "graph"
            return args, kwargs
        changed = self.hooks[module][0](module, args, kwargs)
        self.phase = "whole"
        if not (self.was_whole or is_inner_state(self.state)):
            _run_around_compiled(module)
        self.note_whole()
        return (args, kwargs) if changed is None else changed

    def note_whole(self) -> None:
        """Note that FSDP2 has gathered the parameters."""
        for group in groups_of(self.state) if not self.was_whole else ():
            full = [p for m in group.fsdp_params if (p := unsharded_parameter(m)) is not None]
            if not full:  # not waited for
                return
            reshard_after_traced_backward(group)
            for param in full:
                param._gathered_by = self  # type: ignore[attr-defined]
        self.was_whole = True

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Run FSDP2's hook after forward: free full parameters, and cast outputs."""
        self.phase = "shards"
        if not self.is_named:
            return output
        changed = self.hooks[module][1](module, args, output)
        return output if changed is None else changed

    def reshard(self) -> None:
        """Free the full parameters, if FSDP2 has gathered them."""
        for group in groups_of(self.state) if self.was_whole else ():
            if not group.is_sharded:
                group.reshard()

    def unshards(self, group: FSDPParamGroup) -> list[Unshard]:
        """Return the reads of a group's parameters, one for each module that has one."""
        places = (place for managed in group.fsdp_params for place in places_of(managed))
        return [vars(module)["_unshards"][name] for module, name in places]

    def take_divisors(self) -> None:
        """Divide gradients as FSDP2's settings say."""
        for group in groups_of(self.state):
            factor, only_sums = group.gradient_divide_factor, group.force_sum_reduction_for_comms
            for unshard in self.unshards(group):
                unshard.reduction = unshard.reduction._replace(factor=factor, only_sums=only_sums)

    def begin(self) -> None:
        """Prepare for gathers in a graph, before a forward or while Dynamo traces it.

        Raises:
            NotImplementedError, TypeError: see :meth:`check`.
            RuntimeError: parameters are on the meta device.
        """
        self.check()
        phase, self.phase = self.phase, "whole"  # FSDP2 reads attributes, which are its own here
        try:
            for group in groups_of(self.state):
                prepare_group(group, travels_together=self.is_named)
                for unshard in self.unshards(group):
                    unshard.prepare()
        finally:
            self.phase = phase
        self.is_traced = True

    def check(self) -> None:
        """Raise an error if a graph can't do as FSDP2 does.

        Raises:
            NotImplementedError: a graph can't follow one of FSDP2's settings.
            TypeError: a reduction would drop the imaginary parts of gradients.
        """
        for group in groups_of(self.state):
            for unshard in self.unshards(group):
                unshard.check()
        for setting in eager_settings(self.state):
            raise NotImplementedError(
                f"{setting.code} has no counterpart in a compiled step. Instead: "
                f"{_INSTEAD[setting.name]}"
            )


def gathered_by(param: torch.Tensor) -> Unit | None:
    """Return the unit whose full parameter FSDP2 made ``param`` for, or None."""
    return getattr(param, "_gathered_by", None)


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit of the call that a module was given to, or None."""
    return vars(module).get("_sharded_unit")


def all_units(model: nn.Module) -> list[Unit]:
    """Return the units in ``model``, in the order of its modules."""
    return list(dict.fromkeys(u for m in model.modules() if (u := unit_of(m)) is not None))


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of ``fully_shard`` calls in ``model``."""
    return [unit for unit in all_units(model) if unit.is_named]


def shards_of_units(model: nn.Module) -> set[nn.Parameter]:
    """Return the shards that units of ``fully_shard`` calls in ``model`` have."""
    groups = [group for unit in units_of(model) for group in groups_of(unit.state)]
    return {managed.sharded_param for group in groups for managed in group.fsdp_params}


def param_groups(model: nn.Module) -> list[ParamGroup]:
    """Read the payloads of a model that ``fully_shard`` was applied to, torch's or ours.

    They are in the order of the calls, with FQNs relative to ``model``.
    """
    states = dict.fromkeys(
        state
        for module in model.modules()
        if (state := state_of(module)) is not None
        and ((unit := unit_of(module)) is None or unit.is_named)
    )
    return read_param_groups(model, list(states))


def is_eager(model: nn.Module) -> bool:
    """Return whether torch's own ``fully_shard`` was called on ``model`` or a module in it."""
    return any(state_of(m) is not None and unit_of(m) is None for m in model.modules())


def adopt(unit: Unit, reads: dict[tuple[nn.Module, str], Unshard]) -> None:
    """Make modules that FSDP2 has sharded the modules of a unit.

    Args:
        reads: by module and name of a parameter. Modules inside of ``unit.modules`` have them, too.
    """
    inside = dict.fromkeys(m for root in unit.modules for m in root.modules())
    for module in inside:
        # Dynamo would not guard modules with these.
        for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            vars(module).pop(mark, None)
    for (module, name), unshard in reads.items():
        vars(module).setdefault("_unshards", {})[name] = unshard
    for module in unit.modules:
        unit.hooks[module] = take_hooks(unit.state, module, _pre_forward, _post_forward)
        vars(module)["_sharded_unit"] = unit
    for module in dict.fromkeys([*(module for module, _ in reads), *unit.modules]):
        cls: Any = type(module)
        if unit_of(module) is unit:  # FSDP2 has made a subclass
            cls = next(base for base in cls.__mro__ if not issubclass(base, EagerFSDPModule))
        plain = vars(cls).get("_plain_class", cls)
        names = tuple(vars(module).get("_unshards", ()))
        module.__class__ = _sharded_class(plain, names, unit_of(module) is not None)


def _pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Begin a unit's forward, traced or not."""
    unit: Any = vars(module)["_sharded_unit"]
    if not torch.compiler.is_compiling():
        return unit.enter(module, args, kwargs)
    if unit.phase != "shards":
        return None
    while_tracing(_begin)
    unit.phase = "graph"
    return cast_inputs(unit.casts, module is unit.modules[0], args, kwargs)


_pre_forward.casts_inputs = True  # type: ignore[attr-defined]  # see `unit_inputs.run_first`


def _post_forward(module: nn.Module, args: Any, output: Any) -> Any:
    """End a unit's forward, traced or not."""
    unit: Any = vars(module)["_sharded_unit"]
    if not torch.compiler.is_compiling():
        return unit.leave(module, args, output)
    if unit.phase == "whole":
        return None
    unit.phase = "shards"
    return cast_outputs(unit.casts, module is unit.modules[-1], output)


def _begin(context: Any) -> None:
    _check_branch(context)
    unit: Unit = local_while_tracing(context, "unit")
    try:
        unit.begin()
    except NotImplementedError as error:  # Dynamo would take it for an attribute to skip
        raise RuntimeError(str(error)) from error


def _check_branch(context: Any) -> None:
    """Raise an error if a parameter is read inside a higher-order operator such as ``cond``."""
    operator = branch_while_tracing(context)
    if operator is not None:
        module = local_while_tracing(context, "module")
        raise RuntimeError(
            f"a parameter of a {type(module).__name__} is read in a function of {operator}(), "
            "whose operands can't be sharded: read it before, weight = module.weight, and use the "
            "tensor in the function"
        )


def _read(module: Any, name: str) -> Any:
    """Return the value of a sharded module's attribute in the unit's phase."""
    unshard = module._unshards.get(name)
    # None in a module of the class that was made from a sharded one, such as by slicing.
    unit = None if unshard is None else unshard.unit
    if torch.compiler.is_compiling() and unit is not None and unit.phase != "whole":
        while_tracing(_begin if unit.phase == "shards" else _check_branch)
        return unshard.read(module, name)
    param = module._parameters.get(name)
    if param is None:  # set to None or deleted; nn.Module handles the error
        raise AttributeError(name)
    is_gathered = unit is not None and unit.phase == "graph"
    return unshard.read(module, name) if is_gathered else param


def _named_parameters(
    module: Any, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    found = module._plain_class.named_parameters(module, prefix, recurse, remove_duplicate)
    return _as_in_forward(module, prefix, found) if torch.compiler.is_dynamo_compiling() else found


def _as_in_forward(
    module: Any, prefix: str, found: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Exchange shards for full parameters in units whose forward runs, as FSDP2 registers them."""
    for path, param in found:
        parent, _, name = path.removeprefix(prefix).lstrip(".").rpartition(".")
        owner = module.get_submodule(parent)
        unshard = getattr(owner, "_unshards", {}).get(name)
        is_in_graph = unshard is not None and unshard.unit.phase == "graph"
        yield path, _read(owner, name) if is_in_graph else param


def _register_parameter(module: Any, name: str, param: Any) -> None:
    unshard = vars(module).get("_unshards", {}).get(name)
    is_plain = param is not None and not is_distributed(param)
    # FSDP2 registers its full parameters so in classes with a ``__setattr__``, such as ``nn.LSTM``.
    if is_plain and unshard is not None and param is not unsharded_parameter(unshard.managed):
        raise TypeError(
            f"{name} of a {type(module).__name__} is sharded, and a plain parameter of shape "
            f"{tuple(param.shape)} can't replace it: write the values into the shard, or assign "
            "distribute_tensor(tensor, mesh, placements)"
        )
    module._plain_class.register_parameter(module, name, param)


class FSDPModule(EagerFSDPModule):
    """A module that :func:`.fully_shard` was called on: FSDP2's, with gathers where it is traced.

    All methods are FSDP2's, and hold where FSDP2's hooks run. Settings that a compiled step can't
    follow are a ``NotImplementedError`` that names another way: from a call after a recipe was made
    or a step was traced, or from the recipe or the trace.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the plain class, as for a slice of a ``Sequential``."""
        return cls._plain_class(*args, **kwargs)  # type: ignore[attr-defined]

    def _get_fsdp_state(self) -> FSDPState:
        # FSDP2 looks in a table of all modules, which Dynamo would guard.
        unit: Any = unit_of(self)  # type: ignore[arg-type]
        return unit.state

    def unshard(self, async_op: bool = False) -> Any:
        """Gather the module's parameters, until :meth:`reshard` or a backward ends.

        In traced code it does nothing: each read is a gather in the graph.
        """
        if torch.compiler.is_compiling():
            return UnshardHandle() if async_op else None
        handle = super().unshard(async_op)
        unit: Any = unit_of(self)  # type: ignore[arg-type]
        unit.note_whole()
        return handle

    def reset_iter_state(self) -> None:
        """Drop FSDP2's state of a step that an error ended; since torch 2.13."""
        for unit in all_units(self):  # type: ignore[arg-type]
            unit.phase = "shards"
        if not has_not_run(self._get_fsdp_state()):  # else there is nothing, and FSDP2 would fail
            super().reset_iter_state()

    def set_reshard_after_forward(self, *args: Any, **kwargs: Any) -> None:
        """Change ``reshard_after_forward``, before a recipe is made of the model."""
        if any(unit.is_read or unit.is_traced for unit in all_units(self)):  # type: ignore[arg-type]
            raise RuntimeError(
                "set_reshard_after_forward() comes too late: a recipe was made of the model, or a "
                "step was traced. Call it after fully_shard(), before recipe(model)"
            )
        super().set_reshard_after_forward(*args, **kwargs)


def _setting(name: str) -> Callable[..., None]:
    """Make a method that calls FSDP2's, unless a traced step can't follow the setting."""
    method = getattr(EagerFSDPModule, name)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        units = all_units(self)
        groups = [group for unit in units for group in groups_of(unit.state)]
        before = [dict(vars(group)) for group in groups]
        method(self, *args, **kwargs)
        try:
            for unit in units:
                if unit.is_traced or unit.is_read:
                    unit.check()
        except NotImplementedError:
            for group, attributes in zip(groups, before, strict=True):
                vars(group).update(attributes)
            raise
        for unit in units:
            unit.take_divisors()

    return call


_REDUCE_ONCE = (
    "run the microbatches in `with ReduceOnce(model, backend): ...`, from torch_ext_bucketing.fsdp"
)
_GATHER_ONCE = _REDUCE_ONCE.replace("backend)", "backend, gather_once=True)")
_SCATTER_EACH = _REDUCE_ONCE.replace("backend)", "backend, scatter_each=True)")
_INSTEAD = {
    "set_requires_gradient_sync": _REDUCE_ONCE,
    "set_requires_all_reduce": _SCATTER_EACH,
    "set_reshard_after_backward": _GATHER_ONCE,
    "set_reduce_scatter_unused_params": (
        "all ranks run one graph, so a parameter is unused on all of them or on none; for a "
        "gradient of zeros, add `0 * parameter.sum()` to the loss"
    ),
    "set_custom_all_gather": "write a pass, teb.GraphPass",
    "set_custom_reduce_scatter": (
        "recipe(model, reduce='all_to_all') adds in rank order, or write a pass, teb.GraphPass"
    ),
    "set_all_reduce_hook": "a 2-D mesh all-reduces, or write a pass, teb.GraphPass",
    "set_gradient_divide_factor": (
        "functional collectives do not multiply before they add: first "
        "set_force_sum_reduction_for_comms(True), which divides after the sum, or a factor of 1 or "
        "of the number of shards"
    ),
    "grad_dtype": "leave it unset, and set mp_policy.reduce_dtype",
    "offload_policy": (
        "let activations wait in host memory, recipe(model, memory=PeakMemory(gib=..., "
        "host_gib=...))"
    ),
    "dp_mesh_dims": (
        "make parameters DTensors on the other dimensions only, mesh['tp'], and give the "
        "data-parallel part of the mesh, mesh=mesh['dp']"
    ),
}
"""Name the way to do in a traced step what a setting of eager FSDP2 does, by setting."""

for _name in (*_INSTEAD, "set_reduce_scatter_divide_factor", "set_force_sum_reduction_for_comms"):
    if hasattr(EagerFSDPModule, _name):  # some are younger than torch 2.11
        setattr(FSDPModule, _name, _setting(_name))
if not hasattr(EagerFSDPModule, "reset_iter_state"):
    del FSDPModule.reset_iter_state


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a unit's module; see the table for one that is compiled by ``module.compile()``.

    ::

        an eager root is around it    FSDP2's gather, [graph], FSDP2's reshard
        the root itself               [graph of gathers, forward, reductions]
    """
    call = type(self)._plain_class.__call__
    if torch.compiler.is_compiling():
        return call(self, *args, **kwargs)
    unit: Any = unit_of(self)
    phase = unit.phase
    try:
        if self._compiled_call_impl is None:
            return call(self, *args, **kwargs)
        if is_inner_state(unit.state) and unit.is_named:
            args, kwargs = unit.enter(self, args, kwargs)
            return unit.leave(self, args, call(self, *args, **kwargs))
        # Dynamo leaves out nn.Module's own code, and would compile the hook alone.
        unit.begin()
        args, kwargs = cast_inputs(unit.casts, self is unit.modules[0], args, kwargs)
        unit.phase = "graph"
        return call(self, *args, **kwargs)
    finally:  # also after an error
        unit.phase = phase


@functools.cache
def _sharded_class(plain: Any, names: tuple[str, ...], is_unit: bool) -> Any:
    """Create a subclass of ``plain`` whose attributes ``names`` are sharded parameters."""
    # Modules of one class share the subclass, and so the compiled code.
    members: dict[str, Any] = {"__module__": plain.__module__, "_plain_class": plain}
    members.update({name: property(functools.partial(_read, name=name)) for name in names})
    members["register_parameter"] = _register_parameter
    members["named_parameters"] = _named_parameters
    if not is_unit:
        return type(plain.__name__, (plain,), {**members, "__deepcopy__": _plain_copy})
    members["__deepcopy__"] = refuse_deepcopy
    # Dynamo counts the compiles of a code object, here those of one class.
    members["__call__"] = FunctionType(_call.__code__.replace(), _call.__globals__, "__call__")
    return type(f"FSDP{plain.__name__}", (FSDPModule, plain), members)


def _plain_copy(module: Any, memo: dict[int, Any]) -> Any:
    """Copy a module of a unit: it has the shards, as with eager FSDP2, and no unit."""
    plain = memo[id(module)] = module._plain_class.__new__(module._plain_class)
    attributes = {k: v for k, v in vars(module).items() if k != "_unshards"}
    vars(plain).update(copy.deepcopy(attributes, memo))
    return plain


def _run_around_compiled(root: nn.Module) -> None:
    """Run FSDP2's hooks around the blocks below an eager root that ``torch.compile`` wraps."""
    for module in root.modules():
        inner = wrapped_by_compile(module)
        if inner is not None and unit_of(inner) is not None:
            module.register_forward_pre_hook(_enter_wrapped, with_kwargs=True)
            module.register_forward_hook(_leave_wrapped, always_call=True)


def _enter_wrapped(module: nn.Module, args: Any, kwargs: Any) -> Any:
    inner: Any = wrapped_by_compile(module)
    unit: Any = unit_of(inner)
    if torch.compiler.is_compiling() or not is_inner_state(unit.state):
        return None
    return unit.enter(inner, args, kwargs)


def _leave_wrapped(module: nn.Module, args: Any, output: Any) -> Any:
    inner: Any = wrapped_by_compile(module)
    unit: Any = unit_of(inner)
    if torch.compiler.is_compiling() or unit.phase != "whole":
        return None
    return unit.leave(inner, args, output)
