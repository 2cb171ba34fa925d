"""Compare counts of values that are computed inside their readers with Inductor's."""

from unittest import mock

import pytest
import torch
from generated_memory import generated_code
from torch._inductor import ir
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch_features import HAS_CUDA

from torch_ext_bucketing._torch.inductor import CustomGraphPass
from torch_ext_bucketing.graph import fusion
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.inlined import Inlined


def rotary(x, y):
    """Read each half of a value at two places."""
    a, b = x.chunk(2, -1)
    cos, sin = y.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1) * 2 + 2


def masked(x, y):
    """Read one range as rows and as columns."""
    places = torch.arange(x.shape[0], device=x.device)
    mask = places[None, :] <= places[:, None] - 2
    scores = torch.where(mask, x[:, : x.shape[0]].bfloat16(), -1.0)
    return scores * y[:, :1]


def norm(x, y):
    """Divide a sum in its readers, and cast for another dtype."""
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).bfloat16() * y + 1


def few(x, y):
    """Sum four elements, which is elementwise."""
    parts = (x.view(x.shape[0], 4, -1) * y.view(y.shape[0], 4, -1)).sum(1)
    return parts.sigmoid() - 1.5


def looked_up(x, y):
    """Read rows at places that others hold, and copy them, which computes nothing."""
    places = (y[:, 0] * 0).long() + 1
    return x[places].clone(memory_format=torch.contiguous_format) * 3.0


@pytest.mark.torch
@pytest.mark.parametrize("fn", [rotary, masked, norm, few, looked_up])
def test_counts_are_inductors(fn):
    """On CUDA if torch has it: on the CPU a concatenation is a loop for each input."""
    mode, device = FakeTensorMode(), "cuda" if HAS_CUDA else "cpu"
    with mode:
        inputs = [torch.empty(48, 96, device=device) for _ in range(2)]
        gm = make_fx(lambda *args: (fn(*args),), decomposition_table=select_decomp_table())(*inputs)
    ours, theirs = {}, {}

    class Counted(Inlined):
        def add(self, node):
            super().add(node)
            exact = self._exactly(node)
            most = self._most[node]
            assert exact.operations <= most.operations
            assert exact.loads <= most.loads
            ours[node.name] = exact.operations, exact.loads

    class Planned(CustomGraphPass):
        def __call__(self, graph):
            with mock.patch.object(fusion, "Inlined", Counted):
                assert GraphAnalysis(graph, fuses=True).fused is not None

        def uuid(self):
            return None

    lowered = GraphLowering.run_node

    def run_node(self, node):
        result = lowered(self, node)
        box = getattr(result, "data", None)
        if isinstance(box, ir.StorageBox) and isinstance(box.data, ir.Pointwise):
            theirs[node.name] = box.data.inner_fn_opcount().num_ops, box.data.num_reads()
        return result

    options = {"post_grad_custom_post_pass": Planned(), "compile_threads": 1}
    with mock.patch.object(GraphLowering, "run_node", run_node):
        generated_code(gm, mode, False, options)
    both = ours.keys() & theirs.keys()
    assert len(both) >= 3
    assert {n: ours[n] for n in both} == {n: theirs[n] for n in both}
