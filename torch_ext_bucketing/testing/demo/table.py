"""Format the demo's result, the dictionary that ``--json`` writes, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...reports.text import aligned

_LABELS = {
    "eager": "eager FSDP2",
    "fsdp_order": "compiled, FSDP2 order",
    "graph_order": "compiled, graph order",
    "fsdp_order_again": "  FSDP2 order, again",
}
_HASH = 12


def label(run: str) -> str:
    """Return a run's display name."""
    return _LABELS[run].strip()


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Align rows of cells: the first column to the left, the others to the right."""
    return "\n".join(aligned(rows, right=range(1, len(rows[0]))))


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
        f"torch {result['torch']}, backend {settings['backend']}"
    )


def _hashes(result: Mapping[str, Any]) -> str:
    runs = result["runs"]
    names = [name for name in runs if name != "eager"]
    rows = [["step", label("eager"), *(label(name) for name in names)]]
    for step, reference in enumerate(result["hashes"]["eager"]):
        row = [f"{step + 1:>4}", reference[:_HASH]]
        for name in names:
            digest = result["hashes"][name][step]
            row.append("equal" if digest == reference else digest[:_HASH])
        rows.append(row)
    return f"sha256 of all weights after each step (first {_HASH} digits)\n" + columns(rows)


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
                _LABELS[name],
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
