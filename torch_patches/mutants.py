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
TEST = "test/distributed/test_fx_bucketing.py"
BUCKETING = "torch/_inductor/fx_passes/bucketing.py"
FSDP = "torch/_inductor/fx_passes/fsdp.py"
LOWERING = "torch/_inductor/comm_lowering.py"
OVERLAP = "torch/_inductor/fx_passes/overlap_preserving_bucketer.py"
POST_GRAD = "torch/_inductor/fx_passes/post_grad.py"

# Code that 2.13 does not have.
NOT_IN = {
    "2.13": (
        "unpack into memory without an edge",
        "unpack the wrong dtype",
        "leave it to a fallback",
    )
}

# name: (file, text, what it becomes, tests to run: those for the mutated part)
MUTANTS: dict[str, tuple[str, str, str, str]] = {
    "unpack into memory without an edge": (
        BUCKETING,
        "    outputs = torch.ops.bucketing._split_all_gather(",
        "    outputs = _split_all_gather(",
        "TestUnpacking",
    ),
    "unpack the wrong dtype": (
        BUCKETING,
        "output.flatten().view(out_dtype).reshape(",
        "output.flatten().reshape(",
        "TestUnpacking",
    ),
    "leave it to a fallback": (
        LOWERING,
        "    @register_lowering(torch.ops.bucketing._split_all_gather, type_promotion_kind=None)\n",
        "",
        "TestUnpacking",
    ),
    "see no path from the candidate": (
        BUCKETING,
        " or cur_bucket_ancestors >> idx & 1:",
        ":",
        "TestMergeAfterMerge",
    ),
    "see no path from the bucket": (
        BUCKETING,
        "if ancestors & cur_bucket_bits or ",
        "if ",
        "test_dependent_members",
    ),
    "keep the paths of a full bucket": (
        BUCKETING,
        "                cur_bucket_bits = cur_bucket_ancestors = 0\n",
        "",
        "TestMergeAfterMerge",
    ),
    "let a path end in a bucket": (
        BUCKETING,
        "            reachability.merge_starts(cur_bucket)\n        if",
        "        if",
        "TestMergeAfterMerge",
    ),
    "expect a sorted graph": (
        BUCKETING,
        "_BucketPlanReachability(topo_sort(list(g.nodes)), starts)",
        "_BucketPlanReachability(list(g.nodes), starts)",
        "TestMergeAfterMerge",
    ),
    "read names from nodes": (
        FSDP,
        '    return _resolve_group_name(_get_collective_kwargs(n)["group_name"])',
        '    return _get_collective_kwargs(n)["group_name"]',
        "TestGroupNames",
    ),
    "swap two members": (
        BUCKETING,
        "    return sorted(bucket, key=position)",
        "    nodes = sorted(bucket, key=position)\n    return [*nodes[1::-1], *nodes[2:]]",
        "TestPayloadOrder",
    ),
    "pack members without a value first": (
        BUCKETING,
        "        return not ints, ints",
        "        return bool(ints), ints",
        "TestPayloadOrder",
    ),
    "order gathers": (
        BUCKETING,
        "    if key is None or is_all_gather_into_tensor(bucket[0]):",
        "    if key is None:",
        "TestPayloadOrder",
    ),
    "take any value": (
        BUCKETING,
        "        if not all(type(i) is int for i in ints):",
        "        if False:",
        "TestPayloadOrder",
    ),
    "place a bucket by its payload": (
        BUCKETING,
        "            next_node = rs_nodes[-1].next\n",
        "            next_node = in_payload_order(rs_nodes)[-1].next\n",
        "TestPayloadOrder",
    ),
    "order nothing that overlaps": (
        OVERLAP,
        "bucket = in_payload_order(bucket_info.collectives)",
        "bucket = bucket_info.collectives",
        "TestPayloadOrder",
    ),
    "order no all-reduces of FSDP": (
        FSDP,
        "in_payload_order(bucket), None, next_node",
        "bucket, None, next_node",
        "TestPayloadOrder",
    ),
    "forget a merged bucket's value": (
        BUCKETING,
        "                n.meta[order_key] = bucket_nodes[0].meta[order_key]\n",
        "                pass\n",
        "TestPayloadOrder",
    ),
    "forget the value of what deduplication merges": (
        FSDP,
        "            node.meta.update((key, n.meta[key]) for n in match.nodes if key in n.meta)",
        "            pass",
        "TestPayloadOrder",
    ),
    "take the cap of the first group": (
        BUCKETING,
        "cap.get(group_name, 0)",
        "next(iter(cap.values()))",
        "TestFsdpGroupFilter",
    ),
    "restrict no gathers": (
        FSDP,
        "_in_groups(gm, is_fsdp_all_gather_wait)",
        "is_fsdp_all_gather_wait",
        "TestFsdpGroupFilter",
    ),
    "identify groups in spite of the filter": (
        FSDP,
        "    if (groups := _groups_in_filter(gm)) is not None:",
        "    if False:",
        "TestFsdpGroupFilter",
    ),
    "take any name": (
        FSDP,
        '        raise ValueError(f"fsdp_group_filter',
        '        print(f"fsdp_group_filter',
        "TestFsdpGroupFilter",
    ),
    "refuse groups of other ranks": (
        FSDP,
        'if w not in known and not w.startswith("mesh_")]',
        "if w not in known]",
        "TestFsdpGroupFilter",
    ),
    "know no dimension of all ranks": (
        FSDP,
        '        wanted = [*wanted, "default_pg", "mesh_default"]\n',
        "        pass\n",
        "TestFsdpGroupFilter",
    ),
    "choose the default group always": (
        FSDP,
        '    if any(w.startswith("mesh_") and w not in descs.values() for w in wanted):',
        "    if True:",
        "TestFsdpGroupFilter",
    ),
    "count no scatters": (
        FSDP,
        "        n for n in rss if all(map(is_fsdp_reduce_scatter_wait, n.users))\n",
        "        n for n in rss if False\n",
        "TestFsdpGroupFilter",
    ),
    "merge without a bound": (
        BUCKETING,
        "(is_full or is_far and is_far(cur_bucket[0], node))",
        "is_full",
        "test_bound",
    ),
    "count from the last member": (
        BUCKETING,
        "is_far(cur_bucket[0], node)",
        "is_far(cur_bucket[-1], node)",
        "test_bound",
    ),
    "count collectives of its own key": (
        BUCKETING,
        "len(passed) - len(same_key)",
        "len(passed)",
        "test_bound",
    ),
    "drop dependent members": (
        BUCKETING,
        "            nodes_groups.append(dependent)",
        "            pass",
        "test_dependent_members",
    ),
    "leave more than adjacent": (
        BUCKETING,
        "    return max(adjacent, across, key",
        "    return max(across, across, key",
        "test_never_less",
    ),
    "keep other kinds apart": (
        BUCKETING,
        "        [bucket for bucket in planned if not filter_node(bucket[0])],\n",
        "        [],\n",
        "test_adjacent_buckets",
    ),
    "run no check of the ranks": (
        POST_GRAD,
        "        or config.aten_distributed_optimizations.bucket_max_collectives_between != 0\n",
        "",
        "test_spmd_check",
    ),
}


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)


def link(site: Path, folder: Path, paths: list[str]) -> None:
    """Link the rest of torch beside the files of ``paths``, which are in ``folder``."""
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
    if not series.is_dir():
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
