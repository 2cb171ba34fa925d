"""Make byte-level tokens of about a megabyte of text that every Python ships."""

from __future__ import annotations

import argparse
import contextlib
import functools
from pathlib import Path

import torch

VOCAB = 256

SOURCES = ("argparse", "ast", "datetime", "decimal", "doctest", "inspect", "pydoc", "typing")
"""Modules whose source is used, if this Python has it."""


@functools.cache
def corpus() -> bytes:
    """Return the help topics and the sources as UTF-8."""
    parts = []
    with contextlib.suppress(ImportError):
        from pydoc_data.topics import topics

        parts += [topics[key].encode() for key in sorted(topics)]
    paths = [Path(argparse.__file__).with_name(f"{name}.py") for name in SOURCES]
    text = b"\n\n".join([*parts, *(path.read_bytes() for path in paths if path.is_file())])
    if len(text) < 100_000:
        raise RuntimeError(
            "the training text needs pydoc_data.topics or the standard library's .py files; use a "
            "Python with a full standard library"
        )
    return text


def batch(
    step: int, rank: int, *, size: int, seq: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and next-byte targets of one rank's step, ``[size, seq]`` int64 on the CPU."""
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
