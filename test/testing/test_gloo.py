"""Workarounds for faults of torch that kill ranks on gloo; test_ring has the groups."""

import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from torch_ext_bucketing.testing import ring as _gloo
from torch_ext_bucketing.testing.ring import InFlight, make_gloo


def held_by_cpp(x):
    """Save ``x`` in an autograd node, as gloo's thread holds a tensor that it sends."""
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


@pytest.mark.torch
@pytest.mark.parametrize(
    ("call", "args", "kwargs"),
    [
        (held_by_cpp, lambda x: [x], {}),
        (lambda lists, *, root: held_by_cpp(lists[0][0]), lambda x: [[[x]]], {"root": 1}),
        (lambda *, tensors: held_by_cpp(tensors[0]), lambda x: [], {"tensors": None}),
    ],
    ids=["alone", "in lists", "by keyword"],
)
def test_an_operation_is_done_when_cpp_lets_go(call, args, kwargs):
    """References from before the operation do not count."""
    flight, x = InFlight(), torch.ones(3, requires_grad=True)
    assert flight.is_done()
    earlier = held_by_cpp(x)
    held = flight.run(call, *args(x), **{k: v or (x,) for k, v in kwargs.items()})
    assert not flight.is_done()
    held.clear()
    assert flight.is_done()
    earlier.clear()
    assert flight.is_done()


@pytest.mark.torch
def test_an_operation_keeps_nothing_alive():
    flight, x = InFlight(), torch.ones(3, requires_grad=True)
    flight.run(lambda tensor: None, x)
    del x
    assert [ref() for ref, _ in flight._tensors] == [None]
    assert flight.is_done()


@pytest.fixture
def only_these(monkeypatch):
    monkeypatch.setattr(_gloo, "_all_in_flight", weakref.WeakSet())


@pytest.mark.torch
def test_the_end_of_python_waits_for_what_is_in_flight(only_these):
    flight, x = InFlight(), torch.ones(3, requires_grad=True)
    held = flight.run(held_by_cpp, x)
    timer = threading.Timer(0.05, held.clear)
    begin = time.monotonic()
    timer.start()
    _gloo._wait_for_threads()
    assert flight.is_done()
    assert time.monotonic() - begin >= 0.04
    timer.join()


def test_the_end_of_python_does_not_wait_for_ever(only_these, monkeypatch):
    monkeypatch.setattr(_gloo, "_EXIT_S", 0.5)
    flights = [InFlight() for _ in range(10)]
    x = torch.ones(3, requires_grad=True)
    held = [flight.run(held_by_cpp, x) for flight in flights]
    begin = time.monotonic()
    _gloo._wait_for_threads()
    assert 0.4 <= time.monotonic() - begin < 2.5  # all ten share one limit, of 0.5 s
    assert not flights[0].is_done()
    held.clear()
