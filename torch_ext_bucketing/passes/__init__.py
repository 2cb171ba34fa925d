"""The passes over graphs, and the backends that run them."""
