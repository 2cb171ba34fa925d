"""A process group over gloo that adds in the order of NCCL's rings."""
