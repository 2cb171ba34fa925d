"""A real training run, three ways, compared bit for bit: ``python -m torch_ext_bucketing demo``.

settings   what runs, checked                     (no torch)
train      what each rank does
results    from the ranks' reports to a result    (no torch)
table      the result as text                     (no torch)
cli        the command                            (no torch until it starts)
"""
