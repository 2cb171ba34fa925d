"""Explain a model's buckets and schedule, in one process, without weights, GPUs or ranks.

Dynamo, AOTAutograd and Inductor trace the model on fake tensors in a fake process group, and stop
where the graphs are planned. The report is that of any compile.
"""

from __future__ import annotations

import gc
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.fx as fx
import torch.nn as nn
import torch.utils._pytree as pytree
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ._torch import paused_gc, with_room_for_frames
from ._torch.without_device import OnCpu, fake_tensors, reads_values
from .fsdp.shard import data_parallel
from .graph.sizes import GivenHints
from .passes.backends import BucketingBackend
from .passes.base import Compilation, GraphPass
from .planner.cost.machine import Machine, job_machine
from .planner.resharding import ReshardAfterForward
from .planner.schedule.picture import Drawn
from .planner.schedule.policy import PeakMemory
from .planner.step_memory import state_bytes
from .recipes import Goal, recipe
from .reports.compile import CompileReport
from .testing.configured import Rule, configured, state_of
from .testing.target import LLAMA3, TargetError, build, call, load_target
from .testing.training import ModelConfig, Transformer


@dataclass
class Explanation:
    """The result of :func:`explain`: passes, report, and the timelines before and after them."""

    passes: list[GraphPass]
    report: CompileReport
    drawn: list[Drawn]
    tokens: int = 0
    """The number of a rank's token ids, or of its inputs' elements without the last dimension."""
    ranks: int = 1
    copies: int = 1
    """Number of ranks that share the same inputs, by tensor parallelism."""
    state_bytes: int = 0
    """Bytes of the optimizer's state on a rank, beside the graphs."""

    @property
    def peak_bytes(self) -> int:
        """The step's peak on a rank, with the optimizer's state."""
        return self.state_bytes + self.report.peak_bytes


@with_room_for_frames
@paused_gc()
def explain(
    target: str | None = None,
    *,
    goal: Goal = "parity",
    reduce: Literal["all_to_all"] | None = None,
    world_size: int = 8,
    mesh: Mapping[str, int] | None = None,
    sequence: int | None = None,
    batch: int = 1,
    optimizer: Rule = "adamw",
    memory_gib: float | None = None,
    host_gib: float | None = None,
    draw: bool = False,
    curve: bool | None = None,
    machine: Machine | None = None,
    size_hints: GivenHints = None,
    backend: Literal["inductor", "aot_eager"] = "inductor",
    on_cpu: bool = False,
) -> Explanation:
    """Plan a model's forward and backward with :func:`.recipe`'s passes on a fake process group.

    No tensor has values: those that the target makes are fake, on any device that it names, and
    nothing runs. A rank's attention kernel is that of the machine's GPU.

    Args:
        target: ``"module:function"`` that returns the model and its inputs, and optionally a
            ``loss(output, inputs)`` that is compiled with it. A function with a parameter gets the
            mesh. Or a name for :func:`.configured`; None: the demo's model.
        goal: see :func:`.recipe`, also for ``reduce``, ``memory_gib`` and ``machine``.
        world_size: number of ranks, without ``mesh``.
        mesh: sizes of the mesh's dimensions, some of :data:`.MESH`; None: all ranks are
            ``"fsdp"``.
        sequence: tokens of a sequence, and ``batch`` sequences of a rank, of a configured model.
        optimizer: whose state counts with ``memory_gib``.
        host_gib: with ``memory_gib``: see :class:`.PeakMemory`.
        draw: whether to keep the timelines of the graphs.
        curve: whether to plan under other bounds, too, with ``memory_gib``; None: if ``draw``.
        size_hints: see :func:`.backend`.
        backend: the job's; its passes make the graph that is planned.
        on_cpu: use the operators of CPU ranks; times stay those of the machine.

    Raises:
        TargetError: the target can't be found, called or traced, an option is invalid, or a
            process group exists already.
    """
    if host_gib is not None and memory_gib is None:
        raise TargetError("host memory belongs to a bound: give memory_gib (--memory-gib), too")
    make = maker_of(target)
    if make is not configured and (sequence, batch) != (None, 1):
        raise TargetError(
            f"sequence and batch (--sequence, --batch) are for named models and hf:, and {target} "
            "makes its inputs itself"
        )
    if dist.is_initialized():
        raise TargetError(
            "torch.distributed is initialised already; explain starts a fake process group of its "
            "own: importing the module of the target must not start one"
        )
    machine = job_machine() if machine is None else machine
    sizes = {"fsdp": world_size} if mesh is None else dict(mesh)
    ranks = math.prod(sizes.values())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        _hint_at_weights(str(target))
        with fake_tensors(None if on_cpu else machine.name):
            arguments: tuple[Any, ...] = ()
            if _takes_mesh(make):
                over = init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))
                arguments = (target, over, sequence, batch) if make is configured else (over,)
            with OnCpu():
                model, inputs, loss = (*_build(make, str(target), arguments), None)[:3]
            drawn: list[Drawn] = []
            backend_machine = machine.for_backend(fuses=backend == "inductor")
            before, after = ([_Draw(drawn, v, backend_machine)] * draw for v in ("before", "after"))
            try:
                bound: dict[str, Any] = {}
                per = state_of(model, optimizer)
                if memory_gib is not None:
                    bound["memory"] = PeakMemory(gib=memory_gib, host_gib=host_gib)
                    bound["state_bytes_per_parameter"] = per
                passes = recipe(model, goal, machine=machine, reduce=reduce, **bound)
                passes = [
                    replace(p, curve=p.auto and (draw if curve is None else curve))
                    if isinstance(p, ReshardAfterForward)
                    else p
                    for p in passes
                ]
                planner = _Planner(
                    backend, [*before, *passes, *after], model, size_hints=size_hints
                )
            except (ValueError, TypeError) as error:
                raise TargetError(f"recipe(model, {goal!r}): {error}") from error
            _trace(model, inputs, loss, planner)
        if not planner.reports:
            raise TargetError("the model compiled to no graph: nothing in it was traced")
        # A graph break makes several reports.
        report = CompileReport.joined(planner.reports)
        state, copies = state_bytes(model, None, per), sizes.get("tp", 1)
        return Explanation(passes, report, drawn, _tokens(inputs), ranks, copies, state)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


_MOST_GIB = 1


def _hint_at_weights(target: str) -> None:
    """Warn of parameters with values, which importing the target's module has made."""
    parameters = (p for p in gc.get_objects() if type(p) is nn.Parameter and not p.is_meta)
    gib = sum(p.nbytes for p in parameters) / 2**30
    if gib > _MOST_GIB:
        warnings.warn(
            f"importing {target} made {gib:.1f} GiB of parameters with values. A model that its "
            "function builds takes no memory here, as all that it makes is fake",
            stacklevel=3,
        )


def _build(make: Callable[..., Any], name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    try:
        return build(make, name, *arguments, loss=True)
    except TargetError as error:
        if not reads_values(error):
            raise
        raise TargetError(
            f"{error}\n{name} reads a tensor's value, and no tensor has values here: leave out "
            "what loads or checks weights"
        ) from error


def _takes_mesh(make: Callable[..., Any]) -> bool:
    """Return whether a function has a parameter without a default."""
    parameters = inspect.signature(make).parameters.values()
    return any(p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in parameters)


def maker_of(target: str | None) -> Callable[..., Any]:
    """Return the function that makes the model of a target, see :func:`explain`."""
    if target is None:
        return _demo_model
    return configured if target in LLAMA3 or target.startswith("hf:") else load_target(target)


def _tokens(inputs: Any) -> int:
    tensors = [t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor)]
    ids = [t.numel() for t in tensors if not t.is_floating_point()]
    return (ids or [t[..., 0].numel() for t in tensors if t.dim()] or [0])[0]


class _Planner(BucketingBackend):
    only_plans: ClassVar[bool] = True


def _trace(model: nn.Module, inputs: Any, loss: Any, planner: BucketingBackend) -> None:
    """Trace a step forward and backward."""

    def step(model: nn.Module, inputs: Any) -> Any:
        output = call(model, inputs)
        return output if loss is None else loss(output, inputs)

    try:
        compiled = torch.compile(model if loss is None else step, backend=planner)
        output = call(compiled, inputs) if loss is None else compiled(model, inputs)
        output = getattr(output, "loss", None) or output
        results = pytree.tree_leaves(output)
        losses = [r.sum() for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        if losses:
            torch.stack(losses).sum().backward()
    except Exception as error:
        remedy = (
            "a job's torch.compile fails so, too: leave what it names out of the compiled model"
        )
        if reads_values(error):
            remedy = (
                "the model reads a tensor's value where torch.compile breaks the graph, and no "
                "tensor has values here: TORCH_LOGS=graph_breaks names the place"
            )
        raise TargetError(
            f"tracing the model failed: {type(error).__name__}: {error}\n{remedy}"
        ) from error


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
