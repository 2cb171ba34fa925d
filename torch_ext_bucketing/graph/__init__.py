"""Facts about a graph and its nodes: kinds, tags, dependencies, writes, live bytes."""
