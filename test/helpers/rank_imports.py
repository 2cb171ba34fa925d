"""Import what ranks need before they are forked (see ``ranks.preload``); find vector instructions.

Neither may leave a thread, which ``test_ranks`` checks. A compile here would save each rank a tenth
of its first compile, but it leaves autograd's threads where torch was built with CUDA.
"""

import contextlib
import gc
import importlib

import pytest  # noqa: F401
import torch._inductor.compile_fx
import torch.distributed._composable.replicate
import torch.distributed.fsdp
import torch.distributed.tensor.experimental  # noqa: F401
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

import torch_ext_bucketing as teb

for name in teb.__all__:
    getattr(teb, name)

# Modules that the first compile imports; not every torch has all of them.
for name in (
    "torch._dynamo.backends.inductor",
    "torch._export.db.logging",
    "torch._functorch._aot_autograd.subclass_codegen",
    "torch._inductor.codegen.cuda_combined_scheduling",
    "torch.export._trace",
    "torch.fx.experimental.validator",
    "torch.fx.passes.utils.fuser_utils",
    "torch.utils.cpp_extension",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

# The answer takes compiling small programs. Forked ranks inherit it, whatever their cache folder.
valid_vec_isa_list()

gc.collect()
gc.freeze()
gc.set_threshold(50_000, 20, 20)
