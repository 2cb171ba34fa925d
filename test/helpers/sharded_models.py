"""Small models, ways to shard them, and backends that keep the graphs they compile to."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from torch_ext_bucketing._torch.aot import stage_of
from torch_ext_bucketing.fsdp.tagging import tag_joint_graph
from torch_ext_bucketing.graph.nodes import Kind, Tag, kind_of
from torch_ext_bucketing.testing.training import ModelConfig, Transformer, train


def mesh_for(mode: str, ranks: int = 4) -> DeviceMesh:
    """Make the mesh of a mode of ``data_parallel``; two replicas for ``"hybrid_shard"``."""
    if mode != "hybrid_shard":
        return init_device_mesh("cpu", (ranks,))
    return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))


class Block(nn.Module):
    """Owns a parameter and has children."""

    def __init__(self, dim: int = 8, hidden: int = 10) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.w1 = nn.Linear(dim, hidden)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.w2(torch.relu(self.w1(x))) * self.scale


class TwoBlocks(nn.Module):
    def __init__(self, dim: int = 8, vocabulary: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(2))
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class OneBlock(TwoBlocks):
    """Compiles in half the time."""

    def __init__(self, dim: int = 8, vocabulary: int = 12) -> None:
        super().__init__(dim, vocabulary)
        self.layers.pop(1)


class LeanBlock(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.w1 = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.w1(x)) * self.scale


class Lean(TwoBlocks):
    """Two blocks of few parameters, because each makes a compile longer."""

    def __init__(self, dim: int = 8, vocabulary: int = 12) -> None:
        super().__init__(dim, vocabulary)
        self.layers = nn.ModuleList(LeanBlock(dim) for _ in range(2))


class RedistributeParametrization(nn.Module):
    """All-gathers a DTensor parameter, as SimpleFSDP does."""

    def __init__(self, dims: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dims = dims
        self.dtype = dtype

    def forward(self, x: Any) -> torch.Tensor:
        full = x.redistribute(
            placements=[Replicate()] * self.dims,
            forward_dtype=self.dtype,
            backward_dtype=torch.float32 if self.dtype else None,
        )
        return full.to_local(grad_placements=[Partial("avg")] * self.dims)


def checkpointed(*modules: nn.Module) -> None:
    """Recompute the forward of these modules in backward."""
    for module in modules:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def _shard(model: nn.Module, mesh: DeviceMesh) -> None:
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    done: dict[nn.Parameter, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, param in list(module._parameters.items()):
            if param is not None:
                if param not in done:
                    done[param] = nn.Parameter(
                        distribute_tensor(param.detach(), mesh, placements), param.requires_grad
                    )
                module.register_parameter(name, done[param])


def shard_by_parametrization(
    model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None
) -> nn.Module:
    _shard(model, mesh)
    for module in list(model.modules()):
        for name in [n for n, p in module._parameters.items() if p is not None]:
            parametrize.register_parametrization(
                module, name, RedistributeParametrization(mesh.ndim, dtype), unsafe=True
            )
    return model


def shard_by_property(
    model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None
) -> nn.Module:
    """Shard like torchtitan's SimpleFSDP: properties of a subclass gather ``self._parameters[name]``."""
    _shard(model, mesh)
    gather = RedistributeParametrization(mesh.ndim, dtype)
    for module in model.modules():
        names = [n for n, p in module._parameters.items() if p is not None]
        if names:
            properties = {n: property(lambda self, n=n: gather(self._parameters[n])) for n in names}
            module.__class__ = type(type(module).__name__, (type(module),), properties)
    return model


class Keep(dict[str, fx.GraphModule]):
    """A callable backend that keeps its graphs by stage."""

    def __call__(self, gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        self[stage_of(gm.graph)] = gm
        return gm.forward


class Capture:
    """A backend that tags the joint graph, runs ``joint`` on it, and keeps all later graphs."""

    def __init__(
        self,
        partitioner: str = "default",
        model: nn.Module | None = None,
        joint: Callable[[fx.GraphModule], object] = lambda gm: None,
    ) -> None:
        self.partitioner = partitioner
        self.model = model
        self.joint = joint
        # For each joint graph: its tags, and the kinds of its untagged collectives.
        self.tags: list[tuple[list[Tag], list[Kind]]] = []
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.debugging import boxed_nop
        from torch._functorch import partitioners

        from torch_ext_bucketing._torch.dynamo import input_fqns

        fqns, _ = input_fqns(gm, example_inputs, self.model)
        partition = {
            "default": partitioners.default_partition,
            "min_cut": partitioners.min_cut_rematerialization_partition,
        }[self.partitioner]

        def tag_and_partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            tags = tag_joint_graph(joint, fqns)
            untagged = [k for n in joint.graph.nodes if (k := kind_of(n)) and n not in tags]
            self.tags.append((list(tags.values()), untagged))
            self.joint(joint)
            return partition(joint, *args, **kwargs)

        def keep(graph: fx.GraphModule, inputs: Any) -> Any:
            self.graphs.append(graph)
            return boxed_nop(graph, inputs)

        return aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=tag_and_partition)(
            gm, example_inputs
        )


def step(model: Any, *inputs: torch.Tensor) -> None:
    out = model(*inputs)
    if out.requires_grad:
        out.float().sum().backward()


def eager_fsdp2(
    model: nn.Module,
    units: Iterable[str | Sequence[str]],
    mesh: DeviceMesh,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    **more: Any,
) -> nn.Module:
    """Call ``fully_shard`` for each unit, in place, without a cast of the model's inputs."""
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)
    for unit in units:
        names = [unit] if isinstance(unit, str) else unit
        modules = [model.get_submodule(name) for name in names]
        fully_shard(modules, mesh=mesh, mp_policy=policy, **more)
    return model


def small_transformer(layers: int = 2) -> Transformer:
    # 33 rows are uneven over the ranks.
    config = ModelConfig(vocab=37, dim=32, layers=layers, heads=4, kv_heads=2, hidden=33, max_seq=8)
    return Transformer(config)


def tokens_of(rank: int, vocabulary: int, *shape: int) -> Callable[[int], torch.Tensor]:
    """Make a function from a step's number to this rank's tokens."""

    def tokens(number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * number + rank)
        return torch.randint(0, vocabulary, shape, generator=generator)

    return tokens


def trained(
    model: nn.Module, run: Any, tokens: Callable[[int], torch.Tensor], steps: int = 3
) -> list[str]:
    """Train, and return digests of this rank's shards of all weights after each step."""

    def forward_backward(number: int) -> torch.Tensor:
        loss = run(tokens(number)).float().logsumexp(-1).mean()
        loss.backward()
        return loss

    return train(model, forward_backward, steps, lr=1e-2).digests


def collectives(graph: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if kind_of(n) is not None]
