"""Graphs that nobody writes on purpose: what is odd about each is its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from collective_graphs import C10D, all_gather, all_reduce, reduce_scatter, trace
from torch.fx.experimental.proxy_tensor import make_fx

from torch_ext_bucketing.graph.collectives import kind_of
from torch_ext_bucketing.graph.tags import Tag, set_tag

ODD: dict[str, Callable[[], fx.GraphModule]] = {}
CAN_RUN: set[str] = set()
"""Those that ``run_all_ranks`` runs, on a world of two ranks."""


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def gather_start(x: torch.Tensor) -> torch.Tensor:
    return C10D.all_gather_into_tensor(x, world().size(), world().group_name)


def wait(start: torch.Tensor) -> torch.Tensor:
    return C10D.wait_tensor(start)


def tagged(gm: fx.GraphModule) -> fx.GraphModule:
    """Every collective serves a parameter of its own, all of them in module ``m``."""
    for i, node in enumerate(gm.graph.nodes):
        kind = kind_of(node)
        if kind is not None:
            set_tag(node, Tag(kind, (f"m.w{i}",)))
    return gm


def odd(*shapes: tuple[int, ...], runs: bool = True) -> Callable[[Any], Any]:
    """Registers what a function traces to on inputs of these shapes."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        ODD[fn.__name__] = lambda: trace(fn, *map(torch.zeros, shapes))
        if runs:
            CAN_RUN.add(fn.__name__)
        return fn

    return register


def built(fn: Callable[[], fx.GraphModule]) -> Callable[[], fx.GraphModule]:
    ODD[fn.__name__] = fn
    return fn


def two_gathers() -> fx.GraphModule:
    return trace(lambda a, b: [all_gather(a, world()), all_gather(b, world())], *torch.zeros(2, 4))


@odd((4,), (4,), (4,))
def two_waits_on_a_start(a, b, c):
    start = gather_start(a)
    return [wait(start) + 1, wait(start) * 2, all_gather(b, world()), all_gather(c, world())]


@odd((4,), (4,))
def a_wait_used_by_many(a, b):
    w = all_gather(a, world())
    return [w + 1, w * 2, w, w.view(-1), all_gather(b, world())]


@odd((4,), (4,), (4,))
def no_wait(a, b, c):
    return [gather_start(a), all_gather(b, world()), all_gather(c, world())]


@odd((4,), (4,), (4,))
def unused_results(a, b, c):
    gather_start(a)
    wait(gather_start(b))
    C10D.all_reduce(c, "sum", world().group_name)
    return [all_gather(b, world()), all_gather(c, world())]


@odd((0,), (4,), (0, 3), (2, 0), (4, 2))
def zero_size(*xs):
    gathered = [all_gather(x, world()) for x in xs]
    return [
        *gathered,
        *(reduce_scatter(x, world()) for x in xs),
        *(all_reduce(x, world()) for x in xs),
    ]


@odd((), (), (4,))
def scalars_reduced(*xs):
    return [all_reduce(x, world()) for x in xs]


@odd((), (), (4,), (4,), runs=False)
def scalars_gathered(*xs):
    return [all_gather(x, world()) for x in xs]


@odd((3,), (4,), (5, 2), (2, 2), runs=False)
def rows_that_can_not_be_divided(*xs):
    return [reduce_scatter(x, world()) for x in xs]


@odd((4,), (4,), (4,))
def input_written_between_members(p, q, new):
    a = all_gather(p, world())
    p.copy_(new)
    return [a, all_gather(p, world()), all_gather(q, world())]


@odd((4,), (4,), (4,))
def written_to_itself(p, q, new):
    """A cycle by way of memory: what is gathered is written back to where it came from."""
    for _ in range(2):
        q.copy_(all_gather(p, world())[:4])
        p.copy_(all_gather(q, world())[4:] + new)
    return [p, q]


@odd((4,), (4,))
def gathered_value_written(p, q):
    a = all_gather(p, world())
    a.mul_(2)
    return [a, all_gather(p, world()), all_gather(q, world())]


@odd((4,), (4,))
def view_of_gathered_value_written(p, q):
    a = all_gather(p, world())
    a.view(2, 4)[1].add_(1)
    return [all_gather(p, world()), a, all_gather(q, world())]


@odd((4,), (4,))
def reduced_in_place(p, q):
    x = p + 1
    a = wait(C10D.all_reduce_(x, "sum", world().group_name))
    return [a, all_reduce(x, world()), all_reduce(q, world())]


@odd((4,), (4,))
def wait_of_an_input(a, b):
    return [wait(a), all_gather(a, world()), all_gather(b, world())]


@built
def one_rank() -> fx.GraphModule:
    alone = dist.new_group([0])

    def fn(*xs):
        kinds = (all_gather, reduce_scatter, all_reduce)
        return [collective(x, alone) for collective in kinds for x in xs]

    return trace(fn, torch.zeros(3), torch.zeros(5, 2))


@built
def unhinted_sizes() -> fx.GraphModule:
    """Two buckets that can be merged, and then one whose sizes nobody knows."""

    def fn(x, y, n):
        rows = n.nonzero().shape[0]
        torch._check(rows >= 2)
        known = [all_gather(t + 1, world()) for t in (x, y)]
        x, y = x[:1].expand(rows, 3), y[:1].expand(rows, 3)
        reduced = [reduce_scatter(torch.cat([t, t]), world()) for t in (x, y)]
        return known + reduced + [all_gather(t.to(torch.float64), world()) for t in (x, y)]

    return make_fx(fn, tracing_mode="symbolic")(torch.zeros(6, 3), torch.zeros(6, 3), torch.ones(4))


@built
def empty() -> fx.GraphModule:
    return fx.GraphModule({}, fx.Graph())


@built
def nothing_but_an_output() -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(None)
    return fx.GraphModule({}, graph)


@built
def no_output() -> fx.GraphModule:
    gm = two_gathers()
    gm.graph.erase_node(gm.graph.output_node())
    return gm


@built
def no_metadata() -> fx.GraphModule:
    gm = two_gathers()
    for node in gm.graph.nodes:
        node.meta.clear()
    return gm


@built
def inputs_without_metadata() -> fx.GraphModule:
    gm = two_gathers()
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta.clear()
    return gm


@built
def arguments_by_keyword() -> fx.GraphModule:
    def fn(a, b):
        kinds = (all_gather, reduce_scatter, all_reduce)
        return [collective(x, world()) for collective in kinds for x in (a, b)]

    gm = trace(fn, torch.zeros(4), torch.zeros(4))
    for node in gm.graph.nodes:
        if kind_of(node) is not None or node.target is C10D.wait_tensor.default:
            names = [argument.name for argument in node.target._schema.arguments]
            node.args, node.kwargs = (), dict(zip(names, node.args, strict=False))
    return gm


@built
def modules_methods_and_constants() -> fx.GraphModule:
    gm = two_gathers()
    gm.relu = torch.nn.ReLU()
    gm.register_buffer("constant", torch.zeros(4))
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        x = gm.graph.call_module("relu", (output.args[0][0],))
        y = gm.graph.call_method("add", (x, gm.graph.get_attr("constant")))
    output.args = ([*output.args[0], y],)
    gm.recompile()
    return gm


@built
def out_of_order() -> fx.GraphModule:
    gm = two_gathers()
    start = next(n for n in gm.graph.nodes if kind_of(n) is not None)
    start.append(next(iter(gm.graph.nodes)))
    return gm
