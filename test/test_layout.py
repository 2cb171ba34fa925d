"""The package's folders: imports point one way, and nothing needs the hooks."""

import ast
import graphlib
import warnings
from pathlib import Path

import pytest

import torch_ext_bucketing

ROOT = Path(torch_ext_bucketing.__file__).parent
MODULES = sorted(p for p in ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__")


def imports(path: Path, *, lazy: bool) -> set[str]:
    """List the package's modules that a module imports, for type checkers alone included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = path.relative_to(ROOT.parent).with_suffix("").parts
    package = own[:-1]
    found = set()

    def visit(node: ast.AST) -> None:
        if not lazy and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            full = [*base, *(node.module or "").split(".")]
            module = ".".join(p for p in full if p)
            for alias in node.names:
                if module == ROOT.name or module.startswith(f"{ROOT.name}."):
                    below = module[len(ROOT.name) + 1 :]
                    inner = f"{below}.{alias.name}" if below else alias.name
                    found.add(inner if inner in NAMES else below)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found - {""}


NAMES = {name_of(p) for p in MODULES}


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """Find a cycle; return its nodes, or an empty list."""
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_imports_between_modules_point_one_way():
    found = cycle({name_of(p): imports(p, lazy=True) - {name_of(p)} for p in MODULES})
    assert not found, " -> ".join(found)


def test_imports_between_folders_point_one_way():
    """``_exports``, ``_source``, ``errors`` and ``fqns`` are below all folders, the rest above."""
    edges: dict[str, set[str]] = {}
    for path in MODULES:
        folder = name_of(path).partition(".")[0]
        if path.parent == ROOT:
            continue
        others = {n.partition(".")[0] for n in imports(path, lazy=False)}
        edges.setdefault(folder, set()).update(others - {folder})
    found = cycle(edges)
    assert not found, " -> ".join(found)


MAY_PLAN = {
    "planner",
    "trainers",
    "testing",
    "commands",
    "explain",
    "recipes",
    "step",
    "tuning",
}
"""Folders that may import ``planner/``. The root's ``__init__`` exports names of it."""


def test_the_core_does_not_import_the_planner():
    """Merging and rewriting need neither estimates nor searches, nor their types."""
    found = []
    for path in MODULES:
        name = name_of(path)
        if name.partition(".")[0] not in {*MAY_PLAN, "__main__", ""}:
            others = imports(path, lazy=True)
            found += [f"{name}: {n}" for n in sorted(others) if n.partition(".")[0] == "planner"]
    assert found == []


REWRITES = {
    "passes.combine_uses",
    "passes.reshard_to",
    "passes.add_by_unit",
    "passes.reduce_scatter_first",
    "passes.pipeline",
}


def test_a_rewrite_needs_little():
    """It neither shards models nor runs ranks, steps or commands."""
    edges = {name_of(p): imports(p, lazy=False) for p in MODULES}
    for name, others in edges.items():
        others.add(name.rpartition(".")[0])
    found, new = set(), REWRITES
    while new:
        found |= new
        new = set().union(*(edges[name] for name in new)) - found - {""}  # it imports lazily
    apart = {"commands", "planner", "recipes", "step", "testing", "trainers", "tuning"}
    assert {name for name in found if name.partition(".")[0] in apart} == set()


def test_nothing_imports_the_hooks_and_they_import_nothing():
    """The root exports the folder, and errors are all in one module."""
    for path in MODULES:
        name, found = name_of(path), imports(path, lazy=True)
        inside = {n for n in found if n.partition(".")[0] == "hooks"}
        if name.partition(".")[0] == "hooks":
            assert found - {"errors", "_exports"} == inside, name
        elif name:
            assert not inside, name


def test_the_root_is_small_and_no_module_is_long():
    at_root = [p.name for p in MODULES if p.parent == ROOT]
    assert len(at_root) <= 8, at_root
    lines = {name_of(p): len(p.read_text(encoding="utf-8").splitlines()) for p in MODULES}
    assert {n: k for n, k in lines.items() if k > 600} == {}


def test_private_torch_is_touched_in_one_folder():
    """Only ``_torch/`` imports ``torch._inductor`` and other modules with such names."""
    offered = ("torch._inductor.config", "torch._inductor.custom_graph_pass")
    found = []
    for path in MODULES:
        if path.relative_to(ROOT).parts[0] in ("_torch", "hooks", "testing"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{a.name}" for a in node.names]
            elif isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            found += [
                f"{name_of(path)}: {n}"
                for n in names
                if n.startswith("torch._") and not n.startswith(offered)
            ]
    assert found == []


def test_torch_is_enough():
    """Nothing needs numpy, which torch does not install; its object collectives do."""
    needs = {"numpy", "all_gather_object", "broadcast_object_list", "gather_object"}
    found = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {getattr(node, "attr", None)}
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names}
            found += [f"{name_of(path)}: {name}" for name in needs & names]
    assert found == []


def test_public_names_are_few():
    """The public names fit on half a page."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = {name: getattr(torch_ext_bucketing, name) for name in dir(torch_ext_bucketing)}
    assert set(torch_ext_bucketing.__all__) < set(found)
    assert len(found) <= 24, sorted(found)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'BucketUnit'"):
        getattr(torch_ext_bucketing, "BucketUnit")  # noqa: B009
