r"""Gather parameters for backward in a smaller group, usually a node.

Eager FSDP2 does so if ``reshard_after_forward`` is a number. Forward gathers over all ranks that
share a parameter, between nodes. Each rank then keeps a larger shard, such that the shards of the
smaller group make the whole parameter, and backward gathers there. This takes more memory and less
time, since it uses the fast network. With 4 ranks, 2 in a node, on rank 1 (``w`` is [2, 5], the
whole [8, 5])::

    before      forward    w -> all_gather(all 4) -> wait -> t -> mm
                backward   w -> all_gather(all 4) -> wait -> t -> t -> mm

    after       forward    w -> all_gather(all 4) -> wait -> t -> mm
                                                       \-> slice_copy [4:8]             saved
                backward   slice_copy -> all_gather(ranks 0, 1) -> wait -> t -> t -> mm

The partitioner may need a reader of the joint graph in forward and in backward (activation
checkpointing, and everything else that it recomputes). So all readers get the second gather there,
after a copy that the partitioner must save. The forward graph drops that gather afterwards::

    joint graph     w -> all_gather -> wait -> slice_copy -> all_gather(0, 1) -> wait -> t -> mm
                                                                                      \-> t -> mm
    forward graph   w -> all_gather -> wait -> t -> mm
                                         \-> slice_copy -> output

The copy is a slice of the gather's own result, in the dtype that was gathered, with the padded rows
of uneven parameters. So all ranks have equal parts, with the bytes that eager FSDP2 keeps
(``FSDPParam.to_sharded_post_forward``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from torch.distributed.device_mesh import DeviceMesh

from .._torch.aot import Halves, mark_recompute, mark_save
from .._torch.process_groups import default_group, new_groups, ranks_of
from ..fsdp.tagging import Chains, read_in_forward
from ..graph.edits import call
from ..graph.nodes import (
    Tag,
    group_name,
    group_size,
    home_group,
    is_bucket,
    kind_of,
    nbytes_of,
    only_wait,
    set_tag,
    tag_of,
)
from ..graph.values import erase_unused
from ..reports.base import LeftAlone, size_text
from ..reports.compile import RewriteReport
from ..runtime.launches import ranks_text

# A copy, so that the whole can be freed. Inductor would remove a clone of a slice as redundant.
_slice_copy = torch.ops.aten.slice_copy.Tensor


@dataclass(frozen=True)
class Resharded:
    """Parameters that forward gathers from ``ranks``, kept in ``saved_bytes`` on a rank."""

    fqns: tuple[str, ...]
    ranks: int
    saved_bytes: int


@dataclass(frozen=True)
class ReshardReport(RewriteReport):
    """The parameters that backward gathers in a smaller group of ``ranks``, and the others."""

    rewrite = heading = "reshard after forward"
    ranks: int
    resharded: tuple[Resharded, ...] = ()

    def _lines(self) -> list[str]:
        nbytes = sum(r.saved_bytes for r in self.resharded)
        line = f"{len(self.resharded)} gathers of backward among {self.ranks} ranks; kept for them:"
        return [f"{line} {size_text(nbytes)}"] if self.resharded else []


@dataclass(frozen=True)
class SmallerGroup:
    """The process group that backward gathers in; ``ranks`` are in the default group, ascending.

    ``place`` is this rank's among them, from 0.
    """

    name: str
    ranks: tuple[int, ...]
    place: int


@dataclass(frozen=True)
class Smaller:
    """The all-gathers that backward can do in a smaller group, whose name and size are given."""

    group: str
    ranks: int
    starts: Collection[fx.Node]


def make_smaller_group(to: DeviceMesh | int) -> SmallerGroup | None:
    """Create or find the process group for ``ReshardAfterForward(to=...)``.

    ``to`` is a number of ranks that divides the job's, or a mesh whose last dimension is the group.
    A group of one rank is None, with a warning.
    """
    if isinstance(to, DeviceMesh):
        size = to.size(to.ndim - 1)
    elif isinstance(to, int) and not isinstance(to, bool):
        size = to
    else:
        raise TypeError(f"to must be a number of ranks or a DeviceMesh, got {to!r}")
    if size == 1:
        warnings.warn(
            "to is a single rank: every rank keeps all parameters gathered until backward, as in "
            "eager FSDP2 with reshard_after_forward=1. To keep them, leave this pass out; to free "
            "them after forward, leave out to=",
            UserWarning,
            stacklevel=3,
        )
        return None
    # A mesh has its groups already; for a number they are made, by all ranks in one order.
    group: Any = default_group()
    if isinstance(to, DeviceMesh):
        group = to.get_group(to.ndim - 1)
    elif group is None:
        raise ValueError(
            f"to={size} creates process groups: make this pass after init_process_group(), on "
            "every rank at the same point of the program"
        )
    elif size < 1 or group.size() % size:
        raise ValueError(f"to must be a factor of the {group.size()} ranks of the job, got {size}")
    elif size < group.size():
        rows = [range(first, first + size) for first in range(0, group.size(), size)]
        group = new_groups(rows, dist.get_backend())
    return SmallerGroup(group.group_name, ranks_of(group), group.rank())


def reshard_to(
    graph: fx.Graph, chains: Chains, smaller: SmallerGroup, selects: Callable[[Tag], bool]
) -> ReshardReport:
    """Add a second all-gather, in the smaller group, for all readers of gathered parameters.

    ``chains`` (see :func:`.parameter_chains`) has the nodes from each parameter of a joint graph to
    its uses, and ``selects`` chooses all-gathers by tag. A parameter that backward does not read
    gets none. A parameter whose gathered value can't be divided among the ranks of ``smaller`` is
    gathered again over its own group, with the reason in the report; if none can, this is a
    ``ValueError``.
    """
    tags = {s: tag for s in chains if (tag := tag_of(s)) is not None and selects(tag)}
    reasons = _why_not(tags, smaller)
    read = Halves(graph).read_in_backward([n for s in tags for n in chains[s]])
    twice = [s for s in read_in_forward(chains) if s in read]
    left_alone: list[LeftAlone] = []
    resharded: list[Resharded] = []
    for start, tag in tags.items():
        chain = chains[start]
        if reasons[start]:
            left_alone.append(LeftAlone(tag.fqns, reasons[start]))
        elif start in twice and ranks_of(group_name(start)) != smaller.ranks:
            part, *chain = _gather_twice(graph, start, tag, smaller, chain)
            mark_save(part)
            resharded.append(Resharded(tag.fqns, group_size(start), nbytes_of(part)))
        for node in chain:
            mark_recompute(node)
    if resharded:
        graph.lint()
    return ReshardReport(len(smaller.ranks), tuple(resharded), left=tuple(left_alone))


def what_fits(chains: Chains, smaller: SmallerGroup) -> Smaller:
    """Find the all-gathers that backward can do in a smaller group; see :func:`reshard_to`."""
    reasons = _why_not(read_in_forward(chains), smaller)
    fitting = [start for start, reason in reasons.items() if not reason]
    return Smaller(smaller.name, len(smaller.ranks), fitting)


def _why_not(starts: Iterable[fx.Node], smaller: SmallerGroup) -> dict[fx.Node, str]:
    """Map all-gathers to the reason why they can't run in the smaller group; empty if they can."""
    groups = {start: group_name(start) for start in starts}
    misfits = {group: _misfit(group, smaller) for group in dict.fromkeys(groups.values())}
    if misfits and all(misfits.values()):
        raise ValueError(
            f"to= does not fit the groups that parameters are sharded over: "
            f"{'; '.join(misfits.values())}. Give a mesh whose last dimension divides their group, "
            "with to=mesh"
        )
    return {s: misfits[group] or _cannot_cut(s, smaller) for s, group in groups.items()}


def _misfit(group: str, smaller: SmallerGroup) -> str:
    """Return why a group can't be divided into such smaller ones, or an empty text."""
    ranks = ranks_of(group)
    if set(smaller.ranks) <= set(ranks) and len(ranks) % len(smaller.ranks) == 0:
        return ""
    return (
        f"{ranks_text(smaller.ranks)} do not divide the group of {ranks_text(ranks)} that it is "
        "sharded over"
    )


def _cannot_cut(start: fx.Node, smaller: SmallerGroup) -> str:
    """Return why a gather can't be cut for a smaller group, or an empty text."""
    wait = only_wait(start)
    if start.kwargs or is_bucket(start) or wait is None:
        return f"{start.name} is not an unmerged all-gather with one wait"
    value = wait.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(value.shape[0], int):
        return f"the size of {start.name} is not known"
    if value.shape[0] % len(smaller.ranks):
        return f"{value.shape[0]} rows can't be divided among {len(smaller.ranks)} ranks"
    return ""


def _gather_twice(
    graph: fx.Graph, start: fx.Node, tag: Tag, smaller: SmallerGroup, chain: Sequence[fx.Node]
) -> list[fx.Node]:
    """Gather again after the wait; return the copy, and the nodes that backward recomputes."""
    (wait,) = start.users
    readers = list(wait.users)
    ranks = len(smaller.ranks)
    rows = wait.meta["val"].shape[0] // ranks
    first = smaller.place * rows
    with graph.inserting_before(wait.next):
        part = call(graph, _slice_copy, wait, 0, first, first + rows, like=wait)
        again = call(graph, start.target, part, ranks, smaller.name, like=start)
        wait_again = call(graph, wait.target, again, like=wait)
    set_tag(again, tag, group_name(start))
    for reader in readers:
        reader.replace_input_with(wait, wait_again)
    after = [n for n in chain[chain.index(start) :] if n not in (start, wait)]
    return [part, again, wait_again, *after]


def read_first_gathers(graph: fx.Graph) -> int:
    """Give readers of second all-gathers in a forward graph the first one's result; count them."""
    gathers = [n for n in graph.nodes if kind_of(n) == "all_gather" and not is_bucket(n)]
    again = [n for n in gathers if home_group(n) != group_name(n)]
    second = [n for n in again if n.args[0].target is _slice_copy]
    for start in second:
        (wait,) = start.users
        wait.replace_all_uses_with(start.args[0].args[0])
        erase_unused([wait])
    if second:
        graph.lint()
    return len(second)
