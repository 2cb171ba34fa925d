"""Compare bucketed graphs of the unpatched torch with those of the patched one, no entry set.

    python -m benchmarks.neutrality                          every graph; exit status 1: some differ
    python -m benchmarks.neutrality --only 'llama3_8b_*' --layers 2

Each graph of :mod:`.graphs` goes through torch's ``pre_bucket_fsdp_collectives``, in a process of
each torch: as traced, and with shards gathered as they come in. Traced shards are viewed first. A
bucket's inputs are sorted with what is between them, so views near the gathers get the readers of
a merged gather into order; without views readers stay ahead of it.

All nodes are compared in order: names, operators, arguments, shapes and metadata. On torch 2.15 a
fix changes on purpose how ``custom_ops`` unpacks gathers. Where that mode differs, the other nodes
are compared: operators, shapes and what they read, a member of a bucket being the bucket and the
member's number.
"""

import argparse
import json
import logging
import operator
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.fx as fx
from neutrality_graphs import describe

from torch_ext_bucketing.graph.nodes import kind_of
from torch_ext_bucketing.reports.base import columns

from .bucketing import check_torch, default_cap, run_child, run_torchs
from .command import document_of, parser_of_graphs, words, write_results
from .graphs import chosen, load
from .tracing import copy_graph

MODES: tuple[Literal["default", "custom_ops"], ...] = ("default", "custom_ops")
SHARDS = ("viewed", "as they come")


def drop_views(gm: fx.GraphModule) -> None:
    """Replace inputs that are only viewed by their views."""
    for node in gm.graph.find_nodes(op="placeholder"):
        users = list(node.users)
        if [user.target for user in users] == [torch.ops.aten.view.default]:
            node.meta = users[0].meta
            users[0].replace_all_uses_with(node)
            gm.graph.erase_node(users[0])


def without_unpacking(gm: fx.GraphModule) -> list[str]:
    """Describe each node by what it reads, in order, but for those that unpack gathers."""
    aten = torch.ops.aten
    views = (aten.view.default, aten.view.dtype, aten.alias.default)
    members: dict[fx.Node, tuple[fx.Node, int]] = {}
    dropped: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.target is aten.split_with_sizes_copy.out:
            dropped.add(node)
            for number, out in enumerate(node.kwargs["out"]):
                while out.target in views:
                    out = out.args[0]
                members[out] = node.args[0], number
        elif node.target is aten.split_with_sizes_copy.default:
            dropped.add(node)
            for user in node.users:
                assert user.target is operator.getitem, user
                members[user] = node.args[0], user.args[1]
    for node in gm.graph.nodes:  # shapes and dtypes are those of what reads them
        if node.target in views and node.args[0] in members:
            members[node] = members[node.args[0]]
    kept = [n for n in gm.graph.nodes if n not in members and n not in dropped]
    names: dict[fx.Node, str] = {n: f"%{i}" for i, n in enumerate(kept)}
    names |= {n: f"{names[bucket]}[{number}]" for n, (bucket, number) in members.items()}
    return [
        repr(
            (
                n.op,
                str(n.target),
                fx.node.map_arg((n.args, n.kwargs), names.__getitem__),
                str(getattr(n.meta.get("val"), "shape", None)),
            )
        )
        for n in kept
    ]


def child(way: str, name: str, cap_mb: float, layers: int | None) -> None:
    """Bucket a graph in each form and mode and print it as JSON."""
    logging.getLogger("torch._inductor.fx_passes.fsdp").setLevel(logging.WARNING)
    found = []
    loaded = load(name, layers, quiet=True)
    for shards in SHARDS:
        if shards != "viewed":
            drop_views(loaded.gm)
        for mode in MODES:
            graph = replace(loaded, gm=fx.GraphModule(loaded.gm, copy_graph(loaded.gm.graph)))
            nodes = graph.gm.graph.nodes
            before = sum(kind_of(n) is not None for n in nodes)
            run_torchs(graph, cap_mb, mode)
            place = {n: i for i, n in enumerate(nodes)}
            found.append(
                {
                    "shards": shards,
                    "mode": mode,
                    "collectives": [before, sum(kind_of(n) is not None for n in nodes)],
                    "ahead": sum(place[i] > place[n] for n in nodes for i in n.all_input_nodes),
                    "nodes": [repr(d) for d in describe(graph.gm)],
                    "without_unpacking": without_unpacking(graph.gm),
                }
            )
    check_torch(way)
    print(json.dumps(found))


def compare(name: str, cap_mb: float, layers: int | None) -> list[dict[str, Any]]:
    """Compare the graphs of both torches; return rows of the table."""
    arguments = words(only=name, cap=cap_mb, layers=layers)
    both = [run_child("benchmarks.neutrality", way, arguments) for way in ("unpatched", "unset")]
    rows = []
    for one, other in zip(*both, strict=True):
        nodes = one.pop("nodes"), other["nodes"]
        rest = one.pop("without_unpacking"), other["without_unpacking"]
        if nodes[0] == nodes[1]:
            found = "same"
        elif one["mode"] == "custom_ops" and rest[0] == rest[1]:
            found = "same but for unpacking"
        else:
            found = f"{len(set(nodes[0]) - set(nodes[1]))} differ"
        about = {"graph": name, "cap_mb": cap_mb, "nodes": len(nodes[0])}
        rows.append({**about, **one, "patched": found})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Render one line per graph, form and mode."""
    lines = [["graph", "cap", "shards", "mode", "collectives", "ahead", "nodes", "patched"]]
    for row in rows:
        before, after = row["collectives"]
        lines.append(
            [row["graph"], f"{row['cap_mb']:g}", row["shards"], row["mode"]]
            + [f"{before} -> {after}", f"{row['ahead']:,}", f"{row['nodes']:,}", row["patched"]]
        )
    return f"{columns(lines)}\n\nahead: readers that stand ahead of what they read, unpatched"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = parser_of_graphs("python -m benchmarks.neutrality", __doc__)
    parser.add_argument("--cap", type=float, metavar="MIB", help="bucket cap")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    names = chosen(parser, args.only, bool(args.child))
    if args.child:
        child(args.child, names[0], args.cap, args.layers)
        return 0
    document = document_of("python -m benchmarks.neutrality", arguments)
    document["rows"] = rows = []
    for name in names:
        print(name, file=sys.stderr, flush=True)
        rows += compare(name, args.cap or default_cap(name), args.layers)
    write_results(args.json, document, table(rows))
    return int(any("differ" in row["patched"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
