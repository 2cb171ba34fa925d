"""Park saved activations in host memory between forward and backward.

torch's partitioner inserts the copies for nodes that are marked on the joint graph. Afterwards the
waits are changed, in both graphs::

    before    forward    x = relu(y)  z = mm(x, w)                                     saved: x
              backward   g_y = threshold_backward(g, x)

    torch's   forward    x = relu(y)  z = mm(x, w)  c = offload(x)  h = wait_tensor(c, x)
              backward   r = reload(h)  x = wait_tensor(r, h)       saved: h
                         g_y = threshold_backward(g, x)

    after     forward    ...                                h = wait_tensor(c, None, x)
              backward   ...         x = wait_tensor(r, None, h)

torch's wait empties the memory of the copy's source. That is a wrong result where a view of it is
saved, too, where a compiler moves a reader after the wait, and in a second backward. As the third
argument, the source stays until its last reader has run and the copy has arrived, and is then freed
like any other value.

Without a pass that schedules, each copy's wait follows it at once: memory is freed, and the step
waits for all copies.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.fx as fx

from .._torch import aot as _aot
from .._torch.aot import import_copies, mark_parked
from .._torch.dynamo import module_of
from ..fqns import canonical_fqn
from ..fsdp.tagging import parameter_chains
from ..graph.nodes import TO_HOST, host_stream, is_host_wait, is_view, nbytes_of, pinned_bytes
from ..reports.base import LeftAlone, size_text
from ..reports.compile import RewriteReport
from .base import PARKED, Compilation, GraphPass


@dataclass(frozen=True)
class ParkReport(RewriteReport):
    """The bytes of the activations that a forward graph parks, by node; modules without any."""

    rewrite = heading = "parked in host memory"
    parked: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of pinned host memory on each rank, between forward and backward."""
        return sum(map(pinned_bytes, self.parked.values()))

    def _lines(self) -> list[str]:
        number = len(self.parked)
        return [f"{number} activation(s), {size_text(self.nbytes)}"] if number else []


@dataclass(frozen=True, eq=False, repr=False)
class Park(GraphPass):
    """Park the saved activations of some modules in host memory; see :mod:`.passes.park`.

    Bits do not change. Parked are the activations that the partitioner saves, except views, results
    of operators with several ones, tensors with gaps, of sizes that are not known at compile time,
    and results of the model. Pinned host memory holds them from forward to backward; on CPU ranks
    they are copied, too. A pass that schedules, such as ``Schedule``, hides the copies under
    computation; without one the step waits for each. ``ReshardAfterForward("auto",
    memory=PeakMemory(gib=70, host_gib=200))`` chooses which to park.

    ``modules`` are FQNs; activations of modules below them count. ``""`` stands for all. torch 2.13
    and 2.15 have the copies; another torch gets an ``UnknownTorchError``.
    """

    stage = "joint"
    provides = frozenset({PARKED})
    modules: Iterable[str]

    def __post_init__(self) -> None:
        if isinstance(self.modules, str):
            raise TypeError(f"modules must be a list of FQNs, got the string {self.modules!r}")
        self._set(modules=tuple(self.modules))
        import_copies()

    def run(self, graph: fx.Graph, compilation: Compilation) -> None:
        if _aot.stage_of(graph) == "inference":
            return
        chosen: dict[str, list[fx.Node]] = {name: [] for name in self.modules}
        for node in could_park(graph):
            fqn = canonical_fqn(module_of(node) or "")
            for name, nodes in chosen.items():
                if not name or fqn == name or fqn.startswith(f"{name}."):
                    nodes.append(node)
        for node in dict.fromkeys(n for nodes in chosen.values() for n in nodes):
            mark(node)
        left_alone = [LeftAlone((n,), "no activation") for n, nodes in chosen.items() if not nodes]
        if left_alone:
            compilation.report.rewrites.append(ParkReport({}, left=tuple(left_alone)))

    def finish(self, graph: fx.Graph, compilation: Compilation) -> None:
        finish(graph, compilation)


def could_park(graph: fx.Graph) -> list[fx.Node]:
    """List the activations of a joint graph that can be parked, if backward reads them."""
    # Results of the model are among them; the partitioner leaves these alone.
    chains = {n for chain in parameter_chains(graph).values() for n in chain}
    return [n for n in _aot.Halves(graph).forward if n not in chains and _can_be_copied(n)]


def _can_be_copied(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or node.op != "call_function":
        return False
    is_static = all(isinstance(n, int) for n in (*value.shape, *value.stride()))
    plain = not is_view(node) and node.target is not operator.getitem
    return plain and is_static and value.numel() > 0 and value.is_contiguous()


def mark(node: fx.Node) -> None:
    """Mark a node to be parked, and its views to be made again after the copy back."""
    mark_parked(node)
    stack = [node]
    while stack:
        for user in stack.pop().users:
            view = user.op == "call_function" and is_view(user) and not _aot.in_backward(user)
            if view and isinstance(user.meta.get("val"), torch.Tensor):
                stack.append(user)
                if "recompute" not in user.meta:
                    _aot.mark_recompute(user)


def finish(graph: fx.Graph, compilation: Compilation) -> None:
    """Change the waits of a graph after the partitioner, and report its parked activations."""
    waits = [n for n in graph.nodes if is_host_wait(n)]
    for wait in waits:
        if len(wait.args) == 2:
            start, source = wait.args
            wait.args = (start, None, source)
    copied = [n.args[0] for n in graph.nodes if host_stream(n) == TO_HOST]
    if copied:
        parked = {n.name: nbytes_of(n) for n in copied if isinstance(n, fx.Node)}
        compilation.report.rewrites.append(ParkReport(parked))
