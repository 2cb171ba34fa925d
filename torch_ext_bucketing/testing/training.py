"""Define a LLaMA-style decoder for CPU ranks, and train it.

:class:`Attention` (a logit scale per query head) and :class:`Block` (a layer scale per branch) own
a parameter *and* have children, where naive parameter orders go wrong.

Every operator lowers to the same ATen calls in eager and under AOTAutograd, so a backend that
replays the graph gives eager's bits. Therefore RMSNorm is written out.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from .._torch.fsdp2 import parts_of
from ..fqns import canonical_fqn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a :class:`Transformer`, in elements; ``hidden`` is the MLP's inner width."""

    vocab: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 384
    max_seq: int = 64

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        return wide.to(x.dtype) * self.weight


def rotary_tables(seq: int, dim: int, theta: float = 10000.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the rotary embedding, ``[seq, dim]`` float32, ``dim`` even."""
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angle = torch.outer(torch.arange(seq, dtype=torch.float32), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``x`` ``[batch, heads, seq, head_dim]`` by tables ``[seq, head_dim]``."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with a learnable logit scale per query head."""

    scale: nn.Parameter | None

    def __init__(self, config: ModelConfig, plain: bool = False) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.kv_heads
        self.head_dim = config.head_dim
        self.scale = None if plain else nn.Parameter(torch.empty(config.heads))
        kv_dim = config.kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        q = self.wq(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        q = rotate(q, cos, sin)
        if self.scale is not None:
            q = q * self.scale.view(1, self.heads, 1, 1)
        k = rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm transformer block; each branch has a layer scale, owned by the block itself."""

    def __init__(self, config: ModelConfig, plain: bool = False) -> None:
        super().__init__()
        self.plain = plain
        if not plain:
            self.attention_gamma = nn.Parameter(torch.empty(config.dim))
            self.mlp_gamma = nn.Parameter(torch.empty(config.dim))
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config, plain)
        self.mlp_norm = RMSNorm(config.dim)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        branch = self.attention(self.attention_norm(x), cos, sin)
        x = x + (branch if self.plain else branch * self.attention_gamma)
        branch = self.mlp(self.mlp_norm(x))
        return x + (branch if self.plain else branch * self.mlp_gamma)


class Transformer(nn.Module):
    """Token ids ``[batch, seq]`` int64 to logits ``[batch, seq, vocab]`` in the weights' dtype.

    Two models of one config and seed have the same weights, bit for bit. ``dtype`` is that of
    the parameters, which are drawn in float32 first; the rotary tables stay float32. A ``plain``
    one has no scales, as LLaMA.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        plain: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config, plain) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)
        cos, sin = rotary_tables(config.max_seq, config.head_dim)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            drawn = parameter.data
            if name.endswith("_gamma"):
                drawn.fill_(0.5)
            elif drawn.dim() == 1:
                drawn.fill_(1.0)
            else:
                deviation = 1.0 if name == "embed.weight" else 1.0 / math.sqrt(drawn.shape[1])
                drawn.normal_(0.0, deviation, generator=generator)
            parameter.data = drawn.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        seq = tokens.shape[1]
        cos, sin = self.rope_cos[:seq], self.rope_sin[:seq]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.output(self.norm(x))

    def unit_names(self) -> list[str]:
        """Return module names in the order of FSDP2's usual calls: blocks, then the root."""
        return [f"blocks.{i}" for i in range(len(self.blocks))] + [""]


def digest(model: nn.Module) -> str:
    """Return the SHA-256 (hex) of names, dtypes, shapes and bytes of this rank's shards."""
    total = hashlib.sha256()
    for name, parameter in sorted(
        (canonical_fqn(name), parameter) for name, parameter in model.named_parameters()
    ):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        total.update(f"{name} {local.dtype} {tuple(local.shape)} ".encode())
        total.update(raw_bytes(local))
    return total.hexdigest()


@dataclass
class TrainingRecord:
    """One rank's run: per step the :func:`digest`, the loss, and wall time in milliseconds."""

    digests: list[str] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)


class Training:
    """AdamW training of a model, with the record of the steps taken in ``done``.

    ``step`` takes the step's number, runs forward and backward and returns the scalar loss.
    """

    def __init__(
        self, model: nn.Module, step: Callable[[int], torch.Tensor], lr: float = 1e-3
    ) -> None:
        self.model, self.step, self.done = model, step, TrainingRecord()
        groups: dict[bool, list[nn.Parameter]] = {}  # no foreach kernel takes both
        for parameter in model.parameters():
            groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
        parameters = [{"params": group} for group in groups.values()]
        self.optimizer = torch.optim.AdamW(parameters, lr=lr, foreach=True)

    def take(self, recompiles: bool = False) -> None:
        """Take the next step; unless ``recompiles``, raise if a step after the first compiles."""
        # Such a compile could run under other settings, and would be in another report.
        number = len(self.done.loss)
        compiled = number > 0 and not recompiles
        begin = time.perf_counter()
        with torch.compiler.set_stance("fail_on_recompile" if compiled else "default"):
            loss = self.step(number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done.step_ms.append((time.perf_counter() - begin) * 1e3)
        self.done.loss.append(loss.item())
        self.done.digests.append(digest(self.model))


def train(
    model: nn.Module,
    step: Callable[[int], torch.Tensor],
    steps: int,
    *,
    lr: float = 1e-3,
    recompiles: bool = False,
    stop_unlike: Sequence[str] | None = None,
) -> TrainingRecord:
    """Take ``steps`` steps of a :class:`Training`.

    With ``stop_unlike``, the digests of another run, stop after the first step whose weights differ
    on some rank.
    """
    training = Training(model, step, lr)
    for number in range(steps):
        training.take(recompiles)
        if stop_unlike is not None:
            differs = torch.tensor([int(training.done.digests[-1] != stop_unlike[number])])
            differs = differs.to(next(model.parameters()).device)
            dist.all_reduce(differs, op=dist.ReduceOp.MAX)
            if differs.item():
                break
    return training.done


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Copy a tensor's bytes."""
    # Without numpy, which torch does not require.
    parts = [part.detach().cpu().contiguous() for part in parts_of(tensor)]
    return b"".join(ctypes.string_at(part.data_ptr(), part.nbytes) for part in parts)


_CALLS = {
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "all_reduce": ("all_reduce",),
}
"""Functions of ``torch.distributed`` that eager FSDP2 calls, newest name first."""


@contextlib.contextmanager
def count_collectives() -> Iterator[dict[str, int]]:
    """Count calls of ``torch.distributed`` functions in the block, by kind."""
    counts = dict.fromkeys(_CALLS, 0)

    def call(kind: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        counts[kind] += 1
        return original(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for kind, names in _CALLS.items():
            for name in filter(partial(hasattr, dist), names):
                counting = partial(call, kind, getattr(dist, name))
                stack.enter_context(mock.patch.object(dist, name, counting))
        yield counts
