"""torchtitan's own models, by its own eager FSDP2 path and by its SimpleFSDP, compiled."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims, utils
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.experiments.graph_trainer import simple_fsdp
from torchtitan.experiments.graph_trainer.common_utils import apply_simple_fsdp
from torchtitan.models.common.attention import ScaledDotProductAttention

from benchmarks.parity_ranks import Runs
from torch_ext_bucketing.passes.backends import BucketingBackend
from torch_ext_bucketing.passes.base import GraphPass
from torch_ext_bucketing.recipes import recipe
from torch_ext_bucketing.testing import text

__all__ = ["TitanRuns"]

SEQ, BATCH = 32, 2


class TitanRuns(Runs):
    """A debug model: its first layers, with the one of torchtitan's attentions that has a kernel
    on CPU."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.parallelism = ParallelismConfig(
            expert_parallel_degree=self.row.expert, spmd_backend="partial_dtensor"
        )
        name = "bfloat16" if self.row.dtype == "bf16" else "float32"
        self.training = TrainingConfig(mixed_precision_param=name, mixed_precision_reduce=name)
        with mock.patch.object(parallel_dims, "device_type", "cpu"):
            self.dims = ParallelDims.from_config(self.parallelism, dist.get_world_size())
            self.dims.build_mesh()
        utils._spmd_backend = self.parallelism.spmd_backend

    def build(self) -> Any:
        name = f"torchtitan.experiments.graph_trainer.{self.row.model}"
        config = importlib.import_module(name).model_registry("debugmodel", "varlen").model
        config.layers = config.layers[: self.row.layers or None]
        for layer in config.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        config.update_from_config(
            config=SimpleNamespace(parallelism=self.parallelism, training=self.training)
        )
        model = config.build()
        torch.manual_seed(0)
        model.init_states()
        if self.row.expert > 1:
            model.parallelize(self.dims)
        return model

    def eager(self) -> nn.Module:
        model = self.build()
        meshes: dict[str, Any] = {}
        if self.row.expert > 1:
            meshes = {"ep_degree": self.dims.ep, "edp_mesh": self.dims.get_mesh(["efsdp"])}
        mesh = self.dims.get_mesh(["fsdp"])
        apply_fsdp_to_decoder(model, mesh, self.dtype, self.dtype, pp_enabled=False, **meshes)
        return model

    def sharded(self) -> nn.Module:
        simple_fsdp._wrap_class_cache.clear()
        return apply_simple_fsdp(self.build(), parallel_dims=self.dims, training=self.training)

    def compiled(self, model: nn.Module, compiler: BucketingBackend) -> Callable[..., Any]:
        torch._dynamo.config.capture_scalar_outputs = True  # tokens per expert
        return super().compiled(model, compiler)

    def passes(self, model: nn.Module, eager: nn.Module) -> list[GraphPass]:
        return recipe(model, reference=eager)

    def loss(self, forward: Callable[..., torch.Tensor], number: int) -> torch.Tensor:
        tokens, targets = text.batch(number, dist.get_rank(), size=BATCH, seq=SEQ)
        loss = cross_entropy_loss(forward(tokens), targets)
        return loss / (dist.get_world_size() * targets.numel())
