"""Map the inputs of a Dynamo graph to parameters, and identify the current compile.

Two sources, the better first:

1. A module with a parameter that *is* a graph input: the module that the caller passed, else the
   one that the passes were made for, else one that :func:`names_are_relative_to` registered.
2. The *source* that Dynamo recorded on each placeholder: the Python expression that reaches the
   tensor from the compiled frame, such as ``L['self']._modules['layers']._parameters['weight']``.
   Its path is the FQN relative to the module whose ``forward`` was compiled. A decorated
   ``forward`` has that module as ``L['args'][0]``.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.fx as fx

from ..fqns import canonical_fqn, parameters_by_name
from . import private_torch
from .aot import fake_mode_of, input_key
from .fsdp2 import is_distributed, is_part, shard_of

with private_torch():
    from torch._dynamo import OptimizedModule, callback_handler, lookup_backend
    from torch._dynamo.comptime import comptime as while_tracing
    from torch._guards import CompileContext, TracingContext, tracing
    from torch._inductor.runtime.cache_dir_utils import cache_dir as cache_dir

# `while_tracing(function)` calls `function(context)` when Dynamo traces the line.
__all__ = ["while_tracing"]

Compiler = Callable[..., Callable[..., Any]]

_STEP = re.compile(
    r"""\._(?P<table>modules|parameters|buffers)\[(?P<q>['"])(?P<key>.+?)(?P=q)\]"""
    # The shard that a class of `fsdp.modules` reads.
    r"""|\._unshards\[(?P<quote>['"])(?P<shard>.+?)(?P=quote)\]\.managed\.sharded_param"""
    r"""|\.(?P<attr>\w+)"""
    r"""|\[(?P<index>\d+)\]"""
)
_ROOT = re.compile(r"""^(?:L\[['"]args['"]\]\[0\]|L\[['"]\w+['"]\]|G\[['"]\w+['"]\])""")

# Operators that take parameters which their functions read as operands, and not as ``DTensor``.
_BRANCHES = {"cond", "while_loop", "scan", "associative_scan", "map_impl"}

# A weak and ordered set, the newest model last.
_roots: weakref.WeakKeyDictionary[torch.nn.Module, None] = weakref.WeakKeyDictionary()

# By pass: the model that a recipe made it for, and that model's FQNs. Not a field of the pass, so
# that neither its cache key nor its pickle has a model.
_made_for: weakref.WeakKeyDictionary[
    Any, tuple[Callable[[], torch.nn.Module | None], frozenset[str]]
] = weakref.WeakKeyDictionary()


def names_are_relative_to(
    model: torch.nn.Module, passes: Iterable[Any] = (), *, keep: bool = False
) -> None:
    """Register ``model``, weakly, so that FQNs are relative to it whatever part is compiled.

    Of models that contain one another, the one registered last is used; a backend with some of
    ``passes`` uses ``model`` in any case. With ``keep`` the passes keep it alive.
    """
    _roots.pop(model, None)
    _roots[model] = None
    fqns = frozenset(name for name, _, _ in parameters_by_name(model))
    for p in passes:
        _made_for[p] = (lambda: model) if keep else weakref.ref(model), fqns


def _models(model: torch.nn.Module | None) -> list[torch.nn.Module]:
    return list(_roots)[::-1] if model is None else [model]


def registered_model(
    parameter: Any, model: torch.nn.Module | None = None
) -> torch.nn.Module | None:
    """Return ``model``, or the model registered last, if it has this parameter; else None."""
    for candidate in _models(model):
        if any(p is parameter for _, p, _ in parameters_by_name(candidate)):
            return candidate
    return None


def local_while_tracing(context: Any, name: str) -> Any:
    """Return the object in a local variable of the function that Dynamo traces.

    ``context`` is the argument of the function given to :data:`while_tracing`.
    """
    variable = context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()
    return variable.value


def branch_while_tracing(context: Any) -> str | None:
    """Return the operator whose branch or body Dynamo traces, such as ``cond``, or None."""
    translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    tracer = translator.output.current_tracer
    while tracer is not None:
        name = getattr(tracer.source_target, "__name__", None)
        if name in _BRANCHES:
            return str(name)
        tracer = tracer.parent
    return None


def wrapped_by_compile(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that ``torch.compile(module)`` made this one of, or None."""
    return module._orig_mod if isinstance(module, OptimizedModule) else None


def forget_tensors_when_compiled(gm: fx.GraphModule) -> None:
    """Drop Dynamo's references to the parameters of a compile when it ends.

    ``Module.to()`` and ``to_empty()`` swap a sharded parameter, which ``torch.utils.swap_tensors``
    refuses while a weak reference to it exists. Dynamo drops its own for backends that it has
    registered (``clear_compile_context_weakrefs``, since 2.13).
    """
    context: Any = TracingContext.try_get()
    if context is None:  # not called by Dynamo
        return
    inputs = (node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder"))
    modes = {context.fake_mode, *(fake_mode_of(value) for value in inputs)} - {None}

    def forget(_: Any) -> None:
        # A new list: the old one is iterated now.
        callbacks = callback_handler.end_callbacks
        callback_handler.end_callbacks = [c for c in callbacks if c is not forget]
        context.tensor_to_context.clear()
        for mode in modes:
            describer = mode.fake_tensor_converter.meta_converter.describer
            describer.lookup_tensor.clear()
            describer.lookup_storage.clear()

    callback_handler.register_end_callback(forget)


def is_first_compile() -> bool:
    """Return whether Dynamo compiles this frame for the first time; True without Dynamo."""
    compile_id = CompileContext.current_compile_id()
    return compile_id is None or compile_id.frame_compile_id in (None, 0)


def frame_number() -> int | None:
    """Return the number of the frame that Dynamo compiles, equal in a recompile, or None."""
    compile_id = CompileContext.current_compile_id()
    return None if compile_id is None else compile_id.frame_id


def input_fqns(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    model: torch.nn.Module | None = None,
    passes: Iterable[Any] = (),
) -> tuple[dict[int, str], list[str]]:
    """Map the indices of a Dynamo graph's parameter inputs to FQNs.

    FQNs are relative to ``model``, else to the model that a recipe made one of ``passes`` for, else
    to a registered model that has the parameter, else to the module whose ``forward`` Dynamo
    traced. A name of the last sort that a recipe's model has not, or another input has, is a guess.
    Also returns Dynamo's expressions of sharded parameters without a name or with a guessed one.
    """
    reference, names = next((_made_for[p] for p in passes if p in _made_for), (None, None))
    first = reference() if model is None and reference is not None else None
    by_identity: dict[int, str] = {}  # only looked up: ids must not decide an order
    for module in ([] if first is None else [first]) + _models(model):
        for registered in (False, True):  # shards, and what FSDP2 gathered around the graph
            for name, parameter, _ in parameters_by_name(module, registered):
                by_identity.setdefault(id(parameter), name)
    fqns: dict[int, str] = {}
    unnamed: list[tuple[int, Any, Any]] = []
    for index, placeholder in enumerate(gm.graph.find_nodes(op="placeholder")):
        example = example_inputs[index] if index < len(example_inputs) else None
        traced = _grapharg_example(placeholder)
        traced = getattr(traced, "_sums_gradients_of", traced)
        fqn = by_identity.get(id(traced)) or by_identity.get(id(example))
        if fqn is not None:
            fqns[index] = fqn
        else:
            source = getattr(placeholder, "_dynamo_source", None)
            unnamed.append((index, source, example if traced is None else traced))
    # A source is only relative to the compiled module, so it must not take a name that is known.
    guessed = []
    used = set(fqns.values())
    for index, source, tensor in unnamed:
        fqn = source_fqn(source) if model is None and source is not None else None
        is_free = fqn not in used
        if fqn is not None and is_free:
            fqns[index] = fqn
        is_known = fqn is not None and is_free and (names is None or fqn in names)
        if not is_known and isinstance(tensor, torch.nn.Parameter) and is_distributed(tensor):
            guessed.append("?" if source is None else str(source.name))
    return fqns, guessed


def sums_gradients_of(leaf: torch.Tensor, param: torch.nn.Parameter) -> None:
    """Name ``leaf``, an input of later graphs, as ``param``, whose gradients it accumulates."""
    leaf._sums_gradients_of = param  # type: ignore[attr-defined]


def activation_inputs(gm: fx.GraphModule) -> dict[int, tuple[str, weakref.ref[torch.Tensor]]]:
    """Map a Dynamo graph's inputs that are activations with a gradient to names and tensors."""
    activations = {}
    for index, placeholder in enumerate(gm.graph.find_nodes(op="placeholder")):
        tensor = _grapharg_example(placeholder)
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.is_leaf:
            name = placeholder.meta["grapharg"].source.name
            local = re.fullmatch(r"L\['(\w+)'\]", name)
            activations[index] = (local[1] if local else name, weakref.ref(tensor))
    return activations


def traced_input_fqns(graph: fx.Graph) -> dict[int, str]:
    """Map the indices of parameter inputs of the joint graph in compilation to FQNs.

    Empty if the number of inputs or a shape differs from Dynamo's.
    """
    # For config hooks, which see no Dynamo graph. Dynamo lists tensors in the order of the inputs.
    whole = _traced_tensors()
    inputs: dict[int, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        index = input_key(node.meta.get("desc"))
        if isinstance(index, int) and isinstance(node.meta.get("val"), torch.Tensor):
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
    """Return whether Dynamo compiles now, so that inputs of graphs have sources."""
    return TracingContext.try_get() is not None


def traced_fqns() -> tuple[str | None, ...]:
    """Return the FQN of each tensor in the current compile, in Dynamo's order.

    Other tensors than parameters have None. Empty outside of a compile.
    """
    names = tuple(source_fqn(tracked.source) for tracked in _traced_tensors())
    context = TracingContext.try_get()
    if context is None:
        return names
    # torch 2.15 drops the tensors before it compiles the backward graph, in the same context.
    if names:
        _fqns_of_context[context] = names
    return _fqns_of_context.get(context, ())


_fqns_of_context: weakref.WeakKeyDictionary[TracingContext, tuple[str | None, ...]] = (
    weakref.WeakKeyDictionary()
)


def _traced_tensors() -> list[Any]:
    """List the fake tensors of Dynamo's inputs, without bases of views and parts of shards."""
    context = TracingContext.try_get()
    shape_env = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    sources: dict[str, Any] = {}
    for tracked in getattr(shape_env, "tracked_fakes", None) or ():
        if isinstance(tracked.fake, torch.Tensor):
            sources.setdefault(tracked.source.name, tracked)
    # Dynamo lists an input that is a view together with its base, which is not an input.
    for name in [n for n in sources if n.endswith("._base")]:
        if name.removesuffix("._base") in sources:
            del sources[name]
    # Dynamo lists a parameter together with its shard.
    return [t for n, t in sources.items() if not is_part(n, sources)]


def source_fqn(source: Any) -> str | None:
    """Return the FQN of a parameter's source, or None for another source."""
    path, is_parameter = _walk(source.name)
    return canonical_fqn(path) if path is not None and is_parameter else None


def module_of(node: fx.Node) -> str | None:
    """Return the FQN of the module whose ``forward`` or its backward made a node, or None."""
    meta = node.meta  # of a node of backward, the stack of the node that it differentiates
    stacks = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    stack = list(stacks.values())
    if not stack:
        return None
    expression: str = stack[-1][0]
    if not _ROOT.match(expression):
        return expression if re.fullmatch(r"[\w.]*", expression) else None
    # A module stack has L['self'].layers[0], L['self'].layers.0 or L['self']._modules['layers']...
    if expression.startswith("G["):
        return None
    return _walk(expression)[0]


def _walk(name: str) -> tuple[str | None, bool]:
    """Return the path in a Dynamo expression, and whether it ends in a parameter."""
    root = _ROOT.match(name)
    if root is None:
        return None, False
    steps = list(_STEP.finditer(name, root.end()))
    if "".join(step[0] for step in steps) != name[root.end() :]:
        return None, False
    path = ".".join(step["key"] or step["shard"] or step["attr"] or step["index"] for step in steps)
    is_parameter = bool(steps) and bool(steps[-1]["table"] == "parameters" or steps[-1]["shard"])
    return path, is_parameter


def _grapharg_example(placeholder: fx.Node) -> Any | None:
    arg = placeholder.meta.get("grapharg")
    try:
        return None if arg is None else arg.example
    except AssertionError:  # the weak reference to the input has expired
        return None


def compile_variant(
    compiler: str | Compiler, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any
) -> Callable[..., Any]:
    """Compile a copy of ``gm`` by a backend of ``torch.compile``, given itself or by name."""
    run: Compiler = lookup_backend(compiler) if isinstance(compiler, str) else compiler
    # AOTAutograd writes facts about a graph to the context, and reads them again when it compiles
    # the backward graph, which may be after other variants were compiled.
    with tracing(copy.copy(TracingContext.try_get())):
        return run(_copy_of(gm), inputs, **kwargs)


def _copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy the nodes of ``gm``, which compilers change; the modules and tensors are shared."""
    graph, new_node = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(gm.graph, new_node))
    for old, new in new_node.items():
        source = getattr(old, "_dynamo_source", None)  # of a placeholder, beside its meta
        if source is not None:
            new._dynamo_source = source  # type: ignore[attr-defined]
    copied = fx.GraphModule(gm, graph)
    vars(copied).update({name: v for name, v in vars(gm).items() if name not in vars(copied)})
    copied.meta = dict(gm.meta)
    return copied


def keep_json(name: str, data: Any, is_written: bool = False) -> None:
    """Write JSON data to a file of Inductor's cache folder, and add it to the artifacts.

    ``is_written``: the file is there already.
    """
    with private_torch():
        from torch._inductor.runtime.autotune_cache import AutotuneCacheArtifact as Artifact
        from torch.compiler._cache import CacheArtifactManager

    # Artifacts of autotuning are JSON files under a name in the folder. A type of our own would be
    # unknown to a process that loads artifacts before it imports this package, and torch then drops
    # all of them.
    if not is_written:
        Artifact(name, Artifact.encode(data)).populate_cache()
    CacheArtifactManager.record_artifact(Artifact.type(), name, data)
