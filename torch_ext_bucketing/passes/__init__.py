"""The passes over graphs, and the backends that run them."""

from .._moved import forward as _forward

# What was in the module of this name, before it was a folder.
__getattr__ = _forward(__name__, ["backends", "base", "bucketing", "resharding", "tagging"])
