"""Which parameter a collective serves."""
