"""Graphs as plain data, so that they can be kept on disk without being executed again.

Pickling a ``GraphModule`` drops the nodes' metadata, and the fake tensors of a pickle each come
with a mode of their own. Here a graph is JSON: its nodes with their targets by name, and of the
metadata what passes read after the partitioner:

- ``val``: shape, strides, dtype, offset, and *which* storage, so that views still alias;
- ``custom`` (tags), ``desc`` (AOTAutograd's descriptors), ``partitioner_tag``,
  ``autograd_backward``;
- ``unbacked_bindings``: the sizes that a node brings into the graph.

A size that depends on data is an expression of symbols such as ``u0``, and what torch knows of a
symbol (:mod:`.symbols`) is kept with the graph. Symbols for the sizes of inputs are refused.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch._functorch._aot_autograd import descriptors
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    CallMethodKey,
    ConvertIntKey,
    DivideByKey,
    InnerTensorKey,
    ShapeEnv,
)

from .symbols import Symbols, expression_to_data, symbols_to_data

_META = ("val", "custom", "desc", "partitioner_tag", "autograd_backward", "unbacked_bindings")
_LARGEST_CONSTANT = 64  # elements
_TRACED_ON = torch.device("cpu")
# The path from a node's result to a size that it brings in.
_KEYS: dict[str, Any] = {
    key.__name__: key
    for key in (pytree.SequenceKey, CallMethodKey, ConvertIntKey, DivideByKey, InnerTensorKey)
}


def to_data(gm: fx.GraphModule) -> dict[str, Any]:
    """What ``json`` can write. Equal graphs give equal data.

    Raises:
        TypeError: something in the graph has no plain form: a symbol for the size of an input, a
            submodule, a large constant, an unknown kind of argument; the message names the node.
    """
    encoder = _Encoder()
    nodes = []
    constants: dict[str, Any] = {}
    for index, node in enumerate(gm.graph.nodes):
        encoder.nodes[node] = index
        try:
            if node.op == "get_attr":
                constants[node.target] = _constant(getattr(gm, node.target))
            target = _target_name(node.target) if node.op == "call_function" else node.target
            meta = {k: encoder.encode(node.meta[k]) for k in _META if node.meta.get(k) is not None}
            args, kwargs = encoder.encode(node.args), encoder.encode(dict(node.kwargs))
        except TypeError as error:
            raise TypeError(f"node {node.name}: {error}") from None
        nodes.append([node.op, target, node.name, args, kwargs, meta])
    symbols = None if encoder.shape_env is None else symbols_to_data(encoder.shape_env)
    storages = encoder.storage_bytes
    return {"nodes": nodes, "storages": storages, "constants": constants, "symbols": symbols}


def from_data(data: dict[str, Any], mode: FakeTensorMode, device: torch.device) -> fx.GraphModule:
    """The graph, with the names it had, all its fake tensors in ``mode`` and on ``device``.

    Raises:
        ValueError: the graph has symbols, and ``mode`` has no ``ShapeEnv`` or one with symbols.
    """
    symbols = None if data["symbols"] is None else Symbols(data["symbols"], mode.shape_env)
    decoder = _Decoder(mode, device, data["storages"], symbols)
    graph = fx.Graph()
    for op, target, name, args, kwargs, meta in data["nodes"]:
        node = graph.create_node(
            op,
            decoder.target(target) if op == "call_function" else target,
            decoder.decode(args),
            decoder.decode(kwargs),
            name,
        )
        for key, value in meta.items():
            node.meta[key] = decoder.decode(value)
        decoder.nodes.append(node)
    root = torch.nn.Module()
    for name, (values, shape, dtype) in data["constants"].items():
        constant = torch.tensor(values, dtype=getattr(torch, dtype)).reshape(shape)
        root.register_buffer(name, constant, persistent=False)
    return fx.GraphModule(root, graph)


def _constant(value: Any) -> list[Any]:
    if not isinstance(value, torch.Tensor) or value.numel() > _LARGEST_CONSTANT:
        raise TypeError(f"the constant {type(value).__name__} is no small tensor")
    return [value.flatten().tolist(), list(value.shape), _name(value.dtype)]


def _target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    name = getattr(target, "__name__", "")
    for module in (operator, torch):  # torch.sym_sum and the like
        if getattr(module, name, None) is target and (module is operator or name[:4] == "sym_"):
            return f"{module.__name__.removeprefix('_')}.{name}"
    raise TypeError(f"can't write a call of {target!r}")


def _name(constant: Any) -> str:
    """``torch.float32`` -> ``"float32"``."""
    return str(constant).removeprefix("torch.")


class _Encoder:
    """Plain scalars stay as they are; everything else is a list that starts with its kind."""

    def __init__(self) -> None:
        self.nodes: dict[fx.Node, int] = {}
        self.storage_bytes: list[Any] = []
        self.shape_env: ShapeEnv | None = None
        self._storages: dict[int, int] = {}

    def encode(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
            return value
        if isinstance(value, fx.Node):
            return ["node", self.nodes[value]]
        if isinstance(value, FakeTensor):
            return self._tensor(value)
        if isinstance(value, tuple):
            return ["tuple", *map(self.encode, value)]
        if isinstance(value, list):
            return ["list", *map(self.encode, value)]
        if isinstance(value, dict):
            return ["dict", *([self.encode(k), self.encode(v)] for k, v in value.items())]
        if isinstance(value, slice):
            return ["slice", *map(self.encode, (value.start, value.stop, value.step))]
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return ["torch", _name(value)]
        if isinstance(value, torch.device):
            self._check(value)
            return ["device"]
        if isinstance(value, (descriptors.AOTInput, descriptors.AOTOutput)):
            fields = (getattr(value, f.name) for f in dataclasses.fields(value))
            return ["desc", type(value).__name__, *map(self.encode, fields)]
        if isinstance(value, FakeScriptObject):  # a device mesh, passed through by DTensor
            return ["opaque", value.script_class_name]
        if isinstance(value, (torch.SymInt, torch.SymBool)):
            return self._symbolic(value)
        if isinstance(value, sympy.Symbol):
            return ["symbol", expression_to_data(value)]
        if type(value).__name__ in _KEYS:
            fields = (getattr(value, f.name) for f in dataclasses.fields(value))
            return ["key", type(value).__name__, *map(self.encode, fields)]
        raise TypeError(f"can't write a {type(value).__name__}")

    def _tensor(self, value: FakeTensor) -> list[Any]:
        self._check(value.device)
        shape, stride = ([*map(self.encode, sizes)] for sizes in (value.shape, value.stride()))
        storage = value.untyped_storage()
        index = self._storages.setdefault(storage._cdata, len(self.storage_bytes))
        if index == len(self.storage_bytes):
            self.storage_bytes.append(self.encode(storage.nbytes()))
        offset = self.encode(value.storage_offset())
        return ["tensor", _name(value.dtype), index, offset, shape, stride]

    def _symbolic(self, value: torch.SymInt | torch.SymBool) -> Any:
        env, expression = value.node.shape_env, value.node.expr
        if self.shape_env not in (None, env):
            raise TypeError("it is symbolic in another ShapeEnv than the sizes before it")
        self.shape_env = env
        kind = "size" if isinstance(value, torch.SymInt) else "condition"
        return [kind, expression_to_data(expression)]

    @staticmethod
    def _check(device: torch.device) -> None:
        if device.type != _TRACED_ON.type:
            raise TypeError(f"it is on {device}, but graphs are traced on {_TRACED_ON}")


class _Decoder:
    def __init__(
        self,
        mode: FakeTensorMode,
        device: torch.device,
        storage_bytes: list[Any],
        symbols: Symbols | None,
    ) -> None:
        self.nodes: list[fx.Node] = []
        self._mode = mode
        self._device = device
        self._symbols = symbols
        self._storages = [_storage(self.decode(n)) for n in storage_bytes]
        self._targets: dict[str, Callable[..., Any]] = {}
        self._dtypes: dict[str, torch.Tensor] = {}

    def target(self, name: str) -> Callable[..., Any]:
        if name not in self._targets:
            namespace, op, *overload = name.split(".")
            modules = {"operator": operator, "torch": torch}
            found = getattr(torch.ops, namespace) if overload else modules[namespace]
            for part in (op, *overload):
                found = getattr(found, part)
            self._targets[name] = found
        return self._targets[name]

    def decode(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        kind, *rest = value
        if kind == "node":
            return self.nodes[rest[0]]
        if kind == "tensor":
            return self._tensor(*rest)
        if kind == "tuple":
            return tuple(map(self.decode, rest))
        if kind == "list":
            return list(map(self.decode, rest))
        if kind == "dict":
            return {self.decode(k): self.decode(v) for k, v in rest}
        if kind == "slice":
            return slice(*map(self.decode, rest))
        if kind == "torch":
            return getattr(torch, rest[0])
        if kind == "device":
            return self._device
        if kind == "desc":
            return getattr(descriptors, rest[0])(*map(self.decode, rest[1:]))
        if kind == "opaque":
            return FakeScriptObject(None, rest[0], None)
        if kind == "key":
            return _KEYS[rest[0]](*map(self.decode, rest[1:]))
        if self._symbols is not None and kind in ("size", "condition", "symbol"):
            return getattr(self._symbols, "expression" if kind == "symbol" else kind)(rest[0])
        raise ValueError(f"unknown kind {kind!r}")

    def _tensor(
        self, dtype: str, storage: int, offset: Any, shape: list[Any], stride: list[Any]
    ) -> FakeTensor:
        # No operator runs in the mode: that costs most of the time of loading.
        meta = torch.empty(0, dtype=getattr(torch, dtype), device="meta")
        layout = [self.decode(offset), *([*map(self.decode, sizes)] for sizes in (shape, stride))]
        meta.set_(self._storages[storage], *layout)
        return FakeTensor(self._mode, meta, self._device)


def _storage(nbytes: Any) -> torch.UntypedStorage:
    if isinstance(nbytes, int):
        return torch.UntypedStorage(nbytes, device="meta")
    # The constructor takes no symbolic size.
    return torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
