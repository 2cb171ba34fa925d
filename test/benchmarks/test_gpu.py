"""Run the command for GPUs on CPU ranks: its parts pass, and what it leaves out is named."""

import shlex
from pathlib import Path

import pytest

from benchmarks import attention_ranks, gpu, parity, rank_order, train
from benchmarks.step_peak import is_good, measured
from torch_ext_bucketing.testing.ranks import run_ranks

QUICK = ["--device", "cpu", "--quick", "--seconds", "4800"]
"""Shares of the time grow with it: other tests may run beside these."""


@pytest.mark.slow
def test_its_parts_pass_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "gpu.txt"
    only = "attention,rows,bits,parking,steps"
    assert gpu.main([*QUICK, "--only", only, "--results", str(path)]) == 0
    text = path.read_text()
    assert "torch" in text.splitlines()[0]
    assert "## attention: passed" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("math ")]
    assert [row[1] for row in rows] == ["none", "1"]
    assert all(" ".join(row).count("27 of 27") == 2 for row in rows)  # gradients, and again
    assert "## rows: passed" in text
    assert "## bits: passed" in text
    assert text.count("1 of 1 rows pass") == 2
    assert "## parking: passed" in text
    assert "## steps: passed" in text
    assert "ours: tuned" in text
    assert "'all_gather', (4, 1)" in text  # measured latencies
    assert "## sums" not in text


PARSERS = {
    "benchmarks/parity.py": parity._parser,
    "benchmarks/rank_order.py": rank_order._parser,
    "benchmarks.attention_ranks": attention_ranks._parser,
    "benchmarks.train": train._parser,
}


@pytest.mark.parametrize("ranks", [4, 8])
def test_commands_have_options_that_there_are_and_rows_for_the_ranks(ranks: int) -> None:
    for name, part in gpu.parts("cuda", ranks, False).items():
        words = [word for word in shlex.split(part.command) if word != "-m"]
        if words[0] in PARSERS:
            options = PARSERS[words[0]]().parse_args(words[1:])
            assert options.device == "cuda"
        if name in ("rows", "bits", "float8"):
            rows = parity.chosen(options)
            assert {row.device for row in rows} == {"cuda"}
            assert {row.ranks for row in rows} <= {4, ranks}
            assert len(rows) == {"rows": len(gpu.PARITY_ROWS)}.get(name, 3)


def test_time_that_a_part_leaves_goes_to_the_next(tmp_path: Path, monkeypatch) -> None:
    limits = []

    def run(part: gpu.Part, environment: dict[str, str], limit_s: float) -> tuple[str, str]:
        limits.append(limit_s)
        return "", "passed (0 s)"

    monkeypatch.setattr(gpu, "run", run)
    given = ["--device", "cpu", "--only", "attention,rows", "--results", str(tmp_path / "gpu.txt")]
    assert gpu.main(given) == 0
    first, second = (gpu.parts("cpu", 4, False)[name].limit_s for name in ("attention", "rows"))
    assert limits == [pytest.approx(first, abs=5), pytest.approx(first + second, abs=5)]


def test_a_part_without_time_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.txt"
    given = ["--device", "cpu", "--only", "peaks", "--seconds", "2", "--results", str(path)]
    assert gpu.main(given) == 1
    assert "## peaks: FAILED, not finished after 0 s" in path.read_text()
    assert "not finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cards", "used"), [("0", 1), ("0,1,2", 2), ("4,5,6,7,8", 4), ("0,1,2,3,4,5,6,7,8", 8)]
)
def test_ranks_share_cards_evenly(cards: str, used: int) -> None:
    """4 ranks, or 8 on as many cards."""
    visible = cards.split(",")
    assert gpu.used_cards(visible) == visible[:used]


def test_all_parts_take_at_most_eight_minutes() -> None:
    assert sum(part.limit_s for part in gpu.parts("cpu", 8, False).values()) <= 480


@pytest.mark.torch
@pytest.mark.slow
def test_a_step_needs_what_is_estimated_and_keeps_its_bound():
    """Ranks have uneven shards; rank 0 has most."""
    for rows in run_ranks(measured, 2, (1.0,), timeout_s=900):
        eager, planned, bounded = rows
        assert [row["way"] for row in rows] == ["eager", "planned", "bounded"]
        assert all(is_good(row) and row["measured"] > 0.9 * row["estimate"] for row in rows), rows
        assert bounded["estimate"] <= bounded["bound"] < eager["measured"]
        # Not all denominators at one time, and gradients are freed. Gloo's own buffers, which are
        # measured, too, come and go with the ranks' speed.
        assert planned["estimate"] < eager["estimate"]
