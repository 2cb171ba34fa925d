"""Muon for stacks of matrices, such as the experts of a layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._torch.optimizers import MuonOfEach


class StackedMuon(MuonOfEach):
    """Update each matrix of a stack as ``torch.optim.Muon`` updates it alone.

    ``torch.optim.Muon`` refuses parameters that have not two dimensions. This one takes
    ``[stack, rows, columns]``, too. Its ``step()`` is torch's, one matrix after the other; its
    momentum has the parameter's shape.

    Args:
        params: parameters, or groups of them, as for any optimizer.
        options: those of ``torch.optim.Muon``.

    Raises:
        ValueError: no parameters, or one with other than two or three dimensions; an option that
            ``torch.optim.Muon`` refuses.
    """

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__([torch.empty(0, 0)], **options)  # which refuses stacks
        self.param_groups.clear()
        given = list(params)
        if not given:
            raise ValueError("give StackedMuon at least one parameter")
        for group in given if isinstance(given[0], dict) else [{"params": given}]:
            self.add_param_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see :meth:`torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: a parameter has other than two or three dimensions.
        """
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.ndim not in (2, 3):
                del self.param_groups[-1]
                raise ValueError(
                    "StackedMuon takes parameters of two or three dimensions, got one of shape "
                    f"{tuple(p.shape)}: give it to another optimizer"
                )
