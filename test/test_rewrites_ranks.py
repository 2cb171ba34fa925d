"""Models that use parameters more than once, and hybrid sharding by DTensor, on real ranks: eager
FSDP2's bits with the rewrites, and other bits without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import parity
from benchmarks.parity_cells import CHANNELS, CHUNK_BYTES, Cell
from torch_ext_bucketing.testing.ranks import Rank, run_ranks
from torch_ext_bucketing.testing.ring import ring_rank
from torch_ext_bucketing.testing.training import train

RANKS, STEPS = 4, 3
SOME = ("twice", "tied_chunked", "block_twice", "checkpointed")
"""Of the models that ``benchmarks/parity.py`` runs all of."""


@pytest.mark.slow
def test_ways_to_use_a_parameter_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "cells.json"
    options = ["--models", ",".join(SOME), "--only", "*/2x2/*/fsdp/bf16"]
    status = parity.main([*options, "--steps", str(STEPS), "--json", str(path)])
    printed = capsys.readouterr()
    assert status == 0, printed.out + printed.err
    found = {cell["model"]: cell for cell in json.loads(path.read_text())}
    assert tuple(found) == SOME
    for cell in found.values():
        assert cell["steps_equal"] == STEPS
        assert cell["control_first_different_step"] == 1
        assert cell["layout_equal"]


def _twice(rank: Rank) -> list[int]:
    """Steps equal to eager's where every use is gathered and reduced on its own, and where the
    gradients of all are added before."""
    from benchmarks import parity_ranks as ranks
    from torch_ext_bucketing.passes.backends import backend

    reference = Cell("twice", 2, RANKS, "aot_eager", "fsdp", "bf16").reference
    topology = ranks.RingTopology(2, nodes=2, channels=CHANNELS, chunk_bytes=CHUNK_BYTES)
    with ring_rank(rank, topology):
        mesh = ranks.init_device_mesh("cpu", reference.mesh_shape)
        model, _ = ranks.eager_model(reference, mesh, 1)
        eager = _digests(model, model, rank)
        equal = []
        for rewrites in ([], ranks.rewrites()):
            model, order = ranks.compilable_model(reference, mesh, 1)
            passes = [*rewrites, ranks.reshard(order), ranks.bucket_units(order, True)]
            torch._dynamo.reset()
            run = torch.compile(model, backend=backend("aot_eager", passes), fullgraph=True)
            found = _digests(model, run, rank)
            equal.append(sum(a == b for a, b in zip(eager, found, strict=True)))
        return equal


@pytest.mark.once
def test_per_use_reductions_have_other_bits():
    assert run_ranks(_twice, RANKS, timeout_s=240) == [[0, STEPS]] * RANKS


def _digests(model, run, rank):
    from benchmarks.parity_models import batch_of

    def step(number):
        loss = run(*batch_of(number, rank.rank))
        loss.backward()
        return loss

    return train(model, step, STEPS).digests


def _hybrid(rank: Rank) -> dict[str, tuple[int, dict[str, int]]]:
    """DTensor's own redistribution over replicas and shards, of uneven parameters, two of them tied
    and one used three times."""
    from sharded_models import shard_by_parametrization
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    from benchmarks import parity_ranks as ranks
    from benchmarks.parity_models import build, unit_names
    from torch_ext_bucketing.passes.backends import backend

    topology = ranks.RingTopology(2, nodes=2, channels=CHANNELS, chunk_bytes=CHUNK_BYTES)
    with ring_rank(rank, topology):
        mesh = ranks.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        model = build("twice")
        for name in unit_names("twice", model):
            fully_shard(model.get_submodule(name), mesh=mesh, mp_policy=policy)
        assert all(isinstance(m, FSDPModule) for m in (model, model.layers[0]))
        eager = _digests(model, model, rank)
        found = {}
        for name, rewrites in (("without", []), ("with", ranks.rewrites())):
            model = build("twice")
            order = ranks.FSDPParamOrder.from_model(model, units=unit_names("twice", model))
            shard_by_parametrization(model, mesh, torch.bfloat16)
            torch._dynamo.reset()
            compiler = backend(
                "aot_eager", [*rewrites, ranks.reshard(order), ranks.bucket_units(order, True)]
            )
            run = torch.compile(model, backend=compiler, fullgraph=True)
            digests = _digests(model, run, rank)
            backward = compiler.last_report().graph("backward")
            found[name] = (
                sum(a == b for a, b in zip(eager, digests, strict=True)),
                backward.collectives_after,
            )
        return found


def test_hybrid_sharding_by_dtensor():
    for found in run_ranks(_hybrid, RANKS, timeout_s=240):
        assert found["without"][0] == 0
        steps, backward = found["with"]
        assert steps == STEPS
        assert (backward["reduce_scatter"], backward["all_reduce"]) == (2, 2)
