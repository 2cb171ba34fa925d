"""The models of the parity matrix: tiny, and shaped where parameter orders go wrong.

Each maps a batch to its mean cross-entropy. All use only operators whose bits are the same when
autograd runs them and when AOTAutograd's graph is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.parity_base import SEQ, VOCAB, ParityModel
from benchmarks.parity_reuse import REUSE_MODELS
from torch_ext_bucketing.testing import text
from torch_ext_bucketing.testing.model import Block, ModelConfig, RMSNorm, Transformer

__all__ = ["MODELS", "ParityModel", "batch_of", "build", "tensor_parallel", "unit_names"]

_c10d = torch.ops._c10d_functional


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


class _Enter(torch.autograd.Function):
    """The same activation on every tensor-parallel rank; its gradients are added."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _all_reduce(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    """The sum of every tensor-parallel rank's part; its gradient is everyone's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:  # type: ignore[override]
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return grad.view_as(grad), None


def _all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), "sum", group))


class TensorParallelBlock(Block):
    """A decoder block of which this rank has some heads and some columns of the MLP."""

    group: str

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        branch = self.attention(_Enter.apply(self.attention_norm(x), self.group), cos, sin)
        x = x + _Leave.apply(branch, self.group) * self.attention_gamma
        branch = self.mlp(_Enter.apply(self.mlp_norm(x), self.group))
        return x + _Leave.apply(branch, self.group) * self.mlp_gamma


def tensor_parallel(model: Llama, rank: int, size: int, group: str) -> None:
    """Keep one rank's part of every block, in place, as Megatron cuts it: the inner projections by
    rows, those that leave a branch by columns. Parameters stay plain tensors."""
    for block in model.layers:
        assert isinstance(block, Block)
        block.__class__ = TensorParallelBlock
        block.group = group  # type: ignore[assignment]
        attention, mlp = block.attention, block.mlp
        attention.heads //= size
        attention.kv_heads //= size
        attention.scale = nn.Parameter(attention.scale.detach().chunk(size)[rank].clone())
        for linear in (attention.wq, attention.wk, attention.wv, mlp.gate, mlp.up):
            linear.weight = nn.Parameter(linear.weight.detach().chunk(size)[rank].clone())
        for linear in (attention.wo, mlp.down):
            linear.weight = nn.Parameter(linear.weight.detach().chunk(size, dim=1)[rank].clone())


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


MODELS: dict[str, Callable[..., ParityModel]] = {
    "llama": Llama,
    "moe": Moe,
    "vit": Vit,
    "uneven": Uneven,
    **REUSE_MODELS,
}


def build(
    name: str,
    *,
    layers: int = 1,
    dim: int | None = None,
    seed: int = 0,
    chunks: int = 1,
    dtype: torch.dtype = torch.float32,
) -> ParityModel:
    """A model of ``layers`` blocks, its weights equal bit for bit for equal arguments; ``dim``
    None takes the model's own width."""
    model = MODELS[name](layers) if dim is None else MODELS[name](layers, dim)
    model.chunks = chunks
    generator = torch.Generator().manual_seed(seed)
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
        parameter.data = parameter.data.to(dtype)
    return model


def unit_names(name: str, model: ParityModel) -> list[str]:
    """Modules in the order of the ``fully_shard`` calls; the last is the root, ``""``."""
    blocks = [f"layers.{child}" for child, _ in model.layers.named_children()]  # type: ignore[union-attr]
    if name == "moe":
        return [unit for block in blocks for unit in (f"{block}.experts", block)] + [""]
    return [*blocks, ""]


def batch_of(step: int, rank: int, *, size: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's tokens and next-byte targets of a step, each ``[size, SEQ]`` int64."""
    return text.batch(step, rank, size=size, seq=SEQ)
