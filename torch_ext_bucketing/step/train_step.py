"""Run forward, backward, clipping and the optimizer as planned graphs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
import torch.nn as nn

from .._torch.fsdp2 import grad_hooks
from .._torch.optimizers import update_scale
from ..errors import EagerOptimizerWarning, check_argument, check_count, check_positive
from ..fqns import format_names, parameter_names
from ..fsdp.modules import all_units
from ..passes.backends import BucketingBackend
from ..passes.base import Extension, GraphPass
from ..planner.step_memory import check_parameters
from ..recipes import Together, recipe, together
from .norm import Norm
from .rules import no_rule, rule_of
from .update import Epilogue, groups_of

Loss = Callable[..., torch.Tensor]


@dataclass(eq=False, repr=False)
class _StepBackend(BucketingBackend):
    """A backend whose backward graphs update the parameters."""

    epilogue: Callable[[], Epilogue] | None = None
    epilogues: list[Epilogue] = field(default_factory=list)

    def _extension(self) -> Extension | None:
        if self.epilogue is None:
            return None
        self.epilogues.append(self.epilogue())
        return self.epilogues[-1]


class TrainStep:
    """Take training steps; :func:`train_step` makes it.

    ``total_norm`` is the norm of all gradients in the last step, before clipping, as a scalar
    tensor; None without ``max_norm``. ``norms`` has those of each parameter. ``backend`` compiles
    the step, and has the reports.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        loss: Loss,
        norm: Norm | None,
        make_backend: Callable[[Callable[[], Epilogue] | None], _StepBackend],
        exchange_bytes: int | None,
        scaler: torch.amp.GradScaler | None,
        clip_value: float | None,
        watched: Sequence[float],
    ) -> None:
        self.model, self.optimizers = model, tuple(optimizers)
        self._models = tuple(model) if isinstance(model, Together) else (model,)
        self.total_norm: torch.Tensor | None = None
        self._loss, self._norm, self._make_backend = loss, norm, make_backend
        self._exchange_bytes, self._scaler = exchange_bytes, scaler
        self._clip_value, self._watched = clip_value, watched
        self._norms: dict[float, list[tuple[torch.Tensor, list[str]]]] = {}
        self._parameters = [(fqns[0], p) for p, fqns in parameter_names(model).items()]
        self._units = all_units(model)
        self._accumulating: Loss | None = None
        self._made: dict[Any, tuple[_StepBackend, Loss]] = {}
        for optimizer in optimizers:
            if rule_of(optimizer) is None:
                after = "its step() runs after the planned part, with all its gradients in memory"
                warnings.warn(
                    no_rule(type(optimizer).__name__, after), EagerOptimizerWarning, stacklevel=3
                )

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take a step; ``loss`` gets the arguments after the model. Return the loss, detached."""
        for unit in self._units:
            unit.reshard()
        self.backend, run = self._compiled()
        trained = [(fqn, p) for fqn, p in self._parameters if p.requires_grad]
        with torch.enable_grad():
            loss = run(*self._models, *args, **kwargs)
        epilogues = self.backend.epilogues
        # Not ``backward()``: outputs in the place of used gradients must not reach ``grad``.
        try:
            gradients = torch.autograd.grad(
                loss, [p for _, p in trained], self._scale(loss), allow_unused=True
            )
        except BaseException:
            for epilogue in epilogues:
                epilogue.forget_new()
            raise
        # Shapes may have chosen between several compiles. Without anything to add, none has run.
        ran = next((e for e in epilogues if e.ran), epilogues[-1])
        ran.finish()
        self.total_norm, self._norms = ran.total_norm, ran.norms
        planned = {p.parameter for p in ran.updated}
        for (fqn, p), gradient in zip(trained, gradients, strict=True):
            if gradient is not None and p not in planned and fqn not in ran.accumulated:
                p.grad = gradient if p.grad is None else p.grad + gradient
            for hook in grad_hooks(p)[1] if p.grad is not None else ():
                hook(p)
        for optimizer in self.optimizers:
            eager = [p for g in optimizer.param_groups for p in g["params"] if p not in planned]
            if any(p.grad is not None for p in eager):
                if not ran.skips(optimizer):
                    optimizer.step()
                for p in eager:
                    p.grad = None
            optimizer._opt_called = True  # type: ignore[attr-defined]  # for LRScheduler
        if self._scaler is not None:
            update_scale(self._scaler, ran.found_inf)
        return loss.detach()

    @property
    def norms(self) -> dict[float, dict[str, torch.Tensor]]:
        """Norms in the last step before clipping: by order, and by the parameter's FQN, a scalar.

        The orders are those of ``norms=``, and ``norm_type`` with ``max_norm``. A norm is that of
        the whole gradient, on all ranks; of order infinity it is the largest absolute value. The
        next step overwrites the scalars.
        """
        return {
            order: {fqn: vector[i] for vector, fqns in vectors for i, fqn in enumerate(fqns)}
            for order, vectors in self._norms.items()
        }

    def _scale(self, loss: torch.Tensor) -> torch.Tensor | None:
        """Return the scale as the gradient of the loss; backward then makes scaled gradients."""
        return None if self._scaler is None else self._scaler.scale(torch.ones_like(loss))

    def accumulate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Add the gradients of a microbatch to ``grad``, reduced; return its loss, detached.

        The next step adds its own, and updates. Arguments are those of a step.
        """
        if self._accumulating is None:
            backend = self._make_backend(None)
            self._accumulating = torch.compile(self._loss, backend=backend, fullgraph=True)
        with torch.enable_grad():
            loss = self._accumulating(*self._models, *args, **kwargs)
        loss.backward(self._scale(loss))
        return loss.detach()

    def _compiled(self) -> tuple[_StepBackend, Loss]:
        """Return the backend and function for the optimizers' present options."""
        accumulated = frozenset(fqn for fqn, p in self._parameters if p.grad is not None)
        hooked = frozenset(fqn for fqn, p in self._parameters if any(grad_hooks(p)))
        reads = (self._norm, self._scaler, self._clip_value)
        if hooked and (self._watched or any(option is not None for option in reads)):
            raise NotImplementedError(
                f"{len(hooked)} parameter(s) have hooks on their gradients, which run before "
                f"gradients are clipped, unscaled or read: {format_names(sorted(hooked))}. Take "
                "the step without max_norm=, clip_value=, norms= and grad_scaler=, or remove the "
                "hooks"
            )
        groups = groups_of(self.optimizers)
        options = [
            (g.rule_name, g.rule.key(g.param_group), len(g.param_group["params"])) for g in groups
        ]
        key = (accumulated, hooked, *options)
        if key not in self._made:
            arguments = self.model, self.optimizers, self._norm, accumulated, self._exchange_bytes
            read = self._scaler, self._clip_value, self._watched
            backend = self._make_backend(lambda: Epilogue(*arguments, *read, hooked))
            compiled: Any = torch.compile(self._loss, backend=backend, fullgraph=True)
            self._made[key] = backend, compiled
        return self._made[key]


def train_step(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loss: Loss,
    *,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    clip_value: float | None = None,
    norms: Sequence[float] = (),
    skip_nonfinite: bool = False,
    grad_scaler: torch.amp.GradScaler | None = None,
    exchange_bytes: int | None = None,
    passes: Iterable[GraphPass] | None = None,
    compiler: Literal["aot_eager", "inductor"] | Callable[..., Any] = "inductor",
    **options: Any,
) -> TrainStep:
    """Plan forward, backward, clipping and the optimizer together.

    ::

        step = train_step(model, optimizer, lambda model, x, y: cross_entropy(model(x), y))
        for x, y in batches:
            loss = step(x, y)
            scheduler.step()

    The updates are nodes of the backward graph: without clipping, a bucket's parameters are updated
    when its reduction is there, and its gradients freed. Parameters and optimizer state change in
    place. Their names, values and bits are those of ``loss.backward()``, ``clip_grad_norm_`` over
    ``model.parameters()`` and ``optimizer.step()``, and a job may go on that way at any step.
    Gradients that are there before a step, of earlier microbatches, are added; afterwards all that
    the optimizer used are None.

    Parameters with hooks on their gradients (``register_hook``,
    ``register_post_accumulate_grad_hook``) are updated by ``optimizer.step()`` after the graphs,
    which first run the hooks. With clipping or a loss scale they are a ``NotImplementedError``.

    The optimizer may be ``Adam``, ``AdamW``, ``SGD``, ``Muon`` or :class:`.StackedMuon`, with any
    groups. Its own functions update, so ``fused``, ``foreach`` and neither give the bits that each
    gives eagerly. Numbers such as the learning rate are read before every step. Any other optimizer
    runs eagerly after the graphs.

    ``Muon`` computes with whole matrices. Each matrix that is divided over a mesh, or has copies on
    it, has one owner there: momentum goes to the owner, and the update comes back, in bfloat16 and
    in all-to-alls of several matrices at once. Bits are those of ``Muon`` on whole parameters and
    gradients, on any number of ranks. Give the other parameters to another optimizer::

        step = train_step(model, [Muon(matrices, lr=0.02), AdamW(others)], loss)

    Args:
        model: sharded or replicated, as for :func:`.recipe`; or a list of models, such as student
            and teacher, for a ``loss(student, teacher, *args)``.
        optimizer: of parameters of ``model``, or several, each with parameters of its own; others
            keep their gradients. One that needs a closure can't be planned.
        loss: ``loss(model, *args)`` computes a scalar tensor. It is compiled without graph breaks.
        max_norm: clip the norm of all gradients to this; so is ``norm_type``. None: no clipping.
        clip_value: clip each element of the gradients to this absolute value, as
            ``clip_grad_value_``; not with ``max_norm``. Updates do not wait for other gradients.
        norms: orders of further norms of the gradients, such as ``[2.0, math.inf]``, for
            ``step.norms``.
        skip_nonfinite: with ``max_norm``: leave out a step if the norm is infinite or NaN. Waits
            for the norm on the host, unless the optimizer is ``fused``.
        grad_scaler: scales the loss, and is updated by each step. Bits are those of
            ``scale(loss).backward()``, ``unscale_`` of each optimizer, clipping, ``step`` of each
            optimizer and ``update``. The returned loss is not scaled. An optimizer with a gradient
            that is not finite on any rank changes nothing; the host waits for that as eagerly.
            Parameters may not be in float16.
        exchange_bytes: bytes of whole matrices, in bfloat16, that ``Muon`` brings to one rank at a
            time. A larger matrix or stack comes alone. None: 256 MiB, or fewer where the bound
            ``memory=`` of :func:`.recipe` leaves less room beside shards and gradients.
        passes: see :func:`.backend`; None takes :func:`.recipe`'s.
        compiler: see :func:`.backend`; so are ``options``.
    """
    single = isinstance(optimizer, torch.optim.Optimizer)
    several = list(optimizer) if isinstance(optimizer, Sequence) else []
    optimizers = [optimizer] if single else several
    model = together(model)
    are_optimizers = [isinstance(o, torch.optim.Optimizer) for o in optimizers]
    if not are_optimizers or not all(are_optimizers):
        raise TypeError(f"give a torch.optim.Optimizer or a list of them, got {optimizer!r}")
    if not callable(loss):
        raise TypeError(f"loss must be a function loss(model, *args), got {loss!r}")
    check_argument("max_norm", max_norm, float | int | None)
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm!r}")
    if max_norm is None and (skip_nonfinite or norm_type != 2.0):
        raise ValueError("norm_type= and skip_nonfinite= belong to max_norm=")
    if clip_value is not None:
        check_positive("clip_value", clip_value)
        if max_norm is not None:
            raise ValueError("clip by value or by norm: give clip_value= or max_norm=, not both")
    if not isinstance(norms, list | tuple) or not all(isinstance(n, float | int) for n in norms):
        raise TypeError(f"norms must be a list of orders, such as [2.0, math.inf], got {norms!r}")
    if exchange_bytes is not None:
        check_count("exchange_bytes", exchange_bytes, least=1)
    check_argument("grad_scaler", grad_scaler, torch.amp.GradScaler | None)
    scaler = grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
    optimized: set[torch.Tensor] = set()
    for o in optimizers:
        _check(o, model, optimized)
    half = [n for n, p in model.named_parameters() if p.dtype == torch.float16 and p in optimized]
    if scaler is not None and half:
        raise ValueError(
            f"GradScaler does not unscale gradients in float16, and {len(half)} parameter(s) are "
            f"in it: {format_names(half)}. Keep parameters in float32, and compute in float16 by "
            "the sharding's param_dtype"
        )
    reserved = ("compiler", "passes", "model")
    accepted = [f.name for f in fields(BucketingBackend) if f.init and f.name not in reserved]
    unknown = sorted(options.keys() - set(accepted))
    if unknown:
        raise TypeError(
            f"train_step() takes no {', '.join(f'{name}=' for name in unknown)}. It makes a "
            "backend of its own, with passes=, compiler= and the options of backend(): "
            f"{', '.join(f'{name}=' for name in accepted)}"
        )
    check_argument("passes", passes, Iterable | None)
    chosen = tuple(recipe(model) if passes is None else passes)
    norm = None if max_norm is None else Norm(float(max_norm), float(norm_type), skip_nonfinite)

    def make_backend(epilogue: Callable[[], Epilogue] | None) -> _StepBackend:
        return _StepBackend(compiler, chosen, model, epilogue=epilogue, **options)

    make_backend(None)  # checks its arguments before the first step
    return TrainStep(
        model,
        optimizers,
        loss,
        norm,
        make_backend,
        exchange_bytes,
        scaler,
        None if clip_value is None else float(clip_value),
        [float(order) for order in norms],
    )


def _check(
    optimizer: torch.optim.Optimizer, model: nn.Module, optimized: set[torch.Tensor]
) -> None:
    """Check one optimizer, and add its parameters to ``optimized``."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"{type(optimizer).__name__}.step() evaluates the model by a closure, which can't be "
            "planned: take its steps eagerly"
        )
    check_parameters(optimizer, model)
    parameters = {
        f"param_groups[{i}]['params'][{j}]": p
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
    }
    twice = [name for name, p in parameters.items() if p in optimized]
    if twice:
        raise ValueError(
            f"{len(twice)} parameter(s) of {type(optimizer).__name__} belong to an earlier "
            f"optimizer, too: {format_names(twice)}. Give each to one"
        )
    optimized.update(parameters.values())
