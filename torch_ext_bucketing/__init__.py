"""Collective bucketing policies for compiled PyTorch training.

Importing the package changes nothing in torch. ``torch_ext_bucketing.hooks``, which is for torch's
own passes, does so when it is asked to.
"""

from __future__ import annotations

import importlib as _importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import hooks as hooks
    from .agreement.before_run import agree
    from .agreement.exchange import AgreementError, PlanMismatchError, RankMissingError
    from .bucketing.caps import plan_by_cap
    from .bucketing.groups import primary_group
    from .passes.backends import backend
    from .passes.base import GraphPass
    from .passes.bucketing import BucketByCap, BucketUnits
    from .passes.combine_uses import CombineUses
    from .passes.diagnostics import DividedUnitWarning, NotBucketedWarning, PayloadOrderWarning
    from .passes.keep import NothingKeptWarning
    from .passes.recipe import recipe
    from .passes.reduce_scatter_first import ReduceScatterFirst
    from .passes.resharding import ReshardAfterForward
    from .passes.scheduling import BucketAndSchedule, Schedule
    from .passes.separate_groups import SeparateGroups
    from .passes.tagging import TagParameters
    from .passes.whole_step import whole_step_pass
    from .plans.blocks import transformer_block_plan
    from .plans.make import make_plan
    from .plans.manual import manual_plan
    from .plans.order import FSDPParamOrder
    from .plans.plan import BucketPlan
    from .plans.simple_fsdp import ReduceOnce, data_parallel
    from .reports.compile import CompileReport
    from .reports.graph import GraphReport
    from .reports.schedule import ScheduleReport
    from .scheduling.machine import H100, Level, Machine
    from .scheduling.memory import CapComputeRun, PeakMemory
    from .scheduling.model import peak_bytes
    from .scheduling.overlap import Overlap, PrefetchDepth
    from .scheduling.policy import Policy
    from .scheduling.scheduler import BoundNotKeptWarning, schedule
    from .tagging.tag_graph import tag_joint_graph
    from .tagging.tags import Tag, set_tag, tag_of
    from .testing.ring import init_ring_process_group, register_ring_backend
    from .testing.sums import RingTopology

__version__ = "0.1.0"

__all__ = [
    "H100",
    "AgreementError",
    "BoundNotKeptWarning",
    "BucketAndSchedule",
    "BucketByCap",
    "BucketPlan",
    "BucketUnits",
    "CapComputeRun",
    "CombineUses",
    "CompileReport",
    "DividedUnitWarning",
    "FSDPParamOrder",
    "GraphPass",
    "GraphReport",
    "Level",
    "Machine",
    "NotBucketedWarning",
    "NothingKeptWarning",
    "Overlap",
    "PayloadOrderWarning",
    "PeakMemory",
    "PlanMismatchError",
    "Policy",
    "PrefetchDepth",
    "RankMissingError",
    "ReduceOnce",
    "ReduceScatterFirst",
    "ReshardAfterForward",
    "RingTopology",
    "Schedule",
    "ScheduleReport",
    "SeparateGroups",
    "Tag",
    "TagParameters",
    "agree",
    "backend",
    "data_parallel",
    "init_ring_process_group",
    "make_plan",
    "manual_plan",
    "peak_bytes",
    "plan_by_cap",
    "primary_group",
    "recipe",
    "register_ring_backend",
    "schedule",
    "set_tag",
    "tag_joint_graph",
    "tag_of",
    "transformer_block_plan",
    "whole_step_pass",
]

_HOME = {
    "agreement.before_run": ("agree",),
    "agreement.exchange": (
        "AgreementError",
        "PlanMismatchError",
        "RankMissingError",
    ),
    "bucketing.caps": ("plan_by_cap",),
    "bucketing.groups": ("primary_group",),
    "passes.backends": ("backend",),
    "passes.base": ("GraphPass",),
    "passes.bucketing": (
        "BucketByCap",
        "BucketUnits",
    ),
    "passes.diagnostics": ("DividedUnitWarning", "NotBucketedWarning", "PayloadOrderWarning"),
    "passes.keep": ("NothingKeptWarning",),
    "passes.recipe": ("recipe",),
    "passes.combine_uses": ("CombineUses",),
    "passes.reduce_scatter_first": ("ReduceScatterFirst",),
    "passes.resharding": ("ReshardAfterForward",),
    "passes.scheduling": (
        "BucketAndSchedule",
        "Schedule",
    ),
    "passes.separate_groups": ("SeparateGroups",),
    "passes.tagging": ("TagParameters",),
    "passes.whole_step": ("whole_step_pass",),
    "plans.blocks": ("transformer_block_plan",),
    "plans.make": ("make_plan",),
    "plans.manual": ("manual_plan",),
    "plans.order": ("FSDPParamOrder",),
    "plans.plan": ("BucketPlan",),
    "plans.simple_fsdp": ("ReduceOnce", "data_parallel"),
    "reports.compile": ("CompileReport",),
    "reports.graph": ("GraphReport",),
    "reports.schedule": ("ScheduleReport",),
    "testing.ring": (
        "init_ring_process_group",
        "register_ring_backend",
    ),
    "testing.sums": ("RingTopology",),
    "scheduling.machine": (
        "H100",
        "Level",
        "Machine",
    ),
    "scheduling.memory": (
        "CapComputeRun",
        "PeakMemory",
    ),
    "scheduling.model": ("peak_bytes",),
    "scheduling.overlap": (
        "Overlap",
        "PrefetchDepth",
    ),
    "scheduling.policy": ("Policy",),
    "scheduling.scheduler": (
        "BoundNotKeptWarning",
        "schedule",
    ),
    "tagging.tag_graph": ("tag_joint_graph",),
    "tagging.tags": (
        "Tag",
        "set_tag",
        "tag_of",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> object:
    """Import what is asked for when it is asked for: importing the package stays cheap."""
    if name == "hooks":
        return _importlib.import_module(f"{__name__}.hooks")
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "hooks"})
