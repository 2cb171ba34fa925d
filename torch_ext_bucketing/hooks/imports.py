"""Getting the hooks into the running process: nothing on disk changes.

``install`` applies the patch series to torch's sources in memory and puts a finder first on
``sys.meta_path``, whose loader serves the patched source of the touched modules when torch imports
them, which it does when it first compiles something. ``torch._inductor.config`` is often imported
earlier: it gets the new entries where it is.

Processes that run user code (``torchrun``, ``spawn``) call ``install`` as their parent did.
Inductor's compile workers need nothing: they compile the sources of kernels and run no passes.
"""

from __future__ import annotations

import contextvars
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal

from ..errors import HooksError, ImportedTooEarlyError
from .disk import check_compiles, look
from .patches import apply_patches, digest_of, split_lines
from .series import CONFIG_PATH, TorchTree, choose_series, find_torch

CONFIG_MODULE = "torch._inductor.config"
_HOW_TO_DISK = "run 'torch-ext-bucketing patch apply'"
_COMPILE_MODE = "TORCHINDUCTOR_FX_COMPILE_MODE"


@dataclass(frozen=True)
class Status:
    """Where this process has the hooks from: ``"in memory"`` (``install`` serves them), ``"on
    disk"`` (``patch apply`` was run), ``"native"`` (this torch came with them) or ``"none"``; the
    version of the torch on disk; and the patch series in use, such as ``"2.15"``, ``None`` unless
    in memory or on disk."""

    state: Literal["in memory", "on disk", "native", "none"]
    torch_version: str
    series: str | None = None


@dataclass
class PatchedFinder(importlib.abc.MetaPathFinder):
    """Finds the touched modules, of which it has the loaders by name, and no other.

    While it is on ``sys.meta_path``, ``status`` is what :func:`status` returns.
    """

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
    """Loads one module from patched source; its file on disk is neither read nor written, and no
    byte code either: the ``.pyc`` file belongs to the original."""

    def __init__(self, fullname: str, path: str, source: bytes) -> None:
        super().__init__(fullname, path)
        self.source = source

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self.source)

    def get_code(self, fullname: str) -> CodeType:
        # No file has this name. Python up to 3.12 prints an uncaught exception with the lines of
        # the file that the code names, if there is one, and asks linecache only otherwise. It lies
        # in torch's directory, because Dynamo decides by directory what it does not trace.
        name = f"{self.path}<patched by torch_ext_bucketing>"
        # Before execution: install_config_module() reads its module's comments with inspect, which
        # looks a module up by its file and a function by its code's filename.
        for filename in (self.path, name):
            _cache_lines(filename, self.source)
        return compile(self.source, name, "exec", dont_inherit=True)


def _cache_lines(filename: str, source: bytes) -> None:
    """Make tracebacks and ``inspect`` show these lines. Without a modification time,
    ``linecache.checkcache`` keeps the entry."""
    text = source.decode("utf-8")
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)


_lock = threading.RLock()


def status() -> Status:
    """Where this process has the hooks from, or would have them from if it imported torch."""
    for finder in sys.meta_path:
        # By name: this package may have been removed from sys.modules and imported again.
        if type(finder).__name__ == PatchedFinder.__name__:
            return finder.status  # type: ignore[attr-defined, no-any-return]
    tree = find_torch()
    found = look(tree)
    if not tree.has_hook_entries():
        return Status("none", tree.version)
    if found.record is None:
        return Status("native", tree.version)
    # A file that was edited after ``patch apply`` is its owner's business.
    return Status("on disk", tree.version, found.record.series)


def install() -> Status:
    """Give torch the hooks in this process; where it has them already, this does nothing.

    It imports nothing of torch and changes nothing on disk. To be called before anything is
    compiled.

    Raises:
        ImportedTooEarlyError: a module that the patch changes was imported before.
        PatchDoesNotApplyError: the series does not fit this torch; it names each hunk.
        HooksError: this torch can't have the hooks for another reason, such as its age.
        ModuleNotFoundError: torch is not installed.
    """
    with _lock:
        now = status()
        if now.state == "in memory":
            return now
        tree = find_torch()
        found = look(tree)
        if found.state == "interrupted":
            raise HooksError(found.message)
        return now if now.state != "none" else _install(tree)


def _install(tree: TorchTree) -> Status:
    if "SUBPROCESS" in os.environ.get(_COMPILE_MODE, "").upper():
        raise HooksError(
            f"{_COMPILE_MODE}=SUBPROCESS compiles graphs in a process that has no hooks in memory. "
            f"Unset it, or {_HOW_TO_DISK}"
        )
    series = choose_series(tree.version)
    changes = apply_patches(series.diffs, tree.read)
    loaders = {}
    digests = "".join(sorted(f"{path} {digest_of(c.after)}\n" for path, c in changes.items()))
    for path, change in changes.items():
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        source = change.after
        if path == CONFIG_PATH:
            source = _with_digest(source, digest_of(digests.encode()))
        check_compiles(path, source)
        loaders[name] = PatchedLoader(name, str(tree.path(path)), source)
    finder = PatchedFinder(loaders, Status("in memory", tree.version, series.name))
    _refuse_early(finder)
    sys.meta_path.insert(0, finder)  # from here on no other thread imports an unpatched one
    try:
        _refuse_early(finder)
        config = sys.modules.get(CONFIG_MODULE)
        if config is not None and CONFIG_MODULE in loaders:
            _add_entries(config, changes[CONFIG_PATH].before, loaders[CONFIG_MODULE].source)
    except BaseException:
        sys.meta_path.remove(finder)
        raise
    return finder.status


def _with_digest(config_source: bytes, digest: str) -> bytes:
    """The config module's source with one entry more, for the keys of Inductor's graph caches. They
    hold the config, private entries included, and a hash of torch's files on disk. In memory those
    are not the sources that run, and graphs made under another series would be found."""
    head, call, tail = config_source.rpartition(b"\ninstall_config_module(")
    if not call:
        raise HooksError(f"{CONFIG_PATH} has no line that calls install_config_module()")
    return head + f'\n_torch_ext_bucketing_sources: str = "{digest}"\n'.encode() + call + tail


def _refuse_early(finder: PatchedFinder) -> None:
    early = []
    for name in finder.loaders:
        module = sys.modules.get(name)
        if module is None or type(module.__loader__).__name__ == PatchedLoader.__name__:
            continue
        if getattr(module.__spec__, "_initializing", False):
            early.append(f"{name} (being imported right now, perhaps by another thread)")
        elif name != CONFIG_MODULE:
            early.append(f"{name} (used by {', '.join(_users(name)) or 'no module that shows it'})")
    if early:
        raise ImportedTooEarlyError(
            f"imported before torch_ext_bucketing.hooks.install(): {'; '.join(early)}. Call it "
            "before anything is compiled and before these modules are imported, or "
            f"{_HOW_TO_DISK} once, after which the order does not matter. Nothing was changed"
        )


def _users(name: str) -> list[str]:
    """Which loaded modules hold the module or something that it defines; six at most."""
    module = sys.modules[name]

    def holds(value: object) -> bool:
        # By type(), as isinstance() reads __class__: deprecated objects warn of that.
        defined = issubclass(type(value), FunctionType | type)
        return getattr(value, "__module__", None) == name if defined else value is module

    own = (name, name.rpartition(".")[0])  # a package holds its submodules by the mere import
    return [
        other
        for other, loaded in sorted(sys.modules.items())
        if other not in own
        and isinstance(loaded, ModuleType)
        and any(holds(value) for value in list(vars(loaded).values()))
    ][:6]


def _add_entries(module: ModuleType, before: bytes, after: bytes) -> None:
    """Add the patched source's new entries to the config module that is there; an error, and
    nothing changed, where the patch does more to it."""
    rest = iter(split_lines(after))
    if not all(line in rest for line in split_lines(before)):
        raise ImportedTooEarlyError(
            f"{CONFIG_MODULE} was imported already, and the patch changes lines of it. Call "
            f"torch_ext_bucketing.hooks.install() first, or {_HOW_TO_DISK}"
        )
    namespace, patched = vars(module), _executed(module, after)
    live: dict[str, Any] = namespace["_config"]
    # A new dict in the source's order, which cache keys see; a thread may iterate over the old one.
    namespace["_config"] = {key: live.get(key, entry) for key, entry in patched.items()} | live
    # The module caches its hash and its dict per context; new variables are empty in each.
    # torch 2.11 has one cached hash and a flag.
    if "_is_dirty" in namespace:
        namespace["_is_dirty"] = True
    for name, value in list(namespace.items()):
        if isinstance(value, contextvars.ContextVar):
            default = contextvars.Context().run(value.get)
            namespace[name] = contextvars.ContextVar(value.name, default=default)


def _executed(module: ModuleType, source: bytes) -> dict[str, Any]:
    """The entries that a source of the config module makes, executed apart from the live one. It
    ends in ``install_config_module(sys.modules[__name__])``, which reads its comments through
    ``inspect.getsource``: for the moment of its execution it needs a name and lines."""
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
    entries: dict[str, Any] = vars(scratch)["_config"]
    return entries
