"""Which parameters share a unit, and in which order they are packed."""

from .._moved import forward as _forward

# What was in the module of this name, before it was a folder.
__getattr__ = _forward(__name__, ["blocks", "make", "manual", "plan"])
