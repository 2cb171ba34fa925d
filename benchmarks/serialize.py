"""Serialize graphs to bytes, so that they can be kept on disk.

Pickling a ``GraphModule`` drops the nodes' metadata, and the fake tensors of a pickle each come
with a mode of their own. Here the nodes are pickled with what passes read after the partitioner:

- ``val``: shape, strides, dtype, offset, and *which* storage, so that views still alias;
- ``custom`` (tags), ``desc`` (AOTAutograd's descriptors), ``partitioner_tag``,
  ``autograd_backward``;
- ``unbacked_bindings``: the sizes that a node brings into the graph.

A size that depends on data is an expression of symbols such as ``u0``. What torch knows of each
symbol is kept with the graph: the least and the largest value, the hint that torch was given for
it, what it was found to equal, and the assertions that torch leaves for the graph to check, which
constrain such sizes (``u0 + u1 == 8192``). Symbols for the sizes of inputs are refused.
"""

import io
import pickle
import re
from typing import Any

import torch
import torch.fx as fx
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import RuntimeAssert, ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges
from torch.utils._traceback import CapturedTraceback

_META = ("val", "custom", "desc", "partitioner_tag", "autograd_backward", "unbacked_bindings")


def to_data(gm: fx.GraphModule) -> dict[str, Any]:
    """Return data that ``pickle`` can write."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    constants: dict[str, Any] = {}
    for index, node in enumerate(gm.graph.nodes):
        pickler.nodes[node] = index
        if node.op == "get_attr":
            constants[node.target] = getattr(gm, node.target)
        meta = {k: node.meta[k] for k in _META if node.meta.get(k) is not None}
        try:
            pickler.dump((node.op, node.target, node.args, dict(node.kwargs), node.name, meta))
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise TypeError(f"node {node.name}: {error}") from None
    symbols = None if pickler.shape_env is None else symbols_to_data(pickler.shape_env)
    count = len(pickler.nodes)
    return {"nodes": file.getvalue(), "count": count, "constants": constants, "symbols": symbols}


def from_data(data: dict[str, Any], mode: FakeTensorMode, device: torch.device) -> fx.GraphModule:
    """Rebuild the graph on ``device``, with its names, and all its fake tensors in ``mode``."""
    if data["symbols"] is not None:
        add_symbols(data["symbols"], mode.shape_env)
    unpickler = _Unpickler(data["nodes"], mode, device)
    graph = fx.Graph()
    for _ in range(data["count"]):
        *parts, meta = unpickler.load()
        node = graph.create_node(*parts)
        node.meta.update(meta)
        unpickler.nodes.append(node)
    root = torch.nn.Module()
    for name, constant in data["constants"].items():
        root.register_buffer(name, constant, persistent=False)
    return fx.GraphModule(root, graph)


class _Pickler(pickle.Pickler):
    """Pickle known nodes, fake tensors, sizes, devices and operators; see :class:`_Unpickler`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.nodes: dict[fx.Node, int] = {}
        self.shape_env: ShapeEnv | None = None
        self._storages: dict[int, int] = {}

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if isinstance(value, FakeTensor):
            storage = value.untyped_storage()
            index = self._storages.setdefault(storage._cdata, len(self._storages))
            where = value.storage_offset(), tuple(value.shape), value.stride()
            return ("tensor", value.dtype, index, storage.nbytes(), *where)
        if isinstance(value, (torch.SymInt, torch.SymBool)):
            return self._symbolic(value)
        if isinstance(value, fx.Node):
            return ("node", self.nodes[value])
        if isinstance(value, torch._ops.OpOverload):
            return ("operator", str(value))
        if isinstance(value, (torch.layout, torch.memory_format)):
            return ("constant", str(value).removeprefix("torch."))
        if isinstance(value, torch.device):
            return ("device",)
        if isinstance(value, FakeScriptObject):  # a device mesh, passed through by DTensor
            return ("opaque", value.script_class_name)
        return None

    def _symbolic(self, value: torch.SymInt | torch.SymBool) -> tuple[Any, ...]:
        env, expression = value.node.shape_env, value.node.expr
        if self.shape_env not in (None, env):
            raise TypeError("it is symbolic in another ShapeEnv than the sizes before it")
        self.shape_env = env
        for symbol in expression.free_symbols:
            if not _depends_on_data(symbol):
                raise TypeError(f"its size is symbolic, and {symbol} does not depend on data")
        return ("size" if isinstance(value, torch.SymInt) else "condition", expression)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__(io.BytesIO(data))
        self.nodes: list[fx.Node] = []
        self._mode = mode
        self._env: Any = mode.shape_env
        self._device = device
        self._storages: dict[int, torch.UntypedStorage] = {}

    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        kind, *rest = pid
        return self._device if kind == "device" else getattr(self, f"_{kind}")(*rest)

    def _tensor(
        self, dtype: torch.dtype, index: int, nbytes: Any, offset: Any, shape: Any, stride: Any
    ) -> FakeTensor:
        # No operator runs in the mode: that costs most of the time of loading.
        if index not in self._storages:
            new = torch.empty(nbytes, dtype=torch.uint8, device="meta")
            self._storages[index] = new.untyped_storage()
        meta = torch.empty(0, dtype=dtype, device="meta")
        meta.set_(self._storages[index], offset, shape, stride)
        return FakeTensor(self._mode, meta, self._device)

    def _size(self, expression: Any) -> torch.SymInt | int:
        return self._env.create_symintnode(expression, hint=None)

    def _condition(self, expression: Any) -> torch.SymBool:
        return self._env.create_symboolnode(expression)

    def _node(self, index: int) -> fx.Node:
        return self.nodes[index]

    def _operator(self, name: str) -> Any:
        found = torch.ops
        for part in name.split("."):
            found = getattr(found, part)
        return found

    def _constant(self, name: str) -> Any:
        return getattr(torch, name)

    def _opaque(self, name: str) -> FakeScriptObject:
        return FakeScriptObject(None, name, None)


# --- sizes that depend on data -----------------------------------------------------------------


def _depends_on_data(symbol: Any) -> bool:
    return re.fullmatch(r"u\d+", symbol.name) is not None


def symbols_to_data(env: ShapeEnv) -> dict[str, Any]:
    """Return the entries of ``env`` about symbols that depend on data; see :func:`add_symbols`."""

    def of(known: Any) -> dict[Any, Any]:
        return {symbol: known[symbol] for symbol in known if _depends_on_data(symbol)}

    asserted = of(env.deferred_runtime_asserts)
    return {
        "ranges": {s: (r.lower, r.upper) for s, r in of(env.var_to_range).items()},
        "hints": of(env.var_to_hint_override),
        "size_like": {symbol for symbol in env.size_like if _depends_on_data(symbol)},
        "replacements": of(env.replacements),
        "assertions": {s: [(a.expr, a.msg) for a in known] for s, known in asserted.items()},
    }


def add_symbols(data: dict[str, Any], env: ShapeEnv | None) -> None:
    """Give a new ``env`` the symbols of :func:`symbols_to_data` and their bounds and hints."""
    if env is None or env.var_to_range:
        raise ValueError("a graph with sizes that depend on data needs a new ShapeEnv")
    last = max((int(symbol.name[1:]) for symbol in data["ranges"]), default=-1)
    with env.ignore_fresh_unbacked_symbols():
        for _ in range(last + 1):
            env.create_unbacked_symint()
    for symbol, expression in data["replacements"].items():
        env._set_replacement(symbol, expression, "loaded")
    for symbol, bounds in data["ranges"].items():
        env.var_to_range[symbol] = ValueRanges(*bounds)
    env.var_to_hint_override.update(data["hints"])
    env.size_like.update(data["size_like"])
    for symbol, assertions in data["assertions"].items():
        for expression, message in assertions:
            assertion = RuntimeAssert(expression, message, CapturedTraceback.extract())
            env.deferred_runtime_asserts.setdefault(symbol, []).append(assertion)
            env.num_deferred_runtime_asserts += 1
            env.axioms.update(env.get_implications(env.simplify(expression)))
    env._update_version_counter()  # drops what it has concluded so far
