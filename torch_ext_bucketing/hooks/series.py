"""Which patch series is for which torch, and where a torch lies.

Nothing here imports torch: a torch that is broken, half patched or of another Python must
still be found, named and repaired.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..errors import HooksError
from .patches import FileDiff, parse_patch

PACKAGE_DIR = Path(__file__).resolve().parent.parent
CONFIG_PATH = "torch/_inductor/config.py"

HOOK_ENTRIES = ("bucket_payload_order_key", "fsdp_group_filter", "bucket_non_adjacent")
"""Entries of ``torch._inductor.config.aten_distributed_optimizations`` that the series adds.

A torch whose config source has them all, and that nobody patched, has the hooks natively.
"""


def _minor(version: str) -> tuple[int, int]:
    """``"2.16.0.dev20261101+cu132"`` to ``(2, 16)``."""
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
        """What all patches change in ``torch/``, in order; a ``HooksError`` where one is malformed
        or missing."""
        try:
            # 0000 is the cover letter, which has no diff.
            paths = sorted(self.folder.glob("[0-9][0-9][0-9][0-9]-*.patch"))
            files = {p.name: p.read_bytes() for p in paths if not p.name.startswith("0000")}
        except OSError as error:
            raise HooksError(f"the patch series in {self.folder} can't be read: {error}") from None
        numbers = [int(name[:4]) for name in files]
        totals = re.findall(rb"^Subject: \[PATCH[^]]* \d+/(\d+)\]", b"".join(files.values()), re.M)
        expected = max([1, *numbers, *map(int, totals)])
        if numbers != list(range(1, expected + 1)):
            raise HooksError(
                f"the patch series in {self.folder} is incomplete: found numbers {numbers}, "
                f"expected 1 to {expected}; install the package again"
            )
        return tuple(
            diff
            for name, data in files.items()
            for diff in parse_patch(f"{self.name}/{name}", data)
        )


def find_patches_dir() -> Path:
    """The folder of all series: inside an installed package, beside it in a checkout or sdist."""
    for folder in (PACKAGE_DIR / "_torch_patches", PACKAGE_DIR.parent / "torch_patches"):
        if folder.is_dir():
            return folder
    raise HooksError(
        f"no torch patches found in {PACKAGE_DIR} or beside it; install the package again"
    )


def list_series() -> list[Series]:
    """All series, newest first."""
    folders = [p for p in find_patches_dir().iterdir() if re.fullmatch(r"\d+\.\d+", p.name)]
    return [Series(p) for p in sorted(folders, key=lambda p: _minor(p.name), reverse=True)]


def choose_series(version: str) -> Series:
    """The series for a torch version: that of its minor, else the newest that is not newer. So a
    nightly beyond the newest series is tried with the newest one; what is older than all is a
    ``HooksError``."""
    wanted = _minor(version)
    oldest = "any (install the package again, it has no series)"
    for series in list_series():
        if _minor(series.name) <= wanted:
            return series
        oldest = series.name
    raise HooksError(f"torch {version} is too old: the patch needs torch {oldest} or newer")


@dataclass(frozen=True)
class TorchTree:
    """A torch on disk: an installed ``torch`` directory, or the one in a source checkout."""

    torch_dir: Path
    version: str

    def __str__(self) -> str:
        return f"torch {self.version} in {self.torch_dir}"

    def path(self, repo_path: str) -> Path:
        """Where a file of the repository, ``torch/...``, lies."""
        return self.torch_dir / repo_path.removeprefix("torch/")

    def read(self, repo_path: str) -> bytes | None:
        """Its bytes, or None where there is no such file."""
        try:
            return self.path(repo_path).read_bytes()
        except FileNotFoundError:
            return None

    def has_hook_entries(self) -> bool:
        """Whether the source of its config declares every hook entry."""
        config = self.read(CONFIG_PATH) or b""
        return all(re.search(rb"^    %s\s*[:=]" % e.encode(), config, re.M) for e in HOOK_ENTRIES)


def find_torch(directory: str | Path | None = None) -> TorchTree:
    """Find a torch without importing it: in a ``torch`` directory, the directory that holds it, or
    the root of a source checkout; ``None`` for the torch that ``import torch`` would give, and a
    ``ModuleNotFoundError`` where there is none."""
    if directory is None:
        torch_dir = _importable_torch_dir().absolute()
    else:
        candidates = [Path(directory) / "torch", Path(directory)]
        found = [path for path in candidates if (path / "_inductor" / "config.py").is_file()]
        if not found:
            raise HooksError(f"{directory} is not a torch directory and does not hold one")
        torch_dir = found[0].absolute()
    # In a checkout torch/version.py is left over from the last build, if there was one.
    source = torch_dir.parent / "version.txt"
    is_checkout = source.is_file() and (torch_dir.parent / "setup.py").is_file()
    if not is_checkout:
        source = torch_dir / "version.py"
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HooksError(f"the torch version can't be read: {error}") from None
    if is_checkout:
        return TorchTree(torch_dir, text.strip())
    match = re.search(r"""^__version__\s*(?::\s*\w+\s*)?=\s*['"]([^'"]+)['"]""", text, re.MULTILINE)
    if match is None:
        raise HooksError(f"{source} does not say which version of torch this is")
    return TorchTree(torch_dir, match[1])


def _importable_torch_dir() -> Path:
    places = getattr(sys.modules.get("torch"), "__path__", None)
    if not places:
        spec = importlib.util.find_spec("torch")
        places = spec and spec.submodule_search_locations
    if not places:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    return Path(next(iter(places)))
