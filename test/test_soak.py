"""A short soak, and that it finds what is wrong."""

import json

import pytest

from benchmarks import soak


@pytest.mark.slow
@pytest.mark.once
def test_random_models_equal_eager(tmp_path, capsys):
    found = tmp_path / "soak.json"
    options = ["--models", "2", "--first", "3", "--inductor-every", "0", "--json", str(found)]
    assert soak.main(options) == 0, capsys.readouterr()
    result = json.loads(found.read_text())
    assert result["models"] == 2
    assert result["steps"] == 6
    assert result["buckets"] > 0
    assert result["collectives"][1] < result["collectives"][0]
    assert {case["rank"] for case in result["cases"]} == {0, 1}


@pytest.mark.slow
@pytest.mark.once
def test_a_wrong_payload_order_is_found(capsys):
    """Of two ranks any order gives the same sums: it is the layout that tells."""
    options = ["--models", "1", "--first", "1", "--inductor-every", "0", "--wrong-order"]
    assert soak.main(options) == 1
    out, err = capsys.readouterr()
    assert "members are not in eager FSDP2's order" in err
    assert "FAIL" in out
    assert "mismatches" in out


def test_growth_is_that_of_the_last_half():
    mib = 2**20
    assert soak._growth_mib([100 * mib] * 8) is None
    flat = [k * 50 * mib for k in range(20)] + [1000 * mib] * 20
    assert soak._growth_mib(flat) == 0
    rising = [k * 3 * mib for k in range(40)]
    assert soak._growth_mib(rising) == pytest.approx(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--models", "0"], "--models must be at least 1"),
        (["--ranks", "3"], "--ranks must be even"),
        (["--minutes", "0"], "--minutes must be positive"),
    ],
)
def test_bad_options(options, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        soak.main(options)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
