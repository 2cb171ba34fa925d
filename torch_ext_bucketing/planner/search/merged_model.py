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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.fx as fx

from ...bucketing.pack import packed_values
from ...bucketing.plan import Bucket
from ...graph.collectives import Kind, group_size
from ..cost.cost import Costs
from ..schedule.model import Model, Row


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
    sums = model.graph.gradient_sums if rank_order else {}
    replaced = {n: c for n, c in sums.items() if n in place}
    done = {m for bucket in buckets for m in bucket.members}
    alone = [Bucket(c.kind, None, (n,)) for n, c in replaced.items() if n not in done]
    for bucket in (*buckets, *alone):
        starts = [place[m] for m in bucket.members]
        if not all(s in wait_of for s in starts):
            return None
        in_order = all(m in replaced for m in bucket.members)
        merged.append(_Merged(bucket, starts, [wait_of[s] for s in starts], in_order))
    order = _Sorted(model, merged).order()
    return None if order is None else _Rewritten(model, merged, costs, place).model(order)


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
        self._done = [False] * (len(model) + len(merged))  # ``~0`` is the last one
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

    def _needs(self, unit: int) -> list[int]:
        if unit >= 0:
            return self._needed(unit)
        merged = self._merged[~unit]
        members = (*merged.starts, *merged.waits)
        return [u for i in members for u in self._needed(i) if u != unit]

    def _needed(self, i: int) -> list[int]:
        """The units that node ``i`` needs. Starts keep their order, but which one it is only comes
        out at the end."""
        return [self._unit[j] for j in self._model.needed_values[i]]

    def _hoist(self, merged: _Merged) -> None:
        """Place what the later members need, unless that is another collective's result."""
        for i in merged.starts[1:]:
            late: dict[int, None] = {}
            stack = self._needed(i)
            while stack:
                unit = stack.pop()
                if self._done[unit] or unit in late:
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
        stack, done = [unit], self._done
        while stack:
            unit = stack.pop()
            if done[unit]:
                continue
            for needed in self._needs(unit):
                if not done[needed]:
                    self._waiting.setdefault(needed, []).append(unit)
                    break
            else:
                done[unit] = True
                self._order.append(unit)
                if unit in self._waiting:
                    stack += reversed(self._waiting.pop(unit))


class _Rewritten:
    """The model of the units in their new order."""

    def __init__(
        self, model: Model, merged: Sequence[_Merged], costs: Costs, place: Mapping[fx.Node, int]
    ) -> None:
        self._old = model
        self._merged = merged
        self._costs = costs
        self._rows: list[Row] = []
        self._at = [-1] * len(model)  # new place of what an old node gave
        self._packs: dict[int, tuple[int, int]] = {}  # of an old start or wait: start, pack
        self._size = list(model.liveness.size)
        self._kept = dict(model.liveness.kept)
        self._instead: dict[int, int] = {}  # storages of reduced members, parts of a buffer now
        self._place = place
        self._casts = self._merged_casts()
        self._members: dict[int, tuple[fx.Node, ...]] = {}

    def model(self, order: Sequence[int]) -> Model:
        for m in self._merged:
            if m.kind != "all_gather":
                self._share_buffer(m)
        for unit in order:
            if unit >= 0:
                self._keep(unit)
            else:
                self._add_bucket(self._merged[~unit])
        at_start = self._old.liveness.at_start
        return self._old.rebuilt(self._rows, self._members, self._size, self._kept, at_start)

    def _merged_casts(self) -> dict[int, tuple[int, ...]]:
        """Casts that are part of packing, and the storages of what they cast."""
        found = {}
        for m in self._merged:
            if m.kind == "all_gather":
                members = m.bucket.members
                for member, value in zip(members, packed_values(members), strict=True):
                    cast = member.all_input_nodes[0]
                    if cast is not value:
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
        if instead.keys().isdisjoint(storages):
            return storages
        return tuple(dict.fromkeys(instead.get(s, s) for s in storages))

    def _add(self, row: Row) -> int:
        """Add a node; returns its place."""
        self._rows.append(row)
        return len(self._rows) - 1

    def _keep(self, i: int) -> None:
        row = self._old.row(i, self._at)
        needs = self._old.needed_values[i]
        if not self._packs.keys().isdisjoint(needs):
            row = row._replace(needs=[self._needed_by_write(i, j) for j in needs])
        if i in self._casts:
            row = Row(row.node, row.needs, (), self._casts[i], view=True)
        elif (touches := self._now(row.touches)) is not row.touches:
            row = row._replace(touches=touches)
        self._at[i] = self._add(row)

    def _needed_by_write(self, i: int, j: int) -> int:
        """The new place of ``j``, which node ``i`` needs; of a packed member whose result ``i``
        does not touch, as a write to its input, the packing, which alone reads that now::

            ag(p) -> wait -> copy_(p)        pack(p) -> AG -> wait
                                                    `-> copy_(p)
        """
        start, pack = self._packs.get(j, (j, -1))
        live = self._old.liveness
        reads_it = pack < 0 or not set(live.allocates[start]).isdisjoint(live.touches[i])
        return self._at[j] if reads_it else pack

    def _add_bucket(self, m: _Merged) -> None:
        results = [s for i in m.starts for s in self._old.liveness.allocates[i]]
        inputs = tuple(dict.fromkeys(s for i in m.starts for s in self._now(self._packed(i))))
        add = self._add_gather if m.kind == "all_gather" else self._add_reduction
        self._members[add(m, results, inputs)] = m.bucket.members

    def _add_gather(self, m: _Merged, results: Sequence[int], inputs: tuple[int, ...]) -> int:
        """Add a bucket of gathers; returns its start's place."""
        old, costs, members = self._old, self._costs, m.bucket.members
        moved = sum(map(costs.collective_bytes, members))
        gathered = [costs.result_bytes(member) for member in members]
        # torch concatenates, then copies (and casts) into this rank's part of the buffer.
        buffer = self._storage(sum(self._size[s] for s in results))
        given, pack_ms = self._packing(m, moved - sum(gathered))
        new = (buffer, self._storage(given))
        pack = self._add(Row(members[0], self._needed_by(m.starts), new, new + inputs, pack_ms))
        ms = costs.bucket(members)
        start = self._add(Row(members[0], [pack], (), (buffer,), ms, old.group[m.starts[0]]))
        wait = self._add_wait(m, start, (buffer,))
        for i, w, nbytes in zip(m.starts, m.waits, gathered, strict=True):
            mine, copy_ms = old.liveness.allocates[i], costs.copy(nbytes)
            copy = Row(old.dependencies.nodes[w], [wait], mine, (buffer, *mine), copy_ms)
            self._at[i], self._at[w] = start, self._add(copy)
            self._packs[i] = self._packs[w] = (i, pack)
        return start

    def _add_reduction(self, m: _Merged, results: Sequence[int], inputs: tuple[int, ...]) -> int:
        """Add a bucket of reductions; returns its start's place. In rank order the first collective
        is followed by the sum, and of an all-reduce that by a gather."""
        costs, members, group = self._costs, m.bucket.members, self._old.group[m.starts[0]]
        first, wait = members[0], self._old.dependencies.nodes[m.waits[0]]
        reduces = m.kind == "reduce_scatter"
        result = self._instead[results[0]] if results else self._storage(0)
        sent, needs = inputs, self._needed_by(m.starts)
        moved = sum(map(costs.collective_bytes, members))
        if len(members) > 1:
            packed = moved - sum(map(costs.result_bytes, members))
            sent = (self._storage(packed),)
            needs = [self._add(Row(first, needs, sent, sent + inputs, costs.copy(packed)))]
        nbytes, ms = 0, 0.0
        if m.rank_order:
            (nbytes, ms), *gathers = costs.in_rank_order(members)
            part = self._storage(-(-nbytes // group_size(first))) if gathers else result
            buffer = self._storage(nbytes)
        else:
            gathers, part, buffer, ms = [], result, result, costs.bucket(members)
        both = (*sent, buffer)
        start = self._add(Row(first, needs, (buffer,), both, ms, group, reduces=reduces))
        done = self._add_wait(m, start, both)
        if m.rank_order:
            sum_ms = costs.kernel(nbytes + self._size[part])
            done = self._add(Row(wait, [done], (part,), (buffer, part), sum_ms))
        for _, ms in gathers:
            both = (part, result)
            gather = self._add(Row(first, [done], (result,), both, ms, group, reduces=reduces))
            done = self._add(Row(wait, [gather], (), both, start_of=gather, view=True))
        for i, w in zip(m.starts, m.waits, strict=True):
            self._at[i], self._at[w] = start, done
            if len(members) > 1:
                self._packs[i] = self._packs[w] = (i, needs[0])
        return start

    def _add_wait(self, m: _Merged, start: int, touches: tuple[int, ...]) -> int:
        needs = [start, *self._needed_by(m.waits)]
        node = self._old.dependencies.nodes[m.waits[0]]
        return self._add(Row(node, needs, (), touches, start_of=start, view=True))

    def _packing(self, m: _Merged, packed: int) -> tuple[int, float]:
        """Bytes and milliseconds of what a gather bucket is packed from; none where ranks differ in
        it, see :mod:`.graph.uneven`."""
        values = packed_values(m.bucket.members)
        if all(value in self._old.graph.shard_side.nodes for value in values):
            return 0, 0.0
        given = sum(map(self._costs.result_bytes, values))
        return given, self._costs.pack(given, packed)

    def _needed_by(self, places: Iterable[int]) -> list[int]:
        return [j for i in places for j in self._old.row(i, self._at).needs]
