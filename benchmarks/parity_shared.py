"""Models in which several units read one activation, whose gradients eager FSDP2 adds by unit."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.parity_base import SEQ, VOCAB, ParityModel
from torch_ext_bucketing.testing.model import RMSNorm

__all__ = ["SHARED_MODELS"]


class Attention(nn.Module):
    """Attends to itself, with a bias that it hands on, or to a memory."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = RMSNorm(dim, 1e-5)
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
    """Of an encoder or a decoder, with the position bias that all layers of it share."""

    def __init__(self, dim: int, *, decodes: bool) -> None:
        super().__init__()
        self.own = Attention(dim)
        self.cross = Attention(dim) if decodes else None
        self.norm = RMSNorm(dim, 1e-5)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor, memory: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.own(x, bias)
        if self.cross is not None:
            x = self.cross(x, memory=memory)
        return x + self.down(F.relu(self.up(self.norm(x)))), bias


class Translator(ParityModel):
    """An encoder and a decoder of so many layers each, as T5."""

    def __init__(self, layers: int, dim: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.bias = nn.Embedding(SEQ, SEQ)
        sides = [decodes for decodes in (False, True) for _ in range(layers + 1)]
        self.layers = nn.ModuleList(TranslatorLayer(dim, decodes=side) for side in sides)
        self.norm = RMSNorm(dim, 1e-5)
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        memory, x = self.embed(tokens), self.embed(tokens.roll(1, -1))
        bias = self.bias(torch.arange(SEQ, device=tokens.device))
        half = len(self.layers) // 2
        for layer in self.layers[:half]:
            memory, bias = layer(memory, bias)
        for layer in self.layers[half:]:
            x, bias = layer(x, bias, memory=memory)
        return self.norm(x).flatten(0, 1)


class Level(nn.Module):
    """A level of a U-Net, on the way down, or up with what was there on the way down."""

    def __init__(self, dim: int, up: bool) -> None:
        super().__init__()
        self.norm = RMSNorm(dim, 1e-5)
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
    """So many levels down, one at the bottom, and the same up again, with skip connections."""

    def __init__(self, layers: int, dim: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.depth = layers + 1
        self.layers = nn.ModuleList(
            Level(dim, up=i > self.depth) for i in range(2 * self.depth + 1)
        )
        self.norm = RMSNorm(dim, 1e-5)
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        skips: list[torch.Tensor] = []
        for level in self.layers[: self.depth]:
            skips.append(level(x))
            x = skips[-1].unflatten(1, (-1, 2)).mean(2)
        x = self.layers[self.depth](x)
        for level in self.layers[self.depth + 1 :]:
            skip = skips.pop()
            x = level(x.repeat_interleave(2, 1), skips=[{"x": skip}])
        return self.norm(x).flatten(0, 1)


class ValueBlock(nn.Module):
    """Mixes its values with those of the first block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.empty(dim))
        self.norm = RMSNorm(dim, 1e-5)
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
    """A decoder every block of which reads the first block's values."""

    def __init__(self, layers: int, dim: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(ValueBlock(dim) for _ in range(layers + 2))
        self.norm = RMSNorm(dim, 1e-5)
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x, first = self.embed(tokens), None
        for layer in self.layers:
            x, first = layer(x, first)
        return self.norm(x).flatten(0, 1)


class NextToken(nn.Module):
    """Predicts one token further, from the features and the next token's embedding."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.embed_norm = RMSNorm(dim, 1e-5), RMSNorm(dim, 1e-5)
        self.join = nn.Linear(2 * dim, dim, bias=False)
        self.block = ValueBlock(dim)

    def forward(self, x: torch.Tensor, *, embedded: torch.Tensor) -> torch.Tensor:
        x = self.join(torch.cat((self.norm(x), self.embed_norm(embedded)), -1))
        x, _ = self.block(x, None)
        return x


class MultiToken(ValueResidual):
    """Several tokens are predicted at once, one module after the other, as in DeepSeek-V3; all
    share the embedding and the head."""

    def __init__(self, layers: int, dim: int = 32) -> None:
        super().__init__(layers, dim)
        self.layers.extend(NextToken(dim) for _ in range(2))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x, first = self.embed(tokens), None
        loss = torch.zeros((), device=tokens.device)
        for layer in self.layers:
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


SHARED_MODELS = {
    "translator": Translator,
    "u_net": UNet,
    "value_residual": ValueResidual,
    "multi_token": MultiToken,
}
