"""A newer torch that lacks a private function."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import torch_ext_bucketing

pytestmark = pytest.mark.torch

ROOT = Path(torch_ext_bucketing.__path__[0])

# Public, although the name of a module begins with an underscore.
OFFERED = ("torch._inductor.config",)

CHILD = """
import importlib, json, os, sys
import torch

torch.__version__ = "2.17.0"

def without(module, name, ours, function, arguments=1):
    delattr(importlib.import_module(module), name)
    import torch_ext_bucketing as teb
    said = ["imported"]
    try:
        imported = importlib.import_module(f"torch_ext_bucketing._torch.{ours}")
        if function:
            getattr(imported, function)(*[None] * arguments)
    except RuntimeError as error:
        said.append(str(error))
    print(json.dumps(said), flush=True)

for case in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        without(*case)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, case
"""
"""Forks a child for each case, because importing torch takes longer than the case."""


def private_imports() -> list[tuple[Path, str, str, bool]]:
    """Yield module, name, and whether it is in a ``with private_torch()``, for ``_torch/``."""
    found = []
    for path in sorted((ROOT / "_torch").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        guarded: set[ast.AST] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.With):
                if "private_torch" in ast.dump(node.items[0]):
                    guarded.update(ast.walk(node))
            elif isinstance(node, ast.Try):  # older torches lack it: a handler follows
                guarded.update(n for statement in node.body for n in ast.walk(statement))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    private = any(part.startswith("_") for part in whole.split("."))
                    if whole.startswith("torch.") and private and not whole.startswith(OFFERED):
                        found.append((path, node.module, alias.name, node in guarded))
    return found


def test_whatever_is_private_is_imported_under_guard():
    found = private_imports()
    assert len(found) > 20
    assert [(p.name, module, name) for p, module, name, guarded in found if not guarded] == []


GONE = [
    (
        "torch._inductor.fx_passes.control_dependencies",
        "preserve_node_ordering",
        "inductor",
        "run_after",
        2,
    ),
    ("torch._subclasses.fake_tensor", "FakeTensor", "aot", ""),
    (
        "torch.distributed.distributed_c10d",
        "_resolve_process_group",
        "process_groups",
        "group_by_name",
    ),
]


def test_the_error_names_what_is_gone_and_the_torch_at_first_use():
    command = [sys.executable, "-c", CHILD, json.dumps(GONE)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    for (_, name, *_), line in zip(GONE, run.stdout.splitlines(), strict=True):
        said = json.loads(line)
        assert said[:1] == ["imported"]
        assert len(said) == 2, name
        assert "torch 2.17.0 lacks a name that torch_ext_bucketing uses" in said[1]
        assert name in said[1]
