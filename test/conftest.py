"""Shared fixtures, and the two parts of a run: without the hooks of torch and with them."""

import contextlib
import functools
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Without this, Inductor compiles and loads six small programs for each empty cache directory, to
# find vector instructions such as AVX-512: ten seconds of CPU time. The CPU's flags are enough here.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Linking takes a third of a kernel's compile time with ld.bfd, and a quarter of that with ld.gold.
# GCC looks for "ld" in COMPILER_PATH.
if gold := shutil.which("ld.gold"):
    linker = Path(tempfile.gettempdir(), f"torch-ext-bucketing-gold-{os.getuid()}", "ld")
    linker.parent.mkdir(0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        linker.symlink_to(gold)
    os.environ.setdefault("COMPILER_PATH", str(linker.parent))

from torch_ext_bucketing import hooks
from torch_ext_bucketing.testing import ranks

# An example's time depends on the machine's load. All examples of a test may share its fixtures.
# Numbers of examples: see helpers/examples.py.
for profile in ("day", "night"):
    hypothesis.settings.register_profile(
        profile, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
hypothesis.settings.load_profile("day")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hooks",
        action="store_true",
        help="run only the tests marked hooks, with the hooks of torch installed",
    )
    parser.addoption("--shard", type=int, choices=(1, 2), help="run one half of the files")


def pytest_configure(config: pytest.Config) -> None:
    """Start the server that all ranks of a run are forked from; install the hooks if given."""
    given = config.getoption("--hooks")
    ranks.preload("torch" if given else "rank_imports")  # ranks import what the hooks change later
    if given:
        hooks.install()  # before any test file imports torch's bucketing


def pytest_unconfigure() -> None:
    """End the ranks that stay up for the tests of a run."""
    if "rank_pool" in sys.modules:
        sys.modules["rank_pool"].end()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import the files alone that have tests of this part of the run: few are about the hooks."""
    with_hooks = config.getoption("--hooks") and collection_path.suffix == ".py"
    return True if with_hooks and b"mark.hooks" not in collection_path.read_bytes() else None


@functools.cache
def uses_pool(file: Path) -> bool:
    """Return whether tests of a file run on the ranks that stay up."""
    return "from rank_pool import" in file.read_text(encoding="utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file's tests in one worker, and all that use the ranks that stay up in one, too.

    Otherwise each worker starts such ranks, and the first compile of each takes seconds.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "ranks" if uses_pool(config.rootpath / file) else file

    return Files(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of this part of the run, those on ranks and then those of long files first."""
    shard = config.getoption("--shard")
    files = dict.fromkeys(item.path for item in items)
    mine = {path for n, path in enumerate(files) if shard in (None, 1 + n % 2)}
    given = config.getoption("--hooks")
    parts: dict[bool, list[pytest.Item]] = {False: [], True: []}
    for item in items:
        with_hooks = item.get_closest_marker("hooks") is not None
        parts[with_hooks == given and item.path in mine].append(item)
    config.hook.pytest_deselected(items=parts[False])
    # Each of two workers takes the next file when it has finished one. A long file that comes last
    # would leave the other worker idle.
    items[:] = sorted(
        parts[True],
        key=lambda item: (not uses_pool(item.path), item.get_closest_marker("long") is None),
    )


def pytest_collection_finish() -> None:
    """Exempt torch's objects from garbage collection, which takes a third of a compile's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Reset Dynamo before and after the test."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def fake_world(request: pytest.FixtureRequest) -> Iterator[int]:
    """Make a fake process group of 4 ranks, or of the number that the test is parametrized with."""
    from collective_graphs import fake_group

    world_size = getattr(request, "param", 4)
    with fake_group(world_size):
        yield world_size


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Make a fake process group of 2 ranks."""
    from collective_graphs import fake_group

    with fake_group(2):
        yield
