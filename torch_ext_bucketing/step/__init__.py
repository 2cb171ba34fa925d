"""The optimizer's part of a step, as nodes of the backward graph."""
