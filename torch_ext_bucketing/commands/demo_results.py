"""Define the demo's options, and combine the ranks' reports into its result, without torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..reports.base import columns
from ..testing.differences import Payload, layout_differences, whole_digest
from ..testing.target import check_options, option

HEAD_DIM = 32  # width of one attention head
WARMUP_STEPS = 3  # not timed: compilation, lazy initialization, first touches of memory


@dataclass(frozen=True)
class Settings:
    """Options of the demo; a field without a text is not an option of the command.

    ``batch`` is in sequences per rank and step, ``seq`` in tokens (bytes). ``channels`` and
    ``chunk_bytes`` configure the ring simulator.
    """

    ranks: int = option(4, "processes to start")
    nodes: int = option(2, "simulated nodes; divides the ranks")
    steps: int = option(25, "optimizer steps")
    layers: int = option(4, "transformer blocks")
    dim: int = option(128, "model width, a multiple of 64")
    reduce_dtype: Literal["bf16", "fp32"] = option(
        "bf16", "dtype that gradients are reduced in", choices=("bf16", "fp32")
    )
    seed: int = option(0, "of the weights and of the choice of text")
    timeout_s: float = option(900.0, "limit in seconds for all", "S")
    batch: int = 2
    seq: int = 64
    lr: float = 3e-3
    channels: int = 8
    chunk_bytes: int = 512

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ValueError(f"ranks must be at least 2, got {self.ranks}")
        check_options(self)
        if self.dim % (2 * HEAD_DIM):  # two query heads share one key/value head
            raise ValueError(
                f"dim must be a multiple of {2 * HEAD_DIM} (pairs of {HEAD_DIM} wide attention "
                f"heads), got {self.dim}"
            )


@dataclass
class RunRecord:
    """One run on one rank: per step SHA-256 of the shards, loss, and wall time in milliseconds.

    ``before`` and ``after`` are collectives per step before and after bucketing.
    """

    digests: list[str]
    loss: list[float]
    step_ms: list[float]
    before: int
    after: int
    payloads: list[Payload] = field(default_factory=list)


@dataclass
class RankReport:
    """One rank's runs by name, the model's numbers of weights, tensors and units, and torch."""

    runs: dict[str, RunRecord]
    model: dict[str, int]
    torch: str


def demo_result(settings: Settings, ranks: Sequence[RankReport]) -> dict[str, Any]:
    """Return the demo's result as a JSON-ready dictionary."""
    first = ranks[0]
    # Ranks hash their own shards; a hash of these stands for all weights.
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
    passed, texts = _verdict(settings, runs)
    differs = layout["fsdp_order"]
    text = "every bucket's members and byte offsets equal those of eager FSDP2's param groups, on "
    text += "every rank."
    if differs:
        text = "\n  ".join(
            [f"{len(differs)} differences from eager FSDP2's param groups:", *differs[:5]]
            + [f"and {len(differs) - 5} more"] * (len(differs) > 5)
        )
    return {
        "settings": asdict(settings),
        "torch": first.torch,
        "model": first.model,
        "runs": runs,
        "hashes": hashes,
        "layout_differences": layout,
        "passed": passed,
        "findings": [f"Layout: {text}", *texts],
    }


def _verdict(settings: Settings, runs: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Return whether the weights equal eager's, and texts about both payload orders."""
    steps, fsdp, control = settings.steps, runs["fsdp_order"], runs["graph_order"]
    equal, first = fsdp["steps_equal_to_eager"], control["first_different_step"]
    text = (
        "PASS: with FSDP2's payload order the weights equal eager's, bit for bit, after "
        f"{steps} of {steps} steps."
    )
    if equal < steps:
        text = (
            f"FAIL: with FSDP2's payload order the weights equal eager's after only {equal} of "
            f"{steps} steps; they first differ at step {fsdp['first_different_step']}."
        )
    if first is not None:
        why = (
            f"they equal eager's after {control['steps_equal_to_eager']} of {steps} steps and "
            f"first differ at step {first}. Only the payload order differs between these runs."
        )
    elif settings.nodes == 1:
        why = "they equal eager's: on one node all channels have the same ring. Use --nodes 2."
    elif settings.ranks == 2:
        why = "they equal eager's: with two ranks, a + b is b + a. Use --ranks 4."
    else:
        why = "they equal eager's by chance. Use more --steps or a larger --dim."
    return equal == steps, [text, f"Control: with graph order {why}"]


LABELS = {
    "eager": "eager FSDP2",
    "fsdp_order": "compiled, FSDP2 order",
    "graph_order": "compiled, graph order",
}
_HASH_DIGITS = 12


def render(result: Mapping[str, Any]) -> str:
    """Format the report that the demo prints at its end."""
    parts = [_heading(result), _hashes(result), _summary(result), *result["findings"]]
    return "\n\n".join(parts)


def _heading(result: Mapping[str, Any]) -> str:
    settings, model = result["settings"], result["model"]
    nodes = settings["nodes"]
    per_node = settings["ranks"] // nodes
    blocks = "1 block" if settings["layers"] == 1 else f"{settings['layers']} blocks"
    return (
        f"LLaMA-style model, {model['parameters']:,} weights in {model['tensors']} parameters and "
        f"{model['units']} units ({blocks} and the root)\n"
        f"bf16 parameters, {settings['reduce_dtype']} reductions, AdamW, "
        f"{settings['batch']} x {settings['seq']} bytes of text per rank and step\n"
        f"{settings['ranks']} ranks as {nodes} node{'s' if nodes > 1 else ''} x {per_node}, "
        f"{settings['channels']} ring channels of {settings['chunk_bytes']} bytes\n"
        f"torch {result['torch']}"
    )


def _hashes(result: Mapping[str, Any]) -> str:
    hashes = result["hashes"]
    rows = [["step", *map(LABELS.__getitem__, hashes)]]
    for step, (reference, *hashes_of_runs) in enumerate(zip(*hashes.values(), strict=True), 1):
        cells = ["equal" if h == reference else h[:_HASH_DIGITS] for h in hashes_of_runs]
        rows.append([f"{step:>4}", reference[:_HASH_DIGITS], *cells])
    return f"sha256 of all weights after each step (first {_HASH_DIGITS} digits)\n" + columns(rows)


def _summary(result: Mapping[str, Any]) -> str:
    runs = result["runs"]
    steps = result["settings"]["steps"]
    rows = [
        ["", "collectives", "per step", "loss", "", "weights equal", "first", "step time"],
        ["", "before", "after", "step 1", f"step {steps}", "to eager", "difference", "/ eager"],
    ]
    for name, run in runs.items():
        first = run["first_different_step"]
        equal = "" if name == "eager" else f"{run['steps_equal_to_eager']} of {steps}"
        different = "" if name == "eager" else ("none" if first is None else f"step {first}")
        rows.append(
            [
                LABELS[name],
                str(run["collectives_before"]),
                str(run["collectives_after"]),
                f"{run['loss'][0]:.6f}",
                f"{run['loss'][-1]:.6f}",
                equal,
                different,
                f"{run['step_ms'] / runs['eager']['step_ms']:.2f}",
            ]
        )
    return columns(rows)
