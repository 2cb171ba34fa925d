"""Plan which collectives are merged, and merge them."""
