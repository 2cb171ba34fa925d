"""Define the models of the parity rows: tiny, and shaped where parameter orders go wrong."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from torch_ext_bucketing.testing.training import Block, ModelConfig, RMSNorm, rotary_tables

from .base import SEQ, VOCAB, Model, ParityModel, Unit, batch_of, blocks_then_root
from .hf import HF_MODELS
from .tensor import TensorDecoder


class Llama(ParityModel):
    """The demo's decoder: attention and blocks own parameters beside their children."""

    def __init__(self, layers: int, dim: int = 64) -> None:
        config = ModelConfig(VOCAB, dim, layers, hidden=dim * 3 // 2, max_seq=SEQ)
        super().__init__(dim, nn.ModuleList(Block(config) for _ in range(layers)))
        cos, sin = rotary_tables(SEQ, config.head_dim)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.through(list(self.layers.children()), tokens)

    def through(self, layers: Sequence[nn.Module], tokens: torch.Tensor) -> torch.Tensor:
        """Run :meth:`features` through some of the layers."""
        x = self.embed(tokens)
        for layer in layers:
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
        self.mixer_norm = RMSNorm(dim)
        self.mixer = nn.Linear(dim, dim, bias=False)
        self.mixer_gate = nn.Linear(dim, dim, bias=False)
        self.moe_norm = RMSNorm(dim)
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
        blocks = {str(i): MoeBlock(dim, 32, 8) for i in range(layers)}
        super().__init__(dim, nn.ModuleDict(blocks))


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
        blocks = nn.Sequential(*(VitBlock(dim, 4) for _ in range(layers)))
        super().__init__(dim, blocks, embed=nn.Linear(2, dim), norm=nn.LayerNorm(dim))
        self.pos_embed = nn.Parameter(torch.empty(1, SEQ // 2 + 1, dim))
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        grey = (tokens.to(self.cls_token.dtype) / VOCAB).unflatten(1, (SEQ // 2, 2))
        x = self.embed(grey)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        # Every patch predicts, so that there is something to cut into chunks.
        return self.norm(self.layers(x))[:, 1:].flatten(0, 1)


class UnevenBlock(nn.Module):
    """An MLP whose sizes no number of ranks divides, with a parameter of a single row."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.empty(1))
        self.norm = RMSNorm(dim)
        self.mix = nn.Linear(SEQ, SEQ, bias=False)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.temperature


class Uneven(ParityModel):
    """A decoder of :class:`UnevenBlock`: no number of ranks divides dim 0 of most parameters."""

    def __init__(self, layers: int, dim: int = 61, hidden: int = 75) -> None:
        blocks = nn.ModuleList(UnevenBlock(dim, hidden) for _ in range(layers))
        super().__init__(dim, blocks, vocab=VOCAB + 3)


# --- models that use a parameter more than once, as people write them ----------------------------

# Eager FSDP2 adds the gradients of all uses before it reduces them.


class Twice(nn.Module):
    """A square weight read three times, one of the three values used twice."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(dim))
        self.norm = RMSNorm(dim)
        self.w = nn.Parameter(torch.empty(dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.w
        x = x + F.silu(F.linear(self.norm(x), first)) @ self.w * self.gamma
        x = x + torch.sigmoid(F.linear(x, first.t()))
        return x + F.linear(F.silu(x), self.w) * self.gamma


class TwoDtypes(nn.Module):
    """A weight used as it is gathered, and as float32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = RMSNorm(dim)
        self.w = nn.Parameter(torch.empty(dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.silu(F.linear(self.norm(x), self.w))
        precise = F.linear(x.float(), self.w.float())
        return x + torch.sigmoid(F.linear(precise.to(x.dtype), self.w))


class Checkpointed(nn.Module):
    """A weight used inside a checkpointed region, twice, and outside of it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = RMSNorm(dim)
        self.w = nn.Parameter(torch.empty(dim, dim))
        self.down = nn.Linear(dim, dim, bias=False)

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(F.linear(self.norm(x), self.w)) @ self.w)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.linear(x, self.w)
        x = x + checkpoint(self.branch, x, use_reentrant=False)
        return x + torch.sigmoid(F.linear(x, self.w))


class Mlp(nn.Module):
    """A plain residual branch."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = RMSNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Reuse(ParityModel):
    """Layers of one kind, or its head, used again."""

    block: Callable[[int], nn.Module] = Mlp
    tied = False

    def __init__(self, layers: int, dim: int = 37) -> None:
        super().__init__(dim, nn.ModuleList(type(self).block(dim) for _ in range(layers)))
        if self.tied:
            self.head.weight = self.embed.weight


# --- models whose activations are read by several units -------------------------------------------

# Eager FSDP2 adds the gradients of what they read by unit.


class SharedAttention(nn.Module):
    """Attends to itself, with a bias that it hands on, or to a memory."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = RMSNorm(dim)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, memory: torch.Tensor | None = None
    ) -> torch.Tensor:
        normed = self.norm(x)
        read = normed if memory is None else memory
        scores = self.q(normed) @ self.k(read).transpose(-1, -2)
        if bias is not None:
            scores = scores + bias
        return x + self.out(scores.softmax(-1) @ self.v(read))


class TranslatorLayer(nn.Module):
    """A layer of an encoder or a decoder, with the position bias that all layers of it share."""

    def __init__(self, dim: int, *, decodes: bool) -> None:
        super().__init__()
        self.own = SharedAttention(dim)
        self.cross = SharedAttention(dim) if decodes else None
        self.norm = RMSNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor, memory: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.own(x, bias)
        if self.cross is not None:
            x = self.cross(x, memory=memory)
        return x + self.down(F.relu(self.up(self.norm(x)))), bias


class Translator(ParityModel):
    """An encoder and a decoder of equally many layers, as in T5."""

    def __init__(self, layers: int, dim: int = 32) -> None:
        sides = [decodes for decodes in (False, True) for _ in range(layers + 1)]
        super().__init__(dim, nn.ModuleList(TranslatorLayer(dim, decodes=side) for side in sides))
        self.bias = nn.Embedding(SEQ, SEQ)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        memory, x = self.embed(tokens), self.embed(tokens.roll(1, -1))
        bias = self.bias(torch.arange(SEQ, device=tokens.device))
        layers = list(self.layers.children())
        half = len(layers) // 2
        for layer in layers[:half]:
            memory, bias = layer(memory, bias)
        for layer in layers[half:]:
            x, bias = layer(x, bias, memory=memory)
        return self.norm(x).flatten(0, 1)


class Level(nn.Module):
    """A level of a U-Net, on the way down, or up with what was there on the way down."""

    def __init__(self, dim: int, up: bool) -> None:
        super().__init__()
        self.norm = RMSNorm(dim)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)
        if up:
            self.gate = nn.Linear(dim, dim)

    def forward(
        self, x: torch.Tensor, *, skips: list[dict[str, torch.Tensor]] | None = None
    ) -> torch.Tensor:
        for skip in skips or ():
            x = x * torch.sigmoid(self.gate(skip["x"])) + skip["x"]
        return x + self.conv(self.norm(x).transpose(1, 2)).transpose(1, 2)


class UNet(ParityModel):
    """Levels down, one at the bottom, and the same up again, with skip connections."""

    def __init__(self, layers: int, dim: int = 32) -> None:
        depth = layers + 1
        super().__init__(dim, nn.ModuleList(Level(dim, up=i > depth) for i in range(2 * depth + 1)))
        self.depth = depth

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        levels = list(self.layers.children())
        skips: list[torch.Tensor] = []
        for level in levels[: self.depth]:
            skips.append(level(x))
            x = skips[-1].unflatten(1, (-1, 2)).mean(2)
        x = levels[self.depth](x)
        for level in levels[self.depth + 1 :]:
            skip = skips.pop()
            x = level(x.repeat_interleave(2, 1), skips=[{"x": skip}])
        return self.norm(x).flatten(0, 1)


class ValueBlock(nn.Module):
    """Mixes its values with those of the first block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.empty(dim))
        self.norm = RMSNorm(dim)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(
        self, x: torch.Tensor, first: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm(x)
        values = self.v(normed) * self.mix
        if first is None:
            first = values
        else:
            values = values + first * torch.sigmoid(first)
        scores = (self.q(normed) @ self.k(normed).transpose(-1, -2)).softmax(-1)
        return x + self.out(scores @ values), first


class ValueResidual(ParityModel):
    """A decoder whose blocks all read the first block's values."""

    def __init__(self, layers: int, dim: int = 32) -> None:
        super().__init__(dim, nn.ModuleList(ValueBlock(dim) for _ in range(layers + 2)))

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x, first = self.embed(tokens), None
        for layer in self.layers.children():
            x, first = layer(x, first)
        return self.norm(x).flatten(0, 1)


class NextToken(nn.Module):
    """Predicts one token further, from the features and the next token's embedding."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.embed_norm = RMSNorm(dim), RMSNorm(dim)
        self.join = nn.Linear(2 * dim, dim, bias=False)
        self.block = ValueBlock(dim)

    def forward(self, x: torch.Tensor, *, embedded: torch.Tensor) -> torch.Tensor:
        x = self.join(torch.cat((self.norm(x), self.embed_norm(embedded)), -1))
        x, _ = self.block(x, None)
        return x


class MultiToken(ValueResidual):
    """A decoder that predicts several tokens at once, module after module, like DeepSeek-V3."""

    def __init__(self, layers: int, dim: int = 32) -> None:
        super().__init__(layers, dim)
        further = (NextToken(dim) for _ in range(2))
        self.layers = nn.ModuleList([*self.layers.children(), *further])

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x, first = self.embed(tokens), None
        loss = torch.zeros((), device=tokens.device)
        for layer in self.layers.children():
            if isinstance(layer, NextToken):
                tokens, targets = tokens.roll(-1, -1), targets.roll(-1, -1)
                x = layer(x, embedded=self.embed(tokens))
                logits = self.head(self.norm(x)).float().flatten(0, 1)
                loss = loss + 0.3 * F.cross_entropy(logits, targets.flatten())
            else:
                x, first = layer(x, first)
                last = x
        logits = self.head(self.norm(last)).float().flatten(0, 1)
        return loss + F.cross_entropy(logits, targets.roll(2, -1).flatten())


# --- models of named rows ------------------------------------------------------------------------


class Frozen(Llama):
    """One whole block but its norms, and the embedding, are not trained."""

    def __init__(self, layers: int, dim: int = 32) -> None:
        super().__init__(layers, dim)
        self.embed.requires_grad_(False)
        for name, parameter in self.layers.get_submodule("0").named_parameters():
            parameter.requires_grad_("norm" in name)


class Unused(Llama):
    """A linear that no forward calls, and a parameter whose use doesn't reach the loss."""

    def __init__(self, layers: int, dim: int = 32) -> None:
        super().__init__(layers, dim)
        first, second, *_ = self.layers.children()
        first.spare = nn.Linear(dim, dim)
        second.idle = nn.Parameter(torch.empty(dim))


class Branch(Llama):
    """Leaves its first block out of every third step."""

    def forward(  # type: ignore[override]
        self, tokens: torch.Tensor, targets: torch.Tensor, short: bool
    ) -> torch.Tensor:
        self.short = short
        return super().forward(tokens, targets)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.through(list(self.layers.children())[int(self.short) :], tokens)


def experts_then_blocks(model: nn.Module) -> list[Unit]:
    """Return each block's experts before the block, then the root."""
    *blocks, root = blocks_then_root(model)
    return [unit for block in blocks for unit in (f"{block}.experts", block)] + [root]


def short_or_not(step: int, rank: int, size: int) -> tuple[object, ...]:
    """Return a batch, and whether a block is left out."""
    return (*batch_of(step, rank, size), step % 3 == 1)


def _float8(layers: int, dim: int | None = None) -> nn.Module:
    """Make the decoder with float8 linears and float8 gathers; the head is not converted."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(
        build("llama", layers=layers, dim=dim),
        config=Float8LinearConfig(enable_fsdp_float8_all_gather=True),
        module_filter_fn=lambda module, name: isinstance(module, nn.Linear) and name != "head",
    )


_REUSED: dict[str, dict[str, Any]] = {
    "twice": {"block": Twice},
    "tied": {"tied": True},
    "tied_chunked": {"tied": True, "head_chunks": 4},
    "chunked_head": {"head_chunks": 4},
    "block_twice": {"calls": 2},
    "two_dtypes": {"block": TwoDtypes},
    "checkpointed": {"block": Checkpointed},
}
_SHARED = {
    "translator": Translator,
    "u_net": UNet,
    "value_residual": ValueResidual,
    "multi_token": MultiToken,
}
_ONCE: dict[str, Any] = {"parallelism": ("fsdp", "hsdp"), "backends": ("aot_eager",)}

MODELS: dict[str, Model] = {
    "llama": Model(Llama, parallelism=("fsdp", "hsdp", "fsdp+chunked_loss", "fsdp+tp")),
    "moe": Model(Moe, experts_then_blocks),
    "vit": Model(Vit),
    "uneven": Model(Uneven),
    # A parameter used more than once, run as it is.
    **{
        name: Model(type("Reuse", (Reuse,), about), group="reuse", **_ONCE)
        for name, about in _REUSED.items()
    },
    # An activation that several units read.
    **{name: Model(kind, group="shared", **_ONCE) for name, kind in _SHARED.items()},
    # Of transformers and timm.
    **HF_MODELS,
    # Of named rows.
    "decoder": Model(Llama, width=32, parallelism=()),
    "frozen": Model(Frozen, parallelism=()),
    "unused": Model(Unused, parallelism=()),
    "branch": Model(Branch, width=32, batch=short_or_not, parallelism=()),
    "float8": Model(_float8, parallelism=(), needs=("torchao",), own_weights=True),
    "tensor": Model(TensorDecoder, width=32, parallelism=()),
    "tensor_shared": Model(partial(TensorDecoder, shares=True), width=32, parallelism=()),
}
"""By name. Those with a ``parallelism`` are in the matrix."""


def units_of(name: str, model: nn.Module) -> list[Unit]:
    """Return the ``fully_shard`` calls of one of :data:`MODELS`, the root last."""
    return MODELS[name].units(model)


def build(name: str, *, layers: int = 1, dim: int | None = None, chunks: int = 1) -> nn.Module:
    """Build a model of ``layers`` blocks, with weights equal bit for bit for equal arguments."""
    about = MODELS[name]
    dim = dim or about.width
    model = about.kind(layers) if dim is None else about.kind(layers, dim)
    if chunks > 1:
        model.chunks = chunks  # type: ignore[assignment]
    if about.own_weights:
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
