"""Read the param groups that eager FSDP2 made of a model.

Versions (``torch/distributed/fsdp/_fully_shard``):

* A ``FSDPState`` holds ``_fsdp_param_groups``, a list, in 2.13 to 2.15; in 2.11
  ``_fsdp_param_group``. ``fully_shard`` makes one group, or one per pair of process groups where a
  ``shard_placement_fn`` sends parameters to several meshes (``_init_param_group``).
* The all-gather packs a group in the order of ``fsdp_params``, and so does the reduce-scatter up to
  2.14. 2.15 packs the reduce-scatter by gradient dtype, in order of first appearance, and within
  one dtype in that order (``_init_reduce_scatter_param_order``): another one only where
  ``param.grad_dtype`` was set on some parameters or frozen parameters have another dtype.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn as nn

from ..fqns import canonical_fqn, parameter_names
from .private import private_torch

with private_torch():
    from torch.distributed import _composable_state
    from torch.distributed.fsdp import _common_utils
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllocMixin as DefaultAllocMixin,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

# Whether this torch packs reduce-scatters by gradient dtype (since 2.15), keeps the dtype of a
# gradient that is wider than its parameter (2.15), and finds inputs in dataclasses (2.12).
REDUCES_BY_GRAD_DTYPE = hasattr(FSDPParamGroup, "_init_reduce_scatter_param_order")
KEEPS_WIDE_GRADIENTS = hasattr(FSDPParamGroup, "_set_unsharded_grad_dtypes")
WRAPS_DATACLASSES = hasattr(_common_utils, "replace_grad_tensors")


@dataclass(frozen=True)
class ParamGroup:
    """One payload of eager FSDP2.

    Attributes:
        modules: FQNs of the modules of the ``fully_shard`` call, in its order.
        params: FQNs of the parameters in all-gather order; ``reduce_params`` in reduce-scatter
            order.
        aliases: (other name, name) of shared parameters.
        origins: identity of each parameter before sharding; None before torch 2.13.
    """

    modules: tuple[str, ...]
    params: tuple[str, ...]
    reduce_params: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...]
    origins: tuple[Hashable, ...]


def is_wrapped(model: nn.Module) -> bool:
    """Return whether ``fully_shard`` was called on ``model`` or a module in it."""
    return bool(_states_in(model))


def _states_in(model: nn.Module) -> list[FSDPState]:
    """Return the FSDP2 states of a model's modules, each once."""
    with private_torch():
        found = dict.fromkeys(map(_composable_state._get_module_state, model.modules()))
    return [state for state in found if isinstance(state, FSDPState)]


def read_param_groups(model: nn.Module) -> list[ParamGroup]:
    """Read a model's param groups in the order of the ``fully_shard`` calls.

    Works before and after FSDP2's lazy initialization. FQNs are relative to ``model``.

    Raises:
        ValueError: nothing is wrapped, or a unit has a parameter outside of ``model``.
    """
    states = _states_in(model)
    if not states:
        raise ValueError(
            f"{type(model).__name__} has no FSDP2 module: call fully_shard() on it first, or use "
            "from_model() for a model that stays unwrapped"
        )
    names = parameter_names(model)
    module_names = {m: canonical_fqn(n) for n, m in model.named_modules()}
    groups: list[ParamGroup] = []
    for group in _groups_of(states):
        found = [_names_of(fsdp_param, names) for fsdp_param in group.fsdp_params]
        params = tuple(fqns[0] for fqns in found)
        groups.append(
            ParamGroup(
                modules=tuple(module_names[m] for m in group.modules if m in module_names),
                params=params,
                reduce_params=reduce_order(params, [_grad_dtype(p) for p in group.fsdp_params]),
                aliases=tuple((alias, fqns[0]) for fqns in found for alias in fqns[1:]),
                origins=tuple(getattr(p, "_orig_param_uid", None) for p in group.fsdp_params),
            )
        )
    return groups


def reduce_order(params: Sequence[str], grad_dtypes: Sequence[Hashable]) -> tuple[str, ...]:
    """Sort ``params`` as torch packs the reduce-scatter: by gradient dtype since 2.15."""
    if not REDUCES_BY_GRAD_DTYPE:
        return tuple(params)
    met = list(dict.fromkeys(grad_dtypes))
    pairs = zip(params, grad_dtypes, strict=True)
    return tuple(fqn for fqn, _ in sorted(pairs, key=lambda pair: met.index(pair[1])))


def grad_dtype(parameter: nn.Parameter) -> Hashable:
    """Return the ``FSDPParam.sharded_grad_dtype`` that FSDP2 would set for a parameter."""
    if getattr(parameter, "_has_grad_dtype_override", False):
        return parameter.grad_dtype
    return parameter.dtype


def _grad_dtype(fsdp_param: Any) -> Hashable:
    # ``sharded_grad_dtype`` is final only after lazy initialization. Without an override it becomes
    # the dtype of the sharded parameter (``FSDPParam.init_dtype_attrs``).
    if getattr(fsdp_param, "_has_sharded_grad_dtype_override", False):
        return fsdp_param.sharded_grad_dtype
    return fsdp_param.sharded_param.dtype


def _groups_of(states: list[FSDPState]) -> list[Any]:
    """Return the param groups of states in the order of the ``fully_shard`` calls."""
    # A state does not record when it was made, but the calls fill this table in their order.
    made = dict.fromkeys(ref() for ref in _composable_state._module_state_mapping.values())
    groups: list[Any] = []
    for state in [state for state in made if state in states]:
        if hasattr(state, "_fsdp_param_groups"):
            groups += state._fsdp_param_groups
        elif state._fsdp_param_group is not None:
            groups.append(state._fsdp_param_group)
    return groups


def _names_of(fsdp_param: Any, names: Mapping[nn.Parameter, tuple[str, ...]]) -> tuple[str, ...]:
    """Return all FQNs of an ``FSDPParam``, the one of ``model.named_parameters()`` first."""
    info = fsdp_param._module_info
    found = names.get(info.module._parameters.get(info.param_name), ())
    if not found:
        raise ValueError(
            f"a fully_shard() unit of this model holds {info.param_name!r} of a "
            f"{type(info.module).__name__} that is not in it: pass the model that all modules "
            "of the unit belong to"
        )
    return found
