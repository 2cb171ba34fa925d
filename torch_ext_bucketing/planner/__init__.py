"""Estimate times and memory, and choose byte caps, order, and what stays in memory."""
