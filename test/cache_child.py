"""A process of test_caches.py: compiles small models and says what Inductor's caches did.

    python cache_child.py NAME [NAME ...]

Prints a line of JSON for each name: hits, misses and bypasses of both caches, digests of the code
that ran (forward, backward) and what was logged; of "uuids" those of some passes. The process is rank 0 of a fake group of two. Names of
config entries need the hooks, which are installed where one is asked for.
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
from sharded_models import shard_by_parametrization
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from warm_child import Pair, states

import torch_ext_bucketing as teb
from torch_ext_bucketing import _source

AB = teb.FSDPParamOrder.from_fqns([["a.weight", "b.weight"]])
BA = teb.FSDPParamOrder.from_fqns([["b.weight", "a.weight"]])
ENTRIES = "aten_distributed_optimizations."


class PassOfAScript(teb.BucketUnits):
    """Adds nothing, and is defined where no import finds it."""


def by_backend(make):
    return lambda model: (teb.backend("inductor", [make()]), {})


def by_config(order, own_pass=False, **entries):
    """torch's own bucketing, under config hooks alone; ``own_pass``: its order is from a pass of the
    module that the test edits."""

    def setup(model):
        settings = {
            "bucket_all_gathers_fx": "fsdp",
            "bucket_reduce_scatters_fx": "fsdp",
            ENTRIES + "bucket_non_adjacent": True,
            **{ENTRIES + name: value for name, value in entries.items()},
        }
        if order is not None or own_pass:
            write = (
                from_hooks("OwnOrder", model) if own_pass else teb.TagParameters(model, order=order)
            )
            settings["joint_custom_post_pass"] = write
            settings[ENTRIES + "bucket_payload_order_key"] = "fsdp_payload_order"
        return "inductor", settings

    return setup


def from_hooks(name, *args):
    """An object of the module that the test edits."""
    import hooks

    return getattr(hooks, name)(*args)


def edited(model):
    """As after an edit of the package."""
    _source._PACKAGE = "another digest"
    return SETUPS["backend"](model)


SETUPS = {
    "backend": by_backend(lambda: teb.BucketUnits(AB)),
    "backend, other order": by_backend(lambda: teb.BucketUnits(BA)),
    "backend, by cap": by_backend(lambda: teb.BucketByCap(1.0, payload_order=AB)),
    "backend, lambda": by_backend(lambda: teb.BucketUnits(AB, payload_order=lambda start: 0)),
    "backend, pass of a script": by_backend(lambda: PassOfAScript(AB)),
    "backend, own pass": by_backend(lambda: from_hooks("OwnPass", AB)),
    "backend, edited": edited,
    "config": by_config(AB),
    "config, other order": by_config(BA),
    "config, model turned": by_config(AB),
    "config, filter": by_config(AB, fsdp_group_filter=["0"]),
    "config, values only": by_config(None),
    "config, own pass": by_config(None, own_pass=True),
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
    from torch._inductor import config

    torch._dynamo.reset()
    counters.clear()
    log = Log()
    names = ("torch._inductor.codecache", "torch._functorch._aot_autograd.autograd_cache")
    loggers = [logging.getLogger(n) for n in (*names, "torch_ext_bucketing")]
    for logger in loggers:
        logger.addHandler(log)
        if logger.level in (logging.NOTSET, logging.WARNING):
            logger.setLevel(logging.INFO)
    model = Pair(turned="turned" in name)
    compiler, settings = SETUPS[name](model)
    shard_by_parametrization(model, mesh)
    # The code that calls kernels shows whatever a pass changes; none need be compiled.
    with config.patch({"fallback_by_default": True, **settings}), codes_run() as codes:
        torch.compile(model, backend=compiler)(torch.ones(4, 8)).sum().backward()
    for logger in loggers:
        logger.removeHandler(log)
    return {
        "name": name,
        **states(),
        "codes": codes,
        "log": log.messages,
        "file": teb.__file__,
    }


def uuids(name: str) -> dict[str, object]:
    """Before anything imports the passes that are switched off here."""
    off = ["combine_uses", "separate_groups"]
    assert not [m for m in off if f"torch_ext_bucketing.rewrites.{m}" in sys.modules]
    os.environ["TORCH_EXT_BUCKETING_DISABLE"] = "CombineUses, SeparateGroups"
    disabled = teb.backend("aot_eager").passes.disabled
    from torch_ext_bucketing.passes.pipeline import Pipeline

    order = teb.FSDPParamOrder.from_fqns([["a.w", "b.w"], ["c.w"]])
    passes = [
        teb.ReshardAfterForward(["a"]),
        teb.TagParameters(),
        teb.ReshardAfterForward(),
        teb.BucketUnits(order),
        teb.BucketUnits(order, payload_order=None),
        teb.BucketUnits(order, kinds=("all_gather",)),
        teb.BucketUnits([["a"]]),
    ]
    found = [*(p.uuid() for p in passes), Pipeline(passes[1:]).uuid()]
    del os.environ["TORCH_EXT_BUCKETING_DISABLE"]
    return {"name": name, "disabled": disabled, "uuids": found}


def main(names: list[str]) -> None:
    if any(name.startswith("config") for name in names):
        teb.hooks.install()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name in names:
        result = uuids(name) if name == "uuids" else run(name, mesh)
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
