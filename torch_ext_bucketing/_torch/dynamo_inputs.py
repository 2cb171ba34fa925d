"""Which input of a Dynamo graph is which parameter, and which compile it is.

Two sources of truth, the better first:

1. a module, of which a graph input *is* a parameter, whatever part of the model is compiled: the
   one that the caller named, else those that names are relative to (:func:`names_are_relative_to`);
2. the *source* that Dynamo recorded on each placeholder, the Python expression that reaches the
   tensor from the compiled frame, such as ``L['self']._modules['layers']._parameters['weight']``.
   Its path of modules is the FQN, relative to the module whose ``forward`` was compiled.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from ..fqns import canonical_fqn, parameters_by_name
from . import descriptors as _descriptors
from .private import private_torch
from .sharded import is_part, shard_of

with private_torch():
    from torch._guards import CompileContext, TracingContext

_STEP = re.compile(
    r"""\._(?P<table>modules|parameters|buffers)\[(?P<q>['"])(?P<key>.+?)(?P=q)\]"""
    r"""|\.(?P<attr>[A-Za-z_]\w*)"""
    r"""|\[(?P<index>\d+)\]"""
)
_ROOT = re.compile(r"""^(?:L\[['"]\w+['"]\]|G\[['"]\w+['"]\])""")


# As keys alone, for a set that is weak and ordered. The newest is last.
_roots: weakref.WeakKeyDictionary[torch.nn.Module, None] = weakref.WeakKeyDictionary()


def names_are_relative_to(model: torch.nn.Module) -> None:
    """Have the parameters of ``model`` known by their names in it, whatever part is compiled.

    For what makes orders and plans, whose names are the ones to be found. Where such models hold
    one another, the latest comes first. ``model`` is not kept alive.
    """
    _roots.pop(model, None)
    _roots[model] = None


def _models(model: torch.nn.Module | None) -> list[torch.nn.Module]:
    return list(_roots)[::-1] if model is None else [model]


def model_of(parameter: Any, model: torch.nn.Module | None = None) -> torch.nn.Module | None:
    """``model`` or the latest known one (:func:`names_are_relative_to`) with this parameter."""
    found = (one for one in _models(model) if any(p is parameter for p in one.parameters()))
    return next(found, None)


def is_first_compile() -> bool:
    """Whether the frame that Dynamo compiles now was not compiled before; True without Dynamo."""
    compile_id = CompileContext.current_compile_id()
    return compile_id is None or compile_id.frame_compile_id in (None, 0)


def frame_number() -> int | None:
    """The number of the code that Dynamo compiles now: a graph break leaves code with another one,
    a recompile has the same. None without Dynamo."""
    compile_id = CompileContext.current_compile_id()
    return None if compile_id is None else compile_id.frame_id


def input_fqns(
    gm: fx.GraphModule, example_inputs: Sequence[Any], model: torch.nn.Module | None = None
) -> dict[int, str]:
    """FQNs of the inputs that are parameters, by position, of a graph that Dynamo hands to a
    backend. They are relative to ``model``, or to the known one (:func:`names_are_relative_to`)
    that has the parameter, or else to the module whose ``forward`` Dynamo traced."""
    by_identity: dict[int, str] = {}  # only looked up: ids must not decide any order
    for one in _models(model):
        for name, parameter, _ in parameters_by_name(one):
            by_identity.setdefault(id(parameter), name)
    fqns: dict[int, str] = {}
    for index, placeholder in enumerate(gm.graph.find_nodes(op="placeholder")):
        example = example_inputs[index] if index < len(example_inputs) else None
        given = _grapharg_example(placeholder)
        fqn = by_identity.get(id(given)) or by_identity.get(id(example))
        source = getattr(placeholder, "_dynamo_source", None)
        if fqn is None and model is None and source is not None:
            fqn = source_fqn(source)
        if fqn is not None:
            fqns[index] = fqn
    return fqns


def activation_inputs(gm: fx.GraphModule) -> dict[int, tuple[str, weakref.ref[torch.Tensor]]]:
    """The inputs of the graph module that Dynamo hands to a backend that code before it computed,
    and that need a gradient: by position the name in the code that is compiled, and the tensor."""
    found = {}
    for index, placeholder in enumerate(gm.graph.find_nodes(op="placeholder")):
        tensor = _grapharg_example(placeholder)
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.is_leaf:
            name = _name(placeholder.meta["grapharg"].source)
            local = re.fullmatch(r"L\['(\w+)'\]", name)
            found[index] = (local[1] if local else name, weakref.ref(tensor))
    return found


def traced_input_fqns(graph: fx.Graph) -> dict[int, str]:
    """FQNs of the parameters among the inputs of the joint graph that is being compiled now, for
    config hooks: by the tensors that Dynamo lists, in the order in which they became inputs. Empty
    where these are not as many as the joint graph has, each of the same shape."""
    whole = _traced_tensors()
    inputs: dict[int, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        index = _descriptors.plain_index(_descriptors.base_input(node.meta.get("desc")))
        if index is not None and isinstance(node.meta.get("val"), torch.Tensor):
            inputs.setdefault(index, node)
    if len(inputs) != len(whole):
        return {}
    fqns: dict[int, str] = {}
    for index, tracked in zip(sorted(inputs), whole, strict=True):
        if str(tuple(shard_of(tracked.fake).shape)) != str(tuple(inputs[index].meta["val"].shape)):
            return {}
        fqn = source_fqn(tracked.source)
        if fqn is not None:
            fqns[index] = fqn
    return fqns


def is_compiling() -> bool:
    """Whether a compile runs now, in which inputs of graphs have sources."""
    return TracingContext.try_get() is not None


def traced_fqns() -> tuple[str | None, ...]:
    """The FQNs of the tensors that Dynamo met in the compile that runs now, in its order; None for
    what is no parameter, and nothing at all outside a compile.

    torch 2.15 forgets them before a backward graph is compiled, which has the context of its
    forward graph: what was found there is kept with it.
    """
    names = tuple(source_fqn(tracked.source) for tracked in _traced_tensors())
    context = TracingContext.try_get()
    if context is None:
        return names
    if names:
        _fqns_of_context[context] = names
    return _fqns_of_context.get(context, ())


_fqns_of_context: weakref.WeakKeyDictionary[TracingContext, tuple[str | None, ...]] = (
    weakref.WeakKeyDictionary()
)


def _traced_tensors() -> list[Any]:
    context = TracingContext.try_get()
    shape_env = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    sources: dict[str, Any] = {}
    for tracked in getattr(shape_env, "tracked_fakes", None) or ():
        if isinstance(tracked.fake, torch.Tensor):
            sources.setdefault(_name(tracked.source), tracked)
    # Beside an input that is a view its base is listed, which is none.
    for name in [n for n in sources if n.endswith("._base")]:
        if name.removesuffix("._base") in sources:
            del sources[name]
    # The shard of a parameter is listed beside it.
    return [t for n, t in sources.items() if not is_part(n, sources)]


def source_fqn(source: Any) -> str | None:
    """The FQN of a parameter's source, or None for what is no parameter of a module."""
    path, is_parameter = _walk(_name(source))
    return canonical_fqn(path) if path is not None and is_parameter else None


def _name(source: Any) -> str:
    # A property since torch 2.10, a method before.
    return source.name if isinstance(source.name, str) else str(source.name())


def module_path(expression: str) -> str | None:
    """The FQN of a module given as a Dynamo expression or as a plain FQN, or None."""
    if not _ROOT.match(expression):
        return expression if re.fullmatch(r"[\w.]*", expression) else None
    # A module-stack entry says L['self'].layers[0] or L['self']._modules['layers']...
    if expression.startswith("G["):
        return None
    return _walk(expression)[0]


def _walk(name: str) -> tuple[str | None, bool]:
    """The path of modules in a Dynamo expression, and whether it ends in a parameter."""
    root = _ROOT.match(name)
    if root is None:
        return None, False
    steps = list(_STEP.finditer(name, root.end()))
    if "".join(step[0] for step in steps) != name[root.end() :]:
        return None, False
    path = ".".join(step["key"] or step["attr"] or step["index"] for step in steps)
    return path, bool(steps) and steps[-1]["table"] == "parameters"


def _grapharg_example(placeholder: fx.Node) -> Any | None:
    arg = placeholder.meta.get("grapharg")
    try:
        return None if arg is None else arg.example
    except AssertionError:  # the weak reference to the input has expired
        return None
