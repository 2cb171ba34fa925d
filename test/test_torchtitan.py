"""torchtitan 0.3.0 from PyPI, unmodified: its SimpleFSDP executed, its own models traced.

Optional: `pip install torch==2.15.0 'torch_ext_bucketing[torchtitan]'`.

Collectives of a step, as traced, bucketed by transformer block, on 4 ranks:

    debug model          all-gathers     reduce-scatters
    LLaMA-3, 6 layers      87 -> 14          45 -> 8
    DeepSeek-V3, 6 layers  163 -> 14         83 -> 8
    its first 2 layers, EP  51 -> 8          27 -> 5
"""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

TORCHTITAN = "0.3.0"
HOW = "pip install torch==2.15.0 'torch_ext_bucketing[torchtitan]'"

try:
    found = importlib.metadata.version("torchtitan")
except importlib.metadata.PackageNotFoundError:
    found = None
if found is None:
    pytest.skip(f"torchtitan is not installed; to run these: {HOW}", allow_module_level=True)
if found != TORCHTITAN or not torch.__version__.startswith("2.15."):
    pytest.skip(
        f"these tests are for torchtitan {TORCHTITAN} on torch 2.15, found torchtitan {found} on "
        f"torch {torch.__version__}: {HOW}",
        allow_module_level=True,
    )

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: E402
from torchtitan.distributed.fsdp import (  # noqa: E402
    apply_fsdp_to_decoder,
    disable_fsdp_gradient_division,
)
from torchtitan.experiments.graph_trainer import simple_fsdp  # noqa: E402

from torch_ext_bucketing.fsdp.blocks import transformer_block_plan  # noqa: E402
from torch_ext_bucketing.fsdp.order import FSDPParamOrder  # noqa: E402
from torch_ext_bucketing.graph.collectives import KINDS, kind_of  # noqa: E402
from torch_ext_bucketing.passes.backends import backend  # noqa: E402
from torch_ext_bucketing.passes.base import Compilation  # noqa: E402
from torch_ext_bucketing.passes.bucketing import BucketUnits  # noqa: E402
from torch_ext_bucketing.passes.whole_step import whole_step_pass  # noqa: E402
from torch_ext_bucketing.recipes import recipe  # noqa: E402
from torch_ext_bucketing.rewrites.resharding import ReshardAfterForward  # noqa: E402
from torch_ext_bucketing.testing import text  # noqa: E402
from torch_ext_bucketing.testing.model import ModelConfig, Transformer  # noqa: E402
from torch_ext_bucketing.testing.ranks import Rank, run_ranks  # noqa: E402
from torch_ext_bucketing.testing.ring import RingTopology, init_ring_process_group  # noqa: E402
from torch_ext_bucketing.testing.training import count_collectives, digest  # noqa: E402


@pytest.fixture(autouse=True)
def _fresh_torchtitan(monkeypatch):
    """torchtitan keeps one class per module type, and with it the mesh and the policy of the first
    model that was sharded in this process: later models would silently get those."""
    monkeypatch.setattr(simple_fsdp, "_wrap_class_cache", {})
    torch._dynamo.reset()


# --- executed: SimpleFSDP on ranks ---------------------------------------------------
#
# torchtitan adds the ranks' gradients up and divides the loss by the tokens of all ranks, so both
# sides reduce with a sum: `disable_fsdp_gradient_division` there, `Partial("sum")` here.

RANKS, NODES, STEPS = 4, 2, 25
PARAM_DTYPE = torch.bfloat16
# Not torchtitan's default float32: there graph order gives the same weights in all 25 steps (sums
# of four bf16 gradients are nearly always exact in float32), so that nothing would be shown.
REDUCE_DTYPE = torch.bfloat16
BATCH, SEQ = 2, 32
KEPT = ("norm", "output")  # stay gathered until backward, as in torchtitan's apply_fsdp_to_decoder
MODEL = ModelConfig(
    vocab=text.VOCAB, dim=64, layers=2, heads=2, kv_heads=1, hidden=192, max_seq=SEQ
)


@dataclass
class Trained:
    """What one way to train left on one rank: digests after every step, collectives of a step."""

    digests: list[str]
    collectives: dict[str, int]
    payloads: list[tuple[str, tuple[str, ...]]]


def _train(rank: Rank) -> dict[str, Trained]:
    init_ring_process_group(
        rank.rank,
        rank.world_size,
        store=dist.FileStore(rank.store_path, rank.world_size),
        topology=RingTopology(
            ranks_per_node=RANKS // NODES, nodes=NODES, channels=8, chunk_bytes=512
        ),
        timeout=rank.timeout,
    )
    try:
        mesh = init_device_mesh("cpu", (RANKS,))
        return {
            "eager": _eager(rank, mesh),
            "fsdp order": _compiled(rank, mesh, payload_order="units"),
            "graph order": _compiled(rank, mesh, payload_order=None),
        }
    finally:
        dist.destroy_process_group()


def _eager(rank, mesh):
    model = Transformer(MODEL)
    settings = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(PARAM_DTYPE, REDUCE_DTYPE, cast_forward_inputs=False),
    }
    for unit in transformer_block_plan(model):
        modules = [model.get_submodule(name) for name in unit]
        fully_shard(modules, reshard_after_forward=unit != KEPT, **settings)
    fully_shard(model, **settings)
    disable_fsdp_gradient_division(model)
    order = FSDPParamOrder.from_fsdp(model)
    digests, counts = _steps(model, model, rank)
    return Trained(digests, counts, [("", unit) for unit in order.units])


def _compiled(rank, mesh, payload_order):
    simple_fsdp._wrap_class_cache.clear()  # see _fresh_torchtitan
    torch._dynamo.reset()
    policy = simple_fsdp.MixedPrecisionPolicy(PARAM_DTYPE, REDUCE_DTYPE)
    model = simple_fsdp.data_parallel(Transformer(MODEL), mesh, "fully_shard", policy)
    order = FSDPParamOrder.from_model(model, transformer_block_plan(model))
    compiler = backend(
        "aot_eager",
        passes=[ReshardAfterForward(keep=KEPT), BucketUnits(order, payload_order=payload_order)],
    )
    digests, _ = _steps(model, torch.compile(model, backend=compiler, fullgraph=True), rank)
    report = compiler.last_report()
    if len(compiler.reports) != 1 or report.unnamed or report.warnings:
        raise AssertionError(f"{len(compiler.reports)} compiles; {report}")
    return Trained(digests, report.collectives_after, _payloads(report.buckets))


def _steps(model, run, rank):
    """AdamW on real text."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    digests = []
    for step in range(STEPS):
        tokens, targets = text.batch(step, rank.rank, size=BATCH, seq=SEQ, seed=0)
        with count_collectives() as counts:
            logits = run(tokens)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
            (loss / (RANKS * targets.numel())).backward()
        optimizer.step()
        optimizer.zero_grad()
        digests.append(digest(model))
    return digests, counts


def _payloads(buckets):
    return [(b.kind, tuple(fqn for m in b.members for fqn in m.fqns)) for b in buckets]


@pytest.fixture(scope="module")
def trained():
    return run_ranks(_train, RANKS, timeout_s=300)


def _different_steps(one, other):
    return [i + 1 for i in range(STEPS) if one.digests[i] != other.digests[i]]


def test_simple_fsdp_trains_to_the_bits_of_fsdp2(trained):
    for rank, runs in enumerate(trained):
        assert len(set(runs["eager"].digests)) == STEPS
        different = _different_steps(runs["eager"], runs["fsdp order"])
        assert not different, f"rank {rank}: {len(different)} steps, from {different[0]} on"


def test_simple_fsdp_in_graph_order_does_not(trained):
    for runs in trained:
        assert runs["graph order"].collectives == runs["fsdp order"].collectives
        assert _different_steps(runs["eager"], runs["graph order"])


def test_simple_fsdp_sends_the_payloads_of_fsdp2(trained):
    for runs in trained:
        units = [unit for _, unit in runs["eager"].payloads if len(unit) > 1]
        sent = runs["fsdp order"].payloads
        assert sorted(p for kind, p in sent if kind == "reduce_scatter") == sorted(units)
        assert {p for kind, p in sent if kind == "all_gather"} == set(units)
        # FSDP2 also gathers the embedding again for its backward, which has no use for it.
        eager = dict(runs["eager"].collectives)
        assert eager.pop("all_reduce") == 0
        eager["all_gather"] -= 1
        assert runs["fsdp order"].collectives == eager == {"all_gather": 6, "reduce_scatter": 4}


# --- traced: torchtitan's own models -------------------------------------------------
#
# On fake tensors, so that neither attention nor the grouped matmul needs a kernel. Fake CPU, not
# fake CUDA: where there is no driver, autograd in a CUDA build of torch refuses fake CUDA tensors
# ("hasPrimaryContext expects a valid device index").


def _fsdp2_order(config, mesh):
    """From the param groups that torchtitan's own FSDP2 path makes of the model."""
    with torch.device("meta"):
        model = config.build()
    apply_fsdp_to_decoder(model, mesh, PARAM_DTYPE, REDUCE_DTYPE, pp_enabled=False)
    return FSDPParamOrder.from_fsdp(model)


def _trace(model, passes):
    """The report of a compile of forward and backward of a sharded model, made fake here."""
    from torchtitan.models.common.attention import VarlenMetadata

    # The shape environment is for the numbers of tokens per expert.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                fake = mode.from_tensor(value, static_shapes=True)
                module._parameters[name] = torch.nn.Parameter(fake)
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = mode.from_tensor(value, static_shapes=True)
    batch, seq = 2, 64
    compiler = backend("aot_eager", passes=passes)
    with mode, torch._dynamo.config.patch(capture_scalar_outputs=True):
        tokens = torch.randint(0, model.config.vocab_size, (batch, seq))
        positions = torch.arange(seq).expand(batch, seq)
        starts = torch.arange(0, batch * seq + 1, seq, dtype=torch.int32)
        documents = VarlenMetadata(starts, starts, seq, seq)
        compiled = torch.compile(model, backend=compiler, fullgraph=True)
        compiled(tokens, positions, documents).float().sum().backward()
    assert len(compiler.reports) == 1
    report = compiler.last_report()
    assert not report.unnamed
    assert not report.warnings
    for graph in report.graphs:
        assert not graph.uncovered
        assert not graph.ineligible
        assert not graph.splits
    return report


def _check_payloads(report, eager):
    """Buckets hold FSDP2's payloads; the embedding is one parameter, which needs no bucket."""
    embedding, several = ("tok_embeddings.weight",), [u for u in eager.units if len(u) > 1]
    assert sorted(eager.units) == sorted([*several, embedding])
    layers = [unit for unit in several if unit[0].startswith("layers.")]
    forward, backward = (report.graph(stage) for stage in ("forward", "backward"))
    assert sorted(_payloads(forward.buckets)) == sorted(("all_gather", u) for u in several)
    assert sorted(_payloads(backward.buckets)) == sorted(
        [("all_gather", u) for u in layers] + [("reduce_scatter", u) for u in several]
    )
    assert forward.collectives_after == {"all_gather": len(eager.units)}
    assert backward.collectives_after == {
        "all_gather": len(layers),
        "reduce_scatter": len(eager.units),
    }


@pytest.mark.parametrize(
    ("name", "gathers", "scatters"), [("llama3", 87, 45), ("deepseek_v3", 163, 83)]
)
def test_debug_model_is_bucketed_as_fsdp2_does(fake_world, name, gathers, scatters):
    mesh = init_device_mesh("cpu", (fake_world,), mesh_dim_names=("fsdp",))
    models = importlib.import_module(f"torchtitan.experiments.graph_trainer.{name}")
    config = models.model_registry("debugmodel", attn_backend="varlen").model
    eager = _fsdp2_order(config, mesh)
    model = config.build()
    plan = transformer_block_plan(model)
    assert plan.units == (
        ("tok_embeddings",),
        *((f"layers.{i}",) for i in range(6)),
        ("norm", "lm_head"),
    )
    order = FSDPParamOrder.from_model(model, plan)
    policy = simple_fsdp.MixedPrecisionPolicy(PARAM_DTYPE, REDUCE_DTYPE)
    simple_fsdp.data_parallel(model, mesh, "fully_shard", policy)
    passes = [ReshardAfterForward(keep=plan.units[-1]), BucketUnits(order)]
    report = _trace(model, passes)
    _check_payloads(report, eager)
    assert report.collectives_before == {"all_gather": gathers, "reduce_scatter": scatters}


def test_experts_on_a_mesh_of_their_own(fake_world, monkeypatch):
    """DeepSeek-V3's first dense and first MoE layer, experts over 2 x 2 ranks (FSDP x EP)."""
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims, utils
    from torchtitan.experiments.graph_trainer.common_utils import apply_simple_fsdp
    from torchtitan.experiments.graph_trainer.deepseek_v3 import model_registry

    parallelism = ParallelismConfig(expert_parallel_degree=2, spmd_backend="partial_dtensor")
    training = TrainingConfig()
    monkeypatch.setattr(parallel_dims, "device_type", "cpu")
    monkeypatch.setattr(utils, "_spmd_backend", parallelism.spmd_backend)
    dims = ParallelDims.from_config(parallelism, fake_world)
    dims.build_mesh()

    def build():
        config = model_registry("debugmodel", attn_backend="varlen").model
        config.layers = config.layers[:2]
        config.update_from_config(
            config=SimpleNamespace(parallelism=parallelism, training=training)
        )
        return config.build()

    with torch.device("meta"):
        wrapped = build()
    wrapped.parallelize(dims)
    apply_fsdp_to_decoder(
        wrapped,
        dims.get_mesh(["fsdp"]),
        PARAM_DTYPE,
        REDUCE_DTYPE,
        pp_enabled=False,
        ep_degree=dims.ep,
        edp_mesh=dims.get_mesh(["efsdp"]),
    )
    eager = FSDPParamOrder.from_fsdp(wrapped)

    model = build()
    plan = transformer_block_plan(model)
    order = FSDPParamOrder.from_model(
        model, plan, group_key=lambda fqn, _: ".inner_experts." in fqn
    )
    assert sorted(order.units) == sorted(eager.units)
    model.parallelize(dims)
    model = apply_simple_fsdp(model, parallel_dims=dims, training=training)
    passes = [ReshardAfterForward(keep=plan.units[-1]), BucketUnits(order)]
    report = _trace(model, passes)
    _check_payloads(report, eager)
    of_experts = {b.group_size for b in report.buckets if "inner_experts" in b.members[0].fqns[0]}
    assert of_experts == {2}
    assert report.collectives_before == {"all_gather": 51, "reduce_scatter": 27}


# --- the graph trainer ---------------------------------------------------------------


def _loss(pred, labels, global_valid_tokens):
    return F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten()) / global_valid_tokens


def test_the_passes_stand_in_the_graph_trainers_list(fake_world):
    """In the place of its bucketing pass: eager FSDP2's payloads, gathered again in backward as
    the trainer's memory policy wants it."""
    from torchtitan.config import ParallelismConfig
    from torchtitan.experiments.graph_trainer import make_fx_tracer, passes, trainer
    from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig
    from torchtitan.experiments.graph_trainer.llama3 import model_registry
    from torchtitan.models.common.attention import ScaledDotProductAttention

    mesh = init_device_mesh("cpu", (fake_world,), mesh_dim_names=("fsdp",))
    config = model_registry("debugmodel", attn_backend="varlen").model
    config.layers = config.layers[:1]
    config.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    eager = _fsdp2_order(config, mesh)
    policy = simple_fsdp.MixedPrecisionPolicy(PARAM_DTYPE, REDUCE_DTYPE)
    model = simple_fsdp.data_parallel(config.build(), mesh, "fully_shard", policy)
    tokens, count = torch.zeros(1, 8, dtype=torch.long), torch.tensor(8.0)
    step = trainer.make_fwd_bwd_step(model, _loss)
    traced = make_fx_tracer.minimal_fx_tracer(step, module=model)(tokens, tokens, count, {})
    settings = SimpleNamespace(
        model_spec=SimpleNamespace(model=config),
        compile=GraphTrainerCompileConfig(),
        parallelism=ParallelismConfig(),
        loss=None,
    )
    listed = passes.compile_time_passes(traced, settings, include_inductor=False)
    names = [getattr(p, "func", p).__name__ for p in listed]
    place = names.index("joint_transformer_block_bucketing_reordering_pass")
    compilation = Compilation()
    listed[place] = whole_step_pass(model, recipe(model), compilation)
    gm = passes.apply_graph_passes(traced.gm, traced.example_inputs, listed)
    report = compilation.report
    assert not report.unnamed
    assert not report.warnings
    units = [unit for unit in eager.units if len(unit) > 1]
    assert sorted(_payloads(report.buckets)) == sorted(
        (kind, unit) for unit in units for kind in ("all_gather", "all_gather", "reduce_scatter")
    )
    after = {kind: sum(kind_of(n) == kind for n in gm.graph.nodes) for kind in KINDS}
    assert after["reduce_scatter"] == len(eager.units)


# --- imported first ------------------------------------------------------------------


@pytest.mark.parametrize("module", ["train", "experiments.graph_trainer.trainer"])
def test_torchtitan_imported_first_works_or_says_what_to_do(module):
    """The package does not mind. The hooks do where torch's bucketing modules are imported, out of
    which the graph trainer's FSDP passes take functions."""
    code = f"""
import torchtitan.{module}
import torch_ext_bucketing as teb
try:
    print(teb.hooks.install().state)
except teb.hooks.ImportedTooEarlyError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    if done.stdout not in ("in memory\n", "on disk\n", "native\n"):
        assert "imported before torch_ext_bucketing.hooks.install(): torch._ind" in done.stdout
        assert "used by" in done.stdout
        assert "torchtitan" in done.stdout or "graph_trainer" not in module
