"""Inductor's caches hit and miss by the hooks' entries, which are plain data."""

import re
import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cache_runs import HIT, MISS, Checkout, assert_state
from collective_graphs import (
    GROUP_FILTER,
    MAX_BETWEEN,
    PAYLOAD_ORDER,
    all_gather,
    fake_group,
    reduce_scatter,
    trace,
)
from patching_trees import MINOR, ROOT, needs_unpatched_torch
from torch._inductor import config
from torch._inductor.codecache import compiled_fx_graph_hash
from torch.distributed.device_mesh import init_device_mesh

CACHED = ("config", "config, values only")
OTHERS = ("config, other order", "config, model turned", "config, filter")

Results = dict[str, dict[str, Any]]

# That the entries count in the hash of the config is shown by test_hooks_imports.
pytestmark = [pytest.mark.torch, pytest.mark.hooks, pytest.mark.long, pytest.mark.slow]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    made = Checkout(tmp_path_factory.mktemp("caches"))
    shutil.copytree(ROOT / "torch_patches", made.folder / "torch_patches")

    return made


@pytest.fixture(scope="module")
def cold(checkout: Checkout) -> Results:
    """Run the first process, the reference for all later ones."""
    return checkout.run(*CACHED)


@pytest.fixture(scope="module")
def warm(checkout: Checkout, cold: Results) -> Results:
    """Run a second process: the same settings again, then others."""
    return checkout.run(*CACHED, *OTHERS)


def test_the_same_settings_hit_in_a_new_process_and_others_miss(warm, cold):
    for name in CACHED:
        assert_state(cold[name], MISS)
        assert_state(warm[name], HIT)
        assert warm[name]["codes"] == cold[name]["codes"]
        assert not warm[name]["log"]
    for name in OTHERS:
        assert_state(warm[name], MISS)
    pairs = zip(cold["config"]["codes"], warm[OTHERS[0]]["codes"], strict=True)
    assert [was != code for was, code in pairs] == [True, True]
    # A model whose layers are turned round has the same graphs, under other names.
    assert warm["config, model turned"]["codes"] == warm["config, other order"]["codes"]


@needs_unpatched_torch
def test_an_edited_patch_series_misses(checkout, cold):
    patches = sorted((checkout.folder / "torch_patches" / MINOR).rglob("0*.patch"))
    original = {patch: patch.read_text() for patch in patches}
    added = re.compile(r"^diff --git a/torch/(?:(?!\ndiff ).)*?\n\+( +# \w[^\n]*)", re.M | re.S)
    comment = next(found[1] for text in original.values() if (found := added.search(text)))
    try:
        for patch, text in original.items():  # it is context in the later ones
            patch.write_text(text.replace(comment, f"{comment} (edited)"))
        now = checkout.run("config")["config"]
    finally:
        for patch, text in original.items():
            patch.write_text(text)
    assert_state(now, MISS)
    assert now["codes"] == cold["config"]["codes"]


def test_keys_are_alike_on_ranks_with_the_same_groups():
    """Group names differ between ranks; with a filter of groups they are in the key."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return reduce_scatter(all_gather(x, dist.group.WORLD), dist.group.WORLD)

    keys: dict[str, set[str]] = {"unset": set(), "set": set(), "filter": set()}
    for rank in range(4):
        with fake_group(4, rank):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            shards = mesh["shard"].get_group()
            gm = trace(step, torch.ones(4))
            entries = {PAYLOAD_ORDER: "fsdp_payload_order", MAX_BETWEEN: 8}
            settings: dict[str, dict[str, Any]] = {
                "unset": {},
                "set": entries,
                "filter": {GROUP_FILTER: [shards.group_desc]},
            }
            for name, setting in settings.items():
                with config.patch({**setting, "bucket_all_gathers_fx": "fsdp"}):
                    keys[name].add(compiled_fx_graph_hash(gm, [], {}, [])[0])
    assert len(keys["unset"]) == len(keys["set"]) == 1
    assert keys["unset"] != keys["set"]
    # A rank's own shard group has one of two names, and its replicas' one of two others.
    assert len(keys["filter"]) == 4
