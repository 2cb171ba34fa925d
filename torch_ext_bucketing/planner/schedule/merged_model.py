"""Model a graph as if a plan's buckets were merged, without merging them.

The search for byte caps schedules many plans. Merging each in a copy of the graph takes several
times as long as scheduling it, so the model of the unmerged graph is edited instead, with the few
nodes that merging leaves of each bucket::

    gathers         ag(a) w(a) ... ag(b) w(b) ...        pack AG wait copy(a) copy(b) ... ...
    reductions      rs(a) w(a) ... rs(b) w(b) ...        ... ... pack RS wait ...
    in rank order                                        ... ... pack all-to-all wait sum ...

A gather bucket stands where its first member stood, after the inputs of the later members; a
reduction where its last member stood. Other nodes keep their order as far as dependencies allow.
Packing, what it reads, and copies out of the buffer are those of the bucket's :class:`.Layout`, and
times come from :mod:`.cost`. A fused kernel that computes a reduced member writes it into the
buffer, and elementwise operators read a gathered member in the buffer (:func:`.with_packed`). Other
copies out of a gather's buffer are kernels of their own, and all count so in times. Torch 2.11
packs a gather with one operator, so its times differ a little.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx as fx

from ...bucketing.plan import Bucket
from ...graph.layout import Layout, Packing
from ...graph.liveness import with_packed
from ...graph.nodes import Kind
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
    edited, graph = _BucketEdit(model, merged, costs, place).model(order), model.graph
    if graph.fused is None:
        return edited
    facts = edited.dependencies, edited.members, graph.liveness.of_node, graph.fused
    return replace(edited, liveness=with_packed(edited.liveness, *facts))


@dataclass
class _Merged:
    """A bucket with the places of its starts and, in the same order, their waits."""

    bucket: Bucket
    starts: list[int]
    waits: list[int]
    rank_order: bool = False
    layout: Layout = field(init=False)
    buffer: int = -1  # the storage of the results

    def __post_init__(self) -> None:
        self.layout = Layout.of(self.bucket.members)

    @property
    def kind(self) -> Kind:
        return self.bucket.kind

    @property
    def packs(self) -> bool:
        """Whether anything is packed: a single reduction reads its input where it is."""
        return self.layout.in_place or len(self.starts) > 1


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

    def order(self) -> list[int] | None:
        """Return all items in topological order, or None if there is a cycle.

        Of the items whose needs are placed, the first of the sequence comes next, as in
        ``sort_topologically``.
        """
        sequence = self._sequence()
        place = {item: at for at, item in enumerate(sequence)}
        needed_by: list[list[int]] = [[] for _ in sequence]
        missing = []
        for at, item in enumerate(sequence):
            needed = {place[other] for other in self._needs(item)}
            missing.append(len(needed))
            for other in needed:
                needed_by[other].append(at)
        ready = [at for at, count in enumerate(missing) if not count]  # a heap, as it ascends
        order = []
        while ready:
            at = heapq.heappop(ready)
            order.append(sequence[at])
            for user in needed_by[at]:
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready, user)
        return order if len(order) == len(sequence) else None

    def _sequence(self) -> list[int]:
        """List all items as merging inserts the buckets, before it sorts the graph."""
        sequence: dict[int, None] = {}
        for i, item in enumerate(self._item):
            if item >= 0:
                sequence[item] = None
            elif i in self._stands_at:
                if self._merged[~item].kind == "all_gather":
                    sequence |= dict.fromkeys(self._hoisted(self._merged[~item], sequence))
                sequence[item] = None
        return list(sequence)

    def _needs(self, item: int) -> list[int]:
        if item >= 0:
            return self._needed(item)
        merged = self._merged[~item]
        members = (*merged.starts, *merged.waits)
        return [u for i in members for u in self._needed(i) if u != item]

    def _needed(self, i: int) -> list[int]:
        """Return the items that node ``i`` needs, without the launch order, which is set later."""
        return [self._item[j] for j in self._model.needed_values[i]]

    def _hoisted(self, merged: _Merged, before: Collection[int]) -> list[int]:
        """List inputs of later members that are not ``before`` and need no other collective."""
        hoisted: dict[int, None] = {}
        for i in merged.starts[1:]:
            late: dict[int, None] = {}
            stack = self._needed(i)
            while stack:
                item = stack.pop()
                if item in before or item in late or item in hoisted:
                    continue
                late[item] = None
                if item < 0 or self._model.group[item] is not None:
                    break
                stack += self._needed(item)
            else:
                hoisted |= dict.fromkeys(sorted(late))
        return list(hoisted)


class _BucketEdit:
    """The edit of a model that puts buckets in the place of their members."""

    def __init__(
        self, model: Model, merged: Sequence[_Merged], costs: Costs, place: Mapping[fx.Node, int]
    ) -> None:
        self._old, self._merged, self._costs, self._place = model, merged, costs, place
        self._edit = ModelEdit(model)
        self._packs: dict[int, tuple[int, int]] = {}  # old start or wait -> old start, pack
        self._instead: dict[int, int] = {}  # storage of a result that is a view -> buffer
        self._casts = self._merged_casts()

    def model(self, order: Iterable[int]) -> Model:
        """Build the model, with the nodes and buckets of ``order``."""
        size, kept, allocates = self._edit.size, self._edit.kept, self._old.liveness.allocates
        for m in self._merged:
            m.buffer = self._edit.storage(sum(size[s] for i in m.starts for s in allocates[i]))
            pieces = zip(m.starts, m.layout.pieces, strict=True)
            views = [s for i, piece in pieces if not piece.copied for s in allocates[i]]
            self._instead.update(dict.fromkeys(views, m.buffer))
            if not kept.keys().isdisjoint(views):
                kept[m.buffer] = None
        for item in order:
            if item >= 0:
                self._keep(item)
            else:
                m = self._merged[~item]
                self._edit.members[self._add(m)] = m.bucket.members
        return self._edit.model()

    def _merged_casts(self) -> dict[int, tuple[int, ...]]:
        """Map each cast that packing does to the storages that it reads."""
        casts = (piece.cast for m in self._merged for piece in m.layout.pieces)
        places = [self._place[cast] for cast in casts if cast is not None]
        return {i: self._read_by(i) for i in places}

    def _packed(self, start: int) -> tuple[int, ...]:
        """Return the storages that packing reads for a member."""
        cast = self._place.get(self._old.dependencies.nodes[start].all_input_nodes[0], -1)
        return self._casts[cast] if cast in self._casts else self._read_by(start)

    def _read_by(self, i: int) -> tuple[int, ...]:
        liveness = self._old.liveness
        return tuple(s for s in liveness.touches[i] if s not in liveness.allocates[i])

    def _now(self, storages: tuple[int, ...]) -> tuple[int, ...]:
        instead = self._instead
        if instead.keys().isdisjoint(storages):
            return storages
        return tuple(dict.fromkeys(instead.get(s, s) for s in storages))

    def _keep(self, i: int) -> None:
        """Add a node that no bucket replaces, with reads and needs as they are after merging."""
        needs, touches = self._old.needed_values[i], self._old.liveness.touches[i]
        changes: dict[str, Any] = {}
        if not self._packs.keys().isdisjoint(needs):
            changes["needs"] = [self._needed_by_write(i, j) for j in needs]
        if i in self._casts:  # packing does it
            dropped = {"ms": 0.0, "host": 0.0, "allocates": (), "touches": self._casts[i]}
            changes |= {**dropped, "compute": False, "view": True}
        elif (replaced := self._now(touches)) is not touches:
            changes["touches"] = replaced
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

    def _add(self, m: _Merged) -> int:
        """Add a bucket and return its start's place."""
        costs, edit, layout, nodes = self._costs, self._edit, m.layout, self._old.dependencies.nodes
        first, wait, result = m.bucket.members[0], nodes[m.waits[0]], m.buffer
        group, reduces = self._old.group[m.starts[0]], m.kind == "reduce_scatter"
        # Storages that the collective reads.
        sent = tuple(dict.fromkeys(s for i in m.starts for s in self._now(self._packed(i))))
        needs = self._needed_by(m.starts)
        if m.packs:
            nbytes, kernels = self._packing(m)
            concatenated = edit.storage(nbytes)
            made = (result, concatenated) if layout.in_place else (concatenated,)
            pack_ms, pack_host = costs.packing(kernels)
            needs = [edit.add(Row(first, needs, made, made + sent, pack_ms, host=pack_host))]
            sent = made[:1]

        def launch(needs: list[int], read: tuple[int, ...], made: int, ms: float) -> int:
            new = () if made in read else (made,)
            row = Row(first, needs, new, (*read, *new), ms, group, reduces=reduces)
            return edit.add(row._replace(host=costs.launch(first)))

        # In rank order a sum follows the all-to-all; for an all-reduce a gather follows the sum.
        if m.rank_order:
            (nbytes, ms), *gathers = costs.in_rank_order(layout)
            part = edit.storage(-(-nbytes // layout.ranks)) if gathers else result
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
            start = launch(needs, sent, result, costs.bucket(layout))
            done = self._add_wait(m, start, tuple(dict.fromkeys((*sent, result))))
        for i, w, piece in zip(m.starts, m.waits, layout.pieces, strict=True):
            edit.at[i], edit.at[w] = start, done
            if piece.copied:
                results = self._old.liveness.allocates[i]
                ms = costs.copy(costs.result_bytes(piece.start))
                copy = Row(nodes[w], [done], results, (result, *results), ms, host=costs.launch())
                edit.at[w] = edit.add(copy)
            if m.packs:
                self._packs[i] = self._packs[w] = (i, needs[0])
        return start

    def _add_wait(self, m: _Merged, start: int, touches: tuple[int, ...]) -> int:
        needs = [start, *self._needed_by(m.waits)]
        node = self._old.dependencies.nodes[m.waits[0]]
        return self._edit.add(Row(node, needs, (), touches, start_of=start, view=True))

    def _packing(self, m: _Merged) -> tuple[int, Packing]:
        """Return bytes of a bucket's concatenated inputs, and the kernels that pack them."""
        # Both are 0 if ranks may differ in the inputs, see :mod:`.graph.sizes`.
        layout, bytes_of = m.layout, self._costs.result_bytes
        side = self._old.graph.shard_side.nodes
        if layout.kind == "all_gather" and all(piece.value in side for piece in layout.pieces):
            return 0, Packing((), 0)
        return layout.read(bytes_of), layout.packing(bytes_of, bool(self._costs.machine.fuses))

    def _needed_by(self, places: Iterable[int]) -> list[int]:
        needed, new_place = self._old.needed_values, self._edit.at
        return [new_place[j] for i in places for j in needed[i] if new_place[j] >= 0]
