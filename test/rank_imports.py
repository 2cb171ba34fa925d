"""What ranks of tests are forked with (see ``ranks.preload``): imports, and one compile, which saves
each rank the second that its first one takes longer. None leaves a thread; ``test_ranks`` looks.
"""

import os

import pytest  # noqa: F401
import torch
import torch._inductor.compile_fx
import torch.distributed as dist
import torch.distributed._composable.replicate
import torch.distributed.fsdp
from sharded_models import TwoBlocks
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_ext_bucketing as teb

for name in teb.__all__:
    getattr(teb, name)

torch.set_num_threads(1)
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
model = teb.data_parallel(TwoBlocks(), init_device_mesh("cpu", (2,)))
passes = teb.recipe(model, units=["layers.0", "layers.1", ""])
compiled = torch.compile(model, backend=teb.backend("aot_eager", passes, agree=False))
compiled(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
dist.destroy_process_group()
torch._dynamo.reset()
torch.manual_seed(torch.initial_seed())
del model, compiled, passes
assert len(os.listdir("/proc/self/task")) == 1
