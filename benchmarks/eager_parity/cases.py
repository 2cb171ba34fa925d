"""Run what people do around a training step: the cases of the rows ``everyday/*``."""

import contextlib
import itertools
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import torch_ext_bucketing as teb
from torch_ext_bucketing.passes.backends import BucketingBackend
from torch_ext_bucketing.testing import text
from torch_ext_bucketing.testing.training import digest

from .base import Unit
from .ranks import RowReport, Runs, aten_kernels, wrap_units

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
    """A decoder: token ids ``[batch, seq]`` int64 to logits ``[batch, seq, vocab]``.

    Args:
        breaks: where Dynamo breaks the graph: ``""`` nowhere, ``"between"`` blocks, ``"inside"``
            one, or in the ``"loop"`` over them, where it gives up on the whole ``forward``.
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
            teb.data_parallel(model, self.mesh, param_dtype=dtype, reduce_dtype=dtype)
            self._passes = teb.recipe(model, units=units)
            return model
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=dtype, cast_forward_inputs=False
        )
        units = units if "" in units else (*units, "")
        wrap_units(model, units, mesh=self.mesh, mp_policy=policy)
        return model

    def backend(self, compiler: Any = "aot_eager", **options: Any) -> BucketingBackend:
        """Return the backend for the model that was sharded last."""
        self.backends.append(teb.backend(compiler, passes=self._passes, **options))
        return self.backends[-1]

    def compile(self, model: nn.Module, compiler: Any = "aot_eager", **options: Any) -> Any:
        """Return what to call in place of ``model``; ``options`` are those of ``torch.compile``."""
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
    """Train without end; yield each step's hash of the weights. ``forward()`` is a context."""
    optimizer = optimizer or adamw(model)
    for step in itertools.count(first):
        with forward():
            loss = loss_of(run, step, seq(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield f"{digest(model)} {loss.item()}"


def whole(
    way: Way,
    units: Sequence[Unit] = UNITS,
    breaks: str = "",
    dtype: torch.dtype | None = torch.bfloat16,
    compiled: dict[str, Any] | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    **training: Any,
) -> Iterator[str]:
    """Compile the whole model by ``torch.compile`` with the options ``compiled``."""
    model = way.shard(Small(breaks=breaks), units, dtype)
    run = way.compile(model, **(compiled or {}))
    return train(run, model, optimizer=optimizer and optimizer(model), **training)


def regional(way: Way, units: Sequence[str], shared: bool = False) -> Iterator[str]:
    """Compile each block by itself; the rest runs uncompiled."""
    model = Small()
    if shared:
        model.blocks[1] = model.blocks[0]
    way.shard(model, units)
    if way.compiled:
        compiler = way.backend()
        for block in dict.fromkeys(model.blocks):
            block.compile(backend=compiler)
    return train(model, model)


def another_length(step: int) -> int:
    """Train with another sequence length in every step."""
    return 8 + 3 * step


def evaluating(way: Way, mode: Any) -> Iterator[str]:
    """Evaluate after every step, in ``mode()``."""
    model = way.shard(Small())
    run = way.compile(model)
    for step, trained in enumerate(train(run, model)):
        model.eval()
        with mode():
            loss = loss_of(run, 1000 + step)
        model.train()
        yield f"{trained} evaluated {loss.item()}"


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def decayed(model: nn.Module, **kind: bool) -> torch.optim.Optimizer:
    """Train with weight decay for some parameters, chosen by name."""
    some = [p for name, p in model.named_parameters() if name.endswith(("up.weight", "scale"))]
    others = [p for p in model.parameters() if all(p is not q for q in some)]
    assert len(some) == 4
    groups: list[dict[str, Any]] = [
        {"params": some, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, **kind)


def two_models(way: Way) -> Iterator[str]:
    """Train two models in one process in turn, one inside the other's steps."""
    runs = []
    for seed, units in ((0, UNITS), (1, SEPARATE_UNITS)):
        model = way.shard(Small(seed=seed), units)
        runs.append(train(way.compile(model), model))
    return (f"{one} {other}" for one, other in zip(*runs, strict=False))


def max_autotune(way: Way) -> Iterator[str]:
    """Compile with ``mode="max-autotune-no-cudagraphs"``, Inductor on eager kernels."""
    model = way.shard(Small())
    run = way.compile(model, "inductor", mode="max-autotune-no-cudagraphs")
    steps = train(run, model)
    while True:
        with aten_kernels() if way.compiled else contextlib.nullcontext():
            digests = next(steps)
        yield digests


def resume(way: Way, fewer: bool = False) -> Iterator[str]:
    """Train two steps the other way, save, and go on from there, on all or the first two ranks."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    mesh = way.submesh if fewer else way.mesh
    folder = f"{way.folder}/{mesh.size()}-{way.compiled}"
    other = replace(way, compiled=not way.compiled)
    model = other.shard(Small())
    optimizer = adamw(model)
    steps = train(other.compile(model), model, optimizer=optimizer)
    yield from itertools.islice(steps, 2)
    saved_model, saved_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": saved_model, "optimizer": saved_optimizer}, checkpoint_id=folder)
    if dist.get_rank() not in mesh.mesh.tolist():
        yield from itertools.repeat("not taking part")
    way.mesh = mesh
    model = way.shard(Small(seed=1))
    optimizer = adamw(model)
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


_APART: dict[str, Any] = {"breaks": "between", "units": SEPARATE_UNITS}

CASES: dict[str, Callable[[Way], Iterator[str]]] = {
    "plain": partial(whole, compiled={"fullgraph": True}),
    "regional": partial(regional, units=SEPARATE_UNITS),
    # What runs uncompiled is one unit of several parameters.
    "regional_rest_in_a_unit": partial(regional, units=UNITS),
    # Blocks of one class, whose code is compiled once, with other units in each.
    "regional_planned_unlike": partial(
        regional, units=("embed", "blocks.0", "blocks.1.up", "blocks.1", "norm", "head")
    ),
    "regional_block_twice": partial(
        regional, units=("embed", "blocks.0", "norm", "head"), shared=True
    ),
    # Between blocks, and no unit reaches across.
    "graph_break": partial(whole, **_APART),
    # ``forward`` runs uncompiled then, what it calls is compiled piece by piece.
    "graph_break_in_loop": partial(whole, **{**_APART, "breaks": "loop"}),
    # Between blocks, and one unit is on both sides. With the embedding first its offset, and that
    # of the rest modulo the rings' chunks, would be the same in one payload as in two, and so would
    # the bits.
    "graph_break_in_a_unit": partial(
        whole, breaks="between", units=("blocks.0", "blocks.1", ("norm", "embed", "head"))
    ),
    # In the middle of a block, which is one unit.
    "graph_break_in_block_unit": partial(whole, **{**_APART, "breaks": "inside"}),
    "lengths": partial(whole, seq=another_length),
    "lengths_dynamic": partial(whole, seq=another_length, compiled={"dynamic": True}),
    "evaluation_no_grad": partial(evaluating, mode=torch.no_grad),
    "evaluation_inference_mode": partial(evaluating, mode=torch.inference_mode),
    # Weights are gathered in float32, autocast computes in bfloat16.
    "autocast": partial(
        whole, dtype=None, forward=lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    ),
    "optimizer_foreach": partial(whole, optimizer=partial(decayed, foreach=True)),
    "optimizer_fused": partial(whole, optimizer=partial(decayed, fused=True)),
    "two_models": two_models,
    "max_autotune": max_autotune,
    "resume": resume,
    "resume_on_fewer_ranks": partial(resume, fewer=True),
}
"""By the name in ``everyday/*``."""


class CaseRuns(Runs):
    """A case under eager FSDP2 and compiled."""

    def ways(self) -> tuple[Way, Way]:
        """Return eager FSDP2, and compiled."""
        folder = Path(self.rank.store_path).parent / "checkpoints" / self.row.case
        eager = Way(False, self.mesh, DeviceMesh("cpu", [0, 1]), str(folder))
        return eager, replace(eager, compiled=True, backends=[])  # a case may change its way

    def run(self, way: Way) -> list[str]:
        """Run the case; return a text per step."""
        torch._dynamo.reset()  # it gives up on code for good, and cases share theirs
        return list(itertools.islice(CASES[self.row.case](way), self.steps))

    def report(self) -> RowReport:
        """Run both; put an error of the compiled run into the report."""
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
