"""Inductor's FX graph cache and the AOTAutograd cache, warm and cold, across processes."""

import copy
import dataclasses
import hashlib
import inspect
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_runs import BYPASS, HIT, MISS, Checkout, assert_state
from collective_graphs import fake_group
from torch._inductor import compile_fx
from torch.distributed.device_mesh import init_device_mesh
from torch_features import CONFIG
from untouched import touched_torch

import torch_ext_bucketing as teb
from torch_ext_bucketing._source import _sources, package_digest
from torch_ext_bucketing._torch import caches
from torch_ext_bucketing._torch.caches import watched_caches
from torch_ext_bucketing.errors import NoUuidError
from torch_ext_bucketing.passes import cache_key as _cache_key
from torch_ext_bucketing.passes.add_by_unit import AddByUnit
from torch_ext_bucketing.passes.combine_uses import CombineUses, MergeAmax
from torch_ext_bucketing.passes.reduce_scatter_first import ReduceScatterFirst
from torch_ext_bucketing.planner.cost.machine import Level
from torch_ext_bucketing.planner.scheduling import Estimate
from torch_ext_bucketing.tuning.tune import TorchBuckets

pytestmark = [pytest.mark.torch, pytest.mark.long]

CACHED = ("backend", "backend, own pass", "backend, pass of a script")
EDITED = ("backend, edited", "backend, own pass edited")
OTHERS = ("backend, other order",)  # every parameter counts: see below


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(tmp_path_factory.mktemp("caches"))


@pytest.fixture(scope="module")
def cold(checkout: Checkout) -> dict[str, dict[str, Any]]:
    """Compile in a first process, which later ones are compared with."""
    return checkout.run("uuids", *CACHED, "plans", seed=1)


@pytest.fixture(scope="module")
def warm(checkout: Checkout, cold: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Compile in a second process: with the same settings, then with others."""
    names = ("uuids", *CACHED, *OTHERS, "backend, lambda", *EDITED, "plans")
    return checkout.run(*names, seed=2)


def test_uuids_differ_by_settings_and_not_by_process(warm, cold):
    """Passes can be switched off by name before they are imported."""
    assert warm["uuids"] == cold["uuids"]
    assert cold["uuids"]["disabled"] == []  # of no pass, and no error
    uuids = cold["uuids"]["uuids"]
    assert len(set(uuids)) == len(uuids) == 8


def test_same_plans_and_order_under_any_hash_seed(warm, cold):
    assert warm["plans"] == cold["plans"]
    assert sum(len(buckets) for buckets, _ in cold["plans"]["plans"]) > 40
    assert len(cold["plans"]["order"]) > 1000


def test_the_same_settings_hit_in_a_new_process_and_others_miss(warm, cold):
    for name in CACHED:
        assert_state(cold[name], MISS)
        assert len(cold[name]["codes"]) == 2, cold[name]
        assert_state(warm[name], HIT)
        assert warm[name]["codes"] == cold[name]["codes"]
        assert not warm[name]["log"]
    for name in OTHERS:
        assert_state(warm[name], MISS)
    codes = zip(warm["backend, other order"]["codes"], cold["backend"]["codes"], strict=True)
    assert all(one != other for one, other in codes)


def test_a_plain_function_bypasses_with_a_reason(warm):
    name = "backend, lambda"
    assert_state(warm[name], BYPASS)
    reason = "torch_ext_bucketing.passes.bucketing.BucketByUnit: <lambda>"
    assert any(reason in line for line in warm[name]["log"]), warm[name]["log"]
    # torch logs only that a pass is unsupported, at a level that is not shown.
    (line,) = (line for line in warm[name]["log"] if "torch_ext_bucketing" in line)
    assert line.startswith("WARNING")
    assert "cache_child.py:" in line
    assert "give it a uuid() to be cached" in line


def test_an_edited_pass_does_not_get_the_old_graph(warm, cold):
    edited = warm["backend, own pass edited"]
    assert_state(edited, MISS)
    codes = zip(cold["backend, own pass"]["codes"], edited["codes"], strict=True)
    assert all(was != now for was, now in codes)


def test_an_edited_package_does_not_get_the_old_graph(warm, cold):
    """``test_every_module_of_the_package_counts`` edits each module."""
    assert_state(warm["backend, edited"], MISS)
    assert warm["backend, edited"]["codes"] == cold["backend"]["codes"]


def test_compiling_in_a_subprocess_is_refused(fake_world, monkeypatch):
    """``TORCHINDUCTOR_FX_COMPILE_MODE=SUBPROCESS`` sets this mode."""
    monkeypatch.setattr(compile_fx, "fx_compile_mode", compile_fx.FxCompileMode.SUBPROCESS)
    model = teb.data_parallel(torch.nn.Linear(8, 8), init_device_mesh("cpu", (fake_world,)))
    compiled = torch.compile(model, backend=teb.backend("inductor", [teb.BucketByCap()]))
    said = "RuntimeError: TORCHINDUCTOR_FX_COMPILE_MODE=SUBPROCESS runs graph passes in"
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=said):
        compiled(torch.ones(4, 8))


# -- keys ------------------------------------------------------------------------------------------

ORDER = teb.FSDPParamOrder.from_fqns([["a", "b"], ["c"]])
OTHER = teb.FSDPParamOrder.from_fqns([["b", "a"], ["c"]])


MACHINE = teb.Machine(flops={"bfloat16": 1e12})
MADE = [
    teb.hooks.TagParameters(torch.nn.Linear(1, 1), fqn_of={0: "a"}),
    CombineUses(),
    MergeAmax(),
    ReduceScatterFirst(),
    teb.FixedOrderReduce(),
    teb.ReshardAfterForward(),
    teb.BucketByUnit(ORDER),
    teb.BucketByCap({("g", "all_gather"): 1.0, "h": 2.0}, payload_order=ORDER),
    teb.Schedule(teb.Overlap(), MACHINE),
    teb.BucketAndSchedule(teb.Overlap(), caps_mb=(8.0,), machine=MACHINE),
    Estimate(MACHINE),
    TorchBuckets(),
]


def test_every_pass_is_listed():
    passes = {getattr(teb, n) for n in teb.__all__ if inspect.isclass(getattr(teb, n))}
    passes = {c for c in passes if issubclass(c, teb.GraphPass) and c is not teb.GraphPass}
    # Two have tests of their own. MatchFSDP2 stands for passes that are listed.
    assert {*map(type, MADE), teb.SeparateGroups, AddByUnit} >= passes - {teb.MatchFSDP2}


@pytest.mark.parametrize("made", MADE, ids=lambda p: p.name)
def test_every_argument_of_a_pass_counts(made):
    names = [f.name for f in dataclasses.fields(made) if f.init]
    assert names == list(inspect.signature(type(made)).parameters)
    uuid = made.uuid()
    assert uuid
    assert uuid == dataclasses.replace(made).uuid()
    for name in names:
        other = copy.copy(made)
        value = torch.nn.Linear(1, 1, bias=False) if name == "model" else "another"
        object.__setattr__(other, name, value)
        assert other.uuid() not in (None, uuid), name


@pytest.mark.parametrize(
    ("make", "first", "second"),
    [
        (teb.BucketByUnit, ORDER, OTHER),
        (teb.BucketByUnit, [["a", "b"]], [["a"], ["b"]]),
        (teb.BucketByCap, {("g", "all_gather"): 1.0}, {("g", "all_gather"): 1.5}),
        (teb.Schedule, teb.Overlap(), (teb.Overlap(), teb.MaxComputeRun())),
        (teb.Schedule, teb.Overlap(), teb.Overlap(depth=3)),
        (teb.FixedOrderReduce, torch.float32, torch.float64),
        (lambda keep: teb.ReshardAfterForward(keep=keep), ["a"], ["b"]),
        (lambda mode: teb.ReshardAfterForward(mode), True, False),
        (lambda groups: teb.BucketByCap(groups=groups), None, ["0"]),
        (lambda groups: teb.BucketByCap(groups=groups), ["0"], ["1"]),
        (lambda reduce: teb.BucketAndSchedule((), reduce=reduce), None, teb.FixedOrderReduce()),
    ],
)
def test_other_values_of_an_argument_count(make, first, second):
    uuids = [make(first).uuid(), make(second).uuid()]
    assert None not in uuids
    assert uuids[0] == make(first).uuid() != uuids[1]


def test_the_groups_that_reductions_move_to_count(fake_world):
    """Their names are in the graph, and each pass creates its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    made = [
        teb.SeparateGroups(mesh),
        teb.SeparateGroups(mesh),
        teb.SeparateGroups(mesh["shard"]),
    ]
    made.append(teb.SeparateGroups(mesh, kinds=("all_gather",)))
    object.__setattr__(made[-1], "second", made[0].second)
    uuids = [m.uuid() for m in made]
    assert None not in uuids
    assert len(set(uuids)) == len(uuids)
    assert uuids == [m.uuid() for m in made]


class Estimate:
    def __call__(self, node, nbytes):
        return None

    def uuid(self):
        return "an estimate"


NETWORK = {"ranks_per_node": 8, "intra": Level(1e9), "inter": Level(1e8)}


@pytest.mark.parametrize(
    "made",
    [
        teb.Overlap(),
        teb.MaxComputeRun(),
        teb.PeakMemory(gib=1.0),
        teb.Machine(**NETWORK, estimate=Estimate()),
    ],
    ids=lambda made: type(made).__name__,
)
def test_every_field_of_a_policy_counts(made):
    names = [f.name for f in dataclasses.fields(made)]
    assert set(names) == set(inspect.signature(type(made)).parameters)
    for name in names:
        other = copy.copy(made)
        object.__setattr__(other, name, "another")
        assert _cache_key.describe(other) != _cache_key.describe(made), name


class Plain:
    """An object without a ``uuid()``."""


def test_what_has_no_uuid(caplog):
    class NoUuid:
        def __call__(self, start):
            return 0

        def uuid(self):
            return None

    class OfANotebook(teb.ReshardAfterForward):
        __module__ = "no_such_module"

    _cache_key._logged.clear()
    with caplog.at_level(logging.WARNING, "torch_ext_bucketing"):
        assert teb.BucketByUnit(ORDER, payload_order=NoUuid()).uuid() is None
        assert "NoUuid.uuid() returned None" in caplog.messages[-1]
        assert OfANotebook().uuid() is None
        assert (
            "the source of no_such_module, which defines it, can't be read" in caplog.messages[-1]
        )
        assert teb.BucketAndSchedule((), eligible=len).uuid() is None
        assert "builtin_function_or_method is a plain callable" in caplog.messages[-1]
        said = len(caplog.messages)
        assert said == 3
        assert teb.BucketByUnit(ORDER, payload_order=NoUuid()).uuid() is None
        assert len(caplog.messages) == said, "said once"
    with pytest.raises(NoUuidError, match="is not a plain value"):
        _cache_key.describe({"a": [Plain()]})
    with pytest.raises(NoUuidError, match="is a class"):
        _cache_key.describe(Plain)


def test_group_sizes_and_ranks_count():
    def uuid(world: int, rank: int = 0) -> str | None:
        with fake_group(world, rank):
            return teb.BucketByCap(kinds=("all_reduce",)).uuid()

    assert uuid(4) == uuid(4) != uuid(8)
    assert uuid(4, rank=1) == uuid(4, rank=1) != uuid(4), "a bucketed gather has the rank inside"
    with CONFIG.patch(compile_on_one_rank=True):
        assert uuid(4, rank=1) == uuid(4) != uuid(8), "and as one rank compiles for all, none"


def test_a_mesh_of_a_graph_for_all_ranks_is_pickled_without_a_rank_and_gets_the_one_it_comes_to():
    import torch.distributed as dist

    texts, states, groups = [], [], []
    for rank in (0, 3):
        dist.init_process_group("fake", rank=rank, world_size=4)
        try:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            with CONFIG.patch(compile_on_one_rank=True), watched_caches():
                states.append(repr(mesh.__getstate__()))
                texts.append(pickle.dumps(mesh))
                loaded = pickle.loads(texts[0])
            assert loaded == mesh
            assert loaded.get_coordinate() == mesh.get_coordinate() == (rank // 2, rank % 2)
            groups.append([g.group_name for g in loaded.get_all_groups()])
            assert groups[-1] == [g.group_name for g in mesh.get_all_groups()]
            no_such = pytest.raises(RuntimeError, match="which the graph here lacks")
            with CONFIG.patch(compile_on_one_rank=True), watched_caches(), no_such:
                pickle.loads(texts[0])
        finally:
            dist.destroy_process_group()
    assert states[0] == states[1]
    assert groups[0] != groups[1]


def test_no_cache_keeps_a_graph_for_all_ranks_with_the_place_of_one(caplog, monkeypatch):
    import torch.distributed as dist
    from torch._inductor.output_code import CompiledFxGraph

    def made(look: Callable[[Any], Any]) -> CompiledFxGraph:
        with CONFIG.patch(compile_on_one_rank=True), watched_caches():
            look(mesh)
            return CompiledFxGraph()

    def init(self: Any) -> None:
        # The real one reads the state of a whole compile.
        self.compiled_fn_runner = None

    monkeypatch.setattr(CompiledFxGraph, "__init__", init)
    dist.init_process_group("fake", rank=3, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for look in (lambda m: m.get_coordinate() is None, lambda m: m.size(0)):
            pickle.dumps(made(look))
            assert not caplog.messages
        for look in (lambda m: m.get_coordinate()[1], lambda m: m.get_local_rank(0)):
            with pytest.raises(pickle.PicklingError, match="the place of this rank in DeviceMesh"):
                pickle.dumps(made(look))
            assert "No cache keeps a graph that is compiled for all ranks" in caplog.text
            caplog.clear()
    finally:
        dist.destroy_process_group()


def test_every_module_of_the_package_counts():
    package = Path(teb.__path__[0])
    apart = ("hooks", "testing")  # what they do to a graph: nothing
    modules = {m.relative_to(package): m.read_text() for m in package.rglob("*.py")}
    counted = sorted((m.parts, text) for m, text in modules.items() if m.parts[0] not in apart)
    assert len({parts[:-1] for parts, _ in counted}) > 9
    whole = "\0".join(part for parts, text in counted for part in ("/".join(parts), text))
    assert package_digest() == hashlib.sha256(whole.encode()).hexdigest()


def test_the_packages_digest_is_of_its_sources_alone(tmp_path):
    (tmp_path / "folder").mkdir()
    for name in ("a.py", "folder/b.py"):
        (tmp_path / name).write_text(f"# {name}\n")
    found = list(_sources(tmp_path))
    assert found == ["a.py", "# a.py\n", "folder/b.py", "# folder/b.py\n"]
    for name in ("__pycache__", "folder/__pycache__"):  # as the first import of a module leaves
        (tmp_path / name).mkdir()
        (tmp_path / name / "b.cpython-311.pyc").touch()
    assert list(_sources(tmp_path)) == found


def test_what_a_compile_wraps_in_torch_is_found_and_is_gone_afterwards():
    assert touched_torch() == []
    with caches.watched_caches():
        assert touched_torch() == [
            "torch._inductor.output_code.CompiledFxGraph.__init__",
            "torch._inductor.output_code.CompiledFxGraph.post_compile",
        ]
    assert touched_torch() == []
