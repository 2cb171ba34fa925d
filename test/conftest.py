"""Shared fixtures, the order of files, and the two parts of a run: without the hooks and with them."""

import contextlib
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Inductor would compile and load six small programs, in processes of their own, in every cache
# directory that it finds empty: is there AVX-512, ...? Ten seconds of CPU time each time. What the
# CPU says of itself is enough here.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Of what a kernel takes to compile, a third is linking by binutils' first linker; its second one
# takes a quarter of that. GCC looks here for a program of the name.
if gold := shutil.which("ld.gold"):
    linker = Path(tempfile.gettempdir(), f"torch-ext-bucketing-gold-{os.getuid()}", "ld")
    linker.parent.mkdir(0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        linker.symlink_to(gold)
    os.environ.setdefault("COMPILER_PATH", str(linker.parent))

from torch_ext_bucketing import hooks
from torch_ext_bucketing.testing import ranks

# How long an example takes depends on what else runs; what a fixture makes is good for all of them.
hypothesis.settings.register_profile(
    "here", deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.load_profile("here")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hooks", action="store_true", help="only what is about the hooks, with them")


def pytest_configure(config: pytest.Config) -> None:
    """All ranks of a run come from one server. What is about a process's start or its end, its
    environment at import or its hash seed needs a process started otherwise."""
    given = config.getoption("--hooks")
    ranks.preload("torch" if given else "rank_imports")  # what the hooks change comes after them
    if given:
        hooks.install()  # before any test file imports torch's bucketing


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of this part of the run, those of long files first."""
    parts: dict[bool, list[pytest.Item]] = {False: [], True: []}
    for item in items:
        parts[item.get_closest_marker("hooks") is not None].append(item)
    given = config.getoption("--hooks")
    config.hook.pytest_deselected(items=parts[not given])
    # Each of two workers takes the next file when it has finished one. A long file that comes last
    # would leave the other worker idle.
    items[:] = sorted(parts[given], key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """The collector need not walk over torch again and again: a third of a compile's time. See
    ``rank_imports``."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before counts, nor afterwards."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def fake_world(request: pytest.FixtureRequest) -> Iterator[int]:
    """A fake process group, of 4 ranks or as many as the test asks for by parametrization."""
    from collective_graphs import fake_group

    world_size = getattr(request, "param", 4)
    with fake_group(world_size):
        yield world_size


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A fake process group of 2 ranks."""
    from collective_graphs import fake_group

    with fake_group(2):
        yield
