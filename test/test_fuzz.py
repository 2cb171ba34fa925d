"""Random graphs with odd features, and the public functions called on them with good and bad values.

An example is one call. It must succeed, and then the graph lints and computes what it computed
before; or raise what its docstring names, and then the graph is what it was, node for node. An
error names the example's seed, which alone repeats it: ``run_example(name, seed)``.
"""

import json
import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from collective_graphs import C10D, assert_same, fake_group, run_all_ranks
from random_graphs import WORLD, Builder, real_inputs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torch_ext_bucketing as teb
from torch_ext_bucketing.agreement.before_run import agree
from torch_ext_bucketing.bucketing.caps import ByCap
from torch_ext_bucketing.bucketing.groups import chosen_groups
from torch_ext_bucketing.bucketing.plan import MergePlan
from torch_ext_bucketing.fsdp.simple_fsdp import ReduceOnce
from torch_ext_bucketing.fsdp.tag_graph import tag_joint_graph
from torch_ext_bucketing.fsdp.units import UnitSpec
from torch_ext_bucketing.graph.collectives import KINDS, kind_of
from torch_ext_bucketing.graph.tags import Tag, set_tag, tag_of
from torch_ext_bucketing.passes.whole_step import whole_step_pass
from torch_ext_bucketing.planner.cost.machine import Level
from torch_ext_bucketing.planner.schedule.model import peak_bytes
from torch_ext_bucketing.planner.schedule.scheduler import schedule
from torch_ext_bucketing.reports.graph import GraphReport
from torch_ext_bucketing.reports.schedule import ScheduleReport
from torch_ext_bucketing.testing.ring import init_ring_process_group, register_ring_backend
from torch_ext_bucketing.testing.sums import RingTopology

GROUPS = ("0", "1")
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.int64)
_aten = torch.ops.aten


@pytest.fixture(scope="module", autouse=True)
def two_groups_of_all_ranks() -> Iterator[None]:
    with fake_group(WORLD):
        made = (dist.group.WORLD, dist.new_group(list(range(WORLD))))
        assert tuple(g.group_name for g in made) == GROUPS
        yield


# -- graphs ---------------------------------------------------------------------------------------


def odd_graph(rng: random.Random) -> tuple[fx.GraphModule, bool]:
    """A graph, and whether ``run_all_ranks`` can run it and it is in order."""
    b = Builder()
    runs = True
    values: list[fx.Node] = []
    for _ in range(rng.randint(0, 5)):
        dims = rng.choice((0, 1, 1, 1, 2, 2))
        shape = tuple(rng.choice((0, 1, 2, 2, 4, 6)) for _ in range(dims))
        values.append(b.shaped(shape, rng.choice(DTYPES)))
    outputs: list[fx.Node] = []
    for _ in range(rng.randint(0, 14) if values else 0):
        x = rng.choice(b.leaves if rng.random() < 0.5 else values)
        val, group = x.meta["val"], rng.choice(GROUPS)
        alike = [v for v in values if v.meta["val"].shape == val.shape]
        what = rng.random()
        if what < 0.55:
            kind, op = rng.choice(KINDS), rng.choice(("sum", "sum", "avg"))
            divides = val.ndim and val.shape[0] % WORLD == 0
            if kind == "reduce_scatter" and not divides:
                if not val.ndim or rng.random() < 0.8:
                    continue
                runs = False  # chunks of several sizes
            if kind == "all_gather" and not val.ndim:
                runs = False
            target, *args = {
                "all_gather": (C10D.all_gather_into_tensor.default, WORLD),
                "reduce_scatter": (C10D.reduce_scatter_tensor.default, op, WORLD),
                "all_reduce": (C10D.all_reduce.default, op),
            }[kind]
            start = b.op(target, x, *args, group)
            for _ in range(rng.choice((0, 1, 1, 1, 1, 1, 1, 1, 2))):
                values.append(b.op(C10D.wait_tensor.default, start))
                outputs += [values[-1]] * (rng.random() < 0.8)
            if rng.random() < 0.05:
                outputs.append(start)
        elif what < 0.7:
            values.append(b.op(_aten.mul.Tensor, x, 2))
        elif what < 0.8:
            values.append(b.op(_aten.add.Tensor, x, rng.choice(alike)))
        elif what < 0.87 and val.ndim == 2:
            values.append(b.op(_aten.t.default, x))
        elif what < 0.9 and val.ndim == 2 and val.dtype is not torch.int64:
            values.append(b.op(_aten.mm.default, x, b.op(_aten.t.default, x)))
        elif what < 0.96:
            same = [v for v in alike if v.meta["val"].dtype == val.dtype]
            b.op(_aten.copy_.default, x, rng.choice(same))
        elif val.is_contiguous():
            outputs.append(b.op(C10D.all_reduce_.default, x, "sum", group))
        else:
            values.append(b.op(C10D.wait_tensor.default, x))
    for node in b.graph.nodes:
        kind = kind_of(node)
        if kind is not None and rng.random() < 0.8:
            set_tag(node, Tag(kind, (f"m.{rng.choice('abc')}.w{rng.randrange(4)}",)))
    if rng.random() < 0.95 or not any(n.op == "call_function" for n in b.graph.nodes):
        b.graph.output(outputs)
    else:
        runs = False
    nodes = list(b.graph.nodes)
    if rng.random() < 0.04 and len(nodes) > 2:  # out of order
        rng.choice(nodes[:-1]).append(rng.choice(nodes[:-1]))
        runs = False
    if rng.random() < 0.04:
        for node in rng.sample(nodes, len(nodes) // 2):
            node.meta.pop("val", None)
        runs = False
    return fx.GraphModule({}, b.graph), runs


def described(graph: fx.Graph) -> list[Any]:
    return [
        (n.name, n.op, n.target, str(n.args), str(n.kwargs), [u.name for u in n.users])
        for n in graph.nodes
    ]


def in_order(graph: fx.Graph) -> bool:
    place = {node: i for i, node in enumerate(graph.nodes)}
    return all(place[arg] < i for node, i in place.items() for arg in node.all_input_nodes)


# -- values ---------------------------------------------------------------------------------------

JUNK: tuple[Any, ...] = (None, True, False, 0, -1, 3, 10**30, 0.5, -2.5, math.nan, math.inf)
JUNK += (1e308, 1e-300, "", "m", "0", "layers.*", "layers.[0-9]", b"m", (), [], {}, {"0": 1})
JUNK += ([None], [[1]], ["m"], object(), len, torch.float32)
JUNK += (lambda *a: None, lambda *a: 1 / 0, lambda *a: math.nan)
ERRORS = (TypeError, ValueError, RuntimeError)
"""What bad values raise. Every docstring says which of them when."""

NAMES = ("", "m", "m.a", "m.b.w1", "layers", "layers.0", "layers.1.0", "layers.[0-2]", "layers.*")
NAMES += ("norm", "norm+head", "embedding", "head", "layers.9", "layers.[2-0]", "l[", "..", "a+")


def number_of(node: fx.Node) -> int:
    """By its name."""
    return sum(map(ord, node.name))


KEYS: tuple[Any, ...] = (
    None,
    lambda n: number_of(n) % 7,
    lambda n: n.name,
    lambda n: None if number_of(n) % 5 == 0 else 1,
    lambda n: (1, "1")[number_of(n) % 2],
    lambda n: math.nan,
    lambda n: n.graph.erase_node(n),
    lambda n: n.graph.output(n),
    lambda n: n.prepend(next(iter(n.graph.nodes))),
    lambda n: n.graph.inserting_after(n).__enter__() or n.graph.placeholder("more"),
    lambda n: setattr(n, "args", ()),
    lambda n: dist.all_reduce(torch.ones(1)),
)
CHOSEN_GROUPS: tuple[Any, ...] = (None, "primary", ["0"], ("0", "1"), ["7"], [])
ELIGIBLE = ("tag", "structure", "structure", lambda n: True, lambda n: n.args[9])
CAPS = (1e-6, 1e-5, 1e-4, 1.0, 25, 500.0, 1e308, 10**400)
TABLES: tuple[Any, ...] = (
    {},
    {("all_gather", 2): [(8, 1.0), (64, 2.0)]},
    {("all_gather", 2): [(8, 1.0), (64, 2.0)], ("all_reduce", 2): [(1, 0.0)]},
    {("all_gather", (2, 2)): [(8, 1.0)]},
)


UNITS = ["layers.0", "layers.1", "layers.2", ""]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embedding.weight


class Example:
    """A graph, a model, and arguments: mostly good ones, sometimes others of the right type,
    sometimes junk."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.gm, self.runs = odd_graph(self.rng)
        self.model = Blocks()

    def junk(self, good: Callable[[], Any]) -> Any:
        return self.rng.choice(JUNK) if self.rng.random() < 0.03 else good()

    def pick(self, *values: Any) -> Any:
        return self.junk(lambda: self.rng.choice(values))

    def call(self, *ways: Callable[[], Any]) -> Any:
        return self.rng.choice(ways)()

    def some(self, values: Sequence[Any], most: int) -> list[Any]:
        return self.rng.sample(values, self.rng.randint(0, most))

    def names(self) -> Any:
        one = partial(self.call, lambda: self.pick(*NAMES), lambda: self.some(NAMES, 3))
        return self.junk(lambda: [one() for _ in range(self.rng.randint(0, 4))])

    def kinds(self) -> Any:
        return self.junk(lambda: self.some(KINDS, 3))

    def cap(self) -> Any:
        one = self.rng.choice(CAPS)
        return self.pick(one, None, {"0": one}, {("1", "all_gather"): one}, lambda i: one / (i + 1))

    def policy(self) -> Any:
        under = ({}, {"m.a": "m.b"}, {"m": "m.c"}, {"x": "y"})
        return self.call(
            lambda: teb.Overlap(
                self.pick(0, 1, 3), self.pick(0, 8, 100), self.pick(0, 100), self.pick(*under)
            ),
            lambda: teb.CapComputeRun(self.pick(1, 2, 8)),
            lambda: teb.PeakMemory(gib=self.pick(1e-300, 1e-9, 1e-7, 1.0)),
            lambda: teb.PeakMemory(ratio=self.pick(0.1, 0.9, 1.02, 3)),
            teb.Policy,  # one that neither asks for anything nor bounds anything
        )

    def policies(self) -> Any:
        made = [self.policy() for _ in range(self.rng.randint(0, 3))]
        once = list({type(p): p for p in made}.values())
        return self.junk(lambda: once if self.rng.random() < 0.95 else made)

    def machine(self) -> Any:
        rates = self.pick({}, {"float32": 1e12}, {"float32": self.pick(1.0, 1e9)})
        intra = Level(self.pick(1.0, 1e11, 1e308), self.pick(0.0, 0.01))
        levels = {"ranks_per_node": 8, "intra": intra, "inter": Level(1e10, 0.02)}
        times = self.pick(1e12, 1.0), self.pick(1e9, 1e308), self.pick(0.0, 0.002)
        network = self.rng.choice(({}, {"ranks_per_node": 1}, levels))
        return self.junk(lambda: teb.Machine("m", rates, *times, self.pick(*TABLES), **network))

    def options(self, *names: str) -> dict[str, Any]:
        every: dict[str, Callable[[], Any]] = {
            "kinds": self.kinds,
            "eligible": partial(self.pick, *ELIGIBLE),
            "groups": partial(self.pick, *CHOSEN_GROUPS),
            "non_adjacent": partial(self.pick, True, False),
            "payload_order": partial(self.pick, *KEYS),
        }
        return {name: every[name]() for name in self.some(names or tuple(every), 3)}


# -- calls ----------------------------------------------------------------------------------------


def _bucket_and_schedule(e: Example) -> Any:
    options = e.options("kinds", "eligible", "groups", "payload_order")
    caps = e.pick((1e-5, 1.0), (25.0,), (1e-6, 1e-5, 1e-4), (1e308,))
    return teb.BucketAndSchedule(e.policies(), caps_mb=caps, machine=e.machine(), **options)


def _bucket_units(e: Example) -> Any:
    order = e.junk(lambda: teb.FSDPParamOrder.from_fqns([["m.b.w1", "m.a.w0"], ["m.c.w2"]]))
    units = e.rng.choice((order, e.names(), [["m.a", "m.b"], ["m.c"]], [["m"]]))
    return teb.BucketUnits(units, e.kinds(), e.rng.choice((None, "units", e.pick(*KEYS))))


def _by_cap(e: Example) -> Any:
    options = e.options("kinds", "eligible", "groups", "non_adjacent")
    return ByCap(e.cap(), **options).plan(e.gm.graph)


def _schedule(e: Example) -> Any:
    reference = e.junk(lambda: e.rng.choice((None, 0, 1, 100, 10**30)))
    return schedule(e.gm, e.policies(), machine=e.machine(), reference_bytes=reference)


def _tag_joint_graph(e: Example) -> Any:
    fqn_of = e.pick(None, lambda d: f"m.{d}", {0: "m.a"}, lambda d: None)
    return tag_joint_graph(e.gm, fqn_of, grad_fqns=e.pick(None, None, ["m.a"]))


def _order(e: Example) -> Any:
    make = teb.FSDPParamOrder
    ignored = e.pick((), ["norm.weight"], "x")
    return e.call(
        lambda: make.from_model(e.model, e.names()),
        lambda: make.from_model(e.model, ignored_params=ignored),
        lambda: make.from_fqns(e.names(), aliases=e.pick(None, {"z": "m"})),
        lambda: make(e.names(), e.pick((), (("a", "m"),), (("a",),))),
        lambda: make.from_fsdp(e.model),
    ).uuid()


def _plan(e: Example) -> Any:
    experts = e.pick(False, True, "experts")
    return e.call(
        lambda: teb.manual_plan(e.names(), e.model),
        lambda: teb.transformer_block_plan(e.model, moe_experts=experts),
        lambda: UnitSpec(e.names()),
    ).uncovered(e.model)


def _set_tag(e: Example) -> Any:
    tag = Tag(e.pick(*KINDS), e.pick(("m.a",), ("m.a", "m.b"), ("",)))
    nodes = [n for n in e.gm.graph.nodes if kind_of(n) == tag.kind or e.rng.random() < 0.1]
    if nodes:
        node = e.rng.choice(nodes)
        set_tag(node, tag)
        assert tag_of(node) == tag
    return tag


def _reports(e: Example) -> Any:
    """Reports that say nothing, and ring topologies."""
    report = teb.CompileReport([GraphReport("forward", {}, {})], schedules=[])
    json.loads(report.to_json())
    ScheduleReport(policies=()).to_text()
    return RingTopology(e.pick(1, 2, 8), e.pick(1, 2, 4)) if e.rng.random() < 0.7 else report


def _backend(e: Example) -> Any:
    kinds = (teb.ReshardAfterForward, teb.TagParameters, teb.BucketByCap)
    some = partial(
        e.call, *kinds, lambda: teb.Schedule(e.policies(), e.machine()), lambda: e.rng.choice(JUNK)
    )
    passes = e.junk(lambda: [some() for _ in range(e.rng.randint(0, 3))])
    prefetch = e.pick(None, 0, 1, 50)
    made = teb.backend(e.pick("inductor", "aot_eager", "eager"), passes, prefetch=prefetch)
    return made.last_report() if e.rng.random() < 0.1 else made.passes.uuid()


def _groups(e: Example) -> Any:
    counts = {g: {kind: e.rng.randrange(5) for kind in KINDS} for g in e.some(GROUPS, 2)}
    assert len(chosen_groups("primary", counts)) == bool(counts)
    wait = timedelta(seconds=1)
    return e.call(register_ring_backend, lambda: init_ring_process_group(0, 2, timeout=wait))


def _data_parallel(e: Example) -> Any:
    mesh = init_device_mesh("cpu", e.rng.choice(((WORLD,), (1, WORLD))))
    if e.rng.random() < 0.3:
        e.model.scale = nn.Parameter(torch.zeros(e.rng.choice(((), (0,), (3,)))))
    names = [n for n, _ in e.model.named_parameters()]
    mode = e.pick("fully_shard", "hybrid_shard", "replicate")
    dtypes = {
        "param_dtype": e.pick(None, torch.bfloat16),
        "reduce_dtype": e.pick(None, torch.float32),
    }
    try:
        sharded = teb.data_parallel(e.model, e.junk(lambda: mesh), mode, **dtypes)
    except ERRORS:
        assert [n for n, _ in e.model.named_parameters()] == names
        raise
    with ReduceOnce(sharded):
        return sharded


def _recipe(e: Example) -> Any:
    if e.rng.random() < 0.8:
        teb.data_parallel(e.model, init_device_mesh("cpu", (WORLD,)))
    units = e.rng.choice((None, e.names(), UNITS))
    reference = e.rng.choice((None, None, None, e.model))
    goal, model = e.pick("parity", "parity", "speed"), e.junk(lambda: e.model)
    passes = teb.recipe(model, goal, units=units, reference=reference)
    whole_step_pass(e.model, passes)
    return passes


def _separate_groups(e: Example) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return teb.SeparateGroups(mesh, e.kinds())


WIDE = (torch.float32, torch.float64, torch.int8, "fp32")
CALLS: dict[str, tuple[int, Callable[[Example], Any]]] = {
    "BucketAndSchedule": (40, _bucket_and_schedule),
    "BucketByCap": (100, lambda e: teb.BucketByCap(e.cap(), **e.options())),
    "BucketUnits": (60, _bucket_units),
    "ByCap": (40, _by_cap),
    "schedule": (60, _schedule),
    "Schedule": (20, lambda e: teb.Schedule(e.policies(), e.machine())),
    "peak_bytes": (20, lambda e: peak_bytes(e.gm, e.rng.choice((None, lambda n: True)))),
    "AddByUnit": (15, lambda e: teb.AddByUnit(e.model, e.rng.choice((e.names(), UNITS)))),
    "CombineUses": (20, lambda e: teb.CombineUses()),
    "MergeAmax": (10, lambda e: teb.MergeAmax()),
    "ReduceScatterFirst": (20, lambda e: teb.ReduceScatterFirst()),
    "ReduceByAllToAll": (10, lambda e: teb.ReduceByAllToAll(e.pick(*WIDE))),
    "ReshardAfterForward": (15, lambda e: teb.ReshardAfterForward(e.pick(e.some(NAMES, 2)))),
    "TagParameters": (10, lambda e: teb.TagParameters(e.rng.choice((None, e.model)))),
    "tag_joint_graph": (15, _tag_joint_graph),
    "set_tag": (10, _set_tag),
    "FSDPParamOrder": (25, _order),
    "plans": (40, _plan),
    "reports": (5, _reports),
    "backend": (15, _backend),
    "groups": (5, _groups),
    "data_parallel": (10, _data_parallel),
    "recipe": (15, _recipe),
    "agree": (10, lambda e: agree(e.gm)),
    "SeparateGroups": (10, _separate_groups),
}
"""How many examples of each, and what makes one; a pass that it returns runs on the graph."""

READS_ONLY = ("ByCap", "peak_bytes")
"""All others may leave an order or tags behind: what they do is told by the graph's values."""


def run_example(name: str, seed: int) -> str:
    """How one example ended: the name of an error that it may raise, or ``"ok"``."""
    e = Example(seed)
    graph = e.gm.graph
    ordered = in_order(graph) and any(n.op == "output" for n in graph.nodes)
    inputs, expected = real_inputs(e.gm) if e.runs else [], []
    try:
        expected = run_all_ranks(e.gm, inputs) if e.runs else []
    except RuntimeError:  # a copy to what it overlaps with
        e.runs = False
    before, nodes = described(graph), list(graph.nodes)
    ended: Exception | None = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = CALLS[name][1](e)
            if isinstance(result, teb.GraphPass):
                result.uuid()
                result = result(e.gm)
    except ERRORS as error:
        ended = error
    if ended is not None:
        assert described(graph) == before, "it raised and changed the graph"
        assert str(ended), "it raised without a word"
        return type(ended).__name__
    if name in READS_ONLY:
        assert (described(graph), list(graph.nodes)) == (before, nodes)
    reports = [result, *getattr(result, "schedules", ())]
    if ordered:
        graph.lint()
        assert in_order(graph)
        said = [text for r in reports for text in getattr(r, "warnings", ())]
        assert not [text for text in said if "keeps its order" in text]
    if isinstance(result, MergePlan):
        members = [m for b in result.buckets for m in b.members]
        assert len(members) == len(set(members)), "a collective is in two buckets"
    if hasattr(result, "to_json"):
        json.loads(result.to_json())
    assert_same(run_all_ranks(e.gm, inputs) if e.runs else [], expected)
    return "ok"


# What an example calls by another name than its own, and what only describes results.
ELSEWHERE = {"CompileReport", "manual_plan", "transformer_block_plan"}
ELSEWHERE |= {"Overlap", "CapComputeRun", "PeakMemory", "Policy", "Machine"}
NOT_CALLED = {"BoundNotKeptWarning", "GraphPass", "NotBucketedWarning"}
NOT_CALLED |= {"PlanMismatchError", "RankMissingError"}
NOT_CALLED |= {"AllToAllAllReduce", "AllToAllReduceScatter"}  # eager FSDP2 calls it, on ranks


def test_every_public_name_is_called():
    assert set(teb.__all__) - NOT_CALLED <= set(CALLS) | ELSEWHERE


@pytest.mark.parametrize("name", CALLS)
def test_a_call_works_or_says_why_not_and_leaves_the_graph(name):
    ended: Counter[str] = Counter()
    for seed in range(20_000, 20_000 + CALLS[name][0]):
        try:
            ended[run_example(name, seed)] += 1
        except Exception as error:
            error.add_note(f"run_example({name!r}, {seed})")
            raise
    assert ended["ok"], "some values are good"
