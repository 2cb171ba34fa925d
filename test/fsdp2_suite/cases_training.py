"""Training: units, resharding, precision, accumulation, checkpoints, hooks, frozen parameters."""

import collections
import dataclasses
import functools
import gc

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import torch_ext_bucketing as teb

from .harness import EQUAL, Differs, Refused, case, local
from .models import BF16, FP32, FP64, LM, MLP, Lambda, Towers, checkpointed, mlps, raised, tied_pair


def largest(param):
    return Shard(param.shape.index(max(param.shape)))


def across(param):
    """Shard the dimension that tensor parallelism leaves whole."""
    columns = isinstance(param, DTensor) and param.ndim == 2 and param.placements[0] == Shard(0)
    return Shard(1) if columns else Shard(0)


def with_parameters(*shapes):
    model = Lambda(lambda m, x: m.b(x @ m.c[0] + m.c[1]))
    model.c = nn.ParameterList(torch.randn(shape) for shape in shapes)
    return model


def replaced(kind):
    """Return two layers, the first of another kind."""
    model = Lambda(lambda m, x: m.b(m.a(x)))
    if kind == "LSTM":
        model.a, model.function = nn.LSTM(8, 8, batch_first=True), lambda m, x: m.b(m.a(x)[0])
    elif kind == "attention":
        model.a = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    else:
        getattr(nn.utils.parametrizations, kind)(model.a)
    return model


TRAINED = {
    # name: model, units, options, shape of the input, 0 for tokens
    "uneven rows": (lambda: nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 5)), "", {}, (4, 7)),
    "fewer rows than ranks": (lambda: nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 16)), "", {}, (4, 7)),
    "blocks": (LM, "layers.*", {}, 0),
    "blocks kept": (LM, "layers.*", {"reshard_after_forward": False}, 0),
    "blocks in smaller groups": (LM, "layers.*", {"reshard_after_forward": 2}, 0),
    "one block": (LM, "layers.0", {}, 0),
    "several modules": (LM, "layers.0 layers.1+norm+head", {}, 0),
    "nested": (LM, "layers.0.mlp layers.0.qkv layers.*", {}, 0),
    "nested, kept": (LM, "layers.0.mlp layers.*", {"reshard_after_forward": False}, 0),
    "largest dimension": (lambda: mlps(2, 16), "*", {"shard_placement_fn": largest}, (4, 16)),
    "buffers": (lambda: mlps(2, 16, True), "*", {"mp": (BF16, FP32)}, (4, 16)),
    "double": (lambda: mlps().double(), "*", {}, (4, 16, FP64)),
    "keeps inputs' dtype": (mlps, "*", {"mp": (BF16, FP32, None, False)}, (4, 16, BF16)),
    "tied": (tied_pair, "a+b", {}, 0),
    "tied, kept": (tied_pair, "a+b", {"reshard_after_forward": False}, 0),
    "tied in the root": (lambda: LM(tied=True), "layers.*", {}, 0),
    "tied, recomputed": (lambda: LM(tied=True, again=True), "layers.*", {}, 0),
    "recomputed": (lambda: LM(3, again=True), "layers.0 layers.1+layers.2", {}, 0),
    "recomputed function": (lambda: Lambda(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False))), "b", {}, (4, 8)),
    "runs twice": (lambda: Lambda(lambda m, x: m.b(m.a(x) + m.a(x + 1))), "a", {}, (4, 8)),
    "runs twice, kept": (lambda: Lambda(lambda m, x: m.b(m.a(x) + m.a(x + 1))), "a", {"reshard_after_forward": False}, (4, 8)),
    "a parent reads a child": (lambda: Lambda(lambda m, x: F.linear(m.b(m.a(x)), m.a.weight)), "b", {}, (4, 8)),
    "unused module": (lambda: Lambda(lambda m, x: m.a(x)), "a", {}, (4, 8)),
    "unused bias": (lambda: Lambda(lambda m, x: F.linear(m.a(x), m.b.weight)), "a", {}, (4, 8)),
    "no rows": (lambda: with_parameters((8, 8), (8,), (0, 8)), "b", {}, (4, 8)),
    "one element": (lambda: with_parameters((8, 8), (1,)), "b", {}, (4, 8)),
    "LSTM": (lambda: replaced("LSTM"), "b", {}, (2, 5, 8)),
    "attention": (lambda: replaced("attention"), "a", {}, (2, 5, 8)),
    "weight_norm": (lambda: replaced("weight_norm"), "b", {}, (4, 8)),
    "spectral_norm": (lambda: replaced("spectral_norm"), "b", {}, (4, 8)),
    "no inputs": (lambda: Lambda(lambda m: m.a.weight @ m.b.weight), "", {}, None),
    "no parameters": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()), "*", {}, (4, 8)),
}  # fmt: skip


@case(each=TRAINED, world=4)
def training(side, name):
    make, units, options, shape = TRAINED[name]
    model = side.shard(make(), *units.split(), **options)
    if shape is None:
        return side.train(model, [()] * 3)
    return side.train(model, side.tokens() if shape == 0 else side.data(*shape))


@case(each=[(True, 17, False), (False, 16, True), (True, 3, True)], world=4)
def replicas(side, how):
    reshard, width, again = how
    model = nn.Sequential(nn.LayerNorm(width, bias=False), *mlps(2, width))
    mesh = side.mesh(2, 2, names=("replicas", "shards"))
    model = checkpointed(model) if again else model
    side.shard(model, "*", mesh=mesh, reshard_after_forward=reshard)
    return side.train(model, side.data(4, width))


TENSOR_PARALLEL = {
    # name: sizes of the mesh (replicas, shards, tensor), width, options
    "blocks": ((1, 2, 2), 8, {}),
    "bf16": ((1, 2, 2), 8, {"mp": (BF16, FP32)}),
    "uneven": ((1, 2, 2), 3, {}),
    "kept": ((1, 2, 2), 17, {"reshard_after_forward": False}),
    "other dimension": ((1, 2, 2), 8, {"shard_placement_fn": across}),
    "replicas": ((2, 1, 2), 8, {}),
    "one shard": ((1, 1, 4), 8, {}),
}


@case(each=TENSOR_PARALLEL, world=4)
def tensor_parallel(side, name):
    sizes, width, options = TENSOR_PARALLEL[name]
    mesh, model = side.mesh(*sizes, names=("replicas", "shards", "tensor")), mlps(2, width)
    for mlp in model:
        parallelize_module(
            mlp, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    data_mesh = mesh["replicas", "shards"] if sizes[0] > 1 else mesh["shards"]
    side.shard(model, "*", mesh=data_mesh, **options)
    torch.manual_seed(side.rank // sizes[2])
    adam = functools.partial(torch.optim.Adam, foreach=False)
    return side.train(model, [torch.randn(4, width) for _ in range(3)], optimizer=adam)


@case(world=4)
def a_model_that_returns_a_dtensor(side):
    mesh = side.mesh(2, 2, names=("shards", "tensor"))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 12))
    classes = ColwiseParallel(use_local_output=False)
    parallelize_module(model, mesh["tensor"], {"1": classes})
    side.shard(model, "*", mesh=mesh["shards"])
    torch.manual_seed(side.rank // 2)
    labels = torch.randint(12, (4,))
    adam = functools.partial(torch.optim.Adam, foreach=False)
    with loss_parallel():
        return side.train(
            model,
            [torch.randn(4, 8) for _ in range(3)],
            optimizer=adam,
            loss=lambda out: F.cross_entropy(out, labels),
        )


@case(world=4)
def a_parameter_of_another_mesh(side):
    mesh = side.mesh(2, 2, names=("data", "expert"))
    model = Lambda(lambda m, x: torch.tanh(x @ m.experts.to_local().sum(0)), 0)
    weight = DTensor.from_local(torch.randn(2, 8, 8), mesh["expert"], [Replicate()])
    model.experts = nn.Parameter(weight)
    return side.train(side.shard(model, mesh=mesh["data"]), side.data(4, 8))


@case()
def one_rank_in_the_mesh(side):
    mesh = side.mesh(side.world, 1, names=("other", "one"))["one"]
    return side.train(side.shard(mlps(), "*", mesh=mesh), side.data(4, 16))


POLICIES = [
    (BF16,),
    (BF16, FP32),
    (BF16, FP32, FP32),
    (FP32, BF16),
    (torch.float16, torch.float16),
    (None, FP64),
]


@case(each=POLICIES, world=4)
def mixed_precision(side, mp):
    return side.train(side.shard(mlps(), "*", mp=mp), side.data(4, 16))


@case()
def units_of_different_precision(side):
    model = Lambda(lambda m, x: m.c(m.b(m.a(x)).float()), 3)
    policy = side.fsdp.MixedPrecisionPolicy
    side.fully_shard([model.a, model.b], mp_policy=policy(BF16, FP32))
    side.fully_shard(model.c, mp_policy=policy(FP64, output_dtype=FP32))
    return side.train(side.shard(model, mp=(BF16,)), side.data(4, 8))


@case()
def cast_after_sharding(side):
    return side.train(side.shard(mlps(), "*").double(), side.data(4, 16, FP64))


@case()
def autocast(side):
    model = side.shard(mlps(), "*")
    run = side.compile(model)

    def cast(x):
        with torch.autocast("cpu", BF16):
            return run(x)

    return side.train(model, side.data(4, 16), run=cast)


@case()
def inputs_in_containers(side):
    model = Lambda(lambda m, x, i: m.b(m.a(x)) * i["scale"] + i["n"][0])
    side.shard(model, "*", mp=(BF16, FP32))
    extra = {"scale": torch.arange(8), "n": (torch.ones(8),)}
    return side.train(model, [(x, extra) for x in side.data(4, 8)])


@case()
def inputs_in_tuples_of_a_root_without_parameters(side):
    model, (x, y, z, *_) = side.shard(Lambda(lambda m, x, ys: x + ys[0] + ys[1], 0)), side.data(3)
    return [("out", side.compile(model)(x, (y, z)))]


Data = dataclasses.make_dataclass("Data", [("first", torch.Tensor), ("number", int, 1)])
Named = collections.namedtuple("Named", ["first", "number"])
CONTAINERS = {
    "list": (lambda x: [x], lambda xs: xs[0]),
    "tuple": (lambda x: (x, 1), lambda xs: xs[0]),
    "dict": (lambda x: {0: x}, lambda xs: xs[0]),
    "nested": (lambda x: {"a": [x, (x, 2)]}, lambda xs: xs["a"][1][0]),
    "namedtuple": (lambda x: Named(x, 1), lambda xs: xs.first),
    "dataclass": (Data, lambda xs: xs.first),
}


@case(each=CONTAINERS)
def activations_in_containers(side, kind):
    pack, first = CONTAINERS[kind]
    model = nn.Sequential(*(Lambda(lambda m, x: pack(m.a(first(x))), 1) for _ in range(3)))
    side.shard(model, "*", mp=(BF16, FP32))
    run = side.compile(model)
    return side.train(model, side.data(4, 8), run=lambda x: first(run(pack(x))))


@case(world=4)
def wrapped_checkpoints(side):
    model = LM(3)
    checkpointed(model.layers)
    return side.train(side.shard(model, "layers.0", "layers.1+layers.2"), side.tokens())


@case(modes=["uncompiled"])  # torch.compile cannot trace them, whatever shards the model
def composable_checkpoints(side):
    model = LM()
    for layer in model.layers:
        composable_checkpoint(layer)
    return side.train(side.shard(model, "layers.*"), side.tokens())


@case(each=["in the unit", "around the unit"])
def checkpointed_dropout(side, where):
    model = LM(again=where == "in the unit", dropout=0.3)
    if where == "around the unit":
        checkpointed(model.layers)
    side.shard(model, "layers.*")
    torch.manual_seed(side.rank)
    return side.train(model, side.tokens())


# Eager FSDP2 adds the gradients of both forwards before it reduces them.
@case(Differs("gradient"), each=[True, False], uncompiled=EQUAL)
def two_forwards_before_backward(side, again):
    model = side.shard(LM(again=again), "layers.*")
    run, (a, b, *_) = side.compile(model), side.tokens()
    (run(a).sum() - run(b).sum()).square().backward()
    return side.state(model)


@case(each=["compiled", "not compiled"])
def a_part_alone(side, how):
    model = side.shard(mlps(3), "*")
    run, (x, *_) = side.compile(model), side.data(4, 16)
    part = side.compile(model, model[0]) if how == "compiled" else model[0]
    found = []
    for call in (run, part, run):
        call(x).sum().backward()
        found += side.state(model)
        model.zero_grad()
    return found


@case(
    each=[
        (False, "norm+head", ()),
        (True, "norm+head+embedding", ()),
        (False, "norm+head", (BF16, FP32)),
    ]
)
def a_head_in_chunks(side, how):
    tied, unit, mp = how
    model = side.shard(LM(tied=tied), "layers.*", unit, mp=mp)
    run, head = side.compile(model), side.compile(model, model.head)
    hidden, grads, found = run(side.tokens()[0], False), [], []
    for chunk in hidden.detach().chunk(3, 1):
        chunk = chunk.contiguous().requires_grad_()
        head(chunk).float().logsumexp(-1).sum().backward()
        grads.append(chunk.grad)
        found.append(("head", local(model.head.weight.grad).clone()))
    hidden.backward(torch.cat(grads, 1))
    return found + side.state(model)


@case(each=["weights", "layers", "frozen late", "unfrozen"])
def frozen_parameters(side, what):
    model = mlps(3)
    model[:2].requires_grad_(what not in ("layers", "unfrozen"))
    for name, param in model.named_parameters() if what == "weights" else ():
        param.requires_grad_("bias" in name)
    side.shard(model, "*")
    run, data = side.compile(model), side.data(4, 16)
    found = side.train(model, data, run=run, steps=1)
    if what in ("frozen late", "unfrozen"):
        model[0].requires_grad_(what == "unfrozen")
    return found + side.train(model, data, run=run, steps=2)


@case(each=[True, False])
def frozen_layer_between_trained_ones(side, reshard):
    def forward(m, x):
        x = m.a(x)
        for _ in range(2):
            x = m.b(F.relu(m.c(x)))
            with torch.no_grad():
                y = F.relu(m.c(x))
            x = x + y
        return x

    model = Lambda(forward, 3, 5)
    model.b.requires_grad_(False)
    return side.train(side.shard(model, "*", reshard_after_forward=reshard), side.data(4, 5))


@case(quick=True)
def ignored_parameters(side):
    model = mlps()
    side.shard(model, "*", ignored_params={model[0].up.weight, model[1].down.bias})
    adam = functools.partial(torch.optim.Adam, foreach=False)
    return side.train(model, side.data(4, 16), optimizer=adam)


@case(Differs("gradient"), uncompiled=EQUAL)
def an_output_that_the_loss_leaves_out(side):
    model = side.shard(Lambda(lambda m, x: (m.a(x), m.b(x))), "a")
    side.compile(model)(side.data(4, 8)[0])[0].sum().backward()
    return side.state(model)


@case(
    Refused(NotImplementedError, "ReduceOnce"),
    EQUAL,
    each=["by flags", "each reduced"],
    quick=True,
    modes=["compiled"],
)
def accumulation(side, what):
    return accumulated(side, what)


@case(each=["by flags", "each reduced"], modes=["uncompiled"])
def accumulation_without_a_graph(side, what):
    return accumulated(side, what)


def accumulated(side, what):
    model = side.shard(mlps(), "*")
    run = side.compile(model)
    for number, x in enumerate(side.data(4, 16)[:3]):
        model.set_is_last_backward(number == 2)
        if what == "by flags":
            model.set_requires_gradient_sync(number == 2)
        run(x).sum().backward()
    return side.state(model)


@case(
    each=[(1, False, ()), (1, True, ()), (2, False, ()), (1, False, (BF16, FP32))],
    world=4,
    modes=["compiled"],
)
def accumulation_by_reduce_once(side, how):
    replicas, keep, mp = how
    mesh = side.mesh() if replicas == 1 else side.mesh(2, 2, names=("replicas", "shards"))
    model = side.shard(mlps(), "*", mesh=mesh, mp=mp)
    run, found = side.compile(model), []
    optimizer = torch.optim.Adam(model.parameters())
    if side.ours:
        backend = teb.backend("aot_eager", teb.recipe(model), model=model)
        once = side.fsdp.ReduceOnce(model, backend, gather_once=keep)
    for _ in range(2):
        if side.ours:
            with once:
                for x in side.data(4, 16)[:3]:
                    run(x).sum().backward()
        else:
            for number, x in enumerate(side.data(4, 16)[:3]):
                model.set_requires_gradient_sync(number == 2)
                model.set_reshard_after_backward(number == 2 or not keep)
                run(x).sum().backward()
        found += side.state(model)
        optimizer.step()
        optimizer.zero_grad()
    return found


@case(each=[2.0, float("inf")])
def clipped_gradients(side, kind):
    model = side.shard(mlps(), "*", mp=(BF16, FP32))

    def clip():
        return nn.utils.clip_grad_norm_(model.parameters(), 0.1, kind).full_tensor()

    return side.train(model, side.data(4, 16), after_backward=clip)


@case(each=["SGD", "AdamW", "Adagrad", "fused"])
def optimizers(side, kind):
    fused = functools.partial(torch.optim.Adam, fused=True)
    optimizer = fused if kind == "fused" else getattr(torch.optim, kind)
    return side.train(side.shard(mlps(), "*"), side.data(4, 16), optimizer=optimizer)


@case()
def gradient_scaler(side):
    model, scaler = side.shard(mlps(), "*"), torch.amp.GradScaler("cpu", init_scale=4.0)
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(side.compile(model)(side.data(4, 16)[0]).sum()).backward()
    scaler.unscale_(update)
    scaler.step(update)
    scaler.update()
    return [("scale", scaler.get_scale()), *side.state(model)]


@case(each=["mask", "optimizer in backward"], quick=True)
def hooks_after_accumulation(side, kind):
    model = side.shard(mlps(), "*")
    updates = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def hook(param):
        if kind == "mask":
            local(param.grad)[:1] = 0
        else:
            updates[param].step()
            updates[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    return side.train(model, side.data(4, 16))


@case(compiled=Differs(""))  # eager FSDP2 does not run them
def hooks_on_gradients(side):
    model = side.shard(mlps(), "*")
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 2)
    return side.train(model, side.data(4, 16))


@case(each=["before", "after", "prepended"])
def hooks_on_modules(side, when):
    model, seen = mlps(), []
    if when != "before":
        side.shard(model, "*", mp=(BF16, FP32))
    first = when == "prepended"
    model[0].register_forward_pre_hook(lambda m, args: (args[0] * 1.5,), prepend=first)
    model[1].register_forward_hook(lambda m, args, out: out.float() + 1, prepend=first)
    model[1].register_full_backward_hook(lambda m, _, grads: seen.append(grads[0].shape))
    if when == "before":
        side.shard(model, "*", mp=(BF16, FP32))
    return [*side.train(model, side.data(4, 16)), ("seen", seen)]


@case()
def an_exception_in_forward(side):
    def forward(m, x):
        if m.armed:
            raise ValueError("armed")
        return m.b(m.a(x))

    model = side.shard(Lambda(forward), "*")
    model.armed = True
    run, (x, *_) = side.compile(model), side.data(4, 8)
    found = [("armed", bool(raised(run, x)))]
    model.armed = False
    if hasattr(model, "reset_iter_state"):  # since 2.14
        model.reset_iter_state()
    run(x).sum().backward()
    return found + side.state(model)


@case(each=["graph break", "branch", "no grad"])
def control_flow(side, kind):
    def forward(m, x):
        x = torch.tanh(m.a(x))
        if kind == "graph break":
            torch._dynamo.graph_break()
        if kind == "branch" and x.sum().item() > 1e9:
            return m.c(x)
        if kind == "no grad":
            with torch.no_grad():
                y = m.c(x)
            x = x + y
        return m.b(x)

    return side.train(side.shard(Lambda(forward, 3), "*"), side.data(4, 8))


@case(compiled=Refused(RuntimeError, "read it before"))
def a_read_in_a_branch(side):
    def forward(m, x):
        x = m.a(x)
        return torch.cond(x.sum() > 0, lambda y: m.b(y), lambda y: m.b(y) * 2, (x,))

    return side.train(side.shard(Lambda(forward), "a"), side.data(4, 8))


@case()
def a_read_before_a_branch(side):
    def forward(m, x):
        x, weight = m.a(x), m.b.weight
        return torch.cond(x.sum() > 0, lambda y: y @ weight, lambda y: y @ weight * 2, (x,))

    return side.train(side.shard(Lambda(forward), "a"), side.data(4, 8))


@case(each=["batches", "blocks", "function", "module.compile", "no recipe"], modes=["compiled"])
def ways_to_compile(side, how):
    model = side.shard(LM(), "layers.*")
    data, run = side.tokens(), model
    if how == "batches":
        data = [torch.cat([x] * (1 + n)) for n, x in enumerate(data)]
    if side.ours:
        backend = teb.backend("aot_eager", () if how == "no recipe" else teb.recipe(model))
        if how == "blocks":
            for layer in model.layers:
                layer.compile(backend=backend, fullgraph=True)
        elif how == "module.compile":
            model.compile(backend=backend)
        else:
            function = (lambda x: model(x)) if how == "function" else model
            run = torch.compile(function, backend=backend)
    return side.train(model, data, run=run)


@case(each=["kept", "recomputed", "spectral_norm", "twice", "two models"], modes=["compiled"])
def blocks_compiled_alone(side, how):
    models = [LM(again=how == "recomputed") for _ in range(1 + (how == "two models"))]
    for model in models:
        for layer in model.layers if how == "spectral_norm" else ():
            nn.utils.parametrizations.spectral_norm(layer.out)
        side.shard(model, "layers.*", reshard_after_forward=how != "kept")
        for layer in model.layers if side.ours else ():
            layer.compile(backend="aot_eager", fullgraph=True)

    def run(x):
        return sum(model(x) for model in models * (1 + (how == "twice")))

    found = [side.train(model, side.tokens(), run=run) for model in models]
    return [value for values in found for value in values]


@case(each=["teacher", "two of one class", "two sizes"])
def two_models(side, how):
    first = side.shard(mlps(), "*", mp=(BF16, FP32, FP32))
    second = side.shard(mlps(2, 24 if how == "two sizes" else 16), "*", mp=(BF16, FP32, FP32))
    runs = [side.compile(model) for model in (first, second)]
    if how == "teacher":
        first.requires_grad_(False)
        run = lambda x: F.mse_loss(runs[1](x), runs[0](x).detach())  # noqa: E731
        return side.train(second, side.data(4, 16), run=run)
    found = []
    for _ in range(2):
        for model, run in zip((first, second), runs, strict=True):
            width = model[0].up.in_features
            found += side.train(model, side.data(4, width), run=run, steps=1)
    return found


@case(each=["called", "compiled"], quick=True)
def forward_methods(side, how):
    model = side.shard(Towers(), "image", "text", mp=(BF16, FP32, FP32))
    for tower in (model.image, model.text):
        side.fsdp.register_fsdp_forward_method(tower, "encode")
    if how == "compiled":
        return side.train(model, side.data(2, 12), run=side.compile(model, model.image.encode))
    return side.train(model, side.data(2, 12))


@case(Refused(RuntimeError, "root module", eager=RuntimeError), modes=["uncompiled"])
def a_forward_method_before_the_root(side):
    model = side.shard(Towers(), "image", "text")
    side.fsdp.register_fsdp_forward_method(model.image, "encode")
    with torch.no_grad():
        model.image.encode(side.data(2, 12)[0])
    return side.train(model, side.data(2, 12))


@case(each=[(), (BF16, FP32)], modes=["inductor"])
def inductor(side, mp):
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    return side.train(side.shard(model, "*", mp=mp), side.data(4, 16))


@case()
def batch_norm(side):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    return side.train(side.shard(model), side.data(6, 8), optimizer=torch.optim.SGD)


@case(Refused(RuntimeError, "double backward", RuntimeError), modes=["compiled"])
def double_backward(side):
    model = side.shard(Lambda(lambda m, x: m.b(torch.tanh(m.a(x)))), "*")
    x = side.data(4, 8)[0].requires_grad_()
    (grad,) = torch.autograd.grad(side.compile(model)(x).sum(), x, create_graph=True)
    grad.square().sum().backward()
    return side.state(model)


@case(
    compiled=Refused(TypeError, "complex", eager=TypeError),
    uncompiled=Refused(TypeError, "Float", eager=TypeError),
)
def complex_weights_with_a_real_reduction(side):
    model = side.shard(nn.Linear(8, 8, dtype=torch.complex64), mp=(None, FP32))
    side.compile(model)(side.data(4, 8, torch.complex64)[0]).abs().sum().backward()
    return side.state(model)


@case()
def duplicate_and_shared_modules(side):
    mlp = MLP()
    model = nn.Sequential(mlp, mlp, MLP())
    model[2].up = mlp.up
    return side.train(side.shard(model), side.data(4, 16))


@case(each=[True, False])
def a_group_that_runs_in_part(side, reshard):
    model = side.shard(LM(), "layers.*", "norm+head", reshard_after_forward=reshard)
    return side.train(model, [(tokens, False) for tokens in side.tokens()])


@case()
def units_that_are_made_one_by_one(side):
    model = nn.Sequential()
    for _ in range(4):
        model.append(side.fully_shard(MLP()))
        gc.collect()  # a later parameter may have the address of an earlier one
    return side.train(side.shard(model), side.data(4, 16))


@case()
def units_without_a_root(side):
    model = Lambda(lambda m, x: m.b(m.a(x)) * m.scale)
    model.scale = nn.Parameter(torch.ones(8))
    side.fully_shard(model.a)
    side.fully_shard(model.b)
    adam = functools.partial(torch.optim.Adam, foreach=False)
    return side.train(model, side.data(4, 8), optimizer=adam)


@case()
def contiguous_shards_of_columns(side):
    model = side.shard(mlps(2, 8), "*", shard_placement_fn=lambda p: Shard(p.ndim - 1))
    found = side.train(model, side.data(4, 8))
    tensors = [t for p in model.parameters() for t in (p, local(p), p.grad, local(p.grad))]
    return [*found, ("contiguous", [t.is_contiguous() for t in tensors])]


@case(each=[1, 2, 3, 5], world=4)
def shards_of_few_rows(side, rows):
    model = nn.Sequential(nn.Linear(8, rows), nn.Linear(rows, 8))
    side.shard(model, "*", mp=(BF16, FP32))

    def clip():
        return nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()

    return side.train(model, side.data(4, 8), after_backward=clip)


@case(each=["no_grad", "inference_mode", "plain module", "plain unit"])
def evaluation_between_steps(side, how):
    model, found = side.shard(mlps(3), "*"), []
    run, data = side.compile(model), side.data(4, 16)
    predict = {"plain module": model, "plain unit": model[1]}.get(how, run)
    mode = torch.inference_mode if how == "inference_mode" else torch.no_grad

    def evaluate():
        with mode():
            found.append(("prediction", predict(data[4]).clone()))

    return side.train(model, data, run=run, after_step=evaluate) + found


@case(each=["next", "of a child"])
def dtype_of_parameters_in_forward(side, whose):
    def forward(m, x):
        of = m if whose == "next" else m.a
        return m.b(m.a(x) * torch.full((8,), 0.3).to(next(of.parameters()).dtype))

    return side.train(side.shard(Lambda(forward), "b", mp=(BF16, FP32)), side.data(4, 8))


@case()
def parameters_that_forward_adds_up(side):
    model = Lambda(lambda m, x: m.b(m.a(x)) + sum(p.square().sum() for p in m.parameters(False)))
    model.scale = nn.Parameter(torch.ones(8))
    return side.train(side.shard(model, "*"), side.data(4, 8))


@case(Differs("gradient"), uncompiled=EQUAL)
def two_forwards_of_a_part_of_a_group(side):
    model = side.shard(LM(), "layers.*", "norm+head")
    run, (a, b, *_) = side.compile(model), side.tokens()
    (run(a, False).sum() + run(b, False).sum()).backward()
    return side.state(model)


@case(each=[True, False])
def two_backwards_of_one_forward(side, flags):
    model = side.shard(Lambda(lambda m, x: (m.b(m.a(x)), m.c(m.a(x))), 3), "*")
    first, second = side.compile(model)(side.data(4, 8)[0])
    model.set_is_last_backward(not flags)
    second.sum().backward(retain_graph=True)
    model.set_is_last_backward(True)
    first.sum().backward()
    return side.state(model)


@case(each=["unshard", "async_op", "reshard"])
def calls_in_forward(side, what):
    def forward(m, x):
        if what != "reshard":
            handle = m.b.unshard(async_op=what == "async_op")
        x = m.a(x)
        if what == "async_op":
            handle.wait()
        if what == "reshard":
            m.a.reshard()
        return m.b(x)

    return side.train(side.shard(Lambda(forward), "*"), side.data(4, 8))


@case(each=["compiled", "not compiled", "compiled again"])
def steps_by_turns(side, how):
    model = side.shard(mlps(3), "*")
    run, data, found = side.compile(model), side.data(4, 16), []
    other = {"compiled": lambda x: run(x), "not compiled": model}.get(how) or side.compile(model)
    for step in (run, other, run):
        found += side.train(model, data, run=step, steps=1)
    return found


class Adapted(nn.Module):
    """A frozen layer and a product of two small matrices beside it."""

    def __init__(self, base):
        super().__init__()
        self.base, self.merged = base.requires_grad_(False), False
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) if self.merged else self.base(x) + self.up(self.down(x))


@case(each=["trained", "merged", "late"])
def adapters(side, how):
    def adapt():
        for mlp in model:
            mlp.up = Adapted(mlp.up)

    model = mlps().requires_grad_(False)
    if how != "late":
        adapt()
    side.shard(model, "*")
    if how == "late":
        torch.manual_seed(1)
        adapt()
    run, data = side.compile(model), side.data(4, 16)

    def sgd(params, lr):
        return torch.optim.SGD([p for p in params if p.requires_grad], lr)

    found = side.train(model, data, run=run, optimizer=sgd)
    for mlp in model if how == "merged" else ():
        with torch.no_grad():
            mlp.up.base.weight.add_(0.5)
        mlp.up.merged = True
    return [*found, ("out", run(data[4]).detach())]


@case(compiled=Differs(""))
def a_write_in_forward(side):
    def forward(m, x):
        with torch.no_grad():
            m.a.weight.clamp_(-0.01, 0.01)
        return m.b(m.a(x))

    return side.train(side.shard(Lambda(forward), "b"), side.data(4, 8))
