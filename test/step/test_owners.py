"""Owners, buckets and routes of matrices, as functions of shapes."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from torch_ext_bucketing.step.owners import (
    Matrix,
    Piece,
    Rectangle,
    Routes,
    choose_buckets,
    choose_owners,
    newton_schulz_flops,
    tiles,
)

costs = st.lists(st.integers(1, 1000), min_size=1, max_size=60)


def loads_of(costs, owners, ranks) -> list[int]:
    return [sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(ranks)]


def test_flops_are_those_of_three_products():
    # X X^T is [2, 2] from [2, 3]: 2*2*2*3; its square 2*2*2*2; the product with X 2*2*2*3.
    assert newton_schulz_flops(2, 3, 1) == newton_schulz_flops(3, 2, 1) == 24 + 16 + 24
    assert newton_schulz_flops(2, 3, 5) == 5 * 64


@given(costs, st.integers(1, 12))
def test_owners_are_balanced(costs, ranks):
    loads = [0] * ranks
    owners = choose_owners(costs, loads)
    assert loads == loads_of(costs, owners, ranks)
    # The least possible load is at least each of these; Graham's bound is 4/3 - 1/(3 ranks) of it.
    ordered = sorted(costs, reverse=True)
    two = sum(ordered[ranks - 1 : ranks + 1]) if len(costs) > ranks else 0
    if max(loads) > max(sum(costs) / ranks, ordered[0], two):
        # The last matrix of the busiest rank went to the rank with the least load.
        last = min(c for c, o in zip(costs, owners, strict=True) if loads[o] == max(loads))
        assert max(loads) - last <= min(loads)
    assert owners == choose_owners(costs, [0] * ranks)
    if len(costs) <= ranks:
        assert len(set(owners)) == len(costs)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 7)), min_size=1), st.integers(1, 4))
def test_stacks_stay_together(found, ranks):
    costs, stacks = zip(*found, strict=True)
    owners = choose_owners(costs, [0] * ranks)
    buckets = choose_buckets(costs, costs, owners, 1, 1, stacks=stacks)
    assert sorted(itertools.chain(*buckets)) == list(range(len(costs)))
    for of in buckets:
        here = [{stacks[i] for i in of if owners[i] == rank} for rank in range(ranks)]
        assert max(map(len, here)) == 1
        assert {i for i, s in enumerate(stacks) if s in set().union(*here)} == set(of)


@given(costs, st.integers(1, 6), st.integers(1, 3000), st.integers(1, 500))
def test_buckets_have_every_matrix_once_and_keep_the_cap(costs, ranks, cap, least):
    owners = choose_owners(costs, [0] * ranks)
    buckets = choose_buckets(costs, costs, owners, cap, least)
    assert sorted(itertools.chain(*buckets)) == list(range(len(costs)))
    assert all(buckets)
    for of in buckets:
        for rank in range(ranks):
            mine = [costs[i] for i in of if owners[i] == rank]
            assert len(mine) <= 1 or sum(mine) <= cap


def cuts(size: int, parts: int) -> list[tuple[int, int]]:
    """Divide as ``chunk`` does: the last parts have fewer elements, or none."""
    each = -(-size // parts)
    starts = [min(i * each, size) for i in range(parts)]
    return [(start, min(each, size - start)) for start in starts]


@st.composite
def exchanges(draw) -> tuple[tuple[int, ...], list[Matrix]]:
    mesh = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    matrices = []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
        # Rows are cut by one dimension, columns by another. Along some of the rest, all that is
        # here is at one coordinate, like an expert, and the others have copies.
        dims = draw(st.permutations(range(len(mesh))))[: draw(st.integers(0, min(2, len(mesh))))]
        parts = [cuts(n, mesh[d]) for n, d in zip(shape, dims, strict=False)]
        parts += [[(0, n)] for n in shape[len(dims) :]]
        whole = {d: draw(st.integers(0, n - 1)) for d, n in enumerate(mesh) if d not in dims}
        whole = {d: at for d, at in whole.items() if draw(st.booleans())}
        blocks = {}
        for (i, (row, rows)), (j, (column, columns)) in itertools.product(*map(enumerate, parts)):
            places = {**whole, **dict(zip(dims, (i, j), strict=False))}
            at = tuple(places.get(d, 0) for d in range(len(mesh)))
            if rows and columns:
                blocks[at] = Rectangle(row, column, rows, columns)
        owner = tuple(draw(st.integers(0, n - 1)) for n in mesh)
        sharded = tuple(d in dims or d in whole for d in range(len(mesh)))
        matrices.append(Matrix(*shape, sharded, blocks, owner))
    return mesh, matrices


def run(ex: Routes, stages, buffers):
    """Send what the stages of all ranks say; check sizes, and where the buffers differ."""
    for number in range(len(ex.mesh)):
        plans = {at: of[number] for at, of in stages.items()}
        for at, stage in plans.items():
            assert set(stage.sent) <= set(buffers[at])
        buffers = {}
        for at, stage in plans.items():
            if stage.dim is None:
                buffers[at] = stage.sent
                assert stage.received == stage.sent
                continue
            d, got = stage.dim, []
            for peer, size in enumerate(stage.received_from):
                source = (*at[:d], peer, *at[d + 1 :])
                other = plans[source]
                assert other.sent_to[at[d]] == size
                sizes = [ex.elements([p]) for p in other.sent]
                ends = list(itertools.accumulate(sizes, initial=0))
                begin = sum(other.sent_to[: at[d]])
                got += [
                    p
                    for p, start, end in zip(other.sent, ends, ends[1:], strict=False)
                    if begin <= start and end <= begin + size and end > start
                ]
            full = [p for p in stage.received if ex.elements([p])]
            assert got == full
            assert ex.elements(stage.sent) <= stage.most[0]
            assert ex.elements(stage.received) <= stage.most[1]
            buffers[at] = stage.received
    return buffers


@given(exchanges())
def test_parts_reach_owners_and_updates_all_ranks(found):
    mesh, matrices = found
    ranks = list(itertools.product(*map(range, mesh)))
    of = {at: Routes(matrices, mesh, at) for at in ranks}
    given = {at: of[at].held(at, 0) for at in ranks}
    there = run(of[ranks[0]], {at: of[at].to_owners() for at in ranks}, given)
    for at, parts in there.items():
        mine = {Piece(i, c) for i, m in enumerate(matrices) if m.owner == at for c in m.blocks}
        assert len(parts) == len(mine)
        assert set(parts) == mine
        for i, m in enumerate(matrices):
            if m.owner == at:
                assert tiles(m.rows, m.columns, [m.blocks[p.at] for p in parts if p.matrix == i])
    back = run(of[ranks[0]], {at: of[at].to_shards() for at in ranks}, there)
    assert {at: sorted(parts) for at, parts in back.items()} == given
