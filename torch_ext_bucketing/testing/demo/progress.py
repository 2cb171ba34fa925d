"""The demo's progress. No torch in here."""

from __future__ import annotations

from collections.abc import Callable

from ..ranks import sayer
from .settings import Settings
from .table import label


def on_messages(settings: Settings) -> Callable[[int, tuple[int, str, str]], None]:
    """Takes each rank's ``(step, run, digest)``, step 0 before a run begins, and says how far the
    runs are and how often they were equal."""
    say, steps = sayer(), settings.steps
    shards: dict[tuple[int, str], dict[int, str]] = {}
    equal: dict[str, int] = {}
    say(f"starting {settings.ranks} ranks")

    def on_message(rank: int, message: tuple[int, str, str]) -> None:
        step, run, digest = message
        if run not in equal:
            equal[run] = 0
            say(f"first step of: {label(run)}")
        mine = shards.setdefault((step, run), {})
        mine[rank] = digest
        if step == 0 or len(mine) < settings.ranks:
            return
        equal[run] += mine == shards[step, "eager"]
        if run == list(equal)[-1] and (step % max(1, steps // 5) == 0 or step == steps):
            found = "; ".join(f"{label(name)}: {n}" for name, n in equal.items() if name != "eager")
            say(f"step {step} of {steps}, equal to eager so far: {found}")

    return on_message
