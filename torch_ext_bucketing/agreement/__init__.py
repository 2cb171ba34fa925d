"""All ranks must launch the same collectives: comparing what they compiled."""

from .._moved import forward as _forward

# What was in the module of this name, before it was a folder.
__getattr__ = _forward(__name__, ["exchange", "before_run"])
