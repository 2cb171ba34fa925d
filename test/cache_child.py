"""A process of test_caches.py: compiles small models and says what Inductor's caches did.

    python cache_child.py NAME [NAME ...]

Prints a line of JSON for each name: hits, misses and bypasses of both caches, digests of the code
that ran (forward, backward) and what was logged. The process is rank 0 of a fake group of two.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from sharded_models import shard_by_parametrization
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_ext_bucketing as teb

AB = teb.FSDPParamOrder.from_fqns([["a.weight", "b.weight"]])
BA = teb.FSDPParamOrder.from_fqns([["b.weight", "a.weight"]])


class Pair(nn.Module):
    """Two layers of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


class PassOfAScript(teb.BucketUnits):
    """Adds nothing, and is defined where no import finds it."""


def by_backend(make):
    return lambda: teb.backend("inductor", [make()])


def own_pass():
    """Of the module that the test edits."""
    import hooks

    return hooks.OwnPass(AB)


SETUPS = {
    "backend": by_backend(lambda: teb.BucketUnits(AB)),
    "backend, other order": by_backend(lambda: teb.BucketUnits(BA)),
    "backend, by cap": by_backend(lambda: teb.BucketByCap(1.0, payload_order=AB)),
    "backend, other cap": by_backend(lambda: teb.BucketByCap(1.5, payload_order=AB)),
    "backend, scheduled": by_backend(lambda: teb.BucketAndSchedule(teb.Overlap())),
    "backend, other depth": by_backend(lambda: teb.BucketAndSchedule(teb.Overlap(depth=2))),
    "backend, lambda": by_backend(lambda: teb.BucketUnits(AB, payload_order=lambda start: 0)),
    "backend, pass of a script": by_backend(lambda: PassOfAScript(AB)),
    "backend, own pass": by_backend(own_pass),
}


@contextlib.contextmanager
def codes_run():
    """Digests of the wrapper code that Inductor loads, made anew or from a cache."""
    from torch._inductor.codecache import PyCodeCache

    digests: list[str] = []
    load = PyCodeCache.load_by_key_path

    def spy(key, path, *args, **kwargs):
        with open(path, encoding="utf-8") as file:
            # Comments count the graphs of the process.
            text = "".join(line for line in file if not line.lstrip().startswith("#"))
        digests.append(hashlib.sha256(text.encode()).hexdigest()[:12])
        return load(key, path, *args, **kwargs)

    PyCodeCache.load_by_key_path = spy
    try:
        yield digests
    finally:
        PyCodeCache.load_by_key_path = load


class Log(logging.Handler):
    """Keeps the messages that say why a cache is bypassed."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "ypass" in record.getMessage():
            self.messages.append(f"{record.levelname} {record.name}: {record.getMessage()}")


def run(name: str, mesh) -> dict[str, object]:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    log = Log()
    names = ("torch._inductor.codecache", "torch._functorch._aot_autograd.autograd_cache")
    loggers = [logging.getLogger(n) for n in (*names, "torch_ext_bucketing")]
    for logger in loggers:
        logger.addHandler(log)
        if logger.level in (logging.NOTSET, logging.WARNING):
            logger.setLevel(logging.INFO)
    model, compiler = Pair(), SETUPS[name]()
    shard_by_parametrization(model, mesh)
    error = ""
    with codes_run() as codes:
        try:
            torch.compile(model, backend=compiler)(torch.ones(4, 8)).sum().backward()
        except torch._dynamo.exc.BackendCompilerFailed as failed:
            error = str(failed)
    for logger in loggers:
        logger.removeHandler(log)
    inductor, aot = counters["inductor"], counters["aot_autograd"]
    states = ("hit", "miss", "bypass")
    return {
        "name": name,
        "graphs": {s: inductor[f"fxgraph_cache_{s}"] for s in states},
        "aot": {s: aot[f"autograd_cache_{s}"] for s in states},
        "codes": codes,
        "log": log.messages,
        "error": error,
        "file": teb.__file__,
    }


def main(names: list[str]) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name in names:
        print(json.dumps(run(name, mesh)), flush=True)
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
