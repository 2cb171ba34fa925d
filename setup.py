"""Ship ``torch_patches/`` with the package; all else is in ``pyproject.toml``.

The patch series lies beside the package because it is a deliverable of its own. An editable
install finds it there; a wheel carries a copy inside the package,
``torch_ext_bucketing/_torch_patches``; an sdist has the layout of a checkout.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PATCHES = ROOT / "torch_patches"


class BuildWithPatches(build_py):
    """``build_py`` that also ships ``torch_patches/`` as package data."""

    def _patch_files(self) -> list[Path]:
        return sorted(p for p in PATCHES.rglob("*") if p.is_file())

    def _patch_target(self, source: Path) -> Path:
        relative = source.relative_to(PATCHES)
        return Path(self.build_lib) / "torch_ext_bucketing" / "_torch_patches" / relative

    def run(self) -> None:
        super().run()
        if getattr(self, "editable_mode", False):
            return
        for source in self._patch_files():
            target = self._patch_target(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    def get_source_files(self) -> list[str]:
        # build_py's list is what an sdist carries.
        extra = (str(p.relative_to(ROOT)) for p in self._patch_files())
        return [*super().get_source_files(), *extra]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        if not getattr(self, "editable_mode", False):
            outputs += [str(self._patch_target(p)) for p in self._patch_files()]
        return outputs


setup(cmdclass={"build_py": BuildWithPatches})
