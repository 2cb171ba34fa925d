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

# Of code that a series does not have, or has in other words.
_UNPACKING = (
    "unpack into memory without an edge",
    "pack the wrong dtype",
    "leave it to a fallback",
)
_GROUPS = (
    "take every group at once",
    "decide for gathers alone",
    "identify groups in spite of the filter",
    "reduce groups that were not chosen",
    "read names from nodes",
)
NOT_IN = {
    "2.14": _UNPACKING,
    "2.13": _UNPACKING,
    "2.12": (*_UNPACKING, *_GROUPS),
    "2.11": (*_UNPACKING, *_GROUPS, "sort what is not packed"),
}

# name: (file, text, what it becomes, tests to run: those for the mutated part)
MUTANTS: dict[str, tuple[str, str, str, str]] = {
    "take the graph for sorted": (
        BUCKETING,
        "    if any(inp > node for node in g.nodes for inp in node._input_nodes):",
        "    if False:",
        "TestMergeAfterMerge",
    ),
    "unpack into memory without an edge": (
        BUCKETING,
        "    outputs = torch.ops.bucketing._split_all_gather(",
        "    outputs = _split_all_gather(",
        "TestUnpacking",
    ),
    "pack the wrong dtype": (
        BUCKETING,
        "            dtype=_ALL_DTYPES[d],\n",
        "            dtype=bucket_dtype,\n",
        "TestUnpacking",
    ),
    "leave it to a fallback": (
        BUCKETING,
        "@register_lowering(torch.ops.bucketing._split_all_gather, type_promotion_kind=None)",
        "",
        "TestUnpacking",
    ),
    "swap two members": (
        BUCKETING,
        "    return sorted(nodes, key=lambda n: (values[n] is None, values[n]))",
        "    nodes = sorted(nodes, key=lambda n: (values[n] is None, values[n]))\n"
        "    return [*nodes[1::-1], *nodes[2:]]",
        "TestPayloadOrder",
    ),
    "pack members without a value first": (
        BUCKETING,
        "(values[n] is None, values[n])",
        "(values[n] is not None, values[n])",
        "TestPayloadOrder",
    ),
    "sort gathers no more": (
        BUCKETING,
        "    ag_nodes = _in_payload_order(ag_nodes)\n",
        "",
        "TestPayloadOrder",
    ),
    "sort what is not packed": (
        BUCKETING,
        '    if mode != "coalesced":  # which packs nothing\n',
        "    if True:\n",
        "TestPayloadOrder",
    ),
    "insert where the payload ends": (
        BUCKETING,
        "    insert_before = insert_before or ar_nodes[-1].next\n"
        "    ar_nodes = _in_payload_order(ar_nodes)\n",
        "    ar_nodes = _in_payload_order(ar_nodes)\n"
        "    insert_before = insert_before or ar_nodes[-1].next\n",
        "TestPayloadOrder",
    ),
    "forget a merged bucket's value": (
        BUCKETING,
        "            if order_key in bucket_nodes[0].meta:",
        "            if False:",
        "TestPayloadOrder",
    ),
    "take every group at once": (
        FSDP,
        "    elif len(group_filter) == 1:",
        "    elif group_filter:",
        "TestFsdpGroupFilter",
    ),
    "decide for gathers alone": (
        FSDP,
        "    if not wait.users or not _is_in_group_filter(wait.args[0]):",
        "    if not wait.users:",
        "TestFsdpGroupFilter",
    ),
    "identify groups in spite of the filter": (
        FSDP,
        "    if group_filter is None:\n",
        "    if True:\n",
        "TestFsdpGroupFilter",
    ),
    "reduce groups that were not chosen": (
        FSDP,
        "            return _is_in_group_filter(ar_node)",
        "            return True",
        "TestFsdpGroupFilter",
    ),
    "read names from nodes": (
        FSDP,
        "_resolve_group_name(_get_group_name(start)) in groups",
        "_get_group_name(start) in groups",
        "TestFsdpGroupFilter",
    ),
    "merge neighbours alone": (
        BUCKETING,
        "                if non_adjacent:\n                    nodes_by_key",
        "                if False:\n                    nodes_by_key",
        "TestNonAdjacent",
    ),
    "forget a full bucket": (
        BUCKETING,
        "                    if non_adjacent:\n"
        "                        reachability.merge_starts(cur_bucket)\n",
        "",
        "TestNonAdjacent",
    ),
    "forget the last bucket of a key": (
        BUCKETING,
        "            if non_adjacent:\n"
        "                reachability.merge_starts(cur_bucket)\n    return",
        "    return",
        "TestNonAdjacent",
    ),
    "ask in one direction": (
        BUCKETING,
        "                    & (cur_bucket_bits | 1 << idx)",
        "                    & cur_bucket_bits",
        "TestNonAdjacent",
    ),
    "merge what depends on the bucket": (
        BUCKETING,
        "            if (is_full or is_dependent) and cur_bucket:",
        "            if is_full and cur_bucket:",
        "TestNonAdjacent",
    ),
    "remember the bucket before": (
        BUCKETING,
        "                cur_bucket_descendents = OrderedSet()\n"
        "                cur_bucket_bits = cur_bucket_ancestors = 0\n",
        "                cur_bucket_descendents = OrderedSet()\n",
        "TestNonAdjacent",
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
