"""What each rank of ``test_recipe.py`` does: train eager FSDP2 and by recipes, and compare."""

from __future__ import annotations

import warnings

import torch
from sharded_models import TwoBlocks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torch_ext_bucketing.testing.model import ModelConfig, Transformer
from torch_ext_bucketing.testing.ring import RingTopology, ring_rank
from torch_ext_bucketing.testing.training import train

STEPS = 2
DTYPES = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def small_model(layers=2):
    # 33 rows are uneven over the ranks.
    config = ModelConfig(vocab=37, dim=32, layers=layers, heads=4, kv_heads=2, hidden=33, max_seq=8)
    return Transformer(config)


def wrapped(mesh):
    """Eager FSDP2 as trainers call it: the embedding, each block, norm and head, then the root."""
    model = small_model()
    return _wrapped(model, [model.embed, *model.blocks, [model.norm, model.output]], mesh)


def _wrapped(model, units, mesh):
    policy = MixedPrecisionPolicy(**DTYPES, cast_forward_inputs=False)
    for module in (*units, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def blocks():
    """With blocks, as a recipe needs them, that are fast to compile."""
    torch.manual_seed(0)
    return TwoBlocks(dim=32, vocabulary=37)


def trained(rank, model, run):
    """Digests of this rank's shards of all weights, after each step."""

    def step(number):
        generator = torch.Generator().manual_seed(100 * number + rank)
        loss = run(torch.randint(0, 37, (2, 8), generator=generator)).float().logsumexp(-1).mean()
        loss.backward()
        return loss

    return train(model, step, STEPS, lr=1e-2).digests


def quick_starts(rank, cases):
    """The digests of eager FSDP2 and its units; per case of keywords of ``recipe`` the digests, what
    each bucket holds and is packed by, and the report's text."""
    with ring_rank(rank, RingTopology(ranks_per_node=1)):
        import torch_ext_bucketing as teb

        mesh = init_device_mesh("cpu", (rank.world_size,))
        eager = blocks()
        eager = _wrapped(eager, [eager.embedding, *eager.layers, eager.head], mesh)
        units = teb.FSDPParamOrder.from_fsdp(eager).units
        results = {"eager": (trained(rank.rank, eager, eager), units, "")}
        for name, options in cases.items():
            torch._dynamo.reset()
            model = teb.data_parallel(blocks(), mesh, **DTYPES)
            with warnings.catch_warnings():
                if name != "speed":  # whose bound on memory a model this small can't keep
                    warnings.simplefilter("error", UserWarning)
                backend = teb.backend("aot_eager", passes=teb.recipe(model, **options))
                digests = trained(rank.rank, model, torch.compile(model, backend=backend))
            report = backend.last_report()
            buckets = [
                (b.kind, b.packed_by, tuple(f for m in b.members for f in m.fqns))
                for b in report.buckets
            ]
            results[name] = (digests, buckets, report.to_text())
        return results
