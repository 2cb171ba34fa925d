"""What stages of a pipeline hold, by hand."""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx
from torch.fx.experimental.proxy_tensor import make_fx

from torch_ext_bucketing.reports.compile import CompileReport
from torch_ext_bucketing.scheduling.stages import StageBytes, bytes_of, stage_reports

STAGE = StageBytes(gathered=100, saved=10, gradients=200, running={"F": 1, "B": 2, "W": 3, "I": 4})
BOTH = {0: STAGE, 1: StageBytes(1000, 0, 0, {"UNSHARD": 7})}


@pytest.mark.parametrize(
    ("schedule", "stages", "gathers", "under_way", "peak", "rank_peak"),
    [
        ("0UNSHARD 0F 0B 0REDUCE_GRAD 0RESHARD", {0: STAGE}, 1, 1, 312, 312),
        ("0UNSHARD 0F 0F 0F 0B 0B 0B 0REDUCE_GRAD", {0: STAGE}, 1, 3, 332, 332),
        ("0UNSHARD 0F 0I 0W", {0: STAGE}, 1, 1, 313, 313),
        ("0F 0RESHARD 0F 0B 0B", {0: STAGE}, 2, 2, 322, 322),  # what backward reads stays
        ("0UNSHARD 0F 0B 0REDUCE_GRAD 0RESHARD 1UNSHARD", BOTH, 1, 1, 312, 1007),
        ("0UNSHARD 0F 1UNSHARD 2SEND_F 0B", BOTH, 1, 1, 312, 1312),
    ],
)
def test_a_schedule_is_added_up(schedule, stages, gathers, under_way, peak, rank_peak):
    actions = [(int(word[0]), word[1:]) for word in schedule.split()]
    compiled = {stage: CompileReport() for stage in stages}
    report = stage_reports(actions, compiled, stages)[0]
    found = (report.gathers, report.under_way, report.peak_bytes, report.rank_peak_bytes)
    assert found == (gathers, under_way, peak, rank_peak)
    assert f"gathered {gathers} and reduced {schedule.count('REDUCE')} times" in report.to_text()


def test_what_a_graph_saves_is_not_what_it_was_given():
    def forward(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = x @ weight
        return hidden.sum(), weight.t(), hidden, x

    gm: fx.GraphModule = make_fx(forward, tracing_mode="fake")(torch.ones(4, 8), torch.ones(2, 4))
    assert bytes_of(gm.graph, outputs_from=1) == (2 * 8 * 4, 2 * 8 * 4 + 4)
