"""Packaging of torch_ext_bucketing.

The patch series lives beside the package, in ``torch_patches/``, because it is a
deliverable of its own. An editable install finds it there; a wheel carries a copy
inside the package (``torch_ext_bucketing/_torch_patches``); an sdist carries the
checkout's layout, from which a wheel can be built again.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import find_packages, setup
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
        # What build_py lists here is what an sdist carries.
        extra = [*self._patch_files(), ROOT / "LICENSE", ROOT / "README.md"]
        return [*super().get_source_files(), *(str(p.relative_to(ROOT)) for p in extra)]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        if not getattr(self, "editable_mode", False):
            outputs += [str(self._patch_target(p)) for p in self._patch_files()]
        return outputs


setup(
    name="torch_ext_bucketing",
    version="0.1.0",
    description="Collective bucketing policies for compiled PyTorch training",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    python_requires=">=3.11",
    packages=find_packages(include=["torch_ext_bucketing", "torch_ext_bucketing.*"]),
    package_data={"torch_ext_bucketing": ["py.typed"]},
    install_requires=["torch>=2.11"],
    extras_require={
        "test": ["expecttest", "hypothesis", "pytest", "pytest-xdist", "numpy", "ruff"],
        "dev": ["ruff", "mypy"],
        # For explain --plot.
        "plot": ["matplotlib"],
        # For the rows of `benchmarks/parity.py --models hf`.
        "models": ["transformers", "timm"],
        # For the rows `float8/*` of `benchmarks/parity.py`, on torch 2.15.
        "float8": ["torchao"],
        # For test/trainers/test_torchtitan.py, on torch 2.15.
        "torchtitan": ["torchtitan==0.3.0"],
    },
    entry_points={
        "console_scripts": ["torch-ext-bucketing = torch_ext_bucketing.__main__:main"],
    },
    cmdclass={"build_py": BuildWithPatches},
)
