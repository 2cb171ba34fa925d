"""Check which collectives can be members of a bucket."""

from __future__ import annotations

import torch
import torch.fx as fx

from .._torch.symbols import depends_on_data
from .collectives import group_size, kind_of, only_wait
from .tags import is_bucket


def unmergeable(start: fx.Node) -> str:
    """Return why a collective can't be a member of any bucket; empty if it can."""
    if start.target is torch.ops._c10d_functional.all_reduce_.default:
        return "it works in place"
    result = start.meta.get("val")
    if not isinstance(result, torch.Tensor):
        return "its shape is unknown (no meta['val'])"
    if "out" in start.kwargs or is_bucket(start):
        return "it is a bucket already"
    wait = only_wait(start)
    if wait is None:
        return "nodes other than one wait read its result"
    # torch's merging relies on the rest.
    if start.kwargs or wait.kwargs:
        return "its arguments are given by keyword"
    value = start.all_input_nodes[0].meta.get("val")
    if not isinstance(value, torch.Tensor):
        return "the shape of its input is unknown (no meta['val'])"
    if any(map(depends_on_data, (*value.shape, *result.shape))):
        return "its size depends on data"
    kind = kind_of(start)
    if kind != "all_reduce" and not value.ndim:
        return "its input has no dimension"
    if kind == "reduce_scatter" and isinstance(value.shape[0], int):
        size = group_size(start)
        if value.shape[0] % size:
            return f"its input's {value.shape[0]} rows can't be divided among {size} ranks"
    return ""
