"""Estimate the time of kernels and collectives on a machine."""
