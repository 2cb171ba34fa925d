"""Explain a model's buckets and schedule, in one process with a fake process group.

The model is compiled, forward and backward, and the report is that of any compile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
import torch.fx as fx
import torch.nn as nn
import torch.utils._pytree as pytree
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from .fqns import format_names
from .fsdp.shard import data_parallel
from .graph.sizes import GivenHints
from .passes.backends import backend
from .passes.base import GraphPass
from .passes.compilation import Compilation
from .planner.cost.machine import Machine, job_machine
from .planner.resharding import ReshardAfterForward
from .planner.schedule.memory import PeakMemory
from .planner.schedule.plot import Drawn
from .recipes import Goal, recipe
from .reports.compile import CompileReport
from .testing.target import TargetError, build, call, load_target
from .testing.training import ModelConfig, Transformer


@dataclass
class Explanation:
    """The result of :func:`explain`: passes, report, and the timelines before and after them."""

    passes: list[GraphPass]
    report: CompileReport
    drawn: list[Drawn]


def explain(
    target: str | None = None,
    *,
    goal: Goal = "parity",
    reduce: Literal["all_to_all"] | None = None,
    world_size: int = 8,
    memory_gib: float | None = None,
    host_gib: float | None = None,
    draw: bool = False,
    machine: Machine | None = None,
    size_hints: GivenHints = None,
) -> Explanation:
    """Compile a model's forward and backward with :func:`.recipe`'s passes on a fake process group.

    Args:
        target: ``"module:function"`` that returns the model and its inputs; None: the demo's model,
            sharded over all ranks.
        goal: see :func:`.recipe`, also for ``reduce``, ``memory_gib`` and ``machine``.
        world_size: number of ranks.
        host_gib: with ``memory_gib``: see :class:`.PeakMemory`.
        draw: whether to keep the timelines of the graphs.
        size_hints: see :func:`.backend`.

    Raises:
        TargetError: the target can't be found, called or compiled, an option is invalid, or a
            process group exists already.
    """
    if host_gib is not None and memory_gib is None:
        raise TargetError("host memory belongs to a bound: give memory_gib (--memory-gib), too")
    make = _demo_model if target is None else load_target(target)
    if dist.is_initialized():
        raise TargetError(
            "torch.distributed is initialised already; explain starts a fake process group of its "
            "own: importing the module of the target must not start one"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        model, inputs = build(make, str(target))
        empty = [name for name, p in model.named_parameters() if p.is_meta]
        if empty:
            raise TargetError(
                f"{len(empty)} parameter(s) of the model are on the meta device, and explain runs "
                f"the model: {format_names(empty)}. Build it on the CPU, or after sharding call "
                "model.to_empty(device='cpu')"
            )
        # The graph isn't compiled, but a job's is, by Inductor unless another backend is given.
        machine = (job_machine() if machine is None else machine).for_backend(fuses=True)
        drawn: list[Drawn] = []
        before, after = ([_Draw(drawn, v, machine)] * draw for v in ("before", "after"))
        try:
            memory = None
            if memory_gib is not None:
                memory = PeakMemory(gib=memory_gib, host_gib=host_gib)
            passes = recipe(model, goal, machine=machine, reduce=reduce, memory=memory)
            passes = [
                replace(p, curve=p.auto) if isinstance(p, ReshardAfterForward) else p
                for p in passes
            ]
            all_passes = [*before, *passes, *after]
            compiler = backend("aot_eager", all_passes, model, size_hints=size_hints)
        except (ValueError, TypeError) as error:
            raise TargetError(f"recipe(model, {goal!r}): {error}") from error
        try:
            results = pytree.tree_leaves(call(torch.compile(model, backend=compiler), inputs))
            losses = [r.sum() for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
            if losses:
                torch.stack(losses).sum().backward()
        except Exception as error:
            raise TargetError(
                f"compiling the model or running it failed: {type(error).__name__}: {error}"
            ) from error
        if not compiler.reports:
            raise TargetError("the model compiled to no graph: nothing in it was traced")
        # A graph break makes several reports.
        return Explanation(passes, CompileReport.joined(compiler.reports), drawn)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _demo_model() -> tuple[nn.Module, torch.Tensor]:
    config = ModelConfig()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = data_parallel(
        Transformer(config), mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    return model, torch.zeros(1, config.max_seq, dtype=torch.long)


@dataclass(frozen=True, eq=False, repr=False)
class _Draw(GraphPass):
    """Keeps the timeline of each graph as it is."""

    stage = "forward_backward"
    reads_baseline = True
    drawn: list[Drawn]
    version: str
    machine: Machine

    def run(self, graph: fx.Graph, compilation: Compilation) -> None:
        drawn = Drawn.of(graph, self.version, self.machine, compilation, self.drawn)
        self.drawn.append(drawn)
