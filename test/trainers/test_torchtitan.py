"""Train and trace with torchtitan 0.3.0 from PyPI, unmodified."""

import contextlib
import importlib
import importlib.metadata
import json
from types import SimpleNamespace
from unittest.mock import Mock

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

import torch.nn.functional as F  # noqa: E402
from pages import code_of  # noqa: E402
from rank_pool import on_ranks  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import OptimizersContainer  # noqa: E402
from torchtitan.config import CompileConfig  # noqa: E402
from torchtitan.distributed import fsdp  # noqa: E402
from torchtitan.distributed.compile import apply_compile  # noqa: E402
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder  # noqa: E402
from torchtitan.experiments.graph_trainer import registry, simple_fsdp  # noqa: E402
from torchtitan.experiments.graph_trainer.passes import construct_default_graph_passes  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402

import torch_ext_bucketing  # noqa: E402
from benchmarks import parity, titan_train  # noqa: E402
from torch_ext_bucketing import hooks  # noqa: E402
from torch_ext_bucketing.errors import EagerOptimizerWarning  # noqa: E402
from torch_ext_bucketing.fsdp import FSDPModule  # noqa: E402
from torch_ext_bucketing.fsdp.plans import transformer_block_plan  # noqa: E402
from torch_ext_bucketing.fsdp.units import FSDPParamOrder  # noqa: E402
from torch_ext_bucketing.graph.nodes import KINDS, kind_of  # noqa: E402
from torch_ext_bucketing.passes.backends import backend  # noqa: E402
from torch_ext_bucketing.passes.base import Compilation  # noqa: E402
from torch_ext_bucketing.passes.bucketing import BucketByUnit  # noqa: E402
from torch_ext_bucketing.passes.pipeline import whole_step_pass  # noqa: E402
from torch_ext_bucketing.planner.resharding import ReshardAfterForward  # noqa: E402
from torch_ext_bucketing.planner.schedule.policy import PeakMemory  # noqa: E402
from torch_ext_bucketing.recipes import recipe  # noqa: E402
from torch_ext_bucketing.testing.ranks import Rank, run_ranks  # noqa: E402
from torch_ext_bucketing.trainers import torchtitan, torchtitan_eager  # noqa: E402
from torch_ext_bucketing.trainers.torchtitan import check_trainer  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.long]


@pytest.fixture(autouse=True)
def _fresh_torchtitan(monkeypatch):
    """Clear torchtitan's one class per module type, which keeps the first mesh that it was given."""
    monkeypatch.setattr(simple_fsdp, "_wrap_class_cache", {})
    torch._dynamo.reset()


# --- executed: SimpleFSDP on ranks ---------------------------------------------------

PARAM_DTYPE = REDUCE_DTYPE = torch.bfloat16
STEPS = 3


def test_simple_fsdp_trains_to_the_bits_and_sends_the_payloads_of_fsdp2(tmp_path, capsys):
    """In graph order it does not."""
    path = tmp_path / "rows.json"
    options = ["--rows", "torchtitan/fully_shard", "--steps", str(STEPS), "--json", str(path)]
    assert parity.main(options) == 0, capsys.readouterr()
    (row,) = json.loads(path.read_text())
    assert row["steps_equal"] == STEPS
    assert row["control_first_different_step"] == 1
    assert row["layout_differences"] == []
    sent = [traffic["reduce_scatter"][0] for traffic in row["after"].values()]
    assert sum(sent) == row["eager_collectives"]["reduce_scatter"]


# --- executed: its eager trainer's model, blocks compiled one by one --------------------


def train_in_chunks(rank, ours):
    """Train its debug model with its loss in chunks; return losses, weights and compiles."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    config = llama3.model_registry("debugmodel").model
    config.layers = config.layers[:3]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_weights()
    compiles = CompileConfig(enable=True, backend="aot_eager")
    apply_compile(model, compile_config=compiles, parallel_dims=SimpleNamespace(tp_enabled=False))
    with torchtitan_eager.install() if ours else contextlib.nullcontext():
        apply_fsdp_to_decoder(model, mesh, PARAM_DTYPE, torch.float32, pp_enabled=False)
    assert isinstance(model.layers["0"], FSDPModule) is ours
    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo does not multiply
    part = CrossEntropyLoss.Config(global_vocab_size=config.vocab_size)
    loss = ChunkedLossWrapper.Config(num_chunks=2, loss_fn=part).build(compile_config=compiles)
    loss.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    optimizer = torch.optim.AdamW(model.parameters())
    numbers, losses = torch.Generator().manual_seed(rank), []
    torch._dynamo.utils.counters.clear()
    for _ in range(STEPS):
        tokens = torch.randint(0, config.vocab_size, (2, 9), generator=numbers)
        found, _ = loss(model(tokens[:, :-1]), tokens[:, 1:], torch.tensor(32.0))
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.item())
    weights = {name: p.to_local().detach().clone() for name, p in model.named_parameters()}
    return losses, weights, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_eager_trainer_with_our_fully_shard_trains_to_the_bits_of_its_own():
    """The head is gathered and reduced once for all chunks, by settings that change in each step."""
    theirs, ours = (on_ranks(train_in_chunks, which) for which in (False, True))
    for (losses, weights, compiles), (own, other, made) in zip(theirs, ours, strict=True):
        assert own == losses
        assert other.keys() == weights.keys()
        assert all(torch.equal(other[name], w) for name, w in weights.items())
        assert made == compiles == 2  # a block, and the loss


def test_install_once_and_close():
    before = fsdp.fully_shard
    with torchtitan_eager.install():
        assert fsdp.fully_shard is not before
        with pytest.raises(RuntimeError, match="first close"):
            torchtitan_eager.install()
    assert fsdp.fully_shard is before


EAGER = "--ways eager sharded --gather bfloat16 --chunks 4 --compile aot_eager"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        EAGER,
        f"{EAGER} --model qwen3 --replicas 2",
        f"{EAGER} --model qwen3_moe",
        f"{EAGER} --tensor 2",
        f"{EAGER} --model deepseek_v3 --expert 2 --tensor 2",
        f"{EAGER.replace('aot_eager', 'inductor')} --microbatches 2",
    ],
)
def test_their_eager_train_py_trains_to_the_same_bits(capsys, options):
    assert titan_train.main(options.split()) == 0
    assert "10 of 10 eager" in capsys.readouterr().out


# --- traced: torchtitan's own models -------------------------------------------------
#
# On fake tensors, so that neither attention nor the grouped matmul needs a kernel. Fake CPU, not
# fake CUDA: without a driver, autograd in a CUDA build of torch refuses fake CUDA tensors
# ("hasPrimaryContext expects a valid device index").


def _payloads(buckets):
    return [(b.kind, tuple(fqn for m in b.members for fqn in m.fqns)) for b in buckets]


def _fsdp2_order(config, mesh):
    """Read the order from the param groups that torchtitan's own FSDP2 path makes of the model."""
    with torch.device("meta"):
        model = config.build()
    apply_fsdp_to_decoder(model, mesh, PARAM_DTYPE, REDUCE_DTYPE, pp_enabled=False)
    return FSDPParamOrder.from_fsdp(model)


def _trace(model, passes):
    """Report a compile of forward and backward of a sharded model, made fake here."""
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
    assert not report.warnings
    for graph in report.graphs:
        assert not graph.uncovered
        assert not graph.ineligible
        assert not graph.splits
    return report


def _check_payloads(report, eager):
    """Check that buckets hold FSDP2's payloads; the embedding is one parameter and needs no bucket."""
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
    ("name", "gathers", "scatters"), [("llama3", 31, 17), ("deepseek_v3", 51, 27)]
)
def test_debug_model_is_bucketed_as_fsdp2_does(fake_world, name, gathers, scatters):
    mesh = init_device_mesh("cpu", (fake_world,), mesh_dim_names=("fsdp",))
    models = importlib.import_module(f"torchtitan.experiments.graph_trainer.{name}")
    config = models.model_registry("debugmodel", attn_backend="varlen").model
    config.layers = config.layers[:2]
    eager = _fsdp2_order(config, mesh)
    model = config.build()
    plan = transformer_block_plan(model)
    assert plan.units == (
        ("tok_embeddings",),
        *((f"layers.{i}",) for i in range(2)),
        ("norm", "lm_head"),
    )
    order = FSDPParamOrder.from_model(model, plan)
    policy = simple_fsdp.MixedPrecisionPolicy(PARAM_DTYPE, REDUCE_DTYPE)
    simple_fsdp.data_parallel(model, mesh, "fully_shard", policy)
    passes = [ReshardAfterForward(keep=plan.units[-1]), BucketByUnit(order)]
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
    order = FSDPParamOrder.from_model(model, plan)
    model.parallelize(dims)
    model = apply_simple_fsdp(model, parallel_dims=dims, training=training)
    passes = [ReshardAfterForward(keep=plan.units[-1]), BucketByUnit(order)]
    report = _trace(model, passes)
    _check_payloads(report, eager)
    of_experts = {b.group_size for b in report.buckets if "inner_experts" in b.members[0].fqns[0]}
    assert of_experts == {2}
    assert report.collectives_before == {"all_gather": 51, "reduce_scatter": 27}


# --- the graph trainer ---------------------------------------------------------------


def _loss(pred, labels, global_valid_tokens):
    return F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten()) / global_valid_tokens


def test_the_passes_stand_in_the_graph_trainers_list(fake_world):
    """Buckets have eager FSDP2's payloads; the trainer's memory policy chooses what is gathered again."""
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
    assert not report.warnings
    units = [unit for unit in eager.units if len(unit) > 1]
    assert sorted(_payloads(report.buckets)) == sorted(
        (kind, unit) for unit in units for kind in ("all_gather", "all_gather", "reduce_scatter")
    )
    after = {kind: sum(kind_of(n) == kind for n in gm.graph.nodes) for kind in KINDS}
    assert after["reduce_scatter"] == len(eager.units)
    _check_pipeline(model, traced, settings, names[place])


def _check_pipeline(model, traced, settings, replaced):
    """Check that a config's pipeline is torchtitan's list with this one pass as its bucketing."""

    def names_of(listed):
        return [getattr(p, "func", p).__name__ for p in listed]

    trainer = Mock(config=settings, model_parts=[model], optimizers=[])
    trainer.parallel_dims.pp_enabled = True
    with pytest.raises(ValueError, match="inductor_compilation = 'regional', got"):
        registry.POST_INIT_HOOKS["torch_ext_bucketing"](trainer)
    name = torchtitan.pass_pipeline(PeakMemory(gib=1e-6))
    with pytest.raises(ValueError, match=r"gib=1e-06.* is less than a rank needs"):
        registry.POST_INIT_HOOKS[name](trainer)
    trainer.parallel_dims.pp_enabled = False
    with pytest.raises(ValueError, match=r"use config.compile.memory_policy"):
        registry.POST_INIT_HOOKS[name](trainer)
    with pytest.raises(ValueError, match="is in GiB, got"):
        torchtitan.pass_pipeline(PeakMemory(ratio=2))
    with pytest.raises(ValueError, match="before the trainer is built"):
        torchtitan.graph_passes(traced, settings)
    registry.POST_INIT_HOOKS["torch_ext_bucketing"](trainer)
    ours = names_of(registry.PASS_PIPELINE_REGISTRY["torch_ext_bucketing"](traced, settings))
    theirs = names_of(construct_default_graph_passes(traced, settings))
    assert ours == ["torch_ext_bucketing_pass" if n == replaced else n for n in theirs]
    settings.compile.ep_overlap.enabled = True
    chunked = names_of(torchtitan.graph_passes(traced, settings))
    assert "ep_overlap_chunk_pass" in chunked
    assert "ep_overlap_schedule_pass" not in chunked
    settings.compile.precompile_artifact_dir = "there"
    with pytest.raises(ValueError, match="precompile_artifact_dir"):
        torchtitan.graph_passes(traced, settings)


def test_the_documented_config(fake_world):
    """Built by torchtitan, it names a pipeline that torchtitan has."""
    scope = {}
    code, _ = code_of("torchtitan")
    exec(code, scope)
    assert scope["llama3_8b"]().compile.pass_pipeline in registry.PASS_PIPELINE_REGISTRY


def test_the_documented_eager_config():
    """Its trainer compiles each block, and shards by our function."""
    _, code = code_of("torchtitan")
    scope, before = {}, fsdp.fully_shard
    try:
        exec(code, scope)
        assert fsdp.fully_shard is torch_ext_bucketing.fsdp.fully_shard
    finally:
        fsdp.fully_shard = before
    assert scope["llama3_8b"]().compile.enable


def _trainer(*optimizers, pipeline=False, without=("cudagraph_pass",)):
    steps = object.__new__(OptimizersContainer)
    steps.optimizers = list(optimizers)
    settings = SimpleNamespace(compile=SimpleNamespace(disable_passes=list(without)))
    dims = SimpleNamespace(pp_enabled=pipeline)
    return SimpleNamespace(optimizers=steps, config=settings, parallel_dims=dims)


def test_optimizers_that_no_graph_can_update_with_are_named():
    weights = [torch.nn.Parameter(torch.ones(2))]
    assert check_trainer(_trainer(torch.optim.AdamW(weights)))
    with pytest.warns(EagerOptimizerWarning, match="Adagrad has no rule"):
        assert not check_trainer(_trainer(torch.optim.Adagrad(weights)))


def test_an_optimizer_in_the_graph_needs_one_graph_that_reads_learning_rates():
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="pipeline"):
        check_trainer(_trainer(adam, pipeline=True))
    with pytest.raises(ValueError, match="disable_passes"):
        check_trainer(_trainer(adam, without=()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "ranks", "equal"),
    [
        ("--ways ours killed --gather bfloat16", 2, "10 of 10 ours"),
        (
            "--ways eager ours --gather float32 --pipeline Interleaved1F1B:4 --mib 25",
            4,
            "10 of 10 eager",
        ),
        ("--ways theirs step --gather float32 --microbatches 2", 2, "10 of 10 theirs"),
    ],
)
def test_their_train_py_trains_to_the_same_bits(monkeypatch, capsys, options, ranks, equal):
    """Killed and resumed, in pipelines, and with clipping and the optimizer in the graph."""
    monkeypatch.setattr(titan_train, "RANKS", ranks)
    assert titan_train.main(options.split()) == 0
    assert equal in capsys.readouterr().out


# --- imported first ------------------------------------------------------------------


def install_after(rank: Rank, module: str) -> str:
    importlib.import_module(f"torchtitan.{module}")
    try:
        return hooks.install().state
    except hooks.ImportedTooEarlyError as error:
        return str(error)


@pytest.mark.parametrize("module", ["train", "experiments.graph_trainer.trainer"])
def test_torchtitan_imported_first_works_or_says_what_to_do(module):
    """The hooks name the modules of torch that torchtitan imports too early."""
    (found,) = run_ranks(install_after, 1, module, timeout_s=120)
    if found not in ("in memory", "native"):
        assert "imported before torch_ext_bucketing.hooks.install(): torch._ind" in found
