"""Apply tensor parallelism by hand, as Megatron does, or by torch's ``parallelize_module``."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torch_ext_bucketing.testing.training import Block, RMSNorm, rotary_tables, rotate

from .base import SEQ, ParityModel

_c10d = torch.ops._c10d_functional


class _Enter(torch.autograd.Function):
    """The same activation on every tensor-parallel rank; its gradients are added."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _all_reduce(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    """The sum of every tensor-parallel rank's part; its gradient is everyone's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:  # type: ignore[override]
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return grad.view_as(grad), None


def _all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), "sum", group))


class TensorParallelBlock(Block):
    """A decoder block; this rank has some of its heads and some columns of its MLP."""

    group: str

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        branch = self.attention(_Enter.apply(self.attention_norm(x), self.group), cos, sin)
        x = x + _Leave.apply(branch, self.group) * self.attention_gamma
        branch = self.mlp(_Enter.apply(self.mlp_norm(x), self.group))
        return x + _Leave.apply(branch, self.group) * self.mlp_gamma


def cut(model: nn.Module, mesh: DeviceMesh) -> None:
    """Keep one rank's part of every :class:`.Block`, in place, as Megatron cuts it."""
    rank, size, group = mesh.get_local_rank(), mesh.size(), mesh.get_group().group_name
    for block in model.get_submodule("layers").children():
        assert isinstance(block, Block)
        block.__class__ = TensorParallelBlock
        block.group = group  # type: ignore[assignment]
        attention, mlp = block.attention, block.mlp
        attention.heads //= size
        attention.kv_heads //= size
        assert attention.scale is not None
        attention.scale = nn.Parameter(attention.scale.detach().chunk(size)[rank].clone())
        for linear in (attention.wq, attention.wk, attention.wv, mlp.gate, mlp.up):
            linear.weight = nn.Parameter(linear.weight.detach().chunk(size)[rank].clone())
        for linear in (attention.wo, mlp.down):
            linear.weight = nn.Parameter(linear.weight.detach().chunk(size, dim=1)[rank].clone())


class TensorAttention(nn.Module):
    """Causal attention; a rank has the heads whose columns it has."""

    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        q, k, v = (
            linear(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TensorBlock(nn.Module):
    """Pre-norm transformer block, that reads further activations as well."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim)
        self.attention = TensorAttention(dim, dim // 4)
        self.ffn_norm = RMSNorm(dim)
        self.feed_forward = FeedForward(dim, dim * 2)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *read: torch.Tensor
    ) -> torch.Tensor:
        for other in read:
            x = x + other * torch.sigmoid(other)
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class TensorDecoder(ParityModel):
    """A decoder for ``parallelize_module``: every parameter is in a module without children."""

    def __init__(self, layers: int, dim: int, *, shares: bool = False) -> None:
        super().__init__(dim, nn.ModuleList(TensorBlock(dim) for _ in range(layers)))
        self.shares = shares
        cos, sin = rotary_tables(SEQ, dim // 4)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        read = (x,) if self.shares else ()
        for layer in self.layers.children():
            x = layer(x, self.rope_cos, self.rope_sin, *read)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def block_plan(*, sequence: bool) -> dict[str, Any]:
    """Return styles of ``parallelize_module`` for a pre-norm block, sharded as Megatron does."""
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=between),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=between),
        "feed_forward.w3": ColwiseParallel(),
    }
    if sequence:
        plan |= {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None),
                desired_input_layouts=(Replicate(), None, None),
            ),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
        }
    return plan


def parallelize(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Shard columns and rows of every block, embedding and head, by ``parallelize_module``."""
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan, src_data_rank=None)
    for block in model.get_submodule("layers").children():
        parallelize_module(block, mesh, block_plan(sequence=sequence), src_data_rank=None)
