"""The order of a graph: cost model, critical path, bounds on memory, choice of byte caps."""
