"""Add to a choice's models the copies of activations to host memory and back.

::

    forward    x = relu(y)   TO HOST(x)   z = mm(x, w)   ...   wait           x is freed
    backward   FROM HOST(x)  ...   wait   threshold_backward(g, x)            x is allocated again

The copies are nodes on two streams, and schedules place them: to host memory as soon as the value
is there, back as gathers are prefetched. torch's partitioner makes the same nodes
(:mod:`.passes.park`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch.fx as fx

from ...graph.host_copies import FROM_HOST, TO_HOST
from ...graph.liveness import Storages
from ..cost.cost import Costs
from ..schedule.model import Model, Row


def with_copies(
    forward: Model, backward: Model, parked: Mapping[int, fx.Node], costs: Costs
) -> tuple[Model, Model]:
    """Return the models of both halves with the copies of some saved storages.

    Args:
        parked: by storage, the node of forward that makes it. Backward reads it.
    """
    return _to_host(forward, parked, costs), _from_host(backward, parked, costs)


def _to_host(model: Model, parked: Mapping[int, fx.Node], costs: Costs) -> Model:
    live, rows = model.liveness, _Rows(model)
    last = {s: i for i, touched in enumerate(live.touches) for s in parked.keys() & touched}
    start: dict[int, int] = {}
    for i, (new, touched) in enumerate(zip(live.allocates, live.touches, strict=True)):
        rows.add_old(i)
        for s in (s for s in new if s in parked):
            ms = costs.host_copy(live.size[s])
            start[s] = rows.add(Row(parked[s], (rows.at[i],), (), (s,), ms, TO_HOST))
        for s in (s for s in touched if last.get(s) == i):
            rows.add(_wait(parked[s], s, start[s]))
    return rows.built(replace(live, kept={s: None for s in live.kept if s not in parked}))


def _from_host(model: Model, parked: Mapping[int, fx.Node], costs: Costs) -> Model:
    live, rows = model.liveness, _Rows(model)
    there: dict[int, int] = {}
    for i, touched in enumerate(live.touches):
        mine = [s for s in touched if s in parked]
        for s in (s for s in mine if s not in there):
            ms = costs.host_copy(live.size[s])
            start = rows.add(Row(parked[s], (), (s,), (s,), ms, FROM_HOST))
            there[s] = rows.add(_wait(parked[s], s, start))
        rows.add_old(i, [there[s] for s in mine])
    return rows.built(replace(live, at_start=live.at_start - sum(live.size[s] for s in parked)))


def _wait(node: fx.Node, s: int, start: int) -> Row:
    return Row(node, (start,), (), (s,), start_of=start, view=True)


class _Rows:
    """The rows of a model with others between them; ``at`` maps old places to new ones."""

    def __init__(self, model: Model) -> None:
        self._model, self._rows = model, list[Row]()
        self.at = [-1] * len(model)

    def add(self, row: Row) -> int:
        self._rows.append(row)
        return len(self._rows) - 1

    def add_old(self, i: int, more: Collection[int] = ()) -> None:
        row = self._model.row(i, self.at)
        self.at[i] = self.add(row._replace(needs=[*row.needs, *more]))

    def built(self, live: Storages) -> Model:
        members = {self.at[i]: starts for i, starts in self._model.members.items()}
        return self._model.rebuilt(self._rows, members, live.size, live.kept, live.at_start)
