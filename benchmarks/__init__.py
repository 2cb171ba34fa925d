"""Measure on graphs of real size and on ranks; ``python -m benchmarks.graphs`` lists the graphs."""

import sys
from pathlib import Path

# eager_parity, the models and ranks of parity, is among the helpers of the tests.
sys.path.append(str(Path(__file__).resolve().parent.parent / "test" / "helpers"))
