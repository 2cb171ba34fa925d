"""The schedule of a pipeline, which torch keeps private."""

from __future__ import annotations

from typing import Any


def actions_of(schedule: Any) -> list[tuple[int, str]]:
    """What this rank does in a step: the stage and the kind of each action, as torch writes it;
    those that overlap one after the other."""
    found = []
    for action in schedule.pipeline_order_with_comms[schedule.rank]:
        for one in action.sub_actions or (action,):
            found.append((one.stage_index, one.computation_type.value))
    return found
