"""Shared fixtures. Importing the package here gives torch the hooks before any test needs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import torch_ext_bucketing  # noqa: F401


@pytest.fixture
def fake_world(request: pytest.FixtureRequest) -> Iterator[int]:
    """A fake process group, of 4 ranks or as many as the test asks for by parametrization."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world_size = getattr(request, "param", 4)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield world_size
    finally:
        dist.destroy_process_group()
