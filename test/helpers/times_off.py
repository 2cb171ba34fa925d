"""Plan with wrong times and score the plan with the true ones.

Each draw multiplies the time of every sort of kernel (operator and sizes) and of collective (kind
and process group) by a factor of its own, log-normal. Caps and order are chosen with these times,
and the step is then timed with the true ones.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.fx as fx

from torch_ext_bucketing.bucketing.caps import ByCap
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.nodes import group_name, is_collective, tensors_in
from torch_ext_bucketing.graph.sizes import GivenHints, SizeHints
from torch_ext_bucketing.planner.cost.cost import Costs
from torch_ext_bucketing.planner.cost.machine import H100, Machine
from torch_ext_bucketing.planner.schedule.model import Model, model_of
from torch_ext_bucketing.planner.schedule.orders import schedule_model
from torch_ext_bucketing.planner.schedule.policy import Policy
from torch_ext_bucketing.planner.schedule.timeline import Timeline
from torch_ext_bucketing.planner.search.cap_search import BySearch
from torch_ext_bucketing.planner.search.merged_model import merged_model

SIGMA = 0.3


def off_by(machine: Machine, seed: int, sigma: float = SIGMA, hints: GivenHints = None) -> Machine:
    """Return ``machine`` with wrong times, the same for the same seed.

    ``sigma`` is the standard deviation of a factor's logarithm; the median factor is 1.
    """
    true = Costs(machine, SizeHints(hints))
    factors: dict[tuple[Any, ...], float] = {}

    def estimate(node: fx.Node, nbytes: int | None) -> float:
        sort: tuple[Any, ...] = (str(node.target),)
        if is_collective(node):
            sort += (group_name(node),)
            ms = true.collective(node, nbytes)
        else:
            inputs = (tensors_in(n.meta.get("val")) for n in node.all_input_nodes)
            sort += tuple(tuple(map(str, t.shape)) for ts in inputs for t in ts)
            ms = true(node)
        if sort not in factors:
            factors[sort] = math.exp(random.Random(f"{seed} {sort}").gauss(0.0, sigma))
        return ms * factors[sort]

    return replace(machine, estimate=estimate)


def steps_off(
    analysis: GraphAnalysis,
    policies: Sequence[Policy],
    draws: int,
    reference_bytes: int,
    options: dict[str, Any],
    sigma: float = SIGMA,
    machine: Machine = H100,
) -> tuple[float, float, list[float]]:
    """Time the step planned with the machine's times, and the steps planned with wrong ones.

    Args:
        draws: number of sets of wrong times.
        options: options of :class:`.ByCap`.

    Returns:
        The step in milliseconds planned with the times of ``machine``, the least that any order of
        the same buckets takes, and the steps planned with each draw.
    """
    hints, by_cap = analysis.hints, ByCap(**options)
    true = Costs(machine, hints)
    unmerged = model_of(analysis, true)

    def planned(by: Machine) -> tuple[float, Model]:
        search = BySearch(policies, by_cap, machine=by, reference_bytes=reference_bytes)
        plan = search.plan(analysis)
        costs = Costs(by, hints)
        believed = merged_model(model_of(analysis, costs), plan.buckets, costs)
        real = merged_model(unmerged, plan.buckets, true)
        if believed is None or real is None:
            raise RuntimeError("the buckets stand on both sides of a side effect")
        _, order, _ = schedule_model(believed, policies, reference_bytes)
        return Timeline.of(real, order).step_ms, real

    step, merged = planned(machine)
    off = (off_by(machine, seed, sigma, hints) for seed in range(draws))
    return step, merged.paths.bound_ms, [planned(by)[0] for by in off]
