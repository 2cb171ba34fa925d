"""torch's own bucketing under the hooks' entries has eager FSDP2's bits, on real ranks."""

import re

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn as nn
from patching_trees import needs_unpatched_torch
from sharded_models import eager_fsdp2
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh

import torch_ext_bucketing as teb
from benchmarks.eager_parity.ranks import aten_kernels
from torch_ext_bucketing.testing.ranks import Rank, run_ranks
from torch_ext_bucketing.testing.ring import RingTopology, ring_rank
from torch_ext_bucketing.testing.training import ModelConfig, Transformer, train

pytestmark = [pytest.mark.torch, pytest.mark.hooks]

STEPS = 3
KINDS = ("all_gather_into_tensor", "reduce_scatter_tensor")
ENTRIES = "aten_distributed_optimizations."
RUNS = {"in FSDP2's order": "fsdp_payload_order", "in graph order": None}


def small_model() -> Transformer:
    # 33 rows are uneven over the ranks.
    config = ModelConfig(vocab=40, dim=32, layers=1, heads=4, kv_heads=2, hidden=33, max_seq=8)
    return Transformer(config, dtype=torch.bfloat16)


def digests(rank: Rank, model: nn.Module, run) -> tuple[list[str], dict[str, int]]:
    """Hash this rank's shards after each step; count the collectives in the compiled code by kind."""
    counts = dict.fromkeys(KINDS, 0)

    def forward_backward(number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * number + rank.rank)
        tokens = torch.randint(0, 40, (2, 8), generator=generator)
        loss = run(tokens).float().logsumexp(-1).mean()
        loss.backward()
        return loss

    def step(number: int) -> torch.Tensor:
        if number:
            return forward_backward(number)
        loss, codes = run_and_get_code(forward_backward, number)
        for kind in KINDS:
            called = rf"(?m)^ *(?:\w+ = )?torch\.ops\._c10d_functional\.{kind}(?:_out)?\.default\("
            counts[kind] = len(re.findall(called, "".join(codes)))
        return loss

    return train(model, step, STEPS, lr=1e-2).digests, counts


def one_unit(rank: Rank) -> dict[str, tuple[list[str], dict[str, int]]]:
    """Return :func:`digests` for eager FSDP2, all of it one unit, and for each of ``RUNS``."""
    teb.hooks.install()
    with ring_rank(rank, RingTopology(ranks_per_node=2, channels=8, chunk_bytes=128)):
        mesh = init_device_mesh("cpu", (rank.world_size,))
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
        eager = eager_fsdp2(small_model(), [""], mesh, **dtypes)
        order = teb.FSDPParamOrder.from_fsdp(eager)
        results = {"eager": digests(rank, eager, eager)}
        for name, field in RUNS.items():
            torch._dynamo.reset()
            model = teb.data_parallel(small_model(), mesh, **dtypes)
            tags = teb.hooks.TagParameters(model, order=order)
            settings = {
                "joint_custom_post_pass": tags,
                "bucket_all_gathers_fx": "fsdp",
                "bucket_reduce_scatters_fx": "fsdp",
                ENTRIES + "bucket_payload_order_key": field,
                ENTRIES + "bucket_max_collectives_between": None,
            }
            with aten_kernels(), inductor_config.patch(settings):
                results[name] = digests(rank, model, torch.compile(model, fullgraph=True))
        return results


@pytest.mark.slow
@needs_unpatched_torch
def test_torchs_own_passes_give_eager_fsdp2s_bits():
    for results in run_ranks(one_unit, 4, timeout_s=400):
        ours, control = (results[name] for name in RUNS)
        assert ours[1] == control[1] == dict.fromkeys(KINDS, 1)
        assert ours[0] == results["eager"][0]
        assert control[0][0] != results["eager"][0][0]
