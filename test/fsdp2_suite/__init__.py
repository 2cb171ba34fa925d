"""FSDP2's properties as short programs, each run by eager FSDP2 and by this package.

A program is a function of a ``Side``. It returns pairs of labels and values. Verdicts of the pairs
of both sides are in ``harness``. Properties are those of torch's own tests of ``fully_shard``.
"""
