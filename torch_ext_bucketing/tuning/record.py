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
from .._torch.variants import cache_dir, keep_json
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
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    # How many ranks share a node counts, too.
    node = (platform.machine(), os.cpu_count(), os.environ.get("LOCAL_WORLD_SIZE", ""))
    known = (torch.__version__, package_digest(), device_name, node, backend, group_places())
    return digest(gm.code, *map(repr, (shapes, names, bound_bytes, known)))


def load(key: str) -> TuneReport | None:
    """Read a record; None if there is none, or it can't be read."""
    try:
        text = Path(cache_dir(), _name(key)).read_text(encoding="utf-8")
        report = TuneReport.from_dict(json.loads(text))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # So that it travels on. The folder may be read-only here.
    keep_json(_name(key), report.as_dict(), is_written=True)
    return report


def save(key: str, report: TuneReport) -> None:
    """Write a record, also to what ``torch.compiler.save_cache_artifacts`` returns."""
    keep_json(_name(key), report.as_dict())


def _name(key: str) -> str:
    return f"torch_ext_bucketing/choices/{key}.json"


def _identity(candidate: Any) -> Any:
    if isinstance(candidate, BucketingBackend):
        uuid = candidate.pipeline.uuid()
        if uuid is None:
            raise NoUuidError(f"{candidate!r} has a pass without a cache key")
        return uuid, describe(candidate.compiler), candidate.prefetch
    return describe(candidate)
