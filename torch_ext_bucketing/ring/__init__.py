"""A process group over gloo that adds in the order of NCCL's rings."""

from .._moved import forward as _forward

# What was in the module of this name, before it was a folder.
__getattr__ = _forward(__name__, ["group", "sums"])
