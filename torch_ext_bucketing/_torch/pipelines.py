"""The schedule of a pipeline, which torch keeps private."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

_BETWEEN_RANKS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "WAIT_SEND_F", "WAIT_SEND_B")


def actions_of(schedule: Any) -> list[tuple[tuple[int, str], ...]]:
    """This rank's actions in a step: stage and kind of each, of two where it overlaps them."""
    return [
        tuple((one.stage_index, one.computation_type.value) for one in a.sub_actions or (a,))
        for a in schedule.pipeline_order_with_comms[schedule.rank]
    ]


def replace_actions(schedule: Any, actions: Sequence[tuple[tuple[int, str], ...] | int]) -> None:
    """Have this rank do other actions, from its first one on a stage, which runs now::

        RECV_F  UNSHARD  F ..           UNSHARD runs: what stands before it, and it, stay
        RECV_F  UNSHARD  the rest of `actions`

    ``actions`` are of a whole step: places in its list, and new ones of one stage. The list is
    changed in place, as the step that runs goes through it.
    """
    schedules: Any = importlib.import_module("torch.distributed.pipelining.schedules")
    order = schedule.pipeline_order_with_comms[schedule.rank]
    kinds = [action.computation_type.value for action in order]
    begun = next(i for i, kind in enumerate(kinds) if kind not in _BETWEEN_RANKS) + 1
    order[begun:] = [
        order[a]
        if isinstance(a, int)
        else schedules._Action(a[0][0], schedules._ComputationType(a[0][1]), None)
        for a in actions
        if not isinstance(a, int) or a >= begun
    ]
