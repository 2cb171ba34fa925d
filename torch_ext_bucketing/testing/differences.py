"""Compare the payloads of collectives, without torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..fsdp.units import FSDPParamOrder
    from ..reports.compile import BucketReport


@dataclass(frozen=True)
class Span:
    """Bytes ``[offset, offset + nbytes)`` of a parameter in one rank's part of a buffer."""

    fqn: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Payload:
    """One collective of the step, its members in payload order."""

    kind: str
    members: tuple[Span, ...]

    @property
    def key(self) -> tuple[str, frozenset[str]]:
        """Kind and parameters, whatever their order."""
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
    """Compute the payloads of eager FSDP2's collectives from its param groups.

    A rank's part has each parameter's shard, padded to rank 0's rows (``all_gather_copy_in``, and
    ``chunk_cat`` in ``foreach_reduce``). Frozen parameters are only gathered. HSDP all-reduces the
    reduce-scatter's output. ``shards`` ranks share a parameter, in ``replicas`` groups.
    ``gathered``: bytes per rank of each tensor that a parameter with an all-gather extension sends.
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
                sent_nbytes = gathered.get(fqn) if gathered and kind == "all_gather" else None
                for nbytes in sent_nbytes or (numels[fqn] * dtype.itemsize,):
                    members.append(Span(fqn, offset, nbytes))
                    offset += nbytes
            payloads.append(Payload(kind, tuple(members)))
    return payloads


def bucket_payloads(buckets: Iterable[BucketReport]) -> list[Payload]:
    """Convert the buckets of compiled graphs; "+" joins the parameters of one member."""
    return [
        Payload(b.kind, tuple(Span("+".join(m.fqns), m.offset, m.nbytes) for m in b.members))
        for b in buckets
    ]


def layout_differences(eager: Sequence[Payload], run: Sequence[Payload]) -> list[str]:
    """Describe payloads that only ``run``, or only eager FSDP2 has, compared byte by byte."""
    eager_by_key = {p.key: p for p in eager}
    texts = []
    for payload in run:
        names = ", ".join(m.fqn for m in payload.members[:3])
        names += ", ..." if len(payload.members) > 3 else ""
        if payload.key not in eager_by_key:
            texts.append(f"{payload.kind} of {names}: no unit of eager FSDP2 has these members")
            continue
        pairs = zip(payload.members, eager_by_key[payload.key].members, strict=True)
        if differs := next(((span, eagers) for span, eagers in pairs if span != eagers), None):
            span, eagers = differs
            texts.append(
                f"{payload.kind} of {names}: byte {span.offset} is {span.fqn} ({span.nbytes} "
                f"bytes), eager has {eagers.fqn} at byte {eagers.offset} ({eagers.nbytes} bytes)"
            )
    missing = eager_by_key.keys() - {payload.key for payload in run}
    # One with a single member may be missing: it needs no bucket.
    for kind, members in ((p.kind, p.members) for p in eager if p.key in missing):
        if len(members) > 1:
            texts.append(
                f"{kind} of {members[0].fqn}, ...: eager FSDP2 has this payload, the compiled "
                "graphs do not"
            )
    return texts


def whole_digest(shards: Sequence[str]) -> str:
    """Hash all weights, given the hash of each rank's shards."""
    return hashlib.sha256("".join(shards).encode()).hexdigest()
