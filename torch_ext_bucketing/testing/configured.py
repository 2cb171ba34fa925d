"""Build models of real size from a name or a configuration file, sharded over a mesh.

They are made to be traced on fake tensors, where a model of any size takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrize

from ..fsdp.shard import data_parallel
from .target import LLAMA3, TargetError
from .training import ModelConfig, Transformer

Rule = Literal["adamw", "adam", "sgd", "muon"]
Loss = Callable[[Any, Any], torch.Tensor]

_STYLES: Mapping[str, Callable[[], Any]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
}
"""transformers' names of the styles of a plan, with torch's."""


def configured(
    name: str, mesh: DeviceMesh, sequence: int | None, batch: int
) -> tuple[nn.Module, Any, Loss]:
    """Build a model, its inputs and its loss for one rank, in bf16 with fp32 shards.

    Args:
        name: one of :data:`.LLAMA3`, or ``hf:`` and a ``config.json`` of transformers, its folder,
            or a ``model_type`` such as ``deepseek_v3`` for the defaults of its configuration.
        mesh: has a dimension ``"fsdp"``, and perhaps ``"replicate"`` and ``"tp"``.
        sequence: tokens of a sequence; None: 8192, or as many as the configuration allows if less.
        batch: sequences of a rank.

    Raises:
        TargetError: the configuration can't be read, or has no plan for tensor parallelism, or
            the mesh does not divide the heads.
    """
    model, plan, heads, most = (
        _llama(name, sequence or 8192) if name in LLAMA3 else _of_transformers(name)
    )
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        size = mesh["tp"].size()
        if undivided := next((f"{n} {part}" for part, n in heads.items() if n % size), None):
            raise TargetError(f"--mesh: tp={size} does not divide the model's {undivided}")
        _tensor_parallel(model, mesh["tp"], plan)
    data = mesh["replicate", "fsdp"] if "replicate" in names else mesh["fsdp"]
    _data_parallel(model, data)
    tokens = torch.zeros((batch, sequence or min(most, 8192)), dtype=torch.long)
    if name in LLAMA3:
        return (
            model,
            (tokens,),
            lambda logits, inputs: F.cross_entropy(
                logits.flatten(0, 1).float(), inputs[0].flatten()
            ),
        )
    return model, {"input_ids": tokens, "labels": tokens}, lambda output, inputs: output.loss


def _llama(name: str, sequence: int) -> tuple[nn.Module, Mapping[str, str], Mapping[str, int], int]:
    layers, dim, heads, hidden = LLAMA3[name]
    config = ModelConfig(
        vocab=128256,
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=8,
        hidden=hidden,
        max_seq=sequence,
    )
    styles = {"wq": "colwise", "wk": "colwise", "wv": "colwise", "wo": "rowwise"}
    plan = {f"blocks.*.attention.{part}": style for part, style in styles.items()}
    styles = {"gate": "colwise", "up": "colwise", "down": "rowwise"}
    plan |= {f"blocks.*.mlp.{part}": style for part, style in styles.items()}
    plan["output"] = "colwise_gather_output"
    heads_of = {"heads": heads, "kv_heads": config.kv_heads}
    return Transformer(config, plain=True), plan, heads_of, config.max_seq


def _of_transformers(
    name: str,
) -> tuple[nn.Module, Mapping[str, str], Mapping[str, int], int]:
    kind, path = name.removeprefix("hf:"), Path(name.removeprefix("hf:"))
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise TargetError(f"{name} needs transformers: pip install transformers") from error
    try:
        if path.exists():
            config = AutoConfig.from_pretrained(path, local_files_only=True)
        else:
            config = AutoConfig.for_model(kind)
        config.use_cache = False
        model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise TargetError(
            f"{name}: transformers makes no model of it: {type(error).__name__}: {error}. Give the "
            "path of a config.json, or a model_type such as llama or deepseek_v3"
        ) from error
    model.train()
    parts = ("num_attention_heads", "num_key_value_heads")
    heads = {part: n for part in parts if (n := getattr(config, part, None))}
    return model, getattr(model, "tp_plan", {}), heads, config.max_position_embeddings


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Cut projections over a mesh, in place, by a plan of names with ``*`` and styles."""
    unknown = sorted({style for style in plan.values() if style not in _STYLES})
    if not plan or unknown:
        why = f"the styles {', '.join(unknown)}" if unknown else "no plan"
        raise TargetError(
            f"{type(model).__name__} has {why} for tensor parallelism here: leave tp= out, or give "
            "a MODULE:FUNCTION, which takes the mesh as its argument and cuts the model itself"
        )
    styles = {name: _STYLES[style]() for name, style in plan.items()}
    parallelize_module(model, mesh, styles, src_data_rank=None)


class AsTensorParallel(nn.Module):
    """Take the gathered tensor for a tensor-parallel rank's shard, as a parametrization."""

    def __init__(self, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
        super().__init__()
        self.mesh = mesh
        self.placements = placements

    def forward(self, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False)


def _data_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model that may be cut by tensor parallelism: fp32 shards, bf16 gathers.

    ::

        shard -> bf16 -> all-gather over fsdp -> [shard of the tensor-parallel DTensor] -> use
    """
    cut = []
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if isinstance(param, DTensor):
                cut.append((module, name, AsTensorParallel(param.device_mesh, param.placements)))
                module.register_parameter(name, nn.Parameter(param.to_local().detach().clone()))
    mode: Literal["fully_shard", "hybrid_shard"]
    mode = "fully_shard" if mesh.ndim == 1 else "hybrid_shard"
    data_parallel(model, mesh, mode, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module, name, shard in cut:
        parametrize.register_parametrization(module, name, shard, unsafe=True)


def state_of(model: nn.Module, rule: Rule) -> float:
    """Return the bytes of an optimizer's state per element of a trained parameter, on average.

    Adam and AdamW keep two values like the parameter, SGD without momentum none, and Muon one for
    matrices of numbered blocks; the rest is AdamW's there, as in Muon's own recipe.
    """
    values = {"adamw": 2, "adam": 2, "sgd": 0, "muon": 2}[rule]
    total, elements = 0, 0
    for name, param in model.named_parameters():
        if param.requires_grad:
            numbered = any(part.isdigit() for part in name.split("."))
            of_muon = rule == "muon" and param.ndim == 2 and numbered
            total += (1 if of_muon else values) * param.numel() * param.element_size()
            elements += param.numel()
    return total / max(1, elements)
