"""Eager FSDP2's units, the order of their bytes, sharding, and tags: whom a collective serves."""
