"""Schedule steps whose experts' tokens come in two chunks; compare with torchtitan's own order.

    python -m benchmarks.chunks                            DeepSeek-V3 16B, 64 ranks, estimated
    python -m benchmarks.chunks --only 'blocks.*' --layers 4
    python -m benchmarks.chunks --equal                    are weights on 4 ranks the same?

torchtitan's graph trainer cuts the tokens in chunks (``ep_chunk_pass``) and orders the step
(``ep_overlap_schedule_pass``); torch 2.15 and torchtitan 0.3.0. A row is a whole step. Rows differ
in what comes in chunks (blocks or only their mixtures of experts), in the number of ranks that
share the experts (8 are a node), and in what backward recomputes: the whole block, or what
torchtitan does not save by default. Both orders are of one graph with torchtitan's buckets, timed
by :class:`.Timeline` on nodes of 8 H100s; ours may not exceed the peak of torchtitan's. The bound
is the largest of all computation, all communication of the busiest network level, and the longest
path.

With full recomputation torchtitan's pass finds no order, because its regions form a cycle. The row
then shows the order before that pass, and counts in no mean.
"""

import copy
import functools
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
import torch.fx as fx

from benchmarks.eager_parity.rows import Row
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.planner.cost.cost import Costs
from torch_ext_bucketing.planner.cost.machine import H100
from torch_ext_bucketing.planner.schedule.model import Model, model_of
from torch_ext_bucketing.planner.schedule.orders import schedule_model
from torch_ext_bucketing.planner.schedule.policy import Overlap, PeakMemory
from torch_ext_bucketing.planner.schedule.timeline import Timeline
from torch_ext_bucketing.planner.scheduling import schedule
from torch_ext_bucketing.reports.base import columns
from torch_ext_bucketing.testing.ranks import Rank, run_ranks

from .command import add_number, document_of, matching, parser_of_graphs, sayer, write_results
from .parallel import Layout, start_world
from .titan import TitanConfig, build, problem

RANKS = 64
THEIRS = "ep_overlap_schedule_pass"
GIB = 2**30


@dataclass(frozen=True)
class Chunks:
    """The parts that come in chunks.

    Attributes are torchtitan's ``ep_overlap.module_fqn``, the dimension along which tokens are cut,
    the number of ranks that share the experts, and torchtitan's ``memory_policy``.
    """

    modules: str
    dim: Literal["batch", "seq"] = "batch"
    expert: int = 8
    memory: Literal["default", "full"] = "default"

    @property
    def config(self) -> Any:
        """Return the graph trainer's config."""
        from torchtitan.experiments.graph_trainer.configs import (
            EpOverlapConfig,
            GraphTrainerCompileConfig,
        )

        overlap = EpOverlapConfig(enabled=True, chunk_dim=self.dim, module_fqn=self.modules)
        return GraphTrainerCompileConfig(memory_policy=self.memory, ep_overlap=overlap)


_PARTS = {
    "blocks": Chunks("layers.*"),
    "experts": Chunks("layers.*.moe"),
    "experts_seq": Chunks("layers.*.moe", "seq"),
}
CHUNKS: dict[str, Chunks] = {
    f"{part}.ep{expert}{'.recompute' if memory == 'full' else ''}": replace(
        chunks, expert=expert, memory=memory
    )
    for part, chunks in _PARTS.items()
    for expert in (8, 32)
    for memory in ("default", "full")
}


# --- estimated -----------------------------------------------------------------------


def estimate(chunks: Chunks, layers: int) -> dict[str, Any]:
    """Time both orders of a step on the cost model."""
    analysis, names, ordered = traced_step(chunks, layers)
    model = model_of(analysis, Costs(H100, analysis.hints))
    torchtitans = torchtitans_order(model, names)
    most = PeakMemory(gib=torchtitans.peak_bytes / GIB)
    report, found, _ = schedule_model(model, [Overlap(), most], torchtitans.peak_bytes)
    ours = Timeline.of(model, found)
    (output,) = analysis.graph.find_nodes(op="output")
    loss = model.dependencies.nodes.index(output.all_input_nodes[0])
    return {
        "nodes": len(model),
        "ordered": ordered,
        "given_ms": report.step_ms[0],
        "theirs_ms": torchtitans.step_ms,
        "ours_ms": ours.step_ms,
        "forward_ms": [t.end[loss] for t in (torchtitans, ours)],
        "bound_ms": model.paths.bound_ms,
        "peak_gib": [t.peak_bytes / GIB for t in (torchtitans, ours)],
        "chosen": report.chosen,
        "schedule_s": report.seconds,
    }


def traced_step(chunks: Chunks, layers: int) -> tuple[GraphAnalysis, list[str], bool]:
    """Return a step, torchtitan's order of its nodes by name, and whether its pass found that."""
    torch._dynamo.reset()  # attention is compiled while it is traced, for sizes of its own
    start_world(Layout(RANKS, expert=chunks.expert))
    config = TitanConfig(layers=layers)
    given, theirs = orders(config, chunks)
    # What is left unknown is how many tokens ranks send each other.
    tokens = config.batch * config.seq // 2 * config.experts_per_token // chunks.expert
    names = [node.name for node in (theirs or given).graph.nodes]
    return GraphAnalysis(given.graph, tokens), names, theirs is not None


def torchtitans_order(model: Model, names: Sequence[str]) -> Timeline:
    """Time nodes in an order given by their names."""
    index = {node.name: i for i, node in enumerate(model.dependencies.nodes)}
    order = [index[name] for name in names if name in index]
    assert model.dependencies.is_order(order)
    return Timeline.of(model, order)


def orders(config: TitanConfig, chunks: Chunks) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """Return the step's order before and after torchtitan's overlap pass; ``None`` if it fails."""
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed import parallel_dims, utils
    from torchtitan.experiments.graph_trainer.common_utils import (
        maybe_register_blockmask_pytree_node,
    )

    with (
        mock.patch.object(parallel_dims, "device_type", "cpu"),
        mock.patch.object(utils, "_spmd_backend", "partial_dtensor"),
        # The attention of its own that torchtitan chunks has no backward on CPU; none is run.
        mock.patch("torch.nn.attention.flex_attention._validate_device"),
    ):
        model, dims, parallelism = build(config, chunks.expert, "flex", annotate=True)
        model.to_empty(device="cpu")  # no page of it is ever touched
        maybe_register_blockmask_pytree_node()
        shape = (config.batch, config.seq)
        positions = torch.arange(config.seq, dtype=torch.int32).expand(shape)
        extra = {
            "positions": positions,
            "attention_masks": model.get_attention_masks(positions=positions),
        }

        def loss(pred: Any, labels: Any, global_valid_tokens: Any) -> Any:
            loss = cross_entropy_loss(pred, labels, global_vocab_size=model.config.vocab_size)
            return loss / global_valid_tokens

        tokens = torch.zeros(shape, dtype=torch.int64)
        count = torch.tensor(float(RANKS * tokens.numel()))
        traced = trace(model, loss, chunks.config, tokens, tokens.clone(), count, extra)
        listed = graph_passes(traced, model, chunks.config, parallelism, dims)
        names = [name for name, _ in listed]
        at, inputs = names.index(THEIRS), list(traced.example_inputs)
        gm = traced.gm
        for _, one in listed[:at]:
            gm = one(gm, inputs)
        theirs: fx.GraphModule | None = copy.deepcopy(gm)
        try:
            for _, one in listed[at:]:
                theirs = one(theirs, list(inputs))
        except AssertionError as error:
            if str(error) != "stable topological sort failed":
                raise
            theirs = None
        for _, one in listed[at + 1 :]:
            gm = one(gm, inputs)
    return gm, theirs


def trace(model: Any, loss: Callable[..., Any], config: Any, *inputs: Any) -> Any:
    """Return torchtitan's trace of a step whose ``inputs`` will be cut in two."""
    from torchtitan.experiments.graph_trainer import ep_chunk_pass
    from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer
    from torchtitan.experiments.graph_trainer.trainer import make_fwd_bwd_step

    tracer = minimal_fx_tracer(
        make_fwd_bwd_step(model, loss),
        module=model,
        prepare_inputs=functools.partial(ep_chunk_pass.prepare_ep_overlap_trace_inputs, config),
        prepare_call_inputs=functools.partial(
            ep_chunk_pass.prepare_ep_overlap_trace_call_inputs, config
        ),
    )
    return tracer(*inputs)


def graph_passes(
    traced: Any, model: Any, config: Any, parallelism: Any, dims: Any
) -> list[tuple[str, Callable[..., fx.GraphModule]]]:
    """Return torchtitan's passes with their names."""
    from torchtitan.experiments.graph_trainer.passes import compile_time_passes

    settings = SimpleNamespace(
        model_spec=SimpleNamespace(model=model.config),
        compile=config,
        parallelism=parallelism,
        loss=None,
    )
    listed: list[Any] = compile_time_passes(
        traced, settings, parallel_dims=dims, include_inductor=False
    )
    named = [(getattr(one, "func", one).__name__, one) for one in listed]
    return [(n, sizes_first(one) if n == "ep_overlap_chunk_pass" else one) for n, one in named]


def sizes_first(chunking: Callable[..., fx.GraphModule]) -> Callable[..., fx.GraphModule]:
    """Run torchtitan's chunking, with each size moved next to the node that it is a size of.

    torchtitan places the readers of sizes at the end of a chunk, and then finds its graph out of
    order if the sizes come later.
    """
    from torchtitan.experiments.graph_trainer import ep_chunk_pass

    look = ep_chunk_pass._validate_selected_symbol_shapes

    def move_and_look(gm: fx.GraphModule, **options: Any) -> None:
        first = next(n for n in gm.graph.nodes if n.op != "placeholder")
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int):
            value = node.args[0]
            if value.op != "placeholder":
                value.append(node)
            elif node is not first:
                first.prepend(node)
        look(gm, **options)

    def run(gm: fx.GraphModule, example_inputs: Any = None) -> fx.GraphModule:
        with mock.patch.object(ep_chunk_pass, look.__name__, move_and_look):
            return chunking(gm, example_inputs)

    return run


# --- on ranks ------------------------------------------------------------------------

_EQUAL = Row(
    "chunks",
    "deepseek_v3",
    client="torchtitan's trainer",
    layers=2,
    chunk_bytes=4096,
    expert=2,
    layout=False,
)


def equal(steps: int) -> list[tuple[str, int]]:
    """Count steps whose weights are those of torchtitan's order on all ranks, per kind of chunk."""
    found = run_ranks(train, _EQUAL.ranks, steps, timeout_s=3600)
    return [
        (part, sum(all(r[part][0][i] == r[part][1][i] for r in found) for i in range(steps)))
        for part in _PARTS
    ]


def train(rank: Rank, steps: int) -> dict[str, list[list[str]]]:
    """Train on one rank; return digests of the weights after every step, in both orders."""
    from torchtitan.config import TrainingConfig
    from torchtitan.experiments.graph_trainer.common_utils import annotate_moe_ep_regions

    from benchmarks.eager_parity.ranks import mesh_of, row_group

    from .parity_trainer import TrainerRuns

    annotate_moe_ep_regions()
    with row_group(rank, _EQUAL):
        runs = TrainerRuns(rank, _EQUAL, mesh_of(_EQUAL), steps)
        runs.training = TrainingConfig()  # reductions in fp32: others torchtitan does not chunk

        def digests(chunks: Chunks, ours: bool) -> list[str]:
            model = runs.sharded()
            with runs.context():
                traced = trace(model, runs.traced_loss, chunks.config, *runs.inputs(0), {})
            listed = graph_passes(traced, model, chunks.config, runs.parallelism, runs.dims)
            inputs = list(traced.example_inputs)
            for name, one in listed:
                if not ours or name != THEIRS:
                    traced.gm = one(traced.gm, inputs)
            if ours:
                before = [n.name for n in traced.gm.graph.nodes]
                schedule(traced.gm, Overlap())
                assert before != [n.name for n in traced.gm.graph.nodes]
            return runs.train(model, runs.traced_step(model, traced)).digests

        return {
            part: [digests(replace(c, expert=2), ours) for ours in (False, True)]
            for part, c in _PARTS.items()
        }


# --- command -------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Render one line per step, and the mean."""
    head = ["step", "as given", "torchtitan's", "ours", "/ torchtitan's", "forward", "backward"]
    lines = [[*head, "bound", "peak, GiB", "order taken"], ["", "ms", "ms", "ms", *[""] * 6]]
    for r in rows:
        theirs, ours = ([f, s - f] for f, s in zip(r["forward_ms"], _steps(r), strict=True))
        lines.append(
            [
                r["name"],
                f"{r['given_ms']:.1f}",
                f"{r['theirs_ms']:.1f}" if r["ordered"] else "none",
                f"{r['ours_ms']:.1f}",
                f"{r['ours_ms'] / r['theirs_ms']:.3f}",
                *(f"{o / t:.3f}" for o, t in zip(ours, theirs, strict=True)),
                f"{r['bound_ms']:.1f}",
                " -> ".join(f"{peak:.2f}" for peak in r["peak_gib"]),
                r["chosen"],
            ]
        )
    ratios = [r["ours_ms"] / r["theirs_ms"] for r in rows if r["ordered"]]
    mean = f"{math.exp(statistics.fmean(map(math.log, ratios))):.3f}" if ratios else "none"
    return f"{columns(lines)}\n\ngeometric mean of ours / torchtitan's: {mean}"


def _steps(row: dict[str, Any]) -> Iterator[float]:
    yield from (row["theirs_ms"], row["ours_ms"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = parser_of_graphs("python -m benchmarks.chunks", __doc__, layers=27)
    parser.add_argument("--equal", action="store_true", help="train on ranks")
    add_number(parser, "steps", 6, "steps to train")
    args = parser.parse_args(argv)
    if problem():
        parser.error(problem())
    logging.disable(logging.WARNING)  # warnings of passes, and Inductor's about a missing GPU
    document = document_of("python -m benchmarks.chunks", argv)
    if args.equal:
        found = equal(args.steps)
        text = "\n".join(f"{part}: {n} of {args.steps} steps equal" for part, n in found)
        write_results(args.json, {**document, "equal": found}, text)
        return int(any(n < args.steps for _, n in found))
    say, rows = sayer(time.monotonic()), list[dict[str, Any]]()
    for name in matching(parser, list(CHUNKS), args.only):
        say(name)
        rows.append({"name": name, **estimate(CHUNKS[name], args.layers)})
        write_results(args.json, {**document, "rows": rows}, table(rows))
    return int(any(r["ours_ms"] > r["theirs_ms"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
