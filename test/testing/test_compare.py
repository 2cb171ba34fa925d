"""``compare`` names the cause of each fault, and finds a model without a fault equal."""

import functools
import json
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import compared_models as models
import pytest
import torch
from marks import at_night
from sharded_models import shard_by_parametrization

import torch_ext_bucketing as teb
from torch_ext_bucketing.__main__ import main
from torch_ext_bucketing.testing import compare_cli
from torch_ext_bucketing.testing.comparison import CompareOptions, Comparison
from torch_ext_bucketing.testing.experiments import (
    Payload,
    Span,
    compare_on_rank,
    layout_differences,
)
from torch_ext_bucketing.testing.ranks import Rank, run_ranks
from torch_ext_bucketing.testing.ring import RingTopology, ring_rank
from torch_ext_bucketing.testing.target import TargetError

pytestmark = pytest.mark.long

Case = dict[str, Any]

# The test of the command has a model without a fault.
DYNAMO: dict[str, Case] = {"Dynamo": {"build": partial(models.of_kind, "branch")}}
FAULTS: dict[str, Case] = {
    "decompositions": {"build": partial(models.of_kind, "decomposed")},
    "nondeterminism": {"build": models.randomly},
    "activations": {
        "build": partial(models.of_kind, "crossing"),
        "passes": partial(models.without, "AddByUnit"),
    },
    "no collective": {"build": models.sound, "shard": models.all_but_last},
    "uses": {
        "build": partial(models.of_kind, "twice"),
        "passes": partial(models.without, "CombineUses"),
    },
}
# On two ranks a + b is b + a.
ORDERS: dict[str, Case] = {
    "units": {"build": models.sound, "passes": models.other_units},
    "payload order": {"build": models.sound, "passes": models.graph_order},
    "unknown": {"build": models.sound, "passes": models.without_average},
    "rank order": {"build": models.sound, "passes": models.rank_order},
}


HYBRID: dict[str, Case] = {
    "hybrid order": {
        "build": models.sound,
        "shard": shard_by_parametrization,
        "passes": partial(models.without, "ReduceScatterFirst"),
        "replicas": 2,
    },
    "equal, replicas first, in bf16": {
        "build": models.tied_and_uneven,
        "shard": partial(shard_by_parametrization, dtype=torch.bfloat16),
        "replicas": 2,
        "param_dtype": "bfloat16",
        "reduce_dtype": "float32",
    },
}
GROUPS = {
    "dynamo": (2, DYNAMO),
    "faults": (2, FAULTS),
    "orders": (4, ORDERS),
    "hybrid": (4, HYBRID),
}


def compare_all(rank: Rank, cases: dict[str, Case]) -> dict[str, Comparison]:
    found = {}
    random.seed(rank.rank)
    with ring_rank(rank, RingTopology(ranks_per_node=1, chunk_bytes=64)):
        for name, case in cases.items():
            options = CompareOptions(**case, ranks=rank.world_size, nodes=rank.world_size, steps=2)
            found[name] = compare_on_rank(rank, options)
    return found


@functools.cache
def compared(group: str) -> dict[str, Comparison]:
    first, *others = run_ranks(compare_all, *GROUPS[group], timeout_s=600)
    assert all(other == first for other in others)
    return first


FOUND = {
    "Dynamo": "The first is module blocks.0",
    "decompositions": "The first is module blocks.0",
    "activations": "The passes lack AddByUnit",
    "uses": "The passes lack CombineUses",
    "hybrid order": "The passes lack ReduceScatterFirst",
    "payload order": "reduce_scatter of last.bias, last.weight: byte 0 is",
    "units": "no unit of eager FSDP2 has these members",
}
"""A part of the finding: modules, passes, parameters, buckets or bytes."""
ADDITIONS = ("activations", "uses", "hybrid order")


@pytest.mark.parametrize(
    ("group", "name"),
    [
        pytest.param("dynamo", "Dynamo", marks=pytest.mark.torch),
        *(at_night("faults", name) for name in FAULTS),
        *(at_night("hybrid", name) for name in HYBRID),
        *(at_night("orders", name) for name in ORDERS),
    ],
)
def test_the_cause_is_named(group: str, name: str):
    comparison = compared(group)[name]
    if name.startswith("equal"):
        assert comparison == Comparison(True, 2)
        return
    assert not comparison.equal
    assert comparison.first_step in (1, 2)
    assert comparison.parameters
    (cause,) = comparison.causes
    assert cause.name == ("additions" if name in ADDITIONS else name)
    assert FOUND.get(name, "") in cause.found
    if name == "no collective":
        assert cause.parameters == ("last.bias", "last.weight")
    if name == "Dynamo":  # backward reaches these last
        assert comparison.parameters[-1].startswith("first.")
    assert cause.advice in comparison.to_text()
    assert json.loads(comparison.to_json())["causes"][0]["name"] == cause.name


@pytest.mark.slow
def test_inductors_rounding_is_named():
    comparison = teb.testing.compare(
        models.rounded,
        ranks=2,
        nodes=1,
        steps=1,
        backend="inductor",
        param_dtype=torch.bfloat16,
        timeout_s=400,
    )
    (cause,) = comparison.causes
    assert cause.name == "Inductor"
    assert cause.parameters
    assert "emulate_precision_casts" in cause.advice


def _payload(*members: tuple[str, int, int]) -> Payload:
    return Payload("reduce_scatter", tuple(Span(*member) for member in members))


def test_layout_differences_name_what_lies_elsewhere():
    rest = _payload(("c", 0, 4), ("d", 4, 4))
    eager = [_payload(("a", 0, 8), ("b", 8, 4)), rest]
    same = list(reversed(eager))
    assert layout_differences(eager, same) == []
    alone = _payload(("e", 0, 4))  # one member is not a bucket
    assert layout_differences([*eager, alone], same) == []
    swapped = [_payload(("b", 0, 4), ("a", 4, 8)), rest]
    (text,) = layout_differences(eager, swapped)
    assert "byte 0 is b (4 bytes), eager has a at byte 0 (8 bytes)" in text
    other = [_payload(("a", 0, 8), ("b", 8, 4), ("c", 12, 4))]
    texts = layout_differences(eager, other)
    assert any("no unit of eager FSDP2 has these members" in t for t in texts)
    assert sum("the compiled graphs do not" in t for t in texts) == 2


# --- bad input -----------------------------------------------------------------------------------

BAD: dict[Any, str] = {
    "compared_models": "is not a MODULE:FUNCTION",
    "compared_models:sounds": "has no sounds; did you mean 'sound'",
    "compared_model:sound": "no module is named 'compared_model'",
    models.failing: "failing raised ZeroDivisionError",
    models.model_only: r"must return \(model, inputs\) or \(model, inputs, loss\).*returned Model",
    models.too_small: "has 1 weights to train, fewer than there are ranks",
    models.no_blocks: r"no repeated blocks found in Linear.*Pass units=\[...\] to teb.testing.compare",
    models.no_loss: r"the loss must be a tensor of one element.*Tensor of shape \(6, 32\)",
}


def messages(rank: Rank) -> list[str]:
    found = []
    with ring_rank(rank):
        for build in BAD:
            with pytest.raises(TargetError) as caught:
                compare_on_rank(rank, CompareOptions(build, ranks=2, steps=1))
            found.append(str(caught.value))
    return found


def test_bad_input_is_named():
    for found in run_ranks(messages, 2, timeout_s=240):
        for message, expected in zip(found, BAD.values(), strict=True):
            assert re.search(expected, message), message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"backend": "eager"}, "backend must be one of aot_eager, inductor, got 'eager'"),
        ({"ranks": 0}, "ranks must be positive, got 0"),
        ({"nodes": 3}, r"nodes must divide ranks \(4\) evenly, got 3"),
        ({"param_dtype": "int8"}, "param_dtype must be one of bfloat16"),
    ],
)
def test_bad_options_are_named_before_any_rank_starts(options, expected, monkeypatch, capsys):
    monkeypatch.setattr(compare_cli, "run_ranks", None)
    with pytest.raises(ValueError, match=expected):
        teb.testing.compare(models.sound, **options)
    given = [text for n, v in options.items() for text in (f"--{n.replace('_', '-')}", str(v))]
    with pytest.raises(SystemExit) as caught:
        main(["compare", "compared_models:sound", *given])
    assert caught.value.code == 2
    assert re.search(f"{expected}|invalid choice: ", capsys.readouterr().err)


# --- the command ---------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "found.json"
    small = ["--ranks", "2", "--nodes", "1", "--steps", "2", "--json", str(path)]
    for folder, message in (("/no/such/folder/x.json", "does not exist"), (".", "is a folder")):
        with pytest.raises(SystemExit):
            main(["compare", "compared_models:sound", "--json", folder])
        assert message in capsys.readouterr().err
    assert main(["compare", "compared_models:sound", *small]) == 0
    printed = capsys.readouterr()
    assert printed.out == "EQUAL: eager FSDP2's weights after 2 of 2 steps.\n"
    assert "s] starting 2 ranks" in printed.err
    assert "s] compiled with aot_eager" in printed.err
    assert json.loads(path.read_text())["equal"]

    assert main(["compare", "compared_models:sounds", *small]) == 1
    assert "error: module compared_models has no sounds" in capsys.readouterr().err
