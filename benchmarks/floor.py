"""Compare the least peak that ``recipe(memory=...)`` reaches with that of choices by hand.

    python -m benchmarks.floor                               all models, 8 layers; transformers: 4
    python -m benchmarks.floor --only 'hf_*' --layers 2
    python -m benchmarks.floor --only hf_llama_small --depths 4 8 16 32 64

By hand: every block checkpointed; what torch's partitioner saves under
``torch._functorch.config.activation_memory_budget`` 0; both with all parameters gathered again, and
scheduled for the least peak. Models of :mod:`.graphs` are joint graphs as in :mod:`.keep`. Those of
transformers (``hf_*``, randomly initialized, on 64 fake ranks) are compiled as a trainer does, with
``gradient_checkpointing_enable()`` by hand, and caught where ``recipe(memory=...)`` chooses. Peaks
are estimates, of the larger of forward and backward.

``--depths`` chooses for models of transformers as :mod:`.memory` does with that option.

Exit status: 1 if a least peak is above one by hand.
"""

import contextlib
import functools
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.fx as fx
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_ext_bucketing as teb
from torch_ext_bucketing.fsdp.units import Units
from torch_ext_bucketing.graph.nodes import GraphLike, graph_of
from torch_ext_bucketing.graph.sizes import SizeHints
from torch_ext_bucketing.passes.base import Compilation, GraphPass, Stage
from torch_ext_bucketing.planner.cost.cost import Costs
from torch_ext_bucketing.planner.cost.machine import H100
from torch_ext_bucketing.planner.keep.keep import KeepPlanner
from torch_ext_bucketing.planner.keep.partitioned import PartitionedModel
from torch_ext_bucketing.reports.base import columns

from .command import (
    document_of,
    matching,
    parser_of_graphs,
    write_json,
    write_results,
)
from .graphs import available
from .keep import MODELS, Sharded
from .memory import WAYS, by_depth, saved_by_torch, saving, table_by_depth
from .parallel import end_world
from .tracing import copy_graph

RANKS, BATCH, SEQ = 64, 2, 512
_WIDTH: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "use_cache": False,
    # On the CPU torch can't save the random state of a checkpointed sdpa beside a DTensor's mesh.
    "attn_implementation": "eager",
}
_EXPERTS = {"num_local_experts": 8, "num_experts": 8, "moe_intermediate_size": 352}
_SMALL = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_attention_heads": 4,
}
_TOKENS = {"hf_llama_small": (1, 128)}
"""Batch and sequence of a rank, where they are not ``(BATCH, SEQ)``."""
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "hf_llama": ("Llama", "ForCausalLM", {}),
    "hf_qwen3": ("Qwen3", "ForCausalLM", {"head_dim": 64}),
    "hf_mixtral": ("Mixtral", "ForCausalLM", _EXPERTS),
    "hf_gpt2": ("GPT2", "LMHeadModel", {"n_embd": 512, "n_head": 8, "n_positions": SEQ}),
    "hf_gemma2": ("Gemma2", "ForCausalLM", {"head_dim": 64}),
    "hf_llama_small": ("Llama", "ForCausalLM", _SMALL),
}
_LAYERS = ("num_hidden_layers", "n_layer")


@dataclass(frozen=True, eq=False, repr=False)
class _Catch(GraphPass):
    """Keep a copy of the joint graph at the place where ``recipe(memory=...)`` chooses."""

    stage: ClassVar[Stage] = "joint"
    found: list[fx.Graph]

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        self.found.append(copy_graph(graph_of(graph)))


class _OfTokens(nn.Module):
    def __init__(self, name: str, layers: int) -> None:
        super().__init__()
        import transformers

        torch.manual_seed(0)
        kind, head, config = TRANSFORMERS[name]
        given = {**_WIDTH, **_NO_DROPOUT, **dict.fromkeys(_LAYERS, layers), **config}
        made = getattr(transformers, f"{kind}Config")(**given)
        self.inner = getattr(transformers, f"{kind}{head}")(made).bfloat16().train()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.inner(input_ids=tokens).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


@contextlib.contextmanager
def _fake_ranks() -> Iterator[None]:
    end_world()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def joint_of_transformers(name: str, layers: int, checkpointed: bool) -> tuple[fx.Graph, Units]:
    """Compile a model on the fake ranks; return its joint graph, and its units."""
    torch._dynamo.reset()
    model = _OfTokens(name, layers)
    if checkpointed:
        model.inner.gradient_checkpointing_enable()
    teb.data_parallel(model, init_device_mesh("cpu", (RANKS,)))
    catch = _Catch([])
    passes = teb.recipe(model)
    at = next(i for i, p in enumerate(passes) if isinstance(p, teb.ReshardAfterForward))
    passes.insert(at, catch)
    backend = teb.backend("aot_eager", passes, model, agree=False)
    tokens = torch.zeros(_TOKENS.get(name, (BATCH, SEQ)), dtype=torch.int64)
    torch.compile(model, backend=backend, fullgraph=True)(tokens)
    (graph,) = catch.found
    return graph, Units.of(teb.transformer_block_plan(model))


def _planner(graph: fx.Graph, units: Units, **more: Any) -> KeepPlanner:
    return KeepPlanner(PartitionedModel(graph, Costs(H100, SizeHints()), units, **more))


def measure_transformers(name: str, layers: int) -> dict[str, int]:
    """Return peaks in bytes by way."""
    with _fake_ranks():
        graph, units = joint_of_transformers(name, layers, checkpointed=False)
        checkpointed, _ = joint_of_transformers(name, layers, checkpointed=True)
        by_torch = saving(graph, saved_by_torch(graph, 1, 0.0))  # the loss alone is an output
        return {
            "checkpointed": _planner(checkpointed, units).scheduled((), 0).peak_bytes,
            "budget=0": _planner(by_torch, units).scheduled((), 0).peak_bytes,
            "least": _planner(graph, units, activations=True).choose(0).peak_bytes,
        }


def depths(name: str, layers: Sequence[int]) -> dict[str, Any]:
    """Choose halfway between everything made again and everything kept, see :func:`.by_depth`."""
    rows = []
    with _fake_ranks():
        for number in layers:
            graph, units = joint_of_transformers(name, number, checkpointed=False)
            make = functools.partial(_planner, graph, units, activations=True)
            rows.append(by_depth(name, number, make))
    return {"rows": rows}


def measure(name: str, layers: int) -> dict[str, int]:
    """Return peaks in bytes by way, for a model of :mod:`.graphs`."""
    sharded = Sharded(name, layers)
    known = sharded.planner(H100, activations=True)
    by_torch = saving(sharded.joint, saved_by_torch(sharded.joint, sharded.outputs, 0.0))
    saved = [k for k, u in enumerate(known.partitioned.keepables) if WAYS[_BLOCKS](u.name)]
    return {
        "checkpointed": known.scheduled(saved, 0).peak_bytes,
        "budget=0": sharded.planner(H100, by_torch).scheduled((), 0).peak_bytes,
        "least": sharded.planner(H100, activations=True).choose(0).peak_bytes,
    }


_BLOCKS = "all computed again"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = parser_of_graphs("python -m benchmarks.floor", __doc__)
    parser.add_argument("--depths", nargs="+", type=int, metavar="N", help="numbers of layers")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    rows: dict[str, dict[str, int]] = {}
    chosen = matching(parser, (*MODELS, *TRANSFORMERS), args.only)
    theirs = [name for name in chosen if name in TRANSFORMERS]
    if theirs and importlib.util.find_spec("transformers") is None:
        print(f"left out: {', '.join(theirs)}: pip install transformers", file=sys.stderr)
        theirs = []
    if args.depths:
        found = [depths(name, args.depths) for name in theirs]
        print(table_by_depth(found))
        write_json(args.json, found)
        return int(any(row["worse"] for one in found for row in one["rows"]))
    for name in (*available([name for name in chosen if name in MODELS]), *theirs):
        print(name, file=sys.stderr, flush=True)
        of = measure_transformers if name in TRANSFORMERS else measure
        rows[name] = of(name, args.layers or (4 if name in TRANSFORMERS else 8))
    lines = [["MiB", "checkpointed", "budget=0", "least", "of the lower"]]
    ratios = {}
    for name, row in rows.items():
        ratios[name] = row["least"] / min(row["checkpointed"], row["budget=0"])
        lines.append([name, *(f"{b / 2**20:.1f}" for b in row.values()), f"{ratios[name]:.3f}"])
    document = document_of("python -m benchmarks.floor", arguments) | {"rows": rows}
    write_results(args.json, document, columns(lines))
    return int(any(ratio > 1 for ratio in ratios.values()))


if __name__ == "__main__":
    sys.exit(main())
