"""A model as a tree of its modules with parameters, by canonical FQN."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn as nn

from ..fqns import WRAPPER_ATTRIBUTES, canonical_modules


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside the wrappers (checkpointing, ``torch.compile``) around it, or itself."""
    for attribute in WRAPPER_ATTRIBUTES:
        inner = module._modules.get(attribute)
        if inner is not None:
            return unwrapped(inner)
    return module


class ModuleTree:
    """The module tree without wrappers and modules that hold no parameters, by canonical FQN."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = canonical_modules(model)
        self._children: dict[str, list[tuple[str, nn.Module]]] = {}
        self._depth: dict[str, int] = {}

    def children(self, path: str) -> list[tuple[str, nn.Module]]:
        """(FQN, module) of the children with parameters. One that is there twice is listed once."""
        if path in self._children:
            return self._children[path]
        seen: set[nn.Module] = set()
        result = []
        for key, child in unwrapped(self.modules[path]).named_children():
            # What ``torch.nn.utils.parametrize`` moved into a child is still the module's own.
            if key != "parametrizations" and child not in seen and has_parameters(child):
                seen.add(child)
                result.append((f"{path}.{key}" if path else key, child))
        self._children[path] = result
        return result

    def below(self, path: str) -> Iterator[str]:
        """FQNs of all modules with parameters below ``path``, parents first."""
        for name, _ in self.children(path):
            yield name
            yield from self.below(name)

    def depth(self, path: str) -> int:
        """Levels of modules with parameters below a module: 0 for a leaf."""
        if path not in self._depth:
            below = (1 + self.depth(name) for name, _ in self.children(path))
            self._depth[path] = max(below, default=0)
        return self._depth[path]

    def size(self, *paths: str) -> int:
        """Number of parameter elements in modules, shared ones counted once."""
        params = (parameter for path in paths for parameter in self.modules[path].parameters())
        return sum(parameter.numel() for parameter in dict.fromkeys(params))


def is_plain_container(module: nn.Module) -> bool:
    """A ``ModuleList`` or ``ModuleDict`` that can't be called: ``fully_shard`` refuses those,
    too."""
    return (
        isinstance(module, nn.ModuleList | nn.ModuleDict)
        and type(module).forward is nn.Module.forward
    )


def has_parameters(module: nn.Module) -> bool:
    # Asked of every module: ``module.parameters()`` would walk the whole subtree by name.
    return any(p is not None for p in module._parameters.values()) or any(
        has_parameters(child) for child in module.children()
    )
