"""Run the command for GPUs on CPU ranks: its parts pass, and what it leaves out is named."""

from pathlib import Path

import pytest

from benchmarks import gpu


@pytest.mark.slow
def test_its_parts_pass_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "gpu.txt"
    # Shares of the time grow with it: other tests may run beside this one.
    given = ["--device", "cpu", "--quick", "--only", "bits,steps", "--seconds", "2400"]
    assert gpu.main([*given, "--results", str(path)]) == 0
    text = path.read_text()
    assert "torch" in text.splitlines()[0]
    assert "## bits: passed" in text
    assert "1 of 1 rows pass" in text
    assert "## steps: passed" in text
    assert "ours: tuned" in text
    assert "'all_gather', (4, 1)" in text  # measured latencies
    assert "## sums" not in text


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
