"""Describe a model of the parity rows, and what all of them share."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F

from torch_ext_bucketing.testing import text
from torch_ext_bucketing.testing.training import RMSNorm

VOCAB = text.VOCAB
SEQ = 16
"""Tokens per sequence; an image is the same bytes as a square of ``SEQ ** 0.5`` patches a side."""

Unit = str | Sequence[str]
"""The modules of one ``fully_shard`` call."""


def batch_of(step: int, rank: int, size: int = 2) -> tuple[torch.Tensor, ...]:
    """Return one rank's tokens and next-byte targets of a step, each ``[size, SEQ]`` int64."""
    return text.batch(step, rank, size=size, seq=SEQ)


def blocks_then_root(model: nn.Module) -> list[Unit]:
    """Return each child of ``layers``, then the root with all the rest."""
    layers = model.get_submodule("layers")
    return [*(f"layers.{child}" for child, _ in layers.named_children()), ""]


@dataclass(frozen=True)
class Model:
    """A model of the parity rows: an entry of :data:`.models.MODELS`.

    Args:
        kind: makes, from a number of blocks and optionally a width, a float32 module on the CPU
            whose ``forward(*batch)`` is the loss, a scalar. :func:`.models.build` draws its weights
            anew unless it sets ``own_weights``.
        units: the units in the order of the ``fully_shard`` calls, the root ``""`` last.
        width: the width to build it with, if not its own.
        batch: returns the arguments of ``forward`` for a step, a data-parallel rank and a number of
            sequences.
        parallelism: entries of ``rows.PARALLELISM`` that the matrix runs it in; none for a model of
            named rows alone.
        backends: backends of ``torch.compile`` that the matrix runs it on.
        group: a name for several models; ``--models`` with it takes all of them.
        needs: packages beside torch. If one is not installed, the table lists the rows as left out.
        own_weights: whether ``kind`` draws the weights, the same at every call.
    """

    kind: Callable[..., nn.Module]
    units: Callable[[nn.Module], list[Unit]] = blocks_then_root
    width: int | None = None
    batch: Callable[[int, int, int], tuple[object, ...]] = batch_of
    parallelism: tuple[str, ...] = ("fsdp", "hsdp", "fsdp+chunked_loss")
    backends: tuple[Literal["aot_eager", "inductor"], ...] = ("aot_eager", "inductor")
    group: str = ""
    needs: tuple[str, ...] = ()
    own_weights: bool = False

    @property
    def missing(self) -> list[str]:
        """Return the packages of ``needs`` that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


class ParityModel(nn.Module):
    """Embedding, ``layers``, norm and head, with the loss computed whole or in chunks."""

    chunks = 1
    """In how many parts the loss is computed."""
    calls = 1
    """How often each layer is called."""
    head_chunks = 1
    """In how many parts the head is called, each time anew."""

    def __init__(
        self,
        dim: int,
        layers: nn.Module,
        *,
        embed: nn.Module | None = None,
        norm: nn.Module | None = None,
        vocab: int = VOCAB,
    ) -> None:
        super().__init__()
        self.embed = embed or nn.Embedding(VOCAB, dim)
        self.layers = layers
        self.norm = norm or RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the head's input ``[rows, dim]`` from token ids ``[batch, SEQ]`` int64."""
        x = self.embed(tokens)
        for layer in self.layers.children():
            for _ in range(self.calls):
                x = layer(x)
        return self.norm(x).flatten(0, 1)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the mean cross-entropy, a scalar in float32; targets: ``[batch, SEQ]`` int64."""
        features = self.features(tokens)
        targets = targets[:, -features.shape[0] // tokens.shape[0] :].flatten()
        parts = self.chunks * self.head_chunks
        if parts == 1:
            return F.cross_entropy(self.head(features).float(), targets)
        head: Callable[[torch.Tensor], torch.Tensor] = self.head
        if self.chunks > 1:
            # The weight is read once and used in every chunk, so that its gradient is summed over
            # the chunks before it is reduced over the ranks. As many reads would be as many
            # reductions, and a sum of rounded sums.
            head = partial(F.linear, weight=self.head.weight)
        total = torch.zeros((), dtype=torch.float32)
        for part, wanted in zip(features.chunk(parts), targets.chunk(parts), strict=True):
            total = total + F.cross_entropy(head(part).float(), wanted, reduction="sum")
        return total / targets.numel()
