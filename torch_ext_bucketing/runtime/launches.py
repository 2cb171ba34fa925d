"""Read a graph's launches per process group, which the ranks of a group must share.

A group's collectives match in launch order, and a bucket's bytes mean what their sender packed. So
ranks compare, per group, the collectives in the order of the graph after bucketing and scheduling:
kind, reduce op, dtype, and members with their parameters, byte offsets and sizes. They also compare
the times that the order was planned with: ranks with different times may launch alike today, and
differently after the next change of the model.

Excluded, because ranks may differ there: node names, sizes of collectives that serve no parameter
(an all-to-all of tokens, a batch of varying length), and sends and receives. A graph that takes its
groups as inputs, compiled by one rank for all, has no launches here.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from ..graph.nodes import (
    argument,
    collective_group,
    is_bucket,
    kind_of,
    member_tags,
    nbytes_of,
    sent_as_bytes,
    tag_of,
    tensors_in,
)
from ..reports.compile import BucketReport

_POINT_TO_POINT = ("isend", "irecv", "batch_p2p_ops")


class Member(NamedTuple):
    """One member's parameters, and its bytes in one rank's part of the buffer, None if unknown."""

    fqns: tuple[str, ...]
    offset: int | None = None
    nbytes: int | None = None
    dtype: str = ""

    def to_text(self) -> str:
        name = "+".join(self.fqns) or "(untagged)"
        where = "" if self.offset is None else f" at byte {self.offset}"
        size = "" if self.nbytes is None else f", {self.nbytes} bytes {self.dtype}"
        return f"{name}{where}{size}"


class Launch(NamedTuple):
    """One collective, its members in payload order, none if it serves no parameter."""

    kind: str  # the operator's name for collectives that are never bucketed
    reduce_op: str | None
    dtype: str
    bucketed: bool
    members: tuple[Member, ...] = ()

    def to_text(self, around: int = 0) -> str:
        """Format one line, of a large bucket only the members near index ``around``."""
        head = " ".join(p for p in (self.kind, self.reduce_op or "", self.dtype) if p)
        if not self.members:
            return f"{head}, of no parameter"
        first = max(0, min(around - 2, len(self.members) - 5))
        shown = [m.to_text() for m in self.members[first : first + 5]]
        if first > 0:
            shown.insert(0, "...")
        if first + 5 < len(self.members):
            shown.append("...")
        many = f"bucket of {len(self.members)}: " if self.bucketed else ""
        return f"{head}, {many}{'; '.join(shown)}"


class GroupLaunches(NamedTuple):
    """One graph's launches on one process group, in launch order."""

    group: str
    launches: tuple[Launch, ...]

    @classmethod
    def of(cls, group: str, launches: Iterable[Any]) -> GroupLaunches:
        """Read the lists that JSON makes of the tuples."""
        return cls(
            group,
            tuple(
                Launch(kind, op, dtype, bucketed, tuple(Member(tuple(f), *m) for f, *m in members))
                for kind, op, dtype, bucketed, members in launches
            ),
        )


class GraphLaunches(NamedTuple):
    """One graph's launches by process group, in the order of the groups' first collectives."""

    stage: str
    groups: tuple[GroupLaunches, ...]
    planned_with: str = ""  # times and size hints that the order was planned with

    def encode(self) -> str:
        """Encode as text without spaces or quotes, for an argument in a graph."""
        packed = zlib.compress(json.dumps(self, separators=(",", ":")).encode(), 9)
        return base64.urlsafe_b64encode(packed).decode()

    @classmethod
    def decode(cls, text: str) -> GraphLaunches:
        """Read the result of :meth:`encode`."""
        stage, groups, planned_with = json.loads(zlib.decompress(base64.urlsafe_b64decode(text)))
        return cls(stage, tuple(GroupLaunches.of(*group) for group in groups), planned_with)

    def digest(self) -> str:
        """Return the SHA-256 (hex) of all fields."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def launches_of(
    graph: fx.Graph, stage: str, buckets: Iterable[BucketReport] = (), planned_with: str = ""
) -> GraphLaunches:
    """Read the launches of a graph as it will run; ``buckets`` give members' bytes."""
    # Other buckets, such as torch's, have only members' FQNs.
    report_of = {bucket.node: bucket for bucket in buckets}
    groups: dict[str, list[Launch]] = {}
    for node in graph.nodes:
        group = collective_group(node)
        if group is not None and _op_name(node) not in _POINT_TO_POINT:
            groups.setdefault(group, []).append(_launch_of(node, report_of))
    return GraphLaunches(
        stage,
        tuple(GroupLaunches(g, tuple(launches)) for g, launches in groups.items()),
        planned_with,
    )


def _launch_of(node: fx.Node, reports: Mapping[str, BucketReport]) -> Launch:
    """Describe one launch, with each member's part of the payload."""
    op, kind = argument(node, "reduce_op"), kind_of(node)
    report, tag = reports.get(node.name), tag_of(node)
    dtype = _short(next((t.dtype for t in tensors_in(node.meta.get("val"))), ""))
    members: Iterable[Member] = ()
    if report is not None:
        members = (Member(m.fqns, m.offset, m.nbytes, m.dtype) for m in report.members)
    elif is_bucket(node):
        members = (Member(t.fqns) for t in member_tags(node))
    elif tag is not None:
        # One rank's part: what it sends to a gather, what it receives from a reduction.
        part = node.all_input_nodes[0] if kind == "all_gather" else node
        sizes = tensors_in(part.meta.get("val"))
        size = nbytes_of(part) if sizes and isinstance(sizes[0].numel(), int) else None
        members = (Member(tag.fqns, 0, size, _short(sent_as_bytes(node) or dtype)),)
    return Launch(
        kind or _op_name(node),
        None if op is None else str(op),
        dtype,
        report is not None or is_bucket(node),
        tuple(members),
    )


def _op_name(node: fx.Node) -> str:
    return str(node.target).split(".")[1]


def _short(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


class Version(NamedTuple):
    """One rank's environment, and its launches on one process group."""

    environment: str
    stage: str
    of_group: GroupLaunches
    planned_with: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of everything but the stage, which changes no byte that is sent."""
        text = f"{self.environment}\0{self.planned_with}\0{json.dumps(self.of_group)}"
        return hashlib.sha256(text.encode()).hexdigest()

    @classmethod
    def from_json(cls, text: str) -> Version:
        """Read the result of ``json.dumps``."""
        environment, stage, of_group, planned_with = json.loads(text)
        return cls(environment, stage, GroupLaunches.of(*of_group), planned_with)


def mismatch_text(
    versions: Sequence[tuple[list[int], Version]], absent: Sequence[int], size: int
) -> str:
    """Format the mismatch between versions, each with its ranks, of a group of ``size`` ranks."""
    group = versions[0][1].of_group.group
    stages = dict.fromkeys(v.stage for _, v in versions)
    lines = [
        f"the ranks of process group {group!r} ({size} ranks) launch different collectives in "
        f"their {' / '.join(stages)} graph, {len(versions)} versions of it. It was stopped."
    ]
    # Causes first: a difference of versions or times explains one of the buckets.
    plannings = {v.planned_with for _, v in versions}
    for title, value_of in (
        ("They run different versions:", lambda v: v.environment),
        ("They planned with different times or size hints:", lambda v: v.planned_with or "none"),
    ):
        if len({value_of(v) for _, v in versions}) > 1:
            lines += [title, *(f"  {ranks_text(ranks)}: {value_of(v)}" for ranks, v in versions)]
    place = _first_difference([v.of_group.launches for _, v in versions])
    if place is None and len(plannings) > 1:
        lines.append(
            "Their collectives are still the same, but may differ after the next change of the "
            "model. Measure on one rank, and load its times on all."
        )
    elif place is None:
        lines.append("Their buckets are the same, but not the code that packs them.")
    else:
        total = " or ".join(map(str, dict.fromkeys(len(v.of_group.launches) for _, v in versions)))
        lines.append(f"The first to differ is collective {place + 1} of {total} on this group:")
        lines += _launches_text(versions, place)
    if absent:
        lines.append(f"Not arrived yet: {ranks_text(absent)}.")
    lines.append(
        "Check that all ranks build the same model, give the backend the same passes, units and "
        "hooks, and run the same torch and torch_ext_bucketing."
    )
    return "\n".join(lines)


def _launches_text(versions: Sequence[tuple[list[int], Version]], index: int) -> list[str]:
    """Render a launch that differs, one line per group of ranks."""
    ranks_of: dict[Launch | None, list[int]] = {}
    for ranks, version in versions:
        launches = version.of_group.launches
        ranks_of.setdefault(launches[index] if index < len(launches) else None, []).extend(ranks)
    members = [() if launch is None else launch.members for launch in ranks_of]
    place = _first_difference(members) if all(members) else None
    lines = []
    for launch, ranks in ranks_of.items():
        text = "no such collective" if launch is None else launch.to_text(place or 0)
        lines.append(f"  {ranks_text(sorted(ranks))}: {text}")
    if place is not None and len({launch.kind for launch in ranks_of if launch}) == 1:
        lines.append(f"  (their members differ from number {place + 1} on)")
    return lines


def _first_difference(lists: Sequence[Sequence[object]]) -> int | None:
    """Return the first index at which the lists differ; None if they are equal."""
    for place in range(max(map(len, lists))):
        if len({x[place] if place < len(x) else None for x in lists}) > 1:
            return place
    return None


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ``[0, 1, 2, 5]`` as ``"ranks 0-2, 5"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"
