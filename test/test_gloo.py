"""What keeps ranks on gloo from being killed by torch's own faults; the groups are test_ring's."""

import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from torch_ext_bucketing.ring import gloo as _gloo
from torch_ext_bucketing.ring.gloo import Loan, make_gloo


def held_by_cpp(x):
    """A node of autograd that saves ``x``, as gloo's thread holds what it sends."""
    return [x * x]


def test_one_thread(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    gloo = make_gloo(store, 0, 1, [7], timeout=timedelta(seconds=20))
    assert gloo.options._threads == 1
    assert gloo.options._timeout == timedelta(seconds=20)
    assert gloo.options.global_ranks_in_group == [7]
    x = torch.ones(3)
    gloo.allreduce([x]).wait()
    assert x.tolist() == [1, 1, 1]


def test_a_loan_is_back_when_cpp_lets_go():
    loan, x = Loan(), torch.ones(3, requires_grad=True)
    assert loan.is_back()
    held = loan.lend(held_by_cpp, x)
    assert not loan.is_back()
    held.clear()
    assert loan.is_back()


def test_a_loan_finds_tensors_in_lists_and_keywords():
    loan, x = Loan(), torch.ones(3, requires_grad=True)
    held = loan.lend(lambda lists, *, root: held_by_cpp(lists[0][0]), [[x]], root=1)
    assert not loan.is_back()
    held.clear()
    held = loan.lend(lambda *, tensors: held_by_cpp(tensors[0]), tensors=(x,))
    assert not loan.is_back()
    held.clear()
    assert loan.is_back()


def test_what_c_plus_plus_held_before_is_not_waited_for():
    loan, x = Loan(), torch.ones(3, requires_grad=True)
    earlier = held_by_cpp(x)
    held = loan.lend(held_by_cpp, x)
    assert not loan.is_back()
    held.clear()
    assert loan.is_back()
    earlier.clear()
    assert loan.is_back()


def test_a_loan_keeps_nothing_alive():
    loan, x = Loan(), torch.ones(3, requires_grad=True)
    loan.lend(lambda tensor: None, x)
    del x
    assert [ref() for ref, _ in loan._tensors] == [None]
    assert loan.is_back()


@pytest.fixture
def only_these_loans(monkeypatch):
    monkeypatch.setattr(_gloo, "_loans", weakref.WeakSet())


def test_the_end_of_python_waits_for_what_is_lent(only_these_loans):
    loan, x = Loan(), torch.ones(3, requires_grad=True)
    held = loan.lend(held_by_cpp, x)
    timer = threading.Timer(0.05, held.clear)
    timer.start()
    begin = time.monotonic()
    _gloo._wait_for_threads()
    assert loan.is_back()
    assert time.monotonic() - begin >= 0.04
    timer.join()


def test_the_end_of_python_does_not_wait_for_ever(only_these_loans, monkeypatch):
    monkeypatch.setattr(_gloo, "_EXIT_S", 0.05)
    loans = [Loan() for _ in range(10)]
    x = torch.ones(3, requires_grad=True)
    held = [loan.lend(held_by_cpp, x) for loan in loans]
    begin = time.monotonic()
    _gloo._wait_for_threads()
    assert 0.04 <= time.monotonic() - begin < 0.4  # all loans share one limit
    assert not loans[0].is_back()
    held.clear()
