"""The order of a graph: cost model, critical path, bounds on memory, choice of byte caps."""

from .._moved import forward as _forward

# What was in the module of this name, before it was a folder.
__getattr__ = _forward(__name__, ["scheduler", "model"])
