"""Train sharded matrices by torch's Muon on the whole of each: the obvious way."""

from typing import Any

import torch
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim._muon import muon

from torch_ext_bucketing.step.rules import StackedMuon


class WholeMuon(StackedMuon):
    """Gathers a parameter, its gradient and its momentum for the update, on every rank."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            options = {k: v for k, v in group.items() if k in self.defaults}
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                wholes = [t.full_tensor() for t in (p, p.grad, momentum)]
                for matrix in range(p.shape[0]) if p.ndim == 3 else (...,):
                    muon(*([whole[matrix]] for whole in wholes), **options, has_complex=False)
                at = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
                place = tuple(slice(o, o + n) for n, o in zip(*at, strict=True))
                for sharded, whole in zip((p, momentum), (wholes[0], wholes[2]), strict=True):
                    sharded.to_local().copy_(whole[place])
