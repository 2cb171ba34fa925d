"""The code of README and of the documentation's pages runs as it stands."""

import re
import subprocess
import sys
import tomllib
import types
from typing import Any
from unittest import mock

import pytest
import torch
from collective_graphs import MAX_BETWEEN, PAYLOAD_ORDER
from marks import at_night
from pages import DOCS, code_of
from patching_trees import ROOT
from torch._inductor import config
from torch._inductor.fx_passes import bucketing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import torch_ext_bucketing as teb
from benchmarks.eager_parity.ranks import aten_kernels
from torch_ext_bucketing.testing.training import ModelConfig, Transformer
from torch_ext_bucketing.tuning.tune import default_candidates


def small_model() -> Transformer:
    config = ModelConfig(layers=1, dim=32, heads=2, kv_heads=1, hidden=48, vocab=64)
    return Transformer(config)


@pytest.fixture
def scope(fake_world: int) -> dict[str, Any]:
    """Names that the code uses."""
    torch._dynamo.reset()
    model, mesh = small_model(), init_device_mesh("cpu", (fake_world,))
    order = teb.FSDPParamOrder.from_model(model, units=teb.transformer_block_plan(model))
    return {"model": model, "mesh": mesh, "order": order, "torch": torch, "teb": teb}


@pytest.fixture
def sharded(scope: dict[str, Any]) -> dict[str, Any]:
    teb.data_parallel(scope["model"], scope["mesh"])
    return scope


def run_step(compiled: torch.nn.Module) -> None:
    compiled(torch.zeros(1, 16, dtype=torch.long)).float().sum().backward()


def counts_of_units(scope: dict[str, Any]) -> list[dict[str, int]]:
    """Count collectives per parameter and per unit."""
    last = len(scope["order"].units[-1])
    parameters, units = len(list(scope["model"].parameters())), len(scope["order"].units)
    return [
        {"all_gather": 2 * n - 1 - kept, "reduce_scatter": n}
        for n, kept in ((parameters, last), (units, 1))
    ]


@pytest.mark.torch
@pytest.mark.parametrize("page", ["README", at_night("getting-started")])
def test_quick_start(scope: dict[str, Any], page: str, capsys):
    with config.patch({"force_disable_caches": True}):
        # The passes are the same; Inductor's work on the graphs is slow and not looked at.
        exec(code_of(page)[0].replace('"inductor"', '"aot_eager"'), scope)
        run_step(scope["compiled"])
    report = scope["backend"].last_report()
    assert [report.collectives_before, report.collectives_after] == counts_of_units(scope)
    for bucket in report.buckets:
        members = [f for m in bucket.members for f in m.fqns]
        assert tuple(members) == scope["order"].units[bucket.unit]
    exec(code_of("reports-and-tools")[0], scope)
    assert "all_gather [(" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::torch_ext_bucketing.errors.BoundNotKeptWarning")
@pytest.mark.parametrize("name", ["parity", "speed"])
def test_passes_written_out(sharded: dict[str, Any], name: str):
    """On a model this small one all-gather is more than 2% of memory: a warning, and it runs."""
    exec(code_of("recipes-and-passes")[0], sharded)
    compiler = teb.backend("aot_eager", sharded[name])
    run_step(torch.compile(sharded["model"], backend=compiler))
    report = compiler.last_report()
    assert len(report.schedules) == len(report.graphs) == 2
    assert report.buckets
    assert {b.packed_by for b in report.buckets} == {"FSDPParamOrder"}
    for schedule in report.schedules:
        assert schedule.step_ms[1] >= schedule.bound_ms
        bounded = any("ratio=1.02" in policy for policy in schedule.policies)
        assert bounded == (name == "speed")


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torch_ext_bucketing.errors.BoundNotKeptWarning")
def test_a_tuned_step(sharded: dict[str, Any], tmp_path, monkeypatch):
    """All candidates compile, and the step is taken by the first."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    sharded["optimizer"] = torch.optim.AdamW(sharded["model"].parameters())
    code = code_of("recipes-and-passes")[1].replace(".sum()", ".float().sum()")
    sharded["plans"] = default_candidates(sharded["model"], "aot_eager")
    exec(code.replace("tune(model)", "tune(model, plans)"), sharded)
    before = [p.to_local().clone() for p in sharded["model"].parameters()]
    sharded["train_step"](torch.zeros(1, 16, dtype=torch.long))
    after = [p.to_local() for p in sharded["model"].parameters()]
    assert not all(map(torch.equal, before, after))
    reports = {n: c.last_report() for n, c in sharded["tuner"].candidates.items()}
    assert len(reports) == 7
    # The backward graph of the first one ran, too.
    assert [len(r.estimates) for r in reports.values()] == [2, 1, 1, 1, 1, 1, 1]
    assert [n for n, r in reports.items() if not r.graphs] == ["torch's buckets", "no buckets"]
    assert reports["units"].collectives_after["all_gather"] == len(sharded["order"].units)


@pytest.mark.torch
def test_units_by_hand_and_memory(sharded: dict[str, Any]):
    sharded["optimizer"] = torch.optim.AdamW(sharded["model"].parameters())
    for code in (code_of("getting-started")[1], *code_of("memory")):
        exec(code, sharded)
        assert sharded["passes"]
    assert [type(p).__name__ for p in sharded["passes"]][1] == "ReshardAfterForward"
    assert sharded["chosen"].auto
    assert not sharded["in_a_node"].auto


def test_rank_order(scope: dict[str, Any]):
    eager = fully_shard(small_model(), mesh=scope["mesh"])
    teb.data_parallel(scope["model"], scope["mesh"])
    scope |= {"eager_model": eager, "FSDPModule": FSDPModule}
    for code in code_of("rank-order-reductions"):
        exec(code, scope)
    assert "FixedOrderReduce" in repr(scope["passes"])


@pytest.mark.torch
def test_muon(sharded: dict[str, Any]):
    sharded["batches"] = [torch.zeros(1, 16, dtype=torch.long)]
    sharded["loss"] = lambda model, tokens: model(tokens).float().sum()
    code = code_of("muon")[0].replace("recipe(model))", 'recipe(model), compiler="aot_eager")')
    exec(code, sharded)
    assert "7 matrices on 4 ranks" in sharded["report"].to_text()
    exec(code_of("muon")[1], sharded)
    assert len(sharded["muon"].param_groups[0]["params"]) == 7


def test_extending(sharded: dict[str, Any], capsys):
    own_pass, _, machine = code_of("extending")
    exec(machine, sharded)
    assert "slow network" in repr(sharded["passes"])
    # A dataclass looks up the module that defines it.
    module = types.ModuleType("extending")
    vars(module).update(sharded)
    with mock.patch.dict(sys.modules, {"extending": module}):
        exec(own_pass, vars(module))
        compiler = teb.backend("aot_eager", module.passes)
        run_step(torch.compile(sharded["model"], backend=compiler))
    gathers = counts_of_units(sharded)[1]["all_gather"]
    found = [int(n) for n in re.findall(r"gathers left (\d+)", capsys.readouterr().out)]
    assert sum(found) == gathers


@pytest.mark.torch
@pytest.mark.hooks
@pytest.mark.slow
def test_hooks(scope: dict[str, Any]):
    teb.data_parallel(scope["model"], scope["mesh"], param_dtype=torch.bfloat16)
    # What the example sets is put back on leaving.
    settings = {
        "joint_custom_post_pass": None,
        "bucket_all_gathers_fx": "none",
        "bucket_reduce_scatters_fx": "none",
        PAYLOAD_ORDER: None,
        MAX_BETWEEN: 0,
    }
    merge = bucketing.process_collective_bucket
    with (
        aten_kernels(),
        config.patch(settings),
        mock.patch.object(bucketing, "process_collective_bucket", side_effect=merge) as merged,
    ):
        exec(code_of("hooks")[0], scope)
        run_step(scope["compiled"])
    sizes = [len(call.args[1]) for call in merged.call_args_list]
    # Forward gathers, and the gradients of all parameters.
    assert sizes
    assert min(sizes) > 1
    assert sum(sizes) >= 2 * len(list(scope["model"].parameters())) - 2
    # Every member has a place, and its bucket is packed by it.
    for call in merged.call_args_list:
        places = [start.meta["fsdp_payload_order"] for start in call.args[1]]
        assert None not in places
        assert len(set(places)) == len(places)


# Their own tests run the code of these pages, or they have none.
ELSEWHERE = {"accelerate", "torchtitan", "training-script", "api", "8-bit-gathers", "limits"}
HERE = {"getting-started", "reports-and-tools", "recipes-and-passes", "memory", "hooks"}
HERE |= {"rank-order-reductions", "extending", "muon"}


def test_pages_are_run_and_linked():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 150
    pages = {path.stem for path in DOCS.glob("*.md")}
    assert pages == HERE | ELSEWHERE
    assert not any(code_of(page) for page in ("8-bit-gathers", "limits"))
    assert all(f"torch_ext_bucketing/docs/{page}.md" in readme for page in pages)
    files = [ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.glob("*.md")]
    files += [ROOT / "benchmarks" / "README.md", ROOT / ".github" / "CONTRIBUTING.md"]
    for path in files:
        for link in re.findall(r"\]\((?!http)([^)#\s]+)", path.read_text()):
            assert (path.parent / link).exists(), f"{path}: {link}"


def test_the_changelog_begins_with_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == project["version"]


def test_the_api_page_is_up_to_date():
    command = [sys.executable, str(ROOT / ".ci" / "make_api.py"), "--check"]
    assert subprocess.run(command).returncode == 0, "run python .ci/make_api.py"
