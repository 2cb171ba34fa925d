"""Find the installed torch and choose the patch series for its version.

Nothing here imports torch: ``install()`` must run before torch's bucketing modules are imported.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..errors import HooksError
from .patches import FileDiff, parse_patch

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
    """The patches for one torch minor version, in order."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def diffs(self) -> tuple[FileDiff, ...]:
        """Parse the changes to ``torch/`` of all patches, in order."""
        # 0000 is the cover letter, which has no diff.
        paths = sorted(self.folder.glob("[0-9][0-9][0-9][0-9]-*.patch"))
        patches = [p for p in paths if not p.name.startswith("0000")]
        return tuple(
            diff
            for patch in patches
            for diff in parse_patch(f"{self.name}/{patch.name}", patch.read_bytes())
        )


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
    wanted = _minor(version)
    every = list_series()
    # A nightly is ahead of the newest series; most of the time that one still applies.
    for series in every:
        if _minor(series.name) == wanted or (series is every[0] and _minor(series.name) < wanted):
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
