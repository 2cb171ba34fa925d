"""Import the base class of Inductor's custom graph passes."""

from __future__ import annotations

from .private import private_torch

with private_torch():
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
