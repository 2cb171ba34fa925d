"""Which collectives are merged, and merging them."""
