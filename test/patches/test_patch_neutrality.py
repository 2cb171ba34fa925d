"""With the entries unset, patched and unpatched torch make the same graphs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from collective_graphs import HELPERS
from patching_trees import ROOT, LinkedTorch, make_repository, needs_unpatched_torch, run_python

pytestmark = [pytest.mark.torch, pytest.mark.hooks, pytest.mark.long]

SCRIPT = str(HELPERS / "neutrality_graphs.py")
# What the unpatched torch can't do with these graphs, and so the patched one can't either.
_TIMES = "No module named 'triton'|active drivers"
FAILS = {
    # Products are timed by Triton before 2.15.
    "interleaved/overlap": _TIMES,
    "interleaved/manual": _TIMES,
    # Before 2.15 manual scopes merge collectives that need each other.
    "dependent/manual": "used before it has been defined",
    "scatters_need_gathers/manual": "used before it has been defined",
}


# On 2.15 a fix lets gathers be unpacked by an operator that returns its outputs.
EDGELESS = ("split_with_sizes_copy.out",)
PLUMBING = re.compile(r"aten\.(alias|split_with_sizes_copy|empty|view|reshape|flatten)\b|getitem")


def graphs(printed: str) -> dict[str, Any]:
    """Read the graphs from the line that the script prints; warnings come after it."""
    return json.loads(next(x for x in printed.splitlines() if x.startswith('{"unset"')))


def without_plumbing(nodes: list[Any]) -> list[Any]:
    """Operators and shapes. Names are numbered by operator, and arguments hold names."""
    return [(n[1], n[2], n[-1]) for n in nodes if not PLUMBING.search(n[2])]


@pytest.mark.slow
@needs_unpatched_torch
def test_unset_entries_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    before = graphs(run_python("", HELPERS, args=(SCRIPT,)).stdout)
    assert not before["set"]
    (tmp_path / "repository").mkdir()
    repository = make_repository(tmp_path / "repository")
    torch = LinkedTorch(tmp_path / "torch", repository, "HEAD")
    monkeypatch.setenv("PYTHONHASHSEED", "1")  # sets are in another order than for ``before``
    after = graphs(torch.run(SCRIPT, paths=(HELPERS,)))
    plain, patched = before["unset"], after["unset"]
    assert plain.keys() == patched.keys()
    assert len(plain) >= 14 * 10
    failed = {name: nodes for name, nodes in plain.items() if isinstance(nodes[0], str)}
    for name, (error, message) in failed.items():
        assert name in FAILS, (name, failed[name])
        assert re.search(FAILS[name], f"{error}: {message}"), (name, failed[name])
    differ = {name for name in plain if plain[name] != patched[name]}
    text = {name: json.dumps(nodes) for name, nodes in plain.items()}
    for name in differ:
        assert any(operator in text[name] for operator in EDGELESS), name
        rest = [without_plumbing(nodes[name]) for nodes in (plain, patched)]
        if "/manual" in name:  # orders by edges; some of them are new
            rest = list(map(sorted, rest))
        assert rest[0] == rest[1], name
    assert sum("bucket" in nodes for nodes in text.values()) > len(plain) / 2
    # The entries do something, and the same under any hash seed.
    assert len([name for name in after["set"] if after["set"][name] != patched[name]]) > 40
    monkeypatch.setenv("PYTHONHASHSEED", "4711")
    again = graphs(torch.run(SCRIPT, "--set", paths=(HELPERS,)))
    assert after["set"] == again["set"]


@pytest.mark.slow
@needs_unpatched_torch
def test_graphs_of_a_real_model_do_not_change():
    """Two layers; ``python -m benchmarks.neutrality`` compares all graphs at their real depth."""
    graph = "llama3_8b_fsdp8_tp8.backward.recompute"
    args = ("-m", "benchmarks.neutrality", "--only", graph, "--layers", "2")
    run_python("", ROOT, args=args)
