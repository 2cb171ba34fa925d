"""Compare recomputed values in backward with forward's, in the first step.

Each value gets a digest of its bits. Both graphs of the first step are run node by node by ATen's
kernels, whatever the compiler is: Inductor fuses a recomputed value with other nodes, and then
rounds differently on purpose. From the second step on, the compiled graphs run as without the
check::

    forward   x -> mm -> dropout -> ...        digests of mm, dropout
    backward  x -> mm -> dropout -> ...        equal, differs: a RecomputeError names dropout
"""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.fx as fx

from .._torch.aot import is_tangent, stage_of
from .._torch.dynamo import module_of
from ..errors import RecomputeError
from ..graph.nodes import is_compute, is_view, tensors_in

log = logging.getLogger("torch_ext_bucketing")

_NAME = "torch_ext_bucketing_joint_name"
_CHUNK = 2**20  # numbers; a digest takes 16 MiB of memory at most
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_SEEDED = ("prims.inductor_random.default", "prims.inductor_randint.default")

Compiled = Callable[..., Any]


class RecomputeCheck:
    """Check one compile: record its first forward, and compare the backward of that forward."""

    def __init__(self) -> None:
        self._recorded: dict[str, tuple[fx.Node, torch.Tensor]] | None = None
        self._saved: set[int] = set()
        self._forwards = 0
        self._made: fx.GraphModule | None = None

    def name(self, graph: fx.Graph) -> None:
        """Note the names of a joint graph's nodes, after the passes on it."""
        # The partitioner keeps names, and passes after it copy metadata to nodes of other names.
        for node in graph.nodes:
            node.meta[_NAME] = node.name

    def keep(self, graph: fx.Graph, owner: fx.GraphModule) -> None:
        """Copy a graph after the partitioner and the passes, for :meth:`wrap`."""
        copy = fx.Graph()
        copy.output(copy.graph_copy(graph, {}))
        self._made = fx.GraphModule(owner, copy)

    def wrap(self, compiled: Compiled) -> Compiled:
        """Return a function that runs the kept graph where checked, else ``compiled``."""
        graph, self._made = self._made, None
        if graph is None or (stage := stage_of(graph.graph)) == "inference":
            return compiled
        first = self._record if stage == "forward" else self._compare

        def run(args: list[Any]) -> Any:
            done = first(graph, args)
            return compiled(args) if done is None else done

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _record(self, graph: fx.GraphModule, args: list[Any]) -> Sequence[Any] | None:
        """Run the first forward and keep digests of its values; None if another ran before."""
        self._forwards += 1
        if self._recorded is not None or self._forwards > 1:
            return None
        digests = _Digests(graph)
        result = digests.finish(args)
        self._recorded = digests.by_name
        self._saved = _storages(result)
        return result

    def _compare(self, graph: fx.GraphModule, args: list[Any]) -> Sequence[Any] | None:
        """Run a backward, and compare the values that it recomputes with the first forward."""
        recorded = self._recorded
        if not recorded:
            return None
        # Several forwards may run before the first backward.
        inputs = zip(graph.graph.find_nodes(op="placeholder"), args, strict=True)
        saved = _storages(value for node, value in inputs if not is_tangent(node))
        if self._forwards > 1 and not saved <= self._saved:
            return None
        self._recorded = {}
        digests = _Digests(graph, recorded)
        result = digests.finish(args)
        again = [(name, *recorded[name], digest) for name, (_, digest) in digests.by_name.items()]
        places = {name: i for i, name in enumerate(recorded)}
        again.sort(key=lambda recomputed: places[recomputed[0]])
        # One copy to the host for all values.
        same = torch.stack([(a == b).cpu() for _, _, a, b in again]).tolist() if again else []
        differing = [node for (_, node, _, _), equal in zip(again, same, strict=True) if not equal]
        if differing:
            raise RecomputeError(
                f"backward recomputes {_where(differing[0])} with other values than forward "
                f"({len(differing)} of {len(again)} recomputed values differ, this one first). It, "
                "or what it reads, draws random numbers, reads a state that has changed, was "
                "written to in place, or adds in an order that changes. Save it, such as by taking "
                "it out of torch.utils.checkpoint, or tag its operator as nondeterministic_seeded",
                differing[0].name,
            )
        log.info("check_recompute: all %d recomputed values are those of forward", len(again))
        return result


class _Digests(fx.Interpreter):
    """Run a graph, and make digests of its values by name, all or ``only`` some."""

    def __init__(self, graph: fx.GraphModule, only: Iterable[str] | None = None) -> None:
        super().__init__(graph)
        self.by_name: dict[str, tuple[fx.Node, torch.Tensor]] = {}
        self._only = None if only is None else dict.fromkeys(only)

    def finish(self, args: list[Any]) -> Sequence[Any]:
        """Run the graph, and release its inputs."""
        inputs = tuple(args)
        args.clear()
        return self.run(*inputs)

    def run_node(self, n: fx.Node) -> Any:
        if str(n.target) in _SEEDED:
            # ATen's kernel of these ignores the seed, which Inductor's uses.
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            seed = next(a for a in args if isinstance(a, torch.Tensor))
            with torch.random.fork_rng([seed.device] if seed.is_cuda else []):
                torch.manual_seed(int(seed))
                value = n.target(*args, **kwargs)  # type: ignore[operator]
        else:
            value = super().run_node(n)
        recorded = n.meta.get(_NAME) == n.name and (self._only is None or n.name in self._only)
        if recorded and isinstance(value, torch.Tensor) and _has_values(n):
            self.by_name[n.name] = n, digest_of(value)
        return value


def _has_values(node: fx.Node) -> bool:
    """Return whether a node computes values of its own, which its inputs define."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        source = node.args[0]
        # Attention without dropout leaves the state of a generator undefined.
        attention = is_compute(source) or getattr(source.target, "namespace", "") == "torch_attn"
        floats = all(v.is_floating_point() for v in tensors_in(node.meta.get("val")))
        return (floats or not attention) and not is_view(source)
    return not is_view(node) and "empty" not in str(node.target)


def digest_of(value: torch.Tensor) -> torch.Tensor:
    """Return a number of 64 bits for the bits of a tensor, on its device."""
    # A sum over all numbers, each times an odd number that its place defines: a change of one
    # number always shows, and the sum does not depend on the order of additions.
    plain = torch.view_as_real(value) if value.is_complex() else value
    bits = plain.detach().reshape(-1).view(_BITS[plain.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=bits.device)
        total += ((part + 1) * (2 * place + 1) * 0x9E3779B97F4A7C1).sum()
    return total


def _storages(values: Iterable[Any]) -> set[int]:
    return {
        v.untyped_storage().data_ptr() for v in values if isinstance(v, torch.Tensor) and v.numel()
    }


def _where(node: fx.Node) -> str:
    """Name a node with its module and the line of the user's code."""
    module = module_of(node)
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    parts = [f"{node.name} ({node.target})"]
    parts += [f"of module {module!r}"] if module else []
    parts += [f"at {lines[-1][0]}:{lines[-1][1]}"] if lines else []
    return " ".join(parts)
