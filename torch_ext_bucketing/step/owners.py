"""Choose the rank that computes each matrix's update, and the matrices that travel together.

An optimizer such as Muon computes with whole matrices. One rank, the owner, gets the whole of a
matrix, so that its bits are those of one device. Nothing here depends on the rank that calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

BALANCED = 1.05  # of the mean work; with more on the busiest rank, matrices leave their homes


def newton_schulz_flops(rows: int, columns: int, steps: int) -> int:
    """Count the floating-point operations of Newton-Schulz on one matrix.

    Each step is three products, of the matrix with its transpose, of the square result with itself,
    and of that with the matrix. torch counts the square result's side as the shorter one.
    """
    m, n = sorted((rows, columns))
    return steps * (4 * m * m * n + 2 * m**3)


def choose_owners(
    costs: Sequence[int], loads: list[int], homes: Sequence[Sequence[int]] | None = None
) -> list[int]:
    """Give each matrix to the rank with the least load, the costliest matrices first.

    From no load on and without homes, the busiest rank has at most 4/3 of the least possible load
    (Graham's bound). With fewer matrices than ranks, each has a rank of its own, and the last ranks
    are idle: a matrix is never divided, because its bits would then depend on the number of ranks.

    A matrix with a home goes there, as less of it has to travel. As many leave again as the balance
    needs (:data:`BALANCED`), from the busiest rank to the one with the least load.

    Args:
        costs: per matrix, the first gradient to arrive first. Among equal ones, the first matrix
            chooses first.
        loads: work that each rank has already. The matrices' is added in place.
        homes: per matrix, the ranks that are home to it; none: all ranks are alike.

    Returns:
        The owner of each matrix, from 0 to ``len(loads)`` - 1.
    """
    least = [(load, rank) for rank, load in enumerate(loads)]
    heapify(least)
    owners, guests = [0] * len(costs), [list[int]() for _ in loads]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        while least[0][0] != loads[least[0][1]]:
            heappop(least)  # this rank has more by now
        _, owner = least[0]
        if homes and homes[i]:
            owner = min(homes[i], key=lambda r: (loads[r], r))
            guests[owner].append(i)
        owners[i] = owner
        loads[owner] += costs[i]
        heappush(least, (loads[owner], owner))
    while homes:
        busiest = max(range(len(loads)), key=loads.__getitem__)
        free = min(range(len(loads)), key=loads.__getitem__)
        if loads[busiest] * len(loads) <= BALANCED * sum(loads) or not guests[busiest]:
            break
        i = guests[busiest].pop()  # the cheapest
        if loads[free] + costs[i] >= loads[busiest]:
            break
        owners[i] = free
        loads[busiest] -= costs[i]
        loads[free] += costs[i]
    return owners


def choose_buckets(
    costs: Sequence[int],
    nbytes: Sequence[int],
    owners: Sequence[int],
    cap: int,
    least: int,
    most: int = 3,
    stacks: Sequence[int] | None = None,
) -> list[list[int]]:
    """Divide matrices into buckets. All matrices of one are exchanged at once.

    Every owner has about the same part of its work in a bucket, the costliest first, so that it
    computes while the next bucket travels.

    Args:
        costs: per matrix; so are ``nbytes`` and ``owners``.
        nbytes: bytes of the whole matrix in the buffer of its owner.
        owners: see :func:`choose_owners`.
        cap: bytes that an owner may receive in one bucket; a single stack may have more.
        least: bytes below which the busiest owner's part is not divided for overlap.
        most: number of buckets, unless ``cap`` makes it more.
        stacks: per matrix, the number of its stack, whose matrices stay together; None: each
            matrix is alone.

    Returns:
        The matrices of each bucket, ascending; no bucket is empty.
    """
    turn = sorted(range(len(costs)), key=lambda i: -costs[i])
    middle, load, received = [0.0] * len(costs), dict[int, int](), dict[int, int]()
    for i in turn:
        before = load.get(owners[i], 0)
        middle[i] = before + costs[i] / 2
        load[owners[i]] = before + costs[i]
        received[owners[i]] = received.get(owners[i], 0) + nbytes[i]
    stacks = range(len(costs)) if stacks is None else stacks
    together: dict[int, list[int]] = {}
    for i, stack in enumerate(stacks):
        together.setdefault(stack, []).append(i)
    place = [sum(middle[i] for i in together[s]) / len(together[s]) for s in stacks]
    span = max(load.values(), default=0) or 1
    count = max(1, min(most, max(received.values(), default=0) // least))
    while count <= 4 * len(together):
        found: dict[int, list[int]] = {}
        for i, at in enumerate(place):
            found.setdefault(int(count * at / span), []).append(i)
        if all(_fits(of, nbytes, owners, stacks, cap) for of in found.values()):
            return [found[k] for k in sorted(found)]
        count += 1
    return sorted(together.values(), key=lambda of: place[of[0]])


def _fits(
    of: Sequence[int],
    nbytes: Sequence[int],
    owners: Sequence[int],
    stacks: Sequence[int],
    cap: int,
) -> bool:
    received: dict[int, int] = {}
    parts: dict[int, set[int]] = {}
    for i in of:
        received[owners[i]] = received.get(owners[i], 0) + nbytes[i]
        parts.setdefault(owners[i], set()).add(stacks[i])
    return all(len(parts[owner]) == 1 or n <= cap for owner, n in received.items())
