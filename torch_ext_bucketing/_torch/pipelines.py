"""Read and change the private schedule of a pipeline."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

_BETWEEN_RANKS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "WAIT_SEND_F", "WAIT_SEND_B")


def actions_of(schedule: Any) -> list[tuple[tuple[int, str], ...]]:
    """Return this rank's actions in a step: stage and kind, of both if two overlap."""
    return [
        tuple((one.stage_index, one.computation_type.value) for one in a.sub_actions or (a,))
        for a in schedule.pipeline_order_with_comms[schedule.rank]
    ]


def replace_actions(schedule: Any, actions: Sequence[tuple[tuple[int, str], ...] | int]) -> None:
    """Replace this rank's actions after its first one on a stage, which runs now.

    ::

        RECV_F  UNSHARD  F ..           UNSHARD runs: it and the actions before it stay
        RECV_F  UNSHARD  the rest of `actions`

    ``actions`` describe a whole step: indices into its list, and new actions of one stage.
    """
    schedules: Any = importlib.import_module("torch.distributed.pipelining.schedules")
    order = schedule.pipeline_order_with_comms[schedule.rank]
    kinds = [action.computation_type.value for action in order]
    begun = next(i for i, kind in enumerate(kinds) if kind not in _BETWEEN_RANKS) + 1
    order[begun:] = [  # in place: the running step iterates over the list
        order[a]
        if isinstance(a, int)
        else schedules._Action(a[0][0], schedules._ComputationType(a[0][1]), None)
        for a in actions
        if not isinstance(a, int) or a >= begun
    ]
