"""Estimate times and memory; choose byte caps, an order, and the values that stay in memory."""
