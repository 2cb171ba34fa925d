"""Keep a choice in the folder of Inductor's caches, for later starts.

A record is found by everything that the choice depends on: the graph and its inputs, the
candidates, the bound, the machine, the process groups, torch and this package.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx

from .._source import package_digest
from .._torch.process_groups import group_places
from .._torch.variants import cache_dir
from ..errors import NoUuidError
from ..passes.backends import BucketingBackend
from ..passes.cache_key import describe, digest, log_no_uuid
from ..reports.tuning import TuneReport


def key_of(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    candidates: Mapping[str, Any],
    bound_bytes: int | None,
    device: torch.device,
) -> str:
    """Make the record's key; "" if a candidate can't be identified, and log why."""
    shapes = [(tuple(x.shape), x.dtype) for x in inputs if isinstance(x, torch.Tensor)]
    try:
        names = [(name, _identity(each)) for name, each in candidates.items()]
    except NoUuidError as error:
        log_no_uuid("the choice of a candidate", error)
        return ""
    backend = dist.get_backend() if dist.is_available() and dist.is_initialized() else ""
    known = (torch.__version__, package_digest(), _machine(device), backend, group_places())
    return digest(gm.code, *map(repr, (shapes, names, bound_bytes, known)))


def load(key: str) -> TuneReport | None:
    """Read a record; None if there is none, or it can't be read."""
    try:
        return TuneReport.from_dict(json.loads(_path(key).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save(key: str, report: TuneReport) -> None:
    """Write a record, whole or not at all."""
    path = _path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(report.to_json() + "\n", encoding="utf-8")
    part.replace(path)


def _path(key: str) -> Path:
    return Path(cache_dir(), "torch_ext_bucketing", "choices", f"{key}.json")


def _machine(device: torch.device) -> tuple[Any, ...]:
    """Identify the device, the CPU, and how many ranks share a node."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return name, platform.machine(), os.cpu_count(), os.environ.get("LOCAL_WORLD_SIZE", "")


def _identity(candidate: Any) -> Any:
    if isinstance(candidate, BucketingBackend):
        uuid = candidate.pipeline.uuid()
        if uuid is None:
            raise NoUuidError(f"{candidate!r} has a pass without a cache key")
        return uuid, describe(candidate.compiler), candidate.prefetch
    return describe(candidate)
