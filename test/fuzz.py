"""Random graphs with odd features, and the public functions called on them with good and bad values.

    python test/fuzz.py --examples 5000 --seed 7

An example is one call. It must succeed, and then the graph lints and computes what it computed
before; or raise what its docstring names, and then the graph is what it was, node for node. Anything
else ends the run with the example's seed, which alone repeats it: ``--seed SEED --examples 1``.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from collective_graphs import C10D, run_all_ranks
from random_graphs import WORLD, Builder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torch_ext_bucketing as teb
from torch_ext_bucketing.agreement.before_run import agree
from torch_ext_bucketing.bucketing.caps import plan_by_cap
from torch_ext_bucketing.bucketing.groups import primary_group
from torch_ext_bucketing.bucketing.plan import MergePlan
from torch_ext_bucketing.fsdp.simple_fsdp import ReduceOnce
from torch_ext_bucketing.fsdp.tag_graph import tag_joint_graph
from torch_ext_bucketing.fsdp.units import UnitSpec
from torch_ext_bucketing.graph.collectives import KINDS, kind_of
from torch_ext_bucketing.graph.tags import Tag, set_tag, tag_of
from torch_ext_bucketing.passes.whole_step import whole_step_pass
from torch_ext_bucketing.reports.graph import GraphReport
from torch_ext_bucketing.reports.schedule import ScheduleReport
from torch_ext_bucketing.scheduling.machine import Level
from torch_ext_bucketing.scheduling.model import peak_bytes
from torch_ext_bucketing.scheduling.scheduler import schedule
from torch_ext_bucketing.testing.ring import init_ring_process_group, register_ring_backend
from torch_ext_bucketing.testing.sums import RingTopology

GROUPS = ("0", "1")
_aten = torch.ops.aten
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.int64)


# -- graphs ---------------------------------------------------------------------------------------


def started(b: Builder, kind: str, x: fx.Node, group: str, op: str) -> fx.Node:
    if kind == "all_gather":
        return b.op(C10D.all_gather_into_tensor.default, x, WORLD, group)
    if kind == "reduce_scatter":
        return b.op(C10D.reduce_scatter_tensor.default, x, op, WORLD, group)
    return b.op(C10D.all_reduce.default, x, op, group)


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
        val = x.meta["val"]
        what = rng.random()
        if what < 0.55:
            kind = rng.choice(KINDS)
            if kind == "reduce_scatter" and (not val.ndim or val.shape[0] % WORLD):
                if not val.ndim or rng.random() < 0.8:
                    continue
                runs = False  # chunks of several sizes
            if kind == "all_gather" and not val.ndim:
                runs = False
            start = started(b, kind, x, rng.choice(GROUPS), rng.choice(("sum", "sum", "avg")))
            for _ in range(rng.choice((0, 1, 1, 1, 1, 1, 1, 1, 2))):
                values.append(b.op(C10D.wait_tensor.default, start))
                outputs += [values[-1]] * (rng.random() < 0.8)
            if rng.random() < 0.05:
                outputs.append(start)
        elif what < 0.7:
            values.append(b.op(_aten.mul.Tensor, x, 2))
        elif what < 0.8:
            same = [v for v in values if v.meta["val"].shape == val.shape]
            values.append(b.op(_aten.add.Tensor, x, rng.choice(same)))
        elif what < 0.87 and val.ndim == 2:
            values.append(b.op(_aten.t.default, x))
        elif what < 0.9 and val.ndim == 2 and val.dtype is not torch.int64:
            values.append(b.op(_aten.mm.default, x, b.op(_aten.t.default, x)))
        elif what < 0.96:
            same = [
                v
                for v in values
                if v.meta["val"].shape == val.shape and v.meta["val"].dtype == val.dtype
            ]
            b.op(_aten.copy_.default, x, rng.choice(same))
        elif val.is_contiguous():
            group = rng.choice(GROUPS)
            outputs.append(b.op(C10D.all_reduce_.default, x, "sum", group))
        else:
            values.append(b.op(C10D.wait_tensor.default, x))
    for node in b.graph.nodes:
        kind = kind_of(node)
        if kind is not None and rng.random() < 0.8:
            fqns = tuple(f"m.{rng.choice('abc')}.w{rng.randrange(4)}" for _ in range(1))
            set_tag(node, Tag(kind, fqns))
    if rng.random() < 0.95 or not any(n.op == "call_function" for n in b.graph.nodes):
        b.graph.output(outputs)
    else:
        runs = False
    gm = fx.GraphModule({}, b.graph)
    if rng.random() < 0.04 and len(b.graph.nodes) > 2:  # out of order
        nodes = list(b.graph.nodes)
        rng.choice(nodes[:-1]).append(rng.choice(nodes[:-1]))
        runs = False
    if rng.random() < 0.04:
        for node in rng.sample(list(b.graph.nodes), len(b.graph.nodes) // 2):
            node.meta.pop("val", None)
        runs = False
    return gm, runs


def inputs_of(gm: fx.GraphModule) -> list[list[torch.Tensor]]:
    """Integers so small that sums are exact in bf16, whatever the order of addition."""
    values = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    return [
        [((torch.arange(v.numel()) * (i + 2) + rank) % 3).to(v.dtype).view(v.shape) for i, v in e]
        for rank, e in ((rank, list(enumerate(values))) for rank in range(WORLD))
    ]


def described(graph: fx.Graph) -> list[Any]:
    return [
        (n.name, n.op, n.target, str(n.args), str(n.kwargs), [u.name for u in n.users])
        for n in graph.nodes
    ]


def in_order(graph: fx.Graph) -> bool:
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        if any(arg not in seen for arg in node.all_input_nodes):
            return False
        seen.add(node)
    return True


# -- values ---------------------------------------------------------------------------------------

JUNK = (None, True, False, 0, -1, 3, 10**30, 0.5, -2.5, math.nan, math.inf, 1e308, 1e-300)
JUNK += ("", "m", "0", "layers.*", "layers.[0-9]", b"m", (), [], {}, {"0": 1}, [None], [[1]], ["m"])  # type: ignore[assignment]
JUNK += (object(), len, torch.float32, lambda *a: None, lambda *a: 1 / 0, lambda *a: math.nan)  # type: ignore[assignment]
ERRORS = (TypeError, ValueError, RuntimeError)
"""What bad values raise. Every docstring says which of them when."""


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embedding.weight


NAMES = ("", "m", "m.a", "m.b.w1", "layers", "layers.0", "layers.1.0", "layers.[0-2]", "layers.*")
NAMES += ("norm", "norm+head", "embedding", "head", "layers.9", "layers.[2-0]", "l[", "..", "a+")


class Values:
    """Draws arguments: mostly good ones, sometimes others of the right type, sometimes junk."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def junk(self, good: Callable[[], Any], share: float = 0.03) -> Any:
        return self.rng.choice(JUNK) if self.rng.random() < share else good()

    def pick(self, *values: Any) -> Any:
        return self.junk(lambda: self.rng.choice(values))

    def names(self) -> Any:
        return self.junk(
            lambda: [
                self.junk(
                    lambda: self.rng.choice(
                        (self.rng.choice(NAMES), [*self.rng.sample(NAMES, self.rng.randint(0, 3))])
                    ),
                    0.05,
                )
                for _ in range(self.rng.randint(0, 4))
            ]
        )

    def kinds(self) -> Any:
        return self.junk(lambda: self.rng.sample(KINDS, self.rng.randint(0, 3)))

    def cap(self) -> Any:
        one = self.rng.choice((1e-6, 1e-5, 1e-4, 1.0, 25, 500.0, 1e308, 10**400))
        return self.pick(one, None, {"0": one}, {("1", "all_gather"): one}, lambda i: one / (i + 1))

    def key(self) -> Any:
        rank: dict[str, float] = {}
        return self.pick(
            None,
            lambda n: rank.setdefault(n.name, self.rng.random()),
            lambda n: n.name,
            lambda n: None if self.rng.random() < 0.2 else 1,
            lambda n: self.rng.choice((1, "1")),
            lambda n: math.nan,
            lambda n: n.graph.erase_node(n),
            lambda n: n.graph.output(n),
            lambda n: n.prepend(next(iter(n.graph.nodes))),
            lambda n: n.graph.inserting_after(n).__enter__() or n.graph.placeholder("more"),
            lambda n: setattr(n, "args", ()),
            lambda n: dist.all_reduce(torch.ones(1)),
        )

    def group_filter(self) -> Any:
        return self.pick(
            None,
            primary_group,
            list,
            lambda c: c.clear(),
            lambda c: ["7"],
            lambda c: [],
            lambda c: dist.barrier() or list(c),
        )

    def eligible(self) -> Any:
        return self.pick("tag", "structure", "structure", lambda n: True, lambda n: n.args[9])

    def policy(self) -> Any:
        r = self.rng
        return r.choice(
            (
                lambda: teb.Overlap(
                    self.pick(0, 1, 3),
                    self.pick(0, 8, 100),
                    self.pick(0, 100),
                    self.pick({}, {"m.a": "m.b"}, {"m": "m.c"}, {"x": "y"}),
                ),
                lambda: teb.CapComputeRun(self.pick(1, 2, 8)),
                lambda: teb.PeakMemory(gib=self.pick(1e-300, 1e-9, 1e-7, 1.0)),
                lambda: teb.PeakMemory(ratio=self.pick(0.1, 0.9, 1.02, 3)),
                teb.Policy,  # one that neither asks for anything nor bounds anything
            )
        )()

    def policies(self) -> Any:
        made = [self.policy() for _ in range(self.rng.randint(0, 3))]
        once = list({type(p): p for p in made}.values())
        return self.junk(lambda: once if self.rng.random() < 0.95 else made)

    def machine(self) -> Any:
        return self.junk(
            lambda: teb.Machine(
                "m",
                self.pick({}, {"float32": 1e12}, {"float32": self.pick(1.0, 1e9)}),
                self.pick(1e12, 1.0),
                self.pick(1e9, 1e308),
                self.pick(0.0, 0.002),
                self.pick(
                    {},
                    {("all_gather", 2): [(8, 1.0), (64, 2.0)]},
                    {("all_gather", 2): [(8, 1.0), (64, 2.0)], ("all_reduce", 2): [(1, 0.0)]},
                    {("all_gather", (2, 2)): [(8, 1.0)]},
                ),
                **self.network(),
            )
        )

    def network(self) -> dict[str, Any]:
        levels = {
            "intra": Level(self.pick(1.0, 1e11, 1e308), self.pick(0.0, 0.01)),
            "inter": Level(1e10, 0.02),
        }
        return self.pick({}, {"ranks_per_node": 1}, {"ranks_per_node": 8, **levels})

    def options(self) -> dict[str, Any]:
        every = {
            "kinds": self.kinds,
            "eligible": self.eligible,
            "group_filter": self.group_filter,
            "non_adjacent": lambda: self.pick(True, False),
        }
        chosen = self.rng.sample(sorted(every), self.rng.randint(0, 3))
        return {name: every[name]() for name in chosen}


# -- calls ----------------------------------------------------------------------------------------


@dataclass
class Example:
    """Where a call finds its graph, and what it is allowed to raise."""

    rng: random.Random
    v: Values
    gm: fx.GraphModule
    raises: tuple[type[Exception], ...] = ERRORS
    model: nn.Module = field(default_factory=Blocks)


def _run_pass(e: Example, p: Any) -> Any:
    p.uuid()
    return p(e.gm)


def _payload(e: Example) -> dict[str, Any]:
    return {"payload_order": e.v.key()} if e.rng.random() < 0.5 else {}


def _bucket_and_schedule(e: Example) -> Any:
    options = e.v.options()
    options.pop("non_adjacent", None)
    caps = e.v.pick((1e-5, 1.0), (25.0,), (1e-6, 1e-5, 1e-4), (1e308,))
    policies, machine = e.v.policies(), e.v.machine()
    return _run_pass(
        e, teb.BucketAndSchedule(policies, caps_mb=caps, machine=machine, **options, **_payload(e))
    )


def _bucket_units(e: Example) -> Any:
    order = e.v.junk(lambda: teb.FSDPParamOrder.from_fqns([["m.b.w1", "m.a.w0"], ["m.c.w2"]]))
    units = e.rng.choice((order, e.v.names(), [["m.a", "m.b"], ["m.c"]], [["m"]]))
    payload = e.rng.choice((None, "units", e.v.key()))
    return _run_pass(e, teb.BucketUnits(units, e.v.kinds(), payload))


def _combine_uses(e: Example) -> Any:
    peak = e.v.junk(lambda: e.rng.choice((None, None, teb.PeakMemory(ratio=e.v.pick(0.5, 1.0, 3)))))
    return _run_pass(e, teb.CombineUses(peak))


def _tag_joint_graph(e: Example) -> Any:
    fqn_of = e.v.pick(None, lambda d: f"m.{d}", {0: "m.a"}, lambda d: None)
    return tag_joint_graph(e.gm, fqn_of, grad_fqns=e.v.pick(None, None, ["m.a"]))


def _order(e: Example) -> Any:
    return e.rng.choice(
        (
            lambda: teb.FSDPParamOrder.from_model(e.model, e.v.names()),
            lambda: teb.FSDPParamOrder.from_model(
                e.model, ignored_params=e.v.pick((), ["norm.weight"], "x")
            ),
            lambda: teb.FSDPParamOrder.from_fqns(e.v.names(), aliases=e.v.pick(None, {"z": "m"})),
            lambda: teb.FSDPParamOrder(e.v.names(), e.v.pick((), (("a", "m"),), (("a",),))),
            lambda: teb.FSDPParamOrder.from_fsdp(e.model),
        )
    )().uuid()


def _plan(e: Example) -> Any:
    plan = e.rng.choice(
        (
            lambda: teb.manual_plan(e.v.names(), e.model),
            lambda: teb.transformer_block_plan(
                e.model, moe_experts=e.v.pick(False, True, "experts")
            ),
            lambda: UnitSpec(e.v.names()),
        )
    )()
    return plan.uncovered(e.model)


def _set_tag(e: Example) -> Any:
    nodes = list(e.gm.graph.nodes)
    tag = Tag(e.v.pick(*KINDS), e.v.pick(("m.a",), ("m.a", "m.b"), ("",)))
    nodes = [n for n in nodes if kind_of(n) == tag.kind or e.rng.random() < 0.1]
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
    return RingTopology(e.v.pick(1, 2, 8), e.v.pick(1, 2, 4)) if e.rng.random() < 0.7 else report


def _backend(e: Example) -> Any:
    passes = e.v.junk(
        lambda: [
            e.rng.choice(
                (
                    teb.ReshardAfterForward,
                    teb.TagParameters,
                    teb.BucketByCap,
                    lambda: teb.Schedule(e.v.policies(), e.v.machine()),
                    lambda: e.rng.choice(JUNK),
                )
            )()
            for _ in range(e.rng.randint(0, 3))
        ]
    )
    made = teb.backend(
        e.v.pick("inductor", "aot_eager", "eager"),
        passes,
        prefetch=e.v.pick(None, 0, 1, 50),
    )
    return made.last_report() if e.rng.random() < 0.1 else made.passes.uuid()


def _groups(e: Example) -> Any:
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    groups = e.rng.sample(GROUPS, e.rng.randint(0, 2))
    counts = {g: {kind: e.rng.randrange(5) for kind in kinds} for g in groups}
    chosen = primary_group(counts)
    assert len(chosen) == bool(counts)
    return e.rng.choice(
        (
            lambda: register_ring_backend(),
            lambda: init_ring_process_group(0, 2, timeout=timedelta(seconds=1)),
        )
    )()


def _data_parallel(e: Example) -> Any:
    mesh = init_device_mesh("cpu", e.rng.choice(((WORLD,), (1, WORLD))))
    if e.rng.random() < 0.3:
        e.model.scale = nn.Parameter(torch.zeros(e.rng.choice(((), (0,), (3,)))))
    names = [n for n, _ in e.model.named_parameters()]
    try:
        sharded = teb.data_parallel(
            e.model,
            e.v.junk(lambda: mesh),
            e.v.pick("fully_shard", "hybrid_shard", "replicate"),
            param_dtype=e.v.pick(None, torch.bfloat16),
            reduce_dtype=e.v.pick(None, torch.float32),
        )
    except ERRORS:
        assert [n for n, _ in e.model.named_parameters()] == names
        raise
    with ReduceOnce(sharded):
        return sharded


def _recipe(e: Example) -> Any:
    if e.rng.random() < 0.8:
        teb.data_parallel(e.model, init_device_mesh("cpu", (WORLD,)))
    goal = e.v.pick("parity", "parity", "speed")
    passes = teb.recipe(
        e.v.junk(lambda: e.model),
        goal,
        units=e.rng.choice((None, e.v.names(), ["layers.0", "layers.1", ""])),
        reference=e.rng.choice((None, None, None, e.model)),
    )
    whole_step_pass(e.model, passes)
    return passes


def _separate_groups(e: Example) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    dims = e.v.pick(None, ["dp"], [0], [1], ["tp"], [])
    _run_pass(e, teb.SeparateGroups(mesh, e.v.kinds(), dims))


CALLS: dict[str, tuple[int, Callable[[Example], Any]]] = {
    "BucketAndSchedule": (8, _bucket_and_schedule),
    "BucketByCap": (
        20,
        lambda e: _run_pass(e, teb.BucketByCap(e.v.cap(), **e.v.options(), **_payload(e))),
    ),
    "BucketUnits": (12, _bucket_units),
    "plan_by_cap": (8, lambda e: plan_by_cap(e.gm.graph, e.v.cap(), **e.v.options())),
    "schedule": (
        12,
        lambda e: schedule(
            e.gm,
            e.v.policies(),
            machine=e.v.machine(),
            reference_bytes=e.v.pick(None, 0, 1, 100, 10**30),
        ),
    ),
    "Schedule": (4, lambda e: _run_pass(e, teb.Schedule(e.v.policies(), e.v.machine()))),
    "peak_bytes": (4, lambda e: peak_bytes(e.gm, e.rng.choice((None, lambda n: True)))),
    "AddByUnit": (3, lambda e: _run_pass(e, teb.AddByUnit(e.model, e.v.names()))),
    "CombineUses": (4, _combine_uses),
    "MergeAmax": (2, lambda e: _run_pass(e, teb.MergeAmax())),
    "ReduceScatterFirst": (4, lambda e: _run_pass(e, teb.ReduceScatterFirst())),
    "ReduceByAllToAll": (
        2,
        lambda e: _run_pass(
            e, teb.ReduceByAllToAll(e.v.pick(torch.float32, torch.float64, torch.int8, "fp32"))
        ),
    ),
    "ReshardAfterForward": (
        3,
        lambda e: _run_pass(e, teb.ReshardAfterForward(e.v.junk(lambda: e.rng.sample(NAMES, 2)))),
    ),
    "TagParameters": (2, lambda e: _run_pass(e, teb.TagParameters(e.rng.choice((None, e.model))))),
    "tag_joint_graph": (3, _tag_joint_graph),
    "set_tag": (2, _set_tag),
    "FSDPParamOrder": (5, _order),
    "plans": (8, _plan),
    "reports": (1, _reports),
    "backend": (3, _backend),
    "groups": (1, _groups),
    "data_parallel": (2, _data_parallel),
    "recipe": (3, _recipe),
    "agree": (2, lambda e: agree(e.gm)),
    "SeparateGroups": (2, _separate_groups),
}
# May leave an order or tags behind: what they do is told by the graph's values.
READS_ONLY = ("plan_by_cap", "peak_bytes")


class FuzzError(AssertionError):
    """An example that neither worked nor failed as it should."""


def run_example(seed: int) -> tuple[str, str]:
    """Runs one example; returns the call's name and how it ended.

    Raises:
        FuzzError: as neither documented nor harmless.
    """
    rng = random.Random(seed)
    gm, runs = odd_graph(rng)
    ordered, computes = in_order(gm.graph), [n.op for n in gm.graph.nodes].count("output")
    inputs = inputs_of(gm) if runs else []
    try:
        expected = run_all_ranks(gm, inputs) if runs else []
    except RuntimeError:  # a copy to what it overlaps with
        runs, expected = False, []
    before, nodes = described(gm.graph), list(gm.graph.nodes)
    name = rng.choices(list(CALLS), [weight for weight, _ in CALLS.values()])[0]
    example = Example(rng, Values(rng), gm)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = CALLS[name][1](example)
    except ERRORS as error:
        if described(gm.graph) != before:
            raise FuzzError(f"seed {seed}: {name} raised and changed the graph") from error
        if not str(error):
            raise FuzzError(f"seed {seed}: {name} raised without a word") from error
        return name, type(error).__name__
    except Exception as error:
        raise FuzzError(f"seed {seed}: {name}: {type(error).__name__}: {error}") from error
    if name in READS_ONLY and (described(gm.graph), list(gm.graph.nodes)) != (before, nodes):
        raise FuzzError(f"seed {seed}: {name} changed the graph")
    if ordered and computes:
        gm.graph.lint()
        if not in_order(gm.graph):
            raise FuzzError(f"seed {seed}: {name} left the graph out of order")
    reports = [result, *getattr(result, "schedules", ())]
    said = [t for r in reports for t in getattr(r, "warnings", ()) if "keeps its order" in t]
    if said and ordered:
        raise FuzzError(f"seed {seed}: {name}: {said[0]}")
    if isinstance(result, MergePlan):
        members = [m for b in result.buckets for m in b.members]
        if len(members) != len(set(members)):
            raise FuzzError(f"seed {seed}: {name} put a collective into two buckets")
    if hasattr(result, "to_json"):
        json.loads(result.to_json())
    for got, want in zip(run_all_ranks(gm, inputs) if runs else [], expected, strict=True):
        for g, w in zip(got, want, strict=True):
            if g.shape != w.shape or not torch.equal(g, w):
                raise FuzzError(f"seed {seed}: {name} changed what the graph computes")
    return name, "ok"


def start_world() -> None:
    """A fake world of ``WORLD`` ranks with two groups of all of them, named as in ``GROUPS``."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    made = (dist.group.WORLD, dist.new_group(list(range(WORLD))))
    assert tuple(g.group_name for g in made) == GROUPS  # type: ignore[union-attr]


def run(examples: int, seed: int) -> Counter[tuple[str, str]]:
    """Runs examples ``seed``, ``seed + 1``, ...; how often each call ended how."""
    return Counter(run_example(number) for number in range(seed, seed + examples))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, default=2000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first example")
    args = parser.parse_args()
    start_world()
    for (call, end), count in sorted(run(args.examples, args.seed).items()):
        print(f"{call:24}{end:>14}{count:8}")


if __name__ == "__main__":
    main()
