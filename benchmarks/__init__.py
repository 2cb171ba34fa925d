"""Measure on graphs of real size and on ranks; ``python -m benchmarks.graphs`` lists the graphs."""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent

# The folder of a program that runs by its path comes first there. Its modules would hide packages:
# transformers looks for ``kernels``.
sys.path[:] = [path for path in sys.path if path != str(_HERE)]

# Some models and tables are among the helpers of the tests.
sys.path.append(str(_HERE.parent / "test" / "helpers"))
