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
    "see no path from the candidate": (
        BUCKETING,
        " or reached[node] & cur_bits:",
        ":",
        "TestMergeAfterMerge",
    ),
    "keep the paths of a full bucket": (
        BUCKETING,
        "                cur_bits = cur_reached = 0\n",
        "",
        "TestMergeAfterMerge",
    ),
    "let a path end in a bucket": (
        BUCKETING,
        "                    reached[other] |= cur_reached\n",
        "                    pass\n",
        "TestMergeAfterMerge",
    ),
    "expect a sorted graph": (
        BUCKETING,
        "            stack += [node, *node.users]\n",
        "            reached[node] = bits.get(node, 0)\n",
        "TestMergeAfterMerge",
    ),
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
    "swap two members": (
        BUCKETING,
        "    return list(nodes) if key is None else sorted(nodes, key=position)",
        "    nodes = list(nodes) if key is None else sorted(nodes, key=position)\n"
        "    return [*nodes[1::-1], *nodes[2:]]",
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
        "() if is_all_gather_into_tensor(node) else node.meta.get(key, ())",
        "node.meta.get(key, ())",
        "TestPayloadOrder",
    ),
    "take any value": (
        BUCKETING,
        "        if not all(type(i) is int for i in ints):",
        "        if False:",
        "TestPayloadOrder",
    ),
    "check values bucket by bucket": (
        BUCKETING,
        "    in_payload_order(g.nodes)  # raises before anything is merged\n",
        "",
        "TestPayloadOrder",
    ),
    "order nothing that overlaps": (
        OVERLAP,
        "bucket = in_payload_order(bucket_info.collectives)",
        "bucket = bucket_info.collectives",
        "TestPayloadOrder",
    ),
    "forget a merged bucket's value": (
        BUCKETING,
        "                *([(order_key, ())] if order_key else []),\n",
        "",
        "TestPayloadOrder",
    ),
    "forget the value of what deduplication merges": (
        FSDP,
        "            node.meta.update((key, n.meta[key]) for n in match.nodes if key in n.meta)",
        "            pass",
        "TestPayloadOrder",
    ),
    "bucket every group at once": (
        FSDP,
        "    elif dist_opts.fsdp_group_filter is not None:",
        "    elif False:",
        "TestFsdpGroupFilter",
    ),
    "restrict no gathers": (
        FSDP,
        "_in_groups(fsdp_groups, is_fsdp_all_gather_wait)",
        "is_fsdp_all_gather_wait",
        "TestFsdpGroupFilter",
    ),
    "identify groups in spite of the filter": (
        FSDP,
        "    if (groups := _groups_in_filter()) is not None:",
        "    if False:",
        "TestFsdpGroupFilter",
    ),
    "reduce groups that were not chosen": (
        FSDP,
        "_in_groups(fsdp_groups, lambda wait: True)",
        "lambda wait: True",
        "TestFsdpGroupFilter",
    ),
    "read names from nodes": (
        FSDP,
        '    return _resolve_group_name(_get_collective_kwargs(n)["group_name"])',
        '    return _get_collective_kwargs(n)["group_name"]',
        "TestFsdpGroupFilter",
    ),
    "check one name after the other": (
        FSDP,
        "    if unknown := OrderedSet(descs) - OrderedSet(desc for desc, _ in groups):",
        "    if unknown := []:",
        "TestFsdpGroupFilter",
    ),
    "merge neighbours alone": (
        BUCKETING,
        "    nodes_groups += nodes_by_key.values() if max_between != 0 else ()\n",
        "",
        "TestMaxCollectivesBetween",
    ),
    "merge without a bound": (
        BUCKETING,
        "(is_full or ahead[node] - ahead[cur_bucket[0]] > limit)",
        "is_full",
        "TestMaxCollectivesBetween",
    ),
    "count from the last member": (
        BUCKETING,
        "ahead[node] - ahead[cur_bucket[0]] > limit",
        "ahead[node] - ahead[cur_bucket[-1]] > limit",
        "TestMaxCollectivesBetween",
    ),
    "count collectives of its own key": (
        BUCKETING,
        "len(ahead) - len(nodes_by_key[group_key])",
        "len(ahead)",
        "TestMaxCollectivesBetween",
    ),
    "merge beyond the cap": (
        BUCKETING,
        "            size_bytes = sum(map(_collective_size_bytes, unit))\n",
        "            size_bytes = _collective_size_bytes(node)\n",
        "TestMaxCollectivesBetween",
    ),
    "take buckets apart": (
        BUCKETING,
        "            unit = bucket_of[node]\n",
        "            unit = [node]\n",
        "TestMaxCollectivesBetween",
    ),
    "return what was merged again": (
        BUCKETING,
        " for b in buckets if bucket_of[b[0]] is b]",
        " for b in buckets]",
        "TestMaxCollectivesBetween",
    ),
    "merge what depends on the bucket": (
        BUCKETING,
        "if cur_reached & bits[node] or ",
        "if ",
        "TestMaxCollectivesBetween",
    ),
    "forget the members of a bucket": (
        BUCKETING,
        "            bits[cur_bucket[0]] = cur_bits = cur_bits | bits[node]\n",
        "            cur_bits |= bits[node]\n",
        "TestMaxCollectivesBetween",
    ),
    "run no check of the ranks": (
        POST_GRAD,
        "        or config.aten_distributed_optimizations.bucket_max_collectives_between != 0\n",
        "",
        "TestMaxCollectivesBetween",
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
