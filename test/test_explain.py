"""The command ``python -m torch_ext_bucketing explain``."""

import itertools
import json
import re

import pytest
import torch
import torch.distributed as dist
from sharded_models import TwoBlocks
from torch.distributed.device_mesh import init_device_mesh

from torch_ext_bucketing.__main__ import main
from torch_ext_bucketing.explain import explain
from torch_ext_bucketing.fsdp.shard import data_parallel
from torch_ext_bucketing.planner.cost.machine import Machine
from torch_ext_bucketing.testing.target import TargetError

TOKENS = torch.zeros(2, 3, dtype=torch.long)
HERE = f"{__name__}"


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert not dist.is_initialized(), "the fake process group is still there"


def two_blocks():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return data_parallel(TwoBlocks(), mesh), TOKENS


def one_layer():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return data_parallel(torch.nn.Linear(4, 4), mesh), torch.zeros(1, 4)


def no_pair():
    return TwoBlocks()


def raises():
    raise ValueError("no such file")


def cannot_run():
    return two_blocks()[0], {"nonsense": TOKENS}


not_a_function = 3


PARITY = """\
recipe(model, 'parity'):
  MatchFSDP2(model, fsdp.manual_plan(['embedding', 'layers.[0-1]', 'head'], model))
  ReshardAfterForward(keep=['head'])
  BucketByUnit(FSDPParamOrder.from_model(model, units=fsdp.manual_plan(\
['embedding', 'layers.[0-1]', 'head'], model)))
  Schedule([Overlap()], machine=Machine("""


def test_a_goal_shows_what_its_recipe_does(capsys, tmp_path):
    file = tmp_path / "machine.json"
    Machine(name="mine", flops={"bfloat16": 1e12}).save(file)
    words = ["explain", f"{HERE}:two_blocks", "--goal", "parity", "--brief"]
    assert main([*words, "--machine", str(file)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(PARITY)
    assert "name='mine'" in said
    assert "FSDPParamOrder  all_gather" in said
    assert "Schedule" in said.split("time per pass")[1]


def test_reductions_by_all_to_all_are_shown_beside_rings(capsys, tmp_path):
    file = tmp_path / "machine.json"
    slow = {("all_to_all", 8): ((1, 1.0),), ("reduce_scatter", 8): ((1, 0.01),)}
    Machine(collectives=slow).save(file)
    options = ["--goal", "speed", "--reduce", "all_to_all", "--brief", "--machine"]
    assert main(["explain", f"{HERE}:two_blocks", *options, str(file)]) == 0
    text = capsys.readouterr().out
    assert "recipe(model, 'speed', reduce='all_to_all'):" in text
    (cost,) = re.findall(r"sums in rank order, ms +(\S+)", text)
    assert float(cost) > 0
    (ring,) = re.findall(r"\nrings +(\S+) +(\S+) KiB\n", text)
    (sums,) = re.findall(r"\nall-to-alls, sums in rank order +(\S+) +(\S+) KiB\n", text)
    assert float(sums[0]) > float(ring[0])
    assert float(sums[1]) > 0
    assert float(ring[1]) > 0
    peaks = re.findall(r"\npeak +(\S+) KiB +(\S+) KiB  unreordered (\S+) KiB", text)
    assert len(peaks) == 2
    assert min(float(peak) for row in peaks for peak in row) > 0
    assert 'Goal "speed" has the bits of eager FSDP2 with AllToAllReduceScatter' in text


def test_the_goal_speed():
    found = explain(f"{HERE}:two_blocks", goal="speed", world_size=4)
    names = [type(p).__name__ for p in found.passes]
    assert names == ["MatchFSDP2", "ReshardAfterForward", "BucketAndSchedule"]
    report = found.report
    assert [g.stage for g in report.graphs] == ["forward", "backward"]
    assert report.collectives_after == {"all_gather": 2, "reduce_scatter": 1}
    for bucket in report.buckets:
        assert (bucket.group_size, bucket.closed_by) == (4, "end")
        assert bucket.nbytes == sum(m.nbytes for m in bucket.members)
        assert all(m.fqns for m in bucket.members)
    assert len(report.schedules) == 2
    assert "byte cap, MiB" in report.to_text()
    with pytest.raises(TargetError, match=r"recipe\(model, 'parity'\): no repeated blocks"):
        explain(f"{HERE}:one_layer", goal="parity", world_size=4)


@pytest.mark.parametrize(
    ("target", "match"),
    [
        ("two_blocks", "is not a MODULE:FUNCTION"),
        ("no_such_module_here:f", "no module is named 'no_such_module_here'"),
        (f"{HERE}:two_block", "has no two_block; did you mean 'two_blocks'"),
        (f"{HERE}:not_a_function", "has no function not_a_function"),
        (f"{HERE}:no_pair", r"must return \(model, inputs\).*returned TwoBlocks"),
        (f"{HERE}:raises", "raised ValueError: no such file"),
        (f"{HERE}:cannot_run", "compiling the model or running it failed"),
    ],
)
def test_bad_targets_are_named(target, match):
    with pytest.raises(TargetError, match=match):
        explain(target, goal="speed", world_size=2)


def test_bad_options(capsys):
    for argv in (["--world-size", "0"], ["--json", "/"]):
        with pytest.raises(SystemExit) as stop:
            main(["explain", *argv])
        assert stop.value.code == 2
    assert main(["explain", "nowhere:f"]) == 1
    assert "no module is named 'nowhere'" in capsys.readouterr().err


def routed():
    """Make a model of products whose number of rows depends on data."""

    class Routed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(64, 256, bias=False)
            self.down = torch.nn.Linear(256, 64, bias=False)

        def forward(self, x):
            rows = torch.nonzero(x[:, 0]).squeeze(1)
            return self.down(self.up(x[rows])).sum()

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return data_parallel(Routed(), mesh), torch.ones(8, 64)


def test_times_of_a_machine_and_of_sizes_that_depend_on_data(tmp_path, capsys):
    slow = tmp_path / "machine.json"
    Machine(flops={"float32": 1e6}, bandwidth=1e18).save(slow)
    steps = {}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for rows in (3, 7):
            torch._dynamo.reset()
            command = [
                "explain",
                f"{HERE}:routed",
                "--world-size",
                "2",
                "--goal",
                "speed",
                "--brief",
            ]
            out = tmp_path / "report.json"
            command += ["--machine", str(slow), "--size-hint", str(rows), "--json", str(out)]
            assert main(command) == 0
            assert f"as given: {rows} for u0" in capsys.readouterr().out
            steps[rows] = json.loads(out.read_text())["schedules"][0]["step_ms"][1]
    # up and down: 2 x 64 x 256 operations per row each, at 1e6 per second
    flops_ms = {rows: 2 * rows * 2 * 64 * 256 / 1e6 * 1e3 for rows in steps}
    assert steps == pytest.approx(flops_ms, rel=1e-3)

    for option, says in (
        ("--size-hint", "size_hints must"),
        ("--memory-gib", "the bound must be a positive"),
        ("--host-gib", "host memory belongs to a bound: give memory_gib"),
    ):
        assert main(["explain", f"{HERE}:two_blocks", option, "-1"]) == 1
        assert says in capsys.readouterr().err
    (tmp_path / "none.json").write_text("{}")
    assert main(["explain", "--machine", str(tmp_path / "none.json")]) == 1
    assert "--machine: " in capsys.readouterr().err


def test_a_process_group_of_someone_else(fake_world):
    with pytest.raises(TargetError, match="is initialised already"):
        explain(f"{HERE}:two_blocks")
    dist.destroy_process_group()

    dist.init_process_group("fake", rank=0, world_size=2)  # the fixture destroys it


def test_a_trace_of_before_and_after(tmp_path, capsys):
    """Every row has one kernel at a time, and the trace has all collectives of the report."""
    file = tmp_path / "trace.json"
    options = ["--goal", "speed", "--brief", "--world-size", "4", "--trace", str(file)]
    assert main(["explain", f"{HERE}:two_blocks", *options]) == 0
    events = json.loads(file.read_text())["traceEvents"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert [names[pid, None] for pid in (1, 2)] == ["before", "after"]
    assert [names[1, tid] for tid in (1, 2)] == ["compute", "group 0"]
    rows: dict[tuple[int, int], list[tuple[float, float, str]]] = {}
    for e in events:
        if e["ph"] == "X":
            rows.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["dur"], e["name"]))
    for spans in rows.values():
        spans.sort()
        for (begin, duration, _), (following, _, _) in itertools.pairwise(spans):
            assert begin + duration <= following + 1e-6
    assert len(rows[2, 2]) == 3 < len(rows[1, 2])
    assert any("parameters)" in name for _, _, name in rows[2, 2])
    assert all(e["args"]["GiB"] > 0 for e in events if e["ph"] == "C")
    assert "longest compute run" in capsys.readouterr().out


def test_a_picture_of_before_and_after(tmp_path, capsys):
    """With a bound, the picture shows the step time for more memory, too."""
    pytest.importorskip("matplotlib", reason="matplotlib draws the picture: pip install matplotlib")
    file = tmp_path / "picture.png"
    options = ["--goal", "speed", "--world-size", "4", "--plot", str(file), "--memory-gib", "1"]
    options += ["--host-gib", "2"]
    assert main(["explain", f"{HERE}:two_blocks", *options]) == 0
    said = capsys.readouterr().out
    call = "ReshardAfterForward(reshard_after_forward='auto', memory=PeakMemory(gib=1.0, host"
    assert call in said
    assert "in host memory: 0 activations, 0 B, of 2.0 GiB allowed" in said
    assert re.search(r"activations of +on the device +on the host +computed again\n", said)
    assert re.search(r"kept from forward to backward: \d of \d units and [1-9] of [1-9]", said)
    assert file.read_bytes().startswith(b"\x89PNG")
    height = int.from_bytes(file.read_bytes()[20:24], "big")
    assert height == 1045  # four rows; the last one plots time and peak over the bound
    assert file.stat().st_size > 20_000


@pytest.mark.slow
def test_command_on_the_demo_model(tmp_path, capsys):
    file = tmp_path / "report.json"
    options = ["--world-size", "16", "--json", str(file)]
    assert main(["explain", *options]) == 0
    data = json.loads(file.read_text())
    assert {b["group_size"] for g in data["graphs"] for b in g["buckets"]} == {16}
    before, after = data["collectives_before"], data["collectives_after"]
    assert capsys.readouterr().out.endswith(
        f"all graphs: all_gather {before['all_gather']} -> {after['all_gather']}, "
        f"reduce_scatter {before['reduce_scatter']} -> {after['reduce_scatter']}\n"
    )
    assert after["all_gather"] < before["all_gather"] / 4
