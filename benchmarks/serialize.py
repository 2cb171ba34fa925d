"""Graphs as plain data, so that they can be kept on disk without being executed again.

Pickling a ``GraphModule`` drops the nodes' metadata, and the fake tensors of a pickle each come
with a mode of their own. Here a graph is JSON: its nodes with their targets by name, and of the
metadata what passes read after the partitioner:

- ``val``: shape, strides, dtype, offset, and *which* storage, so that views still alias;
- ``custom`` (tags), ``desc`` (AOTAutograd's descriptors), ``partitioner_tag``,
  ``autograd_backward``;
- ``unbacked_bindings``: the sizes that a node brings into the graph.

A size that depends on data is an expression of symbols such as ``u0``: a number, the name of a
symbol, or a list of a function's name and its arguments. What torch knows of each symbol is kept
with the graph: the least and the largest value, the hint that torch was given for it, what it was
found to equal, and the assertions that torch leaves for the graph to check, from which it concludes
what such sizes are (``u0 + u1 == 8192``). Symbols for the sizes of inputs are refused.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable
from typing import Any

import sympy
import torch
import torch.fx as fx
import torch.utils._pytree as pytree
import torch.utils._sympy.functions as torch_functions
from torch._functorch._aot_autograd import descriptors
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    CallMethodKey,
    ConvertIntKey,
    DivideByKey,
    InnerTensorKey,
    RuntimeAssert,
    ShapeEnv,
)
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges
from torch.utils._traceback import CapturedTraceback

_META = ("val", "custom", "desc", "partitioner_tag", "autograd_backward", "unbacked_bindings")
_LARGEST_CONSTANT = 64  # elements
_TRACED_ON = torch.device("cpu")
# The path from a node's result to a size that it brings in.
_KEYS = (pytree.SequenceKey, CallMethodKey, ConvertIntKey, DivideByKey, InnerTensorKey)
_MADE_OF_FIELDS = vars(descriptors) | {key.__name__: key for key in _KEYS}


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
        if isinstance(value, (tuple, list)):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return [kind, *map(self.encode, value)]
        if isinstance(value, dict):
            return ["dict", *([self.encode(k), self.encode(v)] for k, v in value.items())]
        if isinstance(value, slice):
            return ["slice", *map(self.encode, (value.start, value.stop, value.step))]
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return ["torch", _name(value)]
        if isinstance(value, torch.device):
            self._check(value)
            return ["device"]
        if isinstance(value, (descriptors.AOTInput, descriptors.AOTOutput, *_KEYS)):
            fields = (getattr(value, f.name) for f in dataclasses.fields(value))
            return ["made", type(value).__name__, *map(self.encode, fields)]
        if isinstance(value, FakeScriptObject):  # a device mesh, passed through by DTensor
            return ["opaque", value.script_class_name]
        if isinstance(value, (torch.SymInt, torch.SymBool)):
            return self._symbolic(value)
        if isinstance(value, sympy.Symbol):
            return ["symbol", expression_to_data(value)]
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
        if kind in ("tuple", "list"):
            return (tuple if kind == "tuple" else list)(map(self.decode, rest))
        if kind == "dict":
            return {self.decode(k): self.decode(v) for k, v in rest}
        if kind == "slice":
            return slice(*map(self.decode, rest))
        if kind == "torch":
            return getattr(torch, rest[0])
        if kind == "device":
            return self._device
        if kind == "made":
            return _MADE_OF_FIELDS[rest[0]](*map(self.decode, rest[1:]))
        if kind == "opaque":
            return FakeScriptObject(None, rest[0], None)
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


# --- sizes that depend on data -----------------------------------------------------------------


def expression_to_data(expression: Any) -> Any:
    """What ``json`` can write.

    Raises:
        TypeError: a symbol is no whole number that depends on data, or a function is not known.
    """
    if isinstance(expression, sympy.Symbol):
        if not re.fullmatch(r"u\d+", expression.name):
            raise TypeError(f"its size is symbolic, and {expression} does not depend on data")
        return expression.name
    if expression.is_Integer:
        return int(expression)
    if expression in (sympy.true, sympy.false):
        return bool(expression)
    if expression in (int_oo, -int_oo):
        return [str(expression)]
    name = type(expression).__name__
    if _function(name) is not type(expression):
        raise TypeError(f"can't write the expression {expression} with its {name}")
    return [name, *map(expression_to_data, expression.args)]


def _function(name: str) -> Any:
    return getattr(torch_functions, name, None) or getattr(sympy, name, None)


def symbols_to_data(env: ShapeEnv) -> dict[str, Any]:
    """What ``env`` knows of the symbols that depend on data. See :class:`Symbols`.

    Raises:
        TypeError: see :func:`expression_to_data`.
    """
    data = expression_to_data
    mine = [s for s in env.var_to_range if re.fullmatch(r"u\d+", s.name)]
    ranges = [(s, env.var_to_range[s]) for s in mine]
    return {
        "ranges": [[data(s), data(r.lower), data(r.upper)] for s, r in ranges],
        "hints": [[data(s), n] for s, n in env.var_to_hint_override.items() if s in mine],
        "size_like": sorted(data(s) for s in env.size_like if s in mine),
        "replacements": [[data(s), data(e)] for s, e in env.replacements.items() if s in mine],
        "assertions": [
            [data(s), data(a.expr), a.msg]
            for s, assertions in env.deferred_runtime_asserts.items()
            if s in mine
            for a in assertions
        ],
    }


class Symbols:
    """The symbols of a graph in a ``ShapeEnv`` that has none.

    Args:
        data: of :func:`symbols_to_data`.
        env: gets the symbols, with what is known of them.

    Raises:
        ValueError: there is no ``env``, or it has symbols.
    """

    def __init__(self, data: dict[str, Any], env: ShapeEnv | None) -> None:
        if env is None or env.var_to_range:
            raise ValueError("a graph with sizes that depend on data needs a new ShapeEnv")
        self._env = env
        self._symbols: dict[str, Any] = {}
        last = max((int(name[1:]) for name, *_ in data["ranges"]), default=-1)
        with env.ignore_fresh_unbacked_symbols():
            for _ in range(last + 1):
                symbol = env.create_unbacked_symint().node.expr
                self._symbols[symbol.name] = symbol
        for name, expression in data["replacements"]:
            env._set_replacement(self.expression(name), self.expression(expression), "loaded")
        for name, lower, upper in data["ranges"]:
            bounds = ValueRanges(self.expression(lower), self.expression(upper))
            env.var_to_range[self.expression(name)] = bounds
        for name, hint in data["hints"]:
            env.var_to_hint_override[self.expression(name)] = hint
        env.size_like.update(map(self.expression, data["size_like"]))
        for name, expression, message in data["assertions"]:
            checked = self.expression(expression)
            assertion = RuntimeAssert(checked, message, CapturedTraceback.extract())
            env.deferred_runtime_asserts.setdefault(self.expression(name), []).append(assertion)
            env.num_deferred_runtime_asserts += 1
            env.axioms.update(env.get_implications(env.simplify(checked)))
        env._update_version_counter()  # drops what it has concluded so far

    def expression(self, data: Any) -> Any:
        """What :func:`expression_to_data` was given."""
        if isinstance(data, str):
            return self._symbols[data]
        if isinstance(data, bool):
            return sympy.true if data else sympy.false
        if isinstance(data, int):
            return sympy.Integer(data)
        name, *args = data
        if name in ("int_oo", "-int_oo"):
            return int_oo if name == "int_oo" else -int_oo
        return _function(name)(*map(self.expression, args))

    def size(self, data: Any) -> torch.SymInt | int:
        """The size that an expression stands for."""
        return self._env.create_symintnode(self.expression(data), hint=None)

    def condition(self, data: Any) -> torch.SymBool:
        """The truth value that an expression stands for."""
        return self._env.create_symboolnode(self.expression(data))
