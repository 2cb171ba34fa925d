"""Reports: text, JSON and logging."""

import itertools
import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from collective_graphs import PATHS
from expecttest import assert_expected_inline
from random_graphs import Builder

from torch_ext_bucketing.graph.nodes import Tag, kind_of, set_tag
from torch_ext_bucketing.passes.bucketing import BucketByCap
from torch_ext_bucketing.reports.base import table
from torch_ext_bucketing.reports.compile import ARTIFACT, ClosedBy, CompileReport

CAP = 200 / 2**20


def small_graph():
    """Six gathers, the fifth after a write and the sixth untagged, and a reduction."""
    builder = Builder()
    shards = [builder.leaf(n, torch.float32) for n in (8, 16, 24, 8, 8, 8)]
    full = [builder.collective("all_gather", x, "0") for x in shards[:4]]
    grad = builder.collective("reduce_scatter", full[2], "0", "avg")
    builder.write(shards[4], shards[5])
    full += [builder.collective("all_gather", x, "0") for x in shards[4:]]
    gm = builder.finish([*full, grad])
    for name, node in zip("abcdefg", filter(kind_of, gm.graph.nodes), strict=True):
        if name != "g":
            set_tag(node, Tag(kind_of(node), (f"layers.{name}.weight",)))
    return gm


def bucketed():
    (report,) = BucketByCap(CAP)(small_graph()).graphs
    return report


@pytest.fixture
def report(fake_world):
    return bucketed()


def test_text(report):
    assert_expected_inline(
        report.to_text(),
        """\
inference: all_gather 6 -> 5, reduce_scatter 1 -> 1; 1 bucket, closed 1 by bytes; 4 eligible not merged; 1 not eligible

kind  group  ranks  members  bytes  of cap  closed by  packed by    node
AG    0          2        2  192 B     96%  bytes      graph order  all_gather_into_tensor_out
    with all_gather_into_tensor_default_2: 384 bytes, above the cap of 200
    offset  bytes  dtype    shape  parameters
         0     32  float32  8      layers.a.weight
        32     64  float32  16     layers.b.weight

eligible and not merged: 4
  kind  group  bytes  closed by   node                              parameters       why
  AG    0      192 B  bytes       all_gather_into_tensor_default_2  layers.c.weight  with all_gather_into_tensor_default_3: 256 bytes, above the cap of 200
  AG    0       64 B  dependency  all_gather_into_tensor_default_3  layers.d.weight  copy__default between them writes to a tensor that others read
  RS    0       96 B  end         reduce_scatter_tensor_default     layers.e.weight  no other collective of its bucket key follows
  AG    0       64 B  end         all_gather_into_tensor_default_4  layers.f.weight  no other collective of its bucket key follows

not eligible: 1
  it serves no known parameter: all_gather_into_tensor_default_5
""",
    )


def test_text_without_members(report):
    text = report.to_text(members=False)
    assert "offset" not in text
    assert "closed by" in text


def test_every_reason_is_in_the_text(report):
    """``"run"`` counts, too."""
    (bucket,) = report.buckets
    reasons = get_args(ClosedBy)
    buckets = tuple(replace(bucket, closed_by=reason) for reason in reasons)
    text = replace(report, buckets=buckets).summary()
    assert text.split("; ")[1] == (
        f"{len(reasons)} buckets, closed " + ", ".join(f"1 by {r}" for r in reasons)
    )


def test_json_holds_all_of_it(report):
    data = json.loads(report.to_json())
    assert data["collectives_before"] == {"all_gather": 6, "reduce_scatter": 1}
    first = data["buckets"][0]
    assert [m["fqns"] for m in first["members"]] == [["layers.a.weight"], ["layers.b.weight"]]
    assert [m["offset"] for m in first["members"]] == [0, 32]
    assert (first["nbytes"], first["wire_bytes"], first["cap_bytes"]) == (96, 192, 200)
    assert first["closed_by"] == "bytes"
    assert (first["packed_by"], first["no_key"]) == ("graph order", [])
    assert [a["closed_by"] for a in data["unmerged"]] == ["bytes", "dependency", "end", "end"]
    whole = CompileReport(graphs=[report, report])
    assert json.loads(whole.to_json())["collectives_before"]["all_gather"] == 12
    assert whole.to_text().count(report.summary()) == 2
    assert whole.to_text().endswith("all graphs: all_gather 12 -> 10, reduce_scatter 2 -> 2\n")


def test_a_line_is_logged_for_every_graph(fake_world, caplog):
    with caplog.at_level(logging.INFO, logger="torch_ext_bucketing"):
        report = bucketed()
    lines = [r.getMessage() for r in caplog.records if r.name == "torch_ext_bucketing"]
    assert lines == [report.summary()]


def test_nothing_to_do_is_said(fake_world):
    builder = Builder()
    builder.finish([builder.leaf(2, torch.float32)])
    (report,) = BucketByCap(CAP)(builder.graph).graphs
    assert report.to_text() == "inference: no collectives\n"


CHILD = """
import torch
import torch_ext_bucketing as teb
import torch.distributed as dist
import test_report as t
from sharded_models import TwoBlocks, step
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("fake", rank=0, world_size=4)
print(t.bucketed().summary())
model = teb.data_parallel(TwoBlocks(), init_device_mesh("cpu", (4,)))
backend = teb.backend("aot_eager", teb.recipe(model))
step(torch.compile(model, backend=backend), torch.zeros(2, 3, dtype=torch.long))
"""

PASSES = [
    f"{stage}_{i}_{name}"
    for stage, names in {
        "joint": (
            "TagParameters",
            *("AddByUnit", "CombineUses", "MergeAmax", "ReduceScatterFirst"),
            "ReshardAfterForward",
        ),
        "forward": ("BucketByUnit", "Schedule"),
        "backward": ("BucketByUnit", "Schedule"),
    }.items()
    for i, name in enumerate(names)
]


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Run a process with a log; return it and the folder of its trace."""
    trace = tmp_path_factory.mktemp("trace")
    env = os.environ | {"TORCH_TRACE": str(trace), "TORCH_LOGS": "+torch_ext_bucketing"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *PATHS])
    run = subprocess.run(
        [sys.executable, "-c", CHILD], env=env, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    return run, trace


@pytest.mark.torch
def test_trace_and_log_have_the_graph_before_and_after_each_pass(traced):
    run, trace = traced
    found = artifacts(trace, '"name": "torch_ext_bucketing_[a-z]+_[0-9]_')
    graphs = dict(found)
    assert len(graphs) == len(found)
    alone = "inference_0_BucketByCap"  # called by itself
    assert list(graphs) == [
        f"torch_ext_bucketing_{name}_{when}"
        for name in (alone, *PASSES)
        for when in ("before", "after")
    ]

    def gathers(name):
        return graphs[f"torch_ext_bucketing_{name}"].count("all_gather_into_tensor")

    assert gathers("forward_0_BucketByUnit_before") > gathers("forward_0_BucketByUnit_after") > 0
    after_units = graphs["torch_ext_bucketing_forward_0_BucketByUnit_after"]
    assert graphs["torch_ext_bucketing_forward_1_Schedule_before"] == after_units
    assert "f32[" in after_units
    for name in graphs:
        assert f"{name.removeprefix('torch_ext_bucketing_')}\n" in run.stderr


@pytest.mark.torch
def test_trace_has_the_report(traced):
    """``TORCH_TRACE`` gets one artifact per graph, with the JSON as payload."""
    run, trace = traced
    assert run.stdout.strip() in run.stderr, "TORCH_LOGS shows the line"
    found = artifacts(trace, f'"name": "{ARTIFACT}"')
    stages = [json.loads(payload)["stage"] for _, payload in found]
    assert stages == ["inference", "forward", "backward"]


def artifacts(trace, pattern):
    """Yield name and payload of each artifact whose line matches."""
    lines = [line for f in trace.iterdir() for line in f.read_text().splitlines()]
    found = []
    for i, line in enumerate(lines):
        if re.search(pattern, line):
            name = re.search('"name": "(.*?)"', line)[1]
            payload = itertools.takewhile(lambda x: x.startswith("\t"), lines[i + 1 :])
            found.append((name, "\n".join(x[1:] for x in payload)))
    return found


def test_rows_that_differ_in_one_number_are_one():
    rows = [f"layers.{i} {part}" for i in (0, 1, 2, 3, 7) for part in ("mlp", "attention")]
    rows = ["embed", *rows, "layers.9 mlp", "head.1", "head.2"]
    columns = {"name": str, "size:n": lambda name: 4 if name == "layers.2 mlp" else 8}
    assert table(columns, rows, join="name") == [
        "name                       size",
        "embed                         8",
        "layers.[0-1, 3, 7, 9] mlp     8",
        "layers.[0-3, 7] attention     8",
        "layers.2 mlp                  4",
        "head.1                        8",
        "head.2                        8",
    ]
    assert len(table(columns, rows)) == 15
    odd = [f"node_{n}" for n in range(1, 40, 2)]
    assert table({"name": str}, odd, join="name") == ["name", "node_[1, 3, 5, 7, ..., 39 (20)]"]
