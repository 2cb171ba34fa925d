"""From what the ranks report to what the demo says and writes. No torch in here."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from ..payloads import Payload, layout_differences, whole_digest
from .settings import Settings

WARMUP_STEPS = 3
"""Steps left out of the step time: compilation, lazy initialization, first touches of memory."""

T = TypeVar("T")

Counts = dict[str, int]
"""Collectives per step by kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``."""


@dataclass
class RunRecord:
    """One run on one rank.

    Attributes:
        digests: sha256 of this rank's shards after each step.
        loss: this rank's loss at each step.
        step_ms: wall time of each step in milliseconds.
        before: collectives per step, one per parameter and use, before bucketing.
        after: collectives per step that remain, as in the graphs (eager: as issued).
        payloads: every collective's layout.
    """

    digests: list[str] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    before: Counts = field(default_factory=dict)
    after: Counts = field(default_factory=dict)
    payloads: list[Payload] = field(default_factory=list)


@dataclass
class RankReport:
    """What one rank hands back."""

    runs: dict[str, RunRecord]
    model: dict[str, int]
    """``parameters`` (weights of the whole model), ``tensors`` and ``units``."""
    versions: dict[str, str]


def combine(settings: Settings, ranks: Sequence[RankReport]) -> dict[str, Any]:
    """The demo's result as one JSON-ready dictionary."""
    first = ranks[0]
    hashes = {
        name: [whole_digest(shards) for shards in _by_step([r.runs[name].digests for r in ranks])]
        for name in first.runs
    }
    runs = {}
    for name, record in first.runs.items():
        equal = [a == b for a, b in zip(hashes[name], hashes["eager"], strict=True)]
        runs[name] = {
            "collectives_before": sum(record.before.values()),
            "collectives_after": sum(record.after.values()),
            "collectives_before_by_kind": record.before,
            "collectives_after_by_kind": record.after,
            "steps_equal_to_eager": sum(equal),
            "first_different_step": equal.index(False) + 1 if False in equal else None,
            "loss": [statistics.fmean(x) for x in _by_step([r.runs[name].loss for r in ranks])],
            "step_ms": statistics.median(record.step_ms[min(WARMUP_STEPS, settings.steps - 1) :]),
            "first_step_ms": record.step_ms[0],
            "buckets": [asdict(payload) for payload in record.payloads],
        }
    layout = {
        name: [
            f"rank {rank}: {text}"
            for rank, report in enumerate(ranks)
            for text in layout_differences(
                report.runs["eager"].payloads, report.runs[name].payloads
            )
        ]
        for name in first.runs
        if name != "eager"
    }
    result: dict[str, Any] = {
        "settings": asdict(settings),
        "versions": first.versions,
        "model": first.model,
        "runs": runs,
        "hashes": hashes,
        "layout_differences": layout,
    }
    result["passed"], result["findings"] = _verdict(settings, result)
    return result


def _by_step(by_rank: Sequence[Sequence[T]]) -> list[tuple[T, ...]]:
    return list(zip(*by_rank, strict=True))


def _verdict(settings: Settings, result: Mapping[str, Any]) -> tuple[bool, list[str]]:
    layout = result["layout_differences"]["fsdp_order"]
    findings = [_layout_text(layout)]
    if settings.backend == "inductor":
        passed, more = _inductor_verdict(settings, result)
        return passed and not layout, findings + more
    ours = result["runs"]["fsdp_order"]
    passed = ours["steps_equal_to_eager"] == settings.steps
    if passed:
        text = (
            f"PASS: with FSDP2's payload order the weights equal eager's, bit for bit, after "
            f"{settings.steps} of {settings.steps} steps."
        )
    else:
        text = (
            f"FAIL: with FSDP2's payload order the weights equal eager's after only "
            f"{ours['steps_equal_to_eager']} of {settings.steps} steps; they first differ at step "
            f"{ours['first_different_step']}."
        )
    return passed, [*findings, text, _control_text(settings, result)]


def _layout_text(differences: Sequence[str]) -> str:
    if not differences:
        return (
            "Layout: every bucket's members and byte offsets equal those of eager FSDP2's param "
            "groups, on every rank."
        )
    shown = "\n".join(f"  {text}" for text in differences[:5])
    more = f"\n  and {len(differences) - 5} more" if len(differences) > 5 else ""
    return f"Layout: {len(differences)} differences from eager FSDP2's param groups:\n{shown}{more}"


def _control_text(settings: Settings, result: Mapping[str, Any]) -> str:
    control = result["runs"]["graph_order"]
    first = control["first_different_step"]
    if first is not None:
        return (
            f"Control: with graph order they equal eager's after "
            f"{control['steps_equal_to_eager']} of {settings.steps} steps and first differ at step "
            f"{first}: nothing but the payload order differs between these two runs."
        )
    if settings.nodes == 1:
        why = (
            "as it must on one node: there all channels have the same ring, and the place of a "
            "parameter in the buffer does not matter. Use --nodes 2 or more."
        )
    elif settings.ranks == 2:
        why = "as it must with two ranks: a + b is b + a, whichever comes first. Use --ranks 4."
    else:
        why = (
            "although its payloads differ: no sum of these few steps was rounded differently. Use "
            "more --steps or a larger --dim."
        )
    return f"Control: graph order matched eager as well, {why}"


def _inductor_verdict(settings: Settings, result: Mapping[str, Any]) -> tuple[bool, list[str]]:
    runs, hashes = result["runs"], result["hashes"]
    again = [a == b for a, b in zip(hashes["fsdp_order"], hashes["fsdp_order_again"], strict=True)]
    reproducible = all(again)
    if reproducible:
        same = (
            f"Reproducible: compiled anew and trained again, the weights are the same after "
            f"{settings.steps} of {settings.steps} steps."
        )
    else:
        same = (
            f"NOT reproducible: compiled anew and trained again, the weights first differ at step "
            f"{again.index(False) + 1}."
        )
    precise = runs["fsdp_order_precise"]
    texts = [
        same,
        "Inductor's fused kernels keep intermediate values in fp32 where eager rounds each to "
        f"bf16, whatever the payload. {_loss_text(runs, 'fsdp_order')}",
        "With emulate_precision_casts, and eager's kernel for the embedding's gradient (Inductor's "
        f"own adds in fp32, not in bf16), the weights equal eager's after "
        f"{precise['steps_equal_to_eager']} of {settings.steps} steps. "
        f"{_loss_text(runs, 'fsdp_order_precise')}",
    ]
    return reproducible, texts


def _loss_text(runs: Mapping[str, Any], name: str) -> str:
    gaps = [abs(a - b) for a, b in zip(runs[name]["loss"], runs["eager"]["loss"], strict=True)]
    return (
        f"Loss against eager: at most {max(gaps):.2e} apart (step {gaps.index(max(gaps)) + 1}), "
        f"{gaps[-1]:.2e} at the last step."
    )
