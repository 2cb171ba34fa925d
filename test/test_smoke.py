"""The demo, and each pass in one training step, on every supported torch."""

import importlib
import re
import textwrap

import pytest
import torch
from blocks_on_ranks import UNITS, assert_equal, gradients, mesh, shard
from cuda_attention import KERNELS, outcome
from torch.distributed.device_mesh import init_device_mesh

import torch_ext_bucketing as teb
from torch_ext_bucketing import testing
from torch_ext_bucketing.__main__ import main
from torch_ext_bucketing.testing.ring import on_ranks

pytestmark = [pytest.mark.torch, pytest.mark.long]


def lists(order, mesh, model, units):
    """Make lists of passes, by the rule that forms buckets."""
    return {
        "units": [
            teb.hooks.TagParameters(model),
            teb.MatchFSDP2(model, units),
            teb.SeparateGroups(mesh),
            teb.ReshardAfterForward(),
            teb.BucketByUnit(order),
            teb.Schedule(teb.Overlap()),
        ],
        "cap": [teb.BucketByCap(1.0), teb.FixedOrderReduce()],
        "scheduled": [teb.BucketAndSchedule(teb.Overlap())],
    }


def _each_pass(rank):
    where = mesh("fully_shard")
    model = shard("fully_shard")
    expected = gradients(model, model, rank)
    order = teb.FSDPParamOrder.from_model(model, UNITS)
    found = {}
    for name, passes in lists(order, where, model, UNITS).items():
        torch._dynamo.reset()
        backend = teb.backend("aot_eager", passes)
        assert_equal(gradients(torch.compile(model, backend=backend), model, rank), expected)
        report = backend.last_report()
        found[name] = dict(report.collectives_after)
    return found


@pytest.mark.smoke
def test_each_pass_once():
    first, second = on_ranks(_each_pass)
    assert first == second
    assert first["units"] == {"all_gather": 4, "reduce_scatter": 2}
    assert first["cap"] == first["scheduled"] == {"all_gather": 1, "reduce_scatter": 1}


EXAMPLE = """
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torch_ext_bucketing import backend, data_parallel, recipe
from torch_ext_bucketing.testing import text
from torch_ext_bucketing.testing.training import train
from torch_ext_bucketing.testing.training import ModelConfig, Transformer
from torch_ext_bucketing.testing.ranks import Rank, run_ranks
from torch_ext_bucketing.testing.ring import RingTopology, ring_rank

BF16 = torch.bfloat16

"""


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.usefixtures("fresh_dynamo", "two_ranks")
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_attention_of_cuda_is_recomputed(compiler):
    """The tests of the planner have other kernels."""
    assert outcome(KERNELS["cudnn"], compiler) == "recomputed"


@pytest.mark.slow
def test_the_example_of_the_testing_folder(tmp_path, monkeypatch):
    code = re.search(r"::\n\n((?:    .*\n|\n)+)", testing.__doc__)[1]
    (tmp_path / "example.py").write_text(EXAMPLE + textwrap.dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("example").check()


def test_no_pass_is_left_out(fake_world):
    flat = init_device_mesh("cpu", (fake_world,))
    order = teb.FSDPParamOrder.from_fqns([["a"]])
    classes = [getattr(teb, name) for name in teb.__all__]
    passes = {c for c in classes if isinstance(c, type) and issubclass(c, teb.GraphPass)}
    made = lists(order, flat, torch.nn.Linear(1, 1), [""])
    given = {type(p) for passes in made.values() for p in passes}
    assert passes - {teb.GraphPass} == given - {teb.hooks.TagParameters}


def test_the_demo_matches_eager_bit_for_bit(capsys):
    """Run on four ranks: sums of two do not depend on order."""
    status = main(["demo", "--ranks", "4", "--nodes", "2", "--steps", "4", "--layers", "1"])
    printed = capsys.readouterr()
    assert status == 0, printed
    assert "step 4 of 4" in printed.err
    assert "PASS" in printed.out
    rows = {line[:22].strip(): line[22:].split() for line in printed.out.splitlines()}
    # One block and the root: 2 all-gathers in forward, 1 in backward, 2 reduce-scatters.
    assert rows["eager FSDP2"][:2] == ["5", "5"]
    assert rows["compiled, FSDP2 order"][:2] == ["42", "5"]
    assert rows["compiled, FSDP2 order"][4:8] == ["4", "of", "4", "none"]
    assert rows["compiled, graph order"][:2] == ["42", "5"]
    assert rows["compiled, graph order"][7] == "step"
