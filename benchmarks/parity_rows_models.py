"""The models of ``parity.py --rows``, and how they are spread over ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks.models import FeedForward
from benchmarks.parity_base import SEQ, VOCAB, ParityModel
from benchmarks.parity_models import Llama
from torch_ext_bucketing.testing.model import RMSNorm, rotary_tables, rotate

__all__ = ["MODELS", "build_model", "checkpoint_blocks", "tensor_parallel", "units_of"]

LAYERS = 2
DIM = 32


class Decoder(Llama):
    """The parity matrix's decoder, of two blocks."""

    def __init__(self) -> None:
        super().__init__(LAYERS, DIM)


class Frozen(Decoder):
    """One whole block but its norms, and the embedding, are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        for name, parameter in self.layers[0].named_parameters():
            parameter.requires_grad_("norm" in name)


class Unused(Decoder):
    """A linear that no forward calls, and a parameter whose use doesn't reach the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].spare = nn.Linear(DIM, DIM)
        self.layers[1].idle = nn.Parameter(torch.empty(DIM))


class Branch(Decoder):
    """Leaves its first block out of every third step."""

    def forward(  # type: ignore[override]
        self, tokens: torch.Tensor, targets: torch.Tensor, short: bool = False
    ) -> torch.Tensor:
        self.short = short
        return super().forward(tokens, targets)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in list(self.layers)[int(self.short) :]:
            x = layer(x, self.rope_cos, self.rope_sin)
        return self.norm(x).flatten(0, 1)


class TensorAttention(nn.Module):
    """Causal attention; a rank has the heads whose columns it has."""

    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        q, k, v = (
            linear(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class TensorBlock(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim, 1e-5)
        self.attention = TensorAttention(dim, dim // 4)
        self.ffn_norm = RMSNorm(dim, 1e-5)
        self.feed_forward = FeedForward(dim, dim * 2)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class TensorDecoder(ParityModel):
    """A decoder for ``parallelize_module``: every parameter in a module without children."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(TensorBlock(DIM) for _ in range(LAYERS))
        self.norm = RMSNorm(DIM, 1e-5)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        cos, sin = rotary_tables(SEQ, DIM // 4, 10000.0)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.rope_cos, self.rope_sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


MODELS: dict[str, Callable[[], ParityModel]] = {
    "decoder": Decoder,
    "frozen": Frozen,
    "unused": Unused,
    "branch": Branch,
    "tensor": TensorDecoder,
}


def build_model(name: str) -> ParityModel:
    """A model with the same float32 weights, bit for bit, at every call."""
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(0)
    for fqn, parameter in model.named_parameters():
        with torch.no_grad():
            if parameter.dim() > 1:
                deviation = 1.0 if "embed" in fqn else parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, deviation, generator=generator)
            elif "norm" in fqn:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.5, 0.1, generator=generator)
    return model


def units_of(model: nn.Module, regional: bool = False) -> list[str]:
    """Modules in the order of the ``fully_shard`` calls; the last is the root, ``""``. With
    ``regional``, no unit has parameters of several modules beside the blocks."""
    rest = ["embed", "norm", "head"] if regional else []
    return [*(f"layers.{i}" for i in range(LAYERS)), *rest, ""]


def checkpoint_blocks(model: nn.Module, kind: str) -> None:
    """Recompute every block in backward, all of it or what is no matmul."""
    settings: dict[str, Any] = {}
    if kind == "selective":
        settings["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    layers = model.layers
    assert isinstance(layers, nn.ModuleList)
    for i, layer in enumerate(layers):
        layers[i] = checkpoint_wrapper(layer, **settings)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Column and row shards of every block, embedding and head, by ``parallelize_module``."""
    between = Shard(1) if sequence else Replicate()
    head = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": head,
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    for i in range(LAYERS):
        block: dict[str, Any] = {
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=between),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=between),
        }
        if sequence:
            block |= {
                "attention_norm": SequenceParallel(),
                "ffn_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None, None),
                    desired_input_layouts=(Replicate(), None, None),
                ),
                "feed_forward": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
            }
        plan |= {f"layers.{i}.{name}": style for name, style in block.items()}
    parallelize_module(model, mesh, plan, src_data_rank=None)
