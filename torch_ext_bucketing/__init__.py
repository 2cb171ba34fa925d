"""Collective bucketing policies for compiled PyTorch training.

Importing the package is what gives torch the hooks: where the installed torch lacks them, its
bucketing modules are served patched from here on (see ``torch_ext_bucketing.patching``).
"""

from __future__ import annotations

import importlib as _importlib
import os as _os
import sys as _sys
from typing import TYPE_CHECKING

from .patching import HooksError, HooksWarning, hooks_status, require_hooks
from .patching import ensure_hooks as _ensure_hooks

if TYPE_CHECKING:
    from .agreement import AgreementError, PlanMismatchError, RankMissingError, agree
    from .caps import plan_by_cap
    from .cost import H100, Machine
    from .groups import primary_group
    from .memory import CapComputeRun, PeakMemory
    from .order import FSDPParamOrder
    from .overlap import Overlap, PrefetchDepth
    from .passes import (
        BucketByCap,
        BucketUnits,
        GraphPass,
        ReshardAfterForward,
        TagParameters,
        backend,
        bucket_graph,
    )
    from .plans import BucketPlan, make_plan, manual_plan, transformer_block_plan
    from .report import CompileReport, GraphReport, ScheduleReport
    from .ring import RingTopology, init_ring_process_group, register_ring_backend
    from .scheduling import BoundNotKeptWarning, peak_bytes, schedule
    from .scheduling_passes import BucketAndSchedule, Schedule
    from .separate_groups import SeparateGroups
    from .simple_fsdp import data_parallel
    from .tags import Tag, set_tag, tag_joint_graph, tag_of

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
    "CompileReport",
    "FSDPParamOrder",
    "GraphPass",
    "GraphReport",
    "HooksError",
    "HooksWarning",
    "Machine",
    "Overlap",
    "PeakMemory",
    "PlanMismatchError",
    "PrefetchDepth",
    "RankMissingError",
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
    "register_ring_backend",
    "require_hooks",
    "schedule",
    "set_tag",
    "tag_joint_graph",
    "tag_of",
    "transformer_block_plan",
]

_HOME = {
    "agreement": ("AgreementError", "PlanMismatchError", "RankMissingError", "agree"),
    "caps": ("plan_by_cap",),
    "groups": ("primary_group",),
    "order": ("FSDPParamOrder",),
    "cost": ("H100", "Machine"),
    "memory": ("CapComputeRun", "PeakMemory"),
    "overlap": ("Overlap", "PrefetchDepth"),
    "passes": (
        "BucketByCap",
        "BucketUnits",
        "GraphPass",
        "ReshardAfterForward",
        "TagParameters",
        "backend",
        "bucket_graph",
    ),
    "plans": ("BucketPlan", "make_plan", "manual_plan", "transformer_block_plan"),
    "report": ("CompileReport", "GraphReport", "ScheduleReport"),
    "ring": ("RingTopology", "init_ring_process_group", "register_ring_backend"),
    "scheduling": ("BoundNotKeptWarning", "peak_bytes", "schedule"),
    "scheduling_passes": ("BucketAndSchedule", "Schedule"),
    "separate_groups": ("SeparateGroups",),
    "simple_fsdp": ("data_parallel",),
    "tags": ("Tag", "set_tag", "tag_joint_graph", "tag_of"),
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
