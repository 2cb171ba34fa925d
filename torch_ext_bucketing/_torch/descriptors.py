"""AOTAutograd's input and output descriptors: the one place that knows their classes.

They are ``torch._functorch._aot_autograd.descriptors`` in torch 2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any

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


def grad_of(desc: Any) -> Any | None:
    """The input whose gradient an output is, or None."""
    while isinstance(desc, SubclassGetAttrAOTOutput):
        desc = desc.base
    return desc.grad_of if isinstance(desc, GradAOTOutput) else None


def is_tangent(desc: Any) -> bool:
    """Whether an input is a gradient that comes in from outside."""
    return bool(desc.is_tangent())
