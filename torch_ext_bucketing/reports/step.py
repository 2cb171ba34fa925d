"""The report of clipping and updates in a backward graph."""

from __future__ import annotations

from dataclasses import dataclass

from .base import LeftAlone
from .rewrites import RewriteReport
from .text import sizes_text


@dataclass(frozen=True)
class Owners:
    """The matrices of one mesh. One rank computes each of them.

    Args:
        matrices: their number.
        ranks: number of ranks of the mesh.
        idle: ranks that own none.
        balance: work of the busiest rank over the mean.
        exchanges: number of buckets of matrices.
    """

    matrices: int
    ranks: int
    idle: int
    balance: float
    exchanges: int

    def to_text(self) -> str:
        """Format one line."""
        idle = f", {self.idle} without one" if self.idle else ""
        return (
            f"{self.matrices} matrices on {self.ranks} ranks{idle}, exchanged {self.exchanges} "
            f"times; the busiest rank has {self.balance:.3f} of the mean work"
        )


@dataclass(frozen=True)
class StepReport(RewriteReport):
    """Report of the updates in a backward graph.

    Args:
        gradients: number of parameters with a gradient; as many gradients were outputs before.
        updates: per call that updates parameters, their FQNs, in the order of the graph.
        eager_updates: number of such calls of the optimizers' ``step()``, one per group.
        norm_kernels: number of calls that compute norms of gradients.
        eager_norms: number of such calls of ``clip_grad_norm_``, one per device and dtype.
        norm_reductions: number of all-reduces of the norm, as many as eagerly, one per mesh
            dimension that shards; None: no clipping.
        state_bytes: bytes of optimizer state that the graph reads on the rank with most.
        buffer_bytes: bytes that the largest update allocates while it runs.
        owners: per mesh, what its matrices' owners do, see :class:`Owners`; empty without Muon.
    """

    rewrite = "optimizer"
    heading = "updates in the backward graph"
    gradients: int
    updates: tuple[tuple[str, ...], ...]
    eager_updates: int
    norm_kernels: int
    eager_norms: int
    norm_reductions: int | None
    state_bytes: int
    buffer_bytes: int
    owners: tuple[Owners, ...] = ()
    left: tuple[LeftAlone, ...] = ()

    def _lines(self) -> list[str]:
        number = sum(map(len, self.updates))
        state, buffers = sizes_text(self.state_bytes, self.buffer_bytes)
        lines = [
            f"{self.gradients} gradients, {number} updated here in {len(self.updates)} calls "
            f"({self.eager_updates} eagerly, after all reductions)",
            f"optimizer state {state}, buffers of an update at most {buffers}",
        ]
        lines += [of.to_text() for of in self.owners]
        if self.norm_reductions is None:
            return [*lines, "each update follows its gradients' reduction, which frees them"]
        return [
            *lines,
            f"{self.norm_kernels} calls for norms, which follow each reduction ({self.eager_norms} "
            f"eagerly, after all); {self.norm_reductions} all-reduces of the norm, as eagerly",
            f"waits for the norm: {len(self.updates)} updates, whose state reads scaled gradients; "
            "scaling, and all gradients' memory",
        ]
