"""Sizes that depend on data as plain data: expressions, and what a ``ShapeEnv`` knows of them.

Of each symbol (``u0``): the least and the largest value, the hint that torch was given for it, what
it was found to equal, and the assertions that torch leaves for the graph to check, from which it
concludes what such sizes are (``u0 + u1 == 8192``).

An expression is a number, the name of a symbol, or a list of a function's name and its arguments.
"""

from __future__ import annotations

import re
from typing import Any

import sympy
import torch
import torch.utils._sympy.functions as torch_functions
from torch.fx.experimental.symbolic_shapes import RuntimeAssert, ShapeEnv
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges
from torch.utils._traceback import CapturedTraceback


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
