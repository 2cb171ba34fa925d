"""Where the nodes of a bucket come from, in the metadata that people and profilers read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.fx as fx
from torch.fx.traceback import NodeSource, NodeSourceAction

_OF_THE_FIRST = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "custom")


def merged_metadata(members: Sequence[fx.Node]) -> dict[str, Any]:
    """Metadata for every node that takes the place of ``members``.

    The first member's module stack, source line and annotations, and every member as a source
    (``from_node``), which Inductor's provenance tracking reads. All values are shared.
    """
    first = members[0].meta
    actions = [NodeSourceAction.CREATE, NodeSourceAction.REPLACE]
    sources = [NodeSource(member, "bucketing_pass", actions) for member in members]
    return {**{key: first[key] for key in _OF_THE_FIRST if key in first}, "from_node": sources}
