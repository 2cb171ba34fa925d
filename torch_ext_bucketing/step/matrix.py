"""Append updates that are a function of whole matrices: Muon's.

Every bucket of matrices (:mod:`.owners`) gets these nodes; ``all_to_all`` stands for one per mesh
dimension, with its wait::

    grads, momentum -> send_momentum_ -> all_to_all -> orthogonalize -> all_to_all -> add_updates_

Momentum and parameters stay sharded, and change element by element. bfloat16 travels: torch's
Newton-Schulz rounds to it first, so that nothing is lost. One matrix is computed after the other,
by torch's own function: a batched product may have other bits.

A parameter ``[stack, rows, columns]`` is a stack of matrices, each with an owner of its own.
Operators number the matrices of all their parameters in one row. Matrices that lie whole on one
rank, such as a layer's experts, are computed there, as far as the balance allows.

Nodes of a bucket stand between those of others, so that one is exchanged while another is
computed::

    send 1   send 2, compute 1   send 3, compute 2   compute 3   add 1, add 2, add 3
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from operator import contains
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch import Tensor

from .._torch.fsdp2 import blocks_of, largest_shard_numel, mesh_of, sharded_dims
from .._torch.optimizers import adjusted_lr, matrices_in, newton_schulz
from .._torch.process_groups import as_argument, compiles_for_all_ranks, mesh_group
from ..graph.nodes import set_updates
from ..graph.sizes import Work, set_work
from ..reports.compile import Owners
from .owners import (
    Coordinate,
    Hop,
    Matrix,
    Piece,
    Rectangle,
    Routes,
    choose_buckets,
    choose_owners,
    newton_schulz_flops,
    tiles,
)
from .rules import MatrixRule, operator

_c10d = torch.ops._c10d_functional
SENT = torch.bfloat16  # the dtype of momentum and updates that travel
LEAST_BYTES = 8 << 20  # bytes below which an exchange is mostly latency
EXCHANGE_BYTES = 256 << 20
_BUFFERS = 5  # of Newton-Schulz: the whole matrix, two of its size and two of the shorter side's


def _send_momentum(
    momentum: list[Tensor],
    grads: list[Tensor],
    numbers: list[Tensor],
    skip: Tensor | None,
    order: list[int],
    nesterov: bool,
) -> Tensor:
    """Update momentum as ``torch.optim.Muon`` does; pack the updates to orthogonalize."""
    out = _packed(grads, order)
    if skip is not None and skip.item():
        return out.zero_()
    parts: dict[int, list[Tensor]] = {}
    sizes = [m.numel() for m in matrices_in(grads)]
    for i, part in zip(order, out.split([sizes[i] for i in order]), strict=True):
        parts.setdefault(i, []).append(part)
    place = itertools.count()
    for buffer, grad, values in zip(momentum, grads, numbers, strict=True):
        factor = values[1].item()
        buffer.lerp_(grad, 1 - factor)
        update = grad.lerp(buffer, factor) if nesterov else buffer
        for matrix in matrices_in([update]):
            for part in parts.get(next(place), ()):
                part.view(matrix.shape).copy_(matrix)
    return out


def _packed(grads: list[Tensor], order: list[int]) -> Tensor:
    sizes = [m.numel() for m in matrices_in(grads)]
    return grads[0].new_empty([sum(sizes[i] for i in order)], dtype=SENT)


def _repack(buffer: Tensor, sizes: list[int], order: list[int]) -> Tensor:
    """Pack parts of a buffer in another order, some of them several times or not at all."""
    parts = buffer.split(sizes)
    return torch.cat([parts[i] for i in order]) if order else buffer.new_empty([0])


def _orthogonalize(
    received: Tensor,
    shapes: list[int],
    given: list[int],
    wanted: list[int],
    coefficients: list[float],
    eps: float,
    steps: int,
) -> Tensor:
    """Orthogonalize matrices of ``shapes`` (rows and columns of each), whose parts are in a buffer.

    ``given`` has five numbers for each part in ``received``: its matrix, row, column, rows and
    columns; ``wanted`` likewise for the result.
    """
    out = _orthogonal(received, wanted)
    parts = [
        [
            (v[0], Rectangle(*v[1:]), p)
            for v, p in zip(fives, buffer.split(_sizes(fives)), strict=True)
        ]
        for fives, buffer in ((_fives(given), received), (_fives(wanted), out))
    ]
    for i in range(len(shapes) // 2):
        whole = received.new_empty(shapes[2 * i : 2 * i + 2])
        for _, b, part in (p for p in parts[0] if p[0] == i):
            _at(whole, b).copy_(part.view(b.rows, b.columns))
        update = newton_schulz(whole, tuple(coefficients), steps, eps)
        for _, b, part in (p for p in parts[1] if p[0] == i):
            part.view(b.rows, b.columns).copy_(_at(update, b))
    return out


def _orthogonal(received: Tensor, wanted: list[int]) -> Tensor:
    return received.new_empty([sum(_sizes(_fives(wanted)))])


def _fives(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(numbers[i : i + 5]) for i in range(0, len(numbers), 5)]


def _sizes(parts: Sequence[Sequence[int]]) -> list[int]:
    return [rows * columns for _, _, _, rows, columns in parts]


def _at(matrix: Tensor, b: Rectangle) -> Tensor:
    return matrix[b.row : b.row + b.rows, b.column : b.column + b.columns]


def _add_updates(
    params: list[Tensor],
    received: Tensor,
    numbers: list[Tensor],
    skip: Tensor | None,
    order: list[int],
    shapes: list[int],
    adjust: str | None,
) -> None:
    """Decay parameters and add their updates as ``torch.optim.Muon`` does.

    ``order`` has the places of the matrices whose parts are in ``received``, ``shapes`` rows and
    columns of each parameter's whole matrices.
    """
    if skip is not None and skip.item():
        return
    matrices = matrices_in(params)
    whose = [k for k, p in enumerate(params) for _ in matrices_in([p])]
    for i, part in zip(order, received.split([matrices[i].numel() for i in order]), strict=True):
        k = whose[i]
        lr, _, decay = numbers[k].tolist()
        matrices[i].mul_(1 - lr * decay)
        scale = adjusted_lr(lr, adjust, torch.Size(shapes[2 * k : 2 * k + 2]))
        matrices[i].add_(part.view(matrices[i].shape), alpha=-scale)


SEND = operator(
    "send_momentum_(Tensor(a!)[] momentum, Tensor[] grads, Tensor[] numbers, Tensor? skip, "
    "int[] order, bool nesterov) -> Tensor",
    _send_momentum,
    lambda momentum, grads, numbers, skip, order, nesterov: _packed(grads, order),
)
REPACK = operator("repack(Tensor buffer, int[] sizes, int[] order) -> Tensor", _repack, _repack)
ORTHOGONALIZE = operator(
    "orthogonalize(Tensor received, int[] shapes, int[] given, int[] wanted, "
    "float[] coefficients, float eps, int steps) -> Tensor",
    _orthogonalize,
    lambda received, shapes, given, wanted, *numbers: _orthogonal(received, wanted),
)
ADD = operator(
    "add_updates_(Tensor(a!)[] params, Tensor received, Tensor[] numbers, Tensor? skip, "
    "int[] order, int[] shapes, str? adjust) -> ()",
    _add_updates,
    lambda *args: None,
)


class Update(NamedTuple):
    """A parameter, the group of its optimizer, and the nodes of its update."""

    fqn: str
    parameter: Tensor
    group: dict[str, Any]
    shard: fx.Node
    gradient: fx.Node
    momentum: fx.Node
    numbers: fx.Node


def bytes_within(room: int, parameters: Sequence[Tensor]) -> int:
    """Choose the bytes of whole matrices that a rank receives in one exchange.

    ``room`` has bytes for all of this on the rank with most, beside all gradients.
    """
    # At most these are live at once: received matrices, the next ones, buffers that send them, an
    # update per copy, and Newton-Schulz's buffers. Sent and returned parts take the place of
    # gradients; where gradients are smaller, the difference comes on top.
    excess = (max(0, 2 * SENT.itemsize - p.itemsize) * largest_shard_numel(p) for p in parameters)
    copies = 1
    for p in parameters:
        cut = {d for _, d in sharded_dims(p)}
        mesh = () if mesh_of(p) is None else mesh_of(p).shape
        copies = max(copies, math.prod(n for d, n in enumerate(mesh) if d not in cut))
    largest = _BUFFERS * SENT.itemsize * max(math.prod(_size(p)) for p in parameters)
    return max(1, min(EXCHANGE_BYTES, (room - sum(excess) - largest) // (3 + copies)))


def append_matrices(
    call: Callable[..., fx.Node], updates: Sequence[Update], skip: fx.Node | None, cap: int | None
) -> tuple[Owners, ...]:
    """Append the updates of matrices, the first gradient to arrive first; report on each mesh.

    ``skip`` is the node that is not zero if the step changes nothing; ``cap`` the bytes of whole
    matrices that a rank may receive in one exchange; None: 256 MiB.
    """
    if updates and compiles_for_all_ranks():
        raise ValueError(
            "a graph that exchanges matrices holds the sizes of one rank: switch "
            "compile_on_one_rank off, or update by another optimizer than Muon"
        )
    alike: dict[Any, list[Update]] = {}
    for u in updates:
        values = [u.group[name] for name in MatrixRule.options]
        options = tuple(tuple(v) if isinstance(v, list) else v for v in values)
        alike.setdefault((mesh_of(u.parameter), options), []).append(u)
    # The costliest first, as among matrices: the others even out what these leave.
    groups = sorted(map(_Alike, alike.values()), key=lambda g: -max(g.costs))
    loads: dict[tuple[int, ...], dict[int, int]] = {}
    buckets: list[_MatrixBucket] = []
    for g in groups:
        # Meshes of the same ranks, such as that of experts, share the load.
        load = loads.setdefault(tuple(sorted(g.ranks)), dict.fromkeys(g.ranks, 0))
        g.choose(load, EXCHANGE_BYTES if cap is None else cap)
        buckets += (_MatrixBucket(call, *arguments) for arguments in g.buckets)
    # One bucket is exchanged while the one before it is computed.
    for before, bucket in zip([None, *buckets], [*buckets, None], strict=True):
        if bucket is not None:
            bucket.send(skip)
        if before is not None:
            before.compute()
    for bucket in buckets:
        bucket.add(skip)
    return tuple(
        _owners([g for g in groups if tuple(sorted(g.ranks)) == ranks], list(load.values()))
        for ranks, load in loads.items()
    )


def _size(parameter: Tensor) -> tuple[int, int]:
    """Return rows and columns of a parameter's matrices."""
    rows, columns = parameter.shape[-2:]
    return rows, columns


def _owners(groups: Sequence[_Alike], loads: Sequence[int]) -> Owners:
    exchanges = [exchange for g in groups for *_, exchange in g.buckets]
    matrices = sum(len(e.matrices) for e in exchanges)
    travelling = sum(any(s.dim is not None for s in e.to_shards()) for e in exchanges)
    balance = max(loads) * len(loads) / sum(loads)
    return Owners(matrices, len(loads), loads.count(0), balance, travelling)


class _Alike:
    """Parameters of one mesh with the same options, by the first gradient to arrive."""

    def __init__(self, updates: Sequence[Update]) -> None:
        mesh = mesh_of(updates[0].parameter)
        self.updates = updates
        self.shape = () if mesh is None else tuple(mesh.shape)
        self.at = () if mesh is None else tuple(mesh.get_coordinate())
        self.ranks: list[int] = [0] if mesh is None else mesh.mesh.flatten().tolist()
        matrices: dict[Any, list[Matrix]] = {}
        stacks = [(k, m) for k, u in enumerate(updates) for m in self._matrices(u, matrices)]
        self.stacks, self.matrices = [k for k, _ in stacks], [m for _, m in stacks]
        steps = updates[0].group["ns_steps"]
        self.costs = [newton_schulz_flops(m.rows, m.columns, steps) for m in self.matrices]
        self.buckets: list[tuple[list[Update], list[int], Routes]] = []

    def choose(self, load: dict[int, int], cap: int) -> None:
        """Choose owners, whose work is added to ``load``, and buckets."""
        places = list(itertools.product(*map(range, self.shape)))
        loads = [load[rank] for rank in self.ranks]
        owners = choose_owners(self.costs, loads, [m.home for m in self.matrices])
        load.update(zip(self.ranks, loads, strict=True))
        nbytes = [SENT.itemsize * m.rows * m.columns for m in self.matrices]
        figures = self.costs, nbytes, owners, cap, LEAST_BYTES
        for members in choose_buckets(*figures, stacks=self.stacks):
            matrices = [replace(self.matrices[i], owner=places[owners[i]]) for i in members]
            stacks = list(dict.fromkeys(self.stacks[i] for i in members))
            whose = [stacks.index(self.stacks[i]) for i in members]
            updates = [self.updates[k] for k in stacks]
            self.buckets.append((updates, whose, Routes(matrices, self.shape, self.at)))

    def _matrices(self, update: Update, by_layout: dict[Any, list[Matrix]]) -> list[Matrix]:
        """Read where matrices are, which ``by_layout`` keeps for others of the same placements."""
        whole = update.parameter
        if whole.dim() not in (2, 3):
            raise ValueError(
                f"{update.fqn} has {whole.dim()} dimensions, and Muon updates matrices and stacks "
                "of them: give it to another optimizer"
            )
        key = (tuple(whole.shape), getattr(whole, "placements", None))
        if key not in by_layout:
            cut = {d for _, d in sharded_dims(whole)}
            sharded = tuple(d in cut for d in range(len(self.shape)))
            parts: list[dict[Coordinate, Rectangle]]
            parts = [{} for _ in range(whole.shape[0] if whole.dim() == 3 else 1)]
            for coordinate, bounds in blocks_of(whole).items():
                half = len(bounds) // 2  # offsets, then sizes; a matrix counts as a stack of one
                first, row, column = (0, *bounds[:half])[-3:]
                count, rows, columns = (1, *bounds[half:])[-3:]
                block = Rectangle(row, column, rows, columns)
                for blocks in parts[first : first + count] if block.size else ():
                    blocks[coordinate] = block
            size = _size(whole)
            if not all(tiles(*size, blocks.values()) for blocks in parts):
                raise ValueError(
                    f"{update.fqn} is sharded as {whole.placements}, whose shards are not "  # type: ignore[attr-defined]
                    "blocks of its rows and columns, so no rank can put the matrix together: shard "
                    "it otherwise, or give it to another optimizer than Muon"
                )
            by_layout[key] = [Matrix(*size, sharded, b, home=self._home(sharded, b)) for b in parts]
        return by_layout[key]

    def _home(self, sharded: Sequence[bool], blocks: Mapping[Coordinate, Rectangle]) -> list[int]:
        having_by_dim: list[Collection[int]] = []
        for d, (cut, ranks) in enumerate(zip(sharded, self.shape, strict=True)):
            having = {c[d] for c in blocks}
            having_by_dim.append(having if cut and len(having) == 1 else range(ranks))
        if list(map(len, having_by_dim)) == list(self.shape):
            return []
        places = itertools.product(*map(range, self.shape))
        return [i for i, c in enumerate(places) if all(map(contains, having_by_dim, c))]


class _MatrixBucket:
    """The nodes of one bucket of matrices."""

    def __init__(
        self,
        call: Callable[..., fx.Node],
        updates: Sequence[Update],
        whose: Sequence[int],
        exchange: Routes,
    ) -> None:
        self._call, self._updates, self._exchange = call, updates, exchange
        held = {part.matrix: None for part in exchange.held(exchange.at, 0)}
        # The place of each matrix among those in this rank's shards, where a part of it is there.
        self._place: dict[int, int] = {}
        first = 0
        for k, u in enumerate(updates):
            local = u.shard.meta["val"].shape
            members = [i for i in held if whose[i] == k]
            self._place.update(zip(members, itertools.count(first)))
            first += local[0] if len(local) == 3 else 1
        self._forth, self._back = exchange.to_owners(), exchange.to_shards()
        self._mesh = mesh_of(updates[0].parameter)
        self._sent: fx.Node
        self._have: list[Piece] = []

    def send(self, skip: fx.Node | None) -> None:
        """Append momentum, and the exchange to the owners."""
        updates = self._updates
        first = self._forth[0].sent if self._forth else self._exchange.held((), 0)
        order = [self._place[p.matrix] for p in first]
        lists = zip(*((u.momentum, u.gradient, u.numbers) for u in updates), strict=True)
        nesterov = updates[0].group["nesterov"]
        self._sent = self._call(SEND, *map(list, lists), skip, order, nesterov)
        most = self._forth[0].most[0] if self._forth else self._exchange.elements(first)
        size = SENT.itemsize * most
        set_work(self._sent, Work(size, 6 * size))
        self._have = first
        for hop in self._forth:
            self._move(hop)

    def compute(self) -> None:
        """Append Newton-Schulz, and the exchange to the shards."""
        ex, group = self._exchange, self._updates[0].group
        held = list(dict.fromkeys(p.matrix for p in self._have))
        to_send = self._back[0].sent if self._back else self._have
        shapes = [n for i in held for n in (ex.matrices[i].rows, ex.matrices[i].columns)]
        received_blocks, out = (
            [n for p in parts for n in (held.index(p.matrix), *ex.matrices[p.matrix].blocks[p.at])]
            for parts in (self._have, to_send)
        )
        coefficients = list(group["ns_coefficients"])
        arguments = (shapes, received_blocks, out, coefficients, group["eps"], group["ns_steps"])
        self._sent = self._call(ORTHOGONALIZE, self._sent, *arguments)
        # The busiest owner's work, so that estimates are alike on every rank.
        flops: dict[Coordinate, int] = {}
        for m in ex.matrices:
            work = newton_schulz_flops(m.rows, m.columns, group["ns_steps"])
            flops[m.owner] = flops.get(m.owner, 0) + work
        size = SENT.itemsize * (self._back[0].most[0] if self._back else ex.elements(to_send))
        largest = _BUFFERS * SENT.itemsize * max(m.rows * m.columns for m in ex.matrices)
        set_work(self._sent, Work(size, 4 * size, max(flops.values())))
        set_updates(self._sent, (), largest)
        self._have = to_send
        for hop in self._back:
            self._move(hop)

    def add(self, skip: fx.Node | None) -> None:
        """Append the updates of the parameters."""
        shapes = [n for u in self._updates for n in _size(u.parameter)]
        order = [self._place[p.matrix] for p in self._have]
        adjust = self._updates[0].group["adjust_lr_fn"]
        shards, numbers = ([u.shard for u in self._updates], [u.numbers for u in self._updates])
        node = self._call(ADD, shards, self._sent, numbers, skip, order, shapes, adjust)
        set_updates(node, [u.fqn for u in self._updates], 0)
        set_work(node, Work(0))

    def _move(self, hop: Hop) -> None:
        """Append a repacking if the order or the parts differ, and the all-to-all."""
        if hop.sent != self._have:
            place = {part: i for i, part in enumerate(self._have)}
            sizes = [self._exchange.elements([p]) for p in self._have]
            order = [place[p] for p in hop.sent]
            self._sent = self._call(REPACK, self._sent, sizes, order)
            size = SENT.itemsize * hop.most[0]
            set_work(self._sent, Work(size, 2 * size))
        self._have = hop.received
        if hop.dim is None:
            return
        group = as_argument(mesh_group(self._mesh, hop.dim))
        splits = (hop.received_from, hop.sent_to)
        self._sent = self._call(_c10d.all_to_all_single.default, self._sent, *splits, group)
        sent, received = (SENT.itemsize * n for n in hop.most)
        set_work(self._sent, Work(received, sent + received))
        self._sent = self._call(_c10d.wait_tensor.default, self._sent)
