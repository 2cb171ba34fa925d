"""What people do around a training step: the cases of the rows ``everyday/*``.

A case is a function of a :class:`Way`, which shards and compiles a model. It yields one text per
step, a hash of this rank's weights and whatever else has to be equal (a loss of an evaluation). Its
row has the name of the function.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.parity_base import Unit
from benchmarks.parity_ranks import RowReport, Runs, aten_kernels, wrap_units
from torch_ext_bucketing.fsdp.simple_fsdp import data_parallel
from torch_ext_bucketing.passes.backends import BucketingBackend, backend
from torch_ext_bucketing.recipes import recipe
from torch_ext_bucketing.testing import text
from torch_ext_bucketing.testing.training import digest

SEQ = 12
UNITS = ("blocks.0", "blocks.1", "")
"""``fully_shard`` per block, then the root."""
SEPARATE_UNITS = ("embed", "blocks.0", "blocks.1", "norm", "head")
"""No unit reaches across blocks, and none of several parameters is outside of them."""


class Block(nn.Module):
    """Owns a parameter and has children."""

    def __init__(self, dim: int, *, breaks: bool = False) -> None:
        super().__init__()
        self.breaks = breaks
        self.scale = nn.Parameter(torch.empty(dim))
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.up(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.down(y) * self.scale


class Small(nn.Module):
    """Token ids ``[batch, seq]`` int64 to logits ``[batch, seq, vocab]``.

    Args:
        breaks: ``""``, or where Dynamo breaks the graph: ``"between"`` blocks, ``"inside"`` one, or
            in the ``"loop"`` over them, where it gives up on the whole ``forward``.
    """

    def __init__(self, *, breaks: str = "", dim: int = 32, seed: int = 0) -> None:
        super().__init__()
        self.breaks = breaks
        self.embed = nn.Embedding(text.VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim, breaks=breaks == "inside") for _ in range(2))
        self.norm = nn.LayerNorm(dim, bias=False)
        self.head = nn.Linear(dim, text.VOCAB, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.breaks == "between":
            x = self.blocks[0](x)
            torch._dynamo.graph_break()
            return self.head(self.norm(self.blocks[1](x)))
        for block in self.blocks:
            x = block(x)
            if self.breaks == "loop":
                torch._dynamo.graph_break()
        return self.head(self.norm(x))


@dataclass
class Way:
    """Eager FSDP2, or one collective per parameter and compiled."""

    compiled: bool
    mesh: DeviceMesh
    submesh: DeviceMesh
    """Of the first two ranks."""
    folder: str
    """That all ranks see."""
    backends: list[BucketingBackend] = field(default_factory=list)

    def shard(
        self,
        model: nn.Module,
        units: Sequence[Unit] = UNITS,
        dtype: torch.dtype | None = torch.bfloat16,
    ) -> nn.Module:
        """Shard ``model`` in place; gathers and reductions in ``dtype``."""
        if self.compiled:
            data_parallel(model, self.mesh, param_dtype=dtype, reduce_dtype=dtype)
            self._passes = recipe(model, units=units)
            return model
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=dtype, cast_forward_inputs=False
        )
        units = units if "" in units else (*units, "")
        wrap_units(model, units, mesh=self.mesh, mp_policy=policy)
        return model

    def backend(self, compiler: Any = "aot_eager", **options: Any) -> BucketingBackend:
        """For the model that was sharded last."""
        self.backends.append(backend(compiler, passes=self._passes, **options))
        return self.backends[-1]

    def compile(self, model: nn.Module, compiler: Any = "aot_eager", **options: Any) -> Any:
        """What to call in place of ``model``; ``options`` of ``torch.compile``."""
        if not self.compiled:
            return model
        return torch.compile(model, backend=self.backend(compiler, model=model), **options)


def loss_of(run: Callable[[torch.Tensor], torch.Tensor], step: int, seq: int = SEQ) -> torch.Tensor:
    tokens, targets = text.batch(step, dist.get_rank(), size=2, seq=seq)
    return F.cross_entropy(run(tokens).float().flatten(0, 1), targets.flatten())


def train(
    run: Any,
    model: nn.Module,
    seq: Callable[[int], int] = lambda step: SEQ,
    optimizer: torch.optim.Optimizer | None = None,
    forward: Any = contextlib.nullcontext,
    first: int = 0,
) -> Iterator[str]:
    """Steps without end, a hash of the weights after each; ``forward()`` is a context."""
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in itertools.count(first):
        with forward():
            loss = loss_of(run, step, seq(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield f"{digest(model)} {loss.item()}"


def plain(way: Way) -> Iterator[str]:
    model = way.shard(Small())
    return train(way.compile(model, fullgraph=True), model)


def regional(way: Way) -> Iterator[str]:
    """Each block compiled by itself; the rest runs uncompiled."""
    return _regional(way, SEPARATE_UNITS)


def regional_rest_in_a_unit(way: Way) -> Iterator[str]:
    """What runs uncompiled is one unit of several parameters."""
    return _regional(way, UNITS)


def regional_planned_unlike(way: Way) -> Iterator[str]:
    """Blocks of one class, whose code is compiled once, with other units in each."""
    return _regional(way, ("embed", "blocks.0", "blocks.1.up", "blocks.1", "norm", "head"))


def regional_block_twice(way: Way) -> Iterator[str]:
    """The first block is the second, too."""
    return _regional(way, ("embed", "blocks.0", "norm", "head"), shared=True)


def _regional(way: Way, units: Sequence[str], shared: bool = False) -> Iterator[str]:
    model = Small()
    if shared:
        model.blocks[1] = model.blocks[0]
    way.shard(model, units)
    if way.compiled:
        compiler = way.backend()
        for block in dict.fromkeys(model.blocks):
            block.compile(backend=compiler)
    return train(model, model)


def graph_break(way: Way) -> Iterator[str]:
    """Between blocks, and no unit reaches across."""
    model = way.shard(Small(breaks="between"), SEPARATE_UNITS)
    return train(way.compile(model), model)


def graph_break_in_loop(way: Way) -> Iterator[str]:
    """``forward`` runs uncompiled then, what it calls is compiled piece by piece."""
    model = way.shard(Small(breaks="loop"), SEPARATE_UNITS)
    return train(way.compile(model), model)


def graph_break_in_a_unit(way: Way) -> Iterator[str]:
    """Between blocks, and one unit is on both sides."""
    # With the embedding first its offset, and that of the rest modulo the rings' chunks, would be
    # the same in one payload as in two, and so would the bits.
    model = way.shard(Small(breaks="between"), ("blocks.0", "blocks.1", ("norm", "embed", "head")))
    return train(way.compile(model), model)


def graph_break_in_block_unit(way: Way) -> Iterator[str]:
    """In the middle of a block, which is one unit."""
    model = way.shard(Small(breaks="inside"), SEPARATE_UNITS)
    return train(way.compile(model), model)


def lengths(way: Way) -> Iterator[str]:
    """Another sequence length in every step."""
    model = way.shard(Small())
    return train(way.compile(model), model, seq=lambda step: 8 + 3 * step)


def lengths_dynamic(way: Way) -> Iterator[str]:
    model = way.shard(Small())
    return train(way.compile(model, dynamic=True), model, seq=lambda step: 8 + 3 * step)


def evaluation_no_grad(way: Way) -> Iterator[str]:
    return _evaluating(way, torch.no_grad)


def evaluation_inference_mode(way: Way) -> Iterator[str]:
    return _evaluating(way, torch.inference_mode)


def _evaluating(way: Way, mode: Any) -> Iterator[str]:
    model = way.shard(Small())
    run = way.compile(model)
    for step, trained in enumerate(train(run, model)):
        model.eval()
        with mode():
            loss = loss_of(run, 1000 + step)
        model.train()
        yield f"{trained} evaluated {loss.item()}"


def autocast(way: Way) -> Iterator[str]:
    """Weights are gathered in float32, autocast computes in bfloat16."""
    model = way.shard(Small(), dtype=None)
    return train(
        way.compile(model), model, forward=lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    )


def optimizer_foreach(way: Way) -> Iterator[str]:
    return _optimizer(way, foreach=True)


def optimizer_fused(way: Way) -> Iterator[str]:
    return _optimizer(way, fused=True)


def _optimizer(way: Way, **kind: bool) -> Iterator[str]:
    """Weight decay for some, chosen by name, and clipped gradients."""
    model = way.shard(Small())
    decayed = [p for name, p in model.named_parameters() if name.endswith(("up.weight", "scale"))]
    others = [
        p for name, p in model.named_parameters() if not name.endswith(("up.weight", "scale"))
    ]
    assert len(decayed) == 4
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2,
        **kind,
    )
    return train(way.compile(model), model, optimizer=optimizer)


def two_models(way: Way) -> Iterator[str]:
    """Two in one process, trained in turn, one inside the other's steps."""
    runs = []
    for seed, units in ((0, UNITS), (1, SEPARATE_UNITS)):
        model = way.shard(Small(seed=seed), units)
        runs.append(train(way.compile(model), model))
    return (f"{one} {other}" for one, other in zip(*runs, strict=False))


def max_autotune(way: Way) -> Iterator[str]:
    """``mode="max-autotune-no-cudagraphs"``, Inductor on the kernels that eager runs."""
    model = way.shard(Small())
    run = way.compile(model, "inductor", mode="max-autotune-no-cudagraphs")
    steps = train(run, model)
    while True:
        with aten_kernels() if way.compiled else contextlib.nullcontext():
            digests = next(steps)
        yield digests


def resume(way: Way) -> Iterator[str]:
    """Two steps the other way, saved with ``torch.distributed.checkpoint``, and on from there."""
    return _resume(way, way.mesh)


def resume_on_fewer_ranks(way: Way) -> Iterator[str]:
    """The same, from all ranks to the first two."""
    return _resume(way, way.submesh)


def _resume(way: Way, mesh: DeviceMesh) -> Iterator[str]:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    folder = f"{way.folder}/{mesh.size()}-{way.compiled}"
    other = replace(way, compiled=not way.compiled)
    model = other.shard(Small())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = train(other.compile(model), model, optimizer=optimizer)
    yield from itertools.islice(steps, 2)
    saved_model, saved_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": saved_model, "optimizer": saved_optimizer}, checkpoint_id=folder)
    if dist.get_rank() not in mesh.mesh.tolist():
        yield from itertools.repeat("not taking part")
    way.mesh = mesh
    model = way.shard(Small(seed=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loaded_model, loaded_optimizer = get_state_dict(model, optimizer)
    state = {"model": loaded_model, "optimizer": loaded_optimizer}
    dcp.load(state, checkpoint_id=folder, process_group=mesh.get_group())
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    yield from train(way.compile(model), model, optimizer=optimizer, first=2)


class CaseRuns(Runs):
    """A case under eager FSDP2 and compiled."""

    def ways(self) -> tuple[Way, Way]:
        """Eager FSDP2, and compiled."""
        folder = Path(self.rank.store_path).parent / "checkpoints" / self.row.case
        eager = Way(False, self.mesh, DeviceMesh("cpu", [0, 1]), str(folder))
        return eager, replace(eager, compiled=True, backends=[])  # a case may change its way

    def run(self, way: Way) -> list[str]:
        """A text per step."""
        torch._dynamo.reset()  # it gives up on code for good, and cases share theirs
        case: Callable[[Way], Iterator[str]] = globals()[self.row.case]
        return list(itertools.islice(case(way), self.steps))

    def report(self) -> RowReport:
        """Run both; an error of the compiled run is part of the report."""
        clock = time.perf_counter()
        report = RowReport(self.row)
        eager, compiled = self.ways()
        report.digests["eager"] = self.run(eager)
        try:
            report.digests["fsdp_order"] = self.run(compiled)
        except Exception:
            # All ranks raise alike, or this run ends at its time limit.
            report.error = traceback.format_exc()
            report.digests["fsdp_order"] = []
        for compiler in compiled.backends:
            report.look(compiler.reports)
        report.seconds = time.perf_counter() - clock
        return report
