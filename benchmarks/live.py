"""Compare planned peaks of live bytes with those of the code that Inductor generates.

    python -m benchmarks.live                         on the CPU
    python -m benchmarks.live --device cuda           on fake CUDA: a torch with CUDA, and triton
    python -m benchmarks.live --choices --device cuda    of what stays, under two bounds
    python -m benchmarks.live --steps --device cuda      of backward with the optimizer's updates

Graphs are those of :mod:`.kernels`, each in its own order, merged and scheduled, and under bounds
on memory. The planned peak is that of the report; ``unfused`` is the peak of the same order if
every operator made its result. The true one is counted: Inductor's code runs on tensors without
data and without its kernels (``test/helpers/generated_memory.py``).

With ``--choices``, ``ReshardAfterForward("auto", activations=True)`` chooses in the joint graph, a
third and two thirds of the way from the peak with nothing kept to that with everything kept.
torch's default partitioner cuts the graph, both halves are scheduled under the bound, with one
bucket per unit. The row ``choice`` has the larger peak of both halves, with the shards and
gradients that the half does not read, against the larger true one. ``searched`` is the peak of
the chosen one among the few orders that the search makes. The device is torch's own.

With ``--steps``, the graph is backward of a planned step of LLaMA-3 8B, with clipping and AdamW's
updates (:func:`.train_step`).

Exit status: 0, or 1 if a planned peak is not within 0.97 to 1.05 of the true one.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.fx as fx
from generated_memory import generated_code, live_of
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch._functorch.partitioners import default_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_ext_bucketing as teb
from torch_ext_bucketing._torch.aot import Partitioner, stage_of
from torch_ext_bucketing._torch.inductor import NO_HOLDS, CustomGraphPass
from torch_ext_bucketing._torch.without_device import fake_tensors
from torch_ext_bucketing.explain import explain
from torch_ext_bucketing.fsdp.units import Units
from torch_ext_bucketing.graph.liveness import donated_by_autograd
from torch_ext_bucketing.graph.nodes import tag_of
from torch_ext_bucketing.graph.sizes import SizeHints
from torch_ext_bucketing.passes import backends
from torch_ext_bucketing.passes.base import Compilation, GraphPass
from torch_ext_bucketing.passes.pin import pin_order
from torch_ext_bucketing.planner.cost.cost import Costs
from torch_ext_bucketing.planner.cost.machine import job_machine
from torch_ext_bucketing.planner.keep.keep import KeepPlanner
from torch_ext_bucketing.planner.keep.partitioned import PartitionedModel
from torch_ext_bucketing.planner.schedule.model import peak_bytes
from torch_ext_bucketing.reports.base import columns
from torch_ext_bucketing.reports.planner import KeepReport

from . import graphs
from .command import document_of, matching, parser_of_graphs, write_results
from .graphs import Graph, load
from .keep import UNITS, Sharded
from .kernels import CONFIGS, NAMES
from .memory import by_hand
from .models import Llama, LlamaConfig
from .parallel import Layout, end_world, start_world
from .serialize import from_data, to_data
from .step import loss_of
from .tracing import copy_graph

GIB = 2**30
WAYS: dict[str, Callable[[], list[GraphPass]]] = {
    "as given": lambda: [teb.Schedule([teb.MaxComputeRun(1000)])],
    "scheduled": lambda: [teb.BucketAndSchedule([teb.Overlap()])],
    "bound 1.0": lambda: [teb.BucketAndSchedule([teb.Overlap(), teb.PeakMemory(ratio=1.0)])],
    "bound 1.02": lambda: [teb.BucketAndSchedule([teb.Overlap(), teb.PeakMemory(ratio=1.02)])],
}
"""Passes after the partitioner, by name."""
LOW, HIGH = 0.97, 1.05
STEP_RANKS, STEP_TOKENS = 2, 512
"""Ranks and tokens of a planned step: so few that its peak is in the updates."""

TRANSFORMERS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"first_k_dense_replace": 1},
    "gpt_oss": {"num_local_experts": 32},
    "mixtral": {},
    "qwen3_moe": {},
}
"""Configurations of transformers, by ``model_type``: fields that are not the default."""


class _Passes(CustomGraphPass):
    """The passes of a backend, on the graph that Inductor lowers."""

    def __init__(self, run: Callable[[fx.Graph], None]) -> None:
        self._run = run

    def __call__(self, graph: fx.Graph) -> None:
        self._run(graph)

    def uuid(self) -> None:
        return None


def measured(graph: Graph, passes: list[GraphPass]) -> dict[str, Any]:
    """Return a row: the planned peak, the one without fusion, and the true one."""
    hints = graph.config.size_hints
    backend = backends.backend("inductor", passes, size_hints=hints)
    compilation = backend.pipeline.compilation(size_hints=hints, fuses=True)
    return compiled(graph.gm, graph.mode, graph.phase == "backward", backend, compilation)


def compiled(
    gm: fx.GraphModule,
    mode: FakeTensorMode,
    is_backward: bool,
    backend: backends.BucketingBackend,
    compilation: Compilation,
) -> dict[str, Any]:
    """Compile a graph with the passes of ``backend``; return its row."""
    run = backends._InductorPass(backends._Compile(backend, compilation), "forward_backward")
    unfused = []

    def pinned(g: fx.Graph) -> int:
        unfused.append(peak_bytes(g, size_hints=compilation.size_hints))
        return pin_order(g)

    placeholders = gm.graph.find_nodes(op="placeholder")
    donated = donated_by_autograd(gm.graph)
    inputs = [node.meta["val"] for node in placeholders]
    kept = [not donated(node) for node in placeholders]
    options = {"post_grad_custom_post_pass": _Passes(run), "compile_threads": 1, **NO_HOLDS}
    with mock.patch.object(backends, "pin_order", pinned), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = generated_code(gm, mode, is_backward, options)
    more = compilation.baseline.external_live_bytes  # no graph's own
    planned = compilation.report.schedules[-1].peak_bytes[1] - more
    true = live_of(code, inputs, kept).peak
    return {"planned": planned, "unfused": unfused[0], "true": true, "more": more}


@dataclass
class Joint:
    """A joint graph, the number of its results that are forward's, and the units of its model."""

    graph: fx.Graph
    mode: FakeTensorMode
    outputs: int
    units: Units
    hints: int | None = None

    def planner(self) -> KeepPlanner:
        """Return the planner that chooses what stays."""
        costs = Costs(job_machine().for_backend(fuses=True), SizeHints.of(self.hints))
        return KeepPlanner(PartitionedModel(self.graph, costs, self.units, activations=True))


def joint_of(name: str, layers: int, device: str) -> Joint:
    """Return a model's joint graph on ``device``."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    if name in TRANSFORMERS:
        return _joint_of_transformers(name, layers, device, mode)
    with mock.patch.object(graphs, "FakeTensorMode", return_value=mode):  # of both halves
        sharded = Sharded(name, layers, device)
    return Joint(sharded.joint, mode, sharded.outputs, UNITS, sharded.size_hints)


class _Caught(BaseException):
    """Ends a compile with data of a graph; not an Exception, which explain would report."""


def caught(step: type[GraphPass], stage: str, compiles: Callable[[], Any]) -> dict[str, Any]:
    """Return data of the graph of ``stage`` that the pass ``step`` gets; other graphs pass it."""

    def catch(self: GraphPass, graph: fx.Graph, compilation: Compilation) -> None:
        if stage_of(graph) == stage:
            raise _Caught(to_data(fx.GraphModule(graph.owning_module, graph)))

    with mock.patch.object(step, "run", catch), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compiles()
        except _Caught as graph:
            return graph.args[0]
    raise AssertionError(f"{step.__name__} got no {stage} graph")


def loaded(data: dict[str, Any], mode: FakeTensorMode, device: str) -> fx.GraphModule:
    """Load a graph that was caught onto ``device``."""
    return from_data(data, mode, torch.device(device, None if device == "cpu" else 0))


def _joint_of_transformers(name: str, layers: int, device: str, mode: FakeTensorMode) -> Joint:
    config = {"model_type": name, "num_hidden_layers": layers} | TRANSFORMERS[name]
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder, "config.json")).write_text(json.dumps(config), encoding="utf-8")
        explained = partial(explain, f"hf:{file}", goal="speed", sequence=4096)
        explained = partial(explained, mesh={"fsdp": 64}, memory_gib=1000)
        end_world()
        data = caught(teb.ReshardAfterForward, "joint", explained)
    start_world(Layout(fsdp=64))
    graph = loaded(data, mode, device).graph
    (output,) = graph.find_nodes(op="output")
    outputs = sum(isinstance(d, PlainAOTOutput) for d in output.meta["desc"])
    tags = filter(None, map(tag_of, graph.nodes))
    return Joint(graph, mode, outputs, Units.guessed(f for tag in tags for f in tag.fqns))


def of_choices(name: str, layers: int, device: str) -> list[dict[str, Any]]:
    """Return the rows of one model's choices."""
    joint, rows = joint_of(name, layers, device), []
    planner = joint.planner()
    low, high = planner.reference_bytes, by_hand(planner, planner.candidates).peak_bytes
    for part in (1, 2):
        memory = teb.PeakMemory(gib=(low + (high - low) * part / 3) / GIB)
        passes = [teb.BucketByUnit(joint.units), teb.Schedule([teb.Overlap(), memory])]
        reshard = teb.ReshardAfterForward(
            "auto", activations=True, memory=memory, units=joint.units
        )
        backend = backends.backend("inductor", passes, size_hints=joint.hints)
        compilation = backend.pipeline.compilation(size_hints=joint.hints, fuses=True)
        gm = fx.GraphModule({}, copy_graph(joint.graph))
        reshard.run(gm.graph, compilation)
        (report,) = (r for r in compilation.report.rewrites if isinstance(r, KeepReport))
        inputs = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
        halves = Partitioner(default_partition)(gm, inputs, num_fwd_outputs=joint.outputs)
        way = f"{part}/3, {len(report.kept)} of {len(report.units)} kept"
        found = []
        for phase, half in zip(("forward", "backward"), halves, strict=True):
            row = compiled(half, joint.mode, phase == "backward", backend, compilation)
            found.append({"graph": f"{name}.{phase}", "way": way, **row})
        both = {k: max(r[k] + r["more"] for r in found) for k in ("unfused", "true")}
        planned = compilation.report.peak_bytes
        choice = {"graph": name, "way": f"choice, {way}", "planned": planned, **both}
        choice["bound"] = memory.limit_bytes(planner.reference_bytes)
        choice["searched"] = report.peak_bytes[1]
        rows += [choice, *found]
    return rows


def of_steps(layers: int, device: str) -> list[dict[str, Any]]:
    """Return the rows of a planned step's backward."""
    end_world()
    start_world(Layout(fsdp=STEP_RANKS))
    mesh = init_device_mesh("cpu", (STEP_RANKS,))
    config = LlamaConfig(layers=layers, seq=STEP_TOKENS)
    torch._dynamo.reset()
    plans = mock.patch.object(backends.BucketingBackend, "only_plans", True)
    with plans, fake_tensors("H100"):
        model = teb.data_parallel(Llama(config), mesh)
        units = ["tok_embeddings", *(f"layers.{i}" for i in range(layers)), ""]
        passes = teb.recipe(model, units=units)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        step = teb.train_step(model, optimizer, loss_of, max_norm=1.0, passes=passes)
        tokens = torch.zeros(1, config.seq, dtype=torch.int64)
        data = caught(teb.BucketByUnit, "backward", partial(step, tokens))
    rows = []
    for way, made in WAYS.items():
        mode = FakeTensorMode(shape_env=ShapeEnv())
        backend = backends.backend("inductor", made())
        compilation = backend.pipeline.compilation(fuses=True)
        row = compiled(loaded(data, mode, device), mode, True, backend, compilation)
        rows.append({"graph": f"llama3_8b_fsdp{STEP_RANKS}.backward, AdamW", "way": way, **row})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Render one line per graph and way."""
    head = ["graph", "way", "planned GiB", "true GiB", "ratio", "unfused GiB", "ratio"]
    lines = [[*head, "bound GiB", "searched GiB"]]
    for row in rows:
        true = row["true"]
        line = [row["graph"], row["way"], f"{row['planned'] / GIB:.3f}", f"{true / GIB:.3f}"]
        line += [f"{row['planned'] / true:.3f}", f"{row['unfused'] / GIB:.3f}"]
        more = [f"{row[k] / GIB:.3f}" if k in row else "" for k in ("bound", "searched")]
        lines.append([*line, f"{row['unfused'] / true:.3f}", *more])
    return columns(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = parser_of_graphs("python -m benchmarks.live", __doc__, layers=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--choices", action="store_true", help="of what stays, instead")
    parser.add_argument("--steps", action="store_true", help="of planned steps, instead")
    args = parser.parse_args(argv)
    document = document_of("python -m benchmarks.live", argv)
    document["rows"] = rows = []
    models = [*CONFIGS[:3], *(f"hf_{name}" for name in TRANSFORMERS)]
    for name in matching(parser, models, args.only) if args.choices else ():
        rows += of_choices(name.removeprefix("hf_"), args.layers, args.device)
    rows += of_steps(args.layers, args.device) if args.steps else []
    others = args.choices or args.steps
    for name in () if others else matching(parser, NAMES, args.only):
        for way, passes in WAYS.items():
            graph = load(name, args.layers, device=args.device, quiet=True)
            rows.append({"graph": name, "way": way, **measured(graph, passes())})
    write_results(args.json, document, table(rows))
    return int(any(not LOW <= row["planned"] / row["true"] <= HIGH for row in rows))


if __name__ == "__main__":
    sys.exit(main())
