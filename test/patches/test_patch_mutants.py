"""The newest series' tests notice each of these faults in it."""

import re
from pathlib import Path

import pytest
from patching_trees import (
    SERIES,
    LinkedTorch,
    make_repository,
    needs_unpatched_torch,
    series_folder,
)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.hooks,
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.skipif(series_folder() != SERIES[-1], reason="for the series to submit"),
    needs_unpatched_torch,
]

TEST = "test/distributed/test_fx_bucketing.py"
FILES = {
    "bucketing": "torch/_inductor/fx_passes/bucketing.py",
    "config": "torch/_inductor/config.py",
    "fsdp": "torch/_inductor/fx_passes/fsdp.py",
    "lowering": "torch/_inductor/comm_lowering.py",
    "overlap": "torch/_inductor/fx_passes/overlap_preserving_bucketer.py",
    "post_grad": "torch/_inductor/fx_passes/post_grad.py",
}

# A fault's name, its file, the tests for the part, what the text is, and what it becomes.
MUTANTS = """
unpack without an edge: bucketing TestUnpacking
    outputs = torch.split_with_sizes_copy(new_ag_out_reshaped, ins_split_sizes, dim=1)
    outputs = [x.new_empty(x.shape) for x in new_ag_out_reshaped.split(ins_split_sizes, 1)]; torch.split_with_sizes_copy(new_ag_out_reshaped, ins_split_sizes, dim=1, out=outputs)
unpack the wrong dtype: bucketing TestUnpacking
        output.flatten().view(out_dtype).reshape((shape[0]
        output.flatten().reshape((shape[0]
leave it to a fallback: lowering TestUnpacking
    @register_lowering(torch.ops.aten.split_with_sizes_copy, type_promotion_kind=None)
    @(lambda lowering: lowering)
see no path from the candidate: bucketing TestMergeAfterMerge
            if ancestors & cur_bucket_bits or cur_bucket_ancestors >> idx & 1:
            if ancestors & cur_bucket_bits:
see no path from the bucket: bucketing test_dependent_members
            if ancestors & cur_bucket_bits or cur_bucket_ancestors >> idx & 1:
            if cur_bucket_ancestors >> idx & 1:
keep the paths of a full bucket: bucketing TestMergeAfterMerge
                cur_bucket_bits = cur_bucket_ancestors = 0
                pass
let a path end in a bucket: bucketing TestMergeAfterMerge
            reachability.merge_starts(cur_bucket)
            pass
expect a sorted graph: bucketing TestMergeAfterMerge
        reachability = _BucketPlanReachability(topo_sort(list(g.nodes)), starts)
        reachability = _BucketPlanReachability(list(g.nodes), starts)
read names from nodes: fsdp TestGroupNames
    return _resolve_group_name(_get_collective_kwargs(n)["group_name"])
    return _get_collective_kwargs(n)["group_name"]
turn the order round: bucketing TestPayloadOrder
    return sorted(bucket, key=lambda n: (not ints[n], ints[n]))
    return sorted(bucket, key=lambda n: (not ints[n], ints[n]), reverse=True)
pack members without a value first: bucketing TestPayloadOrder
    return sorted(bucket, key=lambda n: (not ints[n], ints[n]))
    return sorted(bucket, key=lambda n: ints[n])
take any value: bucketing TestPayloadOrder
    if bad := [n for n in bucket if not all(type(i) is int for i in ints[n])]:
    if bad := []:
place a bucket by its payload: bucketing TestPayloadOrder
        insert_before = bucket_nodes[bucket_waits.index(max(bucket_waits))].next
        insert_before = bucket_nodes[-1].next
order nothing that is planned: bucketing TestPayloadOrder
    return list(map(in_payload_order, buckets))
    return buckets
order nothing that overlaps: overlap TestPayloadOrder
        bucket = in_payload_order(bucket_info.collectives)
        bucket = bucket_info.collectives
merge before values are looked at: fsdp TestPayloadOrder
    in_payload_order([*_find_reduce_scatters(gm.graph), *_find_all_reduces(gm.graph)])
    pass
forget a merged bucket's value: bucketing TestPayloadOrder
                *([(order_key, ())] if order_key else []),
                # nothing
forget the value of what deduplication merges: fsdp TestPayloadOrder
            node.meta.update((key, n.meta[key]) for n in match.nodes if key in n.meta)
            pass
take the cap of the first group: bucketing TestFsdpGroupFilter
        cap_mb = cap(cur_bucket_id) if callable(cap) else cap.get(group_name, 0)
        cap_mb = cap(cur_bucket_id) if callable(cap) else next(iter(cap.values()))
restrict no gathers: fsdp TestFsdpGroupFilter
        filter_wait_node=lambda w: _is_in(groups, w) and is_fsdp_all_gather_wait(w),
        filter_wait_node=is_fsdp_all_gather_wait,
restrict no all-reduces: fsdp TestFsdpGroupFilter
    fsdp_groups = _groups_in_filter(gm) if fsdp_groups is None else fsdp_groups
    pass
identify groups in spite of the filter: fsdp TestFsdpGroupFilter
    if (groups := _groups_in_filter(gm)) is not None:
    if (groups := None) is not None:
take any name: fsdp TestFsdpGroupFilter
        raise ValueError(f"fsdp_group_filter: no process group is {unknown}")
        pass
refuse groups of other ranks: fsdp TestFsdpGroupFilter
    if unknown := [w for w in wanted if w not in known and not w.startswith("mesh_")]:
    if unknown := [w for w in wanted if w not in known]:
know no dimension of all ranks: fsdp TestFsdpGroupFilter
        wanted = [*wanted, "default_pg", "mesh_default"]
        pass
choose the default group always: fsdp TestFsdpGroupFilter
    if any(w.startswith("mesh_") and w not in descs.values() for w in wanted):
    if True:
count no scatters: fsdp TestFsdpGroupFilter
    if "primary" in wanted and (params := [*filter(is_fsdp_all_gather, ags)] or rss):
    if "primary" in wanted and (params := [*filter(is_fsdp_all_gather, ags)]):
merge without a bound: bucketing test_bound
            if cur_bucket and (is_full or is_far and is_far(cur_bucket[0], node)):
            if cur_bucket and is_full:
count from the last member: bucketing test_bound
            if cur_bucket and (is_full or is_far and is_far(cur_bucket[0], node)):
            if cur_bucket and (is_full or is_far and is_far(cur_bucket[-1], node)):
count collectives of its own key: bucketing test_bound
        passed.update(dict.fromkeys(nodes, len(passed) - len(same_key)))
        passed.update(dict.fromkeys(nodes, len(passed)))
drop dependent members: bucketing test_dependent_members
            nodes_groups.append(dependent)  # buckets of their own
            pass
leave more than adjacent: bucketing test_never_less
    return max(adjacent, across, key=lambda plan: sum(len(b) - 1 for b in plan))
    return across
keep other kinds apart: bucketing test_adjacent_buckets
        [*sum(others, []), *by_key.values()],
        list(by_key.values()),
run no check of the ranks: post_grad test_spmd_check
        or config.aten_distributed_optimizations.bucket_max_collectives_between != 0
        # nothing
"""
FAULTS = re.findall(r"(?m)^(\w.*): (\w+) (\w+)\n(.*)\n(.*)$", MUTANTS)


@pytest.fixture(scope="module")
def torch(tmp_path_factory: pytest.TempPathFactory) -> LinkedTorch:
    folder = tmp_path_factory.mktemp("mutants")
    (folder / "repository").mkdir()
    repository = make_repository(folder / "repository")
    return LinkedTorch(folder / "torch", repository, "HEAD")


def test_every_fault_is_read():
    assert len(FAULTS) == MUTANTS.count("\n") // 3


@pytest.mark.parametrize("fault", FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_is_noticed(torch: LinkedTorch, fault: tuple[str, ...]):
    _, file, tests, old, new = fault
    path: Path = torch.folder / FILES[file]
    original = path.read_text()
    assert f"\n{old}" in original
    path.write_text(original.replace(f"\n{old}", f"\n{new}"))
    try:
        said = torch.run(TEST, "-k", tests, check=False)
    finally:
        path.write_text(original)
    assert re.search(r"(?m)^FAILED \(", said), said[-400:]
