"""Calls: classes, methods of ``FSDPModule``, meshes, errors, all-gather extensions."""

import inspect
from unittest.mock import patch

import torch
import torch.distributed.fsdp as eager_fsdp
import torch.nn as nn
from extended_models import RowScaled, TensorScaled
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.testing._internal.two_tensor import TwoTensor

from .harness import Refused, case
from .models import BF16, FP32, FP64, LM, MLP, mlps, tied_pair


@case(quick=True)
def exported_names(side):
    methods = [n for n, _ in inspect.getmembers(eager_fsdp.FSDPModule) if n[0] != "_"]
    missing = [n for n in methods if not hasattr(side.fsdp.FSDPModule, n)]
    names = [n for n in eager_fsdp._fully_shard.__all__ if not hasattr(side.fsdp, n)]
    return [("methods", missing), ("names", names)]


@case(quick=True)
def classes(side):
    model = side.shard(mlps(3), "0")
    states = {id(side.fully_shard.state(m)) for m in (model, model[0])}
    pair = [nn.Linear(2, 2), MLP()]
    return [
        ("units", [n for n, m in model.named_modules() if isinstance(m, side.fsdp.FSDPModule)]),
        ("class", (isinstance(model, nn.Sequential), type(model).__name__)),
        ("slice", isinstance(model[1:], side.fsdp.FSDPModule)),
        ("states", len(states)),
        ("returned", side.fully_shard(pair) is pair),
        ("in a list", [type(m).__name__ for m in pair]),
    ]


@case(modes=["compiled"])
def an_instance_of_torchs_class(side):
    return [("is", isinstance(side.shard(mlps(), "*"), eager_fsdp.FSDPModule))]


@case()
def names_and_printing(side):
    model = side.shard(LM(), "layers.*")
    lines = [line.strip()[:6] for line in repr(model).splitlines()]
    names = [n for n, _ in model.named_modules()]
    return [("modules", names), ("keys", list(model.state_dict())), ("repr", lines)]


@case(each=[(2.0, False), (2.0, True), (3.0, True), (1.0, False)])
def divide_factors(side, how):
    factor, sums = how
    model = side.shard(mlps(), "*")
    for unit in (*model, model):
        unit.set_force_sum_reduction_for_comms(sums)
        unit.set_gradient_divide_factor(factor)
    return side.train(model, side.data(4, 16))


@case(each=[FP32, FP64], world=4)
def divide_factors_of_replicas(side, dtype):
    mesh = side.mesh(2, 2, names=("replicas", "shards"))
    model = side.shard(mlps(), "*", mesh=mesh, mp=(None, dtype))
    for unit in (*model, model):
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(6.0)
    return side.train(model, side.data(4, 16))


SETTINGS = {
    "set_requires_gradient_sync": True,
    "set_requires_all_reduce": True,
    "set_reshard_after_backward": True,
    "set_reshard_after_forward": True,
    "set_is_last_backward": True,
    "set_unshard_in_backward": False,
    "set_allocate_memory_from_process_group_for_comm": False,
    "set_modules_to_forward_prefetch": [],
    "set_modules_to_backward_prefetch": [],
    "set_reduce_scatter_max_input_buffers": 2,
    "set_separate_reduce_scatter_group": True,
    "set_keep_unsharded_storage": True,
    "set_manual_backward_finalization": True,
}


@case(each=SETTINGS, quick=True)
def settings_with_equal_results(side, name):
    model = side.shard(mlps(), "*")
    if hasattr(model, name):  # some are younger than torch 2.13
        getattr(model, name)(SETTINGS[name])
    finish = getattr(model, "finalize_backward", lambda: None) if "manual" in name else lambda: None
    return side.train(model, side.data(4, 16), after_backward=finish)


@case()
def shared_communication(side):
    model = side.shard(mlps(3), "*")
    side.fsdp.share_comm_ctx(list(model))
    return side.train(model, side.data(4, 16))


@case()
def unshard_handles(side):
    model = side.shard(mlps(), "*")
    run = side.compile(model)

    def ahead(x):
        for handle in [unit.unshard(async_op=True) for unit in (model, *model)]:
            assert isinstance(handle, side.fsdp.UnshardHandle)
            handle.wait()
        return run(x)

    return [("handle", model.unshard()), *side.train(model, side.data(4, 16), run=ahead)]


@case()
def reshard_between_forward_and_backward(side):
    model = side.shard(mlps(), "*", reshard_after_forward=False)
    loss = side.compile(model)(side.data(4, 16)[0]).sum()
    for unit in (*model, model):
        unit.reshard()
    loss.backward()
    return side.state(model)


def scalar(side):
    model = nn.Module()
    model.scalar = nn.Parameter(torch.ones(()))
    side.shard(model)


def last(param):
    return Shard(param.ndim - 1)


def on_one_mesh(side):
    mesh = side.mesh()
    side.shard(distribute_module(nn.Linear(4, 4), mesh), mesh=mesh)


def a_unit_before_the_root(side):
    model = side.shard(mlps(), "*")
    for module in (model[0], model):
        module(side.data(4, 16)[0])


def tied_to_a_parent(side):
    side.compile(side.shard(LM(tied=True), "embedding"))(side.tokens()[0])


ERRORS = {
    # what is wrong: the call, words of our error
    "twice": (lambda s: s.shard(s.shard(MLP())), "once per module"),
    "ModuleList": (lambda s: s.shard(nn.ModuleList([MLP()])), "implement forward"),
    "ModuleDict": (lambda s: s.shard(nn.ModuleDict({"a": MLP()})), "implement forward"),
    "scalar": (scalar, "1D tensor"),
    "3-D mesh": (lambda s: s.shard(MLP(), mesh=s.mesh(s.world, 1, 1)), "1D or 2D"),
    "uneven": (lambda s: s.shard(nn.Linear(5, 4), shard_placement_fn=last), "uneven sharding"),
    "placement": (
        lambda s: s.shard(MLP(), shard_placement_fn=lambda p: Replicate()),
        "shard_placement_fn",
    ),
    "reshard": (lambda s: s.shard(MLP(), reshard_after_forward=3), "factor"),
    "tied siblings": (
        lambda s: s.compile(s.shard(tied_pair(), "a", "b"))(s.tokens()[0]),
        "one call",
    ),
    "tied to a parent": (tied_to_a_parent, "one call"),
    "one mesh": (on_one_mesh, "mesh"),
    "dimensions without names": (
        lambda s: s.shard(MLP(), mesh=s.mesh(s.world, 1)),
        "mesh_dim_names",
    ),
    "channels last": (
        lambda s: s.shard(nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)),
        "non-contiguous",
    ),
    "a unit before the root": (a_unit_before_the_root, "root module first"),
    "no module": (lambda s: s.fully_shard("model"), "torch.nn.Module"),
}


@case(
    *(Refused(Exception, words, eager=Exception) for _, words in ERRORS.values()),
    each=ERRORS,
    quick="each",
)
def errors(side, name):
    ERRORS[name][0](side)
    return []


@case(compiled=Refused(NotImplementedError, "mesh['dp']"))
def dp_mesh_dims(side):
    mesh = side.mesh(side.world, 1, names=("data", "tensor"))
    dims = eager_fsdp.DataParallelMeshDims(shard="data")
    model = side.shard(distribute_module(MLP(), mesh), mesh=mesh, dp_mesh_dims=dims)
    data = [DTensor.from_local(x, mesh, (Shard(0), Replicate())) for x in side.data(4, 16)]
    return side.train(model, data, loss=lambda out: out.to_local().sum())


@case(world=4)
def meshes_from_groups(side):
    whole = side.mesh(2, 2, names=("data", "other"))
    mesh = DeviceMesh.from_group(whole.get_group("data"), "cpu", mesh_dim_names=("data",))
    return side.train(side.shard(mlps(), "*", mesh=mesh), side.data(4, 16))


@case(each=["inside", "beside"])
def replicated_modules(side, where):
    model = mlps(3)
    replicate(model[0])
    side.fully_shard(model[1])
    model = side.shard(model) if where == "inside" else model
    return [("kinds", [type(p).__name__ for p in model.parameters()])]


EXTENSIONS = {"several tensors": RowScaled, "one scale": TensorScaled}


@case(each=EXTENSIONS)
def extensions(side, kind):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    for layer in model:
        layer.weight = nn.Parameter(EXTENSIONS[kind](layer.weight.detach()))
    side.shard(model, "*", mp=(BF16, FP32))
    run, found = side.compile(model), []
    for x in side.data(4, 8)[:2]:
        run(x).sum().backward()
        found += [("gradient", p.grad.to_local()) for p in model.parameters()]
    return found


def both_tensors(self, mesh):
    return (self.a, self.b), None


def from_both(self, outputs, metadata, dtype, *, out=None):
    return None if out is not None else (TwoTensor(*outputs), outputs)


@case()
def an_extension_of_two_tensors(side):
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))
    for layer in model:
        layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach() + 1))
    with (
        patch.object(TwoTensor, "fsdp_pre_all_gather", both_tensors, create=True),
        patch.object(TwoTensor, "fsdp_post_all_gather", from_both, create=True),
    ):
        side.compile(side.shard(model, "*"))(side.data(4, 8)[0]).sum().backward()
    # Eager FSDP2's gradient is plain. TwoTensor writes one after the other into it, the second last.
    grads = (p.grad.to_local() for p in model.parameters())
    return [("gradient", g.b if isinstance(g, TwoTensor) else g) for g in grads]


def extend(shard, ran):
    """Gather ``shard`` rounded, and note it."""

    def pre(mesh):
        ran.append(True)
        return (shard.to(BF16),), None

    def post(outputs, metadata, dtype, *, out=None):
        full = outputs[0].to(dtype)
        if out is None:
            return full, (outputs[0], full)
        with torch.autograd._unsafe_preserve_version_counter(out):
            return out.copy_(full) and None

    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = pre, post


@case()
def extension_methods_that_come_late(side):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8, bias=False))
    side.shard(model, "*").to_empty(device="cpu")
    ran = []
    for param in model.parameters():
        with torch.no_grad():
            param.fill_(0.3)
        extend(param._local_tensor, ran)
    out = side.compile(model)(side.data(4, 8)[0])
    return [("out", out.detach()), ("ran", bool(ran))]
