"""Collective bucketing policies for compiled PyTorch training.

Importing the package is what gives torch the hooks: where the installed torch lacks them, its
bucketing modules are served patched from here on (see ``torch_ext_bucketing.patching``).
"""

from __future__ import annotations

import importlib as _importlib
import os as _os
import sys as _sys
from typing import TYPE_CHECKING

from ._moved import install as _keep_old_names
from .patching import HooksError, HooksWarning, hooks_status, require_hooks
from .patching import ensure_hooks as _ensure_hooks

if TYPE_CHECKING:
    from .agreement.before_run import agree
    from .agreement.exchange import AgreementError, PlanMismatchError, RankMissingError
    from .bucketing.caps import plan_by_cap
    from .bucketing.groups import primary_group
    from .passes.backends import backend
    from .passes.base import GraphPass
    from .passes.bucketing import BucketByCap, BucketUnits, bucket_graph
    from .passes.combine_uses import CombineUses
    from .passes.divided import DividedUnitWarning
    from .passes.keep import NothingKeptWarning
    from .passes.recipe import recipe
    from .passes.reduce_scatter_first import ReduceScatterFirst
    from .passes.resharding import ReshardAfterForward
    from .passes.scheduling import BucketAndSchedule, Schedule
    from .passes.separate_groups import SeparateGroups
    from .passes.silence import NotBucketedWarning, PayloadOrderWarning
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
    from .ring.group import init_ring_process_group, register_ring_backend
    from .ring.sums import RingTopology
    from .scheduling.machine import H100, Level, Machine
    from .scheduling.memory import CapComputeRun, PeakMemory
    from .scheduling.model import peak_bytes
    from .scheduling.overlap import Overlap
    from .scheduling.policy import Policy
    from .scheduling.scheduler import BoundNotKeptWarning, schedule
    from .tagging.tag_graph import tag_joint_graph
    from .tagging.tags import Tag, set_tag, tag_of

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
    "HooksError",
    "HooksWarning",
    "Level",
    "Machine",
    "NotBucketedWarning",
    "NothingKeptWarning",
    "Overlap",
    "PayloadOrderWarning",
    "PeakMemory",
    "PlanMismatchError",
    "Policy",
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
    "bucket_graph",
    "data_parallel",
    "hooks_status",
    "init_ring_process_group",
    "make_plan",
    "manual_plan",
    "peak_bytes",
    "plan_by_cap",
    "primary_group",
    "recipe",
    "register_ring_backend",
    "require_hooks",
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
        "bucket_graph",
    ),
    "passes.divided": ("DividedUnitWarning",),
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
    "passes.silence": ("NotBucketedWarning", "PayloadOrderWarning"),
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
    "ring.group": (
        "init_ring_process_group",
        "register_ring_backend",
    ),
    "ring.sums": ("RingTopology",),
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
    "scheduling.overlap": ("Overlap",),
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
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _is_own_command() -> bool:
    """Whether this process was started as our command line, which must work on a broken torch.

    ``sys.orig_argv`` tells, and not ``sys.argv``, which ``multiprocessing`` copies to its children.
    """
    arguments = iter(_sys.orig_argv[1:])
    for argument in arguments:
        if argument in ("-W", "-X", "--check-hash-based-pycs"):
            next(arguments, None)
        elif argument == "-m":
            return next(arguments, None) == __name__
        elif argument == f"-m{__name__}":
            return True
        elif not argument.startswith("-"):
            return _os.path.basename(argument).startswith("torch-ext-bucketing")
    return False


if not _is_own_command():
    _ensure_hooks()
_keep_old_names()  # Last: an import that fails leaves no finder behind.
