"""Reduce-scatter before all-reduce: hand-written graphs, and refusals."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from collective_graphs import assert_same, show
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from joint_graphs import Joint, collectives

from torch_ext_bucketing._torch.process_groups import is_inside
from torch_ext_bucketing.passes.reduce_scatter_first import on_one_grid, reduce_scatter_first

pytestmark = pytest.mark.torch

F64 = torch.float64


@pytest.fixture
def joint(fake_world):
    return Joint(shards=2, replicas=2)


def padded(joint, g):
    """Arrange a gradient of 3 rows for two shards like DTensor."""
    g = joint.reduce("w", g)
    first, second = g.split(2)
    return joint.scatter("w", torch.cat([first, F.pad(second, (0, 0, 0, 1))]))


def test_before_and_after(joint):
    gm = joint.trace(lambda g: padded(joint, g * 2)[:2], torch.zeros(3, 2))
    assert collectives(gm) == ["all_reduce", "reduce_scatter"]
    report = reduce_scatter_first(gm.graph)
    assert_expected_inline(
        show(joint.named(gm)),
        """\
def forward(self, g_1):
    mul = aten.mul.Tensor(g_1, 2)
    split = aten.split.Tensor(mul, 2)
    constant_pad_nd = aten.constant_pad_nd.default(_, [0, 0, 0, 1], 0.0)
    cat = aten.cat.default([_, constant_pad_nd])
    reduce_scatter_tensor = _c10d_functional.reduce_scatter_tensor.default(cat, 'avg', 2, 'shards')
    wait_tensor_1 = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    all_reduce = _c10d_functional.all_reduce.default(wait_tensor_1, 'avg', 'replicas')
    wait_tensor = _c10d_functional.wait_tensor.default(all_reduce)
    return _
""",
    )
    assert_expected_inline(
        report.to_text(),
        """\
reduce-scatter first:
  1 gradients; all-reduced over the replicas: 24 B -> 16 B
""",
    )
    assert report.replica_bytes == (24, 16)


def test_the_values_are_those_of_scattering_first(joint):
    def scattered_first(g):
        first, second = g.split(2)
        g = joint.scatter("w", torch.cat([first, F.pad(second, (0, 0, 0, 1))]))
        return [joint.reduce("w", g)]

    inputs = joint.inputs(((3, 2), F64))
    shape = torch.zeros(3, 2, dtype=F64)
    expected = joint.run(joint.trace(scattered_first, shape), inputs)
    gm = joint.trace(lambda g: [padded(joint, g)], shape)
    before = joint.run(gm, inputs)
    assert not all(torch.equal(a[0], b[0]) for a, b in zip(before, expected, strict=True))
    assert len(reduce_scatter_first(gm.graph).swapped) == 1
    assert collectives(gm) == ["reduce_scatter", "all_reduce"]
    assert_same(joint.run(gm, inputs), expected)


def test_a_gradient_that_is_not_in_one_piece_is_copied(joint):
    """The all-reduce made it contiguous, which a reduce-scatter requires."""

    def step(g):
        return [joint.scatter("w", joint.reduce("w", g.t()))]

    gm = joint.trace(step, torch.zeros(3, 4, dtype=F64))
    inputs = joint.inputs(((3, 4), F64), integers=True)
    expected = joint.run(gm, inputs)
    assert reduce_scatter_first(gm.graph).swapped
    assert_same(joint.run(gm, inputs), expected)  # `run` asserts that it is contiguous


def left_alone(joint, step):
    """Return the report of a rewrite that must not change the graph."""
    gm = joint.trace(step, torch.zeros(4, 2))
    before = show(gm)
    report = reduce_scatter_first(gm.graph)
    gm.recompile()
    assert show(gm) == before
    assert not report.swapped
    return report


def reduced_first(joint):
    return lambda g: [joint.scatter("w", joint.reduce("w", g))]


def test_eagers_order_is_left_as_it_is(joint):
    report = left_alone(joint, lambda g: [joint.reduce("w", joint.scatter("w", g))])
    assert (report.left, report.to_text()) == ((), "")


def _refusals(joint):
    def norm(g):
        total = joint.reduce("w", g)
        return [joint.scatter("w", total), total.norm()]

    def scaled(g):
        return [joint.scatter("w", joint.reduce("w", g) / 2)]

    def cast(g):
        return [joint.scatter("w", joint.reduce("w", g).bfloat16())]

    def ones(g):
        return [joint.scatter("w", F.pad(joint.reduce("w", g), (0, 0, 0, 4), value=1.0))]

    def largest(g):
        return [joint.scatter("w", joint.reduce("w", g, "max"))]

    def twice(g):
        total = joint.reduce("w", g)
        return [joint.scatter("w", total), joint.scatter("w", total + 1)]

    def written(g):
        total = joint.reduce("w", g)
        total.view(-1).zero_()
        return [joint.scatter("w", total)]

    return {
        norm: "reads a value between",
        scaled: "scales between",
        cast: "casts between",
        ones: "more than move values and pad with zeros",
        largest: "is neither a sum nor an average",
        twice: "reads a value between",
        written: "view reads a value between",
    }


@pytest.mark.parametrize("case", range(7))
def test_refusals(joint, case):
    step, part = list(_refusals(joint).items())[case]
    report = left_alone(joint, step)
    (left,) = report.left
    assert left.fqns == ("w",)
    assert part in left.reason
    assert left.reason in report.to_text()


def test_groups_that_are_no_grid_are_left(joint):
    # Over the shards' own group, the swapped all-reduce would add different rows up.
    for replicas in (joint.groups["shards"], dist.new_group([0, 3]).group_name):
        joint.groups["replicas"] = replicas
        (left,) = left_alone(joint, reduced_first(joint)).left
        assert "rows and columns of one grid" in left.reason


def test_a_group_inside_of_the_shards_is_left(joint):
    """With sequence parallelism, a norm's gradient is complete only after that sum."""
    shards, replicas = joint.groups["shards"], joint.groups["replicas"]
    joint.groups.update(shards=replicas, replicas=shards)
    (left,) = left_alone(joint, reduced_first(joint)).left
    assert "as with tensor parallelism" in left.reason
    assert is_inside([0, 1], [0, 2, 4])
    assert not is_inside([0, 2, 4], [0, 1])
    assert not is_inside([3], [1, 3])


def test_grids():
    for shape in itertools.product((1, 2, 3), (1, 2, 4), (1, 2, 3)):
        grid = torch.arange(shape[0] * shape[1] * shape[2]).view(shape)
        for one, other in itertools.permutations(range(3), 2):
            lines = grid.movedim((one, other), (0, 1))
            for rest in range(lines.shape[2]):
                plane = lines[:, :, rest]
                for i, j in itertools.product(*map(range, plane.shape)):
                    assert on_one_grid(plane[:, j].tolist(), plane[i].tolist())
    assert not on_one_grid([0, 3], [0, 1])
    assert not on_one_grid([1, 2], [0, 1])
    assert not on_one_grid([0, 1], [0, 1])
    assert not on_one_grid([0, 2], [1, 3])
    assert not on_one_grid([0, 2, 3], [0, 1])


@settings(max_examples=40)
@given(
    steps=st.lists(
        st.sampled_from(["split", "view", "clone", "norm", "scale", "transpose"]), max_size=4
    ),
    ops=st.tuples(st.sampled_from(["sum", "avg", "max"]), st.sampled_from(["sum", "avg"])),
    rows=st.integers(1, 5),
    seed=st.integers(0, 100),
)
@pytest.mark.parametrize("fake_world", [4], indirect=True)
def test_any_graph(fake_world, joint, steps, ops, rows, seed):
    """Sums of whole numbers stay equal, and forbidden swaps do not happen."""

    def step(g):
        extra = []
        g = joint.reduce("w", g, ops[0])
        for what in steps:
            if what == "split":
                g = torch.cat([F.pad(part, (0, 0, 0, 1)) for part in g.split(1)])
            elif what == "view":
                g = g.reshape(-1, 1, 4).flatten(1)
            elif what == "clone":
                g = g.clone()
            elif what == "transpose":
                g = g.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4)
            elif what == "scale":
                g = g * 2
            else:
                extra.append(g.sum())
        if g.shape[0] % 2:
            g = F.pad(g, (0, 0, 0, 1))
        return [joint.scatter("w", g, ops[1]), *extra]

    gm = joint.trace(step, torch.zeros(rows, 4, dtype=F64))
    original = copy.deepcopy(gm)
    report = reduce_scatter_first(gm.graph)
    allowed = ops[0] != "max" and not {"norm", "scale"} & set(steps)
    assert bool(report.swapped) == allowed
    assert len(report.swapped) + len(report.left) == 1
    in_order = ["all_reduce", "reduce_scatter"]
    assert collectives(gm) == (in_order[::-1] if allowed else in_order)
    inputs = joint.inputs(((rows, 4), F64), seed=seed, integers=True)
    # Averages over two ranks, twice, are exact for these numbers.
    assert_same(joint.run(gm, inputs), joint.run(original, inputs))
