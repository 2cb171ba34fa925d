"""Train torchtitan's own models by its eager FSDP2 path and by its SimpleFSDP, compiled."""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import spmd_types
import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, full_dtensor, parallel_dims, utils
from torchtitan.distributed import fsdp as titan_fsdp
from torchtitan.experiments.graph_trainer import simple_fsdp
from torchtitan.experiments.graph_trainer.common_utils import apply_simple_fsdp
from torchtitan.models.common.attention import ScaledDotProductAttention

from benchmarks.eager_parity.ranks import RowReport, Runs
from benchmarks.eager_parity.steps import StepRuns
from torch_ext_bucketing import fsdp
from torch_ext_bucketing.passes.backends import BucketingBackend
from torch_ext_bucketing.passes.base import GraphPass
from torch_ext_bucketing.recipes import recipe
from torch_ext_bucketing.testing import text
from torch_ext_bucketing.testing.training import TrainingRecord

SEQ, BATCH = 32, 2


@functools.cache
def _dims(replicas: int, tensor: int, experts: int, backend: Any) -> ParallelDims:
    """Return the parallel dimensions, the same object for all rows.

    FSDP2 refuses a second one of equal meshes in a process ("different mesh objects").
    """
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=replicas,
        tensor_parallel_degree=tensor,
        expert_parallel_degree=experts,
        spmd_backend=backend,
    )
    with mock.patch.object(parallel_dims, "device_type", "cpu"):
        dims = ParallelDims.from_config(parallelism, dist.get_world_size())
        dims.build_mesh()
    return dims


class TitanRuns(Runs):
    """The first layers of a debug model, with torchtitan's attention that has a CPU kernel."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        row = self.row
        replicas = row.mesh[0] if row.mode == "hybrid_shard" else 1
        tensor = row.mesh[1] if row.tensor else 1
        self.dims = _dims(replicas, tensor, row.expert, row.spmd)
        self.parallelism = ParallelismConfig(
            data_parallel_replicate_degree=replicas,
            tensor_parallel_degree=tensor,
            enable_sequence_parallel=row.tensor.endswith("sequence"),
            expert_parallel_degree=row.expert,
            spmd_backend=row.spmd,
        )
        name = "bfloat16" if row.dtype == "bf16" else "float32"
        self.training = TrainingConfig(mixed_precision_param=name, mixed_precision_reduce=name)
        utils.set_spmd_backend(row.spmd)
        self.context = utils.get_spmd_context(parallel_dims=self.dims)

    def build(self) -> Any:
        name = f"torchtitan.experiments.graph_trainer.{self.row.model}"
        config = importlib.import_module(name).model_registry("debugmodel", "varlen").model
        config.layers = config.layers[: self.row.layers or None]
        for layer in config.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        config.update_from_config(
            config=SimpleNamespace(parallelism=self.parallelism, training=self.training)
        )
        self.vocab = config.vocab_size
        model = config.build()
        torch.manual_seed(0)
        model.init_states()
        if self.row.expert > 1 or self.row.spmd == "spmd_types":
            model.parallelize(self.dims)
        return model

    def eager(self) -> nn.Module:
        model, dims = self.build(), self.dims
        if self.row.spmd == "spmd_types":
            mesh, mesh_dims = full_dtensor.resolve_fsdp_mesh(dims)
            experts, experts_dims = full_dtensor.resolve_sparse_fsdp_mesh(dims)
        else:
            mesh, experts, mesh_dims, experts_dims = dims.get_mesh(["fsdp"]), None, None, None
            if self.row.expert > 1:
                experts = dims.get_mesh(["efsdp"])
        titan_fsdp.apply_fsdp_to_decoder(
            model,
            mesh,
            self.dtype,
            self.dtype,
            pp_enabled=False,
            ep_degree=dims.ep,
            edp_mesh=experts,
            dp_mesh_dims=mesh_dims,
            edp_mesh_dims=experts_dims,
        )
        return model

    def run_eager(self, report: RowReport) -> nn.Module:
        with spmd_collectives({"all_to_all": _all_to_all}):
            return super().run_eager(report)

    def sharded(self) -> nn.Module:
        if self.row.client == "torchtitan's calls":
            ours = {"fully_shard": fsdp.fully_shard, "FSDPModule": fsdp.FSDPModule}
            with mock.patch.multiple(titan_fsdp, **ours):
                return self.eager()
        simple_fsdp._wrap_class_cache.clear()
        if self.row.spmd == "spmd_types":
            return self._sharded_on_spmd_types(self.build())
        return apply_simple_fsdp(self.build(), parallel_dims=self.dims, training=self.training)

    def _sharded_on_spmd_types(self, model: Any) -> nn.Module:
        """Shard as releases after torchtitan 0.3.0 do, whose ``apply_simple_fsdp`` refuses to.

        SimpleFSDP shards this rank's part of a parameter, and computation gets a plain tensor. A
        gradient that is partial over tensor-parallel ranks (``R``, as norms under sequence
        parallelism) is summed over them before it is reduced.
        """
        tensor = self.dims.get_dense_tp_mesh().get_group() if self.dims.tp_enabled else None
        axis = tensor and spmd_types.MeshAxis.of(tensor)
        in_parts = {
            (module, name)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if axis and spmd_types.get_local_type(parameter)[axis] is spmd_types.R
        }

        as_parts = functools.partial(
            spmd_types.convert, axis=tensor, src=spmd_types.I, dst=spmd_types.R
        )

        def register(module: nn.Module, names: list[str], unshard: Callable[..., Any]) -> None:
            def read(module: nn.Module, name: str, part: bool) -> torch.Tensor:
                full = unshard(module._parameters[name])
                if part:
                    full = as_parts(full, backward_options={"op_dtype": full.dtype})
                return full

            parts = {n: (module, n) in in_parts for n in names}
            members = {
                n: property(functools.partial(read, name=n, part=part)) for n, part in parts.items()
            }
            module.__class__ = type(f"SimpleFSDP{type(module).__name__}", (type(module),), members)

        policy = simple_fsdp.MixedPrecisionPolicy(self.dtype, self.dtype)
        replicas = ["dp_replicate"] if self.dims.dp_replicate_enabled else []
        with mock.patch.object(simple_fsdp, "_register_parametrization", register):
            if self.row.expert > 1:
                mesh = self.dims.get_mesh([*replicas, "efsdp"])
                for layer in model.layers.values():
                    if getattr(layer, "moe", None) is not None:
                        experts = layer.moe.routed_experts.inner_experts
                        simple_fsdp.data_parallel(experts, mesh, self.row.mode, policy)
            mesh = self.dims.get_mesh([*replicas, "dp_shard"])
            return simple_fsdp.data_parallel(model, mesh, self.row.mode, policy)

    def compiled(self, model: nn.Module, compiler: BucketingBackend) -> Callable[..., Any]:
        torch._dynamo.config.capture_scalar_outputs = True  # tokens per expert
        return super().compiled(model, compiler)

    def passes(self, model: nn.Module, eager: nn.Module) -> list[GraphPass]:
        return recipe(model, reference=None if self.row.client == "torchtitan's calls" else eager)

    def batch(self, number: int) -> tuple[Any, ...]:
        """Return tokens and targets, the same on all tensor-parallel ranks."""
        return text.batch(number, dist.get_rank() // self.dims.tp, size=BATCH, seq=SEQ)

    def loss_function(self) -> Callable[..., torch.Tensor]:
        ranks, vocab = dist.get_world_size() // self.dims.tp, self.vocab

        def loss(
            forward: Callable[..., torch.Tensor], tokens: torch.Tensor, targets: torch.Tensor
        ) -> torch.Tensor:
            total = cross_entropy_loss(forward(tokens), targets, global_vocab_size=vocab)
            return total / (ranks * targets.numel())

        return loss

    def sum_of_losses(self, pred: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum this rank's losses; each tensor-parallel rank has a part of the vocabulary."""
        return cross_entropy_loss(pred, targets, global_vocab_size=self.vocab)

    def train(self, *args: Any, **options: Any) -> TrainingRecord:
        with self.context():
            return super().train(*args, **options)


class TitanStepRuns(TitanRuns, StepRuns):
    """The same with an optimizer."""

    def clip(self, eager: nn.Module) -> torch.Tensor:
        parameters, ep = list(eager.parameters()), self.dims.ep_enabled
        return utils.clip_grad_norm_(parameters, self.row.max_norm, foreach=True, ep_enabled=ep)

    def run(self, *args: Any, **options: Any) -> TrainingRecord:
        torch._dynamo.config.capture_scalar_outputs = True  # tokens per expert
        with self.context():
            return super().run(*args, **options)


@contextlib.contextmanager
def spmd_collectives(others: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Make spmd_types call these instead of torch.distributed's of the same names."""
    spmd_types.set_dist(SimpleNamespace(**vars(dist) | others))
    try:
        yield
    finally:
        spmd_types.set_dist(None)


def _all_to_all(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any) -> None:
    """Exchange parts of any number of rows, as one tensor."""
    received, sent = torch.cat(outputs), torch.cat(inputs)
    rows = [[len(part) for part in parts] for parts in (outputs, inputs)]
    dist.all_to_all_single(received, sent, *rows, group=group)
    for output, part in zip(outputs, received.split(rows[0]), strict=True):
        output.copy_(part)
