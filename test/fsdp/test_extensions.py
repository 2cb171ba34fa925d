"""Parameters with FSDP2 all-gather extensions."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
import torch.nn as nn
from extended_models import DIM, TensorScaled, Wrapper, even, planes, uneven, wrap
from marks import at_night
from rank_pool import on_ranks
from sharded_models import eager_fsdp2
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_ext_bucketing as teb
from torch_ext_bucketing.graph.nodes import group_size, kind_of, tag_of
from torch_ext_bucketing.testing.comparison import CompareOptions, Comparison
from torch_ext_bucketing.testing.experiments import compare_on_rank
from torch_ext_bucketing.testing.ranks import Rank, run_ranks
from torch_ext_bucketing.testing.ring import RingTopology, ring_rank
from torch_ext_bucketing.testing.training import raw_bytes

pytestmark = pytest.mark.long

DTYPES = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


class Gathers(teb.GraphPass):
    """Counts each graph's all-gathers by parameter and number of ranks."""

    stage = "forward_backward"

    def __init__(self) -> None:
        self.found: list[Counter[tuple[str, int]]] = []

    def run(self, graph: Any, compilation: Any) -> None:
        starts = [n for n in graph.nodes if kind_of(n) == "all_gather"]
        self.found.append(Counter((tag_of(n).fqns[0], group_size(n)) for n in starts))  # type: ignore[union-attr]


UP, SCALE = "blocks.0.up.weight", "blocks.0.scale"
# All-gathers by parameter and number of ranks. UP has data and scales.
TWO = {(UP, 4): 2}
ALL = {**TWO, (SCALE, 4): 1}
AUTO = {"reshard_after_forward": "auto", "memory": teb.PeakMemory(gib=1.0)}
CASES: dict[str, tuple[Any, int, dict[str, Any] | None, Any, Any]] = {
    # Model, replicas, arguments of ReshardAfterForward, some all-gathers of forward and backward.
    "hybrid": (even, 2, None, *2 * ({(UP, 2): 2, (SCALE, 2): 1},)),
    "uneven": (uneven, 1, None, ALL, ALL),
    "kept": (even, 1, AUTO, ALL, {}),
    "smaller group": (uneven, 1, {"to": 2}, ALL, {(UP, 2): 2, (SCALE, 2): 1}),
    # Forward and backward each gather only the plane that their products read.
    "planes": (planes, 1, {"keep": ["blocks.0"]}, ALL, TWO),
    "planes, kept": (planes, 1, AUTO, ALL, TWO),
    "planes, smaller group": (planes, 1, {"to": 2}, ALL, {**TWO, (SCALE, 2): 1}),
}


def _compared(
    rank: Rank, names: tuple[str, ...]
) -> dict[str, tuple[Comparison, list[dict[tuple[str, int], int]]]]:
    done = {}
    with ring_rank(rank, RingTopology(ranks_per_node=2)):
        for name in names:
            build, replicas, arguments, _, _ = CASES[name]
            gathers = Gathers()

            def passes(model: nn.Module, gathers: Any = gathers, given: Any = arguments) -> Any:
                for one in teb.recipe(model):
                    if isinstance(one, teb.ReshardAfterForward):
                        yield one if given is None else teb.ReshardAfterForward(**given)
                        yield gathers
                    else:
                        yield one

            chosen = CompareOptions(
                build, lambda m, p=passes: list(p(m)), replicas=replicas, steps=2, **DTYPES
            )
            compared = compare_on_rank(rank, chosen)
            mine = [{k: n for k, n in c.items() if k[0] in (UP, SCALE)} for c in gathers.found]
            done[name] = compared, mine
    return done


@pytest.mark.torch
@pytest.mark.parametrize(
    ("ranks", "names"),
    [(2, ("uneven",)), at_night(4, tuple(CASES))],
    ids=["some", "all"],
)
def test_weights_are_eagers(ranks: int, names: tuple[str, ...]) -> None:
    first, *others = run_ranks(_compared, ranks, names, timeout_s=600)
    assert all(other == first for other in others)
    for name, (compared, gathers) in first.items():
        assert compared == Comparison(True, 2), (name, compared.to_text())
        of_all = [{(fqn, n * ranks // 4): k for (fqn, n), k in c.items()} for c in CASES[name][3:]]
        assert gathers == of_all, name


class _Sending(fx.Interpreter):
    """Records the bytes that a graph's all-gathers send."""

    def __init__(self, graph: fx.GraphModule, sent: list[bytes]) -> None:
        super().__init__(graph)
        self.sent = sent

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if "all_gather" in str(target):
            self.sent.append(raw_bytes(args[0]))
        return super().call_function(target, args, kwargs)


def _gathered(rank: int) -> tuple[list[bytes], list[bytes]]:
    """Return the bytes that eager FSDP2 and the compiled model gather in a forward."""
    eager: list[bytes] = []
    ours: list[bytes] = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather = getattr(dist, name)

    def sending(output_tensor: Any, input_tensor: Any, **more: Any) -> Any:
        eager.append(raw_bytes(input_tensor))
        return gather(output_tensor, input_tensor, **more)

    torch.manual_seed(0)
    model, inputs = even()
    copied, mesh = copy.deepcopy(model), init_device_mesh("cpu", (2,))
    eager_fsdp2(model, ["blocks.0", "blocks.1", ""], mesh, **DTYPES)
    teb.data_parallel(copied, mesh, **DTYPES)
    states = (m.state_dict().items() for m in (model, copied))
    for (one, saved), (other, mine) in zip(*states, strict=True):
        assert (one, type(saved.to_local())) == (other, type(mine.to_local()))
        assert raw_bytes(saved.to_local()) == raw_bytes(mine.to_local())
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(dist, name, sending)
        model(inputs(0, rank))
    backend = teb.backend(
        lambda graph, _: _Sending(graph, ours).run, teb.recipe(copied, reference=model), copied
    )
    with torch.no_grad():
        torch.compile(copied, backend=backend)(inputs(0, rank))
    assert backend.last_report().collectives_after == {"all_gather": 3, "all_reduce": 1}
    return eager, ours


@pytest.mark.torch
@pytest.mark.slow
def test_units_are_gathered_as_eagers_bytes() -> None:
    for eager, ours in on_ranks(_gathered):
        assert len(eager) == 3
        assert sorted(eager) == sorted(ours)


class OneMethod(Wrapper):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self._tensor,), None


class TwoArguments(OneMethod):
    def fsdp_pre_all_gather(self, mesh: Any, other: Any) -> Any:  # type: ignore[override]
        return (self._tensor,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any) -> Any:
        return outputs[0], outputs


class PreRaises(TwoArguments):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        raise ArithmeticError("no data")


class OtherShape(OneMethod):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any) -> Any:
        return outputs[0].t(), outputs


class ReturnsNothing(OneMethod):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any) -> Any:
        outputs[0].to(param_dtype)


class PostRaises(OneMethod):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any) -> Any:
        raise ArithmeticError("no scale")


@pytest.mark.parametrize(
    ("cls", "rows", "error", "match"),
    [
        (OneMethod, 8, TypeError, "a OneMethod, has no fsdp_post_all_gather"),
        (
            TwoArguments,
            8,
            TypeError,
            r"a TwoArguments: FSDP2 calls .* the signature is \(mesh",
        ),
        (PreRaises, 8, RuntimeError, "fsdp_pre_all_gather raised ArithmeticError: no data"),
        (PostRaises, 8, RuntimeError, "fsdp_post_all_gather raised ArithmeticError: no scale"),
        (ReturnsNothing, 8, TypeError, "fsdp_post_all_gather must return two values.*None"),
        (OtherShape, 8, ValueError, r"fsdp_post_all_gather returns \(24, 8\) for .* \(8, 24\)"),
        (TensorScaled, 6, ValueError, "6 rows are sharded unevenly over 4 ranks.*pad them to 2"),
    ],
)
def test_bad_classes_are_named_and_nothing_is_sharded(
    cls: type[Wrapper], rows: int, error: type[Exception], match: str, fake_world: int
) -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), wrap(nn.Linear(DIM, rows), cls))
    before = list(model.parameters())
    with pytest.raises(error, match=f"parameter 1.weight.*{match}"):
        teb.data_parallel(model, init_device_mesh("cpu", (4,)), **DTYPES)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert type(model[0]) is nn.Linear


def test_a_sharding_that_ignores_them_is_warned_of(fake_world: int) -> None:
    model, _ = even()
    mesh = init_device_mesh("cpu", (4,))
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None:
                module._parameters[name] = nn.Parameter(distribute_tensor(param, mesh, [Shard(0)]))
    with pytest.warns(
        teb.errors.NotBucketedWarning,
        match=r"5 .*fsdp_pre_all_gather of RowScaled, TensorScaled.*blocks.0.up",
    ):
        teb.recipe(model)
