"""Outside of forward: a parameter is the shard of ``named_parameters()``, to read and to write."""

import copy
import io
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

import torch_ext_bucketing as teb

from .harness import EQUAL, Differs, Refused, case, local
from .models import BF16, FP32, LM, Lambda, mlps, raised, tied_pair


def begun(side, **options):
    """Return a sharded model after a backward, what runs it, and data."""
    model = side.shard(mlps(), "*", **options)
    run, data = side.compile(model), side.data(4, 16)
    run(data[0]).sum().backward()
    return model, run, data


def kind(value):
    return "shard" if isinstance(value, DTensor) else "whole"


WRITES = {
    "mul_": lambda w: w.mul_(0.5),
    "data.copy_": lambda w: w.data.copy_(w.data / w.data.norm(dim=1, keepdim=True)),
    "data.mul_": lambda w: w.data.mul_(0.5),
    "data =": lambda w: setattr(w, "data", w.data * 2),
    "init": lambda w: nn.init.constant_(w, 0.25),
    "clamp_": lambda w: w.clamp_(-0.01, 0.01),
    "unit rows": lambda w: w.div_(w.norm(dim=1, keepdim=True)),
}


@case(each=WRITES, quick=True)
def a_write_to_an_attribute(side, how):
    model = side.shard(mlps(), "*")

    def write():
        with torch.no_grad():
            WRITES[how](model[0].up.weight)

    return side.train(model, side.data(4, 16), after_step=write)


@case(each=[True, False], quick=True)
def reads_of_an_attribute(side, reshard):
    model, *_ = begun(side, reshard_after_forward=reshard)
    weight = model[0].up.weight
    return [
        ("kind", kind(weight)),
        ("is the parameter", weight is dict(model.named_parameters())["0.up.weight"]),
        ("leaf", (weight.is_leaf, tuple(weight.shape), weight.dtype)),
        ("gradient", local(weight.grad)),
        ("value", local(weight)),
    ]


@case(each=[True, False, None], quick=True)
def kinds_around_a_forward(side, reshard):
    model = side.shard(mlps(), "*", reshard_after_forward=reshard)
    run, (x, *_) = side.compile(model), side.data(4, 16)

    def kinds():
        return [kind(model[0].up.weight), *map(kind, model.parameters())]

    found = [("before", kinds())]
    out = run(x)
    # A compiled step keeps gathered parameters in its graphs.
    if side.mode == "uncompiled" or reshard is not False:
        found.append(("after forward", kinds()))
    out.sum().backward()
    return [*found, ("after backward", kinds())]


@case(each=["unshard", "async_op", "twice"], quick=True)
def reads_after_unshard(side, how):
    model, run, (x, *_) = begun(side)
    unit = model[0]
    handle = unit.unshard(async_op=how == "async_op")
    if how == "async_op":
        handle.wait()
    if how == "twice":
        unit.unshard()
    weight = unit.up.weight
    found = [("kind", kind(weight)), ("value", weight.detach().clone())]
    found += [("names", [n for n, _ in unit.named_parameters()])]
    unit.reshard()
    found += [("after", kind(unit.up.weight))]
    run(x).sum().backward()
    return found + side.state(model)


@case()
def unshard_before_any_forward(side):
    model = side.shard(tied_pair(), "a+b")
    model.a.unshard()
    found = [("tied", model.a.weight is model.b.weight), ("kind", kind(model.a.weight))]
    model.a.reshard()
    return [*found, *side.train(model, side.tokens())]


@case()
def a_write_while_whole_is_lost(side):
    model, run, (x, *_) = begun(side)
    model[0].unshard()
    with torch.no_grad():
        model[0].up.weight.mul_(0)
    model[0].reshard()
    run(x).sum().backward()
    return side.state(model)


@case(each=["attribute", "unit", "model"], quick=True)
def freezing_between_steps(side, what):
    model, run, data = begun(side)
    model.zero_grad()
    targets = {"attribute": model[0].up.weight, "unit": model[0], "model": model}
    targets[what].requires_grad_(False)
    model[1].down.bias.requires_grad_(True)
    return side.train(model, data, run=run, steps=2)


@case(quick=True)
def clipping_by_attribute(side):
    model = side.shard(mlps(), "*")

    def clip():
        weights = [model[0].up.weight, model[1].down.weight]
        return nn.utils.clip_grad_norm_(weights, 1e-3).full_tensor()

    return side.train(model, side.data(4, 16), after_backward=clip)


@case()
def an_optimizer_over_attributes(side):
    model, run, (x, *_) = begun(side)
    update = torch.optim.SGD([model[0].up.weight, model[1].down.weight], lr=0.1)
    run(x).sum().backward()
    update.step()
    return side.state(model)


LOOKS = {
    "print": lambda m: len(repr(m)) > 100,
    "dtype": lambda m: m[0].up.weight.dtype,
    "shape": lambda m: tuple(m[0].up.weight.shape),
    "numel": lambda m: sum(p.numel() for p in m.parameters()),
}


@case(each=LOOKS, quick=True)
def a_look_on_rank_0_alone(side, what):
    model, run, (x, *_) = begun(side, mp=(BF16, FP32))
    with side.alone() as here:
        seen = LOOKS[what](model) if here else None
    run(x).sum().backward()
    return [("seen", seen), *side.state(model)]


@case(each=["before a step", "after a step"], modes=["compiled"])
def a_look_after_data_parallel(side, when):
    model = mlps()
    model = teb.data_parallel(model, side.mesh()) if side.ours else side.shard(model, "*")
    run, (x, *_) = side.compile(model), side.data(4, 16)
    if when == "after a step":
        run(x).sum().backward()
    with side.alone() as here:
        seen = [LOOKS[what](model) for what in LOOKS] if here else None
    run(x).sum().backward()
    return [("seen", seen), *side.state(model)]


@case()
def a_new_parameter_by_load_state_dict(side):
    model, run, data = begun(side)
    old = dict(model.named_parameters())["0.up.weight"]
    new = nn.Parameter(DTensor.from_local(local(old) * 2, old.device_mesh, old.placements))
    model.load_state_dict({"0.up.weight": new}, assign=True, strict=False)
    return side.train(model, data, run=run, steps=2)


@case(Refused(TypeError, "distribute_tensor"))  # eager FSDP2 forgets it without a word
def a_plain_tensor_assigned_after_sharding(side):
    model, run, (x, *_) = begun(side)
    model[0].up.weight = nn.Parameter(torch.randn(32, 16))
    run(x).sum().backward()
    return side.state(model)


@case()
def an_average_of_weights(side):
    model, run, data = begun(side)
    average = [p.detach().clone() for p in model.parameters()]
    found = side.train(model, data, run=run, steps=2)
    with torch.no_grad():
        for kept, param in zip(average, model.parameters(), strict=True):
            kept.lerp_(param.detach(), 0.5)
            param.copy_(kept)
    return [*found, ("out", run(data[3]).detach()), *side.state(model)]


@case(each=["apply", "train", "zero_grad"])
def functions_of_modules(side, what):
    model, run, (x, *_) = begun(side)

    def init(module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.1)
            nn.init.zeros_(module.bias)

    argument = {"apply": (init,), "train": (False,)}.get(what, ())
    getattr(model, what)(*argument)
    model.zero_grad()
    run(x).sum().backward()
    return side.state(model)


@case(compiled=Differs("dtype"))
def dtype_of_a_weight_of_another_unit(side):
    model, dtypes = Lambda(lambda m, x: dtypes.append(m.a.weight.dtype) or m.b(m.a(x).float())), []
    side.fully_shard(model.a, mp_policy=side.fsdp.MixedPrecisionPolicy(BF16, FP32))
    return [*side.train(side.shard(model), side.data(4, 8)), ("dtype", dtypes[0])]


@case(each=["plain", "assign", "saved", "kept", "to_empty"], quick=True)
def state_dicts(side, how):
    model, run, (x, *_) = begun(side)
    kept = model.state_dict()
    found = [("keys", [(n, kind(v)) for n, v in kept.items()])]
    if how == "kept":  # shares memory with the shards
        with torch.no_grad():
            model[0].up.weight.zero_()
        return [*found, *((n, local(v)) for n, v in kept.items())]
    new = {n: v.detach().clone().mul_(2) for n, v in kept.items()}
    if how == "saved":
        torch.save(new, data := io.BytesIO())
        data.seek(0)
        new = torch.load(data, weights_only=False)
    if how == "to_empty":
        model.to_empty(device="cpu")
    model.load_state_dict(new, assign=how == "assign")
    model.zero_grad()
    run(x).sum().backward()
    return found + side.state(model)


@case(each=["assign", "to_empty"], quick=True)
def ties_that_loading_breaks(side, how):
    model = side.shard(LM(tied=True), "layers.*")
    new = {n: v.detach().clone() for n, v in model.state_dict().items()}
    if how == "to_empty":
        model.to_empty(device="cpu")
    model.load_state_dict(new, assign=how == "assign")
    return side.train(model, side.tokens())


@case(each=["to_empty", "assign"])
def from_the_meta_device(side, how):
    weights = mlps(2, 16, buffer=True).state_dict()
    with torch.device("meta"):
        model = mlps(2, 16, buffer=True)
    new = {}
    for name, value in side.shard(model, "*").state_dict().items():
        new[name] = weights[name]
        if kind(value) == "shard":
            new[name] = distribute_tensor(weights[name], value.device_mesh, value.placements)
    if how == "to_empty":
        model.to_empty(device="cpu")
    model.load_state_dict(new, assign=how == "assign")
    return side.train(model, side.data(4, 16))


@case(Refused(RuntimeError, "up.weight", eager=RuntimeError), quick=True, modes=["compiled"])
def parameters_left_on_the_meta_device(side):
    with torch.device("meta"):
        model = side.shard(mlps(), "*")
    side.compile(model)(side.data(4, 16)[0])
    return []


@case(Refused(AssertionError, "cop", eager=AssertionError))
def a_deepcopy(side):
    copy.deepcopy(begun(side)[0])
    return []


@case()
def memory_of_shards_stays(side):
    model, run, data = begun(side)
    before = [local(p).data_ptr() for p in model.parameters()]
    side.train(model, data, run=run, steps=2)
    return [("same", before == [local(p).data_ptr() for p in model.parameters()])]


# FSDP2 keeps the memory of the shard that it knows.
@case(Differs("out"), uncompiled=EQUAL)
def swapped_tensors(side):
    model, run, data = begun(side)
    twins = [p.detach().clone() * 2 for p in model.parameters()]
    model.zero_grad()
    for param, twin in zip(model.parameters(), twins, strict=True):
        torch.utils.swap_tensors(param, nn.Parameter(twin))
    return [("out", run(data[1]).detach())]


@case()
def exchanged_data(side):
    model, run, data = begun(side)
    kept, found = [p.data for p in model.parameters()], []
    for factor in (0.5, 1):
        for param, value in zip(model.parameters(), kept, strict=True):
            param.data = value * factor
        found += [("out", run(data[1]).detach())]
    return [*found, *side.train(model, data, run=run, steps=2)]


@case(each=["whole", "sharded", "optimizer", "saved"])
def distributed_checkpoints(side, how):
    model, run, (x, y, *_) = begun(side)
    update = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = StateDictOptions(full_state_dict=how == "whole")

    def step(x):
        run(x).sum().backward()
        update.step()
        update.zero_grad()

    step(x)
    state = [copy.deepcopy(s) for s in get_state_dict(model, update, options=options)]
    step(y)
    if how == "saved":
        folder = [tempfile.mkdtemp() if side.rank == 0 else None]
        dist.broadcast_object_list(folder)
        dcp.save({"model": state[0]}, checkpoint_id=folder[0])
        state[0] = get_model_state_dict(model)
        dcp.load({"model": state[0]}, checkpoint_id=folder[0])
    set_state_dict(
        model, update, model_state_dict=state[0], optim_state_dict=state[1], options=options
    )
    step(x)
    return [("keys", list(state[0])), *side.state(model)]


@case()
def a_parameter_made_of_shards(side):
    model = Lambda(lambda m, x: m.b(m.a(x)) + m.norm)
    model.norm = nn.Parameter(torch.empty(8))
    side.shard(model, "*")
    with torch.no_grad():
        model.norm = nn.Parameter(torch.linalg.norm(model.a.weight, dim=1))
    return side.train(model, side.data(4, 8))


@case(each=["after graph break", "in a unit"])
def reads_after_an_exception(side, where):
    def forward(m, x):
        x = m.a(x)
        if where == "after graph break":
            torch._dynamo.graph_break()
        if m.armed:
            raise ValueError("armed")
        return m.b(x)

    model = Lambda(forward)
    model.armed = True
    side.shard(model, "*" if where == "in a unit" else "a")
    raises = bool(raised(side.compile(model), side.data(4, 8)[0]))
    if hasattr(model, "reset_iter_state"):  # since 2.14
        model.reset_iter_state()
    return [("raises", raises), ("kinds", [kind(model.a.weight), kind(model.b.weight)])]


@case(Differs("names"), uncompiled=EQUAL)
def a_parameter_set_to_none(side):
    model, run, (x, *_) = begun(side)
    model[0].up.bias = None
    out = run(x).detach()
    return [("names", [name for name, _ in model.named_parameters()]), ("out names", out)]
