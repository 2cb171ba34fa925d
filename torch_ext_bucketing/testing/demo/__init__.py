"""Train one model in three ways and compare weights: ``python -m torch_ext_bucketing demo``.

Only ``train``, which ranks run, imports torch.
"""
