"""Train with accelerate, its Trainers and TRL on CPU ranks, unmodified, beside eager FSDP2."""

import functools
import hashlib
import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

HOW = "pip install 'torch_ext_bucketing[trainers]'"
missing = [n for n in ("accelerate", "transformers") if importlib.util.find_spec(n) is None]
if missing:
    pytest.skip(f"{' and '.join(missing)} not installed; to run: {HOW}", allow_module_level=True)

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from accelerate.utils import DynamoBackend  # noqa: E402
from pages import code_of  # noqa: E402

from torch_ext_bucketing.errors import NotBucketedWarning  # noqa: E402
from torch_ext_bucketing.testing.ranks import Rank, run_ranks  # noqa: E402
from torch_ext_bucketing.trainers import accelerate  # noqa: E402

pytestmark = pytest.mark.long

VOCABULARY, SEQUENCE, STEPS = 64, 12, 4


def join(rank: Rank) -> None:
    """Make the process group and accelerate's state, as a launcher and a device would."""
    me, ranks = str(rank.rank), str(rank.world_size)
    os.environ.update(RANK=me, LOCAL_RANK=me, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", HF_HUB_OFFLINE="1")
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo", f"file://{rank.store_path}", rank=rank.rank, world_size=rank.world_size
        )
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerate.fsdp2_on_cpu()


def llama(**settings):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **tokens, **settings}))


def samples(count):
    numbers = torch.Generator().manual_seed(1)
    ids = [torch.randint(2, VOCABULARY, (SEQUENCE,), generator=numbers) for _ in range(count)]
    return [{"input_ids": one, "labels": one} for one in ids]


def shards_of(model):
    """Hash this rank's shards with their names."""
    found = hashlib.sha256()
    for name, param in sorted(model.named_parameters()):
        found.update(name.encode())
        found.update(param.to_local().detach().float().numpy().tobytes())
    return found.hexdigest()


def collectives(installed):
    """Return the numbers of collectives of each compile that has some, after bucketing."""
    of = [report.collectives_after for made in installed.backends for report in made.reports]
    return [numbers for numbers in of if numbers]


def log_of(trainer):
    names = ("loss", "grad_norm", "eval_loss", "entropy", "mean_token_accuracy")
    return [{n: entry[n] for n in names if n in entry} for entry in trainer.state.log_history]


# --- transformers.Trainer ------------------------------------------------------------


def by_trainer(rank: Rank, ours: bool, folder: str, model=None, resume=None, **settings):
    """Return the shards' hash, the log and the buckets of a ``Trainer``'s run."""
    from transformers import Trainer, TrainingArguments

    join(rank)
    installed = accelerate.install("aot_eager") if ours else None
    arguments = TrainingArguments(
        **{
            **{"output_dir": folder, "fsdp": True, "per_device_train_batch_size": 2},
            **{"max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", "use_cpu": True},
            **{"report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False},
            **{"accelerator_config": {"use_configured_state": True}, **settings},
        }
    )
    trainer = Trainer(
        llama(**(model or {})), arguments, train_dataset=samples(64), eval_dataset=samples(4)
    )
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.accelerator.is_fsdp2
    assert isinstance(trainer.model_wrapped, accelerate.fsdp.FSDPModule) is ours
    made = collectives(installed) if ours else []
    return shards_of(trainer.model), log_of(trainer), made


def both(rank: Rank, function, folder: str, **settings):
    """Run a function on eager FSDP2, then on ours: importing transformers takes seconds."""
    return [function(rank, ours, f"{folder}/{ours}", **settings) for ours in (False, True)]


ACCUMULATES = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}


def test_trainer_trains_to_the_weights_of_eager_fsdp2(tmp_path):
    """With clipping, microbatches that are reduced once, evaluation, and a checkpoint."""
    settings = {"save_strategy": "steps", "save_steps": 2, "model": {"num_hidden_layers": 1}}
    run = functools.partial(both, **settings, **ACCUMULATES)
    found = run_ranks(run, 2, by_trainer, str(tmp_path), timeout_s=240)
    theirs, ours = zip(*found, strict=True)
    assert [r[:2] for r in ours] == [r[:2] for r in theirs]
    evaluated = [entry for entry in ours[0][1] if "eval_loss" in entry]
    assert len(evaluated) == 2
    for _, _, made in ours:
        # Of embedding, layer, norm with head: the root has no parameters of its own.
        # Microbatches gather forward, and the layer again backward; their sum is reduced once.
        assert {"all_gather": 3 + 1} in made
        assert {"reduce_scatter": 3} in made
        assert {"all_gather": 3} in made  # evaluation
    weights = tmp_path / "True" / f"checkpoint-{STEPS}" / "model.safetensors"
    assert weights.exists()


# transformers builds a mask when its model is traced, and then repeats keys and values for grouped
# queries, which rounds otherwise in bf16: "eager" attention has one way.
BF16 = {"bf16": True, "model": {"attn_implementation": "eager"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({**BF16, "gradient_accumulation_steps": 2}, id="bf16"),
        pytest.param({"gradient_checkpointing": True}, id="checkpoints"),
        pytest.param(
            {"fsdp_config": {"activation_checkpointing": True, "reshard_after_forward": False}},
            id="wrapped_checkpoints",
        ),
        pytest.param({"model": {"tie_word_embeddings": True}}, id="tied"),
        pytest.param({"fsdp_config": {"cpu_ram_efficient_loading": True}}, id="loads_on_one_rank"),
    ],
)
def test_trainer_with(settings, tmp_path):
    run = functools.partial(both, **settings)
    theirs, ours = zip(*run_ranks(run, 2, by_trainer, str(tmp_path), timeout_s=240), strict=True)
    assert [r[:2] for r in ours] == [r[:2] for r in theirs]
    assert ours[0][2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_trainer_goes_on_from_a_checkpoint_of_eager_fsdp2(kind, tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 2, "fsdp_config": {"state_dict_type": kind}}
    resume = str(tmp_path / "checkpoint-2")
    run = functools.partial(run_ranks, timeout_s=240)
    theirs = run(functools.partial(by_trainer, **saves), 2, False, str(tmp_path))
    ours = run(functools.partial(by_trainer, resume=resume, **saves), 2, True, str(tmp_path / "b"))
    assert [shards for shards, *_ in ours] == [shards for shards, *_ in theirs]


# --- Accelerator ---------------------------------------------------------------------


def by_loop(
    rank: Rank, ours: bool, folder: str, kind: str, load: str | None, regional: bool = False
):
    """Train, save after two steps, and train on; or load that and train on."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import TorchDynamoPlugin

    join(rank)
    installed = accelerate.install("aot_eager") if ours else None
    accelerator = Accelerator(
        dynamo_plugin=TorchDynamoPlugin(use_regional_compilation=regional),
        gradient_accumulation_steps=2,
        mixed_precision="bf16",
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type=kind,
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=True,
        ),
    )
    model = llama(attn_implementation="eager")
    if rank.rank:  # rank 0 alone has the weights
        for param in model.parameters():
            torch.nn.init.zeros_(param)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    norms = []

    def train(first: int, last: int) -> None:
        data = samples(4 * last)
        for sample in data[4 * first + rank.rank :: 2]:
            with accelerator.accumulate(model):
                batch = {name: value[None] for name, value in sample.items()}
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    norms.append(norm.full_tensor().item())
                optimizer.step()
                optimizer.zero_grad()

    if load is None:
        train(0, 2)
        accelerator.save_state(folder)
    else:
        accelerator.load_state(load)
    train(2, 4)
    accelerator.save_model(model, f"{folder}/model")
    if regional:
        assert not installed.backends
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"]
    names = [name for name, _ in model.named_parameters()]
    return shards_of(model), norms[-2:], names


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_accelerator_trains_saves_and_loads_as_with_eager_fsdp2(kind, tmp_path):
    """Each loads what the other one saved; ``save_model`` writes whole tensors under own names."""
    from safetensors.torch import load_file

    run = functools.partial(run_ranks, by_loop, 2, timeout_s=240)
    a, b, c, d = (str(tmp_path / name) for name in "abcd")
    theirs, ours = run(False, a, kind, None), run(True, b, kind, None)
    assert ours == theirs
    assert run(True, c, kind, a) == run(False, d, kind, b) == theirs
    models = [load_file(Path(f, "model", "model.safetensors")) for f in (a, b, c, d)]
    whole = llama().state_dict()
    for model in models:
        assert model.keys() == whole.keys()
        assert all(torch.equal(model[n], models[0][n]) for n in whole)
        assert all(model[n].shape == whole[n].shape for n in whole)


@pytest.mark.slow
def test_blocks_that_accelerate_compiles_one_by_one_train_to_the_weights_of_eager_fsdp2(tmp_path):
    """``use_regional_compilation``, with microbatches that are reduced once."""
    run = functools.partial(run_ranks, by_loop, 2, timeout_s=240)
    kind = "SHARDED_STATE_DICT"
    theirs = run(False, str(tmp_path / "a"), kind, None)
    assert run(True, str(tmp_path / "b"), kind, None, True) == theirs


def test_passes_for_blocks_that_are_compiled_one_by_one_are_refused():
    plugin = SimpleNamespace(backend=DynamoBackend.NO, use_regional_compilation=True)
    accelerator = SimpleNamespace(state=SimpleNamespace(dynamo_plugin=plugin))
    with (
        accelerate.install(passes=lambda model: []) as installed,
        pytest.raises(ValueError, match="leave out the passes"),
    ):
        installed._shard(None, accelerator)


# --- TRL -----------------------------------------------------------------------------


def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *map(str, range(2, VOCABULARY))]
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def by_sft(rank: Rank, ours: bool, folder: str):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    join(rank)
    installed = accelerate.install("aot_eager") if ours else None
    lengths = (SEQUENCE - i % 5 for i in range(64))  # padded in a batch
    texts = [
        " ".join(str(int(i)) for i in sample["input_ids"][:n])
        for sample, n in zip(samples(64), lengths, strict=True)
    ]
    arguments = SFTConfig(
        **{"output_dir": folder, "fsdp": True, "per_device_train_batch_size": 2, "bf16": False},
        **{"max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", "use_cpu": True},
        **{"report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False},
        **{"accelerator_config": {"use_configured_state": True}, "max_length": SEQUENCE},
        gradient_accumulation_steps=2,
    )
    trainer = SFTTrainer(
        llama(),
        arguments,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
    )
    trainer.train()
    assert trainer.accelerator.is_fsdp2
    return shards_of(trainer.model), log_of(trainer), collectives(installed) if ours else []


@pytest.mark.slow
def test_trl_trains_to_the_weights_of_eager_fsdp2(tmp_path):
    """Its loss and its metrics, too; its head breaks the graph after the layers."""
    pytest.importorskip("trl", reason=f"to run: {HOW}")
    theirs, ours = zip(*run_ranks(both, 2, by_sft, str(tmp_path), timeout_s=300), strict=True)
    assert [r[:2] for r in ours] == [r[:2] for r in theirs]
    assert "entropy" in ours[0][1][0]
    assert ours[0][2]


# --- errors, and the page ------------------------------------------------------------


def test_install_once_and_remove():
    before = {name: getattr(Accelerator, name) for name in ("prepare", "no_sync", "backward")}
    with accelerate.install() as installed:
        assert Accelerator.backward is not before["backward"]
        with pytest.raises(RuntimeError, match="first remove"):
            accelerate.install()
    installed.remove()
    assert before == {name: getattr(Accelerator, name) for name in before}
    with pytest.raises(ValueError, match="'eager'"):
        accelerate.install("eager")
    with pytest.raises(TypeError, match="passes must be"):
        accelerate.install(passes=[])


def test_a_model_that_is_not_sharded_is_named():
    """accelerate takes another way in silence, such as on CPU ranks."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with accelerate.install(), pytest.warns(NotBucketedWarning, match="a Linear by .*not by FSDP2"):
        Accelerator(cpu=True).prepare(torch.nn.Linear(2, 2))
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(RuntimeError, match="no process group"):
        accelerate.fsdp2_on_cpu()
    AcceleratorState._reset_state(reset_partial_state=True)


def by_page(rank: Rank, folder: str) -> str:
    join(rank)
    (script,) = code_of("accelerate")
    scope = {"__name__": "train"}
    os.chdir(folder)
    exec(script, scope)
    return shards_of(scope["main"](["--steps", "2", "--compiler", "aot_eager"]))


@pytest.mark.slow
def test_the_documented_script(tmp_path):
    assert len(set(run_ranks(by_page, 2, str(tmp_path), timeout_s=240))) == 2
    assert (tmp_path / "trained" / "model.safetensors").exists()
