"""Compares what the ranks compiled: all of a group's must launch the same collectives."""
