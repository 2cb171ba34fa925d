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

TESTS = {
    True: "test/distributed/test_fsdp_bucketing.py",
    False: "test/distributed/test_fx_bucketing.py",
}
IN_FSDP = ("TestGroupNames", "TestFsdpGroupFilter")
FILES = {
    "codecache": "torch/_inductor/codecache.py",
    "bucketing": "torch/_inductor/fx_passes/bucketing.py",
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
see no path from the bucket: bucketing test_member_that_needs_a_full_bucket
            if node in cur_bucket_descendents:
            if False:
let a path end in a bucket: bucketing TestMergeAfterMerge
            reachability.merge_starts(cur_bucket)
            pass
replay merges on sorted graphs: bucketing test_sorted_graphs
    if not is_sorted or interleaved:
    if True:
expect a sorted graph: bucketing TestMergeAfterMerge
        graph_nodes = list(g.nodes) if is_sorted else topo_sort(list(g.nodes))
        graph_nodes = list(g.nodes)
read names from nodes: fsdp TestGroupNames
    return _resolve_group_name(_get_collective_kwargs(n)["group_name"])
    return _get_collective_kwargs(n)["group_name"]
turn the order round: bucketing TestPayloadOrder
    return [sorted(b, key=lambda n: (not ints[n], ints[n])) for b in buckets]
    return [sorted(b, key=lambda n: (not ints[n], ints[n]), reverse=True) for b in buckets]
pack members without a value first: bucketing TestPayloadOrder
    return [sorted(b, key=lambda n: (not ints[n], ints[n])) for b in buckets]
    return [sorted(b, key=lambda n: ints[n]) for b in buckets]
take any value: bucketing TestPayloadOrder
    if bad := [n for n in ints if not all(type(i) is int for i in ints[n])]:
    if bad := []:
place a bucket by its payload: bucketing TestPayloadOrder
            _, last = max(zip(bucket_waits, bucket_nodes))  # the one awaited last
            pass
order nothing that is planned: bucketing TestPayloadOrder
    return in_payload_order(buckets)
    return buckets
order nothing that overlaps: overlap TestPayloadOrder
        (bucket,) = in_payload_order([bucket_info.collectives])
        bucket = bucket_info.collectives
view members where they can't begin: bucketing TestPacking
        dst.storage_offset() * dtype.itemsize % out_dtype.itemsize
        False
forget a merged bucket's value: bucketing TestPayloadOrder
                *([(order_key, ())] if order_key else []),
                # nothing
forget the value of what deduplication merges: fsdp TestPayloadOrder
            node.meta.update((key, n.meta[key]) for n in match.nodes if key in n.meta)
            pass
take the cap of any group: bucketing TestFsdpGroupFilter
        if isinstance(bucket_cap_mb_by_bucket_idx, CapMbByGroup):
        if False:
restrict no gathers: fsdp TestFsdpGroupFilter
        filter_wait_node=_in_filter(gm, is_fsdp_all_gather_wait),
        filter_wait_node=is_fsdp_all_gather_wait,
restrict no scatters: fsdp TestFsdpGroupFilter
        filter_wait_node=_in_filter(gm, is_fsdp_reduce_scatter_wait),
        filter_wait_node=is_fsdp_reduce_scatter_wait,
identify groups in spite of the filter: fsdp TestFsdpGroupFilter
    if (sizes := _groups_in_filter(gm)) is not None:
    if (sizes := None) is not None:
choose anew after a merge: fsdp TestFsdpGroupFilter
        if "fsdp_primary_group" not in gm.meta:
        if True:
take a name in a name: fsdp TestFsdpGroupFilter
    elif isinstance(wanted, list):
    elif True:
count gathers of activations: fsdp TestFsdpGroupFilter
            ags = [n for n in ags if n not in waited and is_fsdp_all_gather(n)]
            ags = [n for n in ags if is_fsdp_all_gather(n)]
count no scatters: fsdp TestFsdpGroupFilter
            counts = Counter(map(_get_group_name, [*ags, *rss]))
            counts = Counter(map(_get_group_name, ags))
take another job's plan: codecache TestFsdpGroupFilter
        if config.aten_distributed_optimizations.fsdp_group_filter is not None:
        if False:
let ranks hit a cache: codecache TestSpmdCheck
        if config.aten_distributed_optimizations.spmd_check:
        if False:
merge without a bound: bucketing test_bound
        if not cur_group or (limit is not None and between > limit):
        if not cur_group:
count collectives of its own key: bucketing test_bound
        between = i - start - len(cur_group)
        between = i - start
count from the first collective: bucketing test_bound
            start, cur_group = newest[group_key] = i, []
            start, cur_group = newest[group_key] = 0, []
let distant buckets need each other: bucketing test_buckets_that
    across = _plan_buckets(g, nodes_groups, bucket_cap_mb_by_bucket_idx, True)
    across = _plan_buckets(g, nodes_groups, bucket_cap_mb_by_bucket_idx)
leave more than adjacent: bucketing test_never_less
    return max(buckets, across, key=lambda plan: sum(len(b) - 1 for b in plan))
    return across
size what only the data decides: bucketing test_sizes_that
        if not has_free_unbacked_symbols(node.meta["val"]):
        if True:
take any bound: bucketing test_bad_value
    if limit is not None and not (type(limit) is int and limit >= 0):
    if False:
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
        said = torch.run(TESTS[tests in IN_FSDP], "-k", tests, check=False)
    finally:
        path.write_text(original)
    assert re.search(r"(?m)^FAILED \(", said), said[-400:]
