"""Symbolic sizes: what a ``ShapeEnv`` knows of one, without asking it for a guard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch


def _expression(size: torch.SymInt) -> tuple[Any, Any]:
    """The size as an expression of symbols of which nothing is known yet, and its ``ShapeEnv``."""
    node = size.node
    env = node.shape_env
    expression = sympy.sympify(node.expr)
    if env is not None:
        # A replacement may hold symbols that are replaced themselves.
        for _ in range(len(env.replacements) + 1):
            replaced = expression.xreplace(env.replacements)
            if replaced == expression:
                break
            expression = replaced
        expression = expression.xreplace(env.backed_var_to_val)
    if isinstance(expression, sympy.Expr):
        expression = expression.expand(identity=True)
    return expression, env


def depends_on_data(size: Any) -> bool:
    """Whether a size is known only when the graph runs."""
    return isinstance(size, torch.SymInt) and bool(_expression(size)[0].free_symbols)


def size_with(size: Any, number_of: Callable[[Any, Any], int]) -> int:
    """An ``int`` or a ``SymInt`` as a number: ``number_of`` gets each symbol that depends on data,
    and its ``ShapeEnv``. An ArithmeticError where that gives no finite value."""
    if isinstance(size, int):
        return size
    expression, env = _expression(size)
    symbols = sorted(expression.free_symbols, key=str)
    value = expression.xreplace({s: sympy.Integer(number_of(s, env)) for s in symbols})
    if not value.is_number or not value.is_finite:
        raise ArithmeticError(f"{expression} is {value}")
    return int(value)


def symbol_facts(symbol: Any, env: Any) -> tuple[int | None, int, int | None]:
    """The hint that torch was given (``mark_unbacked``), the least and the largest value."""
    if env is None:
        return None, 0, None
    hint = env.var_to_hint_override.get(symbol)
    bounds = env.var_to_range.get(symbol)
    if bounds is None:
        return hint, 0, None
    # Torch's bound of a size that has none is the largest that an index may be.
    lower, upper = (int(b) if b.is_Integer else None for b in (bounds.lower, bounds.upper))
    return hint, max(0, lower or 0), None if upper is None or upper >= 2**62 else upper


def same_shape(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes are known to be equal, without asking: written alike."""

    def written(shape: Sequence[Any]) -> list[Any]:
        return [size.node.expr if isinstance(size, torch.SymInt) else size for size in shape]

    return written(one) == written(other)
