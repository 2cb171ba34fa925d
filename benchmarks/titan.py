"""Trace torchtitan's DeepSeek-V3 as its graph trainer shards it; torch 2.15 and torchtitan 0.3.0.

The sharding is SimpleFSDP, with dropless experts on a mesh of their own. The tracer is
``torch.compile``, so the graphs contain assertions on sizes that depend on data: the number of
tokens between two ranks is known only at run time. Attention is the one for documents of any length
(``varlen``), one operator on any device; each sequence is one document. The CPU needs no copy of
the token counts to the host, which is one small kernel per layer less than on a GPU.
"""

import importlib
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
import torch.fx as fx
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_ext_bucketing._torch.dynamo import input_fqns
from torch_ext_bucketing._torch.process_groups import group_by_name, ranks_of
from torch_ext_bucketing.graph.nodes import collective_group, set_group_name

from .parallel import World
from .tracing import Phase, Say, partitioner

TORCHTITAN = "0.3.0"
_SPMD_BACKEND: Literal["partial_dtensor"] = "partial_dtensor"


@dataclass(frozen=True)
class TitanConfig:
    """A torchtitan model; by default its DeepSeek-V3 16B with the batch of its training config."""

    layers: int = 27
    flavor: str = "16B"
    experts_per_token: int = 6
    batch: int = 4
    """Sequences per data-parallel rank."""
    seq: int = 4096


def problem() -> str:
    """Return why nothing can be traced or loaded here, ``""`` if it can."""
    try:
        found = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found == TORCHTITAN and torch.__version__.startswith("2.15."):
        return ""
    return (
        f"needs torchtitan {TORCHTITAN} on torch 2.15, found torchtitan {found} on torch "
        f"{torch.__version__}: pip install torch==2.15.0 'torch_ext_bucketing[torchtitan]'"
    )


def register_operators() -> None:
    """Register the operators that the graphs call besides torch's own."""
    importlib.import_module("torch.nn.attention.varlen")
    importlib.import_module("torchtitan.ops.scatter_add")


class _TracedError(Exception):
    """End the compile once its graphs are there."""


def trace_titan(
    config: TitanConfig, world: World, say: Say
) -> dict[tuple[Phase, Any], fx.GraphModule]:
    """Trace a model without weights, in a world with experts, as :func:`.trace_model` does."""
    if problem():
        raise RuntimeError(problem())
    from torchtitan.distributed import parallel_dims, utils

    with (
        mock.patch.object(parallel_dims, "device_type", "cpu"),
        mock.patch.object(utils, "_spmd_backend", _SPMD_BACKEND),
    ):
        graphs = _trace(config, world, say)
    for gm in graphs.values():
        _name_groups(gm.graph, world)
    return graphs


def _trace(config: TitanConfig, world: World, say: Say) -> dict[tuple[Phase, Any], fx.GraphModule]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torchtitan.models.common.attention import VarlenMetadata

    graphs: dict[tuple[Phase, Any], fx.GraphModule] = {}
    say("build")
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    model, _, _ = build(config, world.layout.expert)
    _make_fake(model, mode)

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        split = partitioner(graphs, say, input_fqns(gm, inputs, model)[0])

        def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            split(joint, joint_inputs, **kwargs)
            raise _TracedError

        say("joint graph")
        backend = aot_autograd(
            fw_compiler=None,
            bw_compiler=None,
            partition_fn=partition,
            decompositions=select_decomp_table,
            keep_inference_input_mutations=True,
        )
        return backend(gm, inputs)

    say("dynamo")
    torch._dynamo.reset()
    with mode, torch._dynamo.config.patch(capture_scalar_outputs=True):
        tokens = torch.zeros((config.batch, config.seq), dtype=torch.int64)
        positions = torch.arange(config.seq).expand(config.batch, config.seq)
        rows = config.batch * config.seq
        starts = torch.arange(0, rows + 1, config.seq, dtype=torch.int32)
        documents = VarlenMetadata(starts, starts, config.seq, config.seq)
        try:
            torch.compile(model, backend=compiler, fullgraph=True)(tokens, positions, documents)
        except Exception as error:
            if _TracedError.__name__ not in str(error):
                raise
    return graphs


def build(
    config: TitanConfig, expert: int, attention: str = "varlen", annotate: bool = False
) -> tuple[Any, Any, Any]:
    """Return the sharded model on the meta device, its parallel dimensions and their settings."""
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.experiments.graph_trainer import simple_fsdp
    from torchtitan.experiments.graph_trainer.common_utils import apply_simple_fsdp
    from torchtitan.experiments.graph_trainer.deepseek_v3 import model_registry
    from torchtitan.experiments.graph_trainer.deepseek_v3.parallelize import annotate_deepseekv3

    parallelism = ParallelismConfig(expert_parallel_degree=expert, spmd_backend=_SPMD_BACKEND)
    training = TrainingConfig()
    model = model_registry(config.flavor, attn_backend=attention).model
    if len(model.layers) < config.layers:
        raise ValueError(f"{config.flavor} has {len(model.layers)} layers, not {config.layers}")
    model.layers = model.layers[: config.layers]
    top_k = {one.moe.router.top_k for one in model.layers if getattr(one, "moe", None)}
    if top_k - {config.experts_per_token}:
        raise ValueError(f"{config.flavor} sends a token to {top_k} experts")
    model.update_from_config(config=SimpleNamespace(parallelism=parallelism, training=training))
    # torchtitan keeps one class per module type, and with it the mesh of the first model.
    simple_fsdp._wrap_class_cache.clear()
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    with torch.device("meta"):
        built = model.build()
    if annotate:
        annotate_deepseekv3(built)
    built.parallelize(dims)
    return apply_simple_fsdp(built, parallel_dims=dims, training=training), dims, parallelism


def _make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace meta tensors by fake CPU tensors, in place."""

    def fake(value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, DTensor):
            local = torch.empty_like(value.to_local(), device="cpu")
            return DTensor(local, value._spec, requires_grad=False)  # type: ignore[call-arg]
        return torch.empty_like(value, device="cpu")

    with mode:
        for module in model.modules():
            for name, param in module._parameters.items():
                if param is not None:
                    module._parameters[name] = nn.Parameter(fake(param.detach()))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fake(buffer)


def _name_groups(graph: fx.Graph, world: World) -> None:
    """Rename the collectives' groups to those of the same ranks in ``world``."""
    same = {ranks_of(group_by_name(name)): name for name in world.groups}
    for node in graph.nodes:
        group = collective_group(node)
        if group is not None:
            set_group_name(node, same[ranks_of(group_by_name(group))])
