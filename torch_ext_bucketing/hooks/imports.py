"""Getting the hooks into the running process: nothing on disk changes.

``install`` applies the patch series to torch's sources in memory and puts a finder first on
``sys.meta_path``, whose loader serves the patched source of the touched modules when torch
imports them, which it does when it first compiles something. The few that are imported earlier
are updated where they are (see ``live``).

Child processes need nothing of their own. Those that run user code (``torchrun``, ``spawn``)
call ``install`` as their parent did. Inductor's compile workers compile kernel sources and run no
FX passes, which is where the hooks act. (The exception, ``TORCHINDUCTOR_FX_COMPILE_MODE=SUBPROCESS``,
runs FX passes in a process that imports only torch and refuses a config with the hooks' entries;
after ``patch apply`` it takes those that are plain values. Callables torch does not send there.)
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Literal

from .code_cache import compile_cached
from .errors import HooksError, HooksWarning, ImportedTooEarlyError, SeriesError
from .journal import Journal, load_journal, sha256, source_digest
from .live import LIVE_MODULES, Action, cache_lines, memory_name, plan_update
from .series import CONFIG_PATH, Series, TorchTree, choose_series, find_torch, has_hook_entries
from .unified import FileChange

_HOW_TO_DISK = "run 'torch-ext-bucketing patch apply'"


@dataclass(frozen=True)
class HooksStatus:
    """Where this process has the hooks from.

    Attributes:
        state: ``"in memory"`` (served by this package), ``"on disk"`` (``patch apply`` was run),
            ``"native"`` (this torch came with them) or ``"none"``.
        torch_version: of the torch on disk; ``None`` where nothing was looked at yet.
        series: the patch series in use, such as ``"2.15"``; ``None`` unless in memory or on disk.
        digest: SHA-256 over the patched sources, equal in memory and on disk; ``None`` otherwise.
            Inductor's own cache keys hash torch's files on disk, so they see a series that was
            applied on disk but not one in memory, which gives Inductor's config an entry for it.
        reason: why there are none; ``None`` where there are.
    """

    state: Literal["in memory", "on disk", "native", "none"]
    torch_version: str | None = None
    series: str | None = None
    digest: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class _Served:
    """A touched module: its file, original and patched source and the compiled patched source."""

    name: str
    path: str
    before: bytes | None
    after: bytes
    code: CodeType


class PatchedLoader(importlib.machinery.SourceFileLoader):
    """Loads one module from patched source; its file on disk is neither read nor written.

    Byte code is kept elsewhere (:mod:`.patching.code_cache`): the ``.pyc`` file belongs to the
    original.
    """

    def __init__(self, served: _Served) -> None:
        super().__init__(served.name, served.path)
        self._served = served

    def get_code(self, fullname: str) -> CodeType:
        return self._served.code

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self._served.after)

    def get_data(self, path: str) -> bytes:
        return self._served.after if path == self.path else super().get_data(path)

    def exec_module(self, module: ModuleType) -> None:
        # Before execution: install_config_module() reads its module's comments with inspect, which
        # looks a module up by its file and a function by its code's filename.
        for filename in (self._served.path, memory_name(self._served.path)):
            cache_lines(filename, self._served.after)
        super().exec_module(module)


class PatchedFinder(importlib.abc.MetaPathFinder):
    """Finds the touched modules, and nothing else."""

    def __init__(self, served: Mapping[str, _Served], status: HooksStatus) -> None:
        self.served = served
        self.status = status

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        served = self.served.get(fullname)
        if served is None:
            return None
        location = Path(served.path)
        return importlib.util.spec_from_file_location(
            fullname,
            location,
            loader=PatchedLoader(served),
            submodule_search_locations=(
                [str(location.parent)] if location.name == "__init__.py" else None
            ),
        )


_lock = threading.RLock()
_status: HooksStatus | None = None


def status() -> HooksStatus:
    """Where this process has the hooks from, as found by ``install``."""
    return _status or HooksStatus("none", reason="hooks.install() has not run in this process")


def install() -> HooksStatus:
    """Give torch the hooks in this process; where it has them already, this does nothing.

    It imports nothing of torch and changes nothing on disk.

    Raises:
        HooksError: this torch can't have them, and why; ``ImportedTooEarlyError`` where a touched
            module was imported before and can't be updated. Nothing was changed.
        ModuleNotFoundError: torch is not installed.
    """
    global _status
    with _lock:
        if _status is None or _status.state == "none":
            _status = _decide()
        if _status.state == "none":
            raise HooksError(f"torch has no bucketing hooks in this process: {_status.reason}")
        return _status


def _decide() -> HooksStatus:
    for finder in sys.meta_path:
        # This package was imported, removed from sys.modules and imported again.
        if type(finder).__qualname__ == PatchedFinder.__qualname__ and hasattr(finder, "served"):
            return finder.status  # type: ignore[attr-defined, no-any-return]
    version: str | None = None
    try:
        tree = find_torch()
        version = tree.version
        journal = load_journal(tree.torch_dir)
        if has_hook_entries(tree.read(CONFIG_PATH) or b""):
            return _on_disk(tree, journal)
        return _in_memory(tree)
    except ImportedTooEarlyError:
        raise
    except HooksError as error:
        return HooksStatus("none", version, reason=str(error))


def _on_disk(tree: TorchTree, journal: Journal | None) -> HooksStatus:
    if journal is None or journal.phase == "staging":
        return HooksStatus("native", tree.version)
    ours = [record for record in journal.files if record.path.startswith("torch/")]
    put_back = [r.path for r in ours if sha256(tree.read(r.path)) == r.before]
    if put_back and journal.phase != "applied":
        raise HooksError(
            f"a patch command was interrupted in {tree.torch_dir}; "
            "run 'torch-ext-bucketing patch apply' or 'patch revert' to finish it"
        )
    if put_back:
        raise HooksError(
            f"the patch was applied to {tree.torch_dir}, but {', '.join(put_back)} "
            f"has been put back since (was torch installed again?); {_HOW_TO_DISK}"
        )
    # A file that was edited after ``patch apply`` is its owner's business; ``patch status`` tells.
    digest = source_digest({record.path: record.after for record in ours})
    return HooksStatus("on disk", tree.version, journal.series, digest)


def _in_memory(tree: TorchTree) -> HooksStatus:
    series = choose_series(tree.version)
    # Only what can be imported: a checkout's tests have no part in a running process.
    runtime = TorchTree(tree.torch_dir, tree.version, is_checkout=False)
    changes = runtime.apply(series)
    digest = source_digest({path: sha256(change.after) for path, change in changes.items()})
    served = _compile(runtime, series, changes, digest)
    status = HooksStatus("in memory", tree.version, series.name, digest)
    _install(PatchedFinder(served, status))
    if "SUBPROCESS" in os.environ.get(_COMPILE_MODE, "").upper():
        warnings.warn(
            f"{_COMPILE_MODE}=SUBPROCESS compiles graphs in a process without the hooks, where "
            f"every compile will fail ('bucket_non_adjacent does not exist'). Unset it, or "
            f"{_HOW_TO_DISK}",
            HooksWarning,
            stacklevel=4,
        )
    return status


_COMPILE_MODE = "TORCHINDUCTOR_FX_COMPILE_MODE"
_INSTALL = b"\ninstall_config_module("


def _with_digest(config_source: bytes, digest: str) -> bytes:
    """The config module's source with one entry more, for the keys of Inductor's graph caches.

    They hold the config, private entries included, and a hash of torch's files on disk. In memory
    those are not the sources that run, and graphs made under another series would be found.

    Raises:
        SeriesError: the module does not end as config modules do.
    """
    head, call, tail = config_source.rpartition(_INSTALL)
    if not call:
        raise SeriesError(f"{CONFIG_PATH} has no line {_INSTALL.decode().strip()}...)")
    entry = (
        "# The patched sources that this process runs, for the keys of graph caches.\n"
        f'_torch_ext_bucketing_sources: str = "{digest}"\n'
    )
    return head + b"\n" + entry.encode() + call + tail


def _compile(
    tree: TorchTree, series: Series, changes: Mapping[str, FileChange], digest: str
) -> dict[str, _Served]:
    served = {}
    for path, change in changes.items():
        if path.endswith(".pyi"):
            continue
        if not path.endswith(".py") or change.after is None:
            raise SeriesError(f"series {series.name} changes {path}, which can't be done in memory")
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        file = str(tree.path(path))
        after = _with_digest(change.after, digest) if path == CONFIG_PATH else change.after
        try:
            code = compile_cached(after, memory_name(file))
        except (SyntaxError, ValueError) as error:
            raise SeriesError(
                f"series {series.name} gives a {path} that does not compile: {error}"
            ) from None
        served[name] = _Served(name, file, change.before, after, code)
    return served


def _install(finder: PatchedFinder) -> None:
    """Serve the modules to come and update those that are here: all of it, or nothing."""
    present = _loaded(finder)
    _refuse_early([name for name in present if name not in LIVE_MODULES])
    # From here on no other thread can import an unpatched one. The live modules are updated last,
    # since what is executed for them may import others of the touched modules.
    sys.meta_path.insert(0, finder)
    try:
        actions: list[Action] = []
        for name in present:
            served = finder.served[name]
            actions += plan_update(
                sys.modules[name], served.path, served.before or b"", served.after
            )
        # Those that another thread began to import before the finder was there.
        _refuse_early([name for name in _loaded(finder) if name not in present])
    except BaseException as error:
        sys.meta_path.remove(finder)
        if isinstance(error, HooksError) and not isinstance(error, ImportedTooEarlyError):
            raise ImportedTooEarlyError(str(error)) from error
        raise
    for action in actions:
        action()


def _loaded(finder: PatchedFinder) -> list[str]:
    """The touched modules in ``sys.modules`` that were not served by us."""
    names = []
    for name, served in finder.served.items():
        module = sys.modules.get(name)
        if module is None or isinstance(getattr(module, "__loader__", None), PatchedLoader):
            continue
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            raise ImportedTooEarlyError(
                f"{name} is being imported right now, perhaps by another thread. "
                "Call torch_ext_bucketing.hooks.install() before that begins; nothing was changed"
            )
        origin = getattr(module, "__file__", None)
        if origin is None or not _same_file(origin, served.path):
            raise ImportedTooEarlyError(
                f"{name} was imported from {origin}, not from {served.path} for which the patch "
                "was made. Is there a second torch on sys.path? Nothing was changed"
            )
        names.append(name)
    return names


def _same_file(one: str, other: str) -> bool:
    try:
        return Path(one).samefile(other)
    except OSError:
        return False


def _refuse_early(names: list[str]) -> None:
    if not names:
        return
    who = [f"{name} ({_importers(name)})" for name in names]
    raise ImportedTooEarlyError(
        f"imported before torch_ext_bucketing.hooks.install(): {'; '.join(who)}. "
        "Call it before compiling anything and before importing these modules, or "
        f"{_HOW_TO_DISK} once, after which the order does not matter. Nothing was changed"
    )


def _importers(name: str) -> str:
    """Which loaded modules hold the module or something that it defines."""
    parent, _, leaf = name.rpartition(".")
    found = []
    for other, module in sorted(sys.modules.items()):
        if other == name or not isinstance(module, ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if other == parent and key == leaf:
                continue  # set by the import itself
            # By type(), as isinstance() reads __class__: deprecated objects warn of that.
            holds = value is sys.modules.get(name)
            if issubclass(type(value), FunctionType | type):
                holds = value.__module__ == name
            if holds:
                found.append(other)
                break
    if not found:
        return "no loaded module refers to it"
    more = f" and {len(found) - 6} more" if len(found) > 6 else ""
    return f"used by {', '.join(found[:6])}{more}"
