"""Divide live bytes among their purposes: parameters, gradients, activations, buckets, and so on.

Each storage has one part, by the nodes that make and read it::

    forward    w -> cast -> pack -> AG -> wait -> clone -> mm -----------> output
               |    '----- buckets -----------'   gathered '- activations: backward reads it
               parameters

    backward   mm -> view -> pack -> RS -> wait -> view -> output
               gradients     buckets '--- gradients: the caller keeps them

A collective in no bucket has no pack: its result is ``gathered``, or gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from ..._torch.aot import from_forward
from ...fsdp.rank_order import SUM
from ...fsdp.tagging import FqnOf, gradients_of, named_inputs
from ...graph.analysis import GraphAnalysis
from ...graph.liveness import Storages, beside_bytes
from ...graph.nodes import is_collective
from ...graph.tags import is_bucket, replaced_kind, tag_of
from ...graph.values import CONSTANTS, SCALES, is_move

PARTS = {
    "parameters": "shards of parameters",
    "state": "the optimizer's state",
    "gradients": "gradients of parameters, before and after their reduction",
    "gathered": "unsharded parameters",
    "activations": "inputs, what forward saves for backward, and what backward computes again",
    "buckets": "packed buffers of collectives, and what is cast for them",
    "workspace": "values that a graph makes and frees itself, and cuBLAS's workspaces",
}
"""The parts, from those that last longest, with what each contains."""


@dataclass(frozen=True)
class Parts:
    """The part of each storage of a graph.

    Args:
        of_storage: by number of the storage.
        of_node: by name of the node, for nodes with a part of their own.
        beside: bytes that are live all the time and in no storage.
    """

    of_storage: Sequence[str]
    of_node: Mapping[str, str]
    beside: Mapping[str, int]

    @staticmethod
    def of(
        analysis: GraphAnalysis, fqn_of: FqnOf | None = None, saved: Mapping[str, str] | None = None
    ) -> Parts:
        """Find the parts of a forward, backward or inference graph with tags.

        Args:
            analysis: of the graph.
            fqn_of: names parameters among the inputs, see :func:`.tag_joint_graph`.
            saved: for a backward graph, :attr:`of_node` of its forward graph.
        """
        live, part = analysis.liveness, _parts_of_nodes(analysis, fqn_of, saved or {})
        of_storage = [""] * len(live.size)
        for node, storages in live.of_node.items():
            for s in storages:
                of_storage[s] = of_storage[s] or part.get(node, "")
        # Views of a bucket are of its buffer.
        for start in filter(is_bucket, part):
            for s in live.of_node[start]:
                of_storage[s] = part[start] if s in live.kept else "buckets"
            for s in live.of_node[start.all_input_nodes[0]]:
                of_storage[s] = "buckets"
        rest = "workspace" if analysis.stage == "backward" else "activations"
        for s, found in enumerate(of_storage):
            of_storage[s] = found or (rest if s in live.kept else "workspace")
        beside = beside_bytes(analysis.graph)
        outside = {"parameters": analysis.external_live_bytes - beside, "workspace": beside}
        return Parts(of_storage, {n.name: p for n, p in part.items()}, outside)

    def profile(self, live: Storages, order: Sequence[int]) -> dict[str, list[int]]:
        """Return, for each part, the bytes live while each node of ``order`` runs.

        They add up to :meth:`.Storages.profile`.
        """
        size, left, of_storage = live.size, list(live.uses), self.of_storage
        now = dict.fromkeys(PARTS, 0) | dict(self.beside)
        made = set(itertools.chain.from_iterable(live.allocates))
        for s, part in enumerate(of_storage):
            now[part] += 0 if s in made else size[s]
        found: dict[str, list[int]] = {part: [] for part in PARTS}
        for i in order:
            for s in live.allocates[i]:
                now[of_storage[s]] += size[s]
            for part, nbytes in now.items():
                found[part].append(nbytes)
            for s in live.touches[i]:
                left[s] -= 1
                if not left[s]:
                    now[of_storage[s]] -= size[s]
        return found


def _parts_of_nodes(
    analysis: GraphAnalysis, fqn_of: FqnOf | None, saved: Mapping[str, str]
) -> dict[fx.Node, str]:
    graph, part = analysis.graph, dict[fx.Node, str]()
    parameters = set(named_inputs(graph, fqn_of).values())
    for node in analysis.nodes:
        given = {part.get(n) for n in node.all_input_nodes if n.target not in CONSTANTS}
        if node.op == "placeholder":
            other = saved.get(node.name, "activations")
            part[node] = "parameters" if node in parameters else other
        elif replaced_kind(node) == "all_gather":
            if tag_of(node) is not None:
                part[node] = "gathered"
        elif given and given <= {"parameters", "gathered"} and is_move(node):
            part[node] = "gathered"
        elif analysis.stage == "backward" and from_forward(node):
            part[node] = "activations"
    gathers = [n for n, found in part.items() if found == "gathered" and is_collective(n)]
    for node in _back([n for start in gathers for n in start.all_input_nodes], _fills):
        if node.op != "placeholder":
            part[node] = "buckets"
    for node in _back([n for n, _ in gradients_of(graph, fqn_of)], _keeps_gradient):
        if node.op != "placeholder":
            part[node] = "gradients"
    return part


def _back(nodes: Iterable[fx.Node], goes_on: Callable[[fx.Node], bool]) -> dict[fx.Node, None]:
    """Collect ``nodes`` and, from each node where ``goes_on`` is true, its inputs in turn."""
    found, stack = dict[fx.Node, None](), list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found[node] = None
            stack += node.all_input_nodes if goes_on(node) else ()
    return found


def _fills(node: fx.Node) -> bool:
    return is_move(node) or node.target is torch.ops.aten.copy_.default


def _keeps_gradient(node: fx.Node) -> bool:
    """Return whether a gradient's bytes or their sum over ranks go through ``node``."""
    scales = node.target in SCALES and len(node.all_input_nodes) == 1
    return is_move(node) or is_collective(node) or scales or node.target is SUM
