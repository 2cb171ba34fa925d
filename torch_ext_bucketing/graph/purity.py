"""Find the calls that may run twice: their results depend on nothing but their inputs.

That is known of torch's own operators, whose tags and schemas torch tests, and of others with a tag
that describes the values of their results. Any other operator may draw random numbers, read state
that changes, or write to it, whatever its schema declares.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from .._torch.draws import draws
from .collectives import is_collective, is_number, is_view, is_wait

_TORCH = frozenset(
    {
        *("aten", "prims", "ao", "bucketing", "fsdp", "profiler", "sparse", "streams", "symm_mem"),
        *("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor"),
        *("inductor", "inductor_prims", "mkl", "mkldnn", "mkldnn_prepacked", "onednn"),
        *("_quantized", "quantized", "quantized_decomposed"),
        *("_native", "flex_gemm", "flex_lib", "spmd_types", "torch_attn"),
        "torch_ext_bucketing",
    }
)
"""Namespaces of the operators of torch 2.11 to 2.15, and ours."""

# Of torch's tags, these alone define what an operator computes. ``pt2_compliant_tag``, which
# ``torch.library.custom_op`` sets, does not.
_VALUES = frozenset({torch.Tag.core, torch.Tag.pointwise, torch.Tag.reduction})

FUNCTIONAL = frozenset(
    {
        "auto_functionalized",
        "auto_functionalized_v2",
        "flex_attention",
        "flex_attention_backward",
        "invoke_subgraph",
        "triton_kernel_wrapper_functional",
    }
)
"""Higher-order operators without side effects of their own."""


def is_known(node: fx.Node) -> bool:
    """Return whether schema and tags show all that a call does, and those of calls inside it."""
    target = node.target
    if node.op != "call_function":
        return node.op != "call_module"
    if isinstance(target, torch._ops.HigherOrderOperator):
        name = target.name()
        if name.startswith("auto_functionalized"):
            return _declares(node.args[0])
        return draws(node) or (name in FUNCTIONAL and all(map(is_known, _inside(node))))
    return _declares(target) or is_view(node) or is_number(node)


def _declares(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and (
        target.namespace in _TORCH or not _VALUES.isdisjoint(target.tags)
    )


def _inside(node: fx.Node) -> list[fx.Node]:
    """List the nodes of the graphs that a higher-order operator gets."""
    owner, found = node.graph.owning_module, list[fx.Node]()
    for given in node.all_input_nodes:
        inner = given.op == "get_attr" and getattr(owner, str(given.target), None)
        if isinstance(inner, fx.GraphModule):
            found += inner.graph.nodes
    return found


def may_run_twice(node: fx.Node) -> bool:
    """Return whether running a node twice gives the same result and has no effects."""
    if is_wait(node) or is_collective(node):
        return True
    if draws(node) or not is_known(node) or any(map(draws, _inside(node))):
        return False
    return not node.is_impure(impure_random=False)
