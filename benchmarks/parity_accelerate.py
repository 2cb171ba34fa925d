"""Train models of transformers as accelerate's FSDP2 plugin wraps them, eager and compiled."""

from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed
import torch.nn as nn
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.eager_parity.ranks import Runs
from torch_ext_bucketing import fsdp
from torch_ext_bucketing.passes.base import GraphPass
from torch_ext_bucketing.recipes import recipe


class AccelerateRuns(Runs):
    """A model that accelerate shards, by eager ``fully_shard`` or by this package's."""

    def prepared(self) -> nn.Module:
        model, _ = self.plain()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            mixed_precision_policy="bf16",
            cpu_ram_efficient_loading=self.row.name.endswith("_meta"),
        )
        PartialState._shared_state.clear()
        ranks = (self.rank.world_size,)
        accelerator = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin),
            torch_device_mesh=init_device_mesh("cpu", ranks, mesh_dim_names=("dp_shard",)),
            parallelism_config=SimpleNamespace(fsdp_dim_names=["dp_shard"]),
            mixed_precision="bf16",
            is_main_process=self.rank.rank == 0,
            device=torch.device("cpu"),
        )
        # accelerate shards the model of transformers.
        model.inner = fsdp2_prepare_model(accelerator, model.inner)  # type: ignore[arg-type]
        return model

    def eager(self) -> nn.Module:
        return self.prepared()

    def sharded(self) -> nn.Module:
        ours = {"fully_shard": fsdp.fully_shard, "FSDPModule": fsdp.FSDPModule}
        with mock.patch.multiple(torch.distributed.fsdp, **ours):
            return self.prepared()

    def passes(self, model: nn.Module, eager: nn.Module) -> list[GraphPass]:
        return recipe(model)
