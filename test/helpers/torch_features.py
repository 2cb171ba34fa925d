"""Features that not every supported torch has."""

import importlib.util

import pytest
import torch
import torch.compiler.config
import torch.distributed.config
from torch._inductor import config
from torch._inductor.fx_passes import fsdp

CONFIG = torch.compiler.config if torch.__version__ >= "2.14" else torch.distributed.config
"""The config module with ``compile_on_one_rank``."""

HAS_CUDA = bool(torch.version.cuda) and importlib.util.find_spec("triton") is not None
"""Whether Inductor compiles for fake CUDA, which needs no card."""

HAS_PRE_BUCKETING = hasattr(fsdp, "pre_bucket_fsdp_collectives")
needs_pre_bucketing = pytest.mark.skipif(
    not HAS_PRE_BUCKETING,
    reason=f"torch {torch.__version__} has no pre-bucketing and no FSDP groups to filter",
)

has_simple_overlap = pytest.mark.skipif(
    not hasattr(config.aten_distributed_optimizations, "enable_simple_overlap"),
    reason=f"torch {torch.__version__} moves no collectives by itself after all passes",
)
