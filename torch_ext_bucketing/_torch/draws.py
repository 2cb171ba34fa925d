"""Report private torch APIs that this torch lacks.

Find operators that draw random numbers, for torch's partitioner, too.

CUDA's attention operators are tagged as random because they may drop values out. Since torch 2.14
the partitioner reads ``dropout_p``, too. Until 2.13 it takes such a call for a draw, and recomputes
it with the saved state of a generator: a higher-order operator without a cost, which nothing may
pass, and an output after the meshes among the outputs, where AOTAutograd expects tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from ..errors import UnknownTorchError


@contextlib.contextmanager
def private_torch() -> Iterator[None]:
    """Raise :class:`UnknownTorchError` if a private name of torch is missing in the block."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise UnknownTorchError(
            f"torch {torch.__version__} lacks a name that torch_ext_bucketing uses: {error}. "
            "Use a torch from 2.11 to 2.15, or a torch_ext_bucketing that supports this one"
        ) from error


with private_torch():
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

_WITH_STATE = ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state")
"""torch's higher-order operators that run a random operator with a generator's state."""

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def draws(node: fx.Node) -> bool:
    """Return whether a call draws random numbers, if its operator is tagged as torch's are.

    A call with a ``dropout_p`` of 0 does not draw.
    """
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name() in _WITH_STATE
    if not _is_tagged(node):
        return False
    assert isinstance(target, torch._ops.OpOverload)
    for i, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            default = node.kwargs.get(argument.name, argument.default_value)
            given = node.args[i] if i < len(node.args) else default
            return not isinstance(given, (int, float)) or given != 0
    return True


def _is_tagged(node: fx.Node) -> bool:
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in target.tags
    )


def reads_dropout() -> bool:
    """Return whether torch's partitioner takes a call without dropout for one that draws."""
    with private_torch():
        from torch._functorch import partitioners

    return hasattr(partitioners, "is_rng_op")


def without_draws(partition: Partition) -> Partition:
    """Make a partitioner recompute marked calls without dropout as it does others.

    Functions without tags stand for their operators while the partitioner runs. Where it reads
    ``dropout_p`` itself, it is returned unchanged.
    """
    if reads_dropout():
        return partition

    def run(joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        stands: dict[Any, Callable[..., Any]] = {}
        for node in joint.graph.nodes:
            marked = node.meta.get("recompute")
            again = marked in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
            if again and _is_tagged(node) and not draws(node):
                node.target = stands.setdefault(node.target, _stand_for(node.target))
        halves = partition(joint, inputs, **kwargs)
        of_stand = {stand: target for target, stand in stands.items()}
        for gm in (joint, *halves) if stands else ():
            for node in gm.graph.nodes:
                if node.op == "call_function":
                    node.target = of_stand.get(node.target, node.target)
            gm.recompile()
        return halves

    return run


def _stand_for(target: torch._ops.OpOverload) -> Callable[..., Any]:
    def stand(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    stand.__name__ = stand.__qualname__ = target._opname
    return stand


class WithoutDraws(CustomPartitionerFn):
    """The partitioner ``given``, or Inductor's, through :func:`without_draws`.

    A class of this module and not of a function, since Inductor's cache keys pickle its config.
    """

    def __init__(self, given: CustomPartitionerFn | None) -> None:
        self._given = given

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        with private_torch():
            from torch._functorch.partitioners import min_cut_rematerialization_partition

        chosen = self._given or min_cut_rematerialization_partition
        return without_draws(chosen)(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        """Return the given partitioner's, or the name of Inductor's; None: graphs aren't cached."""
        return "min_cut" if self._given is None else self._given.uuid()
