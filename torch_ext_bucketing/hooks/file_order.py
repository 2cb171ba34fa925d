"""In which order the files of a patch are written, so that a torch half written still imports."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from .series import CONFIG_PATH
from .unified import FileChange

__all__ = ["in_import_order"]


def in_import_order(changes: Mapping[str, FileChange]) -> list[FileChange]:
    """Config first, then each file before those that import it, else as the series has them.

    Imports inside functions count only where they don't contradict those that run when the
    module is loaded.
    """
    paths = [
        *([CONFIG_PATH] if CONFIG_PATH in changes else []),
        *(path for path in changes if path.startswith("torch/") and path != CONFIG_PATH),
        *(path for path in changes if not path.startswith("torch/")),
    ]
    modules = {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for path in paths
        if path.startswith("torch/") and path.endswith(".py")
    }
    needs: dict[str, list[str]] = {path: [] for path in paths}

    def reaches(start: str, goal: str) -> bool:
        return start == goal or any(reaches(path, goal) for path in needs[start])

    found = {path: _imports(changes[path].after or b"", name) for name, path in modules.items()}
    for on_load in (True, False):
        for path, imported in found.items():
            for name, other in modules.items():
                if (name, on_load) in imported and path != CONFIG_PATH and not reaches(other, path):
                    needs[path].append(other)
    ordered: list[str] = []

    def visit(path: str) -> None:
        if path not in ordered:
            for other in needs[path]:
                visit(other)
            ordered.append(path)

    for path in paths:
        visit(path)
    return [changes[path] for path in ordered]


def _imports(source: bytes, module: str) -> frozenset[tuple[str, bool]]:
    """What a source imports, and whether it does so on being loaded or inside a function."""
    package = module.split(".")[:-1]
    names: list[tuple[str, bool]] = []

    def walk(node: ast.AST, on_load: bool) -> None:
        if isinstance(node, ast.Import):
            names.extend((alias.name, on_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names.append((origin, on_load))
            names.extend((f"{origin}.{alias.name}", on_load) for alias in node.names)
        inside = on_load and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            walk(child, inside)

    walk(ast.parse(source), True)
    return frozenset(names)
