"""Random programs of ``fully_shard`` calls over small models, run with eager FSDP2 and with ours."""

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch
import torch.distributed as dist
import torch.nn as nn
from hypothesis import HealthCheck, Phase, example, given, note, seed, settings
from torch.distributed import fsdp as eager_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import torch_ext_bucketing as teb
from torch_ext_bucketing import fsdp as our_fsdp

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
WIDTH = 8
LEAVES = (
    *("linear", "linear", "linear", "scale", "few", "empty"),
    *("uneven", "uneven", "tied", "frozen", "narrow", "unused", "mlp"),
)
POLICIES = (
    MixedPrecisionPolicy(),
    MixedPrecisionPolicy(BF16),
    MixedPrecisionPolicy(BF16, FP32),
    MixedPrecisionPolicy(BF16, BF16, FP32),
    MixedPrecisionPolicy(FP32, BF16),
    MixedPrecisionPolicy(BF16, FP32, BF16, cast_forward_inputs=False),
    MixedPrecisionPolicy(FP16, FP16),
    MixedPrecisionPolicy(FP32, FP64),
)


class MLP(nn.Module):
    """A norm and two linear layers, which ranks may share by tensor parallelism."""

    kind = "mlp"

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Operators of two layers must agree in dtype, whatever units and policies cast to.
        y = self.norm(x.to(self.norm[0].weight.dtype))
        y = torch.tanh(self.up(y.to(self.up.weight.dtype)))
        return x + self.down(y.to(self.down.weight.dtype))

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Share the layers; the norm's gradients are partial sums on each rank."""
        plan = {
            "norm": PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=True
            ),
            "norm.0": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(self, mesh, plan)


class Leaf(nn.Module):
    """One operation. Types are promoted, so that casts at the borders of units change bits."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        shape = {"few": (3,), "empty": (0, WIDTH), "uneven": (7, WIDTH), "scale": (WIDTH,)}
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(shape.get(kind, (WIDTH, WIDTH))) / 4)
        if kind in ("linear", "unused"):
            self.bias = nn.Parameter(torch.randn(WIDTH) / 4)
        if kind == "narrow":  # frozen, and of another dtype than the rest of the unit
            self.weight = nn.Parameter(self.weight.detach().to(BF16))
        if kind in ("frozen", "narrow"):
            self.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "unused":
            return x * 0.5
        if self.kind in ("few", "empty"):
            return x + self.weight.sum() / 8
        if self.kind == "scale":
            return x * self.weight
        if self.kind == "uneven":
            return x + (x.unsqueeze(-2) * self.weight).mean((-1, -2)).unsqueeze(-1)
        y = (x.unsqueeze(-2) * self.weight).sum(-1)
        return torch.tanh(y + self.bias) if self.kind == "linear" else y


class Group(nn.Module):
    """Leaves one after the other, and the model's input once more."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.leaves = nn.ModuleList(MLP() if kind == "mlp" else Leaf(kind) for kind in kinds)

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        for leaf in self.leaves:
            x = leaf(x)
        return x + first / 2


class Model(nn.Module):
    def __init__(self, groups: tuple[tuple[str, ...], ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inlet = Leaf("linear")
        self.groups = nn.ModuleList(map(Group, groups))
        for group in self.groups:
            for leaf in group.leaves:
                if leaf.kind == "tied":
                    leaf.weight = self.inlet.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.inlet(x)
        for group in self.groups:
            x = group(x, first)
        return x.float().square().mean()


@dataclass(frozen=True)
class Call:
    """One call of ``fully_shard``; ``dim`` is that of two-dimensional parameters it divides."""

    modules: tuple[str, ...]
    policy: MixedPrecisionPolicy
    reshard: bool | int | None = None
    dim: int | None = None
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    groups: tuple[tuple[str, ...], ...]
    calls: tuple[Call, ...]
    replicas: int = 1
    tensor: int = 1

    def mesh(self) -> DeviceMesh:
        data = dist.get_world_size() // self.tensor
        sizes = {"replicas": self.replicas, "shards": data // self.replicas, "tensor": self.tensor}
        kept = {name: n for name, n in sizes.items() if n > 1 or name == "shards"}
        return init_device_mesh("cpu", tuple(kept.values()), mesh_dim_names=tuple(kept))

    def apply(self, fully_shard: Any, whole: DeviceMesh) -> Model:
        model = Model(self.groups)
        mesh = whole
        if self.tensor > 1:
            mesh = whole["shards"]
            for leaf in model.modules():
                if isinstance(leaf, MLP):
                    leaf.parallelize(whole["tensor"])
        shards = mesh.size(mesh.ndim - 1)
        plain = dict(model.named_parameters(remove_duplicate=False))

        for call in self.calls:

            def place(param: nn.Parameter, dim: int | None = call.dim) -> Shard | None:
                shape = getattr(param, "_local_tensor", param).shape
                fits = dim is not None and len(shape) == 2 and shape[dim] % shards == 0
                return Shard(dim) if fits and dim is not None else None

            modules = [model.get_submodule(name) for name in call.modules]
            fully_shard(
                modules[0] if len(modules) == 1 else modules,
                mesh=mesh,
                reshard_after_forward=call.reshard,
                shard_placement_fn=None if call.dim is None else place,
                mp_policy=call.policy,
                ignored_params={plain[name] for name in call.ignored} or None,
            )
        return model


ALL_SORTS = Program(
    (("linear", "uneven", "frozen"), ("scale", "few", "unused")),
    (
        Call(("groups.0",), POLICIES[2]),
        Call(("groups.1",), POLICIES[0], reshard=False, ignored=("groups.1.leaves.0.weight",)),
        Call(("",), POLICIES[2]),
    ),
    replicas=2,
)
"""What most models have some of, on four ranks."""


@st.composite
def programs(draw: st.DrawFn, ranks: int, tensor: int) -> Program:
    leaves = st.lists(st.sampled_from(LEAVES), min_size=1, max_size=3).map(tuple)
    groups = tuple(draw(st.lists(leaves, min_size=1, max_size=3)))
    ignorable = set(LEAVES) - {"tied", "mlp"}
    places = [(i, k) for i, g in enumerate(groups) for k in range(len(g)) if g[k] in ignorable]
    free = [f"groups.{i}.leaves.{k}.weight" for i, k in places]
    ignored = tuple(draw(st.lists(st.sampled_from(free), max_size=1))) if free else ()

    # Eager FSDP2 reshards to a smaller group only what is even, and on dimension 0.
    even = not {"few", "empty", "uneven", "mlp"} & {kind for kinds in groups for kind in kinds}

    def call(*modules: str) -> Call:
        reshard = draw(st.sampled_from([None, True, False, *([2] if ranks == 4 and even else [])]))
        dims = [None] if reshard == 2 else [None, None, 0, 1, -1]
        policy = draw(st.sampled_from(POLICIES))
        return Call(modules, policy, reshard, draw(st.sampled_from(dims)), ignored)

    calls = []
    for i, kinds in enumerate(groups):
        for k in range(len(kinds)):
            if draw(st.integers(0, 3)) == 0:
                calls.append(call(f"groups.{i}.leaves.{k}"))
    i = 0
    while i < len(groups):
        how = draw(st.sampled_from(["alone", "alone", "no", "pair"]))
        pair = how == "pair" and i + 1 < len(groups)
        if how != "no":
            calls.append(call(*(f"groups.{j}" for j in range(i, i + 1 + pair))))
        i += 1 + pair
    calls.append(call(""))
    replicas = draw(st.sampled_from([1, 2])) if ranks // tensor == 4 else 1
    return Program(groups, tuple(calls), replicas, tensor)


def steps(model: Model, run: Any, batch: int) -> list[torch.Tensor]:
    """Train for two steps; return losses, and this rank's shards of gradients and parameters."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    generator = torch.Generator().manual_seed(1 + batch)
    found = []
    for _ in range(2):
        loss = run(torch.randn(4, WIDTH, generator=generator))
        loss.backward()
        found.append(loss.detach())
        for p in model.parameters():
            grad = torch.zeros(0) if p.grad is None else getattr(p.grad, "_local_tensor", p.grad)
            found += [grad.clone(), getattr(p, "_local_tensor", p).detach().clone()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def compare(program: Program) -> str:
    """Run a program both ways; return "equal", what eager FSDP2 refuses, or what we do."""
    mesh = program.mesh()
    batch = dist.get_rank() // program.tensor
    try:
        eager = program.apply(eager_fsdp.fully_shard, mesh)
        expected = steps(eager, eager, batch)
    except Exception as error:
        return f"eager: {type(error).__name__}: {error}"
    torch._dynamo.reset()
    try:
        model = program.apply(our_fsdp.fully_shard, mesh)
        backend = teb.backend("aot_eager", teb.recipe(model), model=model)
    except (ValueError, NotImplementedError) as error:
        return f"ours: {type(error).__name__}: {error}"
    found = steps(model, torch.compile(model, backend=backend, fullgraph=True), batch)
    names = [n for n, _ in model.named_parameters()]
    for k, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        step, place = divmod(k, 1 + 2 * len(names))
        what = "loss" if not place else f"{('gradient', 'value')[1 - place % 2]} of "
        what += "" if not place else names[(place - 1) // 2]
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), what
        assert torch.equal(ours, theirs), f"step {step}: {what}: {ours} is not eager's {theirs}"
    return "equal"


def run_drawn(rank: int, examples: int, start: int, tensor: int) -> dict[str, int]:
    """Draw and compare programs on every rank; return how often each outcome came.

    ``tensor`` ranks share the layers of an ``mlp``.
    """
    outcomes: dict[str, int] = {}
    ranks = dist.get_world_size()

    @seed(start)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )
    @given(programs(ranks, tensor))
    @(example(ALL_SORTS) if (ranks, tensor) == (4, 1) else lambda check: check)
    def check(program: Program) -> None:
        note(str(program))
        try:
            outcome, failed = compare(program), None
        except Exception as error:
            outcome, failed = "failed", f"{type(error).__name__}: {error}"
        seen: list[Any] = [None] * ranks
        dist.all_gather_object(seen, failed)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        assert not any(seen), f"{program}\n{next(filter(None, seen))}"

    check()
    return outcomes
