"""Compare, between the ranks of a process group, what they compiled, before it runs."""
