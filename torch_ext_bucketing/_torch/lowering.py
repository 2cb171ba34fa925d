"""Lower this package's operators in Inductor."""

from __future__ import annotations

import sys
from typing import Any

import torch

from .draws import private_torch

_MOST = 64  # ranks' parts in one kernel: a kernel for 512 ranks took a minute to compile


def lower_sum(target: Any) -> None:
    """Lower a sum in rank order to one Inductor kernel per 64 ranks.

    A kernel reads each rank's part once, adds in rank order in registers and writes the sum. Later
    kernels continue with the sum of the ranks before. Does nothing unless Inductor is in use.
    """
    if "torch._inductor.compile_fx" not in sys.modules:
        return
    with private_torch():
        from torch._inductor.ir import Pointwise
        from torch._inductor.lowering import lowerings, register_lowering
        from torch._inductor.virtualized import V, ops

    if target in lowerings:
        return

    @register_lowering(target, type_promotion_kind=None)  # type: ignore[untyped-decorator]
    def _(received: Any, ranks: int, accumulate: torch.dtype, average: bool) -> Any:
        received.realize()
        load, dtype = received.make_loader(), received.get_dtype()
        wide = torch.promote_types(dtype, accumulate)
        part = received.get_numel() // ranks

        def added(load_before: Any, some: range) -> Any:
            """Make a loader of the sum of some ranks' parts and of the ranks before."""

            def inner(index: Any) -> Any:
                (i,) = index
                total = None if load_before is None else load_before(index)
                for rank in some:
                    element = load([i + rank * part])
                    if wide is not dtype:
                        element = ops.to_dtype(element, wide, src_dtype=dtype)
                    total = element if total is None else ops.add(total, element)
                if some.stop < ranks:
                    return total
                if average:
                    total = ops.mul(total, ops.constant(1 / ranks, wide))
                return total if wide is dtype else ops.to_dtype(total, dtype, src_dtype=wide)

            return inner

        load_before = None
        for first in range(0, ranks, _MOST):
            some = range(first, min(first + _MOST, ranks))
            total = Pointwise.create(
                device=received.get_device(),
                dtype=wide if some.stop < ranks else dtype,
                inner_fn=added(load_before, some),
                ranges=[part],
            )
            if some.stop < ranks:
                total.realize()
                V.graph.no_fuse_buffer_names.add(total.get_name())
                load_before = total.make_loader()
        if dtype.itemsize > 2:
            return total
        # Inductor skips the rounding to 16 bits if the same kernel reads the value. Viewing the
        # bits as an integer forces it.
        view = lowerings[torch.ops.aten.view.dtype]
        return view(view(total, torch.int16), dtype)
