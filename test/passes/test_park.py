"""``Park``: saved activations wait in host memory for backward."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from marks import at_night
from rank_pool import on_ranks
from sharded_models import Keep, OneBlock, checkpointed, eager_fsdp2, step, tokens_of, trained
from torch.distributed.device_mesh import init_device_mesh
from two_pools import PoolError, TwoPools

import torch_ext_bucketing as teb
from torch_ext_bucketing._torch.aot import import_copies
from torch_ext_bucketing.errors import PassOrderError
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.nodes import (
    FROM_HOST,
    TO_HOST,
    host_stream,
    is_host_wait,
    is_on_host,
)
from torch_ext_bucketing.passes.park import Park, ParkReport
from torch_ext_bucketing.planner.schedule.list_schedule import list_schedule
from torch_ext_bucketing.planner.schedule.model import model_of
from torch_ext_bucketing.planner.schedule.policy import Options
from torch_ext_bucketing.planner.schedule.timeline import Timeline
from torch_ext_bucketing.reports.planner import KeepReport

TOKENS = torch.arange(16).remainder(12).view(4, 4)

pytest.importorskip(
    "torch._functorch._activation_offloading.offload_ops",
    reason="this torch has no copies to host memory: 2.13 and 2.15 have",
)
pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.usefixtures("fresh_dynamo")]


def compiled(*passes, compiler=None, again=(), run=step):
    """Compile a small model, forward and backward; return its graphs and the report."""
    graphs = Keep() if compiler is None else compiler
    torch.manual_seed(0)
    model = teb.data_parallel(OneBlock(), init_device_mesh("cpu", (4,)))
    checkpointed(*(model.layers[i] for i in again))
    b = teb.backend(graphs, [teb.ReshardAfterForward(), *passes], model, agree=False)
    run(torch.compile(model, backend=b), TOKENS)
    return graphs, b.last_report()


@functools.cache
def all_parked():
    """Compile with all activations parked; return graphs that tests only read, and the report."""
    return compiled(Park([""]))


def copies(gm):
    """List the copies of a graph, each with its wait and their source."""
    found = []
    for node in gm.graph.nodes:
        if host_stream(node):
            (wait,) = node.users
            assert is_host_wait(wait)
            source = node.args[0]
            assert wait.args == (node, None, source), "the wait must not empty the source"
            found.append((source, node, wait))
    return found


def reports(report):
    return [r for r in report.rewrites if isinstance(r, ParkReport)]


def test_forward_saves_what_backward_fetches(fake_world):
    graphs, report = compiled(Park(["layers.0"]))
    forward, backward = (copies(graphs[stage]) for stage in ("forward", "backward"))
    # The block's relu and second product, and its result. Of its input only a view is its own.
    assert [source.name for source, _, _ in forward] == ["relu", "mm", "add"]
    (output,) = graphs["forward"].graph.find_nodes(op="output")
    saved = output.args[0]
    for source, _, wait in forward:
        assert wait in saved
        assert source not in saved
        assert is_on_host(wait)
        assert not is_on_host(source)
    # The head reads a view of the result, which backward makes of what comes back.
    readers = {user for source, _, _ in forward for user in source.users}
    assert not (readers - {wait for _, _, wait in forward}).intersection(saved)
    assert sorted(host.name for host, _, _ in backward) == sorted(w.name for _, _, w in forward)
    assert all(host.op == "placeholder" and is_on_host(host) for host, _, _ in backward)
    (made,) = reports(report)
    assert made.parked == {source.name: source.meta["val"].numel() * 4 for source, _, _ in forward}
    assert "3 activation(s), 2.0 KiB" in report.to_text()


def test_host_memory_is_not_device_memory(fake_world):
    """The device holds an activation until its copy has arrived, and again from the reload on."""
    plain, _ = compiled()
    torch._dynamo.reset()
    parked, report = all_parked()
    nbytes = sum(reports(report)[0].parked.values())
    (plain_out, out) = (GraphAnalysis(g["forward"].graph).liveness.profile for g in (plain, parked))
    live = [
        profile(range(len(GraphAnalysis(g["forward"].graph).dependencies.nodes)))[-1]
        for profile, g in ((plain_out, plain), (out, parked))
    ]
    assert live[0] - live[1] == nbytes
    starts = [GraphAnalysis(g["backward"].graph).liveness.at_start for g in (plain, parked)]
    assert starts[0] - starts[1] == nbytes
    # All is parked but inputs, the tokens, the loss and views of parameters' shards.
    (output,) = parked["forward"].graph.find_nodes(op="output")
    assert all(is_host_wait(n) or n.op == "placeholder" for n in output.args[0][1:])


def test_what_is_recomputed_reads_what_comes_back(fake_world):
    graphs, _ = compiled(Park([""]), again=[0])
    fetched = {wait for _, _, wait in copies(graphs["backward"])}
    backward = graphs["backward"].graph
    again = [n for n in backward.nodes if n.target is torch.ops.aten.relu.default]
    assert len(again) == 1
    reads = set(again)
    while reads and not reads & fetched:
        reads = {a for n in reads for a in n.all_input_nodes}
    assert reads & fetched


def test_inference_parks_nothing(fake_world):
    def infer(run, tokens):
        with torch.no_grad():
            run(tokens)

    graphs, report = compiled(Park([""]), run=infer)
    assert list(graphs) == ["inference"]
    assert not copies(graphs["inference"])
    assert not reports(report)


def test_a_module_without_activations_is_named(fake_world):
    graphs, report = compiled(Park(["layers.7"]))
    assert not copies(graphs["forward"])
    assert "left alone: layers.7: no activation" in report.to_text()


def test_what_can_not_be_parked_stays(fake_world):
    """Results of the model, and values with several results or gaps."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            y = self.w(x)
            values, _ = y.max(-1)
            return torch.sigmoid(y), torch.relu(values) * values

    def run(model, x):
        torch._dynamo.reset()
        one, other = model(x)
        (one.sum() + other.sum()).backward()

    model = teb.data_parallel(Wide(), init_device_mesh("cpu", (4,)))
    graphs = Keep()
    b = teb.backend(graphs, [teb.ReshardAfterForward(), Park([""])], model, agree=False)
    run(torch.compile(model, backend=b), torch.ones(4, 8))
    (output,) = graphs["forward"].graph.find_nodes(op="output")
    results = output.args[0][:2]
    assert results[0].target is torch.ops.aten.sigmoid.default
    assert not any(is_host_wait(n) for n in results)
    assert [s.target for s, _, _ in copies(graphs["forward"])] == [torch.ops.aten.relu.default]


def test_bad_arguments():
    with pytest.raises(TypeError, match="must be a list of FQNs, got the string 'layers'"):
        Park("layers")
    with pytest.raises(PassOrderError, match="both decide which activations are parked"):
        teb.backend("aot_eager", [Park(["a"]), Park(["b"])])
    assert Park(["a"]).uuid() != Park(["b"]).uuid()
    assert repr(Park(["a"])) == "Park(['a'])"


# -- the cost model and the scheduler -------------------------------------------------------------


def host_copies_of(model):
    return [i for i, group in enumerate(model.group) if group in (TO_HOST, FROM_HOST)]


@pytest.mark.parametrize(("stage", "stream"), [("forward", TO_HOST), ("backward", FROM_HOST)])
def test_copies_run_one_after_the_other_on_a_stream(fake_world, stage, stream):
    graphs, _ = all_parked()
    machine = teb.Machine(host_bandwidth=1e6, kernel_ms=0.003)
    model = model_of(graphs[stage].graph, machine)
    launched = host_copies_of(model)
    assert {model.group[i] for i in launched} == {stream}
    order = list_schedule(model, Options(window=8))
    timeline = Timeline.of(model, order)
    for i in launched:
        value = model.dependencies.nodes[i].meta["val"]
        assert model.ms[i] == pytest.approx(0.003 + value.numel() * value.itemsize / 1e3)
    in_time = sorted(launched, key=timeline.begin.__getitem__)
    for before, after in itertools.pairwise(in_time):
        assert timeline.begin[after] >= timeline.end[before]
    for wait, start in enumerate(model.start_of):
        assert start not in launched or timeline.begin[wait] >= timeline.end[start]
    assert timeline.step_ms >= sum(model.ms[i] for i in launched)


def test_the_scheduler_hides_copies_and_waits_for_them_under_a_bound(fake_world):
    """On a slow link the order is shorter than torch's, which waits at once, or holds less."""
    slow = teb.Machine(host_bandwidth=1e9)
    free = teb.Schedule([teb.Overlap(), teb.PeakMemory(ratio=2.0)], slow)
    steps, peaks = {}, {}
    for name, schedule in (
        ("free", free),
        ("bound", teb.Schedule([teb.Overlap(), teb.PeakMemory(ratio=1.0)], slow)),
    ):
        torch._dynamo.reset()
        _, report = compiled(Park([""]), schedule)
        (forward, _) = report.schedules
        steps[name], peaks[name] = forward.step_ms, forward.peak_bytes
    assert steps["free"][1] < 0.95 * steps["free"][0]
    assert peaks["bound"][1] <= peaks["bound"][0] < peaks["free"][1]
    assert steps["free"][1] <= steps["bound"][1] <= steps["bound"][0]


# -- two pools ------------------------------------------------------------------------------------


def in_pools(function, x):
    """Run a function of a tensor on the device."""
    import_copies()
    return TwoPools()(function, ())(x)


def _there_and_back(x, *, early=False, on_host=False, late=False, empties=False):
    ao = torch.ops.ao
    host = ao.offload.default(x)
    if late:
        return x * 2
    held = ao.wait_tensor.default(host, *((x, None) if empties else (None, x)))
    if on_host:
        return held * 2
    back = ao.reload.default(held, torch.device("cpu"), [3], [1])
    there = back if early else ao.wait_tensor.default(back, None, held)
    return there * 2


def test_values_come_back():
    x = torch.tensor([1.0, float("inf"), -0.0])
    assert torch.equal(in_pools(_there_and_back, x), x * 2)


@pytest.mark.parametrize(
    ("mistake", "match"),
    [
        ("early", "reads a copy that has not arrived"),
        ("on_host", "reads what is in host memory"),
        ("late", "returns while 1 copies are under way"),
        ("empties", "may be freed before"),
    ],
)
def test_the_pools_find_mistakes(mistake, match):
    with pytest.raises(PoolError, match=match):
        in_pools(functools.partial(_there_and_back, **{mistake: True}), torch.ones(3))


# -- real ranks -----------------------------------------------------------------------------------


def _beside_eager(rank, compiler, again, schedules, chosen):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tokens, dtypes = tokens_of(rank, 26, 4, 32), (torch.bfloat16, torch.float32)
    # A link that is as fast as memory, and a bound that no choice keeps without parking.
    fast = teb.Machine(host_bandwidth=1e15, kernel_ms=0.0, bandwidth=1e10, ranks_per_node=4)
    memory = teb.PeakMemory(ratio=0.9, host_gib=1)
    reshards = [teb.ReshardAfterForward(), Park([""])]
    if chosen:
        reshards = [teb.ReshardAfterForward("auto", memory=memory, activations=True, machine=fast)]
    pools = TwoPools()

    def made():
        torch.manual_seed(0)
        model = OneBlock(18, 26)  # uneven over four ranks
        checkpointed(*(model.layers[i] for i in again))
        return model

    def compiled(*reshards):
        model = made()
        order = teb.FSDPParamOrder.from_model(model, ["layers.0", ""])
        teb.data_parallel(model, mesh, param_dtype=dtypes[0], reduce_dtype=dtypes[1])
        passes = [teb.MatchFSDP2(), *reshards, teb.BucketByUnit(order)]
        passes += [teb.Schedule(teb.Overlap(), fast)] if schedules else []
        backend = teb.backend(pools if compiler == "pools" else compiler, passes, model)
        run = torch.compile(model, backend=backend, fullgraph=True)
        with torch._inductor.config.patch(force_disable_caches=True):  # cached graphs lack reports
            return trained(model, run, tokens), backend.last_report().rewrites

    found, rewrites = compiled(*reshards)
    kind = KeepReport if chosen else ParkReport
    (report,) = (r for r in rewrites if isinstance(r, kind))
    nbytes = report.host_bytes if chosen else report.nbytes
    if compiler == "pools":
        assert pools.parked == 3 * nbytes  # in three steps
        assert pools.most_in_flight == 1 or schedules
    if compiler == "inductor":  # which is not promised to have eager's bits
        torch._dynamo.reset()
        return compiled(reshards[0])[0], found, nbytes
    eager = eager_fsdp2(made(), ["layers.0", ""], mesh, *dtypes)
    return trained(eager, eager, tokens), found, nbytes


@pytest.mark.parametrize(
    ("compiler", "again", "schedules", "chosen"),
    [
        ("pools", (), True, True),
        at_night("pools", (0,), True, False),
        at_night("pools", (), False, False),
        at_night("aot_eager", (), True, False),
        at_night("inductor", (0,), True, False),
    ],
    ids=["chosen", "checkpointed", "not-scheduled", "aot_eager", "inductor"],
)
def test_bits_of_eager(compiler, again, schedules, chosen):
    world = 2 if compiler == "inductor" else 4
    given = compiler, again, schedules, chosen
    for expected, found, nbytes in on_ranks(_beside_eager, *given, world=world):
        assert found == expected
        assert nbytes > 0


def test_a_second_backward(fake_world):
    """With ``retain_graph``, what is parked can be fetched again."""
    found = []

    def twice(run, tokens):
        loss = run(tokens).sum()
        for _ in range(2):
            loss.backward(retain_graph=True)
            found.append(True)

    compiled(Park([""]), compiler=TwoPools(), run=twice)
    assert found == [True, True]
