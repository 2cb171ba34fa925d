"""Compare launches by an operator in Inductor's graphs.

Inductor's caches keep a graph's code and nothing else that a backend knows about it. So the
launches are an argument of an operator, through which the first collective's input passes::

    x -> agree(x, digest, launches, timeout_s) -> all_gather -> wait -> ...

No scheduler can move the collective before it, and Inductor keeps the order of the others. The
operator returns a view of its input, and does nothing else after its first run.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.fx as fx

from ..graph.collectives import collective_group
from .before_run import agree_once
from .launches import GraphLaunches

_NO_TIMEOUT = -1.0  # a group's own timeout

_library = torch.library.Library("torch_ext_bucketing", "DEF")
_library.define("agree(Tensor(a) sent, str digest, str launches, float timeout_s) -> Tensor(a)")


def _agree(sent: torch.Tensor, digest: str, launches: str, timeout_s: float) -> torch.Tensor:
    timeout = None if timeout_s == _NO_TIMEOUT else timedelta(seconds=timeout_s)
    agree_once(digest, lambda: GraphLaunches.decode(launches), timeout)
    return sent.view_as(sent)


_library.impl("agree", _agree, "CompositeExplicitAutograd")
# Compiling compares nothing.
torch.library.register_fake(
    "torch_ext_bucketing::agree", lambda sent, *rest: sent.view_as(sent), lib=_library
)
_AGREE = torch.ops.torch_ext_bucketing.agree.default


def insert(graph: fx.Graph, launches: GraphLaunches, timeout: timedelta | None) -> fx.Node | None:
    """Insert the operator before a graph's first collective; return None without one."""
    first = next((n for n in graph.nodes if collective_group(n) is not None), None)
    if first is None or not launches.groups:
        return None
    sent = first.all_input_nodes[0]
    seconds = _NO_TIMEOUT if timeout is None else timeout.total_seconds()
    with graph.inserting_before(first):
        node = graph.call_function(_AGREE, (sent, launches.digest(), launches.encode(), seconds))
    # The same fake tensor, so that passes which look at storages see the view.
    node.meta["val"] = sent.meta.get("val")
    first.replace_input_with(sent, node)
    return node
