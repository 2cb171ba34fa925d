"""Choose the rank that computes each matrix's update, and the matrices that travel together.

An optimizer such as Muon computes with whole matrices. One rank, the owner, gets the whole of a
matrix, so that its bits are those of one device. Nothing here depends on the rank that calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace


def newton_schulz_flops(rows: int, columns: int, steps: int) -> int:
    """Count the floating-point operations of Newton-Schulz on one matrix.

    Each step is three products, of the matrix with its transpose, of the square result with itself,
    and of that with the matrix. torch counts the square result's side as the shorter one.
    """
    m, n = sorted((rows, columns))
    return steps * (4 * m * m * n + 2 * m**3)


def choose_owners(costs: Sequence[int], ranks: int) -> list[int]:
    """Give each matrix to the rank with the least load, the costliest matrices first.

    The busiest rank has at most 4/3 of the least possible load (Graham's bound). With fewer
    matrices than ranks, each has a rank of its own, and the last ranks are idle: a matrix is never
    divided, because its bits would then depend on the number of ranks.

    Args:
        costs: per matrix, the first gradient to arrive first. Among equal ones, the first matrix
            chooses first.
        ranks: number of ranks.

    Returns:
        The owner of each matrix, from 0 to ``ranks`` - 1.
    """
    loads = [(0, rank) for rank in range(ranks)]
    heapify(loads)
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, rank = loads[0]
        owners[i] = rank
        heapreplace(loads, (load + costs[i], rank))
    return owners


def choose_buckets(
    costs: Sequence[int],
    nbytes: Sequence[int],
    owners: Sequence[int],
    cap: int,
    least: int,
    most: int = 3,
) -> list[list[int]]:
    """Divide matrices into buckets. All matrices of one are exchanged at once.

    Every owner has about the same part of its work in a bucket, the costliest first, so that it
    computes while the next bucket travels.

    Args:
        costs: per matrix; so are ``nbytes`` and ``owners``.
        nbytes: bytes of the whole matrix in the buffer of its owner.
        owners: see :func:`choose_owners`.
        cap: bytes that an owner may receive in one bucket; a single matrix may have more.
        least: bytes below which the busiest owner's part is not divided for overlap.
        most: number of buckets, unless ``cap`` makes it more.

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
    span = max(load.values(), default=0) or 1
    count = max(1, min(most, max(received.values(), default=0) // least))
    while True:
        found: dict[int, list[int]] = {}
        for i in range(len(costs)):
            found.setdefault(int(count * middle[i] / span), []).append(i)
        if all(_fits(of, nbytes, owners, cap) for of in found.values()):
            return [found[k] for k in sorted(found)]
        count += 1


def _fits(of: Sequence[int], nbytes: Sequence[int], owners: Sequence[int], cap: int) -> bool:
    received: dict[int, list[int]] = {}
    for i in of:
        received.setdefault(owners[i], []).append(nbytes[i])
    return all(len(mine) == 1 or sum(mine) <= cap for mine in received.values())
