"""The command ``python -m torch_ext_bucketing explain``."""

import itertools
import json
import os
import re
import resource
import signal
import time
import warnings
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from marks import at_night
from sharded_models import Lean
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

import torch_ext_bucketing as teb
from torch_ext_bucketing.__main__ import main
from torch_ext_bucketing._torch import without_device
from torch_ext_bucketing.commands.explain import GPUS, OPTIMIZERS, _row, meshes_of, sweep, text_of
from torch_ext_bucketing.errors import BucketingWarning, UnevenShardsWarning
from torch_ext_bucketing.explain import explain
from torch_ext_bucketing.fsdp.shard import data_parallel
from torch_ext_bucketing.planner.cost.machine import DATA_SHEETS, Machine
from torch_ext_bucketing.reports.planner import KeepReport
from torch_ext_bucketing.testing.configured import Rule, state_of
from torch_ext_bucketing.testing.target import LLAMA3, TargetError

TOKENS = torch.zeros(2, 3, dtype=torch.long)
HERE = f"{__name__}"

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert not dist.is_initialized(), "the fake process group is still there"


def two_blocks():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return data_parallel(Lean(), mesh), TOKENS


def one_layer():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return data_parallel(torch.nn.Linear(4, 4), mesh), torch.zeros(1, 4)


def no_pair():
    return Lean()


def raises():
    raise ValueError("no such file")


def cannot_run():
    return two_blocks()[0], {"nonsense": TOKENS}


def reads_a_weight():
    return Lean().to("cuda" if float(torch.ones(2).sum()) else "cpu")


def branches_on_data():
    class Branches(Lean):
        def forward(self, x):
            out = super().forward(x)
            return out * 2 if float(out.sum()) > 0 else out

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return data_parallel(Branches(), mesh), TOKENS


class Attends(torch.nn.Module):
    """One block of attention, of 64 heads of 128 elements; it is 128 GiB in all with a head."""

    def __init__(self, heads=64, values=128):
        super().__init__()
        self.heads = heads
        self.qk = torch.nn.ModuleList(torch.nn.Linear(heads * 128, heads * 128) for _ in range(2))
        self.v = torch.nn.Linear(heads * 128, heads * values)
        self.head = torch.nn.Linear(heads * values, 2**22)

    def forward(self, x):
        views = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (*self.qk, self.v))
        out = F.scaled_dot_product_attention(*views, is_causal=True)
        return self.head(out.transpose(1, 2).flatten(2))


def huge_on_cuda(values=128):
    """Shard as a job does that makes its weights on its GPU after sharding."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    with torch.device("meta"):
        model = Attends(values=values)
    data_parallel(model, mesh, param_dtype=torch.bfloat16)
    model.to_empty(device="cuda")
    x = torch.zeros(1, 256, 64 * 128, device="cuda", dtype=torch.bfloat16)
    return model.to("cuda:0"), x, lambda output, inputs: output.float().square().mean()


def huge_with_wide_heads():
    return huge_on_cuda(values=160)


def of_a_mesh(mesh):
    assert mesh.mesh_dim_names == ("replicate", "fsdp")
    return data_parallel(Lean(), mesh, "hybrid_shard"), TOKENS


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
    (ring,) = re.findall(r"\nrings +(\S+) +(\S+) MiB\n", text)
    (sums,) = re.findall(r"\nall-to-alls, sums in rank order +(\S+) +(\S+) MiB\n", text)
    assert float(sums[0]) > float(ring[0])
    assert float(sums[1]) > 0
    assert float(ring[1]) > 0
    peaks = re.findall(r"\npeak +(\S+) MiB +(\S+) MiB  unreordered (\S+) MiB", text)
    assert len(peaks) == 2
    assert min(float(peak) for row in peaks for peak in row) > 0
    assert 'Goal "speed" has the bits of eager FSDP2 with AllToAllReduceScatter' in text


def test_the_goal_speed_is_planned_without_compiling(monkeypatch):
    monkeypatch.setattr("torch._inductor.graph.GraphLowering.run", None)
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
        (f"{HERE}:no_pair", r"must return \(model, inputs\).*returned Lean"),
        (f"{HERE}:raises", "raised ValueError: no such file"),
        (f"{HERE}:reads_a_weight", "reads_a_weight reads a tensor's value, and no tensor has"),
        (f"{HERE}:branches_on_data", "reads a tensor's value where torch.compile breaks the graph"),
        (f"{HERE}:cannot_run", "tracing the model failed: TypeError"),
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
    assert main(["explain", f"{HERE}:two_blocks", "--sequence", "8"]) == 1
    assert "--sequence, --batch) are for named models" in capsys.readouterr().err
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


@pytest.mark.parametrize(
    ("gpu", "target", "kernel"),
    [
        ("h100", "huge_on_cuda", "_scaled_dot_product_cudnn_attention"),
        at_night("mi300x", "huge_on_cuda", "_scaled_dot_product_flash_attention"),
        at_night("h100", "huge_with_wide_heads", "_scaled_dot_product_efficient_attention"),
    ],
)
def test_no_weights_and_the_attention_of_the_gpu(gpu, target, kernel):
    """A model of 128 GiB on CUDA takes no memory, and its kernel and what that saves are CUDA's."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = explain(
        f"{HERE}:{target}", machine=DATA_SHEETS[gpu], goal="speed", backend="aot_eager", draw=True
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
    assert not torch.overrides._is_torch_function_mode_enabled()
    for drawn, name in zip(found.drawn[::2], (kernel, f"{kernel}_backward"), strict=True):
        names = [node.name for node in drawn.model.dependencies.nodes]
        assert any(n.startswith(name) for n in names), names
    assert found.report.schedules[0].peak_bytes[1] > 128 * 2**30 / 2  # gathered in bf16
    with torch.no_grad():  # the CPU's operators are back
        q = torch.ones(1, 1, 2, 8)
        assert F.scaled_dot_product_attention(q, q, q).device.type == "cpu"


def test_a_mesh_in_words(capsys):
    found = explain(f"{HERE}:of_a_mesh", mesh={"replicate": 2, "fsdp": 4}, backend="aot_eager")
    sizes = {b.group_size for b in found.report.buckets}
    assert sizes == {2, 4}
    assert {"all_reduce", "all_gather", "reduce_scatter"} == set(found.report.collectives_after)
    for mesh in ("tp=8", "fsdp=0", "fsdp=2,fsdp=2", "fsdp", "ep=2,fsdp=8"):
        with pytest.raises(SystemExit) as stop:
            main(["explain", "--mesh", mesh])
        assert stop.value.code == 2
    with pytest.raises(SystemExit):
        main(["explain", "--mesh", "fsdp=8", "--world-size", "4"])
    assert "--mesh: it has 8 ranks, and --world-size is 4" in capsys.readouterr().err


def test_the_names_of_data_sheets_and_optimizers_are_the_commands():
    assert set(GPUS) == {*DATA_SHEETS, "cpu"}
    assert get_args(Rule) == OPTIMIZERS


def test_tensor_parallelism_by_a_plan(monkeypatch):
    dim, hidden = 1024, 2048
    monkeypatch.setitem(LLAMA3, "tiny", (1, dim, 8, hidden))
    found = explain("tiny", mesh={"fsdp": 2, "tp": 4}, sequence=64, batch=2, backend="aot_eager")
    (forward, _) = found.report.graphs
    (bucket,) = (b for b in forward.buckets if "blocks.0.mlp.up.weight" in fqns_of(b))
    assert (bucket.group_size, len(bucket.members)) == (2, 9)
    # Eighths of four products of attention and three of the MLP, halves of two norms; in bf16.
    assert bucket.nbytes == 2 * ((4 * dim * dim + 3 * dim * hidden) // 8 + 2 * dim // 2)
    assert (found.tokens, found.ranks, found.copies) == (128, 8, 4)
    activations = found.report.collectives_before["all_reduce"]
    assert activations > 4  # two in the block, forward and backward, and more outside
    with pytest.raises(TargetError, match="tp=16 does not divide the model's 8 heads"):
        explain("tiny", mesh={"fsdp": 2, "tp": 16})


def fqns_of(bucket):
    return [fqn for member in bucket.members for fqn in member.fqns]


def test_a_configuration_of_transformers(tmp_path):
    """Its experts, fewer than the ranks, are sharded evenly on another dimension."""
    pytest.importorskip("transformers", reason="it makes the models: pip install transformers")
    sizes = {**SMALL, "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1}
    sizes |= {"num_key_value_heads": 4, "max_position_embeddings": 32}
    config = {"model_type": "mixtral", **sizes, "num_local_experts": EXPERTS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    mesh = {"replicate": 2, "fsdp": RANKS}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnevenShardsWarning)
        found = explain(f"hf:{tmp_path}", mesh=mesh, backend="aot_eager")
    assert found.tokens == 32  # as many as the configuration allows
    assert {b.group_size for b in found.report.buckets} == set(mesh.values())
    members = [m for b in found.report.buckets for m in b.members if "experts" in m.fqns[0]]
    assert members
    assert all(m.rows is None and m.shape[0] == EXPERTS for m in members if len(m.shape) == 3)
    for target, mesh, match in (
        ("hf:no_such_model", {"fsdp": 2}, "no_such_model: transformers makes no model of it"),
        ("hf:deepseek_v3", {"fsdp": 2, "tp": 8}, "the styles .*moe_tp_experts.* leave tp= out"),
    ):
        with pytest.raises(TargetError, match=match):
            explain(target, mesh=mesh)


def test_the_state_of_optimizers():
    model = torch.nn.ModuleDict({"0": torch.nn.Linear(6, 3), "head": torch.nn.Linear(3, 2)})
    states = {rule: state_of(model, rule) for rule in get_args(Rule)}
    matrix, others = 18, 3 + 6 + 2
    muon = (4 * matrix + 8 * others) / (matrix + others)
    assert states == {"adamw": 8, "adam": 8, "sgd": 0, "muon": muon}
    assert state_of(model.bfloat16(), "adamw") == 4


def test_the_least_bound_that_works(capsys):
    command = ["explain", f"{HERE}:two_blocks", "--goal", "speed", "--brief"]
    command += ["--backend", "aot_eager", "--memory-gib"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BucketingWarning)
        said = []
        for bound in ("1e-3", "0.07"):
            torch._dynamo.reset()
            assert main([*command, bound]) == 0
            said.append(capsys.readouterr().out)
    # two workspaces of cuBLAS of 32 MiB
    assert "no plan found keeps 0.001 GiB: --memory-gib 0.07 is the least that works" in said[0]
    assert "no plan found" not in said[1]
    assert main([*command, "1e-7"]) == 1
    assert "less than a rank needs before any activation" in capsys.readouterr().err


def test_meshes_of_a_sweep(capsys):
    assert meshes_of("fsdp=64..512") == [{"fsdp": n} for n in (64, 128, 256, 512)]
    assert meshes_of("fsdp=3..13,tp=8") == [{"fsdp": n, "tp": 8} for n in (3, 6, 12)]
    assert meshes_of("replicate=1..2,fsdp=4")[1] == {"replicate": 2, "fsdp": 4}
    for text in ("fsdp=8..4", "fsdp=x..8", "fsdp=1..", "ep=1..2,fsdp=2", "tp=1..2"):
        with pytest.raises(SystemExit):
            main(["explain", "--sweep", text])
    with pytest.raises(SystemExit):
        main(["explain", "--sweep", "fsdp=2", "--mesh", "fsdp=2"])
    assert "--sweep goes without --mesh" in capsys.readouterr().err


GIVEN: dict[str, Any] = {
    "target": f"{HERE}:two_blocks",
    "goal": "speed",
    "backend": "aot_eager",
    "memory_gib": 1.0,
}


def test_a_plan_of_a_sweep_is_shown():
    made = _row({"fsdp": 4}, GIVEN, draw=True)
    assert made["fits"]
    assert sum(made["peak"].values()) == made["peak_bytes"]
    # 3 tokens of 2 sequences on each rank
    assert made["tokens_per_s_per_gpu"] == pytest.approx(6 / made["step_ms"] * 1e3)
    assert made["tokens_per_s"] == pytest.approx(4 * made["tokens_per_s_per_gpu"])
    assert made["peak"]["state"] == 2 * made["peak"]["parameters"]
    assert made["page"]["title"] == f"{HERE}:two_blocks, fsdp=4"
    rows = [
        {**made, "best": True},
        {**made, "mesh": {"fsdp": 2}, "fits": False, "best": False},
        {"mesh": {"fsdp": 1}, "error": "too small", "fits": False, "best": False},
    ]
    text = text_of(rows, 1.0).splitlines()
    assert text[0].split()[:4] == ["mesh", "step,", "ms", "tokens/s/GPU"]
    assert text[1].startswith("fsdp=4 ")
    assert text[1].endswith("  best")
    assert text[2].endswith("  above the bound")
    assert text[-1] == "fsdp=1: too small"
    none = text_of([{**row, "fits": False, "best": False} for row in rows], 0.05)
    assert re.search(r"no mesh keeps 0.05 GiB; the least peak is 0.0\d GiB", none)


@pytest.mark.slow
def test_a_sweep_of_processes(tmp_path, capsys):
    file = tmp_path / "rows.json"
    command = ["explain", GIVEN["target"], "--goal", "speed", "--memory-gib", "1"]
    page = tmp_path / "page.html"
    command += ["--sweep", "fsdp=1..4", "--json", str(file), "--html", str(page)]
    assert main(command) == 0
    assert "[3/3] " in capsys.readouterr().err
    rows = json.loads(file.read_text())
    assert [row["mesh"] for row in rows] == [{"fsdp": n} for n in (1, 2, 4)]
    assert sum(row["best"] for row in rows) == 1
    assert all(f"two_blocks, fsdp={n}" in page.read_text(encoding="utf-8") for n in (1, 2, 4))


def _killed(mesh, given, draw):
    done = Path(given["target"])
    if mesh["fsdp"] == 2:
        while not done.exists():
            time.sleep(0.1)
        time.sleep(2)  # the other plan arrives
        os.kill(os.getpid(), signal.SIGKILL)
    done.touch()
    return {"mesh": mesh, "error": "", "fits": True, "seconds": 1.0, "tokens_per_s_per_gpu": 1.0}


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one CPU plans one mesh at a time")
def test_a_sweep_keeps_the_plans_that_are_complete_when_a_process_is_killed(monkeypatch, tmp_path):
    monkeypatch.setattr("torch_ext_bucketing.commands.explain._row", _killed)
    one, two = sweep([{"fsdp": 1}, {"fsdp": 2}], {"target": str(tmp_path / "done")})
    assert one["best"]
    assert "perhaps for want of memory" in two["error"]


def test_a_process_group_of_someone_else(fake_world):
    with pytest.raises(TargetError, match="is initialised already"):
        explain(f"{HERE}:two_blocks")
    dist.destroy_process_group()

    dist.init_process_group("fake", rank=0, world_size=2)  # the fixture destroys it


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


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 100}
TASKS = {
    "ViTForImageClassification": {"model_type": "vit", "num_hidden_layers": 1, "image_size": 32},
    "WhisperForConditionalGeneration": {
        **{"model_type": "whisper", "encoder_layers": 1, "decoder_layers": 1, "d_model": 64},
        **{"max_source_positions": 40, "max_target_positions": 24, "decoder_start_token_id": 1},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0},
    },
    "T5ForConditionalGeneration": {"model_type": "t5", "num_layers": 1, "d_model": 64, "d_kv": 16},
    "BertForMaskedLM": {
        "model_type": "bert",
        "num_hidden_layers": 1,
        "max_position_embeddings": 48,
    },
}
TOKENS_OF = {"ViT": 1, "Whisper": 24, "T5": 512, "Bert": 48}


@pytest.mark.parametrize(
    "architecture",
    [name if "ViT" in name else at_night(name) for name in TASKS],
)
def test_the_architecture_of_a_configuration_decides(architecture, tmp_path):
    """Inputs are those of the model's own ``forward``, with sizes of its configuration."""
    pytest.importorskip("transformers", reason="it makes the models: pip install transformers")
    config = {**SMALL, **TASKS[architecture], "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = explain(f"hf:{tmp_path}", mesh={"fsdp": 2}, backend="aot_eager")
    assert found.report.graph("backward").collectives_after["reduce_scatter"] > 1
    (tokens,) = (n for name, n in TOKENS_OF.items() if architecture.startswith(name))
    assert found.tokens == tokens


def test_a_model_that_cant_be_fed_gets_one_line(tmp_path):
    pytest.importorskip("transformers", reason="it makes the models: pip install transformers")
    for config, options, match in (
        ({"model_type": "vit"}, {"sequence": 8}, "takes no tokens, so leave --sequence out"),
        (
            {"model_type": "clip", "architectures": ["CLIPModel"]},
            {},
            "Change logit_scale to a 1D tensor",
        ),
        ({"model_type": "llama", "num_attention_heads": "four"}, {}, "makes no model of it: .*"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
        with pytest.raises(TargetError, match=match) as error:
            explain(f"hf:{tmp_path}", mesh={"fsdp": 2}, **options)
        assert len(str(error.value)) < 500


# --- experts fused into one parameter --------------------------------------------------

EXPERTS, WIDTH, RANKS = 8, 1024, 64


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = torch.nn.Parameter(torch.ones(EXPERTS, WIDTH, WIDTH))

    def forward(self, x):
        return x + (
            self.router(x).softmax(-1)[..., None] * torch.einsum("bd,edh->beh", x, self.up)
        ).sum(1)


def fused_experts(mesh, placement=None):
    """Shard by rows: most ranks get none."""
    model = torch.nn.Sequential(Experts(), Experts())
    for layer in model:
        teb.fsdp.fully_shard(layer, mesh=mesh["fsdp"], shard_placement_fn=placement)
    teb.fsdp.fully_shard(model, mesh=mesh["fsdp"])
    return model, torch.ones(4, WIDTH)


def fused_experts_by_columns(mesh):
    return fused_experts(mesh, lambda p: Shard(1) if p.ndim == 3 else None)


@pytest.mark.parametrize("goal", ["parity", at_night("speed")])
def test_uneven_shards_are_reported_with_a_placement_that_avoids_them(goal):
    options = {"mesh": {"fsdp": RANKS}, "backend": "aot_eager", "goal": goal}
    with pytest.warns(
        UnevenShardsWarning, match=r"8 x 1024 x 1024 on 64 ranks.* 8\.0 times the mean.* Shard\(1\)"
    ):
        found = explain(f"{HERE}:fused_experts", **options)
    text = found.report.to_text()
    assert "gathers of the forward graph are more than a tenth padding" in text
    if goal == "parity":
        padded = EXPERTS / RANKS  # of the router and of the experts alike
        assert all(b.padding == 1 - padded for b in found.report.buckets)
        assert re.search(r"node +padding\n.* 88%\n", text)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnevenShardsWarning)
        even = explain(f"{HERE}:fused_experts_by_columns", **options)
    assert not even.report.warnings
    assert even.peak_bytes < found.peak_bytes / 2


def test_a_bound_below_uneven_shards_names_them():
    with pytest.raises(
        TargetError,
        match=r"have too few rows for the ranks, such as 0.up, 8 x 1024 x 1024: .*Shard\(1\)",
    ):
        explain(f"{HERE}:fused_experts", mesh={"fsdp": RANKS}, memory_gib=0.02)


class Sinks(torch.nn.Module):
    """Attention with a parameter beside its logits, as in gpt-oss."""

    def __init__(self):
        super().__init__()
        self.query, self.key = (torch.nn.Linear(64, 64, bias=False) for _ in range(2))
        self.sinks = torch.nn.Parameter(torch.ones(64))

    def forward(self, x):
        logits = self.query(x) @ self.key(x).transpose(-2, -1)
        sinks = self.sinks.repeat(x.shape[1] // 64)[None, :, None].expand(len(x), -1, 1)
        return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1] @ x


def attention_sinks(mesh):
    model = torch.nn.Sequential(Sinks(), Sinks())
    for layer in model:
        teb.fsdp.fully_shard(layer, mesh=mesh["fsdp"])
    return teb.fsdp.fully_shard(model, mesh=mesh["fsdp"]), torch.ones(2, 512, 64)


def test_logits_beside_a_parameter_are_no_part_of_its_unit():
    found = explain(
        f"{HERE}:attention_sinks", mesh={"fsdp": 2}, memory_gib=1.0, backend="aot_eager"
    )
    (keep,) = (r for r in found.report.rewrites if isinstance(r, KeepReport))
    units = [u for u in keep.units if u.parameters]
    assert units
    assert all(u.nbytes < 2**20 for u in units)  # logits have 2 MiB


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(64, 256, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(256, 64, bias=False)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def gated(mesh):
    model, x = torch.nn.Sequential(Gated(), Gated()), torch.ones(8, 512, 64, dtype=torch.bfloat16)
    return data_parallel(model, mesh["fsdp"], param_dtype=torch.bfloat16), x


def test_a_value_that_the_partitioner_computes_once_is_planned_as_saved():
    """Forward and backward both cast the gate's product, and the partitioner saves one cast."""
    found = explain(f"{HERE}:gated", mesh={"fsdp": 2}, memory_gib=1.0)
    (keep,) = (r for r in found.report.rewrites if isinstance(r, KeepReport))
    peak = max(s.peak_bytes[1] for s in found.report.schedules)
    # A schedule may make a gradient of a weight earlier than the choice's order did, at 32 KiB each.
    # A cast that is saved, and was planned as its input, is 2 MiB more.
    gradients = sum(p.numel() * 2 for p in torch.nn.Sequential(Gated(), Gated()).parameters())
    assert peak - gradients <= keep.peak_bytes[1] < 1.03 * peak


def test_chunks_made_as_they_are_read_are_those_of_fully_shard():
    for size, number, dim in itertools.product((0, 1, 3, 4, 7, 8, 9), (1, 2, 3, 4, 8), (0, 1)):
        shape = (size, 3) if dim == 0 else (3, size)
        tensor = torch.arange(3 * size).view(shape)
        ours = without_device._Chunks(tensor, number, dim)
        theirs = _fsdp_common._chunk_with_empty(tensor, number, dim)
        assert len(ours) == len(theirs) == number
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.numel() == other.numel()
            assert not mine.numel() or torch.equal(mine, other)
