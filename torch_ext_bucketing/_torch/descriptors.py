"""AOTAutograd's input and output descriptors: the one place that knows their classes.

They are ``torch._functorch._aot_autograd.descriptors`` in torch 2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx
import torch.utils._pytree as pytree

from .private import private_torch

with private_torch():
    from torch._functorch._aot_autograd.descriptors import (
        GradAOTOutput,
        ParamAOTInput,
        PlainAOTInput,
        SubclassGetAttrAOTInput,
        SubclassGetAttrAOTOutput,
    )


def base_input(desc: Any) -> Any:
    """The graph input behind the inner tensor of a tensor subclass (``DTensor._local_tensor``)."""
    while isinstance(desc, SubclassGetAttrAOTInput):
        desc = desc.base
    return desc


def param_target(desc: Any) -> str | None:
    """The FQN that joint export gives a parameter input, or None."""
    return desc.target if isinstance(desc, ParamAOTInput) else None


def plain_index(desc: Any) -> int | None:
    """The position of an input in the arguments of the compiled function, or None."""
    return desc.idx if isinstance(desc, PlainAOTInput) else None


def gradient_outputs(output: fx.Node) -> list[tuple[fx.Node, Any]]:
    """The values of a graph's output that are gradients, each with the descriptor of its input;
    none where the graph has no descriptors. A ValueError where these are more or fewer."""
    # The output may nest tuples while its descriptors are flat: zipping them unflattened would
    # give parameters each other's gradients.
    values, descs = pytree.tree_leaves(output.args[0]), output.meta.get("desc")
    if descs is None:
        return []
    descs = pytree.tree_leaves(descs)
    if len(descs) != len(values):
        raise ValueError(
            f"{output.name}: {len(descs)} output descriptors for {len(values)} flattened values; "
            "this graph's gradients can't be told apart"
        )
    found = []
    for value, desc in zip(values, descs, strict=True):
        while isinstance(desc, SubclassGetAttrAOTOutput):
            desc = desc.base
        if isinstance(desc, GradAOTOutput) and isinstance(value, fx.Node):
            found.append((value, desc.grad_of))
    return found


def is_tangent(desc: Any) -> bool:
    """Whether an input is a gradient that comes in from outside."""
    return bool(desc.is_tangent())
