"""``FSDPParamOrder`` equals real FSDP2's param groups, and sorts collectives."""

import copy
import pickle

import pytest
import torch
import torch.fx as fx
import torch.nn as nn
from collective_graphs import fake_group
from examples import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from unit_models import (
    MoEBlock,
    blocks,
    embedding,
    head,
    llama,
    model_of,
    parametrized,
    vit,
    wrapped,
)

from torch_ext_bucketing._torch import fsdp2 as _fsdp2
from torch_ext_bucketing.errors import PayloadOrderWarning
from torch_ext_bucketing.fqns import canonical_fqn, canonical_modules, parameter_names
from torch_ext_bucketing.fsdp.units import FSDPParamOrder
from torch_ext_bucketing.graph.nodes import Tag, set_tag
from torch_ext_bucketing.passes.tagging import TagParameters

pytestmark = pytest.mark.torch

WORLD = 4


@pytest.fixture(scope="module", autouse=True)
def mesh():
    with fake_group(WORLD):
        yield init_device_mesh("cpu", (WORLD,))


def param_groups(state):
    """Return the param groups of one ``fully_shard``; torch 2.11 has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [g for g in (state._fsdp_param_group,) if g is not None]


def wrap(model, units, mesh, **kwargs):
    """Call fully_shard per unit; return FSDP2's payloads, named without our code."""
    modules = dict(model.named_modules())
    states = []
    for unit in units:
        args = modules[unit] if isinstance(unit, str) else [modules[name] for name in unit]
        fully_shard(args, mesh=mesh, **kwargs)
        first = (
            args
            if isinstance(args, nn.Module)
            else next(m for m in args if hasattr(m, "_get_fsdp_state"))
        )
        states.append(fully_shard.state(first))
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [group for state in states for group in param_groups(state)]
    return tuple(tuple(names[p.sharded_param] for p in group.fsdp_params) for group in groups)


def check(make_model, units, mesh, **kwargs):
    """Check that from_model and from_fsdp equal FSDP2's groups, before and after lazy init."""
    ours = FSDPParamOrder.from_model(make_model(), units=units)
    model = make_model()
    real = wrap(model, units, mesh, **kwargs)
    assert ours.units == real
    assert FSDPParamOrder.from_fsdp(model) == ours
    if "" in units:
        fully_shard.state(model)._lazy_init()
        all_states = fully_shard.state(model)._state_ctx.all_states
        groups = [group for state in all_states for group in param_groups(state)]
        by_fsdp = {tuple(p._param_fqn for p in g.fsdp_params) for g in groups}
        assert by_fsdp == set(ours.units)
        assert FSDPParamOrder.from_fsdp(model) == ours
    return ours


def decoder(**options):
    return llama(n=2, **options)


def moe_model():
    return model_of(tok=embedding(), layers=blocks(2, MoEBlock), out=head())


def with_a_shared_mlp():
    model = decoder()
    model.layers["1"].mlp = model.layers["0"].mlp
    return model


def with_frozen_attention():
    model = decoder()
    model.layers["0"].attn.requires_grad_(False)
    return model


DECODER_UNITS = ["tok_embeddings", "layers.0", "layers.1", ["norm", "output"], ""]


MLP = [f"mlp.{i}.{n}" for i in ("up", "down") for n in ("weight", "bias")]
NORM = ("norm.weight", "norm.bias")
VIT_UNITS = ["patch_embed", "blocks.0", "blocks.1", ["norm", "head"], ""]
MOE_UNITS = ["layers.0.moe.experts", "layers.0", "layers.1.moe.experts", "layers.1", ""]
# Model, units, and FSDP2's order of some units that need an explanation.
CASES = {
    # A block's own parameters come after its children's, although registered first.
    "nested units and a list": (
        decoder,
        ["layers.0.attn", *DECODER_UNITS],
        {
            2: [f"layers.0.{n}" for n in (*MLP, *NORM, "layer_scale", "gate")],
            -1: [*NORM, "output.weight"],  # no root payload
        },
    ),
    "a root with parameters": (vit, VIT_UNITS, {-1: ["cls_token", "pos_embed"]}),
    # Packed where the head is visited, under FSDP2's name for it.
    "tied in one unit": (
        lambda: decoder(tied=True),
        [["norm", "output", "tok_embeddings"], "layers.0", "layers.1", ""],
        {0: [*NORM, "tok_embeddings.weight"]},
    ),
    "a shared module": (with_a_shared_mlp, [["layers.0", "layers.1"], ""], {}),
    "frozen parameters": (with_frozen_attention, DECODER_UNITS, {}),
    "experts as units": (moe_model, MOE_UNITS, {}),
}


class TestAgainstFSDP2:
    @pytest.mark.parametrize("case", CASES)
    def test_units(self, mesh, case):
        make, units, packed = CASES[case]
        ours = check(make, units, mesh)
        for unit, fqns in packed.items():
            assert ours.units[unit] == tuple(fqns)
        assert ours.reduce_units == ()
        aliases = {
            "tied in one unit": ("output.weight", "tok_embeddings.weight"),
            "a shared module": ("layers.1.mlp.up.bias", "layers.0.mlp.up.bias"),
        }
        assert (case in aliases) == bool(ours.aliases)
        assert not ours.aliases or aliases[case] in ours.aliases
        if case == "frozen parameters":
            assert "layers.0.attn.scale" in ours.units[1]

    def test_tied_across_units(self, mesh):
        ours = FSDPParamOrder.from_model(decoder(tied=True), units=DECODER_UNITS)
        assert ours.units[0] == ("tok_embeddings.weight",)
        assert ours.units[-1] == NORM
        model = decoder(tied=True)
        real = wrap(model, DECODER_UNITS, mesh)
        if not hasattr(fully_shard.state(model), "_fsdp_param_groups"):
            # torch 2.11 silently makes two parameters of it.
            assert FSDPParamOrder.from_fsdp(model).units == real
            assert real[-1] == (*NORM, "output.weight")
            return
        match = r"'tok_embeddings.weight' and 'output.weight' are one shared"
        with pytest.raises(ValueError, match=match):
            FSDPParamOrder.from_fsdp(model)

    def test_experts_on_another_mesh(self):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "efsdp"))
        common = pytest.importorskip(
            "torch.distributed.fsdp._fully_shard._fsdp_common", reason="no FSDP2 internals"
        )
        if not hasattr(common, "ShardPlacementResult"):
            pytest.skip(f"torch {torch.__version__} can't shard parameters over several meshes")
        dp_info = common.FSDPMeshInfo(init_device_mesh("cpu", (WORLD,)), shard_mesh_dim=0)
        ep_info = common.FSDPMeshInfo(mesh["efsdp"], shard_mesh_dim=0)
        model = moe_model()
        for block in model.layers:
            experts = set(block.moe.experts.parameters())

            def place(param, experts=experts):
                return common.ShardPlacementResult(
                    Shard(0), ep_info if param in experts else dp_info
                )

            fully_shard(block, mesh=dp_info.mesh, shard_placement_fn=place)
        fully_shard(model, mesh=dp_info.mesh)
        ours = FSDPParamOrder.from_fsdp(model)
        moe = [
            "moe.router.weight",
            "moe.router.bias",
            *(f"moe.shared_experts.{i}.{n}" for i in ("up", "down") for n in ("weight", "bias")),
        ]
        attention = [f"attn.{n}" for n in ("qkv.weight", "out.weight", "scale")]
        block = [*attention, *moe, "moe.bias", "norm.weight", "norm.bias"]
        assert ours.units[:2] == (
            tuple(f"layers.0.{n}" for n in block),
            ("layers.0.moe.experts.w1", "layers.0.moe.experts.w2"),
        )
        assert len(ours.units) == 5

    def test_unsharded_state(self, mesh):
        model = decoder()
        wrap(model, DECODER_UNITS, mesh)
        before = FSDPParamOrder.from_fsdp(model)
        fully_shard.state(model)._lazy_init()
        model.layers["0"].unshard()
        assert not isinstance(model.layers["0"].gate, DTensor)
        assert FSDPParamOrder.from_fsdp(model) == before

    @pytest.mark.skipif(
        not _fsdp2.REDUCES_BY_GRAD_DTYPE, reason="this torch packs gradients in gather order"
    )
    def test_reduce_scatter_order_by_grad_dtype(self, mesh):
        def make():
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16)
            model[0].bias.grad_dtype = torch.float32
            return model

        ours = check(make, [""], mesh)
        assert ours.units == (("0.weight", "0.bias", "1.weight", "1.bias"),)
        assert ours.reduce_units == (("0.weight", "1.weight", "1.bias", "0.bias"),)
        model = make()
        fully_shard(model, mesh=mesh)
        fully_shard.state(model)._lazy_init()
        (group,) = param_groups(fully_shard.state(model))
        assert ours.reduce_units[0] == tuple(
            group.fsdp_params[i]._param_fqn for i in group._reduce_scatter_param_indices
        )


class Node(nn.Module):
    """A module tree's node from a list of ("p", index in pool) and ("m", spec)."""

    def __init__(self, spec, pool):
        super().__init__()
        for position, (kind, value) in enumerate(spec):
            if kind == "p":
                self.register_parameter(
                    f"p{position}", pool[value] if value < len(pool) else new_parameter()
                )
            elif kind == "m":
                self.add_module(f"m{position}", Node(value, pool))
            else:
                self.add_module(f"l{position}", nn.Linear(2, 2))


def new_parameter():
    return nn.Parameter(torch.zeros(2))


def specs(depth):
    leaf = st.one_of(
        st.tuples(st.just("p"), st.sampled_from([0, 1, 9, 9, 9, 9, 9])),
        st.tuples(st.just("l"), st.none()),
    )
    if depth == 0:
        return st.lists(leaf, min_size=1, max_size=3)
    return st.lists(
        st.one_of(leaf, st.tuples(st.just("m"), specs(depth - 1))), min_size=1, max_size=4
    )


@examples(250)
@given(spec=specs(3), data=st.data())
def test_random_trees_like_fsdp2(mesh, spec, data):
    plain = Node(spec, [new_parameter(), new_parameter()])
    if data.draw(st.booleans(), label="module shared"):
        nodes = [m for m in plain.modules() if isinstance(m, Node)]
        leaf = nn.Linear(2, 2)
        for node in data.draw(st.lists(st.sampled_from(nodes), min_size=2, max_size=2), label="by"):
            node.add_module("shared", leaf)
    paths = [name for name, _ in plain.named_modules()]
    post_order = sorted(paths, key=lambda n: (-len(n.split(".")) if n else 0, paths.index(n)))
    chosen = [name for name in post_order if name and data.draw(st.integers(0, 2), label=name) == 0]
    units, index = [], 0
    while index < len(chosen):
        size = data.draw(st.sampled_from([1, 1, 2, 3]), label="size")
        names = data.draw(st.permutations(chosen[index : index + size]), label="unit")
        units.append(names[0] if len(names) == 1 else names)
        index += size
    with_root = data.draw(st.booleans(), label="root") or not units
    if with_root:
        units.append("")

    model = copy.deepcopy(plain)
    try:
        ours = FSDPParamOrder.from_model(plain, units=units)
    except ValueError:
        ours = None
    try:
        real = wrap(model, units, mesh)
    except Exception:
        # FSDP2 refuses to wrap a shared module in two units, so it has no order to compare with.
        assume(False)
    if ours is None:
        assert real == ()  # FSDP2 accepts units without parameters, which have no order
        return
    canonical = {name: fqns[0] for fqns in parameter_names(plain).values() for name in fqns}
    seen, expected = set(), []
    for unit in real:
        # FSDP2 refuses a parameter of two units at the first forward; here the first unit has it.
        names = [canonical[name] for name in unit if canonical[name] not in seen]
        seen.update(names)
        if names:
            expected.append(tuple(names))
    assert ours.units == tuple(expected)
    if len(seen) == sum(map(len, real)):
        from_fsdp = FSDPParamOrder.from_fsdp(model)
        if with_root:
            assert from_fsdp == ours
        assert from_fsdp.units == real


class TestWrappedModels:
    def test_parametrize(self):
        plain = FSDPParamOrder.from_model(decoder(), units=DECODER_UNITS)
        assert FSDPParamOrder.from_model(parametrized(decoder()), units=DECODER_UNITS) == plain

    def test_class_property_and_meta_device(self):
        """Parameters are not read."""
        with torch.device("meta"):
            model = decoder()
        for module in list(model.modules()):
            properties = {
                n: property(lambda self: pytest.fail("parameter was read"))
                for n in module._parameters
            }
            if properties:
                name = f"Simple{type(module).__name__}"
                module.__class__ = type(name, (type(module),), properties)
        plain = FSDPParamOrder.from_model(decoder(), units=DECODER_UNITS)
        assert FSDPParamOrder.from_model(model, units=DECODER_UNITS) == plain

    def test_checkpoint_and_compile_wrappers(self, mesh):
        plain = FSDPParamOrder.from_model(decoder(), units=DECODER_UNITS)
        model = wrapped(decoder())
        assert FSDPParamOrder.from_model(model, units=DECODER_UNITS) == plain
        raw = [
            unit if unit != "layers.0" else "layers.0._checkpoint_wrapped_module"
            for unit in DECODER_UNITS
        ]
        assert FSDPParamOrder.from_model(model, units=raw) == plain
        wrap(model, DECODER_UNITS, mesh)
        assert FSDPParamOrder.from_fsdp(model) == plain

    @pytest.mark.parametrize(
        ("raw", "canonical"),
        [
            ("a.weight", "a.weight"),
            ("_orig_mod.a._checkpoint_wrapped_module.weight", "a.weight"),
            ("_orig_mod", ""),
            ("a._fsdp_wrapped_module.b", "a.b"),
            ("a.parametrizations.weight.original", "a.weight"),
            ("parametrizations.cls_token.original", "cls_token"),
            ("a.parametrizations.weight.original0", "a.parametrizations.weight.original0"),
            ("a.parametrizations.weight.0", "a.parametrizations.weight.0"),
            ("original", "original"),
        ],
    )
    def test_canonical_fqn(self, raw, canonical):
        assert canonical_fqn(raw) == canonical
        assert canonical_fqn(canonical) == canonical

    def test_wrapper_name_stands_for_the_outermost(self):
        model = nn.Sequential(torch.compile(nn.Linear(2, 2)))
        assert canonical_modules(model)["0"] is model[0]


def of_units(units):
    return lambda: FSDPParamOrder.from_model(decoder(), units=units)


def of_fqns(fqns, **options):
    return lambda: FSDPParamOrder.from_fqns(fqns, **options)


def the_same_module_twice():
    model = decoder()
    model.again = model.norm
    return FSDPParamOrder.from_model(model, units=["norm", "again"])


def sharded_without_a_parameter():
    model = fully_shard(nn.Sequential(nn.ReLU()), mesh=init_device_mesh("cpu", (WORLD,)))
    return FSDPParamOrder.from_fsdp(model)


def a_unit_that_reaches_outside():
    model = decoder()
    fully_shard([model.norm, model.output], mesh=init_device_mesh("cpu", (WORLD,)))
    return FSDPParamOrder.from_fsdp(model.norm)


# ``test_plans`` has what is wrong with units of modules.
BAD = {
    TypeError: [
        ("got the string", of_units("layers.0")),
        ("must be a string, got 1", of_units([["layers.0", 1]])),
        ("mixes", of_fqns(["a", ["b"]])),
        ("got the string", of_fqns("ab")),
        ("must be a string", of_fqns([[1]])),
    ],
    ValueError: [
        (r"named 'tok_embedings'; did you mean 'tok_embeddings'", of_units(["tok_embedings"])),
        ("'norm' lies inside ''", of_units(["", "norm"])),
        ("the units hold no parameter of Module", of_units(["layers.0.mlp.act"])),
        ("'again' is listed twice, before in unit 'norm'", the_same_module_twice),
        ("Module has no FSDP2 module", lambda: FSDPParamOrder.from_fsdp(decoder())),
        ("hold no parameter", sharded_without_a_parameter),
        ("not in it", a_unit_that_reaches_outside),
        ("at least one parameter", of_fqns([])),
        ("payload 1 has no parameter", of_fqns([["a"], []])),
        ("'a' is in two units, 0 and 1", of_fqns([["a", "b"], ["c", "a"]])),
        ("'a' is listed twice", of_fqns(["a", "_orig_mod.a"])),
        ("'y' stands for 'z', which is in no payload", of_fqns(["a"], aliases={"y": "z"})),
        ("'b' can't be another name of 'a'", of_fqns(["a", "b"], aliases={"b": "a"})),
        ("reduce_units", lambda: FSDPParamOrder((("a", "b"),), reduce_units=(("a",),))),
    ],
}


@pytest.mark.parametrize(
    ("error", "match", "call"), [(e, *row) for e, rows in BAD.items() for row in rows]
)
def test_errors(error, match, call):
    with pytest.raises(error, match=match):
        call()


TARGETS = {
    "all_gather": torch.ops._c10d_functional.all_gather_into_tensor.default,
    "reduce_scatter": torch.ops._c10d_functional.reduce_scatter_tensor.default,
    "all_reduce": torch.ops._c10d_functional.all_reduce.default,
}


def tagged(*fqns, kind="all_gather"):
    """Make a collective that serves these parameters."""
    graph = fx.Graph()
    node = graph.create_node("call_function", TARGETS[kind], (), name=f"of_{len(fqns)}")
    if fqns:
        set_tag(node, Tag(kind, fqns))
    return node


class TestHook:
    def test_key_is_payload_and_position(self):
        order = FSDPParamOrder.from_fqns([["a", "b"], ["c", "d"]], aliases={"tied": "c"})
        nodes = [tagged(fqn) for fqn in ["d", "tied", "b", "_orig_mod.a"]]
        assert [order(n) for n in nodes] == [(1, 1), (1, 0), (0, 1), (0, 0)]
        assert order(tagged("d", "b")) == (0, 1)  # fused weights sort by the first packed

    def test_unknown_is_none(self):
        order = FSDPParamOrder.from_fqns(["layers.0.wq", "layers.0.wk"])
        served = [("layers.0.wv",), ("layers.0.wq", "x", "y"), ()]
        assert [order(tagged(*fqns)) for fqns in served] == [None] * 3
        assert order.unknown(["layers.0.wk", "y"]) == ("y",)
        match = "no layers.0.wv, so .* did you mean 'layers.0.w"
        with pytest.warns(PayloadOrderWarning, match=match):
            TagParameters(order=order)(tagged("layers.0.wv").graph)

    def test_reductions_have_their_own_order(self):
        order = FSDPParamOrder(units=(("a", "b"),), reduce_units=(("b", "a"),))
        assert [order(tagged("a", kind=k)) for k in TARGETS] == [(0, 0), (0, 1), (0, 1)]


class TestIdentity:
    def test_hash_pickle_frozen(self):
        order = FSDPParamOrder.from_fqns([["a", "b"], ["c"]], aliases={"x": "a"})
        before = pickle.dumps(order)
        order(tagged("a"))
        assert pickle.dumps(order) == before  # using it changes no cache key
        again = pickle.loads(before)
        assert again == order
        assert hash(again) == hash(order)
        assert again.uuid() == order.uuid()
        with pytest.raises(AttributeError):
            order.units = ()

    def test_uuid_differs_with_contents(self):
        orders = [
            FSDPParamOrder.from_fqns([["a", "b"], ["c"]]),
            FSDPParamOrder.from_fqns([["a"], ["b", "c"]]),
            FSDPParamOrder.from_fqns([["b", "a"], ["c"]]),
            FSDPParamOrder.from_fqns([["a", "b"], ["c"]], aliases={"x": "c"}),
            FSDPParamOrder(units=(("a", "b"), ("c",)), reduce_units=(("b", "a"), ("c",))),
        ]
        assert len({order.uuid() for order in orders}) == len(orders)
