"""What lies where in the buffers of a step's collectives. No torch in here.

The payloads of eager FSDP2 (:func:`fsdp_payloads`) and those of compiled graphs
(:func:`bucket_payloads`) are compared by :func:`layout_differences`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..fsdp.order import FSDPParamOrder
    from ..reports.buckets import BucketReport


@dataclass(frozen=True)
class Member:
    """The place of a parameter, or of a tensor that is gathered for it, in a collective's buffer,
    per rank: ``[offset, offset + nbytes)``."""

    fqn: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Payload:
    """One collective of the step and what lies in it, in the order of the bytes."""

    kind: str
    members: tuple[Member, ...]

    @property
    def key(self) -> tuple[str, frozenset[str]]:
        """Which parameters it is of, in any order."""
        return self.kind, frozenset(m.fqn for m in self.members)


def fsdp_payloads(
    model: torch.nn.Module,
    order: FSDPParamOrder,
    *,
    shards: int,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    replicas: int = 1,
    gathered: Mapping[str, Sequence[int]] | None = None,
) -> list[Payload]:
    """What eager FSDP2's collectives carry, from its param groups.

    In a rank's part of the buffer each parameter takes the rows of its shard, padded to the first
    rank's, one parameter after the other (``foreach_all_gather``'s copy-in and the ``chunk_cat`` of
    ``foreach_reduce``); frozen ones are gathered only. HSDP all-reduces the reduce-scatter's output
    as it is.

    Args:
        model: after ``fully_shard``.
        order: of its param groups.
        shards: ranks that share a parameter, in ``replicas`` groups.
        gathered: of parameters with gathers of their own, the bytes of each tensor on a rank.
    """
    from ..fqns import canonical_fqn

    numels, trained = {}, set()
    for name, parameter in model.named_parameters():
        rows = -(-parameter.shape[0] // shards)
        numels[canonical_fqn(name)] = rows * parameter.shape[1:].numel()
        if parameter.requires_grad:
            trained.add(canonical_fqn(name))
    reduced = [[f for f in u if f in trained] for u in order.reduce_units or order.units]
    kinds = [("all_gather", order.units, param_dtype), ("reduce_scatter", reduced, reduce_dtype)]
    if replicas > 1:
        kinds.append(("all_reduce", reduced, reduce_dtype))
    payloads = []
    for kind, units, dtype in kinds:
        for unit in filter(None, units):
            members, offset = [], 0
            for fqn in unit:
                own = gathered.get(fqn) if gathered and kind == "all_gather" else None
                for nbytes in own or (numels[fqn] * dtype.itemsize,):
                    members.append(Member(fqn, offset, nbytes))
                    offset += nbytes
            payloads.append(Payload(kind, tuple(members)))
    return payloads


def bucket_payloads(buckets: Iterable[BucketReport]) -> list[Payload]:
    """What the buckets of compiled graphs carry; uses of one parameter are joined by "+"."""
    return [
        Payload(b.kind, tuple(Member("+".join(m.fqns), m.offset, m.nbytes) for m in b.members))
        for b in buckets
    ]


def layout_differences(eager: Sequence[Payload], run: Sequence[Payload]) -> list[str]:
    """Where the collectives of ``run`` carry other bytes, or in other places, than eager FSDP2's.
    Every one must be one of eager's payloads, byte by byte, and every payload of eager's with
    several members must occur: one alone is in no bucket."""
    known = {p.key: p for p in eager}
    found = []
    for payload in run:
        names = ", ".join(m.fqn for m in payload.members[:3])
        names += ", ..." if len(payload.members) > 3 else ""
        if payload.key not in known:
            found.append(f"{payload.kind} of {names}: no unit of eager FSDP2 has these members")
            continue
        pairs = zip(payload.members, known[payload.key].members, strict=True)
        if differs := next(((mine, eagers) for mine, eagers in pairs if mine != eagers), None):
            mine, eagers = differs
            found.append(
                f"{payload.kind} of {names}: byte {mine.offset} is {mine.fqn} ({mine.nbytes} "
                f"bytes), eager has {eagers.fqn} at byte {eagers.offset} ({eagers.nbytes} bytes)"
            )
    missing = known.keys() - {payload.key for payload in run}
    for kind, members in ((p.kind, p.members) for p in eager if p.key in missing):
        if len(members) > 1:
            found.append(
                f"{kind} of {members[0].fqn}, ...: eager FSDP2 has this payload, the compiled "
                "graphs do not"
            )
    return found


def whole_digest(shards: Sequence[str]) -> str:
    """A hash of all weights from the hashes of every rank's shards, by rank."""
    return hashlib.sha256("".join(shards).encode()).hexdigest()
