"""Replace sizes that depend on data, such as the number of tokens of an expert, by numbers.

Estimates of time and memory need a number for every size. A size that is known only when the graph
runs is an expression of symbols (``8*u0``). Each symbol gets one number: the caller's, or torch's
hint (``torch._dynamo.decorators.mark_unbacked``), or :data:`DEFAULT`, clamped to the range that
torch knows for the symbol. So sizes stay in proportion, and all ranks with the same hints use the
same numbers. Only orders and byte caps depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from .._torch.symbols import size_with, symbol_facts

DEFAULT = 8192
"""Inductor's default, too (``torch._inductor.config.unbacked_symint_fallback``)."""

GivenHints: TypeAlias = "int | Callable[[Any], int] | None"


def check_size_hints(given: object) -> None:
    """Check the ``size_hints`` of :func:`.backend`.

    Raises:
        TypeError: neither an int, nor a callable, nor None.
        ValueError: negative.
    """
    if given is None or callable(given):
        return
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(
            f"size_hints must be a whole number or a callable of an expression, got {given!r}"
        )
    if given < 0:
        raise ValueError(f"size_hints must be at least 0, got {given!r}")


class SizeHints:
    """Numbers for symbolic sizes.

    Args:
        given: a number for every symbol that depends on data, or a callable that returns one for a
            symbol, given as a sympy expression (``u0``). See :func:`check_size_hints`.

    Attributes:
        used: the number of each symbol that was needed, by name.
        problems: errors of the callable, each replaced by the default.
    """

    def __init__(self, given: GivenHints = None) -> None:
        check_size_hints(given)
        self.given = given
        self.used: dict[str, int] = {}
        self.problems: list[str] = []

    @staticmethod
    def of(given: SizeHints | GivenHints) -> SizeHints:
        """Return ``given`` as size hints."""
        return given if isinstance(given, SizeHints) else SizeHints(given)

    def __call__(self, size: Any) -> int:
        """Return ``size`` as a number of at least 0."""
        if isinstance(size, int):
            return size
        try:
            return max(0, size_with(size, self._number))
        except (ArithmeticError, TypeError, ValueError):
            return DEFAULT  # for instance a division by a symbol whose number is 0

    def concrete(self, value: Any) -> Any:
        """Replace symbolic sizes in ``value`` by numbers.

        A tensor with symbolic sizes becomes one on the meta device.
        """
        if isinstance(value, torch.SymInt):
            return self(value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.concrete, value))
        if not isinstance(value, torch.Tensor) or all(isinstance(n, int) for n in value.shape):
            return value
        return torch.empty(tuple(map(self, value.shape)), dtype=value.dtype, device="meta")

    def _number(self, symbol: Any, env: Any) -> int:
        name = str(symbol)
        if name not in self.used:
            hint, least, most = symbol_facts(symbol, env)
            number = self._given(symbol)
            if number is None:
                number = DEFAULT if hint is None else int(hint)
            number = max(number, least)
            self.used[name] = number if most is None else min(number, most)
        return self.used[name]

    def _given(self, symbol: Any) -> int | None:
        if not callable(self.given):
            return self.given
        try:
            number = self.given(symbol)
            check_size_hints(number)
        except Exception as error:  # an estimate must not fail the compile
            self.problems.append(f"size_hints({symbol}): {type(error).__name__}: {error}")
            return None
        return None if callable(number) else number

    def to_text(self) -> str:
        """Format the numbers used for symbols in one line; empty without symbols."""
        if not self.used:
            return ""
        by_number: dict[int, list[str]] = {}
        for name in sorted(self.used, key=lambda n: (len(n), n)):
            by_number.setdefault(self.used[name], []).append(name)
        parts = []
        for number, names in by_number.items():
            shown = names if len(names) <= 4 else [*names[:3], f"... {len(names)} in all"]
            parts.append(f"{number} for {', '.join(shown)}")
        source = "by default" if self.given is None else "as given"
        return f"sizes that depend on data, {source}: {'; '.join(parts)}"
