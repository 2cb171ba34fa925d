"""Compare exposed communication of a whole model's graph, of compiled blocks, and of eager FSDP2.

    python -m benchmarks.block_by_block                         # LLaMA-3 8B on 64 H100
    python -m benchmarks.block_by_block llama3-70b --ranks 128 --sequence 4096

All rows have the cost model's times for kernels and for collectives of a unit. Blocks that are
compiled one by one run between FSDP2's hooks, so they and eager FSDP2 have one schedule, of
:class:`InFSDP2Order`. Inductor fuses the kernels of the blocks, eager FSDP2 does not.

Then Dynamo's compiles of a small model, block by block, are counted by depth.
"""

import argparse
import itertools
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.fx as fx
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_ext_bucketing as teb
from torch_ext_bucketing._torch.aot import stage_of
from torch_ext_bucketing._torch.without_device import OnCpu, fake_tensors
from torch_ext_bucketing.fsdp import fully_shard
from torch_ext_bucketing.graph.edits import ancestors
from torch_ext_bucketing.graph.layout import pack_of
from torch_ext_bucketing.graph.nodes import FSDP_KINDS, kind_of
from torch_ext_bucketing.graph.values import is_move
from torch_ext_bucketing.passes.backends import BucketingBackend
from torch_ext_bucketing.passes.base import Compilation, GraphPass
from torch_ext_bucketing.planner.scheduling import Estimate
from torch_ext_bucketing.recipes import Goal
from torch_ext_bucketing.testing.configured import configured
from torch_ext_bucketing.testing.target import LLAMA3
from torch_ext_bucketing.testing.training import ModelConfig, Transformer

Compiler = Literal["inductor", "aot_eager"]


@dataclass(frozen=True, eq=False, repr=False)
class InFSDP2Order(GraphPass):
    """Move a graph's buckets by unit to where eager FSDP2 launches and awaits its collectives.

    By ``_fsdp_param_group.py`` of torch 2.13 to 2.15, where the host runs ahead::

        forward    ... wait(i) copy_out(i) AG(i + 2) kernels(i) wait(i + 1) ...
        backward   ... wait(i) copy_out(i) AG(i - 1) kernels(i) wait(RS(i + 1)) copy_in(i) RS(i) ...
    """

    stage: ClassVar[Any] = "forward_backward"

    def run(self, graph: fx.Graph, compilation: Compilation) -> None:
        kinds = {kind: [n for n in graph.nodes if kind_of(n) == kind] for kind in FSDP_KINDS}
        gathers, reductions = kinds["all_gather"], kinds["reduce_scatter"]
        waits = {wait: start for start in gathers for wait in start.users}
        copies: dict[fx.Node, list[fx.Node]] = {wait: [] for wait in waits}
        copied_from = {wait: wait for wait in waits}
        reduced = {wait: None for start in reductions for wait in start.users}
        for node in graph.nodes:
            wait = copied_from.get(next(iter(node.all_input_nodes), None))
            if wait is not None and is_move(node):
                copied_from[node] = wait
                copies[wait].append(node)
            elif node.op != "output" and not reduced.keys().isdisjoint(node.all_input_nodes):
                reduced[node] = None
        # These run where another node needs them. All others keep their order.
        late = {*ancestors(gathers), *gathers, *copied_from, *reduced}
        before: dict[fx.Node, list[fx.Node]] = {}
        for last, start in itertools.pairwise(reductions):
            late.add(pack := pack_of(start) or start)
            before[pack] = [*last.users]
        ahead = 1 if stage_of(graph) == "backward" else 2
        used = [waits[n] for n in _placed(graph, late, {}, {}) if n in waits]
        after = {graph.find_nodes(op="placeholder")[-1]: used[:ahead]}
        for start, following in zip(used, [*used[ahead:], *[None] * ahead], strict=True):
            (wait,) = start.users
            after[wait] = [*copies[wait], *([following] if following else [])]
        (output,) = graph.find_nodes(op="output")
        for node in _placed(graph, late, before, after):
            if node is not output:
                output.prepend(node)


Places = Mapping[fx.Node, Sequence[fx.Node]]


def _placed(graph: fx.Graph, late: Container[fx.Node], before: Places, after: Places) -> Places:
    """Return the nodes in order, with others right before and after some of them."""
    placed: dict[fx.Node, Sequence[fx.Node]] = {}

    def place(node: fx.Node) -> None:
        if node not in placed:
            for need in (*before.get(node, ()), *node.all_input_nodes):
                place(need)
            placed[node] = ()
            for following in after.get(node, ()):
                place(following)

    for node in graph.nodes:
        if node not in late:
            place(node)
    return placed


class Planner(BucketingBackend):
    """Plans graphs, and compiles none."""

    only_plans = True


def estimate(
    target: str, ranks: int, sequence: int, compiler: Compiler, goal: Goal | None
) -> tuple[float, float]:
    """Return milliseconds of a step, and of communication in it that nothing hides.

    ``goal`` is that of a whole model's recipe; None: FSDP2's schedule.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    with fake_tensors("H100"):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        with OnCpu():
            model, (tokens,), _ = configured(target, mesh, sequence, 1)
        passes = teb.recipe(model, goal or "parity")
        if goal is None:
            passes[-1] = InFSDP2Order()
        planner = Planner(compiler, [*passes, Estimate()], model)

        def step(model: Any, tokens: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())

        torch.compile(step, backend=planner)(model, tokens).backward()
    dist.destroy_process_group()
    graphs = planner.last_report().estimates
    return sum(g.step_ms for g in graphs), sum(sum(g.exposed_ms.values()) for g in graphs)


def compiles(blocks: int) -> int:
    """Count the graphs that Dynamo compiles of a model whose blocks are compiled one by one."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh, model = init_device_mesh("cpu", (8,)), Transformer(ModelConfig(layers=blocks))
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)(torch.zeros(1, 16, dtype=torch.long)).sum().backward()
    dist.destroy_process_group()
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


ROWS: dict[str, tuple[Compiler, Goal | None]] = {
    "whole model, parity": ("inductor", "parity"),
    "whole model, speed": ("inductor", "speed"),
    "block by block": ("inductor", None),
    "eager FSDP2": ("aot_eager", None),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", nargs="?", choices=LLAMA3, default="llama3-8b")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--blocks", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS))
    args = parser.parse_args(argv)
    print(f"{'':24}{'step, ms':>12}{'exposed, ms':>12}")
    for row in args.rows:
        torch._dynamo.reset()
        step, exposed = estimate(args.target, args.ranks, args.sequence, *ROWS[row])
        print(f"{row:24}{step:12.1f}{exposed:12.1f}", flush=True)
    for blocks in args.blocks:
        print(f"{blocks} blocks: Dynamo compiles {compiles(blocks)} graph(s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
