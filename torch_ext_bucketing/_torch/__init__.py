"""Wrap private torch APIs, one module per idea, without importing the rest of the package."""
