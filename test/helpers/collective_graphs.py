"""Small graphs of collectives, and a way to run them for all ranks at once."""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

HELPERS = Path(__file__).resolve().parent
PATHS = [str(HELPERS), str(HELPERS.parents[1])]
"""Where the helpers, the package and the benchmarks are imported from."""

C10D = torch.ops._c10d_functional

OPTIONS = "aten_distributed_optimizations."
PAYLOAD_ORDER = OPTIONS + "bucket_payload_order_key"
GROUP_FILTER = OPTIONS + "fsdp_group_filter"
MAX_BETWEEN = OPTIONS + "bucket_max_collectives_between"

STARTS = {
    C10D.all_gather_into_tensor.default: "all_gather",
    C10D.all_gather_into_tensor_out.default: "all_gather",
    C10D.reduce_scatter_tensor.default: "reduce_scatter",
    C10D.all_reduce.default: "all_reduce",
    C10D.all_reduce_.default: "all_reduce",
}


@contextlib.contextmanager
def fake_group(world: int, rank: int = 0) -> Iterator[None]:
    """Make a fake process group of ``world`` ranks; this process is ``rank``."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return C10D.wait_tensor(C10D.all_gather_into_tensor(x, group.size(), group.group_name))


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup, op: str = "sum") -> torch.Tensor:
    return C10D.wait_tensor(C10D.reduce_scatter_tensor(x, op, group.size(), group.group_name))


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup, op: str = "sum") -> torch.Tensor:
    return C10D.wait_tensor(C10D.all_reduce(x, op, group.group_name))


def trace(fn: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    with FakeTensorMode() as mode:
        return make_fx(fn)(*(mode.from_tensor(x) for x in inputs))


def starts(gm: fx.GraphModule, kind: str | None = None) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.target in STARTS and kind in (None, STARTS[n.target])]


_PLUMBING = re.compile(
    r"\s+(\w+) = (aten\.(view|split_with_sizes\w*|empty|alias|clone|_unsafe_view|slice|reshape)\b|\w+\[)"
)


def show(gm: fx.GraphModule) -> str:
    """Print the graph's code for a snapshot, without the lines that differ between torch versions."""
    lines = []
    plumbing: set[str] = set()
    for line in gm.code.splitlines():
        line = re.sub(r";\s+[\w, =]+ = None|torch\.ops\.|  # .*", "", line)
        if match := _PLUMBING.match(line):
            plumbing.add(match[1])
        elif line.strip() and not line.startswith("import"):
            line = re.sub(r"(_pre_bucket_all_gather\.default\(\[[^]]*\], \d+).*", r"\1, ...)", line)
            head, _, tail = line.partition(" = ") if " = " in line else ("", "", line)
            tail = re.sub(r"\b\w+\b", lambda m: "_" if m[0] in plumbing else m[0], tail)
            lines.append(f"{head} = {tail}" if head else tail)
    return "\n".join(lines) + "\n"


def run_all_ranks(
    gm: fx.GraphModule,
    inputs: Sequence[Sequence[torch.Tensor]],
    peers: Callable[[int, str], list[int]] | None = None,
) -> list[list[torch.Tensor]]:
    """Run one graph on every rank in lockstep; ``peers`` lists the ranks of a group, or all are."""
    world = len(inputs)
    env: list[dict[fx.Node, Any]] = [{} for _ in range(world)]
    feeds = [iter(i) for i in inputs]
    in_flight: dict[fx.Node, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            for rank in range(world):
                env[rank][node] = next(feeds[rank]).clone()
            continue
        args, kwargs = zip(
            *(
                fx.node.map_arg((node.args, node.kwargs), lambda n, rank=rank: env[rank][n])
                for rank in range(world)
            ),
            strict=True,
        )
        if node.op == "output":
            return [list(a[0]) for a in args]
        assert node.op == "call_function", node.format_node()
        for read, was in (in_flight.pop(n, ((), ())) for n in node.args if isinstance(n, fx.Node)):
            same = all(torch.equal(r, w) for r, w in zip(read, was, strict=True))
            assert same, f"{node.args[0]}: its input was written to before {node}"
        kind = STARTS.get(node.target)
        # A collective with an output buffer reads its input from that buffer.
        if kind in ("all_gather", "reduce_scatter") and "out" not in node.kwargs:
            in_flight[node] = ([a[0] for a in args], [a[0].clone() for a in args])
        if node.target is C10D.all_to_all_single.default:
            sent = [a[0].split(a[2]) for a in args]
            results = [torch.cat([parts[rank] for parts in sent]) for rank in range(world)]
        elif kind is None:
            results = [node.target(*a, **k) for a, k in zip(args, kwargs, strict=True)]
        else:
            results = []
            for rank in range(world):
                mine = list(range(world)) if peers is None else peers(rank, args[rank][-1])
                values = [args[peer][0] for peer in mine]
                assert peers is None or kind != "reduce_scatter" or values[0].is_contiguous()
                results.append(_of_group(kind, values, args[rank][1], mine.index(rank)))
            if node.target is C10D.all_reduce_.default:
                results = [a[0].copy_(r) for a, r in zip(args, results, strict=True)]
            results = [
                k["out"].copy_(r) if "out" in k else r for k, r in zip(kwargs, results, strict=True)
            ]
        for rank in range(world):
            env[rank][node] = results[rank]
    raise AssertionError("the graph has no output")


def _of_group(kind: str, values: list[torch.Tensor], op: object, place: int) -> torch.Tensor:
    """Compute the result of a collective for the rank at this place of a group."""
    if kind == "all_gather":
        return torch.cat(values)
    total = values[0].clone(memory_format=torch.contiguous_format)
    for value in values[1:]:
        total = torch.maximum(total, value) if op == "max" else total + value
    if op == "avg":
        total = total / len(values)
    return total if kind == "all_reduce" else total.chunk(len(values))[place].clone()


def assert_same(
    found: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[torch.Tensor]]
) -> None:
    """Check that both have the same values on every rank."""
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def described(gm: fx.GraphModule) -> list[str]:
    """Describe each node: call, value, kept metadata, and which values share memory."""
    storages: dict[int, int] = {}
    found = []
    for n in gm.graph.nodes:
        value = getattr(n.meta.get("val"), "script_class_name", n.meta.get("val"))
        if isinstance(value, torch.Tensor):
            storage = storages.setdefault(value.untyped_storage()._cdata, len(storages))
            value = (value, value.stride(), value.storage_offset(), storage)
        rest = [n.meta.get(k) for k in ("custom", "desc", "partitioner_tag")]
        found.append(repr([n.op, n.target, n.name, n.args, n.kwargs, value, rest]))
    return found


def lines_run(function: Callable[[], object], folder: str = "") -> int:
    """Count the lines of Python that a call runs in files below ``folder``."""
    count = 0

    def in_function(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return in_function

    def on_call(frame: FrameType, event: str, arg: object) -> Any:
        return in_function if frame.f_code.co_filename.startswith(folder) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        function()
    finally:
        sys.settrace(before)
    return count
