"""Define the rows of the parity harness: what is trained, and how. Imports no torch.

A :class:`Row` trains one model of :data:`.models.MODELS` under eager FSDP2 and compiled, on the
passes of :func:`.recipe`, and compares the weights after every step. To add

- a model: add an entry of ``MODELS``. :func:`matrix` makes its rows: models x topologies x backends
  x parallelism x dtypes;
- a way to train: add a field of :class:`Row`, read in ``ranks.Runs``, and rows in :data:`ROWS`;
- something around the step (a checkpoint, an evaluation, graph breaks): add a case of
  ``cases.CASES``, which is a row by itself.

A row whose packages are not installed is left out, and the table lists it.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .base import Model


CHANNELS = 8
CHUNK_BYTES = 128
"""Bytes of a buffer that go to one ring channel in a row: small, for small models."""

TOPOLOGIES = ("2x2", "4x2")
MORE_TOPOLOGIES = ("1x2",)
"""For GPUs: one pair of ranks, too few for HSDP."""


@dataclass(frozen=True)
class Row:
    """One way to train one model.

    Args:
        name: the name that ``--rows`` and ``--only`` match.
        model: an entry of ``models.MODELS``, or one of torchtitan's for its ``client``.
        nodes: number of simulated nodes.
        mesh: sizes of the mesh: (ranks), (replicas, shards) or (shards, tensor-parallel ranks).
        backend: backend of ``torch.compile``.
        mode: mode of ``data_parallel``.
        dtype: dtype of gathers, computation and reductions; weights and optimizer are float32.
            Gradients computed in bfloat16 would prove little about float32 reductions: a sum of a
            few of them is mostly exact in float32, in any order.
        device: ``"cpu"``, on a ring group, or ``"cuda"``, on NCCL.
        client: the sharding that is compiled: this package's ``data_parallel`` or torchtitan's as
            it is installed; or torchtitan's of its own model, traced by Dynamo or by its graph
            trainer; or its or accelerate's calls of eager ``fully_shard``, with this package's in
            its place.
        tensor: tensor parallelism over the mesh's second dimension: parameters cut by hand, or by
            ``parallelize_module``, with or without the sequence sharded between blocks.
        layers: number of blocks; for torchtitan's models the first ones, 0 for all.
        chunks: number of parts of the loss.
        to: size of the group that gathers again for backward; with ``memory``, one that may be
            chosen. 0: all ranks.
        memory: a bound on a step's memory, relative to its peak with everything computed and
            gathered again; what is kept is chosen under it. 0: no bound.
        microbatches: forwards and backwards per step.
        sync: when gradients are reduced, after each backward or after the last.
        gather_once: whether parameters are gathered before the first forward of a step alone.
        checkpoint: activation checkpointing of every block, full or saving its matmuls.
        regional: each block is compiled by itself. The rest is not compiled, each of its parameters
            is a unit, and its collectives are not counted.
        graphs: pairs of forward and backward graphs that a run compiles.
        chunk_bytes: consecutive bytes of a buffer that go to one ring channel.
        expert: number of ranks that share the experts.
        spmd: torchtitan's backend for parallelism other than data parallelism, for its own models.
        optimizer: an entry of ``steps.OPTIMIZERS``, whose updates are planned with the graphs.
        max_norm: with it, the norm that gradients are clipped to; 0: they are not.
        case: an entry of ``cases.CASES``, which has a model of its own, and no control.
        layout: whether members and byte offsets of all buckets must be those of eager FSDP2.
        unlike: why the bits can't be eager FSDP2's. Then they must differ, with a warning.
    """

    name: str
    model: str = "decoder"
    nodes: int = 2
    mesh: tuple[int, ...] = (4,)
    backend: Literal["aot_eager", "inductor"] = "aot_eager"
    mode: Literal["fully_shard", "hybrid_shard", "replicate"] = "fully_shard"
    dtype: Literal["bf16", "fp32"] = "bf16"
    device: Literal["cpu", "cuda"] = "cpu"
    client: Literal[
        "ours",
        "torchtitan",
        "torchtitan's model",
        "torchtitan's calls",
        "torchtitan's trainer",
        "accelerate's calls",
    ] = "ours"
    tensor: Literal["", "cut", "module", "module+sequence"] = ""
    layers: int = 2
    chunks: int = 1
    to: int = 0
    memory: float = 0.0
    microbatches: int = 1
    sync: Literal["each", "last"] = "each"
    gather_once: bool = False
    checkpoint: Literal["", "full", "selective"] = ""
    regional: bool = False
    graphs: int = 1
    chunk_bytes: int = CHUNK_BYTES
    expert: int = 1
    spmd: Literal["partial_dtensor", "spmd_types"] = "partial_dtensor"
    optimizer: str = ""
    max_norm: float = 0.0
    case: str = ""
    layout: bool = True
    unlike: str = ""

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh)

    @property
    def per_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def data_sizes(self) -> tuple[int, ...]:
        """Return the mesh of data parallelism alone: (shards) or (replicas, shards)."""
        return self.mesh[:1] if self.tensor else self.mesh

    @property
    def why_no_control(self) -> str:
        """Return why payload order can't change a bit here, or ``""`` if it can."""
        if self.case:
            return "the case has no control"
        if max(self.data_sizes) == 2:
            return "groups of two ranks: a + b is b + a"
        if self.device == "cuda":
            return "whether NCCL's order depends on the place in a buffer is up to the machine"
        return ""

    def why_left_out(self, models: Mapping[str, Model]) -> str:
        """Return what is missing to run the row, ``""`` if nothing is."""
        if self.case and self.device == "cuda":
            return "the case's models and meshes are on the CPU"
        missing = models[self.model].missing if self.model in models else []
        client = self.client.partition("'")[0]
        if client != "ours" and importlib.util.find_spec(client) is None:
            missing = [*missing, client]
        return f"needs {', '.join(missing)}, which is not installed" if missing else ""


PARALLELISM: dict[str, dict[str, Any]] = {
    "fsdp": {},
    # Replicates across nodes and shards inside them.
    "hsdp": {"mode": "hybrid_shard"},
    "fsdp+chunked_loss": {"chunks": 4},
    # Tensor parallelism inside nodes.
    "fsdp+tp": {"tensor": "cut"},
}
"""The matrix's kinds of parallelism, and the fields of a row that they set."""


def matrix(
    models: Mapping[str, Model],
    topologies: Sequence[str] = TOPOLOGIES,
    device: Literal["cpu", "cuda"] = "cpu",
    layers: int = 1,
) -> Iterator[Row]:
    """Yield models x topologies (nodes x ranks per node) x parallelism x dtypes x backends."""
    dtypes: tuple[Literal["bf16", "fp32"], ...] = ("bf16", "fp32")
    for topology in topologies:
        nodes, per_node = (int(n) for n in topology.split("x"))
        for model, about in models.items():
            for parallelism in about.parallelism:
                two = parallelism in ("hsdp", "fsdp+tp")
                if nodes == 1 and two:
                    continue
                mesh = (nodes, per_node) if two else (nodes * per_node,)
                for dtype in dtypes:
                    for backend in about.backends:
                        yield Row(
                            "/".join((model, topology, backend, parallelism, dtype)),
                            model,
                            nodes,
                            mesh,
                            backend,
                            dtype=dtype,
                            device=device,
                            layers=layers,
                            **PARALLELISM[parallelism],
                        )


_TITAN: dict[str, Any] = {"client": "torchtitan"}
_TENSOR: dict[str, Any] = {**_TITAN, "model": "tensor", "layout": False}
_TENSOR_SHARED = {**_TENSOR, "model": "tensor_shared"}
_OWN: dict[str, Any] = {"layers": 0, "chunk_bytes": 4096, "layout": False}
_MODEL: dict[str, Any] = {**_OWN, "client": "torchtitan's model"}
_CALLS: dict[str, Any] = {**_OWN, "client": "torchtitan's calls"}
_ACCELERATE: dict[str, Any] = {"client": "accelerate's calls", "layout": False}
_TRAINER: dict[str, Any] = {**_OWN, "client": "torchtitan's trainer", "layers": 2}
_SPLIT = (
    "one unit's gradients come in two graphs: two reductions, each with offsets of its own, where "
    "eager FSDP2 has one"
)


def _spmd_types() -> Iterator[Row]:
    """Return torchtitan's models on its default backend."""
    ways: dict[str, dict[str, Any]] = {
        "llama3": {},
        "llama3_hsdp": {"mesh": (2, 2), "mode": "hybrid_shard"},
        "llama3_tp": {"mesh": (2, 2), "tensor": "module"},
        "llama3_tp_sp": {"mesh": (2, 2), "tensor": "module+sequence"},
        "deepseek_v3": {},
        "deepseek_v3_experts": {"expert": 2},
    }
    for by, fields in (("model", _MODEL), ("trainer", _TRAINER)):
        for name, way in ways.items():
            model = "deepseek_v3" if name.startswith("deepseek") else "llama3"
            yield Row(f"spmd_types/{by}/{name}", model, spmd="spmd_types", **{**fields, **way})


def _steps() -> Iterator[Row]:
    """Return rows with clipping and the optimizer in the planned graphs."""
    clipped: dict[str, Any] = {"optimizer": "adamw", "max_norm": 0.5}
    yield from (Row(f"step/{name}", "llama", optimizer=name) for name in _OPTIMIZERS)
    yield from (
        Row(f"step/clip/{name}", "llama", optimizer=name, max_norm=0.5) for name in _OPTIMIZERS
    )
    yield Row("step/clip/hsdp", "llama", mesh=(2, 2), mode="hybrid_shard", **clipped)
    yield Row("step/clip/fsdp+tp", "llama", mesh=(2, 2), tensor="cut", **clipped)
    for model in ("moe", "uneven", "frozen", "unused"):
        yield Row(f"step/clip/{model}", model, layout=model != "unused", **clipped)
    for model in ("llama", "moe"):
        yield Row(f"step/clip/inductor/{model}", model, backend="inductor", **clipped)
    yield Row("step/clip/fp32", "llama", dtype="fp32", **clipped)
    yield Row("step/clip/accumulate", "llama", microbatches=3, **clipped)
    for model in ("hf_llama", "hf_qwen3"):
        yield Row(f"step/clip/{model}", model, layers=1, **clipped)
    # Norms are parameters of the whole mesh only with sequence parallelism.
    tensor = {**_TENSOR, **clipped, "mesh": (2, 2)}
    yield Row("step/clip/fsdp2_tp2_sp", tensor="module+sequence", **tensor)
    # Eager torch has no norm over two meshes. torchtitan's clipping adds those of each.
    yield Row("step/clip/deepseek_v3_experts", "deepseek_v3", expert=2, **_MODEL, **clipped)


def _muon() -> Iterator[Row]:
    """Return rows with Muon for matrices, against torch's on whole ones."""
    muon: dict[str, Any] = {"optimizer": "muon"}
    clipped = {**muon, "max_norm": 0.5}
    yield Row("muon/fsdp", "llama", **muon)
    yield Row("muon/clip", "llama", **clipped)
    yield Row("muon/hsdp", "llama", mesh=(2, 2), mode="hybrid_shard", **clipped)
    for model in ("moe", "uneven", "tied"):
        yield Row(f"muon/{model}", model, **clipped)
    experts = {**clipped, "optimizer": "stacked_muon"}
    yield Row("muon/experts", "moe", **experts)
    yield Row("muon/experts_hsdp", "moe", mesh=(2, 2), mode="hybrid_shard", **experts)
    yield Row("muon/deepseek_v3_experts", "deepseek_v3", expert=2, **_MODEL, **experts)
    yield Row("muon/inductor", "llama", backend="inductor", **clipped)
    yield Row("muon/accumulate", "llama", microbatches=3, **muon)
    tensor = {**_TENSOR, **clipped, "mesh": (2, 2)}
    yield Row("muon/fsdp2_tp2_sp", tensor="module+sequence", **tensor)


_OPTIMIZERS = ("adamw", "adamw_fused", "adamw_single", "adam", "sgd")


def _case(name: str, unlike: str = "") -> Row:
    return Row(f"everyday/{name}", case=name, unlike=unlike, layout=False)


ROWS: tuple[Row, ...] = (
    Row("torchtitan/fully_shard", **_TITAN),
    Row("torchtitan/replicate", mode="replicate", layout=False, **_TITAN),
    Row("torchtitan/hybrid_shard_2x4", mesh=(2, 4), mode="hybrid_shard", nodes=4, **_TITAN),
    Row("torchtitan/hybrid_shard_4x2", mesh=(4, 2), mode="hybrid_shard", nodes=4, **_TITAN),
    Row("torchtitan/fsdp2_tp2", mesh=(2, 2), tensor="module", **_TENSOR),
    Row("torchtitan/fsdp2_tp2_sp", mesh=(2, 2), tensor="module+sequence", **_TENSOR),
    Row("torchtitan/hybrid_shard_2x2", mesh=(2, 2), mode="hybrid_shard", **_TITAN),
    Row("torchtitan/fsdp4_tp2", nodes=4, mesh=(4, 2), tensor="module", **_TENSOR),
    Row("torchtitan/fsdp4_tp2_sp", nodes=4, mesh=(4, 2), tensor="module+sequence", **_TENSOR),
    Row("torchtitan/shared_activation", "translator", **_TITAN),
    Row("torchtitan/shared_activation_tp2", mesh=(2, 2), tensor="module", **_TENSOR_SHARED),
    Row("torchtitan/blocks", regional=True, layout=False, **_TITAN),
    Row("blocks", regional=True, layout=False),
    Row("checkpoint/every_block", checkpoint="full"),
    Row("checkpoint/selective", checkpoint="selective"),
    Row("accumulate/reduce_each", microbatches=3),
    # Units of 8-bit and bfloat16 members.
    Row("float8/fsdp", "float8"),
    Row("float8/hsdp", "float8", mesh=(2, 2), mode="hybrid_shard"),
    Row("float8/fsdp+tp", "float8", mesh=(2, 2), tensor="cut"),
    # The reduction is a graph of its own.
    Row("accumulate/reduce_last", microbatches=3, sync="last", graphs=2, layout=False),
    # And so are the gathers.
    Row(
        "accumulate/gather_once",
        microbatches=3,
        sync="last",
        gather_once=True,
        graphs=3,
        layout=False,
    ),
    Row("frozen_parameter", "frozen"),
    # An activation that several units read; the matrix has more.
    Row("shared_activation/inductor", "translator", backend="inductor"),
    # Eager FSDP2 has no place for a parameter without a gradient.
    Row("unused_parameter", "unused", layout=False),
    Row("branch", "branch", graphs=2, layout=False),
    Row("torchtitan_model/llama3", "llama3", **_MODEL),
    Row("torchtitan_model/deepseek_v3", "deepseek_v3", **_MODEL),
    Row("torchtitan_model/deepseek_v3_experts", "deepseek_v3", expert=2, **_MODEL),
    Row("fully_shard/titan_llama3", "llama3", **_CALLS),
    Row("fully_shard/titan_deepseek_v3", "deepseek_v3", **_CALLS),
    Row("fully_shard/titan_deepseek_v3_experts", "deepseek_v3", expert=2, **_CALLS),
    Row("fully_shard/accelerate", "hf_llama", **_ACCELERATE),
    Row("fully_shard/accelerate_tied", "hf_llama_tied", **_ACCELERATE),
    Row("fully_shard/accelerate_meta", "hf_llama", **_ACCELERATE),
    Row("graph_trainer/llama3", "llama3", **_TRAINER),
    Row("graph_trainer/deepseek_v3_experts", "deepseek_v3", expert=2, **_TRAINER),
    *_spmd_types(),
    *_steps(),
    *_muon(),
    *(
        Row(f"reshard_to/{model}", model, to=2)
        for model in ("llama", "moe", "vit", "uneven", "tied_chunked", "checkpointed")
    ),
    *(
        Row(f"memory/{model}/{bound}", model, memory=bound, layers=3)
        for model in ("llama", "moe", "vit", "translator")
        for bound in (1.0, 1.1, 1.25, 1.5, 2.0)
    ),
    *(  # not as eager's backward gathers
        Row(f"memory_to/{model}/{bound}", model, memory=bound, to=2, layers=3, layout=False)
        for model in ("llama", "moe", "vit", "translator")
        for bound in (1.05, 1.25)
    ),
    *map(_case, ("plain", "resume", "resume_on_fewer_ranks", "regional")),
    _case("regional_rest_in_a_unit", "parameters outside the compiled blocks are reduced singly"),
    _case("regional_planned_unlike", "blocks that share a graph are packed as the first one's"),
    _case("regional_block_twice", "a block that is called twice reduces twice"),
    *map(_case, ("graph_break", "graph_break_in_loop")),
    _case("graph_break_in_a_unit", _SPLIT),
    _case("graph_break_in_block_unit", _SPLIT),
    *map(_case, ("lengths", "lengths_dynamic", "evaluation_no_grad", "evaluation_inference_mode")),
    *map(_case, ("autocast", "optimizer_foreach", "optimizer_fused", "two_models")),
    _case("max_autotune"),
)
