"""Bucket plans by the name of a mode, for command lines and config files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.nn as nn

from .blocks import transformer_block_plan
from .manual import manual_plan
from .plan import DEFAULT_KINDS, MODES, BucketPlan, checked_kinds

__all__ = ["make_plan"]


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
            (``transformer_block_plan(model)``) or "manual" (``manual_plan(modules, model)``).
        model: For the last two.
        modules: For "manual".
        kinds: See ``BucketPlan.kinds``.
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
        return BucketPlan(mode=mode, kinds=checked_kinds(kinds))
    if model is None:
        raise ValueError(f'mode "{mode}" needs the model')
    if mode == "transformer_block":
        return transformer_block_plan(model, moe_experts=moe_experts, kinds=kinds)
    if modules is None:
        raise ValueError('mode "manual" needs modules=, the list of units')
    return manual_plan(modules, model, kinds=kinds)
