"""The fact that a planned order gives."""

from __future__ import annotations

from dataclasses import dataclass

from ...passes.cache_key import brief
from ...passes.facts import Order
from ..cost.machine import Machine
from ..schedule.policy import Policy


@dataclass(frozen=True)
class PlannedOrder(Order):
    """The nodes stand in an order judged by ``policies`` and timed for ``machine``."""

    policies: tuple[Policy, ...] = ()
    machine: Machine | None = None

    @property
    def planned_with(self) -> str:
        """Return the machine's name and a digest of its numbers."""
        return "" if self.machine is None else f"machine {self.machine.name} {brief(self.machine)}"
