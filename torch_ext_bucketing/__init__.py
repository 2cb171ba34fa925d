"""Collective bucketing for compiled PyTorch training.

Importing the package changes nothing in torch; only ``hooks.install()``, for torch's own passes,
does. This module exports what most programs need. The rest is imported from its module:

- ``passes.base``: for a ``GraphPass`` of your own;
- ``bucketing.plan.BucketPlanner``, ``planner.schedule.policy.Policy``: for a planner or a policy
  of your own;
- ``passes.park.Park``: activations in host memory, by module;
- ``passes.pipeline.whole_step_pass``: the passes on a trace of a whole step, without Dynamo;
- ``trainers.torchtitan``, ``trainers.torchtitan_eager``: torchtitan's two trainers;
- ``passes.combine_uses``, ``passes.add_by_unit``, ``passes.reduce_scatter_first``: the passes that
  ``MatchFSDP2`` stands for;
- ``passes.pipeline.in_order``: lists the passes that run for a recipe's list;
- ``fsdp.ReduceOnce``: several backward calls, one reduction;
- ``planner.cost.machine.Level``, ``H100``: networks and machines for the cost model;
- ``planner.scheduling.schedule``, ``planner.schedule.model.peak_bytes``,
  ``bucketing.plan.ByCap``, ``runtime.agreement.agree``, ``graph.nodes``: the passes' work, as
  functions of one graph;
- ``testing``: tests of a model on CPU ranks, bit for bit against eager FSDP2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._exports import lazy_exports

if TYPE_CHECKING:
    from . import errors as errors
    from . import fsdp as fsdp
    from . import hooks as hooks
    from . import testing as testing
    from .fsdp.plans import transformer_block_plan as transformer_block_plan
    from .fsdp.shard import data_parallel as data_parallel
    from .fsdp.units import FSDPParamOrder as FSDPParamOrder
    from .passes.backends import backend as backend
    from .passes.base import GraphPass as GraphPass
    from .passes.bucketing import BucketByCap as BucketByCap
    from .passes.bucketing import BucketByUnit as BucketByUnit
    from .passes.bucketing import FixedOrderReduce as FixedOrderReduce
    from .passes.bucketing import SeparateGroups as SeparateGroups
    from .passes.pipeline import MatchFSDP2 as MatchFSDP2
    from .planner.cost.machine import Machine as Machine
    from .planner.resharding import ReshardAfterForward as ReshardAfterForward
    from .planner.schedule.policy import MaxComputeRun as MaxComputeRun
    from .planner.schedule.policy import Overlap as Overlap
    from .planner.schedule.policy import PeakMemory as PeakMemory
    from .planner.scheduling import BucketAndSchedule as BucketAndSchedule
    from .planner.scheduling import Schedule as Schedule
    from .recipes import recipe as recipe
    from .step.train_step import train_step as train_step
    from .tuning.tune import tune as tune

__version__: str

_MODULES = ("errors", "fsdp", "hooks", "testing")
_HOME = {
    "BucketAndSchedule": "planner.scheduling",
    "BucketByCap": "passes.bucketing",
    "BucketByUnit": "passes.bucketing",
    "FSDPParamOrder": "fsdp.units",
    "FixedOrderReduce": "passes.bucketing",
    "GraphPass": "passes.base",
    "Machine": "planner.cost.machine",
    "MatchFSDP2": "passes.pipeline",
    "MaxComputeRun": "planner.schedule.policy",
    "Overlap": "planner.schedule.policy",
    "PeakMemory": "planner.schedule.policy",
    "ReshardAfterForward": "planner.resharding",
    "Schedule": "planner.scheduling",
    "SeparateGroups": "passes.bucketing",
    "backend": "passes.backends",
    "data_parallel": "fsdp.shard",
    "recipe": "recipes",
    "train_step": "step.train_step",
    "transformer_block_plan": "fsdp.plans",
    "tune": "tuning.tune",
}
__all__ = sorted(_HOME)

# Importing the package stays cheap: what is used is imported when it is used.
_export = lazy_exports(__name__, _HOME, _MODULES)


def __getattr__(name: str) -> object:
    if name != "__version__":
        return _export(name)
    from importlib import metadata

    try:
        return metadata.version(__name__)
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
