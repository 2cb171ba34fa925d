"""Read AOTAutograd's descriptors of inputs and outputs."""

from __future__ import annotations

from typing import Any

import torch.fx as fx
import torch.utils._pytree as pytree

from .draws import private_torch

with private_torch():
    from torch._functorch._aot_autograd.descriptors import (
        BufferAOTInput,
        GradAOTOutput,
        ParamAOTInput,
        PlainAOTInput,
        SubclassGetAttrAOTInput,
        SubclassGetAttrAOTOutput,
    )


def base_input(desc: Any) -> Any:
    """Return the descriptor of the tensor subclass that an inner tensor belongs to."""
    while isinstance(desc, SubclassGetAttrAOTInput):
        desc = desc.base
    return desc


def param_target(desc: Any) -> str | None:
    """Return the FQN that joint export gives a parameter input, or None."""
    return desc.target if isinstance(desc, ParamAOTInput) else None


def plain_index(desc: Any) -> int | None:
    """Return an input's index in the arguments of the compiled function, or None."""
    return desc.idx if isinstance(desc, PlainAOTInput) else None


def gradient_outputs(output: fx.Node) -> list[tuple[fx.Node, Any]]:
    """Return a graph's outputs that are gradients, each with the descriptor of its input.

    Raises:
        ValueError: outputs and descriptors differ in number.
    """
    # Flatten both. Zipping nested outputs with flat descriptors would give parameters each other's
    # gradients.
    values, descs = pytree.tree_leaves(output.args[0]), output.meta.get("desc")
    if descs is None:
        return []
    descs = pytree.tree_leaves(descs)
    if len(descs) != len(values):
        raise ValueError(
            f"{output.name}: {len(descs)} output descriptors for {len(values)} flattened values, "
            "so gradients can't be assigned to parameters"
        )
    found = []
    for value, desc in zip(values, descs, strict=True):
        while isinstance(desc, SubclassGetAttrAOTOutput):
            desc = desc.base
        if isinstance(desc, GradAOTOutput) and isinstance(value, fx.Node):
            found.append((value, desc.grad_of))
    return found


def is_tangent(desc: Any) -> bool:
    """Return whether an input is a tangent."""
    return bool(desc.is_tangent())


def as_parameter(fqn: str) -> Any:
    """Return the descriptor of an input that is a parameter."""
    return ParamAOTInput(fqn)


def as_buffer(name: str) -> Any:
    """Return the descriptor of an input that the caller keeps, such as an optimizer's state."""
    return BufferAOTInput(name)
