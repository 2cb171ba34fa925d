"""A real training run, three ways, compared bit for bit: ``python -m torch_ext_bucketing demo``.
Torch is imported by ``train`` alone, which is what each rank does."""
