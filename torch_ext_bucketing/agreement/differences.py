"""Format the first difference between the launches of ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

from .launches import GroupLaunches, Launch


class Version(NamedTuple):
    """One rank's environment, and its launches on one process group."""

    environment: str
    stage: str
    of_group: GroupLaunches
    planned_with: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of everything but the stage, which changes no byte that is sent."""
        text = f"{self.environment}\0{self.planned_with}\0{json.dumps(self.of_group)}"
        return hashlib.sha256(text.encode()).hexdigest()

    @classmethod
    def from_json(cls, text: str) -> Version:
        """Read the result of ``json.dumps``."""
        environment, stage, of_group, planned_with = json.loads(text)
        return cls(environment, stage, GroupLaunches.of(*of_group), planned_with)


def mismatch_text(
    versions: Sequence[tuple[list[int], Version]], absent: Sequence[int], size: int
) -> str:
    """Format the mismatch between versions, each with its ranks, of a group of ``size`` ranks."""
    group = versions[0][1].of_group.group
    stages = dict.fromkeys(v.stage for _, v in versions)
    lines = [
        f"the ranks of process group {group!r} ({size} ranks) launch different collectives in "
        f"their {' / '.join(stages)} graph, {len(versions)} versions of it. It was stopped."
    ]
    plannings = {v.planned_with for _, v in versions}
    for title, value_of in (
        ("They run different versions:", lambda v: v.environment),
        ("They planned with different times or size hints:", lambda v: v.planned_with or "none"),
    ):
        if len({value_of(v) for _, v in versions}) > 1:
            lines += [title, *(f"  {ranks_text(ranks)}: {value_of(v)}" for ranks, v in versions)]
    at = _first_difference([v.of_group.launches for _, v in versions])
    if at is None and len(plannings) > 1:
        lines.append(
            "Their collectives are still the same, but may differ after the next change of the "
            "model. Measure on one rank, and load its times on all."
        )
    elif at is None:
        lines.append("Their buckets are the same, but not the code that packs them.")
    else:
        total = " or ".join(map(str, dict.fromkeys(len(v.of_group.launches) for _, v in versions)))
        lines.append(f"The first to differ is collective {at + 1} of {total} on this group:")
        lines += _launches_text(versions, at)
    if absent:
        lines.append(f"Not arrived yet: {ranks_text(absent)}.")
    lines.append(
        "Check that all ranks build the same model, give the backend the same passes, units and "
        "hooks, and run the same torch and torch_ext_bucketing."
    )
    return "\n".join(lines)


def _launches_text(versions: Sequence[tuple[list[int], Version]], at: int) -> list[str]:
    ranks_of: dict[Launch | None, list[int]] = {}
    for ranks, version in versions:
        launches = version.of_group.launches
        ranks_of.setdefault(launches[at] if at < len(launches) else None, []).extend(ranks)
    members = [() if launch is None else launch.members for launch in ranks_of]
    place = _first_difference(members) if all(members) else None
    lines = []
    for launch, ranks in ranks_of.items():
        text = "no such collective" if launch is None else launch.to_text(place or 0)
        lines.append(f"  {ranks_text(sorted(ranks))}: {text}")
    if place is not None and len({launch.kind for launch in ranks_of if launch}) == 1:
        lines.append(f"  (their members differ from number {place + 1} on)")
    return lines


def _first_difference(lists: Sequence[Sequence[object]]) -> int | None:
    """Return the first index at which the lists differ; None if they are equal."""
    for place in range(max(map(len, lists))):
        if len({x[place] if place < len(x) else None for x in lists}) > 1:
            return place
    return None


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ``[0, 1, 2, 5]`` as ``"ranks 0-2, 5"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"
