"""Break the installed torch's series on purpose, one fault at a time; print which test notices.

    python torch_patches/mutants.py [NAME ...]

Each mutant is one replacement in torch's sources with the series applied, run in a torch of
symbolic links; the installed torch is not written to. The exit status is 1 where a mutant survives,
or where its text is no longer found.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TEST = "test/distributed/test_bucketing_hooks.py"
BUCKETING = "torch/_inductor/fx_passes/bucketing.py"
FSDP = "torch/_inductor/fx_passes/fsdp.py"
CODECACHE = "torch/_inductor/codecache.py"
OVERLAP = "torch/_inductor/fx_passes/overlap_scheduling.py"

# Of code that a series does not have, or has in other words.
_ONLY_2_15 = ("look below pads across a write", "unpack into memory without an edge")
NOT_IN = {
    "2.14": _ONLY_2_15,
    "2.13": _ONLY_2_15,
    "2.11": (
        *_ONLY_2_15,
        "give every group the first group's cap",
        "leave users ahead of the bucket",
        "ask keys late",
        "ask about what no bucket can hold",
        "decide the groups again",
        "ask about tensor parallelism in pre-bucketing",
        "take a group's name for groups",
        "sort what is not packed",
        "cache any callable",
    ),
}

# name: (file, text, what it becomes, tests to run: those for the mutated part)
MUTANTS: dict[str, tuple[str, str, str, str]] = {
    "swap two keys": (
        BUCKETING,
        "sorted(range(len(nodes)), key=keys.__getitem__)]",
        "sorted(range(len(nodes)), key=keys.__getitem__)]\n    order[:2] = order[1::-1]",
        "test_kinds_and_modes",
    ),
    "give every group the first group's cap": (
        FSDP,
        "compute_pre_bucket_cap_mb(_group_size(group), bucket_cap_mb)",
        "compute_pre_bucket_cap_mb(_group_size(next(iter(fsdp_groups))), bucket_cap_mb)",
        "test_cap_of_each_group",
    ),
    "drop the write barrier": (
        BUCKETING,
        "itertools.accumulate(map(_is_write, g.nodes))",
        "itertools.repeat(0)",
        "test_gathers_around_a_write",
    ),
    "look below casts across a write": (
        BUCKETING,
        'if inp.op == "call_function" and num_writes[inp] != region:',
        'if inp.op == "never":',
        "test_casts_before_a_write",
    ),
    "look below pads across a write": (
        BUCKETING,
        "        if _is_write(cursor):",
        "        if False:",
        "test_pads_before_a_write",
    ),
    "count pads": (
        BUCKETING,
        "        if is_own and not get_collective_type(node):",
        "        if is_own and node.op != 'call_function':",
        "test_ranks_of_an_uneven",
    ),
    "leave users ahead of the bucket": (
        BUCKETING,
        "g_fn_inps + early_users",
        "g_fn_inps",
        "test_ranks_of_an_uneven",
    ),
    "ask keys late": (
        OVERLAP,
        "        ask_payload_keys_early(gm.graph.nodes, bucket_mode)",
        "        pass",
        "test_errors_leave",
    ),
    "ask keys twice": (
        BUCKETING,
        "if node.meta.get(_PAYLOAD_KEY, (None,))[0] is not key_fn:",
        "if True:",
        "test_every_road",
    ),
    "keep keys in a global": (
        BUCKETING,
        "node.meta[_PAYLOAD_KEY] = (key_fn, key_fn(node))",
        "ask_payload_keys.__dict__[node] = node.meta[_PAYLOAD_KEY] = (key_fn, key_fn(node))",
        "test_keys_do_not_outlive",
    ),
    "leave keys on a graph whose keys failed": (
        BUCKETING,
        "            n.meta.pop(_PAYLOAD_KEY, None)\n",
        "            pass\n",
        "test_errors_leave",
    ),
    "ask about what no bucket can hold": (
        BUCKETING,
        "if not all(m is n or has_dep(m, n) for m in nodes)",
        "if True",
        "test_every_road",
    ),
    "forget a merged bucket's place": (
        BUCKETING,
        "first = min(asked, key=lambda key: key[1] is not None)",
        "first = asked[-1]",
        "test_merged_again",
    ),
    "sort what is not packed": (
        BUCKETING,
        "if is_packed and not any(",
        "if not any(",
        "test_coalesced",
    ),
    "pack what can't be viewed": (
        BUCKETING,
        "if is_packed and not any(map(operator.mod, ends, widths[1:])):",
        "if is_packed:",
        "test_an_order_that",
    ),
    "decide the groups again": (
        FSDP,
        'if group_filter is None or "fsdp_groups" in gm.meta:',
        "if group_filter is None:",
        "test_decides_for",
    ),
    "forget the buckets planned before": (
        BUCKETING,
        "                    reachability.merge_starts(cur_bucket)\n",
        "",
        "test_full_buckets",
    ),
    "forget the last bucket of a key": (
        BUCKETING,
        "            buckets.append(cur_bucket)\n"
        "            reachability.merge_starts(cur_bucket)\n    for",
        "            buckets.append(cur_bucket)\n    for",
        "test_buckets_that_would",
    ),
    "take the graph for sorted": (
        BUCKETING,
        "        graph_nodes = topo_sort(graph_nodes)",
        "        pass",
        "test_dependent_scatters",
    ),
    "sort half of a bucket": (
        BUCKETING,
        "    if None in keys:\n        return nodes\n",
        "    if keys[0] is None:\n        return nodes\n    keys = [key or 0 for key in keys]\n",
        "test_ties_and_unknown",
    ),
    "ask about tensor parallelism in pre-bucketing": (
        FSDP,
        'in fsdp_groups or not (chosen or kind == "all_reduce"))',
        "in fsdp_groups or not chosen)",
        "test_every_road",
    ),
    "take a group's name for groups": (
        FSDP,
        " or isinstance(chosen, str):",
        ":",
        "FsdpGroupFilterTest.test_errors_leave",
    ),
    "ask in one direction": (
        BUCKETING,
        "bool(ancestors & (cur_bucket_bits | 1 << idx))",
        "bool(ancestors & cur_bucket_bits)",
        "test_dependent_scatters",
    ),
    "unpack into memory without an edge": (
        BUCKETING,
        "    outputs = torch.ops.bucketing._split_all_gather(\n"
        "        new_ag_out_reshaped, static_split_sizes\n    )\n",
        "    outputs = _split_all_gather._init_fn(new_ag_out_reshaped, static_split_sizes)\n",
        "test_users_wait",
    ),
    "leave the rank out of the key": (
        CODECACHE,
        "self.ranks = sorted(",
        "ranks = sorted(",
        "test_ranks_share",
    ),
    "cache any callable": (
        CODECACHE,
        "if p is not None and not (isinstance(p, CustomPassBase) and p.uuid()):",
        "if False:",
        "test_hooks_are_keyed",
    ),
}


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)


def link(site: Path, folder: Path, paths: list[str]) -> None:
    """A torch of links beside the files of ``paths``, which are in ``folder`` already."""
    own = {str(parent) for path in paths for parent in Path(path).parents}
    for directory in sorted(d for d in own if d.startswith("torch")):
        for entry in (site / directory).iterdir():
            target = folder / directory / entry.name
            if entry.name != "__pycache__" and not target.exists():
                target.symlink_to(entry)


def main() -> int:
    import torch

    site = Path(torch.__file__).resolve().parent.parent
    series = HERE / ".".join(torch.__version__.split(".")[:2])
    if len(list(series.glob("*.patch"))) != 5:
        raise SystemExit(f"there are no mutants for torch {torch.__version__}")
    there = [m for m in MUTANTS if m not in NOT_IN.get(series.name, ())]
    names = sys.argv[1:] or there
    if unknown := [name for name in names if name not in there]:
        raise SystemExit(f"no mutants: {unknown}; there are {there}")
    patches = sorted(series.glob("*.patch"))
    text = "".join(p.read_text(encoding="utf-8") for p in patches)
    paths = sorted(set(re.findall(r"^\+\+\+ b/(torch/.+)$", text, re.MULTILINE)))
    survived = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for path in paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(site / path, folder / path)
        git(folder, "init", "--quiet")
        git(folder, "apply", *map(str, patches))
        link(site, folder, paths)
        environment = {k: v for k, v in os.environ.items() if k != "CI"}
        environment |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        for name in names:
            path, old, new, tests = MUTANTS[name]
            original = (folder / path).read_text(encoding="utf-8")
            if original.count(old) != 1:
                print(f"{name}: its text is {original.count(old)} times in {path}", flush=True)
                survived.append(name)
                continue
            (folder / path).write_text(original.replace(old, new), encoding="utf-8")
            run = subprocess.run(
                [sys.executable, str(folder / TEST), "-k", tests],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=900,
            )
            (folder / path).write_text(original, encoding="utf-8")
            killed = dict.fromkeys(re.findall(r"^(?:FAIL|ERROR): (\w+)", run.stderr, re.MULTILINE))
            print(f"{name}: {', '.join(killed) or 'SURVIVES'}", flush=True)
            if not killed:
                survived.append(name)
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
