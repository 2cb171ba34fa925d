"""Rewrites of the tagged joint graph that give it eager FSDP2's arithmetic and process groups."""
