"""Models that use parameters more than once, and hybrid sharding by DTensor, on real ranks: eager
FSDP2's bits with the rewrites, and other bits without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import parity
from benchmarks.parity_rows import Row
from torch_ext_bucketing.testing.ranks import Rank, run_ranks

RANKS, STEPS = 4, 3
SOME = ("tied_chunked", "block_twice", "checkpointed")
"""Of the models that ``benchmarks/parity.py`` runs all of; "twice" is below."""


@pytest.mark.slow
@pytest.mark.once
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
        assert cell["layout_differences"] == []


def _runs(rank: Rank, row: Row):
    from benchmarks.parity_ranks import runs_of

    return runs_of(rank, row, STEPS)


def _equal(runs, eager, model, passes):
    """Steps equal to eager's with these passes, and the report."""
    from torch_ext_bucketing.passes.backends import backend

    compiler = backend("aot_eager", passes, model)
    step = runs.step(model, runs.compiled(model, compiler), compiler)
    digests = runs.train(model, step).digests
    return sum(a == b for a, b in zip(eager, digests, strict=True)), compiler.last_report()


def _twice(rank: Rank) -> list[int]:
    """Steps equal to eager's where every use is gathered and reduced on its own, and where the
    gradients of all are added before."""
    from benchmarks.parity_ranks import row_group
    from torch_ext_bucketing.rewrites.combine_uses import CombineUses

    row = Row("twice", "twice", layers=1)
    with row_group(rank, row):
        runs = _runs(rank, row)
        eager = runs.eager()
        digests = runs.train(eager, runs.step(eager, eager)).digests
        equal = []
        for combine in (False, True):
            model = runs.sharded()
            passes = runs.passes(model, eager)
            passes = [p for p in passes if combine or not isinstance(p, CombineUses)]
            equal.append(_equal(runs, digests, model, passes)[0])
        return equal


@pytest.mark.slow
@pytest.mark.once
def test_per_use_reductions_have_other_bits():
    assert run_ranks(_twice, RANKS, timeout_s=240) == [[0, STEPS]] * RANKS


def _hybrid(rank: Rank) -> dict[str, tuple[int, dict[str, int]]]:
    """DTensor's own redistribution over replicas and shards, of uneven parameters, two of them tied
    and one used three times."""
    from sharded_models import shard_by_parametrization
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

    from benchmarks.parity_models import build, units_of
    from benchmarks.parity_ranks import row_group, wrap_units
    from torch_ext_bucketing.fsdp.order import FSDPParamOrder
    from torch_ext_bucketing.graph.collectives import KINDS
    from torch_ext_bucketing.passes.bucketing import BucketUnits
    from torch_ext_bucketing.rewrites.combine_uses import CombineUses
    from torch_ext_bucketing.rewrites.reduce_scatter_first import ReduceScatterFirst
    from torch_ext_bucketing.rewrites.resharding import ReshardAfterForward

    row = Row("hybrid", "twice", mesh=(2, 2), mode="hybrid_shard", layers=1)
    with row_group(rank, row):
        runs = _runs(rank, row)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        model = build("twice")
        wrap_units(model, units_of("twice", model), mesh=runs.mesh, mp_policy=policy)
        assert all(isinstance(m, FSDPModule) for m in (model, model.layers[0]))
        eager = runs.train(model, runs.step(model, model)).digests
        found = {}
        for name, rewrites in (("without", []), ("with", [CombineUses(), ReduceScatterFirst()])):
            model = build("twice")
            order = FSDPParamOrder.from_model(model, units=units_of("twice", model))
            shard_by_parametrization(model, runs.mesh, torch.bfloat16)
            again = ReshardAfterForward(keep=order.units[-1])
            passes = [*rewrites, again, BucketUnits(order, kinds=KINDS)]
            equal, report = _equal(runs, eager, model, passes)
            found[name] = (equal, report.graph("backward").collectives_after)
        return found


def test_hybrid_sharding_by_dtensor():
    for found in run_ranks(_hybrid, RANKS, timeout_s=240):
        assert found["without"][0] == 0
        steps, backward = found["with"]
        assert steps == STEPS
        assert (backward["reduce_scatter"], backward["all_reduce"]) == (2, 2)
