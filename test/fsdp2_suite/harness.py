"""Run one program by eager FSDP2 and by the package on the same ranks, and compare."""

from __future__ import annotations

import contextlib
import importlib
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.fsdp as eager_fsdp
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import torch_ext_bucketing as teb
from torch_ext_bucketing import fsdp as our_fsdp

PACKAGE = Path(teb.__file__).parent
MODES = ("compiled", "uncompiled", "inductor")
Values = list[tuple[str, Any]]


@dataclass(frozen=True)
class Refused:
    """Ours raises an error that has these words, the package's own if eager FSDP2 accepts."""

    error: type[Exception]
    words: str
    eager: type[Exception] | None = None  # the error of eager FSDP2, if it raises one


@dataclass(frozen=True)
class Differs:
    """The values of these labels differ, and no others: a documented difference."""

    labels: str


Verdict = Refused | Differs | None
EQUAL = None
"""Both sides return the same labels and values, tensors bit for bit."""


@dataclass(frozen=True)
class Case:
    run: Callable[[Side], Values]
    world: int
    expected: dict[str, Verdict]  # by mode
    quick: bool


CASES: dict[str, Case] = {}


def case(
    *expected: Verdict,
    each: Collection[Any] = (),
    world: int = 2,
    modes: Sequence[str] = MODES[:2],
    quick: bool | Literal["each"] = False,
    **by_mode: Verdict,
) -> Callable[[Callable[..., Values]], Callable[..., Values]]:
    """Register a program, once for each value of ``each``, its 2nd argument.

    Args:
        expected: the verdict, :data:`EQUAL` by default; or one for each value of ``each``.
        modes: how ours runs; ``by_mode`` has other verdicts for some.
        quick: run it by day, with the first value alone or, if "each", with all.
    """

    def register(function: Callable[..., Values]) -> Callable[..., Values]:
        topic = function.__module__.rpartition(".")[2]
        for number, value in enumerate(each or (None,)):
            name = f"{topic}.{function.__name__}"
            program: Callable[[Side], Values] = function
            if each:
                name += f"[{value}]".replace("torch.", "").replace("'", "")
                program = partial(_with_value, function, value)
            verdict = expected[number % len(expected)] if expected else EQUAL
            verdicts = {mode: by_mode.get(mode, verdict) for mode in modes}
            assert name not in CASES, name
            CASES[name] = Case(program, world, verdicts, quick == "each" or (quick and not number))
        return function

    return register


def _with_value(function: Callable[..., Values], value: Any, side: Side) -> Values:
    return function(side, value)


def load() -> dict[str, Case]:
    """Import all modules with cases; return the cases by name."""
    for path in sorted(Path(__file__).parent.glob("cases_*.py")):
        importlib.import_module(f"{__package__}.{path.stem}")
    return CASES


@cache
def _mesh(sizes: tuple[int, ...], names: Sequence[str] | None, _: Any) -> DeviceMesh:
    # DTensor caches meshes and FSDP2 compares them by identity, so equal ones must not be made.
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


class Side:
    """One implementation, and what programs need of it."""

    def __init__(self, ours: bool, mode: str) -> None:
        self.ours, self.mode = ours, mode
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.fsdp: Any = our_fsdp if ours else eager_fsdp
        self.fully_shard = self.fsdp.fully_shard

    def mesh(self, *sizes: int, names: Sequence[str] | None = None) -> DeviceMesh:
        return _mesh(sizes or (self.world,), names, dist.group.WORLD)

    def shard(self, model: nn.Module, *units: str, mp: Sequence[Any] = (), **options: Any) -> Any:
        """Shard ``units`` and then the model.

        Each unit is a name, names joined by ``+``, or ``"*"`` for all children of a name.
        """
        if mp:
            options["mp_policy"] = self.fsdp.MixedPrecisionPolicy(*mp)
        for unit in units:
            for modules in _modules(model, unit):
                self.fully_shard(modules, **options)
        return self.fully_shard(model, **options)

    def compile(self, model: nn.Module, target: Any = None) -> Any:
        """Return what runs the model, or a part of it: compiled for ours."""
        target = model if target is None else target
        if not self.ours or self.mode == "uncompiled":
            return target
        compiler = "inductor" if self.mode == "inductor" else "aot_eager"
        return torch.compile(target, backend=teb.backend(compiler, teb.recipe(model)))

    def data(self, *shape: Any) -> list[torch.Tensor]:
        """Return each step's input, which differs by rank, of sizes and maybe a dtype."""
        source = torch.Generator().manual_seed(100 + self.rank)
        dtype = shape[-1] if isinstance(shape[-1], torch.dtype) else torch.float32
        sizes = [size for size in shape if isinstance(size, int)]
        return [torch.randn(sizes, generator=source).to(dtype) for _ in range(6)]

    def tokens(self) -> list[torch.Tensor]:
        """Return each step's input of an ``LM``."""
        source = torch.Generator().manual_seed(100 + self.rank)
        return [torch.randint(37, (2, 6), generator=source) for _ in range(6)]

    def train(
        self,
        model: nn.Module,
        inputs: Sequence[Any],
        *,
        run: Any = None,
        steps: int = 3,
        optimizer: Any = torch.optim.Adam,
        loss: Callable[[Any], torch.Tensor] = lambda out: out.float().sum(),
        after_backward: Callable[[], Any] = lambda: None,
        after_step: Callable[[], Any] = lambda: None,
    ) -> Values:
        """Train, and return losses, gradients and weights of each step."""
        run = self.compile(model) if run is None else run
        update = optimizer(model.parameters(), lr=1e-2)
        found: Values = []
        for step, args in enumerate(inputs[:steps]):
            update.zero_grad(set_to_none=step % 2 == 0)
            value = loss(run(*args) if isinstance(args, tuple) else run(args))
            value.backward()
            found += [("loss", value.detach().clone()), ("extra", after_backward())]
            found += [(f"{step} {label}", kept) for label, kept in self.state(model)]
            update.step()
            after_step()
        return found + self.state(model)

    def state(self, model: nn.Module) -> Values:
        """Return the local parts of gradients, weights and buffers."""
        for module in model.modules():
            if isinstance(module, self.fsdp.FSDPModule):
                module.reshard()
        found: Values = []
        for name, param in model.named_parameters():
            grad = None if param.grad is None else local(param.grad).clone()
            found += [(f"gradient {name}", grad), (f"value {name}", local(param).clone())]
        return found + [(f"buffer {n}", local(b).clone()) for n, b in model.named_buffers()]

    @contextlib.contextmanager
    def alone(self) -> Any:
        """Tell rank 0 to run the block; end it on other ranks when rank 0 has."""
        store, key = dist.distributed_c10d._get_default_store(), f"alone {self.ours}"
        yield self.rank == 0
        if self.rank == 0:
            store.set(key, "done")
        store.wait([key])


def _modules(model: nn.Module, unit: str) -> list[Any]:
    if unit == "*" or unit.endswith(".*"):
        return list(model.get_submodule(unit[:-2]).children())
    modules = [model.get_submodule(name) for name in unit.split("+")]
    return modules if len(modules) == 1 else [modules]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def judge(name: str, mode: str) -> str:
    """Run a case on this rank; return how the outcome differs from what is expected, or ""."""
    program, expected = load()[name].run, load()[name].expected[mode]
    outcomes: list[Values | Exception] = []
    for ours in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            outcomes.append(program(Side(ours, mode)))
        except Exception as error:
            outcomes.append(error)
    eager, ours_ = outcomes
    if isinstance(expected, Refused):
        return _missed_refusal(expected, eager, ours_)
    for side, outcome in (("eager FSDP2", eager), ("ours", ours_)):
        if isinstance(outcome, Exception):
            return f"{side} raises {_described(outcome)}"
    assert isinstance(eager, list)
    assert isinstance(ours_, list)
    if [label for label, _ in eager] != [label for label, _ in ours_]:
        return f"labels {[n for n, _ in eager]} by eager FSDP2, {[n for n, _ in ours_]} by ours"
    gaps = {n: gap for (n, a), (_, b) in zip(eager, ours_, strict=True) if (gap := _gap(a, b))}
    if isinstance(expected, Differs):
        others = {n: gap for n, gap in gaps.items() if expected.labels not in n}
        if not gaps:
            return "equal"
        gaps = others
    first = next(iter(gaps), "")
    return (
        f"{len(gaps)} of {len(eager)} values differ, first {first}: {gaps[first]}" if gaps else ""
    )


def _missed_refusal(expected: Refused, eager: Any, ours: Any) -> str:
    if not isinstance(ours, Exception):
        return "ours accepts"
    error = getattr(ours, "inner_exception", None) or ours
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    ours_raises = expected.eager is not None or PACKAGE in Path(last).parents
    if not (isinstance(error, expected.error) and ours_raises):
        return f"ours raises {_described(ours)}"
    if expected.words not in str(error):
        return f"ours does not name {expected.words!r}: {error}"
    if expected.eager is None:
        return f"eager FSDP2 raises {_described(eager)}" if isinstance(eager, Exception) else ""
    if not isinstance(eager, expected.eager):
        return f"eager FSDP2 gives {eager!r:.200}"
    return ""


def _described(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {text[:400]}"


def _gap(a: Any, b: Any) -> str:
    """Describe the difference of eager FSDP2's value and ours, or return ""."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        same = type(a) is type(b) and a == b
        return "" if same else f"{_short(a)} by eager FSDP2, {_short(b)} by ours"
    a, b = local(a), local(b)
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{_short(a)} by eager FSDP2, {_short(b)} by ours"
    if torch.equal(a, b) or torch.equal(a.isnan() | (a == b), torch.ones_like(a, dtype=torch.bool)):
        return "" if torch.equal(a.isnan(), b.isnan()) else "other places are nan"
    wide = torch.complex128 if a.is_complex() else torch.float64
    return f"by up to {(a.to(wide) - b.to(wide)).abs().max().item():.2g}"


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value.dtype}{tuple(value.shape)}"
    return f"{value!r:.200}"
