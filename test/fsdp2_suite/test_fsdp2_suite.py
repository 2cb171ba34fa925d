"""Programs beside eager FSDP2: equal, refused by name, or a documented difference."""

import pytest
from rank_pool import on_ranks

from fsdp2_suite.harness import CASES, judge, load

pytestmark = [pytest.mark.torch, pytest.mark.long]


def parameters():
    for name, case in load().items():
        for mode in case.expected:
            slow = () if case.quick and mode == "compiled" else (pytest.mark.slow,)
            yield pytest.param(name, mode, id=f"{name}-{mode}", marks=slow)


@pytest.mark.parametrize(("name", "mode"), list(parameters()))
def test_is_as_expected_beside_eager_fsdp2(name, mode):
    found = on_ranks(verdict, name, mode, world=CASES[name].world, timeout_s=90)
    assert found == [""] * CASES[name].world


def verdict(rank, name, mode):
    return judge(name, mode)
