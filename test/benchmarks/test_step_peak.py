"""The peak of a step on CPU ranks, as measured, against its estimate and its bound."""

import pytest

from benchmarks.step_peak import is_good, measured
from torch_ext_bucketing.testing.ranks import run_ranks


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
