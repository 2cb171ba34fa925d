"""Real text that every Python ships, as byte-level tokens.

English from the help topics of ``pydoc`` and source code from the standard library:
a megabyte or so, no download. Token ids are bytes, so the vocabulary has 256 entries.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from pathlib import Path

import torch

VOCAB = 256

SOURCES = ("argparse", "ast", "datetime", "decimal", "doctest", "inspect", "pydoc", "typing")
"""Standard library modules, read as text; those that a Python lacks are left out."""


@functools.cache
def corpus() -> bytes:
    """The text: the help topics first, then the sources, as UTF-8."""
    parts = []
    with contextlib.suppress(ImportError):
        from pydoc_data.topics import topics

        parts += [topics[key].encode() for key in sorted(topics)]
    paths = [Path(argparse.__file__).with_name(f"{name}.py") for name in SOURCES]
    text = b"\n\n".join([*parts, *(path.read_bytes() for path in paths if path.is_file())])
    if len(text) < 100_000:
        raise RuntimeError(
            "this Python has neither pydoc_data.topics nor the standard library's sources as .py "
            "files, which the training text is made of; use a Python with a full standard library"
        )
    return text


def batch(
    step: int, rank: int, *, size: int, seq: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and next-byte targets of one rank's step, each ``[size, seq]`` int64 on the CPU.

    A function of its arguments only. Windows are drawn with replacement, separately per rank.
    """
    text = corpus()
    generator = torch.Generator().manual_seed((seed << 40) ^ (step << 16) ^ rank)
    starts = torch.randint(len(text) - seq - 1, (size,), generator=generator).tolist()
    windows = torch.stack(
        [
            torch.frombuffer(bytearray(text[start : start + seq + 1]), dtype=torch.uint8)
            for start in starts
        ]
    ).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
