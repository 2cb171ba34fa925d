"""One all-gather and one reduction per parameter: hand-written graphs, and refusals."""

import copy

import pytest
import torch
from collective_graphs import assert_same, show
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from joint_graphs import Joint, collectives, mark_accumulations

from torch_ext_bucketing.passes.combine_uses import combine_uses

pytestmark = pytest.mark.torch

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture
def joint(fake_world):
    return Joint(shards=2)


def two_uses(joint, write=False, second_dtype=BF16):
    """Trace a step that reads a weight twice, and its gradient."""

    def step(w, x, g):
        first = joint.gather("w", w.to(BF16))
        y = x @ first
        if write:
            w.mul_(2)
        second = joint.gather("w", w.to(second_dtype))
        y = y.to(second_dtype) @ second
        g2 = (x.t().to(second_dtype) @ g.to(second_dtype)).to(BF16 if not write else second_dtype)
        reduced2 = joint.scatter("w", g2.to(F32))
        g1 = x.t() @ (g @ first.t())
        reduced1 = joint.scatter("w", g1.to(F32))
        return y, reduced2 + reduced1

    return joint.trace(
        step, torch.randn(2, 4), torch.randn(4, 4).bfloat16(), torch.randn(4, 4).bfloat16()
    )


def test_a_gather_that_nothing_reads_saves_nothing(joint):
    def step(w, x, g):
        joint.gather("w", w.to(BF16)).view(2, 8)
        y = x @ joint.gather("w", w.to(BF16))
        return y, joint.scatter("w", (x.t() @ g).to(F32))

    gm = joint.trace(step, torch.randn(2, 4), *(torch.randn(4, 4).bfloat16() for _ in "xg"))
    assert collectives(gm) == ["all_gather", "all_gather", "reduce_scatter"]
    report = combine_uses(gm.graph)
    assert not report.combined
    assert not report.left
    assert collectives(gm) == ["all_gather", "reduce_scatter"]


def test_before_and_after(joint):
    gm = two_uses(joint)
    assert collectives(gm) == ["all_gather"] * 2 + ["reduce_scatter"] * 2
    report = combine_uses(gm.graph)
    assert_expected_inline(
        show(joint.named(gm)),
        """\
def forward(self, w_1, x_1, g_1):
    _to_copy = aten._to_copy.default(w_1, dtype = torch.bfloat16)
    all_gather_into_tensor = _c10d_functional.all_gather_into_tensor.default(_to_copy, 2, 'shards')
    wait_tensor = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
    mm = aten.mm.default(x_1, wait_tensor)
    mm_1 = aten.mm.default(mm, wait_tensor)
    t = aten.t.default(x_1)
    mm_2 = aten.mm.default(t, g_1)
    t_1 = aten.t.default(x_1)
    t_2 = aten.t.default(wait_tensor)
    mm_3 = aten.mm.default(g_1, t_2)
    mm_4 = aten.mm.default(t_1, mm_3)
    add_tensor = aten.add.Tensor(mm_2, mm_4)
    _to_copy_3 = aten._to_copy.default(add_tensor, dtype = torch.float32)
    reduce_scatter_tensor_1 = _c10d_functional.reduce_scatter_tensor.default(_to_copy_3, 'avg', 2, 'shards')
    wait_tensor_3 = _c10d_functional.wait_tensor.default(reduce_scatter_tensor_1)
    return (mm_1, wait_tensor_3)
""",
    )
    assert_expected_inline(
        report.to_text(),
        """\
uses combined:
  w: 2 gathers -> 1; 2 reductions -> 1, added in bfloat16; saves 96 B
""",
    )


def test_an_addition_that_is_not_of_autograd_stays_one_summand(joint):
    def step(w, a, b, c):
        first, second = joint.gather("w", w), joint.gather("w", w)
        reduced1 = joint.scatter("w", first * a + first * c)
        reduced2 = joint.scatter("w", second * b)
        return reduced1 + reduced2

    gm = joint.trace(step, torch.randn(2, 4), *(torch.randn(4, 4) for _ in range(3)))
    inputs = joint.inputs(((2, 4), F32), *[((4, 4), F32)] * 3)
    combine_uses(gm.graph)
    adds = [n for n in gm.graph.nodes if n.target is torch.ops.aten.add.Tensor]
    assert [[a.name for a in n.args] for n in adds] == [["mul", "mul_1"], ["add", "mul_2"]]
    assert len(joint.run(gm, inputs)) == joint.world


def refused(gm, part):
    """Return the report of a rewrite that must not change the graph."""
    before = show(gm)
    report = combine_uses(gm.graph)
    gm.recompile()
    assert show(gm) == before
    assert not report.combined
    assert any(part in left.reason for left in report.left), report.left
    assert part in report.to_text()
    return report


def refusals(joint):
    def written(w, a, b):
        first = joint.gather("w", w)
        y = first * 2
        first.mul_(3)
        return y, joint.gather("w", w) * first

    def read_elsewhere(w, a, b):
        full = joint.gather("w", w)
        r1, r2 = joint.scatter("w", full * a), joint.scatter("w", full * b)
        return r1 + r2, r1.norm()

    def other_kinds(w, a, b):
        full = joint.gather("w", w)
        return joint.scatter("w", full * a) + joint.scatter("w", full * b, "sum")

    return {
        written: "writes to the result of",
        read_elsewhere: "reads a gradient that is reduced separately",
        other_kinds: "reduced in different ways",
    }


def test_refusals(joint):
    report = refused(two_uses(joint, write=True), "mul_ writes to it between its uses")
    assert [left.fqns for left in report.left] == [("w",)]
    refused(two_uses(joint, second_dtype=F32), "in bfloat16, float32")
    for step, part in refusals(joint).items():
        inputs = torch.randn(2, 4), torch.randn(4, 4), torch.randn(4, 4)
        refused(joint.trace(step, *inputs), part)


def test_what_is_added_besides_stays(joint):
    """A penalty on the shard itself is not a reduced gradient."""

    def step(w, a, b):
        full = joint.gather("w", w)
        r1 = joint.scatter("w", full * a)
        r2 = joint.scatter("w", full * b)
        return (r1 + w * 0.5) + r2

    gm = joint.trace(step, torch.randn(2, 4), torch.randn(4, 4), torch.randn(4, 4))
    inputs = joint.inputs(((2, 4), F32), ((4, 4), F32), ((4, 4), F32), integers=True)
    expected = joint.run(gm, inputs)
    report = combine_uses(gm.graph)
    assert report.combined[0].reductions == (2, 1)
    assert collectives(gm) == ["all_gather", "reduce_scatter"]
    assert_same(joint.run(gm, inputs), expected)


def test_a_parameter_that_is_gathered_in_two_steps(joint):
    """A parameter sharded over two mesh dimensions has a gather after a gather."""

    def step(w, a, b):
        return [joint.gather("w", joint.gather("w", w)) * x for x in (a, b)]

    gm = joint.trace(step, torch.randn(1, 4), torch.randn(4, 4), torch.randn(4, 4))
    assert collectives(gm) == ["all_gather"] * 4
    combine_uses(gm.graph)
    assert collectives(gm) == ["all_gather"] * 2


def test_a_scale_that_is_used_after_the_gather_is_computed_once(joint):
    def step(w, x):
        def read():
            scale = joint.reduce("scale", w.abs().max(), "max")
            return joint.gather("w", w / scale) * scale

        return x @ read() @ read()

    gm = joint.trace(step, torch.randn(2, 4), torch.randn(4, 4))
    assert collectives(gm) == ["all_reduce", "all_gather"] * 2
    combine_uses(gm.graph)
    assert collectives(gm) == ["all_reduce", "all_gather"]


# --- any graph -----------------------------------------------------------------------


@st.composite
def programs(draw):
    """Draw parameters, and the events of a step.

    ``("read", parameter)``: gathers it anew; ``("use", parameter)``: uses what was read last;
    ``("write", parameter)``: changes the shard in place.
    """
    parameters = draw(st.integers(1, 3))
    events = []
    for _ in range(draw(st.integers(2, 9))):
        kind = draw(st.sampled_from(["read", "use", "use", "use", "write"]))
        events.append((kind, draw(st.integers(0, parameters - 1))))
    return {
        "parameters": parameters,
        "events": events,
        "rows": draw(st.sampled_from([2, 3])),
        "dtype": draw(st.sampled_from([torch.float64, torch.float32])),
        "replicas": draw(st.sampled_from([None, "first", "last"])),
        "pad": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


def written(program):
    return {p for kind, p in program["events"] if kind == "write"}


def has_unread_gathers(program):
    used = {}
    for kind, p in program["events"]:
        if kind == "read" and used.get(p) is False:
            return True
        if kind != "write":
            used[p] = kind == "use"
    return False in used.values()


def build(program, joint, per_use):
    """Trace a program, with gathers and reductions per read, or one per parameter."""
    dtype, rows = program["dtype"], program["rows"]
    full_rows = rows * joint.shards - program["pad"]  # of the parameter; the last shard is padded

    def gather(p, shard):
        full = joint.gather(f"p{p}", shard.to(dtype))
        return full[:full_rows] if program["pad"] else full

    def reduce(p, grad):
        grad = grad.to(torch.float64)
        if program["pad"]:
            grad = torch.nn.functional.pad(grad, (0, 0, 0, 1))
        if program["replicas"] == "first":
            grad = joint.reduce(f"p{p}", grad)
        grad = joint.scatter(f"p{p}", grad)
        return joint.reduce(f"p{p}", grad) if program["replicas"] == "last" else grad

    def step(*inputs):
        shards, data = inputs[: program["parameters"]], list(inputs[program["parameters"] :])
        reads, uses, outputs = {}, [], []
        for kind, p in program["events"]:
            if kind == "write":
                shards[p].mul_(2)
                continue
            if p not in reads or (kind == "read" and per_use):
                reads[p] = (len(uses), p, gather(p, shards[p]))
            if kind == "use":
                uses.append((reads[p], data[len(uses)]))
                outputs.append(reads[p][2].to(torch.float64) * uses[-1][1])
        pending, grads = {}, {}
        for (read, p, full), x in reversed(uses):
            grad = full * x.to(dtype)
            pending[read, p] = pending[read, p] + grad if (read, p) in pending else grad
            last = not any(r[:2] == (read, p) for r, _ in uses[: _index(uses, x)])
            if last and per_use:
                reduced = reduce(p, pending.pop((read, p)))
                grads[p] = grads[p] + reduced if p in grads else reduced
        for (_, p), grad in pending.items():
            grads[p] = reduce(p, grad)
        return [*outputs, *(grads[p] for p in sorted(grads))]

    def _index(uses, x):
        return next(i for i, (_, y) in enumerate(uses) if y is x)

    uses = sum(kind == "use" for kind, _ in program["events"])
    f64 = torch.float64
    shapes = [((rows, 2), f64)] * program["parameters"] + [((full_rows, 2), f64)] * uses
    gm = joint.trace(step, *(torch.zeros(s, dtype=d) for s, d in shapes))
    mark_accumulations(gm)
    return gm, shapes


@pytest.mark.parametrize("fake_world", [4], indirect=True)
@settings(max_examples=60)
@given(program=programs())
def test_any_graph(fake_world, grids, program):
    joint = grids[program["replicas"] is not None]
    gm, shapes = build(program, joint, per_use=True)
    original = copy.deepcopy(gm)
    report = combine_uses(gm.graph)
    gm.recompile()
    combined = {c.fqns[0] for c in report.combined if c.reductions[0] > c.reductions[1]}
    if not report.combined:
        if not has_unread_gathers(program):
            assert show(gm) == show(original)  # else gathers that nothing reads are gone
        assert bool(report.to_text()) == bool(report.left)
    used = [p for kind, p in program["events"] if kind == "use"]

    # Gradients are not added across a write to the parameter. All others are reduced once.
    for p in range(program["parameters"]):
        mine = [kind_p for kind_p in collectives_of(gm, f"p{p}") if kind_p == "reduce_scatter"]
        if p in written(program):
            before = collectives_of(original, f"p{p}").count("reduce_scatter")
            assert len(mine) == before or f"p{p}" in combined
        else:
            assert len(mine) == (p in used)
            assert collectives_of(gm, f"p{p}").count("all_gather") <= 1

    # Whole numbers have the same sum in any order.
    whole = joint.inputs(*shapes, seed=program["seed"], integers=True)
    assert_same(joint.run(gm, whole), joint.run(original, whole))

    # Fractions do not. Only gradients that are added in another order may differ, and they have the
    # bits of a step with one gather and one reduction from the start.
    inputs = joint.inputs(*shapes, seed=program["seed"])
    found, before = joint.run(gm, inputs), joint.run(original, inputs)
    eager = joint.run(build(program, joint, per_use=False)[0], inputs)
    grads = sorted(set(used))
    for rank in range(joint.world):
        for i, value in enumerate(found[rank]):
            at = i - len(used)
            if at < 0 or f"p{grads[at]}" not in combined:
                assert torch.equal(value, before[rank][i])
            if at >= 0 and grads[at] not in written(program):
                assert torch.equal(value, eager[rank][i])


@pytest.fixture
def grids(fake_world):
    return [Joint(shards=2), Joint(shards=2, replicas=2)]


def collectives_of(gm, fqn):
    from torch_ext_bucketing.graph.nodes import tag_of

    return [t.kind for n in gm.graph.nodes if (t := tag_of(n)) is not None and t.fqns == (fqn,)]
