"""Models that use a parameter more than once, as people write them; see :mod:`.parity_models`.

Eager FSDP2 adds the gradients of all uses before it reduces them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.parity_base import VOCAB, ParityModel
from torch_ext_bucketing.testing.model import RMSNorm

__all__ = ["REUSE_MODELS"]

HEAD_CHUNKS = 4


class Twice(nn.Module):
    """A square weight read three times, one of the three values used twice."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(dim))
        self.norm = RMSNorm(dim, 1e-5)
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
        self.norm = RMSNorm(dim, 1e-5)
        self.w = nn.Parameter(torch.empty(dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.silu(F.linear(self.norm(x), self.w))
        precise = F.linear(x.float(), self.w.float())
        return x + torch.sigmoid(F.linear(precise.to(x.dtype), self.w))


class Checkpointed(nn.Module):
    """A weight used inside a checkpointed region, twice, and outside of it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = RMSNorm(dim, 1e-5)
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
        self.norm = RMSNorm(dim, 1e-5)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class _Reuse(ParityModel):
    block: Callable[[int], nn.Module] = Mlp
    calls = 1
    """How often each block is called."""
    tied = False
    head_chunks = 1
    """In how many parts the head is called, each time anew."""

    def __init__(self, layers: int, dim: int = 37) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(type(self).block(dim) for _ in range(layers))
        self.norm = RMSNorm(dim, 1e-5)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        if self.tied:
            self.head.weight = self.embed.weight

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            for _ in range(self.calls):
                x = layer(x)
        return self.norm(x).flatten(0, 1)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.head_chunks == 1:
            return super().forward(tokens, targets)
        features, targets = self.features(tokens), targets.flatten()
        total = torch.zeros((), dtype=torch.float32)
        for part, wanted in zip(
            features.chunk(self.head_chunks), targets.chunk(self.head_chunks), strict=True
        ):
            total = total + F.cross_entropy(self.head(part).float(), wanted, reduction="sum")
        return total / targets.numel()


def _variant(name: str, **attributes: Any) -> type[ParityModel]:
    return type(name, (_Reuse,), attributes)


REUSE_MODELS: dict[str, Callable[..., ParityModel]] = {
    "twice": _variant("TwiceModel", block=Twice),
    "tied": _variant("TiedModel", tied=True),
    "tied_chunked": _variant("TiedChunkedModel", tied=True, head_chunks=HEAD_CHUNKS),
    "chunked_head": _variant("ChunkedHeadModel", head_chunks=HEAD_CHUNKS),
    "block_twice": _variant("BlockTwiceModel", calls=2),
    "two_dtypes": _variant("TwoDtypesModel", block=TwoDtypes),
    "checkpointed": _variant("CheckpointedModel", block=Checkpointed),
}
"""By the name of the case."""
