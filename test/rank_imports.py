"""What ranks of tests need, imported once by the server that they are forked from (``ranks``).

Imports alone start no thread, which is what makes the fork safe; ``ranks`` looks.
"""

import torch_ext_bucketing as teb  # before the bucketing modules that compile_fx brings

# isort: split
import pytest  # noqa: F401
import torch
import torch._inductor.compile_fx
import torch.distributed._composable.replicate
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

for name in teb.__all__:
    getattr(teb, name)
