"""What the demo runs, checked before any rank starts. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HEAD_DIM = 32
"""Width of one attention head."""

DIM_MULTIPLE = 2 * HEAD_DIM
"""``dim`` is a multiple of this: two query heads share one key/value head."""

MAX_RANKS = 64
"""More processes than this on one machine is a typing error."""

REDUCE_DTYPES = ("bf16", "fp32")
BACKENDS = ("aot_eager", "inductor")


@dataclass(frozen=True)
class Settings:
    """One demo.

    Attributes:
        ranks: processes, at least 2.
        nodes: simulated nodes; divides ``ranks``.
        steps: optimizer steps.
        layers: transformer blocks.
        dim: model width, a multiple of 64.
        backend: ``"aot_eager"`` or ``"inductor"``.
        reduce_dtype: dtype that gradients are reduced in, ``"bf16"`` or ``"fp32"``.
        seed: of the weights and of the choice of text.
        batch: sequences per rank and step.
        seq: tokens (bytes) per sequence.
        lr: AdamW's learning rate.
        channels: ring channels that the simulator splits a buffer over.
        chunk_bytes: bytes of a buffer that go to one channel before the next one's turn.
        timeout_s: limit in seconds for the whole demo.

    Raises:
        ValueError: a value is out of range; the message starts with the option's name.
    """

    ranks: int = 4
    nodes: int = 2
    steps: int = 25
    layers: int = 4
    dim: int = 128
    backend: Literal["aot_eager", "inductor"] = "aot_eager"
    reduce_dtype: Literal["bf16", "fp32"] = "bf16"
    seed: int = 0
    batch: int = 2
    seq: int = 64
    lr: float = 3e-3
    channels: int = 8
    chunk_bytes: int = 512
    timeout_s: float = 900.0

    def __post_init__(self) -> None:
        if not 2 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"--ranks must be from 2 to {MAX_RANKS}, got {self.ranks}")
        if self.nodes < 1 or self.ranks % self.nodes:
            raise ValueError(
                f"--nodes must divide --ranks ({self.ranks}) evenly, got {self.nodes}; "
                f"try one of {', '.join(str(n) for n in self._divisors(self.ranks))}"
            )
        for name in ("steps", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.dim < DIM_MULTIPLE or self.dim % DIM_MULTIPLE:
            raise ValueError(
                f"--dim must be a positive multiple of {DIM_MULTIPLE} (pairs of {HEAD_DIM} wide "
                f"attention heads), got {self.dim}"
            )
        if self.backend not in BACKENDS:
            raise ValueError(f"--backend must be one of {', '.join(BACKENDS)}, got {self.backend}")
        if self.reduce_dtype not in REDUCE_DTYPES:
            raise ValueError(
                f"--reduce-dtype must be one of {', '.join(REDUCE_DTYPES)}, got {self.reduce_dtype}"
            )
        if self.timeout_s <= 0:
            raise ValueError(f"--timeout must be positive, got {self.timeout_s:g}")

    @staticmethod
    def _divisors(number: int) -> list[int]:
        return [n for n in range(1, number + 1) if number % n == 0]

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes
