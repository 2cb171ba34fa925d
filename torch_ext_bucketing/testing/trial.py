"""Train one model on all ranks in the ways that :func:`.compare` compares."""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils._pytree as pytree
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..fqns import canonical_fqn, canonical_modules
from ..fsdp.plans import transformer_block_plan
from ..fsdp.shard import data_parallel
from ..fsdp.units import Units
from ..passes.backends import BucketingBackend, backend
from ..passes.base import GraphPass
from ..passes.pipeline import in_order
from ..recipes import recipe
from . import target
from .comparison import Backend, CompareOptions
from .ranks import Rank
from .target import TargetError
from .training import TrainingRecord, raw_bytes, train

T = TypeVar("T")

Run = Callable[..., Any]
Passes = Callable[[nn.Module], Sequence[GraphPass]]
Hashes = dict[str, str]
"""Map trained parameters to a hash of the gradient; empty without a gradient."""


class Trial:
    """The model of ``options.build`` on one rank. All ranks call the same methods.

    Copies of the model start from weights and buffers in ``state``; ``units`` are the modules of
    each ``fully_shard`` call.
    """

    def __init__(self, rank: Rank, options: CompareOptions) -> None:
        self.rank, self.options = rank, options
        self.param_dtype, self.reduce_dtype = (
            getattr(torch, str(name), None) for name in (options.param_dtype, options.reduce_dtype)
        )
        # build() often draws the inputs, too: seed by rank, and take rank 0's weights.
        torch.manual_seed(rank.rank)
        self._model, self._inputs, self._loss = _built(options.build, rank.world_size)
        self.state = self.from_rank_0(unsharded_state(self._model))
        try:
            units = options.units or transformer_block_plan(self._model)
            self.units = Units.of_modules(units).units
        except ValueError as error:
            raise TargetError(
                f"{error}. Pass units=[...] to teb.testing.compare(), the modules of each "
                "fully_shard() call"
            ) from error
        dims = {"shard": rank.world_size // options.replicas}
        if options.replicas > 1:
            dims = {"replicate": options.replicas, **dims}
        self.mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))

    def say(self, text: str) -> None:
        """Report a line of progress."""
        if self.rank.rank == 0:
            self.rank.send(text)

    def from_rank_0(self, value: T) -> T:
        """Return rank 0's ``value`` on every rank."""
        return self._from_rank(0, value)

    def from_all(self, value: T) -> list[T]:
        """Return every rank's ``value``, by rank."""
        return [self._from_rank(rank, value) for rank in range(self.rank.world_size)]

    def _from_rank(self, source: int, value: T) -> T:
        """Return the value that rank ``source`` has."""
        # torch's collectives of objects need numpy, which torch does not require.
        buffer = bytearray(pickle.dumps(value) if self.rank.rank == source else b"")
        size = torch.tensor([len(buffer)])
        dist.broadcast(size, source)
        buffer = buffer or bytearray(int(size))
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), source)
        return value if self.rank.rank == source else pickle.loads(buffer)

    def differing(self, first: Hashes, second: Hashes) -> tuple[str, ...]:
        """Return the names whose hashes differ on some rank."""
        by_rank = self.from_all(unlike(first, second))
        return tuple(dict.fromkeys(name for names in by_rank for name in names))

    def copy(self) -> nn.Module:
        """Copy the model with the weights in ``state``."""
        model = copy.deepcopy(self._model)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.data.copy_(self.state[name])
        return model

    def plain(self) -> nn.Module:
        """Copy the model without sharding, with parameters of ``param_dtype``."""
        model = self.copy()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.param_dtype or parameter.dtype)
        return model

    def wrapped(self) -> nn.Module:
        """Copy the model and wrap it by ``fully_shard``."""
        # data_parallel() does not cast inputs either.
        policy = MixedPrecisionPolicy(
            self.param_dtype, self.reduce_dtype, cast_forward_inputs=False
        )
        return wrap(self.copy(), [*self.units, ("",)], self.mesh, mp_policy=policy)

    def ours(
        self, passes: Passes | None = None, compiler: Backend | None = None
    ) -> tuple[nn.Module, BucketingBackend, Run]:
        """Copy, shard and compile the model; return it, the backend, and the compiled callable."""
        options = self.options
        model = self.copy()
        if options.shard is not None:
            options.shard(model, self.mesh)
        else:
            data_parallel(
                model,
                self.mesh,
                "hybrid_shard" if options.replicas > 1 else "fully_shard",
                param_dtype=self.param_dtype,
                reduce_dtype=self.reduce_dtype,
            )
        compiled_by = backend(compiler or options.backend, (passes or self.passes)(model), model)
        torch.compiler.reset()  # or Dynamo could reuse another copy's graph
        return model, compiled_by, torch.compile(model, backend=compiled_by)

    def passes(self, model: nn.Module) -> Sequence[GraphPass]:
        """Return the options' passes for a sharded model."""
        options = self.options
        passes = options.passes(model) if options.passes else recipe(model, units=options.units)
        return in_order(passes, model)

    def train(
        self, model: nn.Module, run: Run, steps: int, stop_unlike: Sequence[str] | None = None
    ) -> tuple[TrainingRecord, list[Hashes]]:
        """Train; return digests of the weights and hashes of the gradients of each step."""
        gradients: list[Hashes] = []

        def step(number: int) -> torch.Tensor:
            loss = self.backward(run, number)
            gradients.append(gradient_hashes(model))
            return loss

        return train(model, step, steps, recompiles=True, stop_unlike=stop_unlike), gradients

    def gradients(self, model: nn.Module, run: Run, step: int) -> Hashes:
        """Return hashes of the gradients of one step."""
        model.zero_grad()
        self.backward(run, step)
        return gradient_hashes(model)

    def batch(self, step: int) -> Any:
        """Return this rank's inputs."""
        return self._inputs(step, self.rank.rank) if callable(self._inputs) else self._inputs

    def backward(self, run: Run, step: int) -> torch.Tensor:
        """Run forward and backward, seeded by step and rank, and return the loss."""
        batch = self.batch(step)
        torch.manual_seed(step * self.rank.world_size + self.rank.rank)
        output = target.call(run, batch)
        if self._loss is not None:
            loss = self._loss(output, batch)
        else:
            loss = getattr(output, "loss", output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
            raise TargetError(
                "the loss must be a tensor of one element that requires a gradient, but is a "
                f"{type(loss).__name__}{shape}. The model must return it, or an output with a "
                ".loss; or return (model, inputs, loss) with loss(output, inputs)"
            )
        loss.backward()
        return loss


def wrap(model: nn.Module, units: Iterable[Sequence[str]], mesh: DeviceMesh, **options: Any) -> Any:
    """Call ``fully_shard`` on each unit once, in place."""
    modules = canonical_modules(model)
    for unit in dict.fromkeys(tuple(unit) for unit in units):
        fully_shard([modules[name] for name in unit], mesh=mesh, **options)
    return model


def gradient_hashes(model: nn.Module) -> Hashes:
    """Hash this rank's gradients."""
    hashes: Hashes = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grad = parameter.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            hashes[canonical_fqn(name)] = "" if local is None else hash_of([local])
    return hashes


def unlike(first: Hashes, second: Hashes) -> list[str]:
    """Return the names whose hashes differ."""
    return [name for name, value in first.items() if second.get(name, "") != value]


def hash_of(tree: Any) -> str:
    """Hash the tensors in nested containers."""
    total = hashlib.sha256()
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            total.update(f"{leaf.dtype} {tuple(leaf.shape)} ".encode())
            total.update(raw_bytes(leaf))
    return total.hexdigest()


def unsharded_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copy all parameters and buffers, unsharded, by name."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    with torch.no_grad():
        return {
            name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
            for name, t in tensors
        }


def _built(build: Callable[[], Any] | str, ranks: int) -> tuple[nn.Module, Any, Any]:
    """Call ``build``; return the model, its inputs and the loss, checked."""
    make = target.load_target(build) if isinstance(build, str) else build
    name = build if isinstance(build, str) else getattr(build, "__qualname__", repr(build))
    model, inputs, loss = (*target.build(make, name, loss=True), None)[:3]
    if loss is not None and not callable(loss):
        raise TargetError(f"{name}: loss must be a loss(output, inputs), got {loss!r}")
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise TargetError(f"{name} must return the model as it is before it is sharded")
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if weights < ranks:
        raise TargetError(
            f"the model of {name} has {weights} weights to train, fewer than there are ranks "
            f"({ranks}): take fewer, with --ranks, or a larger model"
        )
    return model, inputs, loss
