"""Random cases for ``benchmarks/soak.py``: a model, its units, dtypes, a policy. No torch in here.

A case is a function of the seed and its number, the same on every rank and in every process. Module
trees are nested tuples, which :mod:`.soak_models` builds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Item: TypeAlias = tuple[Any, ...]
"""``("scale",)``, ``("shift",)`` and ``("gain",)``: a parameter of the node itself, of ``dim``
elements or one; ``("matrix", rows)`` and ``("experts", count)``: one of two or three dimensions;
``("norm",)``, ``("mlp", hidden, bias)``: a child; ``("node", items)``: a node below."""

DTYPES = ("fp32", "bf16")
POLICIES = ("units", "units_scheduled", "coarse_units", "cap", "cap_scheduled", "auto", "none")


@dataclass(frozen=True)
class Case:
    """One model and how it is trained.

    Attributes:
        index: its number.
        tree: the items of the node between embedding and head.
        dim: width.
        vocab: number of tokens.
        tied: the head uses the embedding's weight.
        tied_matrices: two matrices of one unit are one parameter, where two are alike.
        frozen: one parameter in so many is frozen; 0: none.
        unit_seed: draws the units, once the module names are known.
        store_dtype: of the parameters.
        param_dtype: of gathers and computation; None: that of the parameters.
        reduce_dtype: of reductions; None: the default of FSDP2.
        reshard: whether gathered parameters are freed after forward.
        policy: out of :data:`POLICIES`.
        options: of the policy; see :mod:`.soak_ranks`.
        backend: ``"aot_eager"`` or ``"inductor"``.
    """

    index: int
    tree: tuple[Item, ...]
    dim: int
    vocab: int
    tied: bool
    tied_matrices: bool
    frozen: int
    unit_seed: int
    store_dtype: str
    param_dtype: str | None
    reduce_dtype: str | None
    reshard: bool
    policy: str
    options: dict[str, Any] = field(default_factory=dict)
    backend: Literal["aot_eager", "inductor"] = "aot_eager"

    @property
    def text(self) -> str:
        """One line for people."""
        dtypes = f"{self.store_dtype}/{self.param_dtype or '-'}/{self.reduce_dtype or '-'}"
        ties = " tied" if self.tied or self.tied_matrices else ""
        return (
            f"{self.index}: {self.backend}, {self.policy} {self.options}, width {self.dim}, "
            f"{dtypes}{ties}{'' if self.reshard else ', kept gathered'}"
        )


def random_case(seed: int, index: int, inductor_every: int = 0) -> Case:
    """The case of that number; every ``inductor_every``-th is for Inductor, 0: none."""
    rng = random.Random(f"{seed}/{index}")
    items = _items(rng, depth=rng.randint(1, 3))
    policy = rng.choice(POLICIES)
    return Case(
        index=index,
        tree=items,
        dim=rng.choice((4, 6, 7, 9, 16, 17)),
        vocab=rng.randint(5, 23),
        tied=rng.random() < 0.15,
        tied_matrices=rng.random() < 0.15,
        frozen=rng.choice((0, 0, 0, 3)),
        unit_seed=rng.randrange(2**32),
        store_dtype=rng.choice(DTYPES),
        param_dtype=rng.choice((None, "bf16", "bf16", "fp32")),
        reduce_dtype=rng.choice((None, *DTYPES)),
        reshard=rng.random() < 0.7,
        policy=policy,
        options=_options(rng, policy),
        backend="inductor" if inductor_every and index % inductor_every == 0 else "aot_eager",
    )


def random_units(names: list[str], rng: random.Random) -> list[str | list[str]]:
    """Units as calls of ``fully_shard``, inner ones first, the root last.

    Args:
        names: of the modules that hold parameters, in ``named_modules`` order, without the root.
        rng: draws which of them, and which siblings share a unit.
    """
    chosen = [name for name in names if rng.random() < 0.35]
    chosen.sort(key=lambda name: -name.count("."))
    units: list[str | list[str]] = []
    while chosen:
        unit = [chosen.pop(0)]
        parent = unit[0].rpartition(".")[0]
        siblings = [name for name in chosen if name.rpartition(".")[0] == parent]
        if siblings and rng.random() < 0.4:
            more = rng.sample(siblings, rng.randint(1, min(2, len(siblings))))
            chosen = [name for name in chosen if name not in more]
            unit += more
            rng.shuffle(unit)
        units.append(unit[0] if len(unit) == 1 else unit)
    return [*units, ""]


def coarser(units: list[tuple[str, ...]], rng: random.Random) -> list[tuple[str, ...]]:
    """Some units put together, in a random order: a plan that eager FSDP2 does not have."""
    parts = [[unit] for unit in units]
    rng.shuffle(parts)
    while len(parts) > 1 and rng.random() < 0.7:
        parts[rng.randrange(len(parts) - 1)] += parts.pop()
    return [tuple(fqn for unit in part for fqn in unit) for part in parts]


def _items(rng: random.Random, depth: int) -> tuple[Item, ...]:
    found: list[Item] = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.choice(("scale", "shift", "gain", "matrix", "experts", "norm", "mlp", "node"))
        if kind == "matrix":
            found.append((kind, rng.choice((1, 3, 3, 8))))
        elif kind == "experts":
            found.append((kind, rng.randint(1, 3)))
        elif kind == "mlp":
            found.append((kind, rng.randint(1, 24), rng.random() < 0.5))
        elif kind == "node" and depth:
            found.append((kind, _items(rng, depth - 1)))
        elif kind != "node":
            found.append((kind,))
    return tuple(found) or (("scale",),)


def _options(rng: random.Random, policy: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if policy in ("cap", "cap_scheduled"):
        options["cap_mb"] = rng.choice((0.0001, 0.0005, 0.002, 0.01, 1.0, None))
        options["non_adjacent"] = rng.random() < 0.8
    if policy == "auto":
        options["caps_mb"] = rng.choice(((0.0005, 0.005), (0.001, 0.01, 1.0), (25.0,)))
    if policy in ("cap", "cap_scheduled", "auto"):
        options["payload_order"] = rng.random() < 0.7
    if policy in ("units_scheduled", "cap_scheduled", "auto"):
        bounds: list[tuple[str, dict[str, Any]]] = []
        if rng.random() < 0.8:
            depth, window = rng.randint(0, 2), rng.choice((0, 4, 100))
            bounds.append(("Overlap", {"depth": depth, "window": window}))
        if rng.random() < 0.5:
            bounds.append(("PeakMemory", {"ratio": rng.choice((1.0, 1.02, 1.3))}))
        if rng.random() < 0.5:
            bounds.append(("CapComputeRun", {"max_consecutive": rng.choice((1, 2, 8))}))
        options["bounds"] = tuple(bounds) or (("Overlap", {}),)
    return options
