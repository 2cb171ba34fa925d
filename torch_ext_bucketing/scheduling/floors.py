"""What a choice of kept units takes at least, in whatever order: bytes and milliseconds.

Most choices can be ruled out by that without scheduling them. While a node runs, what comes before
it on a path of dependencies and is read behind it is live in every order; each stream is busy for
the sum of its nodes. Both are sums over units, so a choice costs a few additions::

    mm1 -> mm2 -> mm3         while mm2 runs, the result of mm1 is live if mm3 reads it
     `-> mm4                  that of mm4 need not be
"""

from __future__ import annotations

from collections.abc import Collection

import torch.fx as fx

from .halves import Halves
from .model import Model

__all__ = ["Floors"]


class Floors:
    """See :mod:`.scheduling.floors`. Made once for all choices; takes the square of the nodes.

    Args:
        halves: of the joint graph.
    """

    def __init__(self, halves: Halves) -> None:
        self._held = {s: k for k, unit in enumerate(halves.units) for s in unit.held}
        self._owners: dict[fx.Node, list[int]] = {}
        for k, unit in enumerate(halves.units):
            for node in unit.chains:
                self._owners.setdefault(node, []).append(k)
        at_start = halves.backward.liveness.at_start
        nbytes = {k: unit.nbytes for k, unit in enumerate(halves.units) if unit.held}
        rows = [(at_start, nbytes)]
        for model in (halves.forward, halves.backward):
            rows += self._rows(model, model is halves.forward)
        seen = {(base, *sorted(more.items())): (base, more) for base, more in rows}
        self._bytes = list(seen.values())
        self._forward_ms = max(_busy(halves.forward).values(), default=0.0)
        self._backward_ms = _busy(halves.backward)
        self._saved_ms: dict[int, dict[str | None, float]] = {}
        for i, node in enumerate(halves.backward.dependencies.nodes):
            # What serves several units is counted as saved with each: less than that it can't be.
            for k in self._owners.get(node, ()):
                if halves.units[k].held:
                    saved = self._saved_ms.setdefault(k, {})
                    stream = _stream(halves.backward, i)
                    saved[stream] = saved.get(stream, 0.0) + halves.backward.ms[i]

    def peak_bytes(self, kept: Collection[int]) -> int:
        """No order of both halves has a smaller peak with these units kept."""
        return max(base + sum(more.get(k, 0) for k in kept) for base, more in self._bytes)

    def step_ms(self, kept: Collection[int]) -> float:
        """No order of both halves is faster: the busiest stream of each."""
        left = dict(self._backward_ms)
        for k in sorted(kept):
            for group, ms in self._saved_ms.get(k, {}).items():
                left[group] -= ms
        return self._forward_ms + max(left.values(), default=0.0)

    def _rows(self, model: Model, forward: bool) -> list[tuple[int, dict[int, int]]]:
        """For each node: the bytes that are live while it runs, and what each kept unit adds."""
        before, after = _reachable(model)
        live = model.liveness
        made: dict[int, int] = {}
        read: dict[int, int] = {}
        for i in range(len(model)):
            made.update(dict.fromkeys(live.allocates[i], i))
            for s in live.touches[i]:
                read[s] = read.get(s, 0) | 1 << i
        handed = [s for s in read if s not in made and s not in live.kept]
        nodes = model.dependencies.nodes
        owners = [() if forward else self._owners.get(n, ()) for n in nodes]
        found = []
        for i in range(len(model)):
            # Ranks may differ in what pads and cuts their shards.
            if model.view[i] or nodes[i] in model.shard_side.nodes:
                continue
            base, more = live.at_start, dict[int, int]()
            base -= sum(live.size[s] for s in handed if not read[s] & after[i])
            for s, at in made.items():
                size, owner = live.size[s], self._held.get(s)
                there = bool(before[i] >> at & 1)
                now = there and (s in live.kept or bool(read[s] & after[i]))
                base += size * now
                if owner is not None:
                    then = there if forward else bool(read[s] & after[i])
                    more[owner] = more.get(owner, 0) + size * (then - now)
                for k in owners[at] if owner is None and now else ():
                    more[k] = more.get(k, 0) - size  # a buffer of a gather that is saved
            found.append((base, more))
        if forward:
            base = live.at_start + sum(live.size[s] for s in made if s in live.kept)
            more = {}
            for s, k in self._held.items():
                if s in made and s not in live.kept:
                    more[k] = more.get(k, 0) + live.size[s]
            found.append((base, more))
        return found


def _reachable(model: Model) -> tuple[list[int], list[int]]:
    """For each node what is before and behind it on paths, with itself, as bits by place."""
    needs, needed_by = model.dependencies.needs, model.dependencies.needed_by
    before, after = ([1 << i for i in range(len(model))] for _ in range(2))
    for i in range(len(model)):
        for j in needs[i]:
            before[i] |= before[j]
    for i in reversed(range(len(model))):
        for j in needed_by[i]:
            after[i] |= after[j]
    return before, after


def _stream(model: Model, i: int) -> str | None:
    group = model.group[i]
    return group if group is None else model.shared.get(group, group)


def _busy(model: Model) -> dict[str | None, float]:
    found: dict[str | None, float] = {}
    for i, ms in enumerate(model.ms):
        stream = _stream(model, i)
        found[stream] = found.get(stream, 0.0) + ms
    return found
