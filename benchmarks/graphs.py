"""Trace graphs of real size: forward and backward of sharded LLaMA-3 and DeepSeek-V3 models.

    python -m benchmarks.graphs                         trace what is not cached, print a table
    python -m benchmarks.graphs --only 'llama3_8b_*'    some of them
    python -m benchmarks.graphs --layers 2              with fewer layers, in seconds
    python -m benchmarks.graphs --list                  only the names

    from benchmarks.graphs import load
    graph = load("llama3_8b_fsdp8_tp8.backward.recompute")
    graph.gm                                            an fx.GraphModule of fake tensors

A graph is what the default partitioner makes of AOTAutograd's joint graph, with every collective
tagged. ``.recompute`` graphs gather the parameters again for backward (reshard after forward). They
are traced without weights, in a fake world of the full number of ranks, and kept in
``benchmarks/.cache``; see :mod:`.models` for what is fixed by hand, :mod:`.tracing` for the road.
``titan_*`` is torchtitan's own model (:mod:`.titan`) and needs torchtitan. It and
``*_dropless`` have sizes that depend on data.
"""

import argparse
import gzip
import hashlib
import inspect
import os
import pickle
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_ext_bucketing._source import source_digest
from torch_ext_bucketing.graph.nodes import kind_of
from torch_ext_bucketing.planner.resharding import ReshardAfterForward
from torch_ext_bucketing.reports.base import columns

from .command import matching, parser_of, sayer
from .models import DeepSeek, DeepSeekConfig, Llama, LlamaConfig
from .parallel import Group, Layout, World, shard_deepseek, shard_llama, start_world
from .serialize import from_data, to_data
from .titan import TORCHTITAN, TitanConfig, problem, register_operators, trace_titan
from .tracing import Phase, trace_model


@dataclass(frozen=True)
class Config:
    """A model and how it is spread over the ranks."""

    model: LlamaConfig | DeepSeekConfig | TitanConfig
    layout: Layout

    @property
    def size_hints(self) -> int | None:
        """Return the tokens between two ranks under balanced routing, or ``None``."""
        model = self.model
        if isinstance(model, LlamaConfig) or not getattr(model, "dropless", True):
            return None
        return model.batch * model.seq * model.experts_per_token // self.layout.expert


LLAMA3_70B = LlamaConfig(layers=80, dim=8192, heads=64, hidden=28672)

CONFIGS: dict[str, Config] = {
    "llama3_8b_fsdp64": Config(LlamaConfig(), Layout(fsdp=64)),
    "llama3_8b_fsdp8_tp8": Config(LlamaConfig(), Layout(fsdp=8, tensor=8)),
    "llama3_8b_hsdp8x8": Config(LlamaConfig(), Layout(fsdp=8, replicas=8)),
    "llama3_70b_fsdp64_tp8": Config(LLAMA3_70B, Layout(fsdp=64, tensor=8)),
    "llama3_70b_hsdp4x64": Config(LLAMA3_70B, Layout(fsdp=64, replicas=4)),
    "llama3_405b_fsdp512": Config(
        LlamaConfig(layers=126, dim=16384, heads=128, hidden=53248), Layout(fsdp=512)
    ),
    "deepseek_v3_fsdp64_ep8": Config(DeepSeekConfig(), Layout(fsdp=64, expert=8)),
    "deepseek_v3_fsdp64_ep8_dropless": Config(
        DeepSeekConfig(dropless=True), Layout(fsdp=64, expert=8)
    ),
    "titan_deepseek_v3_fsdp64_ep8": Config(TitanConfig(), Layout(fsdp=64, expert=8)),
}


def _held_out(number: int) -> Config:
    """Return a small model of a shape that nothing is tuned on: odd widths and vocabularies."""
    draw = random.Random(f"held out {number}")
    heads, width = draw.choice((6, 10, 12, 20)), draw.choice((64, 96, 128))
    common: dict[str, Any] = {
        "layers": draw.randint(2, 5),
        "dim": heads * width,
        "heads": heads,
        "hidden": 64 * draw.randint(20, 120),
        "vocab": 1024 * draw.randint(9, 150),
        "batch": draw.randint(1, 4),
        "seq": 512 * draw.randint(2, 9),
    }
    fsdp = draw.choice((16, 24, 32, 48, 128))
    if number % 2:
        return Config(
            DeepSeekConfig(
                **common,
                experts=8 * draw.randint(2, 12),
                experts_per_token=draw.randint(2, 5),
                shared_experts=draw.randint(1, 3),
                expert_hidden=64 * draw.randint(4, 30),
            ),
            Layout(fsdp=fsdp, expert=8),
        )
    layout = draw.choice((Layout(fsdp=fsdp), Layout(fsdp=fsdp, tensor=2), Layout(8, replicas=6)))
    return Config(LlamaConfig(**common, kv_heads=2), layout)


HELD_OUT: dict[str, Config] = {f"held_out_{number:02}": _held_out(number) for number in range(20)}
"""Left out unless asked for by this name."""

MEASURED: dict[str, Config] = {
    f"measured_llama3_8b_{nodes}x8": Config(LlamaConfig(batch=2), Layout(fsdp=nodes, tensor=8))
    for nodes in (16, 32)
}
"""Models on groups that there are measured times for; left out unless asked for by this name."""

_VARIANTS: tuple[tuple[Phase, bool], ...] = (
    ("forward", False),
    ("backward", False),
    ("forward", True),
    ("backward", True),
)


def _graph_name(config: str, phase: Phase, recompute: bool) -> str:
    return f"{config}.{phase}{'.recompute' if recompute else ''}"


_PARTS: dict[str, tuple[str, Phase, bool]] = {
    _graph_name(config, phase, recompute): (config, phase, recompute)
    for config in (*CONFIGS, *HELD_OUT, *MEASURED)
    for phase, recompute in _VARIANTS
}
NAMES: tuple[str, ...] = tuple(name for name, (config, *_) in _PARTS.items() if config in CONFIGS)


def available(names: Sequence[str]) -> list[str]:
    """Return the graphs or configurations that can be traced here; print the reasons of others."""
    missing = problem()
    left_out = [n for n in names if n.startswith("titan_")] if missing else []
    if left_out:
        print(f"left out: {', '.join(left_out)}: {missing}", file=sys.stderr)
    return [n for n in names if n not in left_out]


CACHE = Path(__file__).parent / ".cache"
_SUFFIX = ".pickle.gz"


@dataclass(frozen=True)
class Graph:
    """A traced graph; ``config`` has the number of layers that was traced."""

    name: str
    gm: fx.GraphModule
    phase: Phase
    recompute: bool
    config: Config
    groups: dict[str, Group]
    world_size: int
    mode: FakeTensorMode
    trace_s: float
    load_s: float


def load(
    name: str,
    layers: int | None = None,
    *,
    device: str | None = None,
    quiet: bool = False,
    cache: Path = CACHE,
) -> Graph:
    """Load a graph, one of :data:`NAMES`, from ``cache``, or trace it; start its fake world.

    Args:
        layers: number of layers instead of the model's own; at least 2 for a mixture of experts.
        device: device type of the fake tensors, which Inductor's passes and cost models look at. By
            default ``"cuda"`` if torch is built for it.
    """
    config = _config(name, layers)
    path = _path(name, config, cache)
    if not path.exists():
        return trace(name, layers, device=device, quiet=quiet, cache=cache)
    return _read(path, name, config, device)


def trace(
    name: str,
    layers: int | None = None,
    *,
    device: str | None = None,
    quiet: bool = False,
    cache: Path = CACHE,
) -> Graph:
    """Trace a graph anew, as :func:`load` does; cache all graphs of its configuration."""
    config = _config(name, layers)
    config_name = _PARTS[name][0]
    world = start_world(config.layout)

    start = time.monotonic()
    tell = sayer(start)

    def say(stage: str) -> None:
        if not quiet:
            tell(f"{config_name}: {stage}")

    if isinstance(config.model, TitanConfig):
        graphs = trace_titan(config.model, world, say)
    else:
        graphs = trace_model(builder(config, world), (config.model.batch, config.model.seq), say)
    seconds = time.monotonic() - start
    for (phase, recompute), gm in graphs.items():
        one = _graph_name(config_name, phase, recompute)
        groups = {n: asdict(g) for n, g in world.groups.items()}
        _write(_path(one, config, cache), {**to_data(gm), "groups": groups, "trace_s": seconds})
    return _read(_path(name, config, cache), name, config, device)


def builder(config: Config, world: World) -> Callable[[], nn.Module]:
    """Make the sharded model of a configuration, without weights under a fake mode."""
    model = config.model

    def build() -> nn.Module:
        if isinstance(model, LlamaConfig):
            llama = Llama(model)
            shard_llama(llama, world)
            return llama
        assert isinstance(model, DeepSeekConfig)
        if world.expert is None:
            raise ValueError(f"{config} needs expert parallelism")
        deepseek = DeepSeek(model, world.expert.get_group())
        shard_deepseek(deepseek, world)
        return deepseek

    return build


def chosen(
    parser: argparse.ArgumentParser, patterns: Sequence[str], child: bool = False
) -> list[str]:
    """Return the graphs that match the patterns; without ``child``, only those traceable here."""
    asked = _PARTS if any(p.startswith(("held_out_", "measured_")) for p in patterns) else NAMES
    names = [n for n in asked if not n.endswith("forward.recompute")]
    found = matching(parser, names, patterns)
    return found if child else available(found)


def _config(name: str, layers: int | None) -> Config:
    if name not in _PARTS:
        raise KeyError(f"no graph is named {name!r}; the names are {', '.join(NAMES)}")
    config = (CONFIGS | HELD_OUT | MEASURED)[_PARTS[name][0]]
    if layers is None:
        return config
    if layers < 1:
        raise ValueError(f"layers must be at least 1, got {layers}")
    return replace(config, model=replace(config.model, layers=layers))


_TRACED_WITH = (
    "_torch.aot",
    "fqns",
    "graph.nodes",
    "fsdp.gather",
    "fsdp.modules",
    "fsdp.shard",
    "fsdp.tagging",
)
"""Modules of the package that decide what a traced graph looks like."""


def _path(name: str, config: Config, cache: Path) -> Path:
    """Name the file after everything that the graph depends on."""
    package = "torch_ext_bucketing"
    titan = isinstance(config.model, TitanConfig)
    mine = ("titan" if titan else "models", "parallel", "serialize", "tracing")
    sources = source_digest(
        *(f"{__package__}.{m}" for m in mine), *(f"{package}.{m}" for m in _TRACED_WITH)
    )
    versions = torch.__version__ + (f" torchtitan {TORCHTITAN}" if titan else "")
    key = (versions, repr(config), sources, inspect.getsource(ReshardAfterForward))
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()
    name = f"{name}.{config.model.layers}.torch-{torch.__version__}"
    return cache / f"{name}.{digest[:16]}{_SUFFIX}"


def _write(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with gzip.open(partial, "wb", compresslevel=1) as file:
        pickle.dump(data, file)
    os.replace(partial, path)
    prefix = path.name[: -len("0123456789abcdef" + _SUFFIX)]
    for old in path.parent.iterdir():  # made from older sources
        if old != path and old.name.startswith(prefix) and old.name.endswith(_SUFFIX):
            old.unlink(missing_ok=True)


def _read(path: Path, name: str, config: Config, device: str | None) -> Graph:
    start = time.monotonic()
    with gzip.open(path, "rb") as file:
        data = pickle.load(file)
    world = start_world(config.layout)
    groups = {n: Group(**g) for n, g in data["groups"].items()}
    if world.groups != groups:
        raise RuntimeError(
            f"{name} was traced with the process groups {groups}, but they are {world.groups} "
            f"here; delete {path}"
        )
    if device is None:
        device = "cuda" if torch.version.cuda else "cpu"
    if isinstance(config.model, TitanConfig):
        if problem():
            raise RuntimeError(f"{name} {problem()}")
        register_operators()
    mode = FakeTensorMode(shape_env=ShapeEnv())
    target = torch.device(device) if device == "cpu" else torch.device(device, 0)
    gm = from_data(data, mode, target)
    _, phase, recompute = _PARTS[name]
    return Graph(
        name,
        gm,
        phase,
        recompute,
        config,
        groups,
        config.layout.world_size,
        mode,
        data["trace_s"],
        time.monotonic() - start,
    )


@dataclass(frozen=True)
class Counts:
    """Numbers of nodes and of starts by ``(kind, role of the group)``, and bytes of gathers."""

    nodes: int
    collectives: dict[tuple[str, str], int]
    gathered_bytes: int

    def of_kind(self, kind: str) -> int:
        """Return the number of collectives of a kind, over all groups."""
        return sum(n for (k, _), n in self.collectives.items() if k == kind)


_GROUP_ARGUMENT = {"all_gather": 2, "reduce_scatter": 3, "all_reduce": 2, "all_to_all": 3}
KINDS = tuple(_GROUP_ARGUMENT)


def count(graph: Graph) -> Counts:
    """Count nodes, collectives and gathered bytes."""
    collectives: Counter[tuple[str, str]] = Counter()
    gathered = 0
    for node in graph.gm.graph.nodes:
        kind: str | None = kind_of(node)
        if node.target is torch.ops._c10d_functional.all_to_all_single.default:
            kind = "all_to_all"
        if kind is None:
            continue
        group = str(node.args[_GROUP_ARGUMENT[kind]])
        collectives[kind, graph.groups[group].role] += 1
        if kind == "all_gather":
            gathered += node.meta["val"].untyped_storage().nbytes()
    return Counts(len(graph.gm.graph.nodes), dict(sorted(collectives.items())), gathered)


_COLUMNS = ("graph", "nodes", "AG", "RS", "AR", "A2A", "by group", "gathered", "trace", "load")


def _row(graph: Graph) -> tuple[str, ...]:
    counts = count(graph)
    by_role: dict[str, list[str]] = {}
    short = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "all_to_all": "A2A"}
    for group in graph.groups.values():
        parts = [
            f"{short[kind]} {counts.collectives[kind, group.role]}"
            for kind in KINDS
            if (kind, group.role) in counts.collectives
        ]
        by_role[f"{group.role}({group.size})"] = parts
    return (
        graph.name,
        f"{counts.nodes:,}",
        *(str(counts.of_kind(kind)) for kind in KINDS),
        "; ".join(f"{role} {', '.join(parts)}" for role, parts in by_role.items() if parts),
        f"{counts.gathered_bytes / 2**30:.1f} GiB",
        f"{graph.trace_s:.0f} s",
        f"{graph.load_s:.1f} s",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = parser_of("python -m benchmarks.graphs", __doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        default=["*"],
        help="names of graphs or of configurations, or patterns such as '*.backward'",
    )
    parser.add_argument("--layers", type=int, help="instead of each model's own number")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    options = parser.parse_args(arguments)
    patterns = [f"{p}.*" if p in CONFIGS else p for p in options.only]
    names = matching(parser, NAMES, patterns)
    if options.layers is not None and options.layers < 1:
        parser.error(f"--layers must be at least 1, got {options.layers}")
    if options.list:
        print("\n".join(names))
        return 0
    rows = [_COLUMNS, *(_row(load(name, options.layers)) for name in available(names))]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{columns(rows)}\n\nAG all-gathers, RS reduce-scatters, AR all-reduces, A2A all-to-alls. "
        "One trace makes the four graphs of a configuration.\n"
        f"Peak memory of this process: {peak:.1f} GiB."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
