"""``hooks.install()`` serves patched modules, and importing the package changes nothing."""

import contextlib
import contextvars
import importlib
import inspect
import io
import re
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from patching_trees import (
    BUCKETING,
    CONFIG,
    MINOR,
    ROOT,
    TORCH_DIR,
    needs_unpatched_torch,
    run_python,
    small_edits,
    write_series,
    write_small_series,
)

from torch_ext_bucketing.errors import HooksError, ImportedTooEarlyError
from torch_ext_bucketing.hooks import HOOK_ENTRIES, install, series, status
from torch_ext_bucketing.testing.ranks import Rank, run_ranks

pytestmark = [pytest.mark.hooks, needs_unpatched_torch]

MODULES = "torch._inductor.fx_passes"
PREFIX = "aten_distributed_optimizations."


def fresh(case: Callable[..., Any], *arguments: Any) -> Any:
    """Run a case in a process of its own, and return what it returns."""
    return run_ranks(case, 1, *arguments, timeout_s=120)[0]


def with_series(folder: Path) -> None:
    """Use the series in ``folder`` in this process."""
    series.find_patches_dir = lambda: folder


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_small_series(folder)
    return folder


def of_torch(path: str) -> str:
    return (TORCH_DIR.parent / path).read_text()


def check_entries() -> None:
    import torch._inductor.config as config

    for name in HOOK_ENTRIES:
        assert getattr(config.aten_distributed_optimizations, name) in (None, False), name
        assert PREFIX + name in config.get_config_copy()


# ---------------------------------------------------------------- the package without the hooks


def test_importing_and_installing_import_nothing_of_torch_and_are_cheap() -> None:
    out = run_python(
        """
        import sys, time
        def of_torch():
            return [name for name in sys.modules if name.split(".")[0] == "torch"]
        finders = list(sys.meta_path)
        import torch_ext_bucketing as teb
        assert sys.meta_path == finders and not of_torch()
        began = time.process_time()
        first = teb.hooks.install()
        print(time.process_time() - began)
        assert not of_torch()
        finders = list(sys.meta_path)
        assert teb.hooks.install() is first is teb.hooks.status()
        assert sys.meta_path == finders and first.state == "in memory"
        """,
        ROOT,
    ).stdout
    assert float(out) < 1.0  # measured: 0.1; the bound only catches what is out of proportion


def changes_nothing(rank: Rank) -> None:
    import torch._inductor.config as config
    import torch.distributed as dist
    from torch._inductor import codecache, compile_fx
    from torch._inductor.fx_passes import bucketing, fsdp, overlap_scheduling, post_grad
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    finders = list(sys.meta_path)
    modules = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "torch"}
    entries, values = list(config._config), config.get_config_copy()
    parts = [
        (function, function.__code__, function.__defaults__)
        for module in (bucketing, codecache, compile_fx, fsdp, overlap_scheduling, post_grad)
        for function in vars(module).values()
        if hasattr(function, "__code__") and function.__module__ == module.__name__
    ]
    names = {m.__name__: dict(vars(m)) for m in (bucketing, fsdp, post_grad)}
    assert len(parts) > 150, len(parts)

    import torch_ext_bucketing as teb

    for name in teb.__all__:
        getattr(teb, name)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    teb.data_parallel(model, init_device_mesh("cpu", (2,)), mode="fully_shard")
    order = teb.FSDPParamOrder.from_model(model, units=[["0", "1"]])
    backend = teb.backend("aot_eager", [teb.BucketByUnit(order)])
    torch.compile(model, backend=backend)(torch.ones(2, 4)).sum().backward()
    assert sum(len(g.buckets) for g in backend.last_report().graphs) >= 2

    assert sys.meta_path == finders
    assert list(config._config) == entries
    assert config.get_config_copy() == values
    assert all(sys.modules[name] is module for name, module in modules.items())
    assert all((f.__code__, f.__defaults__) == (code, given) for f, code, given in parts)
    assert all(vars(sys.modules[name]) == held for name, held in names.items())
    for name, module in sys.modules.items():
        if name.split(".")[0] == "torch":
            loader = type(getattr(module, "__loader__", None)).__module__
            assert not loader.startswith("torch_ext_bucketing"), name
    assert status().state == "none"
    with pytest.raises(AttributeError, match="bucket_max_collectives_between does not exist"):
        config.aten_distributed_optimizations.bucket_max_collectives_between = 8


@pytest.mark.torch
def test_the_package_changes_nothing_in_torch() -> None:
    """Import and compile: finders, torch's modules and config entries stay as they were."""
    fresh(changes_nothing)


# ---------------------------------------------------------------- served modules


def served(rank: Rank, folder: Path) -> None:
    with_series(folder)
    errors: list[BaseException] = []

    def go() -> None:
        try:
            install()
            importlib.import_module(f"{MODULES}.fsdp").boom  # noqa: B018
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors

    from torch._inductor.fx_passes import bucketing, fsdp

    path = str(TORCH_DIR.parent / BUCKETING)
    assert bucketing.__file__ == path == bucketing.__spec__.origin
    assert bucketing.__name__ == bucketing.__spec__.name == f"{MODULES}.bucketing"
    assert bucketing.__package__ == MODULES
    assert fsdp.boom is bucketing.boom
    assert "a patched line" in inspect.getsource(bucketing.boom)
    assert "a patched line" in inspect.getsource(bucketing)
    assert "a patched line" not in Path(path).read_text()
    check_entries()
    importlib.reload(fsdp)
    assert fsdp.boom is bucketing.boom
    printed = io.StringIO()
    try:
        fsdp.boom()
    except KeyError as error:
        assert "raise KeyError('a patched line')" in traceback.format_exc()
        with contextlib.redirect_stderr(printed):
            sys.__excepthook__(type(error), error, error.__traceback__)
    # Python up to 3.12 prints an uncaught exception without asking linecache, from the file that
    # the code names, where the patched line's number belongs to another line.
    lines = [line.strip() for line in printed.getvalue().splitlines()]
    assert lines[-1] == "KeyError: 'a patched line'", lines
    (at,) = (i for i, line in enumerate(lines) if "in boom" in line)
    assert not Path(lines[at].split('"')[1]).exists()
    assert lines[at + 1] in ("raise KeyError('a patched line')", lines[-1]), lines


@pytest.mark.torch
def test_served_modules_look_normal_and_threads_may_install(small: Path) -> None:
    def byte_code() -> list[int]:
        folder = TORCH_DIR / "_inductor" / "fx_passes" / "__pycache__"
        return sorted(path.stat().st_mtime_ns for path in folder.glob("*"))

    before = byte_code()
    fresh(served, small)
    assert before == byte_code()


# ---------------------------------------------------------------- imported first


def config_first(rank: Rank, folder: Path) -> None:
    for name in ("_dynamo", "distributed.fsdp", "_functorch.aot_autograd"):
        importlib.import_module(f"torch.{name}")
    import torch._inductor.config as config

    config.max_autotune = True
    config.aten_distributed_optimizations.collective_bucketing = True
    config._save_config_ignore.append("mine")
    context = contextvars.Context()
    old_hash, old_save = config.get_hash(), config.save_config_portable()
    old_there = context.run(config.get_hash)
    with_series(folder)
    install()
    check_entries()
    part = config.aten_distributed_optimizations
    assert config.max_autotune
    assert part.collective_bucketing
    assert "mine" in config._save_config_ignore
    name = PREFIX + "fsdp_group_filter"
    assert name in config.save_config_portable()
    assert name not in old_save
    # A setting counts in the hash, goes away with its context, and survives a round trip.
    plain = config.get_hash()
    assert plain != old_hash
    assert context.run(config.get_hash) != old_there
    with config.patch({name: ["0"]}):
        assert part.fsdp_group_filter == ["0"]
        assert config.get_hash() != plain
        saved = config.save_config()
    assert part.fsdp_group_filter is None
    assert config.get_hash() == plain
    part.bucket_max_collectives_between = 8
    assert config.get_hash() != plain
    config.load_config(saved)
    assert part.fsdp_group_filter == ["0"]
    assert part.bucket_max_collectives_between == 0
    out = []
    thread = threading.Thread(target=lambda: out.append(part.bucket_max_collectives_between))
    thread.start()
    thread.join()
    assert out == [0]
    with pytest.raises(AttributeError):  # unknown entries are still refused
        part.no_such_entry = 1
    importlib.import_module("torch._inductor.compile_fx")
    assert importlib.import_module(f"{MODULES}.bucketing").boom


@pytest.mark.torch
def test_config_imported_first_gets_the_entries(small: Path) -> None:
    """Alone (see the registries below) or with Dynamo, AOTAutograd and FSDP2."""
    fresh(config_first, small)


def registry(rank: Rank, folder: Path, first: bool) -> list[str]:
    if first:
        importlib.import_module("torch._inductor.config")
    with_series(folder)
    install()
    import torch._inductor.config as config

    def text(entry: Any) -> list[tuple[str, str]]:
        fields = {k: v for k, v in vars(entry).items() if k != "user_override"}
        return sorted((k, re.sub("0x[0-9a-f]+", "", repr(v))) for k, v in fields.items())

    entries = [f"{key} {text(entry)}" for key, entry in config._config.items()]
    return [*entries, str(sorted(config._compile_ignored_keys))]


@pytest.mark.torch
def test_live_and_served_registries_are_the_same(small: Path) -> None:
    live, served = fresh(registry, small, True), fresh(registry, small, False)
    assert live == served
    assert len(live) > 500


def too_early(rank: Rank, folder: Path, changed: Path) -> None:
    import torch._inductor.config as config

    before, finders = list(config._config), list(sys.meta_path)
    with_series(changed)
    with pytest.raises(ImportedTooEarlyError, match="the patch changes lines of it"):
        install()
    importlib.import_module(f"{MODULES}.fsdp")
    with_series(folder)
    for _ in range(2):
        with pytest.raises(ImportedTooEarlyError) as error:
            install()
        message = str(error.value)
        early = f"{MODULES}.bucketing; {MODULES}.fsdp. Call it"
        assert f"imported before torch_ext_bucketing.hooks.install(): {early}" in message, message
    assert list(config._config) == before
    assert sys.meta_path == finders
    assert status().state == "none"


@pytest.mark.torch
def test_too_early_is_an_error_that_changes_nothing(small: Path, tmp_path: Path) -> None:
    """A touched module was imported; or config, if a patch changes lines of it."""
    old, new = of_torch(CONFIG), small_edits()[CONFIG]
    assert new.count("shape_padding = ") == 1
    changed = new.replace("shape_padding = ", "shape_padding_renamed = ")
    write_series(tmp_path, MINOR, {CONFIG: (old, changed)})
    fresh(too_early, small, tmp_path)
    assert fresh(installed, tmp_path) == ("in memory", MINOR)  # first


# ---------------------------------------------------------------- other torches


def installed(
    rank: Rank, folder: Path, torch_dir: Path = TORCH_DIR
) -> tuple[str, str | None] | str:
    """Return the status after ``install``, or its error, which changes nothing."""
    with_series(folder)
    series.find_torch = lambda: series.TorchTree(torch_dir, torch.__version__)
    finders = list(sys.meta_path)
    for _ in range(2):
        try:
            now = install()
            assert now == status()
            found = now.state, now.series
        except HooksError as error:
            found = str(error)
    assert (sys.meta_path == finders) == (found[0] != "in memory")
    return found


def test_series_that_do_not_fit(tmp_path: Path) -> None:
    """The hunks are named; a torch newer than all series gets the newest, one between them none."""
    old = of_torch(BUCKETING)
    head = "import torch\n"
    assert head in old
    new = old.replace(head, "import other\n"), old.replace(head, "import another\n")
    write_series(tmp_path / "hunks", MINOR, {BUCKETING: new})
    said = fresh(installed, tmp_path / "hunks")
    assert said.startswith("1 hunk(s)")
    assert f"{BUCKETING}: @@ -" in said
    assert "expected 'import other', found 'import torch'" in said
    for minor in ("1.99", "9.0"):
        edited = {CONFIG: (of_torch(CONFIG), small_edits()[CONFIG])}
        write_series(tmp_path / minor, minor, edited)
        write_series(tmp_path / "both", minor, edited)
    assert fresh(installed, tmp_path / "1.99") == ("in memory", "1.99")
    for folder, names in (("9.0", "9.0"), ("both", "1.99, 9.0")):
        said = fresh(installed, tmp_path / folder)
        assert said.endswith(f"has no hooks; these versions have them: {names}"), said


def test_hooks_in_torchs_own_files_are_left_alone(small: Path, tmp_path: Path) -> None:
    config = tmp_path / CONFIG
    config.parent.mkdir(parents=True)
    config.write_text(small_edits()[CONFIG])
    assert fresh(installed, small, tmp_path / "torch") == ("native", None)


def test_without_torch_or_in_a_subprocess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FX_COMPILE_MODE", "subprocess")
    install = "import torch_ext_bucketing.hooks as h; h.install()"
    done = run_python(install, ROOT, check=False)
    assert "HooksError: TORCHINDUCTOR_FX_COMPILE_MODE=SUBPROCESS compiles graphs" in done.stderr
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.machinery as m\nfind = m.PathFinder.find_spec\n"
        "m.PathFinder.find_spec = classmethod(lambda cls, name, *a, **k: None if name == 'torch' else find(name, *a, **k))\n"
    )
    done = run_python(install, ROOT, tmp_path, check=False)
    assert "ModuleNotFoundError: No module named 'torch'" in done.stderr


# ---------------------------------------------------------------- the real series


def real_series(rank: Rank, first: str) -> None:
    if first:
        importlib.import_module(first)
    assert install().series == MINOR
    check_entries()
    import torch._inductor.compile_fx
    import torch._inductor.config as config

    for name in ("overlap_scheduling", "overlap_manual_scheduling"):
        importlib.import_module(f"{MODULES}.{name}")
    x = torch.randn(4)
    assert torch.compile(torch.sin, backend="aot_eager")(x).equal(torch.sin(x))
    with config.patch({PREFIX + "bucket_max_collectives_between": 8}):
        assert config.aten_distributed_optimizations.bucket_max_collectives_between == 8


@pytest.mark.torch
@pytest.mark.parametrize("first", ["", "torch._dynamo"], ids=["first", "after config"])
def test_the_real_series_by_import_and_in_a_compile(first: str) -> None:
    fresh(real_series, first)
