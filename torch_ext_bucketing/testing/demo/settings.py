"""Define the demo's options, and check them before any rank starts, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..target import check_options, option

HEAD_DIM = 32
"""Width of one attention head."""


@dataclass(frozen=True)
class Settings:
    """Options of the demo.

    ``batch`` is in sequences per rank and step, ``seq`` in tokens (bytes). ``channels`` and
    ``chunk_bytes`` configure the ring simulator.

    Raises:
        ValueError: a value is out of range. The message begins with the option's name.
    """

    ranks: int = option(4, "processes to start")
    nodes: int = option(2, "simulated nodes; divides the ranks")
    steps: int = option(25, "optimizer steps")
    layers: int = option(4, "transformer blocks")
    dim: int = option(128, "model width, a multiple of 64")
    backend: Literal["aot_eager", "inductor"] = option(
        "aot_eager", "what compiles the graphs", choices=("aot_eager", "inductor")
    )
    reduce_dtype: Literal["bf16", "fp32"] = option(
        "bf16", "dtype that gradients are reduced in", choices=("bf16", "fp32")
    )
    seed: int = option(0, "of the weights and of the choice of text")
    timeout_s: float = option(900.0, "limit in seconds for all", "S")
    batch: int = 2
    seq: int = 64
    lr: float = 3e-3
    channels: int = 8
    chunk_bytes: int = 512

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ValueError(f"ranks must be at least 2, got {self.ranks}")
        check_options(self)
        if self.dim % (2 * HEAD_DIM):  # two query heads share one key/value head
            raise ValueError(
                f"dim must be a multiple of {2 * HEAD_DIM} (pairs of {HEAD_DIM} wide attention "
                f"heads), got {self.dim}"
            )
