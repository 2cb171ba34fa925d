"""Merge collectives by unit or by a byte cap, move and replace reductions.

A ring adds an element's contributions in an order that depends on the element's offset in the
buffer, and rounds each partial sum to the wire's dtype. With :class:`FixedOrderReduce` every rank
receives all contributions to its own part and adds them itself. For n ranks with a packed buffer
``g`` each::

    before    g [n * k] ----------> reduce_scatter avg -> wait ------------------------> [k]

    after     g [n * k] ----------> all_to_all -> wait -> sum in rank order -----------> [k]

    before    g [m] --------------> all_reduce avg -> wait ----------------------------> [m]

    after     g [m] -> pad [n * k] -> all_to_all -> wait -> sum in rank order -> [k]
                                   -> all_gather -> wait -> slice ---------------------> [m]

    after     g [m] --------------> all_gather -> wait -> sum in rank order -----------> [m]
    (n = 2)

The sum is a chain of additions: a kernel may choose the order of a ``sum`` over a dimension. The
chain is one operator (:func:`.sum_in_rank_order`), so the size of a graph does not depend on the
number of ranks, and Inductor makes one kernel of it (:mod:`._torch.inductor`).

A process group's collectives run one after the other, on one stream: in the backward of FSDP the
all-gather of the next unit waits for the reduce-scatter of the last one. They overlap if reductions
have a group of their own, of the same ranks (:class:`SeparateGroups`)::

    one group     AG(2) RS(3) AG(1) RS(2)           two groups    AG(2) AG(1)
                                                                     RS(3) RS(2)

They still share the network's bandwidth, and NCCL keeps buffers for each group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.fx as fx
from torch.distributed.device_mesh import DeviceMesh

from .._torch.aot import in_backward, mark_backward
from .._torch.inductor import lower_sum
from .._torch.process_groups import new_groups
from ..bucketing.pack import PayloadKey, Writer, merge_and_report
from ..bucketing.plan import ByCap, ByUnit, CapMb, Eligible, Groups, check_groups
from ..errors import check_argument
from ..fsdp.rank_order import SUM, check_accumulate, steps_of
from ..fsdp.units import Units
from ..graph.analysis import Collective, GraphAnalysis
from ..graph.nodes import (
    FSDP_KINDS,
    Kind,
    argument,
    check_kinds,
    group_name,
    kind_of,
    mark_replaced,
    set_group_name,
    tag_of,
)
from .base import BUCKETS, ORDER, RANK_ORDER, Compilation, GraphPass
from .checks import DividedUnits
from .watch import RunWatch, watch_for_shards

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


def reduce_by_all_to_all(graph: fx.Graph, accumulate: torch.dtype) -> None:
    """Replace the gradient reductions of a tagged graph, with sums in the dtype ``accumulate``."""
    for c in GraphAnalysis(graph).gradient_sums.values():
        _replace(graph, c, accumulate)


def _replace(graph: fx.Graph, c: Collective, accumulate: torch.dtype) -> None:
    """Replace one reduction; the new start keeps the old one's name, which reports use."""
    start, wait, kind, ranks = c.start, c.wait, c.kind, c.ranks
    readers = list(wait.users)
    average, group = c.reduce_op == "avg", argument(start, "group_name")
    value = start.all_input_nodes[0]
    dtype = value.meta["val"].dtype
    w = Writer(graph, [start])
    with graph.inserting_before(start):
        # Output shape; sizes that depend on data are fx nodes.
        shape = w.shape(value)
        if kind == "reduce_scatter":
            shape = [w.divided(shape[0], ranks), *shape[1:]]
        size = w.numel(value)
        flat = w.reshape(value, [size])
        steps = steps_of(kind, ranks, isinstance(size, int))
        # An all-reduce is summed in parts only where padding to whole parts is known now.
        if kind == "reduce_scatter":
            part = w.divided(size, ranks)
        elif steps == ("all_gather",) or not isinstance(size, int):
            part = size
        else:
            part = -(-size // ranks)
            if part * ranks > size:
                padding = [flat, [0, part * ranks - size]]
                flat = w.new(_aten.constant_pad_nd.default, padding, dtype, [part * ranks])
    mark_replaced(start)
    if steps == ("all_gather",):
        w.change(start, _c10d.all_gather_into_tensor.default, flat, ranks, group)
    else:
        splits = [part] * ranks
        w.change(start, _c10d.all_to_all_single.default, flat, splits, list(splits), group)
    w.change(wait, _c10d.wait_tensor.default, start)
    with graph.inserting_before(wait.next):
        result = w.new(SUM, [wait, ranks, accumulate, average], dtype, [part])
        if len(steps) > 1:
            whole = w.times(part, ranks)
            arguments = [result, ranks, group]
            gather = w.new(_c10d.all_gather_into_tensor.default, arguments, dtype, [whole])
            result = w.wait(gather, [whole])
            if whole != size:
                result = w.view(_aten.slice.Tensor, [result, 0, 0, size], [size])
        if shape != [size if kind == "all_reduce" else part]:
            result = w.viewed(result, shape)
    for reader in readers:
        reader.replace_input_with(wait, result)
    if in_backward(start):
        mark_backward(w.nodes)


@dataclass(frozen=True, eq=False, repr=False)
class BucketByUnit(GraphPass):
    """Merge collectives by unit, kind, process group and dtype.

    Args:
        units: an ``FSDPParamOrder``, ``Units``, or a sequence of units, each a sequence of FQNs of
            parameters or modules. A name may be in one unit only.
        kinds: the kinds to bucket; all-reduces (HSDP, DDP) only if named.
        payload_order: a key of start nodes, ascending in the payload; None: graph order.
            ``"units"``: the order given as ``units``, else graph order.
    """

    stage = "forward_backward"
    conflicts_with = frozenset({RANK_ORDER, ORDER})
    provides = frozenset({BUCKETS})
    units: Units | Iterable[Sequence[str]]
    kinds: Collection[Kind] = FSDP_KINDS
    payload_order: PayloadKey | Literal["units"] | None = "units"
    _units: Units = field(init=False)
    _divided: DividedUnits = field(init=False)

    def __post_init__(self) -> None:
        units = Units.of(self.units)
        self._set(units=units, _units=units, kinds=check_kinds(self.kinds))
        self._set(_divided=DividedUnits(units))
        check_argument("payload_order", self._payload_key, Callable | None)

    @property
    def _payload_key(self) -> PayloadKey | None:
        if self.payload_order == "units":
            return self._units if callable(self._units) else None
        return self.payload_order

    @property
    def planner(self) -> ByUnit:
        """The planner of the buckets."""
        return ByUnit(self._units, self.kinds)

    def run(self, graph: fx.Graph, compilation: Compilation) -> None:
        analysis = compilation.analysis(graph)
        plan = self.planner.plan(analysis)
        report = merge_and_report(analysis, plan, self._payload_key, self.kinds)
        compilation.report.graphs.append(report)
        if plan.uncovered:
            compilation.warn_uncovered(plan.uncovered, self._units)
        self._divided.look(analysis.graph, compilation)

    def wrap(self, compiled: Callable[..., Any], compilation: Compilation) -> Callable[..., Any]:
        """Watch the first runs for gradients that are not reduced as planned."""
        return RunWatch(self._units, compilation).watch(compiled)


@dataclass(frozen=True, eq=False, repr=False)
class BucketByCap(GraphPass):
    """Merge into as few collectives as a byte cap allows.

    :class:`.ByCap` has the rules, the arguments and their errors.

    Args:
        cap_mb: in MiB; None takes torch's estimate for each group.
        payload_order: a key of start nodes, such as an ``FSDPParamOrder``, ascending in the
            payload; None: graph order.
    """

    stage = "forward_backward"
    conflicts_with = frozenset({RANK_ORDER, ORDER})
    provides = frozenset({BUCKETS})
    cap_mb: CapMb = None
    _: KW_ONLY
    kinds: Collection[Kind] = FSDP_KINDS
    eligible: Eligible = "tag"
    groups: Groups = None
    payload_order: PayloadKey | None = None
    planner: ByCap = field(init=False)

    def __post_init__(self) -> None:
        check_argument("payload_order", self.payload_order, Callable | None)
        cap_mb = dict(self.cap_mb) if isinstance(self.cap_mb, Mapping) else self.cap_mb
        self._set(cap_mb=cap_mb, kinds=check_kinds(self.kinds), groups=check_groups(self.groups))
        planner = ByCap(cap_mb, kinds=self.kinds, eligible=self.eligible, groups=self.groups)
        self._set(planner=planner)

    def run(self, graph: fx.Graph, compilation: Compilation) -> None:
        analysis = compilation.analysis(graph)
        plan = self.planner.plan(analysis)
        report = merge_and_report(analysis, plan, self.payload_order, self.kinds)
        compilation.report.graphs.append(report)

    def wrap(self, compiled: Callable[..., Any], compilation: Compilation) -> Callable[..., Any]:
        """Look for shards in the first run, and warn if there are none."""
        return watch_for_shards(compiled, compilation)


@dataclass(frozen=True, eq=False, repr=False)
class FixedOrderReduce(GraphPass):
    """Replace reductions of gradients by an all-to-all and a local sum in rank order.

    The bits of a gradient then depend on the ranks' values and the number of ranks only, and not on
    byte caps, units, or the order of payload and graph. Eager FSDP2 has the same bits with
    :class:`.AllToAllReduceScatter`. Ranks send the bytes of a ring reduction, in the same dtype,
    and hold the received values, as large as the packed gradients, until they are added.

    Runs after the passes that bucket and before :class:`.Schedule`; ``BucketAndSchedule`` takes it
    as ``reduce=``. Only sums and averages of floating-point gradients of parameters are replaced,
    on groups of more than one rank. The module shows the graphs.

    Args:
        accumulate: ``torch.float32`` or ``torch.float64``, the dtype of the sums, or of the
            gradients if that is wider.
    """

    stage = "forward_backward"
    conflicts_with = frozenset({ORDER})
    provides = frozenset({RANK_ORDER})
    option = "reduce"
    accumulate: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check_accumulate(self.accumulate)

    @property
    def planned_with(self) -> str:
        return f"sums in rank order in {self.accumulate}"

    def run(self, graph: fx.Graph, compilation: Compilation) -> None:
        lower_sum(SUM)
        reduce_by_all_to_all(graph, self.accumulate)
        graph.lint()


@dataclass(frozen=True, eq=False, repr=False)
class SeparateGroups(GraphPass):
    """Move reductions of gradients to process groups of their own, with the same ranks.

    Put it before the passes that bucket. Create it after the mesh, on every rank at the same point
    of the program, since it creates process groups. Collectives without a tag, and collectives on
    groups that are not in the mesh, do not move.

    Args:
        mesh: each of its dimensions gets a second group. Give a part, such as ``mesh["shard"]``, to
            leave the other dimensions alone.
        kinds: the kinds that move; reduce-scatters by default.
    """

    stage = "forward_backward"
    conflicts_with = frozenset({BUCKETS, ORDER})
    mesh: DeviceMesh
    kinds: Collection[Kind] = FSDP_KINDS[1:]
    second: dict[str, str] = field(init=False, default_factory=dict)
    """Maps the name of each group to the name of its second group."""
    _groups: list[dist.ProcessGroup] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        mesh = self.mesh
        check_argument("mesh", mesh, DeviceMesh)
        self._set(kinds=check_kinds(self.kinds))
        for dim in range(mesh.ndim):
            group = mesh.get_group(dim)
            rows = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
            second = new_groups(rows, dist.get_backend(group))
            self.second[group.group_name] = second.group_name
            self._groups.append(second)

    def run(self, graph: fx.Graph, compilation: Compilation) -> None:
        for node in graph.nodes:
            if kind_of(node) in self.kinds and tag_of(node) is not None:
                second = self.second.get(group_name(node))
                if second is not None:
                    set_group_name(node, second)

    def settings(self) -> tuple[Any, ...]:
        """Return the kinds that move, and the groups that they move to."""
        return (self.kinds, tuple(self.second.items()))
