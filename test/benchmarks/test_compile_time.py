"""``benchmarks.compile_time``: seconds of a compile by part."""

import subprocess
import sys

import pytest
from patching_trees import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain torch", "speed, 60 GiB"])
def test_each_part_of_a_compile_has_its_time(way):
    """Our passes take some, and none for plain torch; Inductor gets the graphs of both."""
    command = [sys.executable, "-m", "benchmarks.compile_time", "--layers", "1", "--way", way]
    found = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    dynamo, aot, ours, inductor = map(float, found.split())
    assert min(dynamo, aot, inductor) > 0.1
    assert (ours > 0.1) is (way != "plain torch")
