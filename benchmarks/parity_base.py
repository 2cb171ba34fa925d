"""What all models of the parity matrix share."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from torch_ext_bucketing.testing import text

__all__ = ["SEQ", "VOCAB", "ParityModel"]

VOCAB = text.VOCAB
SEQ = 16
"""Tokens per sequence; an image is the same bytes as a square of ``SEQ ** 0.5`` patches a side."""


class ParityModel(nn.Module):
    """Features, a head, and the loss computed whole or in chunks.

    A subclass sets ``head`` (a bias-free ``nn.Linear`` to the vocabulary) and defines
    :meth:`features`; ``chunks`` says in how many parts the loss is computed.
    """

    head: nn.Linear
    chunks: int = 1

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids ``[batch, SEQ]`` int64 to the head's input ``[rows, dim]``."""
        raise NotImplementedError

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy, a scalar float32. ``targets`` ``[batch, SEQ]`` int64."""
        features = self.features(tokens)
        targets = targets[:, -features.shape[0] // tokens.shape[0] :].flatten()
        if self.chunks == 1:
            return F.cross_entropy(self.head(features).float(), targets)
        # The weight is read once and used in every chunk, so that its gradient is summed over
        # the chunks before it is reduced over the ranks. As many reads would be as many
        # reductions, and a sum of rounded sums.
        weight = self.head.weight
        total = torch.zeros((), dtype=torch.float32)
        for part, wanted in zip(
            features.chunk(self.chunks), targets.chunk(self.chunks), strict=True
        ):
            logits = F.linear(part, weight).float()
            total = total + F.cross_entropy(logits, wanted, reduction="sum")
        return total / targets.numel()
