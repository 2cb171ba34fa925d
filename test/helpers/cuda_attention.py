"""Run CUDA's attention operators on the CPU, and see what a partitioner does with them."""

import functools
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.fx as fx
import torch.nn as nn
import torch.nn.attention.flex_attention as flex
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

import torch_ext_bucketing as teb
from torch_ext_bucketing._torch.aot import stage_of
from torch_ext_bucketing.errors import BucketingWarning
from torch_ext_bucketing.fsdp.shard import data_parallel
from torch_ext_bucketing.reports.compile import CompileReport

aten = torch.ops.aten
Result = tuple[Any, ...]
TOKENS, HEADS, DIM = 32, 2, 32


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def _backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
) -> Result:
    scale = q.shape[-1] ** -0.5
    p = (q @ k.mT * scale).softmax(-1)
    scores = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    return scores @ k, scores.mT @ q, p.mT @ grad


def _like_meta(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Result) -> Result:
    """Return zeros as ``op`` returns on meta tensors, the first of them filled with ``made``."""
    on_meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
    results = []
    for i, value in enumerate(op(*on_meta, **kwargs)):
        if isinstance(value, torch.Tensor):
            value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()
            if i < len(made):
                value.view_as(made[i]).copy_(made[i])
        results.append(value)
    return tuple(results)


def _kernel(op: Any, function: Callable[..., Result], at: tuple[int, ...]) -> Callable[..., Result]:
    def run(*args: Any, **kwargs: Any) -> Result:
        names = [a.name for a in op._schema.arguments]
        given = [args[i] if i < len(args) else kwargs[names[i]] for i in at]
        return _like_meta(op, args, kwargs, function(*given))

    return run


def _heads_first(x: torch.Tensor, tokens: int) -> torch.Tensor:
    return x.unflatten(0, (-1, tokens)).transpose(1, 2)


def _varlen_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any) -> Result:
    out, lse = _forward(*(_heads_first(x, args[2]) for x in (q, k, v)))
    lse = lse.transpose(0, 1).flatten(1)
    return out.transpose(1, 2).flatten(0, 1), lse, torch.empty(2, dtype=torch.uint64)


def _varlen_backward(*args: Any) -> Result:
    made = _backward(*(_heads_first(x, args[8]) for x in args[:5]))
    return tuple(x.transpose(1, 2).flatten(0, 1).contiguous() for x in made)


@functools.cache
def register() -> tuple[torch.library.Library, ...]:
    """Give CUDA's operators kernels for the CPU, in ordinary operations."""
    varlen = torch.library.Library("torch_attn", "IMPL")
    varlen.impl("_varlen_attn", _varlen_forward, "CPU")
    varlen.impl("_varlen_attn_backward", _varlen_backward, "CPU")
    library = torch.library.Library("aten", "IMPL")
    for name in ("cudnn", "flash", "efficient"):
        forward = getattr(aten, f"_scaled_dot_product_{name}_attention").default
        backward = getattr(aten, f"_scaled_dot_product_{name}_attention_backward").default
        names = [a.name for a in backward._schema.arguments]
        out = names.index("out")
        library.impl(forward, _kernel(forward, _forward, (0, 1, 2)), "CPU")
        library.impl(backward, _kernel(backward, _backward, (0, 1, 2, 3, out)), "CPU")
    return library, varlen


def fused(name: str, dropout: float = 0.0) -> Callable[..., torch.Tensor]:
    """Return a function that calls one of CUDA's operators."""
    op = getattr(aten, f"_scaled_dot_product_{name}_attention").default
    biased = name != "flash"

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return op(q, k, v, None, True, dropout)[0] if biased else op(q, k, v, dropout)[0]

    return attend


def _math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return nn.functional.scaled_dot_product_attention(q, k, v)


def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32) * q.shape[2]
    out = varlen_attn(*flat, starts, starts, q.shape[2], q.shape[2])
    return out.view(q.shape[0], q.shape[2], *q.shape[1::2]).transpose(1, 2)


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flex.flex_attention(q, k, v)


def _any_device(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Accept the CPU, where torch has no kernel for backward of FlexAttention."""


KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "cudnn": fused("cudnn"),
    "flash": fused("flash"),
    "efficient": fused("efficient"),
    "math": _math,
    "varlen": _varlen,
    "FlexAttention": _flex,
}


class Block(nn.Module):
    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.out = nn.Linear(HEADS * DIM, HEADS * DIM)
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (y.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return x + self.out(self.attend(*heads).transpose(1, 2).flatten(-2).tanh())


class Blocks(nn.Module):
    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(attend) for _ in range(2)])
        self.head = nn.Linear(HEADS * DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().sum()


class Stopped(Exception):
    """The partitioner has run, and nothing is compiled."""


def is_attention(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    # The math kernel consists of ordinary operators, and Inductor takes softmax apart.
    forward = any(part in name for part in ("atten", "attn", "_safe_softmax", "amax"))
    return node.op == "call_function" and forward and "backward" not in name


class Halves(CustomPartitionerFn):
    """Inductor's partitioner, or another one, which keeps its graphs and may stop there."""

    def __init__(self, stop: bool) -> None:
        self.stop = stop
        self.graphs: dict[str, fx.GraphModule] = {}

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        halves = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        self.graphs = dict(zip(("forward", "backward"), halves, strict=True))
        if self.stop:
            raise Stopped
        return halves

    def uuid(self) -> None:
        return None


def halves(
    model: nn.Module, compiler: str, *passes: teb.GraphPass, memory: teb.PeakMemory | None = None
) -> tuple[dict[str, fx.GraphModule], CompileReport]:
    """Compile a model up to the partitioner, under a bound; None: one that no choice keeps."""
    torch._dynamo.reset()
    register()
    sharded = data_parallel(model, init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    found = Halves(stop=compiler == "inductor")
    options: dict[str, Any] = {}

    def run(graph: fx.GraphModule, inputs: Any) -> Any:
        found.graphs[stage_of(graph.graph)] = graph
        return graph.forward

    recipe = teb.recipe(sharded, "speed", memory=memory or teb.PeakMemory(ratio=0.1))
    backend: Any = "inductor" if compiler == "inductor" else run
    if compiler == "inductor":
        options["options"] = {"custom_partitioner_fn": found}
    made = teb.backend(backend, passes=[*passes, *recipe], model=sharded, agree=False)
    step = torch.compile(sharded, backend=made, **options)
    try:
        with warnings.catch_warnings(), patch.object(flex, "_validate_device", _any_device):
            warnings.simplefilter("ignore", BucketingWarning)  # no choice keeps the bound
            step(torch.ones(2, TOKENS, HEADS * DIM)).backward()
    except BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, Stopped):
            raise
    return found.graphs, made.last_report()


def outcome(attend: Callable[..., torch.Tensor], compiler: str) -> str:
    """Return what becomes of an attention kernel in backward if memory is short."""
    graphs, _ = halves(Blocks(attend), compiler)
    kernels = [sum(map(is_attention, graphs[half].graph.nodes)) for half in ("forward", "backward")]
    assert kernels[0] == 2, graphs["forward"].code
    return {2: "recomputed", 0: "saved"}.get(kernels[1], f"{kernels[1]} of 2 recomputed")
