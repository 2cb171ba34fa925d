"""Define the models that graphs are traced from: LLaMA-3 and a mixture of experts like DeepSeek-V3.

They are written to be traced, not run: nothing is initialised. Two things are fixed where a running
model decides by itself, because a fake tensor has no device and no values to look at:

- the attention kernel is called by name: FlashAttention, and the memory-efficient one where keys
  and values are of unequal width, which FlashAttention does not take;
- the all-to-alls of expert parallelism have equal splits, those of perfectly balanced routing, so
  that every shape is static, unless ``DeepSeekConfig.dropless`` selects those that routing leads
  to. Which expert a token goes to is still computed by the router, and the token counts are still
  exchanged.

Every parameter belongs to a module without children.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

from benchmarks.eager_parity.tensor import FeedForward
from torch_ext_bucketing.testing.training import rotary_tables


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of :class:`Llama`; the defaults are those of LLaMA-3 8B."""

    layers: int = 32
    dim: int = 4096
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    vocab: int = 128256
    batch: int = 1
    """Sequences per data-parallel rank."""
    seq: int = 8192
    rope_theta: float = 500000.0


@dataclass(frozen=True)
class DeepSeekConfig:
    """Sizes of :class:`DeepSeek`; the defaults are those of a 16B model like DeepSeek-V3."""

    layers: int = 27
    dense_layers: int = 1
    dim: int = 2048
    heads: int = 16
    hidden: int = 10944
    """Inner width of the dense layers' MLP."""
    vocab: int = 102400
    experts: int = 64
    experts_per_token: int = 6
    shared_experts: int = 2
    expert_hidden: int = 1408
    kv_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    batch: int = 2
    """Sequences per data-parallel rank."""
    seq: int = 4096
    rope_theta: float = 10000.0
    dropless: bool = False
    """Whether the all-to-alls' splits depend on data, as in training; else they are equal."""


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``x`` ``[batch, seq, heads, dim]``; tables ``[seq, dim]``."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * cos.unsqueeze(1) + turned * sin.unsqueeze(1)).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention. Under tensor parallelism a rank has some of the heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        kv_dim = config.kv_heads * self.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        q = self.wq(x).view(batch, seq, -1, self.head_dim)
        k = self.wk(x).view(batch, seq, -1, self.head_dim)
        v = self.wv(x).view(batch, seq, -1, self.head_dim)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        out = torch.ops.aten._scaled_dot_product_flash_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, True
        )[0]
        return self.wo(out.transpose(1, 2).reshape(batch, seq, -1))


class LlamaBlock(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.feed_forward = FeedForward(config.dim, config.hidden)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class _Decoder(nn.Module):
    """Token ids ``[batch, seq]`` int64 to logits ``[batch, seq, vocab]``, local to the rank."""

    def __init__(
        self, config: LlamaConfig | DeepSeekConfig, layers: Iterable[nn.Module], rope_dim: int
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)
        cos, sin = rotary_tables(config.seq, rope_dim, config.rope_theta)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.rope_cos, self.rope_sin)
        return self.output(self.norm(x))


class Llama(_Decoder):
    """Nine parameters per layer and three outside."""

    def __init__(self, config: LlamaConfig) -> None:
        layers = (LlamaBlock(config) for _ in range(config.layers))
        super().__init__(config, layers, config.dim // config.heads)


class LatentAttention(nn.Module):
    """Multi-head latent attention without query compression."""

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        self.config = config
        head_dim = config.nope_dim + config.rope_dim
        kv_dim = config.nope_dim + config.value_dim
        self.wq = nn.Linear(config.dim, config.heads * head_dim, bias=False)
        self.wkv_a = nn.Linear(config.dim, config.kv_rank + config.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(config.kv_rank, eps=1e-5)
        self.wkv_b = nn.Linear(config.kv_rank, config.heads * kv_dim, bias=False)
        self.wo = nn.Linear(config.heads * config.value_dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        c = self.config
        batch, seq, _ = x.shape
        q = self.wq(x).view(batch, seq, c.heads, c.nope_dim + c.rope_dim)
        q_nope, q_rope = q.split((c.nope_dim, c.rope_dim), dim=-1)
        latent, k_rope = self.wkv_a(x).split((c.kv_rank, c.rope_dim), dim=-1)
        kv = self.wkv_b(self.kv_norm(latent)).view(batch, seq, c.heads, c.nope_dim + c.value_dim)
        k_nope, v = kv.split((c.nope_dim, c.value_dim), dim=-1)
        k_rope = _rotate(k_rope.unsqueeze(2), cos, sin).expand(-1, -1, c.heads, -1)
        q = torch.cat((q_nope, _rotate(q_rope, cos, sin)), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        out = torch.ops.aten._scaled_dot_product_efficient_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, True, 0.0, True
        )[0]
        return self.wo(out.transpose(1, 2).reshape(batch, seq, -1))


class Experts(nn.Module):
    """The routed experts' weights, one stacked tensor per matrix; SwiGLU by grouped matmuls."""

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        count, dim, hidden = config.experts, config.dim, config.expert_hidden
        self.w1 = nn.Parameter(torch.empty(count, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(count, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(count, hidden, dim))

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Compute rows of ``x`` ``[tokens, dim]``, sorted by expert; ``counts`` ``[experts]``."""
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        gate = F.silu(torch._grouped_mm(x, self.w1.transpose(-2, -1), offs=ends))
        up = torch._grouped_mm(x, self.w3.transpose(-2, -1), offs=ends)
        return torch._grouped_mm(gate * up, self.w2.transpose(-2, -1), offs=ends)


class MixtureOfExperts(nn.Module):
    """Sigmoid top-k routing with a load-balancing bias, expert parallelism, shared experts."""

    def __init__(self, config: DeepSeekConfig, group: ProcessGroup) -> None:
        super().__init__()
        self.config = config
        self.group = group
        self.gate = nn.Linear(config.dim, config.experts, bias=False)
        self.experts = Experts(config)
        self.shared_experts = FeedForward(config.dim, config.shared_experts * config.expert_hidden)
        self.register_buffer("expert_bias", torch.zeros(config.experts))
        self.register_buffer("tokens_per_expert", torch.zeros(config.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape, top_k = x.shape, self.config.experts_per_token
        x = x.reshape(-1, shape[-1])
        scores = torch.sigmoid(self.gate(x).float())
        chosen = torch.topk(scores + self.expert_bias, top_k, dim=-1, sorted=False).indices
        weights = scores.gather(-1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        counts = torch.zeros_like(self.expert_bias).scatter_add(
            0, chosen.reshape(-1), torch.ones_like(chosen.reshape(-1), dtype=torch.float32)
        )
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)

        by_expert = torch.argsort(chosen.reshape(-1), stable=True)
        source = by_expert // top_k
        routed = self._exchange_and_compute(x[source], counts.to(torch.int64))
        routed = routed.float() * weights.reshape(-1)[by_expert].unsqueeze(-1)
        out = self.shared_experts(x)
        out = out.scatter_add(0, source.unsqueeze(-1).expand(-1, shape[-1]), routed.to(out.dtype))
        return out.view(shape)

    def _exchange_and_compute(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Send ``tokens``, sorted by expert, to their experts' ranks; get the results back.

        ::

            counts -> all_to_all -> order by expert --.
            tokens -> all_to_all -> index -> experts -> index -> all_to_all
        """
        ranks = self.group.size()
        local = self.config.experts // ranks
        received = all_to_all_single(counts.view(ranks, local), None, None, self.group)
        sent_splits = received_splits = [tokens.shape[0] // ranks] * ranks
        if self.config.dropless:
            sent_splits = _sizes(counts.view(ranks, local).sum(1))
            received_splits = _sizes(received.sum(1))
        tokens = all_to_all_single_autograd(tokens, received_splits, sent_splits, self.group)
        # Rows arrive by source rank, then by expert.
        expert = torch.arange(local, device=tokens.device).repeat(ranks)
        expert = torch.repeat_interleave(expert, received.reshape(-1), output_size=tokens.shape[0])
        order = torch.argsort(expert, stable=True)
        out = self.experts(tokens[order], received.sum(0))
        out = torch.empty_like(out).index_copy(0, order, out)
        return all_to_all_single_autograd(out, sent_splits, received_splits, self.group)


def _sizes(counts: torch.Tensor) -> list[int]:
    """Return values as sizes, each at least 0."""
    sizes: list[int] = counts.tolist()
    for size in sizes:
        torch._check(size >= 0)
    return sizes


class DeepSeekBlock(nn.Module):
    """Pre-norm transformer block with a dense or a mixture-of-experts MLP."""

    def __init__(self, config: DeepSeekConfig, dense: bool, group: ProcessGroup) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = LatentAttention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.feed_forward: nn.Module
        if dense:
            self.feed_forward = FeedForward(config.dim, config.hidden)
        else:
            self.feed_forward = MixtureOfExperts(config, group)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class DeepSeek(_Decoder):
    """The first layers dense, the others with experts, which the ranks of ``group`` share."""

    def __init__(self, config: DeepSeekConfig, group: ProcessGroup) -> None:
        routed = config.batch * config.seq * config.experts_per_token
        if config.experts % group.size() or routed % group.size():
            raise ValueError(
                f"{config.experts} experts and {routed} routed tokens must divide evenly over "
                f"{group.size()} ranks"
            )
        layers = (
            DeepSeekBlock(config, i < config.dense_layers, group) for i in range(config.layers)
        )
        super().__init__(config, layers, config.rope_dim)
