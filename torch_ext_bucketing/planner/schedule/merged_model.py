"""Model a graph as if a plan's buckets were merged, without merging them.

The search for byte caps schedules many plans. Merging each in a copy of the graph takes several
times as long as scheduling it, so the model of the unmerged graph is edited instead, with the few
nodes that merging leaves of each bucket::

    gathers         ag(a) w(a) ... ag(b) w(b) ...        pack AG wait copy(a) copy(b) ... ...
    reductions      rs(a) w(a) ... rs(b) w(b) ...        ... ... pack RS wait ...
    in rank order                                        ... ... pack all-to-all wait sum ...

A gather bucket stands where its first member stood, after the inputs of the later members; a
reduction where its last member stood. Other nodes keep their order as far as dependencies allow.
Packing reads the members' inputs and writes the buffer. Gathered members are copied out of the
buffer, reduced members are views of it. Times come from :mod:`.cost`; a fused kernel that computes
a reduced member writes it into the buffer, and elementwise operators read a gathered member in the
buffer (:func:`.with_packed`). Other copies out of a gather's buffer are kernels of their own, and
all count so in times. Torch 2.11 packs a gather with one operator, so its times differ a little.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.fx as fx

from ...bucketing.pack import packed_values
from ...bucketing.plan import Bucket
from ...graph.liveness import with_packed
from ...graph.nodes import Kind, group_size
from ..cost.cost import Costs
from .model import Model, ModelEdit, Row


def merged_model(
    model: Model, buckets: Sequence[Bucket], costs: Costs, rank_order: bool = False
) -> Model | None:
    """Approximate :func:`.model_of` of the graph with disjoint ``buckets`` merged.

    With ``rank_order``, reductions, merged or not, become all-to-alls and sums afterwards
    (:mod:`.passes.bucketing`). None: a member has no wait, or the buckets form a cycle with
    nodes that keep their order: merging may move members past a side effect, ``model`` does not
    allow that.
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
    if order is None:
        return None
    made, graph = _BucketEdit(model, merged, costs, place).model(order), model.graph
    if graph.fused is None:
        return made
    known = made.dependencies, made.members, graph.liveness.of_node, graph.fused
    return replace(made, liveness=with_packed(made.liveness, *known))


@dataclass
class _Merged:
    """A bucket with the places of its starts and, in the same order, their waits."""

    bucket: Bucket
    starts: list[int]
    waits: list[int]
    rank_order: bool = False

    @property
    def kind(self) -> Kind:
        return self.bucket.kind


class _Sorted:
    """Sort nodes and buckets.

    An *item* is a node, given by its place, or a bucket, given by the complement of its index:
    ``~0`` is the first bucket, ``~1`` the second.
    """

    def __init__(self, model: Model, merged: Sequence[_Merged]) -> None:
        self._model = model
        self._merged = merged
        self._item = list(range(len(model)))
        self._stands_at: dict[int, int] = {}
        for number, m in enumerate(merged):
            for i in (*m.starts, *m.waits):
                self._item[i] = ~number
            self._stands_at[m.starts[0] if m.kind == "all_gather" else m.starts[-1]] = ~number
        self._done = [False] * (len(model) + len(merged))  # ``~0`` is the last one
        self._order: list[int] = []
        self._waiting: dict[int, list[int]] = {}

    def order(self) -> list[int] | None:
        """Return all items in topological order, or None if there is a cycle."""
        for i, item in enumerate(self._item):
            if item >= 0:
                self._place(item)
            elif i in self._stands_at:
                if self._merged[~item].kind == "all_gather":
                    self._hoist(self._merged[~item])
                self._place(item)
        whole = len(self._order) == len(set(self._item))
        return self._order if whole else None

    def _needs(self, item: int) -> list[int]:
        if item >= 0:
            return self._needed(item)
        merged = self._merged[~item]
        members = (*merged.starts, *merged.waits)
        return [u for i in members for u in self._needed(i) if u != item]

    def _needed(self, i: int) -> list[int]:
        """Return the items that node ``i`` needs, without the launch order, which is set later."""
        return [self._item[j] for j in self._model.needed_values[i]]

    def _hoist(self, merged: _Merged) -> None:
        """Place the inputs of later members, except inputs that need another collective."""
        for i in merged.starts[1:]:
            late: dict[int, None] = {}
            stack = self._needed(i)
            while stack:
                item = stack.pop()
                if self._done[item] or item in late:
                    continue
                late[item] = None
                if item < 0 or self._model.group[item] is not None:
                    break
                stack += self._needed(item)
            else:
                for item in sorted(late):
                    self._place(item)

    def _place(self, item: int) -> None:
        """Place an item now, or once all items that it needs are placed."""
        stack, done = [item], self._done
        while stack:
            item = stack.pop()
            if done[item]:
                continue
            for needed in self._needs(item):
                if not done[needed]:
                    self._waiting.setdefault(needed, []).append(item)
                    break
            else:
                done[item] = True
                self._order.append(item)
                if item in self._waiting:
                    stack += reversed(self._waiting.pop(item))


class _BucketEdit:
    """The edit of a model that puts buckets in the place of their members."""

    def __init__(
        self, model: Model, merged: Sequence[_Merged], costs: Costs, place: Mapping[fx.Node, int]
    ) -> None:
        self._old, self._merged, self._costs, self._place = model, merged, costs, place
        self._edit = ModelEdit(model)
        self._packs: dict[int, tuple[int, int]] = {}  # old start or wait -> old start, pack
        self._instead: dict[int, int] = {}  # reduced member's storage -> buffer
        self._casts = self._merged_casts()

    def model(self, order: Iterable[int]) -> Model:
        for m in self._merged:
            if m.kind != "all_gather":  # the results of all members are parts of one storage
                buffer = self._storage_of(results := self._results(m))
                self._instead.update(dict.fromkeys(results, buffer))
                if not self._edit.kept.keys().isdisjoint(results):
                    self._edit.kept[buffer] = None
        for item in order:
            if item >= 0:
                self._keep(item)
                continue
            m = self._merged[~item]
            inputs = tuple(dict.fromkeys(s for i in m.starts for s in self._now(self._packed(i))))
            add = self._add_gather if m.kind == "all_gather" else self._add_reduction
            self._edit.members[add(m, inputs)] = m.bucket.members
        return self._edit.model()

    def _merged_casts(self) -> dict[int, tuple[int, ...]]:
        """Map each cast that packing does to the storages that it reads."""
        casts = {}
        for m in self._merged:
            if m.kind == "all_gather":
                members = m.bucket.members
                for member, value in zip(members, packed_values(members), strict=True):
                    cast = member.all_input_nodes[0]
                    if cast is not value:
                        i = self._place[cast]
                        casts[i] = self._read_by(i)
        return casts

    def _packed(self, start: int) -> tuple[int, ...]:
        """Return the storages that packing reads for a member."""
        cast = self._place.get(self._old.dependencies.nodes[start].all_input_nodes[0], -1)
        return self._casts[cast] if cast in self._casts else self._read_by(start)

    def _read_by(self, i: int) -> tuple[int, ...]:
        liveness = self._old.liveness
        return tuple(s for s in liveness.touches[i] if s not in liveness.allocates[i])

    def _results(self, m: _Merged) -> list[int]:
        return [s for i in m.starts for s in self._old.liveness.allocates[i]]

    def _storage_of(self, parts: Iterable[int]) -> int:
        """Add a storage as large as some others together."""
        return self._edit.storage(sum(self._edit.size[s] for s in parts))

    def _now(self, storages: tuple[int, ...]) -> tuple[int, ...]:
        instead = self._instead
        if instead.keys().isdisjoint(storages):
            return storages
        return tuple(dict.fromkeys(instead.get(s, s) for s in storages))

    def _keep(self, i: int) -> None:
        needs, touches = self._old.needed_values[i], self._old.liveness.touches[i]
        changes: dict[str, Any] = {}
        if not self._packs.keys().isdisjoint(needs):
            changes["needs"] = [self._needed_by_write(i, j) for j in needs]
        if i in self._casts:  # packing does it
            dropped = {"ms": 0.0, "host": 0.0, "allocates": (), "touches": self._casts[i]}
            changes |= {**dropped, "compute": False, "view": True}
        elif (now := self._now(touches)) is not touches:
            changes["touches"] = now
        self._edit.keep(i, **changes)

    def _needed_by_write(self, i: int, j: int) -> int:
        """Return the new place of ``j``, which node ``i`` needs.

        If ``j`` is a packed member whose result ``i`` does not touch, such as for a write to its
        input, this is the pack, which alone reads the input now::

            ag(p) -> wait -> copy_(p)        pack(p) -> AG -> wait
                                                    `-> copy_(p)
        """
        start, pack = self._packs.get(j, (j, -1))
        live = self._old.liveness
        reads_it = pack < 0 or not set(live.allocates[start]).isdisjoint(live.touches[i])
        return self._edit.at[j] if reads_it else pack

    def _add_gather(self, m: _Merged, inputs: tuple[int, ...]) -> int:
        """Add a bucket of gathers and return its start's place."""
        old, costs, edit, members = self._old, self._costs, self._edit, m.bucket.members
        gathered = [costs.result_bytes(member) for member in members]
        packed = sum(map(costs.collective_bytes, members)) - sum(gathered)
        given, pack_ms = self._packing(m, packed)
        buffer = self._storage_of(self._results(m))
        new = (buffer, edit.storage(given))
        kernel_ms = costs.launch()
        pack_host = 2 * kernel_ms if pack_ms else 0.0  # one concatenates, one casts and copies
        needed = self._needed_by(m.starts)
        pack = edit.add(Row(members[0], needed, new, new + inputs, pack_ms, host=pack_host))
        ms, group, host = costs.bucket(members), old.group[m.starts[0]], costs.launch(members[0])
        start = edit.add(Row(members[0], [pack], (), (buffer,), ms, group, host=host))
        wait = self._add_wait(m, start, (buffer,))
        for i, w, nbytes in zip(m.starts, m.waits, gathered, strict=True):
            mine, node, ms = (
                old.liveness.allocates[i],
                old.dependencies.nodes[w],
                costs.copy(nbytes),
            )
            copy = edit.add(Row(node, [wait], mine, (buffer, *mine), ms, host=kernel_ms))
            edit.at[i], edit.at[w] = start, copy
            self._packs[i] = self._packs[w] = (i, pack)
        return start

    def _add_reduction(self, m: _Merged, inputs: tuple[int, ...]) -> int:
        """Add a bucket of reductions and return its start's place."""
        costs, edit, members = self._costs, self._edit, m.bucket.members
        first, wait = members[0], self._old.dependencies.nodes[m.waits[0]]
        group, reduces = self._old.group[m.starts[0]], m.kind == "reduce_scatter"
        # In rank order a sum follows the all-to-all; for an all-reduce a gather follows the sum.
        results = self._results(m)
        result = self._instead[results[0]] if results else edit.storage(0)
        sent, needs = inputs, self._needed_by(m.starts)
        if len(members) > 1:
            moved = sum(map(costs.collective_bytes, members))
            sent = (edit.storage(moved - sum(map(costs.result_bytes, members))),)
            pack_ms, host = costs.pack_reductions(members)
            needs = [edit.add(Row(first, needs, sent, sent + inputs, pack_ms, host=host))]

        def launch(needs: list[int], read: tuple[int, ...], made: int, ms: float) -> int:
            row = Row(first, needs, (made,), (*read, made), ms, group, reduces=reduces)
            return edit.add(row._replace(host=costs.launch(first)))

        if m.rank_order:
            (nbytes, ms), *gathers = costs.in_rank_order(members)
            part = edit.storage(-(-nbytes // group_size(first))) if gathers else result
            buffer = edit.storage(nbytes)
            start = launch(needs, sent, buffer, ms)
            done = self._add_wait(m, start, (*sent, buffer))
            sum_ms = costs.kernel(nbytes + edit.size[part])
            row = Row(wait, [done], (part,), (buffer, part), sum_ms, host=costs.launch())
            done = edit.add(row)
            for _, ms in gathers:
                gather, both = launch([done], (part,), result, ms), (part, result)
                done = edit.add(Row(wait, [gather], (), both, start_of=gather, view=True))
        else:
            start = launch(needs, sent, result, costs.bucket(members))
            done = self._add_wait(m, start, (*sent, result))
        for i, w in zip(m.starts, m.waits, strict=True):
            edit.at[i], edit.at[w] = start, done
            if len(members) > 1:
                self._packs[i] = self._packs[w] = (i, needs[0])
        return start

    def _add_wait(self, m: _Merged, start: int, touches: tuple[int, ...]) -> int:
        needs = [start, *self._needed_by(m.waits)]
        node = self._old.dependencies.nodes[m.waits[0]]
        return self._edit.add(Row(node, needs, (), touches, start_of=start, view=True))

    def _packing(self, m: _Merged, packed: int) -> tuple[int, float]:
        """Return bytes of a gather bucket's concatenated inputs, and milliseconds of packing."""
        # Both are 0 if ranks may differ in the inputs, see :mod:`.graph.sizes`.
        values = packed_values(m.bucket.members)
        if all(value in self._old.graph.shard_side.nodes for value in values):
            return 0, 0.0
        given = sum(map(self._costs.result_bytes, values))
        return given, self._costs.pack(given, packed)

    def _needed_by(self, places: Iterable[int]) -> list[int]:
        needed, at = self._old.needed_values, self._edit.at
        return [at[j] for i in places for j in needed[i] if at[j] >= 0]
