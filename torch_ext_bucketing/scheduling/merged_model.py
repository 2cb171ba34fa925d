"""The model of a graph as it would be after merging, without merging anything.

To choose between bucketing plans, the buckets of each have to be scheduled. Merging them in a copy
of the graph first, and reading a model of the copy, takes several times as long as the scheduling.
Here the graph's own model is rewritten instead, with the few nodes that torch's merging leaves per
bucket::

    gathers         ag(a) w(a) ... ag(b) w(b) ...        pack AG wait copy(a) copy(b) ... ...
    reductions      rs(a) w(a) ... rs(b) w(b) ...        ... ... pack RS wait ...
    in rank order                                        ... ... pack all-to-all wait sum ...

A gather bucket stands where its first member stood, behind what leads from parameters to the later
ones; any other bucket stands behind its last member. The rest keeps its order as far as
dependencies allow. Packing reads the members' inputs and writes the buffer. A gathered member is
copied out of the buffer, a reduced one is a part of it. Times and bytes are those of :mod:`.cost`
and :mod:`.liveness`. With torch 2.11, which packs a gather with one operator, they are a little
off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch.fx as fx

from ..bucketing.all_to_all import replaceable
from ..bucketing.pack import packed_value
from ..bucketing.plan import Bucket
from ..graph.collectives import Kind, group_size, kind_of
from ..graph.dependencies import Precedence
from ..graph.liveness import Storages
from .cost import Costs
from .model import Model

__all__ = [
    "merged_model",
]


def merged_model(
    model: Model, buckets: Sequence[Bucket], costs: Costs, rank_order: bool = False
) -> Model | None:
    """The model that :func:`.model_of` would give, nearly, once ``buckets`` are merged.

    Args:
        model: of the graph that the buckets are planned for.
        buckets: with members that have one wait each and are in one bucket.
        costs: as for ``model``.
        rank_order: whether reductions, merged or not, become all-to-alls and sums afterwards, see
            :mod:`.bucketing.all_to_all`: what a rank receives is as large as what it sends.

    Returns:
        None if a member has no wait, or if the buckets would make a cycle with what keeps its
        order: merging follows the edges of the graph and may move members past a side effect, which
        ``model`` does not allow.
    """
    place = {node: i for i, node in enumerate(model.dependencies.nodes)}
    wait_of = {start: i for i, start in enumerate(model.start_of) if start >= 0}
    merged = []
    replaced = replaceable(place) if rank_order else {}
    done = {m for bucket in buckets for m in bucket.members}
    alone = [n for n in replaced if n not in done]
    for bucket in (*buckets, *(Bucket(k, None, (n,)) for n in alone if (k := kind_of(n)))):
        starts = [place[m] for m in bucket.members]
        if not all(s in wait_of for s in starts):
            return None
        in_order = all(m in replaced for m in bucket.members)
        merged.append(_Merged(bucket, starts, [wait_of[s] for s in starts], in_order))
    order = _Sorted(model, merged).order()
    return None if order is None else _Rewritten(model, merged, order, costs, place).model()


@dataclass
class _Merged:
    """A bucket, with the places of its starts and of their waits in the same order.

    Args:
        rank_order: whether its members are added up by an all-to-all.
    """

    bucket: Bucket
    starts: list[int]
    waits: list[int]
    rank_order: bool = False

    @property
    def kind(self) -> Kind:
        return self.bucket.kind


class _Sorted:
    """Where everything comes to stand.

    A *unit* is a node, named by its place, or a bucket, named by its number from the end: ``~0`` is
    the first one, ``~1`` the second.
    """

    def __init__(self, model: Model, merged: Sequence[_Merged]) -> None:
        self._model = model
        self._merged = merged
        self._unit = list(range(len(model)))
        self._stands_at: dict[int, int] = {}
        for number, m in enumerate(merged):
            for i in (*m.starts, *m.waits):
                self._unit[i] = ~number
            self._stands_at[m.starts[0] if m.kind == "all_gather" else m.starts[-1]] = ~number
        self._done: set[int] = set()
        self._order: list[int] = []
        self._waiting: dict[int, list[int]] = {}

    def order(self) -> list[int] | None:
        """All units, each behind those that it needs."""
        for i, unit in enumerate(self._unit):
            if unit >= 0:
                self._place(unit)
            elif i in self._stands_at:
                if self._merged[~unit].kind == "all_gather":
                    self._hoist(self._merged[~unit])
                self._place(unit)
        whole = len(self._order) == len(set(self._unit))
        return self._order if whole else None

    def _needs(self, unit: int) -> Iterator[int]:
        if unit >= 0:
            yield from self._needed(unit)
            return
        merged = self._merged[~unit]
        for i in (*merged.starts, *merged.waits):
            yield from (u for u in self._needed(i) if u != unit)

    def _needed(self, i: int) -> Iterator[int]:
        """The units that node ``i`` needs."""
        model = self._model
        for j in model.dependencies.needs[i]:
            # Starts keep their order, but which one it is only comes out at the end.
            if not model.only_ordered(j, i):
                yield self._unit[j]

    def _hoist(self, merged: _Merged) -> None:
        """Place what the later members need, unless that is another collective's result."""
        for i in merged.starts[1:]:
            late: dict[int, None] = {}
            stack = list(self._needed(i))
            while stack:
                unit = stack.pop()
                if unit in self._done or unit in late:
                    continue
                late[unit] = None
                if unit < 0 or self._model.group[unit] is not None:
                    break
                stack += self._needed(unit)
            else:
                for unit in sorted(late):
                    self._place(unit)

    def _place(self, unit: int) -> None:
        """Place ``unit`` now, or as soon as all that it needs is there."""
        stack = [unit]
        while stack:
            unit = stack.pop()
            if unit in self._done:
                continue
            missing = next((u for u in self._needs(unit) if u not in self._done), None)
            if missing is not None:
                self._waiting.setdefault(missing, []).append(unit)
                continue
            self._done.add(unit)
            self._order.append(unit)
            stack += reversed(self._waiting.pop(unit, ()))


@dataclass
class _Columns:
    """A model in the making."""

    nodes: list[fx.Node] = field(default_factory=list)
    needs: list[Iterable[int]] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    group: list[str | None] = field(default_factory=list)
    start_of: list[int] = field(default_factory=list)
    compute: list[bool] = field(default_factory=list)
    reduces: list[bool] = field(default_factory=list)
    view: list[bool] = field(default_factory=list)
    allocates: list[tuple[int, ...]] = field(default_factory=list)
    touches: list[tuple[int, ...]] = field(default_factory=list)

    def add(
        self,
        node: fx.Node,
        needs: Iterable[int],
        allocates: Iterable[int],
        touches: Iterable[int],
        ms: float = 0.0,
        group: str | None = None,
        start_of: int = -1,
        compute: bool = False,
        view: bool = False,
    ) -> int:
        """Add a node; returns its place."""
        self.nodes.append(node)
        self.needs.append(needs)
        self.ms.append(ms)
        self.group.append(group)
        self.start_of.append(start_of)
        self.compute.append(compute)
        self.reduces.append(group is not None and kind_of(node) == "reduce_scatter")
        self.view.append(view)
        self.allocates.append(tuple(allocates))
        self.touches.append(tuple(touches))
        return len(self.nodes) - 1


class _Rewritten:
    """The model of the units in their new order."""

    def __init__(
        self,
        model: Model,
        merged: Sequence[_Merged],
        order: Sequence[int],
        costs: Costs,
        place: Mapping[fx.Node, int],
    ) -> None:
        self._old = model
        self._merged = merged
        self._order = order
        self._costs = costs
        self._new = _Columns()
        self._at = [-1] * len(model)  # new place of what an old node gave
        self._last: dict[tuple[str | None, Kind | None], int] = {}  # start of a group and kind
        self._size = list(model.liveness.size)
        self._kept = dict(model.liveness.kept)
        self._instead: dict[int, int] = {}  # storages of reduced members, parts of a buffer now
        self._place = place
        self._casts = self._merged_casts()
        self._members: dict[int, tuple[fx.Node, ...]] = {}

    def model(self) -> Model:
        for m in self._merged:
            if m.kind != "all_gather":
                self._share_buffer(m)
        for unit in self._order:
            if unit >= 0:
                self._keep(unit)
            else:
                self._add_bucket(self._merged[~unit])
        new = self._new
        return Model(
            dependencies=Precedence(new.nodes, map(set, new.needs)),
            liveness=Storages(
                self._size,
                new.allocates,
                new.touches,
                self._kept,
                self._old.liveness.at_start,
            ),
            ms=new.ms,
            group=new.group,
            start_of=new.start_of,
            compute=new.compute,
            reduces=new.reduces,
            view=new.view,
            shard_side=self._old.shard_side,
            members=self._members,
            hints=self._costs.hints,
            shared=self._old.shared,
        )

    def _merged_casts(self) -> dict[int, tuple[int, ...]]:
        """Casts that are part of packing, and the storages of what they cast."""
        found = {}
        for m in self._merged:
            if m.kind == "all_gather":
                for member in m.bucket.members:
                    cast = member.all_input_nodes[0]
                    if cast is not packed_value(member) and len(cast.users) == 1:
                        i = self._place[cast]
                        found[i] = self._read_by(i)
        return found

    def _packed(self, start: int) -> tuple[int, ...]:
        """The storages that are packed for a member."""
        cast = self._place.get(self._old.dependencies.nodes[start].all_input_nodes[0], -1)
        return self._casts[cast] if cast in self._casts else self._read_by(start)

    def _read_by(self, i: int) -> tuple[int, ...]:
        liveness = self._old.liveness
        return tuple(s for s in liveness.touches[i] if s not in liveness.allocates[i])

    def _share_buffer(self, m: _Merged) -> None:
        """Give the results of all members one storage."""
        results = [s for i in m.starts for s in self._old.liveness.allocates[i]]
        buffer = self._storage(sum(self._size[s] for s in results))
        for s in results:
            self._instead[s] = buffer
            if s in self._kept:
                self._kept[buffer] = None

    def _storage(self, nbytes: int) -> int:
        self._size.append(nbytes)
        return len(self._size) - 1

    def _now(self, storages: tuple[int, ...]) -> tuple[int, ...]:
        instead = self._instead
        if not any(s in instead for s in storages):
            return storages
        return tuple(dict.fromkeys(instead.get(s, s) for s in storages))

    def _mapped(self, i: int) -> list[int]:
        """The new places of what old node ``i`` needs, but for the order of starts."""
        old, at = self._old, self._at
        return [at[j] for j in old.dependencies.needs[i] if not old.only_ordered(j, i)]

    def _in_launch_order(self, start: fx.Node, group: str | None, needs: list[int]) -> list[int]:
        key = (group, kind_of(start))
        if key in self._last:
            needs.append(self._last[key])
        self._last[key] = len(self._new.nodes)
        return needs

    def _keep(self, i: int) -> None:
        old = self._old
        node, group = old.dependencies.nodes[i], old.group[i]
        needs = self._mapped(i)
        if group is not None:
            needs = self._in_launch_order(node, group, needs)
        if i in self._casts:
            self._at[i] = self._new.add(node, needs, (), self._casts[i], view=True)
            return
        start = old.start_of[i]
        self._at[i] = self._new.add(
            node,
            needs,
            old.liveness.allocates[i],
            self._now(old.liveness.touches[i]),
            old.ms[i],
            group,
            self._at[start] if start >= 0 else -1,
            old.compute[i],
            old.view[i],
        )

    def _add_bucket(self, m: _Merged) -> None:
        old, new, costs = self._old, self._new, self._costs
        first = m.bucket.members[0]
        group = old.group[m.starts[0]]
        gathers = m.kind == "all_gather"
        results = [s for i in m.starts for s in old.liveness.allocates[i]]
        inputs = dict.fromkeys(s for i in m.starts for s in self._now(self._packed(i)))
        if m.rank_order:
            self._add_rank_order(m, results, tuple(inputs))
            return
        moved = [costs.collective_bytes(member) for member in m.bucket.members]
        gathered = [costs.result_bytes(member) for member in m.bucket.members]
        packed = sum(moved) - sum(gathered)
        if gathers:
            # torch concatenates, then copies (and casts) into this rank's part of the buffer.
            buffer = self._storage(sum(self._size[s] for s in results))
            given, pack_ms = self._packing(m, packed)
            scratch = self._storage(given)
            allocated, sent = [buffer, scratch], [buffer]
        else:
            buffer = self._instead[results[0]] if results else self._storage(0)
            pack_ms = costs.kernel(2 * packed)
            scratch = self._storage(packed)
            allocated, sent = [scratch], [scratch, buffer]
        pack = new.add(first, self._all_mapped(m.starts), allocated, (*allocated, *inputs), pack_ms)
        start = new.add(
            first,
            self._in_launch_order(first, group, [pack]),
            () if gathers else (buffer,),
            sent,
            costs.collective(first, sum(moved)),
            group,
        )
        self._members[start] = m.bucket.members
        wait = new.add(
            old.dependencies.nodes[m.waits[0]],
            [start, *(j for j in self._all_mapped(m.waits) if j >= 0)],
            (),
            sent,
            start_of=start,
            view=True,
        )
        for i, w, nbytes in zip(m.starts, m.waits, gathered, strict=True):
            self._at[i], self._at[w] = start, wait
            if gathers:
                mine = old.liveness.allocates[i]
                node = old.dependencies.nodes[w]
                self._at[w] = new.add(node, [wait], mine, (buffer, *mine), costs.kernel(2 * nbytes))

    def _add_rank_order(self, m: _Merged, results: Sequence[int], inputs: tuple[int, ...]) -> None:
        """Add an all-to-all of the packed gradients, their sum, and the gather behind it if any."""
        old, new, costs = self._old, self._new, self._costs
        members, group = m.bucket.members, old.group[m.starts[0]]
        first, wait_node = members[0], old.dependencies.nodes[m.waits[0]]
        result = self._instead[results[0]] if results else self._storage(0)
        steps, ranks = costs.in_rank_order(members), group_size(first)
        sent, allocated, last = inputs, list[int](), self._all_mapped(m.starts)
        if len(members) > 1:
            packed = sum(costs.collective_bytes(n) - costs.result_bytes(n) for n in members)
            allocated = [self._storage(packed)]
            pack_ms = costs.kernel(2 * packed)
            last = [new.add(first, last, allocated, (*allocated, *inputs), pack_ms)]
            sent = tuple(allocated)
        starts, waits = list[int](), list[int]()
        for n, (nbytes, ms) in enumerate(steps):
            buffer = result if n else self._storage(nbytes)
            both = (*sent, buffer)
            needs = self._in_launch_order(first, group, last)
            starts.append(new.add(first, needs, (buffer,), both, ms, group))
            waited = [] if n else [j for j in self._all_mapped(m.waits) if j >= 0]
            needs = [starts[-1], *waited]
            waits.append(new.add(wait_node, needs, (), both, start_of=starts[-1], view=True))
            last = [waits[-1]]
            if not n:
                part = result if len(steps) == 1 else self._storage(-(-nbytes // ranks))
                sum_ms = costs.kernel(nbytes + self._size[part])
                last = [new.add(wait_node, last, (part,), (buffer, part), sum_ms)]
                sent = (part,)
        self._members[starts[0]] = members
        for i, w in zip(m.starts, m.waits, strict=True):
            self._at[i], self._at[w] = starts[0], last[0]

    def _packing(self, m: _Merged, packed: int) -> tuple[int, float]:
        """Bytes and milliseconds of what a gather bucket is packed from; none where ranks differ in
        it, see :mod:`.graph.uneven`."""
        values = [packed_value(member) for member in m.bucket.members]
        if all(value in self._old.shard_side.nodes for value in values):
            return 0, 0.0
        given = sum(map(self._costs.result_bytes, values))
        return given, self._costs.kernel(2 * given) + self._costs.kernel(given + 2 * packed)

    def _all_mapped(self, places: Iterable[int]) -> list[int]:
        return [j for i in places for j in self._mapped(i)]
