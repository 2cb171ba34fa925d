"""The comparison of plans as an operator in Inductor's graphs.

Inductor's caches keep the code of a graph and nothing that a backend knows about it. So the plan is
an argument of an operator in the graph, which a cached graph still has. It stands before the first
collective and returns at once after its first run::

    agree(digest, plan, timeout_s)
    all_gather -> wait -> ...           "control dependency" on agree; collectives after the first
                                        one stay behind it, since Inductor keeps their order
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.fx as fx

from . import _torch_bucketing as tb
from .agreement import agree_on_encoded
from .launches import GraphPlan

__all__ = ["first_collective", "insert"]

_NO_TIMEOUT = -1.0  # a group's own timeout

_library = torch.library.Library("torch_ext_bucketing", "DEF")
_library.define("agree(str digest, str plan, float timeout_s) -> ()")


def _agree(digest: str, plan: str, timeout_s: float) -> None:
    timeout = None if timeout_s == _NO_TIMEOUT else timedelta(seconds=timeout_s)
    agree_on_encoded(digest, plan, timeout)


def _agree_fake(digest: str, plan: str, timeout_s: float) -> None:
    """Compiling compares nothing."""


_library.impl("agree", _agree, "CompositeExplicitAutograd")
torch.library.register_fake("torch_ext_bucketing::agree", _agree_fake, lib=_library)
_AGREE = torch.ops.torch_ext_bucketing.agree.default
fx.node.has_side_effect(_AGREE)  # it has no results, and must not be removed for that


def first_collective(graph: fx.Graph) -> fx.Node | None:
    """The first launch in graph order."""
    return next((n for n in graph.nodes if tb.collective_group(n) is not None), None)


def insert(first: fx.Node, plan: GraphPlan, timeout: timedelta | None) -> fx.Node:
    """Put the operator before a graph's first collective; returns its node.

    Inductor needs a control dependency besides, see :func:`._inductor_order.pin_order`.
    """
    seconds = _NO_TIMEOUT if timeout is None else timeout.total_seconds()
    with first.graph.inserting_before(first):
        node = first.graph.call_function(_AGREE, (plan.digest(), plan.encode(), seconds))
    node.meta["val"] = None
    return node
