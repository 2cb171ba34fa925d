"""Build models of real size from a name or a configuration file, sharded over a mesh.

They are made to be traced on fake tensors, where a model of any size takes no memory.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .._torch.fsdp2 import shard_of
from ..fsdp import MixedPrecisionPolicy, fully_shard
from ..fsdp.plans import transformer_block_plan
from ..fsdp.shard import data_parallel
from ..reports.compile import UNEVEN
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


@dataclass
class _Made:
    """A model, with makers of its inputs and its loss.

    ``inputs`` makes a step's inputs from the number of tokens of a sequence, or None, and of
    sequences. ``plan`` has names with styles of tensor parallelism, ``heads`` numbers to divide.
    """

    model: nn.Module
    inputs: Callable[[int | None, int], Any]
    loss: Loss
    plan: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[str, int] = field(default_factory=dict)


def configured(
    name: str, mesh: DeviceMesh, sequence: int | None, batch: int
) -> tuple[nn.Module, Any, Loss]:
    """Build a model, its inputs and its loss for one rank, in bf16 with fp32 shards.

    A parameter with too few rows for the ranks, such as fused experts, is sharded on its first
    dimension that they divide; all others are on dimension 0.

    Args:
        name: one of :data:`.LLAMA3`, or ``hf:`` and a ``config.json`` of transformers, its folder,
            or a ``model_type`` such as ``deepseek_v3`` for the defaults of its configuration. The
            class is the configuration's ``architectures``, else that of its main task.
        mesh: has a dimension ``"fsdp"``, and perhaps ``"replicate"`` and ``"tp"``.
        sequence: tokens of a sequence; None: 8192, or as many as the configuration allows if less.
        batch: sequences, images or recordings of a rank.

    Raises:
        TargetError: the configuration can't be read, or its model not be made or fed; or it has
            no plan for tensor parallelism, or the mesh does not divide the heads.
    """
    built = _llama(name, sequence or 8192) if name in LLAMA3 else _of_transformers(name)
    model = built.model
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        size = mesh["tp"].size()
        if undivided := next((f"{n} {part}" for part, n in built.heads.items() if n % size), None):
            raise TargetError(f"--mesh: tp={size} does not divide the model's {undivided}")
        _tensor_parallel(model, mesh["tp"], built.plan)
    data = mesh["replicate", "fsdp"] if "replicate" in names else mesh["fsdp"]
    _data_parallel(model, data)
    return model, built.inputs(sequence, batch), built.loss


def _llama(name: str, sequence: int) -> _Made:
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
    return _Made(
        Transformer(config, plain=True),
        lambda _, batch: (torch.zeros((batch, sequence), dtype=torch.long),),
        lambda logits, inputs: F.cross_entropy(logits.flatten(0, 1).float(), inputs[0].flatten()),
        plan,
        {"heads": heads, "kv_heads": config.kv_heads},
    )


# For a configuration without ``architectures``; the first task that it has a class for.
_TASKS = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModelForVideoClassification",
    "AutoModelForAudioClassification",
    "AutoModel",
)


def _of_transformers(name: str) -> _Made:
    kind, path = name.removeprefix("hf:"), Path(name.removeprefix("hf:"))
    try:
        import transformers
    except ImportError as error:
        raise TargetError(f"{name} needs transformers: pip install transformers") from error
    try:
        if path.exists():
            config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        else:
            config = transformers.AutoConfig.for_model(kind)
        config.use_cache = False
        for token in ("decoder_start_token_id", "pad_token_id"):
            if config.is_encoder_decoder and getattr(config, token, None) is None:
                setattr(config, token, 0)
        from transformers.initialization import no_init_weights

        with no_init_weights():
            model = _class_of(transformers, config)._from_config(config)
    except Exception as error:
        # Some errors list all models that transformers knows.
        about = str(error).partition("\n")[0][:200]
        raise TargetError(
            f"{name}: transformers makes no model of it: {type(error).__name__}: {about}. Give the "
            "path of a config.json, or a model_type such as llama, vit or deepseek_v3"
        ) from error
    model.train()
    parts = ("num_attention_heads", "num_key_value_heads")
    heads = {part: n for part in parts if (n := getattr(config, part, None))}

    def loss(output: Any, inputs: Any) -> torch.Tensor:
        if getattr(output, "loss", None) is not None:
            return output.loss
        values = output[0] if isinstance(output[0], torch.Tensor) else output[0][0]
        return values.float().mean()

    def inputs(sequence: int | None, batch: int) -> dict[str, torch.Tensor]:
        return _inputs(name, model, sequence, batch)

    return _Made(model, inputs, loss, getattr(model, "tp_plan", {}) or {}, heads)


def _class_of(transformers: Any, config: Any) -> Any:
    """Return the class of a configuration: its ``architectures``, else that of its main task."""
    for architecture in config.architectures or ():
        if hasattr(transformers, architecture):
            return getattr(transformers, architecture)
    mappings = (getattr(transformers, task)._model_mapping for task in _TASKS)
    model_class = next((m[type(config)] for m in mappings if type(config) in m), None)
    if model_class is None:
        raise ValueError(f"no task of transformers has a class for a {type(config).__name__}")
    return model_class[0] if isinstance(model_class, tuple) else model_class


# Classes whose labels are one class per token, and per sequence or image.
_BY_TOKEN = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")
_BY_SAMPLE = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")


def _inputs(name: str, model: Any, sequence: int | None, batch: int) -> dict[str, torch.Tensor]:
    """Make a model's inputs by the parameters of its ``forward``, with sizes of its configuration.

    A model of text and images gets text alone: its images have to fit places in the text.
    """
    config = model.config
    takes = inspect.signature(type(model).forward).parameters
    text = config.get_text_config(decoder=config.is_encoder_decoder or None)
    limits = ("max_position_embeddings", "max_target_positions", "n_positions")
    most = next((n for limit in limits if (n := getattr(text, limit, None))), 512)
    tokens = torch.zeros((batch, sequence or min(most, 8192)), dtype=torch.long)
    tensors: dict[str, torch.Tensor] = {}
    zeros = functools.partial(torch.zeros, dtype=torch.bfloat16)  # as gathered parameters
    by_token = type(model).__name__.endswith(_BY_TOKEN)
    if "input_ids" in takes:
        tensors["input_ids"] = tokens
    if "pixel_values" in takes and not (tensors and by_token):
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", None) or 224
        height, width = (size, size) if isinstance(size, int) else size
        tensors["pixel_values"] = zeros(batch, getattr(vision, "num_channels", 3), height, width)
        if (frames := getattr(vision, "num_frames", None)) is not None:
            tensors["pixel_values"] = tensors["pixel_values"][:, None].repeat(1, frames, 1, 1, 1)
    elif "input_features" in takes:
        audio = getattr(config, "audio_config", config)
        length = 2 * getattr(audio, "max_source_positions", 1500)
        tensors["input_features"] = zeros(batch, getattr(audio, "num_mel_bins", 80), length)
    elif "input_values" in takes:
        tensors["input_values"] = zeros(batch, 160_000)  # 10 s at 16 kHz
    if not tensors:
        raise TargetError(
            f"{name}: a {type(model).__name__} takes {', '.join([*takes][1:5])}, and explain makes "
            "input_ids, pixel_values, input_features and input_values: give a MODULE:FUNCTION that "
            "returns the sharded model and its inputs"
        )
    if "labels" in takes and by_token:
        tensors["labels"] = tokens
    elif "labels" in takes and type(model).__name__.endswith(_BY_SAMPLE):
        tensors["labels"] = torch.zeros(batch, dtype=torch.long)
    elif "decoder_input_ids" in takes:
        tensors["decoder_input_ids"] = tokens
    if sequence is not None and not any(value is tokens for value in tensors.values()):
        raise TargetError(
            f"{name}: a {type(model).__name__} takes no tokens, so leave --sequence out; the size "
            "of its inputs is in its configuration"
        )
    return tensors


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


def _data_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard on dimension 0, or on another one that the ranks divide: fp32 shards, bf16 gathers."""
    ranks = mesh.size(mesh.ndim - 1)
    dims = {param: _even_dim(param, ranks) for param in model.parameters()}
    if any(dims.values()):
        # In the units that a recipe takes for models without any.
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        shard: Any = functools.partial(
            fully_shard,
            mesh=mesh,
            mp_policy=policy,
            shard_placement_fn=lambda param: Shard(dims[param]),
        )
        *units, last = transformer_block_plan(model).units
        for unit in units:
            shard([model.get_submodule(name) for name in unit])
        shard([model.get_submodule(name) for name in last], reshard_after_forward=False)
        shard(model)
    else:
        mode: Literal["fully_shard", "hybrid_shard"]
        mode = "fully_shard" if mesh.ndim == 1 else "hybrid_shard"
        data_parallel(model, mesh, mode, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _even_dim(param: torch.Tensor, ranks: int) -> int:
    """Return 0, or the first dimension that ranks divide where they divide rows badly."""
    rows, *sizes = shard_of(param).shape or (1,)
    padded = -(-rows // ranks) * ranks
    even = [dim for dim, size in enumerate(sizes, 1) if size % ranks == 0]
    return even[0] if even and padded > (1 + UNEVEN) * rows else 0


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
