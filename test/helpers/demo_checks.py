"""Checks of the demo's results."""


def check_demo(result: dict, ranks: int, steps: int) -> None:
    runs = result["runs"]
    for name in ("eager", "fsdp_order", "graph_order"):
        assert len(runs[name]["loss"]) == steps
        assert runs[name]["step_ms"] > 0
        assert len(result["hashes"][name]) == steps
    # One block and the root: 2 all-gathers in forward, 1 in backward, 2 reduce-scatters.
    assert runs["eager"]["collectives_after"] == 5
    for name in ("fsdp_order", "graph_order"):
        assert runs[name]["collectives_before"] == 42
        assert runs[name]["collectives_after"] == 5
    assert result["layout_differences"]["fsdp_order"] == []
    assert result["layout_differences"]["graph_order"]
    assert result["settings"]["ranks"] == ranks
    assert result["passed"]
