"""Edit the models of forward and backward for a kept part, or for parked activations.

Of a part, each rank keeps the values that backward gathers in a smaller group
(:mod:`.passes.reshard_to`)::

    whole again   w -> pack -> gather(all) -> wait -> copies           holds nothing
    in part       part -> pack -> gather(smaller) -> wait -> copies    holds the part

Parked activations are copied to host memory and back::

    forward    x = relu(y)   TO HOST(x)   z = mm(x, w)   ...   wait           x is freed
    backward   FROM HOST(x)  ...   wait   threshold_backward(g, x)            x is allocated again

The copies are nodes on two streams, and schedules place them: to host memory as soon as the value
is there, back as gathers are prefetched. torch's partitioner makes the same nodes
(:mod:`.passes.park`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx as fx

from ...graph.liveness import Storages
from ...graph.nodes import FROM_HOST, TO_HOST
from ...graph.tags import tag_of
from ...passes.reshard_to import Smaller
from ..cost.cost import Costs
from ..schedule.model import Model, ModelEdit, Row
from .keepables import Keepable


@dataclass(frozen=True)
class PartChanges:
    """The changes in both halves if a part is kept."""

    # By held storage, the place in forward of the wait after which it is allocated.
    made: dict[int, int] = field(default_factory=dict)
    # By held storage, the last place in backward that reads it.
    read: dict[int, int] = field(default_factory=dict)
    # By place in forward, milliseconds of the copies made there.
    copy_ms: dict[int, float] = field(default_factory=dict)
    # By place in backward, the changed fields of its `Row`.
    changes: dict[int, dict[str, Any]] = field(default_factory=dict)
    # By place of a pack in backward, additional bytes that it allocates.
    more: dict[int, int] = field(default_factory=dict)


def with_parts(
    forward: Model, backward: Model, keepables: Sequence[Keepable], costs: Costs, smaller: Smaller
) -> tuple[tuple[Model, Model], list[Keepable], dict[int, PartChanges]]:
    """Make a part of each unit with buckets that can be gathered in ``smaller``.

    Returns models of both halves with the parts' storages; the parts, to be appended to
    ``keepables``; and their changes by their future indices.
    """
    live, nodes = backward.liveness, backward.dependencies.nodes
    owner = {n: k for k, one in enumerate(keepables) if one.held for n in one.starts}
    made: dict[fx.Node, int] = {}  # by member, the wait in forward after which a part can be cut
    for i, start in enumerate(forward.start_of):
        if start >= 0:
            first = forward.dependencies.nodes[start]
            made.update(dict.fromkeys(forward.members.get(start, (first,)), i))
    wait_of = {start: i for i, start in enumerate(backward.start_of)}
    # One numbering of storages for both halves: a part is made in forward and read in backward.
    size = [*live.size, *[0] * max(0, len(forward.liveness.size) - len(live.size))]

    def storage(nbytes: int) -> int:
        size.append(nbytes)
        return len(size) - 1

    # The buckets of backward, by keepable, whose members all fit the smaller group.
    fitting: dict[int, list[tuple[int, tuple[fx.Node, ...]]]] = {}
    for place, node in enumerate(nodes):
        members = backward.members.get(place, (node,))
        fits = all(m in made and m in smaller.starts for m in members)
        if node in owner and backward.group[place] is not None and fits:
            fitting.setdefault(owner[node], []).append((place, members))
    made_parts, parts = list[Keepable](), dict[int, PartChanges]()
    for k, buckets in sorted(fitting.items()):
        part, held = PartChanges(), list[int]()
        for place, members in buckets:
            # A merged bucket's pack has the node of its first member; a single gather has none.
            packs = [j for j in backward.dependencies.needs[place] if nodes[j] is members[0]]
            mine = []
            for member in members:
                nbytes = costs.result_bytes(member) // smaller.ranks
                mine.append(s := storage(nbytes))
                part.made[s] = made[member]
                part.read[s] = packs[0] if packs else wait_of[place]
                copy_ms = part.copy_ms.get(made[member], 0.0)
                part.copy_ms[made[member]] = copy_ms + costs.copy(nbytes)
            given = sum(size[s] for s in mine)
            moved = given * (1 + smaller.ranks)  # input and output of the gather
            ms = costs.as_kind("all_gather", members[0], moved, smaller.group)
            part.changes[place] = {"ms": ms, "group": smaller.group}
            if packs:  # the pack concatenates parts instead of shards
                buffer, before = live.allocates[packs[0]]
                part.more[packs[0]] = given - size[before]
                new = buffer, storage(given)
                ms = costs.pack(given, given)
                row = {"ms": ms, "allocates": new, "touches": (*new, *mine)}
                part.changes[packs[0]] = row
            else:  # the gather itself reads the part, until its wait
                both = {"touches": (*live.allocates[place], *mine)}
                part.changes[place].update(both)
                part.changes[wait_of[place]] = both
            held += mine
        whole = keepables[k]
        starts = tuple(m for _, members in buckets for m in members)
        fqns = tuple(f for n in starts if (tag := tag_of(n)) is not None for f in tag.fqns)
        name = f"{whole.name} over {smaller.ranks} ranks"
        nbytes = sum(size[s] for s in held)
        parts[len(keepables) + len(parts)] = part
        made_parts.append(Keepable(name, starts, (), fqns, nbytes, tuple(held), k))
    groups = [*filter(None, backward.group), smaller.group]
    backward = replace(
        backward,
        liveness=Storages(size, live.allocates, live.touches, live.kept, live.at_start),
        shared=costs.shared_levels(groups),
    )
    first = forward.liveness
    size = [*first.size, *size[len(first.size) :]]
    stays = Storages(size, first.allocates, first.touches, first.kept, first.at_start)
    return (replace(forward, liveness=stays), backward), made_parts, parts


def with_copies(
    forward: Model, backward: Model, parked: Mapping[int, fx.Node], costs: Costs
) -> tuple[Model, Model]:
    """Add the copies to and from the host to both models; ``parked``: nodes by their storages."""
    return _to_host(forward, parked, costs), _from_host(backward, parked, costs)


def _to_host(model: Model, parked: Mapping[int, fx.Node], costs: Costs) -> Model:
    live, edit = model.liveness, ModelEdit(model)
    last = {s: i for i, touched in enumerate(live.touches) for s in parked.keys() & touched}
    start: dict[int, int] = {}
    for i, (new, touched) in enumerate(zip(live.allocates, live.touches, strict=True)):
        there = edit.keep(i)
        for s in (s for s in new if s in parked):
            ms = costs.host_copy(live.size[s])
            start[s] = edit.add(Row(parked[s], (there,), (), (s,), ms, TO_HOST))
        for s in (s for s in touched if last.get(s) == i):
            edit.add(_wait(parked[s], s, start[s]))
    edit.kept = {s: None for s in live.kept if s not in parked}
    return edit.model()


def _from_host(model: Model, parked: Mapping[int, fx.Node], costs: Costs) -> Model:
    live, edit = model.liveness, ModelEdit(model)
    there: dict[int, int] = {}
    for i, touched in enumerate(live.touches):
        mine = [s for s in touched if s in parked]
        for s in (s for s in mine if s not in there):
            ms = costs.host_copy(live.size[s])
            start = edit.add(Row(parked[s], (), (s,), (s,), ms, FROM_HOST))
            there[s] = edit.add(_wait(parked[s], s, start))
        edit.keep(i, needs=[*edit.row(i).needs, *(there[s] for s in mine)])
    edit.at_start -= sum(live.size[s] for s in parked)
    return edit.model()


def _wait(node: fx.Node, s: int, start: int) -> Row:
    return Row(node, (start,), (), (s,), start_of=start, view=True)
