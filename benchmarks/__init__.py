"""Measurements on graphs of real size. ``python -m benchmarks.graphs`` lists the graphs."""
