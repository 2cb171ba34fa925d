"""Choose the patch series for the installed torch, and serve its modules from memory.

Nothing here imports torch: ``install()`` must run before torch's bucketing modules are imported.

``install()`` applies the patch series to torch's sources and puts a finder first on
``sys.meta_path``. The finder serves the patched modules when torch imports them, which happens when
something is first compiled. ``torch._inductor.config`` is often imported earlier, so its new
entries are added to the live module.

A process that runs user code (``torchrun``, ``spawn``) must call ``install()`` as its parent did.
Inductor's compile workers need no call: they compile the sources of kernels and run no passes.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

from ..errors import HooksError, ImportedTooEarlyError, PatchDoesNotApplyError
from .patches import FileDiff, apply_patches, parse_patch, reverse, split_lines

if TYPE_CHECKING:  # nothing here imports torch
    from torch.distributed.device_mesh import DeviceMesh

PACKAGE_DIR = Path(__file__).resolve().parent.parent
CONFIG_PATH = "torch/_inductor/config.py"

HOOK_ENTRIES = ("bucket_payload_order_key", "fsdp_group_filter", "bucket_max_collectives_between")
"""Entries that the series adds to ``torch._inductor.config.aten_distributed_optimizations``."""


def _minor(version: str) -> tuple[int, int]:
    """Parse major and minor: ``"2.16.0.dev20261101+cu132"`` gives ``(2, 16)``."""
    match = re.match(r"(\d+)\.(\d+)(?!\d)", version)
    if match is None:
        raise HooksError(f"{version!r} is not a torch version this package understands")
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class Series:
    """The patches for one torch minor version, in order.

    The patches of one folder are a pull request.
    """

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def pull_requests(self) -> tuple[tuple[FileDiff, ...], ...]:
        """Parse the changes to ``torch/`` of each pull request, in order."""
        # 0000 is a cover letter, which has no diff.
        paths = sorted(self.folder.rglob("[0-9][0-9][0-9][0-9]-*.patch"))
        diffs: dict[Path, tuple[FileDiff, ...]] = {}
        for path in paths:
            if not path.name.startswith("0000"):
                name = path.relative_to(self.folder.parent).as_posix()
                parsed = parse_patch(name, path.read_bytes())
                diffs[path.parent] = (*diffs.get(path.parent, ()), *parsed)
        return tuple(diffs.values())

    @property
    def diffs(self) -> tuple[FileDiff, ...]:
        return tuple(diff for diffs in self.pull_requests for diff in diffs)

    def apply(self, read: Callable[[str], bytes | None]) -> dict[str, bytes]:
        """Return the patched sources by path; see :func:`.apply_patches` for ``read``.

        Torch's files may have some of the pull requests already, such as the first ones, which
        were merged upstream: these are undone, the last one first, and applied with the others.
        """
        undone: dict[str, bytes] = {}

        def read_undone(path: str) -> bytes | None:
            return undone.get(path, read(path))

        for diffs in reversed(self.pull_requests):
            with contextlib.suppress(PatchDoesNotApplyError):
                undone |= apply_patches(reverse(diffs), read_undone)
        return apply_patches(self.diffs, read_undone)


def find_patches_dir() -> Path:
    """Find the folder of all series: inside a wheel, beside the package in a checkout or sdist."""
    for folder in (PACKAGE_DIR / "_torch_patches", PACKAGE_DIR.parent / "torch_patches"):
        if folder.is_dir():
            return folder
    raise HooksError(
        f"no torch patches found in {PACKAGE_DIR} or beside it; install the package again"
    )


def list_series() -> list[Series]:
    """List all series, newest first."""
    folders = [p for p in find_patches_dir().iterdir() if re.fullmatch(r"\d+\.\d+", p.name)]
    return [Series(p) for p in sorted(folders, key=lambda p: _minor(p.name), reverse=True)]


def choose_series(version: str) -> Series:
    """Choose the series of this torch's minor version; for a torch newer than all, the newest."""
    minor = _minor(version)
    every = list_series()
    # A nightly is ahead of the newest series; most of the time that one still applies.
    for series in every:
        if _minor(series.name) == minor or (series is every[0] and _minor(series.name) < minor):
            return series
    names = ", ".join(series.name for series in reversed(every))
    raise HooksError(f"torch {version} has no hooks; these versions have them: {names or 'none'}")


@dataclass(frozen=True)
class TorchTree:
    """The ``torch`` directory that this Python imports, and its version."""

    torch_dir: Path
    version: str

    def path(self, repo_path: str) -> Path:
        """Return where ``torch/...``, a path in torch's repository, is on disk."""
        return self.torch_dir / repo_path.removeprefix("torch/")

    def read(self, repo_path: str) -> bytes | None:
        """Return the bytes of a file, or ``None`` if it does not exist."""
        path = self.path(repo_path)
        return path.read_bytes() if path.is_file() else None

    def has_hook_entries(self) -> bool:
        """Return whether the config module's source declares every hook entry."""
        config = self.read(CONFIG_PATH) or b""
        return all(re.search(rb"^    %s\s*[:=]" % e.encode(), config, re.M) for e in HOOK_ENTRIES)


def find_torch() -> TorchTree:
    """Find the torch that ``import torch`` gives, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    torch_dir = Path(spec.submodule_search_locations[0]).absolute()
    text = (torch_dir / "version.py").read_text(encoding="utf-8")
    match = re.search(r"""^__version__\s*(?::\s*\w+\s*)?=\s*['"]([^'"]+)['"]""", text, re.MULTILINE)
    if match is None:
        raise HooksError(f"{torch_dir / 'version.py'} does not name a torch version")
    return TorchTree(torch_dir, match[1])


CONFIG_MODULE = "torch._inductor.config"
_HOW_TO_DISK = "apply the series to torch's files (see torch_patches/README.md)"
_COMPILE_MODE = "TORCHINDUCTOR_FX_COMPILE_MODE"


@dataclass(frozen=True)
class Status:
    """Where this process has the hooks from.

    Attributes:
        state: ``"in memory"`` if ``install()`` serves them; ``"native"`` if torch's own files have
            them, from upstream or from ``git apply``; else ``"none"``.
        series: the patch series in use, such as ``"2.15"``; ``None`` unless in memory.
    """

    state: Literal["in memory", "native", "none"]
    torch_version: str
    series: str | None = None


@dataclass
class PatchedFinder(importlib.abc.MetaPathFinder):
    """Find the modules that ``loaders`` names; hold the result of :func:`status`."""

    loaders: Mapping[str, PatchedLoader]
    status: Status

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        loader = self.loaders.get(fullname)
        if loader is None:
            return None
        return importlib.util.spec_from_file_location(fullname, loader.path, loader=loader)


class PatchedLoader(importlib.machinery.SourceFileLoader):
    """Load one module from patched source, without the original's file and ``.pyc``."""

    def __init__(self, fullname: str, path: str, source: bytes) -> None:
        super().__init__(fullname, path)
        self.source = source

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self.source)

    def get_code(self, fullname: str) -> CodeType:
        # A name without a file: Python up to 3.12 prints an uncaught exception with lines of the
        # file that the code names, and uses linecache only without such a file. The name lies
        # in torch's directory because Dynamo skips functions by directory.
        name = f"{self.path}<patched by torch_ext_bucketing>"
        # Before execution: install_config_module() reads its module's comments with inspect, which
        # finds a module by its file and a function by its code's filename.
        for filename in (self.path, name):
            _cache_lines(filename, self.source)
        return compile(self.source, name, "exec", dont_inherit=True)


def _cache_lines(filename: str, source: bytes) -> None:
    """Make tracebacks and ``inspect`` show these lines."""
    text = source.decode("utf-8")
    # linecache.checkcache keeps an entry that has no modification time.
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)


_lock = threading.RLock()


def status() -> Status:
    """Return where this process has the hooks from, or would have them from on importing torch."""
    for finder in sys.meta_path:
        # By name: this package may have been removed from sys.modules and imported again.
        if type(finder).__name__ == PatchedFinder.__name__:
            return finder.status  # type: ignore[attr-defined]
    tree = find_torch()
    return Status("native" if tree.has_hook_entries() else "none", tree.version)


def install() -> Status:
    """Give torch the hooks in this process. Do nothing if torch has them already.

    Call it before anything is compiled. It imports nothing from torch.

    Raises:
        ImportedTooEarlyError: a module that the series changes was imported before.
        PatchDoesNotApplyError: the series does not fit this torch; the message names each hunk.
        HooksError: this torch can't have the hooks for another reason, such as its age.
        ModuleNotFoundError: torch is not installed.
    """
    with _lock:
        current = status()
        return current if current.state != "none" else _install(find_torch())


def _install(tree: TorchTree) -> Status:
    if "SUBPROCESS" in os.environ.get(_COMPILE_MODE, "").upper():
        raise HooksError(
            f"{_COMPILE_MODE}=SUBPROCESS compiles graphs in a process that has no hooks in memory. "
            f"Unset it, or {_HOW_TO_DISK}"
        )
    series = choose_series(tree.version)
    sources = series.apply(tree.read)
    if CONFIG_PATH in sources:
        sources[CONFIG_PATH] = _add_digest(sources)
    loaders = {}
    for path, source in sources.items():
        try:  # a hunk that fits may still break a torch that changed around it
            compile(source, path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise HooksError(f"the patched {path} does not compile: {error}") from None
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        loaders[name] = PatchedLoader(name, str(tree.path(path)), source)
    finder = PatchedFinder(loaders, Status("in memory", tree.version, series.name))
    sys.meta_path.insert(0, finder)
    try:
        # With the finder in place, no other thread can import an unpatched module after the check.
        _refuse_early(finder)
        config = sys.modules.get(CONFIG_MODULE)
        if config is not None and CONFIG_PATH in sources:
            _add_entries(config, tree.read(CONFIG_PATH) or b"", sources[CONFIG_PATH])
    except BaseException:
        sys.meta_path.remove(finder)
        raise
    return finder.status


def _add_digest(sources: Mapping[str, bytes]) -> bytes:
    """Return the config module's source with one more entry, a digest of all patched sources."""
    # Keys of Inductor's graph caches contain the config and a hash of torch's files on disk, which
    # are not the sources that run here. Without the entry, a graph compiled under another series
    # would hit.
    digests = (f"{path} {hashlib.sha256(s).hexdigest()}\n" for path, s in sorted(sources.items()))
    digest = hashlib.sha256("".join(digests).encode()).hexdigest()
    head, call, tail = sources[CONFIG_PATH].rpartition(b"\ninstall_config_module(")
    if not call:
        raise HooksError(f"{CONFIG_PATH} has no line that calls install_config_module()")
    return head + f'\n_torch_ext_bucketing_sources: str = "{digest}"\n'.encode() + call + tail


def _refuse_early(finder: PatchedFinder) -> None:
    """Raise an ``ImportedTooEarlyError`` if an unpatched module other than config is imported."""
    early = []
    for name in finder.loaders:
        module = sys.modules.get(name)
        if module is None or type(module.__loader__).__name__ == PatchedLoader.__name__:
            continue
        if getattr(module.__spec__, "_initializing", False):
            early.append(f"{name} (its import has not ended)")
        elif name != CONFIG_MODULE:
            early.append(name)
    if early:
        raise ImportedTooEarlyError(
            f"imported before torch_ext_bucketing.hooks.install(): {'; '.join(early)}. Call it "
            "before anything is compiled and before these modules are imported, or "
            f"{_HOW_TO_DISK}, after which the order does not matter. Nothing was changed"
        )


def _add_entries(module: ModuleType, before: bytes, after: bytes) -> None:
    """Add the patched source's new entries to the live config module, or change nothing."""
    remaining = iter(split_lines(after))
    # Comments may change: torch reads none but "@compile_ignored", which this file does not have.
    code = (line for line in split_lines(before) if not line.lstrip().startswith(b"#"))
    if not all(line in remaining for line in code):
        raise ImportedTooEarlyError(
            f"{CONFIG_MODULE} was imported already, and the patch changes lines of it. Call "
            f"torch_ext_bucketing.hooks.install() first, or {_HOW_TO_DISK}"
        )
    namespace, patched = vars(module), _execute(module, after)
    live: dict[str, Any] = namespace["_config"]
    # Cache keys depend on the order of entries: take the source's. A new dict, because another
    # thread may be iterating over the old one.
    namespace["_config"] = {key: live.get(key, entry) for key, entry in patched.items()} | live
    # The module caches its hash and its dict per context in variables; empty ones replace them.
    for name, value in list(namespace.items()):
        if isinstance(value, contextvars.ContextVar):
            default = contextvars.Context().run(value.get)
            namespace[name] = contextvars.ContextVar(value.name, default=default)


def _execute(module: ModuleType, source: bytes) -> dict[str, Any]:
    """Execute a source of the config module apart from the live one; return its entries."""
    # The source ends in install_config_module(sys.modules[__name__]), which reads comments through
    # inspect.getsource: the module needs a name and lines while it executes.
    scratch = ModuleType(f"{module.__name__}__torch_ext_bucketing")
    scratch.__file__ = filename = f"<{scratch.__name__}>"
    scratch.__package__ = module.__package__
    _cache_lines(filename, source)
    sys.modules[scratch.__name__] = scratch
    try:
        exec(compile(source, filename, "exec", dont_inherit=True), vars(scratch))
    except Exception as error:
        raise HooksError(f"the patched {CONFIG_PATH} fails: {error!r}") from error
    finally:
        del sys.modules[scratch.__name__]
        linecache.cache.pop(filename, None)
    return vars(scratch)["_config"]


def group_descs(mesh: DeviceMesh) -> list[str]:
    """List the ``group_desc`` of the process group of each dimension, for ``fsdp_group_filter``.

    The entry compares names exactly. A dimension of all ranks has the default group, whose
    ``group_desc`` is not ``"mesh_<dim>"``; one of a single rank has no collectives and is left out.
    """
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    return list(dict.fromkeys(group.group_desc for group in groups))
