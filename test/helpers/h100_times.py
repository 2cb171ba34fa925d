"""Times of collectives on H100s that others give, to compare the cost model with."""

# Milliseconds on H100s by MiB of the whole buffer: 1, 2, 4 ... 2048. Source: AutoParallel's overlap
# simulator, H100. One row per kind, ranks and nodes.
SIMULATOR = {
    ("all_reduce", 8, 1): [
        0.028, 0.041, 0.0628, 0.0849, 0.1292, 0.2179, 0.3822, 0.7084, 1.3609, 2.6658, 5.2756,
        10.4952,
    ],
    ("reduce_scatter", 8, 8): [
        0.0866, 0.1151, 0.1566, 0.2397, 0.4059, 0.7181, 1.3297, 2.5531, 4.9998, 9.8931, 19.6798,
        39.2532,
    ],
    ("reduce_scatter", 8, 1): [
        0.0173, 0.0238, 0.0368, 0.0495, 0.0716, 0.1138, 0.1953, 0.3584, 0.6846, 1.3371, 2.642,
        5.2518,
    ],
    ("reduce_scatter", 16, 16): [
        0.1282, 0.1638, 0.2247, 0.3136, 0.4858, 0.8166, 1.4697, 2.7525, 5.2865, 10.3546, 20.4909,
        40.7633,
    ],
    ("reduce_scatter", 32, 32): [
        0.2114, 0.2612, 0.3608, 0.4615, 0.6455, 1.0136, 1.7497, 3.1512, 5.86, 11.2777, 22.113,
        43.7835,
    ],
}  # fmt: skip


def table() -> dict[tuple[str, int | tuple[int, int]], list[tuple[int, float]]]:
    """Return :data:`SIMULATOR` as ``collectives`` of a :class:`.Machine`."""
    found: dict[tuple[str, int | tuple[int, int]], list[tuple[int, float]]] = {}
    for (kind, ranks, nodes), series in SIMULATOR.items():
        whole = [2**20 << i for i in range(len(series))]
        reduces = kind == "all_reduce"
        nbytes = [2 * n if reduces else n + n // ranks for n in whole]
        for name in (kind,) if reduces else (kind, "all_gather"):
            found[name, (ranks, nodes)] = list(zip(nbytes, series, strict=True))
    return found
