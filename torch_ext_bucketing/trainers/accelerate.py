"""Bucket the collectives of models that accelerate (1.15) shards by FSDP2.

``transformers.Trainer``, TRL and axolotl train through accelerate, which imports ``fully_shard``
from torch. After :func:`install` it calls this package's, and compiles::

    Accelerator.prepare(model, optimizer)
        FullyShardedDataParallelPlugin   our fully_shard, with the plugin's units and policies
        TorchDynamoPlugin                compiler, mode and options of model.compile(), which
                                         leaves the model's class and names as they are
    Accelerator.no_sync, accumulate, backward
                                         ReduceOnce: gradients of all microbatches, reduced once

With ``use_regional_compilation`` blocks are compiled one by one, and FSDP2 gathers, reduces and
accumulates around them. Clipping, mixed precision, checkpoints and evaluation are accelerate's own
code.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch.distributed.fsdp
import torch.nn as nn
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, DynamoBackend, compile_regions_fsdp2

from .. import fsdp
from ..errors import NotBucketedWarning, check_argument
from ..fsdp.accumulate import ReduceOnce
from ..passes.backends import BucketingBackend, backend
from ..passes.base import GraphPass
from ..recipes import recipe

Compiler = Literal["inductor", "aot_eager"]

_COMPILERS: dict[DynamoBackend, Compiler] = {
    DynamoBackend.NO: "inductor",
    DynamoBackend.INDUCTOR: "inductor",
    DynamoBackend.AOT_EAGER: "aot_eager",
}


def install(
    compiler: Compiler | None = None,
    passes: Callable[[nn.Module], Iterable[GraphPass]] = recipe,
    **options: Any,
) -> Installed:
    """Bucket the models that accelerate shards by FSDP2 from now on.

    ::

        installed = install(passes=lambda model: recipe(model, "speed"))
        trainer = Trainer(model, TrainingArguments(fsdp=True, ...), ...)
        trainer.train()
        print(installed.backends[0].last_report())

    It may be used as a context. Models that accelerate shards in it stay bucketed.

    Args:
        compiler: ``"inductor"`` or ``"aot_eager"``. None: that of ``TorchDynamoPlugin`` or
            ``TrainingArguments(torch_compile_backend=)``, else ``"inductor"``.
        passes: maps a sharded model to its passes. Models with ``use_regional_compilation`` take
            none.
        options: those of :func:`.backend`, such as ``agree``.

    Raises:
        RuntimeError: it is installed already.
        TypeError: ``passes`` is not a function; :func:`.backend` raises others when a model is
            prepared.
    """
    global _installed
    if compiler not in (None, "inductor", "aot_eager"):
        raise ValueError(f"compiler must be 'inductor', 'aot_eager' or None, got {compiler!r}")
    check_argument("passes", passes, Callable)
    if _installed is not None:
        raise RuntimeError("install() was called before: first remove() what it returned")
    _installed = Installed(compiler, passes, options)
    return _installed


_installed: Installed | None = None


@dataclass
class _Sums:
    """Gradients of a model's microbatches, reduced after the last one."""

    model: nn.Module
    backend: BucketingBackend
    started: bool = False

    @functools.cached_property
    def reduce_once(self) -> ReduceOnce:
        return ReduceOnce(self.model, self.backend)

    def start(self) -> None:
        if not self.started:
            self.reduce_once.__enter__()
            self.started = True

    def finish(self, error: type[BaseException] | None = None) -> None:
        if self.started:
            self.started = False
            self.reduce_once.__exit__(error)


@dataclass(eq=False)
class Installed:
    """Keeps the changes that :func:`install` made in accelerate.

    ``backends`` has the backend of each model that is compiled whole, in the order of their
    preparation, with reports.
    """

    compiler: Compiler | None
    passes: Callable[[nn.Module], Iterable[GraphPass]]
    options: dict[str, Any]
    backends: list[BucketingBackend] = field(init=False, default_factory=list)
    _sums: dict[nn.Module, _Sums] = field(init=False, default_factory=dict, repr=False)
    _undo: contextlib.ExitStack = field(
        init=False, default_factory=contextlib.ExitStack, repr=False
    )

    def __post_init__(self) -> None:
        ways: dict[str, Callable[..., Any]] = {
            "prepare": self._prepare,
            "_prepare_fsdp2": self._shard,
            "no_sync": self._no_sync,
            "backward": self._backward,
        }
        replaced = {name: _around(getattr(Accelerator, name), way) for name, way in ways.items()}
        self._undo.enter_context(_replaced(Accelerator, replaced))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Give accelerate its own functions back, for models that it prepares from now on."""
        global _installed
        if _installed is self:
            _installed = None
        self._undo.close()

    def _prepare(self, original: Any, accelerator: Accelerator, *args: Any, **named: Any) -> Any:
        models = [arg for arg in args if isinstance(arg, nn.Module)]
        if models and not accelerator.is_fsdp2:
            warnings.warn(
                f"accelerate trains a {type(models[0]).__name__} by {accelerator.distributed_type}"
                " and not by FSDP2, so nothing is bucketed. Give FullyShardedDataParallelPlugin("
                "fsdp_version=2) or TrainingArguments(fsdp=True). On CPU ranks accelerate ignores "
                "both: fsdp2_on_cpu()",
                NotBucketedWarning,
                stacklevel=3,
            )
        return original(accelerator, *args, **named)

    def _shard(self, original: Any, accelerator: Accelerator, *args: Any) -> Any:
        """Shard with our ``fully_shard`` and compile with the passes."""
        dynamo = accelerator.state.dynamo_plugin
        if dynamo.backend not in _COMPILERS:
            raise ValueError(
                f"TorchDynamoPlugin(backend={dynamo.backend.value!r}): buckets need 'inductor' or "
                "'aot_eager'"
            )
        chosen = self.compiler or _COMPILERS[dynamo.backend]
        if dynamo.use_regional_compilation and (self.passes is not recipe or self.options):
            raise ValueError(
                "TorchDynamoPlugin(use_regional_compilation=True) compiles blocks one by one, and "
                "their graphs have no collectives for passes: leave out the passes and options of "
                "install(), or compile the whole model"
            )
        # accelerate compiles before it shards, and a recipe needs the shards.
        replacements = {"fully_shard": fsdp.fully_shard, "FSDPModule": fsdp.FSDPModule}
        with (
            _replaced(torch.distributed.fsdp, replacements),
            _replaced(dynamo, {"backend": DynamoBackend.NO}),
        ):
            prepared = original(accelerator, *args)
        for model in prepared:
            if not isinstance(model, nn.Module) or model in self._sums:
                continue
            settings = dynamo.to_kwargs()
            if dynamo.use_regional_compilation:
                # Collectives are FSDP2's, around the graphs, and so is accumulation.
                compile_regions_fsdp2(model, **{**settings, "backend": chosen})
                continue
            compiler = backend(chosen, self.passes(model), model, **self.options)
            self._sums[model] = _Sums(model, compiler)
            self.backends.append(compiler)
            model.compile(**{**settings, "backend": compiler})
        return prepared

    @contextlib.contextmanager
    def _no_sync(self, original: Any, accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
        """Add up gradients without a reduction, where this package shards the model."""
        sums = self._sums.get(model)
        if sums is None:
            with original(accelerator, model):
                yield
            return
        sums.start()
        try:
            yield
        except BaseException as error:
            sums.finish(type(error))
            raise

    def _backward(self, original: Any, accelerator: Accelerator, *args: Any, **named: Any) -> None:
        """Run a backward; finish the sums over microbatches after the last one, or an error."""
        started = [sums for sums in self._sums.values() if sums.started]
        try:
            original(accelerator, *args, **named)
        except BaseException as error:
            for sums in started:
                sums.finish(type(error))
            raise
        if accelerator.sync_gradients:
            for sums in started:
                sums.finish()


def _around(original: Callable[..., Any], way: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of accelerate that calls ``way`` with the ``original`` method."""

    @functools.wraps(original)
    def method(accelerator: Accelerator, *args: Any, **named: Any) -> Any:
        return way(original, accelerator, *args, **named)

    return method


@contextlib.contextmanager
def _replaced(owner: Any, values: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def fsdp2_on_cpu() -> None:
    """Let accelerate take FSDP2 on CPU ranks, to try and to test.

    accelerate takes DDP on them, or no process group at all, whatever plugin it is given. So its
    state gets ``MULTI_GPU``, which stands in for the device that ``PartialState`` looks for; the
    device stays the CPU, and the process group gloo. Call this before ``Accelerator()``. Before
    ``TrainingArguments``, with ``accelerator_config={"use_configured_state": True}``, or it makes
    a new state.

    Raises:
        RuntimeError: this process is not one of several CPU ranks.
    """
    kind = PartialState(cpu=True).distributed_type
    if kind not in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise RuntimeError(
            f"accelerate found no process group of CPU ranks but {kind}: start this with torchrun"
        )
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
