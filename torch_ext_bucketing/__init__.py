"""Collective bucketing for compiled PyTorch training.

Importing the package changes nothing in torch. ``torch_ext_bucketing.hooks``, which is for torch's
own passes, does so when it is asked to.

What most programs need is here; a module of its own has each of the rest:

- ``passes.base``: the facts by which a ``GraphPass`` of your own says where it may stand;
- ``passes.whole_step.whole_step_pass``: the passes on a trace of a whole step, without Dynamo;
- ``trainers.torchtitan``: the passes in torchtitan's graph trainer;
- ``passes.diagnostics`` and ``planner.passes.resharding``: the other warnings of a compile;
- ``fsdp.simple_fsdp.ReduceOnce``: several backwards, one reduction;
- ``planner.cost.machine.Level``, ``H100``: networks and machines for the cost model;
- ``planner.schedule.scheduler.schedule``, ``planner.schedule.model.peak_bytes``,
  ``bucketing.caps.plan_by_cap``, ``agreement.before_run.agree``, ``graph.tags``: what the passes
  do, as functions of one graph;
- ``bucketing.groups.primary_group``: a filter of process groups;
- ``testing``: for testing a model of your own on CPU ranks, bit for bit against eager FSDP2.
"""

from __future__ import annotations

import importlib as _importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import hooks as hooks
    from . import testing as testing
    from .errors import BoundNotKeptWarning as BoundNotKeptWarning
    from .errors import NotBucketedWarning as NotBucketedWarning
    from .errors import PlanMismatchError as PlanMismatchError
    from .errors import RankMissingError as RankMissingError
    from .fsdp.all_to_all import AllToAllAllReduce as AllToAllAllReduce
    from .fsdp.all_to_all import AllToAllReduceScatter as AllToAllReduceScatter
    from .fsdp.blocks import transformer_block_plan as transformer_block_plan
    from .fsdp.manual import manual_plan as manual_plan
    from .fsdp.order import FSDPParamOrder as FSDPParamOrder
    from .fsdp.simple_fsdp import data_parallel as data_parallel
    from .passes.all_to_all import ReduceByAllToAll as ReduceByAllToAll
    from .passes.backends import backend as backend
    from .passes.base import GraphPass as GraphPass
    from .passes.bucketing import BucketByCap as BucketByCap
    from .passes.bucketing import BucketUnits as BucketUnits
    from .passes.tagging import TagParameters as TagParameters
    from .planner.cost.machine import Machine as Machine
    from .planner.passes.resharding import ReshardAfterForward as ReshardAfterForward
    from .planner.passes.scheduling import BucketAndSchedule as BucketAndSchedule
    from .planner.passes.scheduling import Schedule as Schedule
    from .planner.schedule.memory import CapComputeRun as CapComputeRun
    from .planner.schedule.memory import PeakMemory as PeakMemory
    from .planner.schedule.overlap import Overlap as Overlap
    from .planner.schedule.policy import Policy as Policy
    from .recipes import recipe as recipe
    from .reports.compile import CompileReport as CompileReport
    from .rewrites.add_by_unit import AddByUnit as AddByUnit
    from .rewrites.combine_uses import CombineUses as CombineUses
    from .rewrites.merge_amax import MergeAmax as MergeAmax
    from .rewrites.reduce_scatter_first import ReduceScatterFirst as ReduceScatterFirst
    from .rewrites.separate_groups import SeparateGroups as SeparateGroups

__version__: str

_HOME = {
    "errors": (
        "BoundNotKeptWarning",
        "NotBucketedWarning",
        "PlanMismatchError",
        "RankMissingError",
    ),
    "passes.all_to_all": ("ReduceByAllToAll",),
    "passes.backends": ("backend",),
    "passes.base": ("GraphPass",),
    "passes.bucketing": ("BucketByCap", "BucketUnits"),
    "rewrites.add_by_unit": ("AddByUnit",),
    "rewrites.combine_uses": ("CombineUses",),
    "rewrites.merge_amax": ("MergeAmax",),
    "recipes": ("recipe",),
    "rewrites.reduce_scatter_first": ("ReduceScatterFirst",),
    "planner.passes.resharding": ("ReshardAfterForward",),
    "planner.passes.scheduling": ("BucketAndSchedule", "Schedule"),
    "rewrites.separate_groups": ("SeparateGroups",),
    "passes.tagging": ("TagParameters",),
    "fsdp.all_to_all": ("AllToAllAllReduce", "AllToAllReduceScatter"),
    "fsdp.blocks": ("transformer_block_plan",),
    "fsdp.manual": ("manual_plan",),
    "fsdp.order": ("FSDPParamOrder",),
    "fsdp.simple_fsdp": ("data_parallel",),
    "reports.compile": ("CompileReport",),
    "planner.cost.machine": ("Machine",),
    "planner.schedule.memory": ("CapComputeRun", "PeakMemory"),
    "planner.schedule.overlap": ("Overlap",),
    "planner.schedule.policy": ("Policy",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    """Import what is asked for when it is asked for: importing the package stays cheap."""
    if name in ("hooks", "testing"):
        return _importlib.import_module(f"{__name__}.{name}")
    if name == "__version__":
        return _version()
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def _version() -> str:
    """Return the version that ``pyproject.toml`` gave the installed package."""
    from importlib import metadata

    try:
        return metadata.version(__name__)
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "hooks", "testing"})
