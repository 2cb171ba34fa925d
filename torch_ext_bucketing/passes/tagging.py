"""Tag collectives with their parameters, as the first pass."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.fx as fx

from .._torch import dynamo as _dynamo
from .._torch.inductor import check_passes_run_here
from ..errors import PayloadOrderWarning
from ..fqns import format_names, nearest_names
from ..fsdp.tagging import FqnOf, tag_joint_graph
from ..fsdp.units import FSDPParamOrder
from .base import TAGS, Compilation, GraphPass

PAYLOAD_FIELD = "fsdp_payload_order"


@dataclass(frozen=True, eq=False, repr=False)
class TagParameters(GraphPass):
    """Tag each collective of the joint graph with the parameters that it serves.

    Every backend runs this pass. Alone it is a value for
    ``torch._inductor.config.joint_custom_post_pass``.

    Args:
        model: see :func:`.tag_joint_graph`, also for ``fqn_of``.
        order: write each collective's place in this order, a pair of ints (payload, position), to
            ``node.meta[PAYLOAD_FIELD]``. torch's own bucketing packs by it if
            ``aten_distributed_optimizations.bucket_payload_order_key`` is ``PAYLOAD_FIELD``. A
            collective without a tag, or of an unknown parameter, gets none, with a warning.
    """

    stage = "joint"
    provides = frozenset({TAGS})
    model: torch.nn.Module | None = None
    _: KW_ONLY
    fqn_of: FqnOf | None = None
    order: FSDPParamOrder | None = None

    def run(self, graph: fx.Graph, compilation: Compilation) -> None:
        if _dynamo.is_compiling():
            check_passes_run_here()
        fqn_of = compilation.input_fqns if self.fqn_of is None else self.fqn_of
        if fqn_of is None:
            fqn_of = _dynamo.traced_input_fqns(graph)
        tags = tag_joint_graph(graph, fqn_of)
        if self.order is not None:
            unknown: dict[str, None] = {}
            for start, tag in tags.items():
                if (place := self.order(start)) is not None:
                    start.meta[PAYLOAD_FIELD] = place
                unknown.update(dict.fromkeys(self.order.unknown(tag.fqns)))
            if unknown:
                ordered = (fqn for unit in self.order.units for fqn in unit)
                compilation.warn(
                    f"the order holds no {format_names(unknown)}, so buckets with their "
                    f"collectives keep graph order{nearest_names(next(iter(unknown)), ordered)}",
                    PayloadOrderWarning,
                )
        compilation.tagged = len(tags)

    def settings(self) -> tuple[Any, ...]:
        """Return the names that a tag can have."""
        # Cache keys have no names of parameters, so graphs that differ in names only would share
        # an entry.
        names = [] if self.model is None else [n for n, _ in self.model.named_parameters()]
        return (names, self.fqn_of, self.order, _dynamo.traced_fqns())
