"""Run torchtitan's own ``train.py`` on four CPU ranks: its debug model, killed and resumed.

    python -m benchmarks.titan_train                    # torch 2.15, torchtitan 0.3.0
    python -m benchmarks.titan_train --ways ours killed --gather bfloat16 --json out.json
    python -m benchmarks.titan_train --ways eager ours --gather float32 --pipeline ZBVZeroBubble:4
    python -m benchmarks.titan_train --ways eager sharded --model qwen3 --chunks 4 --replicas 2

Two layers of its LLaMA-3 debug model, gathered in fp32 and in bf16 and reduced in fp32, are trained
for 10 steps by

- ``eager``: its trainer, FSDP2, on its default backend;
- ``sharded``: its trainer with our ``fully_shard``;
- ``theirs``: its graph trainer with its own pass pipeline;
- ``ours``: the same with ours;
- ``step``: the same, which clips and updates in the graph;
- ``killed``: the same, all ranks killed (SIGKILL) after step 5, and started again, from the
  last whole checkpoint.

Every weight must be the same after each step, bit for bit. But gathered in bf16, ``eager``
need not be like the others: autograd makes the gradient of a norm's bf16 weight in fp32 on CPU,
which eager FSDP2 of torch 2.15 reduces as it is, and torchtitan's SimpleFSDP rounded to bf16.

``--tensor`` is the number of ranks that share a layer, and ``--expert`` of those that share the
experts, of torchtitan's debug model of DeepSeek-V3 then, its first two layers. Experts multiply in
bf16, so it needs ``--gather bfloat16``.

In the ways without graph trainer, ``--compile`` compiles each block alone, with ``fullgraph=True``
(torchtitan's ``compile.enable``), and ``--chunks`` is the number of chunks of the loss: the head is
gathered and reduced once for all, by settings that torchtitan changes in every step.

``--pipeline`` names a schedule and its number of microbatches: two ranks of two stages each,
sharded over two. torchtitan's stages of graphs (0.3.0) keep what a forward returned where torch
2.15 has no place for it any more; here they get one.

torchtitan looks for an accelerator. Before its ``train.py`` runs, each rank is told here that a CPU
is one.

Exit status: 0, or 1 if anything was otherwise.
"""

import argparse
import gc
import hashlib
import importlib
import json
import logging
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch_ext_bucketing.reports.base import columns

from .command import add_json, document_of, parser_of, write_results

EAGER_WAYS = ("eager", "sharded")
WAYS = (*EAGER_WAYS, "theirs", "ours", "step", "killed")
MODELS = {
    "llama3": "llama3_debugmodel",
    "qwen3": "qwen3_debugmodel",
    "qwen3_moe": "qwen3_moe_debug",
    "deepseek_v3": "deepseek_v3_debugmodel",
}
GATHERED = ("float32", "bfloat16")
RANKS, STEPS, KILLED = 4, 10, 5
LIMIT_S = 600
MIB, MODEL, CHUNKS = "TITAN_TRAIN_MIB", "TITAN_TRAIN_MODEL", "TITAN_TRAIN_CHUNKS"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = parser_of("python -m benchmarks.titan_train", __doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--gather", nargs="+", choices=GATHERED, default=GATHERED)
    parser.add_argument("--pipeline", metavar="SCHEDULE:MICROBATCHES", default="")
    parser.add_argument("--microbatches", type=int, default=1, help="of two samples")
    parser.add_argument("--model", choices=MODELS, help="llama3, or deepseek_v3 with --expert")
    parser.add_argument("--replicas", type=int, default=1, help="of the shards")
    parser.add_argument("--tensor", type=int, default=1, help="ranks of tensor parallelism")
    parser.add_argument("--expert", type=int, default=1, help="ranks of experts, of DeepSeek-V3")
    parser.add_argument("--chunks", type=int, default=1, help="of the loss")
    parser.add_argument("--compile", metavar="BACKEND", help="of each block, in eager ways")
    parser.add_argument("--mib", type=float, help="bounds what a rank of ours holds")
    add_json(parser)
    args = parser.parse_args(argv)
    environment = {} if args.mib is None else {MIB: str(args.mib)}
    environment[MODEL] = args.model or ("llama3" if args.expert == 1 else "deepseek_v3")
    environment[CHUNKS] = str(args.chunks)
    if args.chunks > 1 and not set(args.ways) <= set(EAGER_WAYS):
        parser.error("--chunks is for the ways eager and sharded: graph trainers round otherwise")
    rows: list[dict[str, Any]] = []
    for gathered in args.gather:
        ways: list[str] = []
        with tempfile.TemporaryDirectory() as name:
            _assets(Path(name))
            for way in args.ways:
                began = time.monotonic()
                given = _given(gathered, args)
                if way in EAGER_WAYS and args.compile:
                    given += ["--compile.enable", "--compile.backend", args.compile]
                losses, stages = _run(Path(name), way, given, environment)
                row = {"way": way, "gathered": gathered, "losses": losses, "stages": stages}
                row["seconds"] = round(time.monotonic() - began)
                row["equal"] = {w: _equal_steps(Path(name), way, w) for w in ways}
                ways.append(way)
                rows.append(row)
                print(row, file=sys.stderr, flush=True)
    document = document_of("python -m benchmarks.titan_train", argv) | {"rows": rows}
    table = [["gathered in", "way", f"loss of step {STEPS}", "steps equal to", "seconds"]]
    for row in rows:
        equal = ", ".join(f"{n} of {STEPS} {w}" for w, n in row["equal"].items())
        loss = str(row["losses"].get(STEPS))
        table.append([row["gathered"], row["way"], loss, equal, str(row["seconds"])])
    lines = "".join(f"\n{line}" for row in rows for line in row["stages"])
    write_results(args.json, document, f"{columns(table)}{lines}")
    return 0 if all(map(_as_it_must_be, rows)) else 1


def _as_it_must_be(row: dict[str, Any]) -> bool:
    is_eager, in_fp32 = row["way"] in EAGER_WAYS, row["gathered"] == "float32"
    must = [n for w, n in row["equal"].items() if in_fp32 or (w in EAGER_WAYS) == is_eager]
    return len(row["losses"]) == STEPS and all(n == STEPS for n in must)


def _assets(folder: Path) -> None:
    """Write a tokenizer of bytes and a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from torch_ext_bucketing.testing import text

    (folder / "text").mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*letters, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    lines = (json.dumps({"text": t}) for t in text.corpus().decode(errors="replace").split("\n\n"))
    (folder / "text" / "text.json").write_text("\n".join(lines))


def _given(gathered: str, args: argparse.Namespace) -> list[str]:
    """Return the options of ``train.py``."""
    given = ["--training.mixed_precision_param", gathered]
    if args.microbatches > 1:
        batch = 2 * RANKS // args.tensor * args.microbatches
        given += ["--training.global_batch_size", str(batch)]
    degrees = {
        "data_parallel_replicate": args.replicas,
        "tensor_parallel": args.tensor,
        "expert_parallel": args.expert,
    }
    for name, degree in degrees.items():
        if degree > 1:
            given += [f"--parallelism.{name}_degree", str(degree)]
    if args.pipeline:
        schedule, of_stages = args.pipeline.split(":")
        given += ["--parallelism.pipeline_parallel_degree", "2"]
        given += ["--parallelism.pipeline_parallel_schedule", schedule]
        given += ["--training.local_batch_size", of_stages]
    return given


def _run(
    folder: Path, way: str, given: list[str], environment: dict[str, str]
) -> tuple[dict[int, float], list[str]]:
    """Run ``train.py`` on all ranks, twice if it is killed; return the result of :func:`_start`."""
    if way != "killed":
        return _start(folder, way, way, given, environment)
    losses, _ = _start(folder, way, "ours", given, environment, KILLED)
    again, stages = _start(folder, way, "ours", given, environment)
    return losses | again, stages


def _start(
    folder: Path,
    way: str,
    config: str,
    given: list[str],
    environment: dict[str, str],
    killed: int | None = None,
) -> tuple[dict[int, float], list[str]]:
    """Run ``train.py`` on all ranks under a config function of this module."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "-m", __spec__.name, "--rank"]
    command += ["--module", "benchmarks.titan_train", "--config", config]
    command += ["--hf_assets_path", str(folder), "--dataloader.dataset_path", str(folder / "text")]
    command += ["--dump_folder", str(folder / way), *given]
    losses: dict[int, float] = {}
    lines, ranks = [], []
    stages: set[str] = set()
    process = subprocess.Popen(
        command,
        env=os.environ | environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            plain = re.sub(r"\x1b\[\d*m", "", line)
            if found := re.search(r"^this rank is process (\d+)", plain):
                ranks.append(int(found[1]))
            if found := re.search(r"step: *(\d+) +loss: *([\d.]+)", plain):
                losses[int(found[1])] = float(found[2])
                if killed in losses:
                    return losses, []
            if found := re.search(r"(pipeline stage \d+: .*)", plain):
                stages.add(found[1])
        if process.wait(LIMIT_S):
            raise RuntimeError(f"{way} failed:\n{''.join(lines[-60:])}")
    finally:
        if process.poll() is None:
            for pid in (process.pid, *ranks):
                os.kill(pid, signal.SIGKILL)
            process.wait()
    return losses, sorted(stages)


def _equal_steps(folder: Path, way: str, other: str) -> int:
    """Count the steps after which all weights of two ways are the same."""
    return sum(
        _weights(folder / way, n) == _weights(folder / other, n) for n in range(1, STEPS + 1)
    )


def _weights(out: Path, step: int) -> dict[str, bytes]:
    """Hash the weights in a checkpoint whose names the last one, of the model alone, has."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    path = out / "checkpoint"
    names = set(FileSystemReader(path / f"step-{STEPS}").read_metadata().state_dict_metadata)
    found = _load_state_dict_from_keys(names, checkpoint_id=path / f"step-{step}")
    return {
        name: hashlib.sha256(w.contiguous().flatten().view(torch.uint8).numpy()).digest()
        for name, w in found.items()
    }


# --- in a rank: configs, and a CPU for an accelerator --------------------------------


def eager() -> Any:
    """Return the config of the debug model under torchtitan's trainer: eager FSDP2."""
    name = os.environ.get(MODEL, "llama3")
    folder = name.removesuffix("_moe")
    registry = importlib.import_module(f"torchtitan.models.{folder}.config_registry")
    return _small(getattr(registry, MODELS[name])())


def sharded() -> Any:
    """Return the config of the same with our ``fully_shard``."""
    config = eager()
    importlib.import_module("torch_ext_bucketing.trainers.torchtitan_eager").install()
    return config


def theirs() -> Any:
    """Return the config of the same under its graph trainer."""
    name = os.environ.get(MODEL, "llama3")
    module = f"torchtitan.experiments.graph_trainer.{name}.config_registry"
    registry = importlib.import_module(module)
    config = _small(getattr(registry, f"graph_trainer_{name}_debugmodel")())
    config.compile.disable_passes = ["cudagraph_pass"]
    return config


def ours(optimizer: bool = False) -> Any:
    """Return the config of the same with our pass pipeline."""
    titan = importlib.import_module("torch_ext_bucketing.trainers.torchtitan")
    memory = importlib.import_module("torch_ext_bucketing.planner.schedule.policy").PeakMemory
    bound = memory(gib=float(os.environ[MIB]) / 1024) if MIB in os.environ else None
    config = theirs()
    config.compile.pass_pipeline = titan.pass_pipeline(bound, optimizer=optimizer)
    return config


def step() -> Any:
    """Return the config of the same with clipping and the optimizer in the graph."""
    return ours(optimizer=True)


def _small(config: Any) -> Any:
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.models.common.attention import ScaledDotProductAttention

    model = config.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training.steps, config.training.seq_len, config.training.local_batch_size = STEPS, 64, 2
    config.training.disable_cuda_graphs = True
    config.checkpoint.enable, config.checkpoint.interval = True, 1
    config.checkpoint.last_save_model_only = True
    config.activation_checkpoint = None
    config.debug.seed = 1
    if (chunks := int(os.environ[CHUNKS])) > 1:
        config.loss.num_chunks = chunks
        return config
    # Eager FSDP2 adds the head's gradients over chunks in fp32, graphs in bf16.
    config.loss = CrossEntropyLoss.Config(global_vocab_size=model.vocab_size)
    return config


class _Results(dict[int, Any]):
    """Outputs of forwards by microbatch, also where torch 2.15 looks for them."""

    def __init__(self, stage: Any) -> None:
        self.states = stage._forward_chunk_states

    def __setitem__(self, microbatch: int, value: tuple[tuple[Any, ...], Any]) -> None:
        super().__setitem__(microbatch, value)
        n, stages = len(value[0]), importlib.import_module("torch.distributed.pipelining.stage")
        self.states[microbatch] = stages._ForwardChunkState(
            (None,) * n, [], list(value[0]), (False,) * n, [False] * n
        )

    def pop(self, microbatch: int) -> Any:  # type: ignore[override]
        del self.states[microbatch]
        return super().pop(microbatch)


def _results(stage: Any) -> _Results:
    found: _Results = vars(stage).setdefault("results", _Results(stage))
    return found


def _expect_release(runtime: Any) -> None:
    """Check that nothing else holds gathered parameters where our passes free them."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    handle = runtime._handle_reshard

    def and_look(self: Any, action: Any, context: Any) -> None:
        state = next(s for s in self.schedule._stages if s.stage_index == action.stage_index).state
        shards, whole = (
            [v.untyped_storage() for v in values if isinstance(v, torch.Tensor)]
            for values in (state.flat_param_values, state.unsharded_param_values)
        )
        own = {storage._cdata for storage in shards}
        gathered = [StorageWeakRef(storage) for storage in whole if storage._cdata not in own]
        del whole
        handle(self, action, context)
        for _ in range(100):
            if all(ref.expired() for ref in gathered):
                return
            time.sleep(0.02)  # gloo's thread lets go a moment later
            gc.collect()  # compiling leaves cycles
        raise RuntimeError(f"something holds gathered parameters after {action}")

    runtime._handle_reshard = and_look


def _expect_ours(trainer: Any) -> None:
    """Check that our ``fully_shard`` has sharded every module, before the first step."""
    train = trainer.train

    def and_look(self: Any) -> None:
        import torch.distributed.fsdp

        from torch_ext_bucketing.fsdp import FSDPModule

        modules = [m for part in self.model_parts for m in part.modules()]
        found = [m for m in modules if isinstance(m, torch.distributed.fsdp.FSDPModule)]
        if not found or not all(isinstance(m, FSDPModule) for m in found):
            raise AssertionError(f"torch's fully_shard has sharded modules of {len(found)}")
        train(self)

    trainer.train = and_look


def _expect_updated(container: Any) -> None:
    """Check that the graph has updated: torchtitan's optimizers find no gradients."""
    step = container.step

    def and_look(self: Any) -> None:
        left = [p for o in self for g in o.param_groups for p in g["params"] if p.grad is not None]
        if left:
            raise AssertionError(f"{len(left)} parameters have gradients that no graph has used")
        step(self)

    container.step = and_look


def _train() -> None:
    """Run torchtitan's ``train.py`` with the arguments of this process."""
    import torch

    print(f"this rank is process {os.getpid()}", flush=True)
    logging.getLogger("torch_ext_bucketing").addHandler(logging.StreamHandler(sys.stdout))
    logging.getLogger("torch_ext_bucketing").setLevel(logging.INFO)
    none: Any = lambda *_: None  # noqa: E731
    for name in ("reset_peak_memory_stats", "empty_cache"):
        setattr(torch.cpu, name, none)
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda *_: "cpu"
    cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=2**30)
    cpu.memory_stats, cpu.current_device = lambda *_: Counter(), lambda: 0
    utils: Any = importlib.import_module("torch._utils")
    utils._get_available_device_type = lambda: "cpu"
    os.environ["LOCAL_RANK"] = "0"  # there is one CPU
    # Gloo does not multiply while it sums, not even by torchtitan's factor of 1.
    fsdp: Any = importlib.import_module("torch.distributed.fsdp").FSDPModule
    set_factor = fsdp.set_gradient_divide_factor

    def sum_alone(module: Any, factor: float) -> None:
        set_factor(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    fsdp.set_gradient_divide_factor = sum_alone
    graph_stage = "torchtitan.experiments.graph_trainer.graph_pp.stage"
    importlib.import_module(graph_stage).GraphPipelineStage.fwd_cache = property(_results)
    if "sharded" in sys.argv:
        _expect_ours(importlib.import_module("torchtitan.trainer").Trainer)
    if "ours" in sys.argv:
        runner = "torchtitan.experiments.graph_trainer.graph_pp.runner"
        _expect_release(importlib.import_module(runner).GraphPipelineRuntime)
    if "step" in sys.argv:
        optimizer = importlib.import_module("torchtitan.components.optimizer")
        _expect_updated(optimizer.OptimizersContainer)
    runpy.run_module("torchtitan.train", run_name="__main__")


if __name__ == "__main__":
    if "--rank" in sys.argv:
        sys.argv.remove("--rank")
        _train()
    else:
        sys.exit(main())
