"""Small models of the cases."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


class MLP(nn.Module):
    """Two layers, and a buffer on request."""

    def __init__(self, width=16, buffer=False):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("shift", torch.randn(width) if buffer else None)

    def forward(self, x):
        x = torch.tanh(self.down(torch.tanh(self.up(x))))
        return x if self.shift is None else x + self.shift

    def reset_parameters(self):
        nn.init.ones_(self.shift)


def mlps(number=2, width=16, buffer=False):
    return nn.Sequential(*(MLP(width, buffer) for _ in range(number)))


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width, again, dropout):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.mlp = nn.Linear(width, width), MLP(width)
        self.again, self.dropout = again, nn.Dropout(dropout)

    def forward(self, x):
        return checkpoint(self._forward, x, use_reentrant=False) if self.again else self._forward(x)

    def _forward(self, x):
        q, k, v = (y.unflatten(-1, (2, -1)).mT for y in self.qkv(self.norm(x)).chunk(3, -1))
        attended = torch.softmax(q.mT @ k, -1) @ v.mT
        return x + self.dropout(self.mlp(self.out(attended.flatten(-2))))


class LM(nn.Module):
    """A language model: a caller may leave out the head and run it by itself."""

    def __init__(self, layers=2, width=8, tied=False, again=False, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(37, width)
        self.layers = nn.ModuleList(Block(width, again, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 37, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens, head=True):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(x) if head else x


class Tower(nn.Module):
    """Has another method than ``forward``."""

    def __init__(self):
        super().__init__()
        self.inlet, self.outlet = nn.Linear(12, 8), nn.Linear(8, 8)

    def encode(self, x):
        return self.outlet(F.gelu(self.inlet(x)))

    def forward(self, x):
        return self.encode(x).sum(1)


class Towers(nn.Module):
    """Calls methods of units."""

    def __init__(self):
        super().__init__()
        self.image, self.text = Tower(), Tower()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.image.encode(x) @ self.text.encode(x).mT * self.scale[0]


class Lambda(nn.Module):
    """Linear layers ``a``, ``b`` and ``c``, and a function of the module and its inputs."""

    def __init__(self, function, layers=2, width=8):
        super().__init__()
        self.function = function
        for name in "abc"[:layers]:
            self.add_module(name, nn.Linear(width, width))

    def forward(self, *args):
        return self.function(self, *args)


def tied_pair():
    """Return an embedding ``a`` and an output ``b`` that has its weight."""
    model = Lambda(lambda m, x: m.b(m.a(x)), 0)
    model.a, model.b = nn.Embedding(37, 8), nn.Linear(8, 37, bias=False)
    model.b.weight = model.a.weight
    return model


def checkpointed(model):
    """Wrap each child so that backward computes it again."""
    for name, child in list(model.named_children()):
        model.add_module(name, checkpoint_wrapper(child))
    return model


def raised(function, *args, **kwargs):
    """Return the name of the class of the error that a call raises, or ""."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(getattr(error, "inner_exception", None) or error).__name__
    return ""
