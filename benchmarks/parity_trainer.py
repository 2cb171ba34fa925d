"""Run torchtitan's graph trainer with this package's passes instead of its bucketing pass.

Its tracer makes one graph of a step and runs a list of passes over it.
"""

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
import torch.nn as nn
from torch.distributed._functional_collectives import (
    _remap_traceable_collective,
    traceable_collective_remaps,
)
from torchtitan.experiments.graph_trainer.common_utils import (
    accumulate_param_grads_,
    annotate_module_fqns,
)
from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig
from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer, run_traced
from torchtitan.experiments.graph_trainer.passes import apply_graph_passes, compile_time_passes
from torchtitan.experiments.graph_trainer.trainer import make_fwd_bwd_step

from benchmarks.eager_parity.ranks import (
    RowReport,
    Sent,
    Step,
    add_sent,
    collectives_of,
    in_graph_order,
)
from benchmarks.parity_titan import TitanRuns, spmd_collectives
from torch_ext_bucketing._torch.aot import in_backward
from torch_ext_bucketing.passes.base import Compilation, GraphPass
from torch_ext_bucketing.passes.bucketing import BucketByUnit
from torch_ext_bucketing.passes.pipeline import whole_step_pass

BUCKETING = "joint_transformer_block_bucketing_reordering_pass"


class TrainerRuns(TitanRuns):
    """A debug model as the graph trainer runs it, without the rest of the trainer."""

    def build(self) -> Any:
        model = super().build()
        annotate_module_fqns(model)
        return model

    def report(self) -> RowReport:
        clock = time.perf_counter()
        report = RowReport(self.row)
        eager = self.run_eager(report)
        for name in ("fsdp_order", "control"):
            model = self.sharded()
            passes = self.passes(model, eager)
            if name == "control":
                passes = [in_graph_order(p) if isinstance(p, BucketByUnit) else p for p in passes]
            compilation = Compilation()
            traced, graph = self.traced(model, passes, compilation)
            if name == "fsdp_order":
                # As traced, its collectives are tagged only after a copy was.
                tagged = copy.deepcopy(graph)
                whole_step_pass(model, [])(tagged)
                add_sent(report.before, collectives_of(tagged.graph.nodes, self.row.per_node))
                add_sent(report.after, self.sent(traced.gm))
                report.look([compilation.report])
            stop = report.digests["eager"] if name == "control" else None
            run = self.traced_step(model, traced)
            report.ran(name, self.train(model, run, stop_unlike=stop))
        report.seconds = time.perf_counter() - clock
        return report

    def traced(
        self, model: nn.Module, passes: Sequence[GraphPass], compilation: Compilation
    ) -> tuple[Any, fx.GraphModule]:
        """Return the trainer's trace after its passes, ours included, and its graph before."""
        step = make_fwd_bwd_step(model, self.traced_loss)
        functional: dict[str, Callable[..., Any]] = {
            f.__name__: partial(_functional, f) for f in traceable_collective_remaps
        }
        with self.context(), spmd_collectives(functional):
            traced = minimal_fx_tracer(step, module=model)(*self.inputs(0), {})
        graph = copy.deepcopy(traced.gm)
        config: Any = model.config
        settings = SimpleNamespace(
            model_spec=SimpleNamespace(model=config),
            compile=GraphTrainerCompileConfig(),
            parallelism=self.parallelism,
            loss=None,
        )
        listed = compile_time_passes(
            traced, settings, parallel_dims=self.dims, include_inductor=False
        )
        at = [getattr(p, "func", p).__name__ for p in listed].index(BUCKETING)
        listed[at] = whole_step_pass(model, passes, compilation)
        traced.gm = apply_graph_passes(traced.gm, traced.example_inputs, listed)
        return traced, graph

    def sent(self, gm: fx.GraphModule) -> Sent:
        again = {n: in_backward(n) for n in gm.graph.nodes}
        nodes = [n for n in gm.graph.nodes if collectives_of([n], self.row.per_node)]
        found = collectives_of(nodes, self.row.per_node)
        return [
            (level, "gathered again" if again[node] and kind == "all_gather" else kind, nbytes)
            for node, (level, kind, nbytes) in zip(nodes, found, strict=True)
        ]

    def inputs(self, number: int) -> tuple[torch.Tensor, ...]:
        """Return a step's batch and its number of tokens on all ranks."""
        tokens, targets = self.batch(number)
        ranks = dist.get_world_size() // self.dims.tp
        return tokens, targets, torch.tensor(float(ranks * targets.numel()))

    def traced_loss(
        self, pred: torch.Tensor, labels: torch.Tensor, global_valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return the loss, called as the trainer calls it."""
        return self.sum_of_losses(pred, labels) / global_valid_tokens

    def traced_step(self, model: nn.Module, traced: Any) -> Step:
        run = run_traced(traced, module=model)
        parameters = [p for p in model.parameters() if p.requires_grad]

        def step(number: int) -> torch.Tensor:
            loss, *grads = run(*self.inputs(number), {})
            accumulate_param_grads_(parameters, grads)
            return loss

        return step


def _functional(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Trace one of torch.distributed's in-place collectives as Dynamo does."""
    remapped = _remap_traceable_collective(collective, args, kwargs)
    assert remapped is not None
    function, _, bound = remapped
    return function(**bound)
