"""The models of the parity rows: tiny, and shaped where parameter orders go wrong.

Each maps a batch to its mean cross-entropy. All use only operators whose bits are the same when
autograd runs them and when AOTAutograd's graph is replayed. A new one is an entry of
:data:`MODELS`: nothing else has to know of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.parity_base import (
    FSDP_AND_HSDP,
    SEQ,
    VOCAB,
    Model,
    ParityModel,
    Unit,
    batch_of,
    blocks_then_root,
)
from benchmarks.parity_hf import HF_MODELS
from benchmarks.parity_reuse import REUSE_MODELS
from benchmarks.parity_shared import SHARED_MODELS
from benchmarks.parity_tensor import TensorDecoder
from torch_ext_bucketing.testing.model import ModelConfig, RMSNorm, Transformer

__all__ = ["MODELS", "batch_of", "build", "units_of"]


class Llama(ParityModel):
    """The demo's decoder: attention and blocks own parameters beside their children."""

    def __init__(self, layers: int, dim: int = 64) -> None:
        super().__init__()
        hidden = dim * 3 // 2
        decoder = Transformer(
            ModelConfig(
                vocab=VOCAB, dim=dim, layers=layers, heads=4, kv_heads=2, hidden=hidden, max_seq=SEQ
            )
        )
        self.embed, self.layers, self.norm = decoder.embed, decoder.blocks, decoder.norm
        self.head = decoder.output
        self.register_buffer("rope_cos", decoder.rope_cos, persistent=False)
        self.register_buffer("rope_sin", decoder.rope_sin, persistent=False)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.rope_cos, self.rope_sin)
        return self.norm(x).flatten(0, 1)


class Router(nn.Module):
    """Top-k gates ``[..., experts]`` float32, zero for experts not chosen."""

    def __init__(self, dim: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.bias = nn.Parameter(torch.empty(experts))
        self.gate = nn.Linear(dim, experts, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.sigmoid(self.gate(x).float() + self.bias.float())
        values, chosen = scores.topk(self.top_k, dim=-1)
        return torch.zeros_like(scores).scatter(-1, chosen, values)


class Experts(nn.Module):
    """SwiGLU experts as three stacked weights ``[experts, hidden, dim]``."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, hidden, dim))
        self.w3 = nn.Parameter(torch.empty(experts, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, dim))

    def forward(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        # FSDP2 puts an autograd node at a unit's inputs: there the gradients of all uses inside
        # meet before they are added to those of uses outside. Without a node of its own, such as
        # a dispatch of tokens is, the compiled graph would add in another order.
        x = x.view_as(x)
        # Every expert sees every token; the gates drop what was not routed to it.
        inner = F.silu(F.linear(x, self.w1.flatten(0, 1))) * F.linear(x, self.w3.flatten(0, 1))
        inner = inner.unflatten(-1, (gates.shape[-1], -1)) * gates.unsqueeze(-1).to(inner.dtype)
        return inner.flatten(-2) @ self.w2.flatten(0, 1)


class MoeBlock(nn.Module):
    """A gated token mixer, then routed experts and a shared one."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.moe_gamma = nn.Parameter(torch.empty(dim))
        self.mixer_norm = RMSNorm(dim, 1e-5)
        self.mixer = nn.Linear(dim, dim, bias=False)
        self.mixer_gate = nn.Linear(dim, dim, bias=False)
        self.moe_norm = RMSNorm(dim, 1e-5)
        self.router = Router(dim, experts, top_k=2)
        self.shared_gamma = nn.Parameter(torch.empty(dim))
        self.shared_expert = nn.Linear(dim, dim, bias=False)
        self.experts = Experts(dim, hidden, experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.mixer_norm(x)
        sums = torch.cumsum(self.mixer(mixed).float(), dim=1) / SEQ
        x = x + sums.to(x.dtype) * torch.sigmoid(self.mixer_gate(mixed))
        normed = self.moe_norm(x)
        shared = self.shared_expert(normed) * self.shared_gamma
        return x + (self.experts(normed, self.router(normed)) + shared) * self.moe_gamma


class Moe(ParityModel):
    """MoE blocks; the experts of each are a unit of their own inside the block's."""

    def __init__(self, layers: int, dim: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleDict({str(i): MoeBlock(dim, 32, 8) for i in range(layers)})
        self.norm = RMSNorm(dim, 1e-5)
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.norm(x).flatten(0, 1)


class VitBlock(nn.Module):
    """Pre-norm encoder block with fused qkv, biases and a layer scale per branch."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.gamma1 = nn.Parameter(torch.empty(dim))
        self.gamma2 = nn.Parameter(torch.empty(dim))
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, dim // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, seq, dim)
        x = x + self.proj(out) * self.gamma1
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)))) * self.gamma2


class Vit(ParityModel):
    """A root that owns ``pos_embed`` and ``cls_token``; bytes are read as grey values."""

    def __init__(self, layers: int, dim: int = 64) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.empty(1, SEQ // 2 + 1, dim))
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.patch_embed = nn.Linear(2, dim)
        self.layers = nn.Sequential(*(VitBlock(dim, 4) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        grey = (tokens.to(self.cls_token.dtype) / VOCAB).unflatten(1, (SEQ // 2, 2))
        x = self.patch_embed(grey)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        # Every patch predicts, so that there is something to cut into chunks.
        return self.norm(self.layers(x))[:, 1:].flatten(0, 1)


class UnevenBlock(nn.Module):
    """An MLP whose sizes no number of ranks divides, with a parameter of a single row."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.empty(1))
        self.norm = RMSNorm(dim, 1e-5)
        self.mix = nn.Linear(SEQ, SEQ, bias=False)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.temperature


class Uneven(ParityModel):
    """Dim 0 of most parameters is 3, 5 or 7 modulo 8, and 1 for one per block."""

    def __init__(self, layers: int, dim: int = 61, hidden: int = 75) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(UnevenBlock(dim, hidden) for _ in range(layers))
        self.norm = RMSNorm(dim, 1e-5)
        self.head = nn.Linear(dim, VOCAB + 3, bias=False)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).flatten(0, 1)


class Frozen(Llama):
    """One whole block but its norms, and the embedding, are not trained."""

    def __init__(self, layers: int, dim: int = 32) -> None:
        super().__init__(layers, dim)
        self.embed.requires_grad_(False)
        for name, parameter in self.layers[0].named_parameters():
            parameter.requires_grad_("norm" in name)


class Unused(Llama):
    """A linear that no forward calls, and a parameter whose use doesn't reach the loss."""

    def __init__(self, layers: int, dim: int = 32) -> None:
        super().__init__(layers, dim)
        self.layers[0].spare = nn.Linear(dim, dim)
        self.layers[1].idle = nn.Parameter(torch.empty(dim))


class Branch(Llama):
    """Leaves its first block out of every third step."""

    def forward(  # type: ignore[override]
        self, tokens: torch.Tensor, targets: torch.Tensor, short: bool
    ) -> torch.Tensor:
        self.short = short
        return super().forward(tokens, targets)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in list(self.layers)[int(self.short) :]:
            x = layer(x, self.rope_cos, self.rope_sin)
        return self.norm(x).flatten(0, 1)


def experts_then_blocks(model: nn.Module) -> list[Unit]:
    """Each block's experts before the block, then the root."""
    *blocks, root = blocks_then_root(model)
    return [unit for block in blocks for unit in (f"{block}.experts", block)] + [root]


def short_or_not(step: int, rank: int, size: int) -> tuple[object, ...]:
    """A batch, and whether a block is left out."""
    return (*batch_of(step, rank, size), step % 3 == 1)


def _of(kind: Callable[..., nn.Module], width: int | None = None) -> Callable[..., nn.Module]:
    """Builds ``kind`` by blocks and width; ``width`` in the place of its own."""

    def built(layers: int, dim: int | None) -> nn.Module:
        dim = dim or width
        return kind(layers) if dim is None else kind(layers, dim)

    return built


def _float8(layers: int, dim: int | None) -> nn.Module:
    """The decoder with linears that multiply in float8, and gather so; the head does not."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(
        build("llama", layers=layers, dim=dim),
        config=Float8LinearConfig(enable_fsdp_float8_all_gather=True),
        module_filter_fn=lambda module, name: isinstance(module, nn.Linear) and name != "head",
    )


_MATRIX = Model(_of(Llama)).parallelism
_REUSE: dict[str, Any] = {
    "parallelism": FSDP_AND_HSDP,
    "backends": ("aot_eager",),
    "group": "reuse",
}

MODELS: dict[str, Model] = {
    "llama": Model(_of(Llama), parallelism=(*_MATRIX, "fsdp+tp")),
    "moe": Model(_of(Moe), experts_then_blocks),
    "vit": Model(_of(Vit)),
    "uneven": Model(_of(Uneven)),
    # A parameter used more than once, run as it is.
    **{name: Model(_of(kind), **_REUSE) for name, kind in REUSE_MODELS.items()},
    # An activation that several units read.
    **{
        name: Model(_of(kind), parallelism=FSDP_AND_HSDP, backends=("aot_eager",), group="shared")
        for name, kind in SHARED_MODELS.items()
    },
    # Of transformers and timm.
    **HF_MODELS,
    # Of named rows.
    "decoder": Model(_of(Llama, 32), parallelism=()),
    "frozen": Model(_of(Frozen), parallelism=()),
    "unused": Model(_of(Unused), parallelism=()),
    "branch": Model(_of(Branch, 32), batch=short_or_not, parallelism=()),
    "float8": Model(_float8, parallelism=(), needs=("torchao",), own_weights=True),
    "tensor": Model(_of(TensorDecoder, 32), parallelism=()),
    "tensor_shared": Model(_of(partial(TensorDecoder, shares=True), 32), parallelism=()),
}
"""By name. Those with a ``parallelism`` are in the matrix."""


def units_of(name: str, model: nn.Module) -> list[Unit]:
    """The ``fully_shard`` calls of one of :data:`MODELS`, the root last."""
    return MODELS[name].units(model)


def build(name: str, *, layers: int = 1, dim: int | None = None, chunks: int = 1) -> nn.Module:
    """A model of ``layers`` blocks, its weights equal bit for bit for equal arguments.

    Args:
        name: of :data:`MODELS`.
        layers: number of blocks.
        dim: width; None for the model's own.
        chunks: in how many parts the loss is computed.
    """
    model = MODELS[name].build(layers, dim)
    if chunks > 1:
        model.chunks = chunks  # type: ignore[assignment]
    if MODELS[name].own_weights:
        return model
    generator = torch.Generator().manual_seed(0)
    for fqn, parameter in model.named_parameters():
        leaf = fqn.rpartition(".")[2]
        with torch.no_grad():
            if parameter.dim() > 1:
                deviation = 1.0 if "embed" in fqn else parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, deviation, generator=generator)
            elif leaf == "bias":
                parameter.normal_(0.0, 0.02, generator=generator)
            elif leaf == "weight":
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.5, 0.1, generator=generator)
    return model
