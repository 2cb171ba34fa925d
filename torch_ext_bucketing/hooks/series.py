"""Which patch series is for which torch, and where a torch lies.

Nothing here imports torch: a torch that is broken, half patched or of another Python must
still be found, named and repaired.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .errors import SeriesError, UnsupportedTorchError
from .unified import FileChange, Patch, apply_patches, parse_patch

PACKAGE_DIR = Path(__file__).resolve().parent.parent
CONFIG_PATH = "torch/_inductor/config.py"

HOOK_ENTRIES = (
    "bucket_payload_order_key",
    "fsdp_group_filter",
    "bucket_non_adjacent",
    "bucket_max_node_span",
)
"""Entries of ``torch._inductor.config.aten_distributed_optimizations`` that the series adds.

A torch whose config source has them all, and that nobody patched, has the hooks natively.
"""

Version = tuple[int, int]


def has_hook_entries(config_source: bytes) -> bool:
    """Whether the source of ``torch/_inductor/config.py`` declares every hook entry."""
    return all(
        re.search(rb"^    %s\s*[:=]" % name.encode(), config_source, re.MULTILINE)
        for name in HOOK_ENTRIES
    )


def parse_minor(version: str) -> Version:
    """``"2.15.0+cu132"`` or ``"2.16.0.dev20261101"`` to ``(2, 15)`` or ``(2, 16)``."""
    match = re.match(r"(\d+)\.(\d+)(?!\d)", version)
    if match is None:
        raise UnsupportedTorchError(f"{version!r} is not a torch version this package understands")
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class Series:
    """The patches for one torch minor version, in order."""

    minor: Version
    folder: Path

    @property
    def name(self) -> str:
        return ".".join(map(str, self.minor))

    @cached_property
    def _files(self) -> tuple[tuple[str, bytes], ...]:
        try:
            paths = sorted(self.folder.glob("[0-9][0-9][0-9][0-9]-*.patch"))
            # 0000 is the cover letter, which has no diff.
            return tuple((p.name, p.read_bytes()) for p in paths if not p.name.startswith("0000"))
        except OSError as error:
            raise SeriesError(f"the patch series in {self.folder} can't be read: {error}") from None

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the patch files, as hex."""
        digest = hashlib.sha256()
        for name, data in self._files:
            digest.update(f"{name}\0{len(data)}\0".encode() + data)
        return digest.hexdigest()

    @cached_property
    def patches(self) -> tuple[Patch, ...]:
        """The parsed patches.

        Raises:
            SeriesError: a file is malformed, or one of the series is missing.
        """
        patches = tuple(parse_patch(f"{self.name}/{name}", data) for name, data in self._files)
        numbers = [int(name[:4]) for name, _ in self._files]
        totals = [re.search(r"\[PATCH[^]]* \d+/(\d+)\]", patch.subject) for patch in patches]
        expected = max([len(numbers), *(int(match[1]) for match in totals if match)])
        if not numbers or numbers != list(range(1, expected + 1)):
            raise SeriesError(
                f"the patch series in {self.folder} is incomplete: found numbers {numbers}, "
                f"expected 1 to {expected}; install the package again"
            )
        return patches


def find_patches_dir() -> Path:
    """The folder of all series: inside an installed package, beside it in a checkout or sdist.

    Raises:
        SeriesError: neither is there.
    """
    for folder in (PACKAGE_DIR / "_torch_patches", PACKAGE_DIR.parent / "torch_patches"):
        if folder.is_dir():
            return folder
    raise SeriesError(
        f"no torch patches found in {PACKAGE_DIR} or beside it; install the package again"
    )


def list_series(patches_dir: Path | None = None) -> list[Series]:
    """All series, newest first."""
    folder = find_patches_dir() if patches_dir is None else patches_dir
    found = [
        Series(parse_minor(entry.name), entry)
        for entry in folder.iterdir()
        if entry.is_dir() and re.fullmatch(r"\d+\.\d+", entry.name)
    ]
    return sorted(found, key=lambda series: series.minor, reverse=True)


def choose_series(version: str, patches_dir: Path | None = None) -> Series:
    """The series for a torch version: that of its minor, else the newest that is not newer.

    So a nightly beyond the newest series is tried with the newest one.

    Raises:
        UnsupportedTorchError: torch is older than every series.
        SeriesError: there is no series at all.
    """
    minor = parse_minor(version)
    every = list_series(patches_dir)
    if not every:
        raise SeriesError(f"no patch series in {patches_dir or find_patches_dir()}")
    for series in every:
        if series.minor <= minor:
            return series
    raise UnsupportedTorchError(
        f"torch {version} is too old: the patch needs torch {every[-1].name} or newer"
    )


@dataclass(frozen=True)
class TorchTree:
    """A torch on disk: an installed ``torch`` directory, or the one in a source checkout."""

    torch_dir: Path
    version: str
    is_checkout: bool

    def path(self, repo_path: str) -> Path:
        """Where a file of the repository lies (``torch/...``, or anything in a checkout)."""
        if repo_path.startswith("torch/"):
            return self.torch_dir / repo_path[len("torch/") :]
        if not self.is_checkout:
            raise ValueError(f"{repo_path} is not part of an installed torch")
        return self.torch_dir.parent / repo_path

    def has(self, repo_path: str) -> bool:
        """Whether such a file belongs in this tree: an installed torch carries no tests."""
        return self.is_checkout or repo_path.startswith("torch/")

    def read(self, repo_path: str) -> bytes | None:
        try:
            return self.path(repo_path).read_bytes()
        except FileNotFoundError:
            return None

    def apply(self, series: Series) -> Mapping[str, FileChange]:
        """The series applied to this tree, in memory.

        Raises:
            PatchDoesNotApplyError, SeriesError
        """
        return apply_patches(series.patches, self.read, self.has)


def find_torch(directory: str | Path | None = None) -> TorchTree:
    """Find a torch without importing it.

    Args:
        directory: a ``torch`` directory, the directory that holds it, or the root of a source
            checkout; ``None`` for the torch that ``import torch`` would give.

    Raises:
        ModuleNotFoundError: no directory given and torch is not installed.
        UnsupportedTorchError: the directory holds no torch, or one whose version can't be read.
    """
    if directory is None:
        torch_dir = _importable_torch_dir()
    else:
        given = Path(directory)
        candidates = [given / "torch", given]
        found = [path for path in candidates if (path / "_inductor" / "config.py").is_file()]
        if not found:
            raise UnsupportedTorchError(f"{given} is not a torch directory and does not hold one")
        torch_dir = found[0]
    torch_dir = torch_dir.absolute()
    root = torch_dir.parent
    version_txt = root / "version.txt"
    is_checkout = version_txt.is_file() and (root / "setup.py").is_file()
    # In a checkout torch/version.py is left over from the last build, if there was one.
    source = version_txt if is_checkout else torch_dir / "version.py"
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnsupportedTorchError(f"the torch version can't be read: {error}") from None
    if is_checkout:
        return TorchTree(torch_dir, text.strip(), True)
    match = re.search(r"""^__version__\s*(?::\s*\w+\s*)?=\s*['"]([^'"]+)['"]""", text, re.MULTILINE)
    if match is None:
        raise UnsupportedTorchError(f"{source} does not say which version of torch this is")
    return TorchTree(torch_dir, match[1], False)


def _importable_torch_dir() -> Path:
    loaded = sys.modules.get("torch")
    if loaded is not None and getattr(loaded, "__path__", None):
        return Path(next(iter(loaded.__path__)))
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    return Path(next(iter(spec.submodule_search_locations)))
