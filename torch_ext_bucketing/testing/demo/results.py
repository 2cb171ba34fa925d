"""From what the ranks report to what the demo says and writes. No torch in here."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..payloads import Payload, layout_differences, whole_digest
from .settings import Settings

WARMUP_STEPS = 3
"""Steps left out of the step time: compilation, lazy initialization, first touches of memory."""


@dataclass
class RunRecord:
    """One run on one rank: per step the sha256 of this rank's shards, its loss and its wall time in
    milliseconds; the number of collectives per step before and after bucketing (eager: as issued);
    and every collective's layout."""

    digests: list[str]
    loss: list[float]
    step_ms: list[float]
    before: int
    after: int
    payloads: list[Payload] = field(default_factory=list)


@dataclass
class RankReport:
    """One rank's runs by name; of the whole model the number of ``parameters`` (weights), of
    ``tensors`` and ``units``; and the version of torch."""

    runs: dict[str, RunRecord]
    model: dict[str, int]
    torch: str


def combine(settings: Settings, ranks: Sequence[RankReport]) -> dict[str, Any]:
    """The demo's result as one JSON-ready dictionary."""
    first = ranks[0]
    hashes = {
        name: list(map(whole_digest, zip(*(r.runs[name].digests for r in ranks), strict=True)))
        for name in first.runs
    }
    runs, layout = {}, {}
    for name, record in first.runs.items():
        equal = [a == b for a, b in zip(hashes[name], hashes["eager"], strict=True)]
        losses = zip(*(r.runs[name].loss for r in ranks), strict=True)
        runs[name] = {
            "collectives_before": record.before,
            "collectives_after": record.after,
            "steps_equal_to_eager": sum(equal),
            "first_different_step": equal.index(False) + 1 if False in equal else None,
            "loss": list(map(statistics.fmean, losses)),
            "step_ms": statistics.median(record.step_ms[min(WARMUP_STEPS, settings.steps - 1) :]),
        }
        if name != "eager":
            layout[name] = [
                f"rank {rank}: {text}"
                for rank, report in enumerate(ranks)
                for text in layout_differences(
                    report.runs["eager"].payloads, report.runs[name].payloads
                )
            ]
    result: dict[str, Any] = {
        "settings": asdict(settings),
        "torch": first.torch,
        "model": first.model,
        "runs": runs,
        "hashes": hashes,
        "layout_differences": layout,
    }
    verdict = _inductor_verdict if settings.backend == "inductor" else _verdict
    passed, texts = verdict(settings, runs, hashes)
    result["passed"] = passed and (settings.backend != "inductor" or not layout["fsdp_order"])
    result["findings"] = [_layout_text(layout["fsdp_order"]), *texts]
    return result


def _layout_text(differences: Sequence[str]) -> str:
    if not differences:
        return (
            "Layout: every bucket's members and byte offsets equal those of eager FSDP2's param "
            "groups, on every rank."
        )
    shown = "\n".join(f"  {text}" for text in differences[:5])
    more = f"\n  and {len(differences) - 5} more" if len(differences) > 5 else ""
    return f"Layout: {len(differences)} differences from eager FSDP2's param groups:\n{shown}{more}"


def _verdict(
    settings: Settings, runs: Mapping[str, Any], hashes: Mapping[str, Any]
) -> tuple[bool, list[str]]:
    """Whether the weights are eager's, in words, and what graph order, the control, shows."""
    steps, ours, control = settings.steps, runs["fsdp_order"], runs["graph_order"]
    equal, first = ours["steps_equal_to_eager"], control["first_different_step"]
    text = "PASS: with FSDP2's payload order the weights equal eager's, bit for bit, after "
    text += f"{steps} of {steps} steps."
    if equal < steps:
        text = "FAIL: with FSDP2's payload order the weights equal eager's after only "
        text += (
            f"{equal} of {steps} steps; they first differ at step {ours['first_different_step']}."
        )
    if first is not None:
        why = (
            f"Control: with graph order they equal eager's after {control['steps_equal_to_eager']} "
            f"of {steps} steps and first differ at step {first}: nothing but the payload order "
            "differs between these two runs."
        )
        return equal == steps, [text, why]
    why = "although its payloads differ: no sum of these few steps was rounded differently. "
    why += "Use more --steps or a larger --dim."
    if settings.nodes == 1:
        why = "as it must on one node: there all channels have the same ring, and the place of a "
        why += "parameter in the buffer does not matter. Use --nodes 2 or more."
    elif settings.ranks == 2:
        why = "as it must with two ranks: a + b is b + a, whichever comes first. Use --ranks 4."
    return equal == steps, [text, f"Control: graph order matched eager as well, {why}"]


def _inductor_verdict(
    settings: Settings, runs: Mapping[str, Any], hashes: Mapping[str, Any]
) -> tuple[bool, list[str]]:
    """Whether the run is reproducible, in words, and how far it is from eager's."""
    again = [a == b for a, b in zip(hashes["fsdp_order"], hashes["fsdp_order_again"], strict=True)]
    same = (
        f"Reproducible: compiled anew and trained again, the weights are the same after "
        f"{settings.steps} of {settings.steps} steps."
    )
    if not all(again):
        same = (
            f"NOT reproducible: compiled anew and trained again, the weights first differ at step "
            f"{again.index(False) + 1}."
        )
    return all(again), [
        same,
        "Inductor's fused kernels keep intermediate values in fp32 where eager rounds each to "
        f"bf16, whatever the payload. {_loss_text(runs, 'fsdp_order')}",
        "Set torch._inductor.config.emulate_precision_casts to round as eager does; the command "
        "compare names the operators that still differ.",
    ]


def _loss_text(runs: Mapping[str, Any], name: str) -> str:
    gaps = [abs(a - b) for a, b in zip(runs[name]["loss"], runs["eager"]["loss"], strict=True)]
    return (
        f"Loss against eager: at most {max(gaps):.2e} apart (step {gaps.index(max(gaps)) + 1}), "
        f"{gaps[-1]:.2e} at the last step."
    )
