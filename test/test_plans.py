"""`plans`: units found in, or named for, models of many shapes."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn as nn
import torch.nn.utils.parametrize as parametrize
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ext_bucketing.fsdp.blocks import transformer_block_plan
from torch_ext_bucketing.fsdp.manual import manual_plan
from torch_ext_bucketing.fsdp.order import FSDPParamOrder
from torch_ext_bucketing.fsdp.units import UnitSpec

DIM, VOCAB = 4, 12


@pytest.fixture(autouse=True)
def _meta():
    with torch.device("meta"):
        yield


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.mlp = Mlp()
        self.norm = nn.LayerNorm(DIM)


class OtherBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer = Attention()
        self.norm = nn.LayerNorm(DIM)


class GroupedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(4, DIM, DIM))


class RoutedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner_experts = GroupedExperts()
        self.dispatch = nn.Identity()


class MoE(nn.Module):
    def __init__(self, style):
        super().__init__()
        self.router = nn.Linear(DIM, 4)
        if style == "list":
            self.experts = nn.ModuleList([Mlp() for _ in range(8)])
        elif style == "grouped":
            self.experts = GroupedExperts()
        else:
            self.routed_experts = RoutedExperts()
        self.shared_experts = Mlp()
        self.bias = nn.Parameter(torch.zeros(4))


class MoEBlock(nn.Module):
    def __init__(self, style):
        super().__init__()
        self.attn = Attention()
        self.moe = MoE(style)
        self.norm = nn.LayerNorm(DIM)


def model_of(**children):
    """A module with the given children and parameters, in the order given."""
    model = nn.Module()
    for name, child in children.items():
        setattr(model, name, child)
    return model


def blocks(n=3, cls=Block):
    return nn.ModuleList([cls() for _ in range(n)])


def llama(container="dict", n=3, tied=False, block=Block, **extra):
    items = {str(i): block() for i in range(n)}
    layers = nn.ModuleDict(items) if container == "dict" else nn.ModuleList(items.values())
    if container == "sequential":
        layers = nn.Sequential(*items.values())
    model = model_of(
        tok_embeddings=nn.Embedding(VOCAB, DIM),
        layers=layers,
        norm=nn.LayerNorm(DIM),
        output=nn.Linear(DIM, VOCAB, bias=False),
        **extra,
    )
    if tied:
        model.output.weight = model.tok_embeddings.weight
    return model


LLAMA_UNITS = (
    ("tok_embeddings",),
    ("layers.0",),
    ("layers.1",),
    ("layers.2",),
    ("norm", "output"),
)


def units(model, **kwargs):
    return transformer_block_plan(model, **kwargs).units


class TestBlocks:
    @pytest.mark.parametrize("container", ["dict", "list", "sequential"])
    def test_decoder(self, container):
        plan = transformer_block_plan(llama(container))
        assert plan.units == LLAMA_UNITS

    def test_any_name(self):
        model = model_of(
            wte=nn.Embedding(VOCAB, DIM), hidden_stuff=blocks(2), fin=nn.LayerNorm(DIM)
        )
        assert units(model) == (("wte",), ("hidden_stuff.0",), ("hidden_stuff.1",), ("fin",))

    def test_holes_in_the_keys(self):
        """A pipeline stage: some layers, no embedding, no head."""
        model = model_of(
            layers=nn.ModuleDict({"7": Block(), "9": Block()}), tok_embeddings=None, norm=None
        )
        assert units(model) == (("layers.7",), ("layers.9",))

    def test_huggingface_like(self):
        inner = model_of(
            embed_tokens=nn.Embedding(VOCAB, DIM), layers=blocks(2), norm=nn.LayerNorm(DIM)
        )
        model = model_of(model=inner, lm_head=nn.Linear(DIM, VOCAB))
        assert units(model) == (
            ("model.embed_tokens",),
            ("model.layers.0",),
            ("model.layers.1",),
            ("model.norm", "lm_head"),
        )

    def test_gpt_in_a_module_dict(self):
        inner = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, DIM),
                "wpe": nn.Embedding(8, DIM),
                "h": blocks(2),
                "ln_f": nn.LayerNorm(DIM),
            }
        )
        model = model_of(transformer=inner, lm_head=nn.Linear(DIM, VOCAB))
        assert units(model) == (
            ("transformer.wte",),
            ("transformer.wpe",),
            ("transformer.h.0",),
            ("transformer.h.1",),
            ("transformer.ln_f", "lm_head"),
        )

    @pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential])
    def test_dict_of_named_parts_is_no_block_list(self, kind):
        """Most children are alike, but the blocks are elsewhere."""
        parts = {
            "wte": nn.Embedding(VOCAB, DIM),
            "wpe": nn.Embedding(8, DIM),
            "h": kind(*blocks(2)) if kind is nn.Sequential else blocks(2),
        }
        assert units(model_of(transformer=nn.ModuleDict(parts))) == (
            ("transformer.wte",),
            ("transformer.wpe",),
            ("transformer.h.0",),
            ("transformer.h.1",),
        )

    def test_list_of_lists(self):
        model = model_of(stages=nn.ModuleList([blocks(2), blocks(2)]))
        assert [unit for (unit,) in units(model)] == [
            f"stages.{i}.{j}" for i in (0, 1) for j in (0, 1)
        ]

    def test_tied_embeddings_are_one_unit(self):
        plan = transformer_block_plan(llama(tied=True))
        assert plan.units == (
            ("tok_embeddings", "norm", "output"),
            ("layers.0",),
            ("layers.1",),
            ("layers.2",),
        )

    def test_head_and_norm_registered_before_the_blocks(self):
        model = model_of(
            tok=nn.Embedding(VOCAB, DIM),
            head=nn.Linear(DIM, VOCAB),
            norm=nn.LayerNorm(DIM),
            layers=blocks(2),
        )
        assert units(model) == (("tok",), ("layers.0",), ("layers.1",), ("norm", "head"))

    def test_input_projections_stay_in_front(self):
        """Flux: several projections, two block lists, a final layer."""
        model = model_of(
            img_in=nn.Linear(3, DIM),
            txt_in=nn.Linear(5, DIM),
            double_blocks=blocks(2),
            single_blocks=blocks(2, OtherBlock),
            final_layer=nn.Linear(DIM, 3),
        )
        assert units(model) == (
            ("img_in",),
            ("txt_in",),
            ("double_blocks.0",),
            ("double_blocks.1",),
            ("single_blocks.0",),
            ("single_blocks.1",),
            ("final_layer",),
        )

    def test_vit_root_parameters(self):
        model = model_of(
            cls_token=nn.Parameter(torch.zeros(1, 1, DIM)),
            patch_embed=nn.Conv2d(3, DIM, 2),
            blocks=nn.Sequential(Block(), Block()),
            norm=nn.LayerNorm(DIM),
            head=nn.Linear(DIM, 10),
        )
        plan = transformer_block_plan(model)
        assert plan.units == (
            ("patch_embed",),
            ("blocks.0",),
            ("blocks.1",),
            ("norm", "head"),
            ("",),
        )
        assert FSDPParamOrder.from_model(model, units=plan).units[-1] == ("cls_token",)
        assert plan.uncovered(model) == ()

    def test_encoder_and_decoder(self):
        model = model_of(
            shared=nn.Embedding(VOCAB, DIM),
            encoder=model_of(block=blocks(2), final_norm=nn.LayerNorm(DIM)),
            decoder=model_of(
                embed=nn.Embedding(VOCAB, DIM), block=blocks(2), final_norm=nn.LayerNorm(DIM)
            ),
            lm_head=nn.Linear(DIM, VOCAB),
        )
        assert units(model) == (
            ("shared",),
            ("encoder.block.0",),
            ("encoder.block.1",),
            ("encoder.final_norm",),
            ("decoder.embed",),
            ("decoder.block.0",),
            ("decoder.block.1",),
            ("decoder.final_norm", "lm_head"),
        )
        model.decoder.embed = model.shared
        model.lm_head.weight = model.shared.weight
        assert units(model)[0] == ("shared", "decoder.final_norm", "lm_head")

    @pytest.mark.parametrize("n", [1, 2, 3])
    @pytest.mark.parametrize("style", ["list", "grouped", "routed"])
    def test_experts_are_not_blocks(self, style, n):
        model = llama(n=n, block=lambda: MoEBlock(style))
        assert [u for u in units(model) if "layers" in u[0]] == [(f"layers.{i}",) for i in range(n)]

    def test_stages_hold_the_blocks(self):
        """Swin: a list of stages, each with its list of blocks and a reduction."""
        stages = nn.ModuleList(
            [model_of(blocks=blocks(2), reduction=nn.Linear(DIM, DIM)) for _ in range(2)]
        )
        model = model_of(patch_embed=nn.Conv2d(3, DIM, 2), layers=stages, head=nn.Linear(DIM, 10))
        assert units(model) == (
            ("patch_embed",),
            ("layers.0.blocks.0",),
            ("layers.0.blocks.1",),
            ("layers.0.reduction",),
            ("layers.1.blocks.0",),
            ("layers.1.blocks.1",),
            ("layers.1.reduction", "head"),
        )

    def test_pair_of_attentions_is_no_block_list(self):
        class TwoAttentions(nn.Module):
            def __init__(self):
                super().__init__()
                self.attns = nn.ModuleList([OtherBlock(), OtherBlock()])
                self.mlp = Mlp()

        model = model_of(layers=blocks(2, TwoAttentions))
        assert units(model) == (("layers.0",), ("layers.1",))

    def test_hybrid_blocks(self):
        layers = nn.ModuleList([Block(), OtherBlock(), OtherBlock(), OtherBlock(), Block()])
        assert units(model_of(layers=layers)) == tuple((f"layers.{i}",) for i in range(5))

    def test_multi_token_prediction(self):
        model = llama(mtp=nn.ModuleList([Block()]))
        assert units(model)[-2:] == (("norm", "output"), ("mtp.0",))

    def test_lists_of_leaves_do_not_count_beside_blocks(self):
        codebooks = nn.ModuleList([nn.Embedding(VOCAB, DIM) for _ in range(3)])
        heads = nn.ModuleList([nn.Linear(DIM, VOCAB) for _ in range(2)])
        model = model_of(codebooks=codebooks, layers=blocks(2), norm=nn.LayerNorm(DIM), heads=heads)
        assert units(model) == (
            ("codebooks.0",),
            ("codebooks.1",),
            ("codebooks.2",),
            ("layers.0",),
            ("layers.1",),
            ("norm", "heads.0", "heads.1"),
        )

    def test_single_layer(self):
        assert units(llama(n=1)) == (("tok_embeddings",), ("layers.0",), ("norm", "output"))

    def test_root_is_the_list(self):
        assert units(nn.Sequential(Block(), Block())) == (("0",), ("1",))

    def test_sequential_of_different_modules_is_no_list(self):
        for model in (
            nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2), nn.LayerNorm(2)),
            nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
            nn.Sequential(Block(), nn.Linear(2, 2)),
            nn.Linear(2, 2),
        ):
            with pytest.raises(
                ValueError, match=r"no repeated blocks found in (Sequential|Linear).*manual_plan"
            ):
                transformer_block_plan(model)

    def test_list_of_sequentials(self):
        alike = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)])
        assert units(model_of(net=alike)) == (("net.0",), ("net.1",))
        unlike = nn.ModuleList(
            [nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.ReLU(), nn.Linear(2, 2, bias=False))]
        )
        with pytest.raises(ValueError, match="no repeated blocks"):
            transformer_block_plan(model_of(net=unlike))

    def test_shared_block_is_one_unit(self):
        block = Block()
        assert units(model_of(layers=nn.ModuleList([block, Block(), block]))) == (
            ("layers.0",),
            ("layers.1",),
        )

    def test_wrapped_blocks(self):
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        model = llama()
        model.layers["0"] = checkpoint_wrapper(model.layers["0"])
        model.layers["1"] = torch.compile(checkpoint_wrapper(model.layers["1"]))
        assert units(model) == LLAMA_UNITS
        assert units(torch.compile(model)) == LLAMA_UNITS

    def test_parametrized(self):
        model = llama()
        model.scale = nn.Parameter(torch.zeros(DIM))
        for layer in model.layers.values():
            layer.gate = nn.Parameter(torch.zeros(DIM))
        for module in list(model.modules()):
            for name, _ in list(module.named_parameters(recurse=False)):
                parametrize.register_parametrization(module, name, nn.Identity(), unsafe=True)
        assert units(model) == (*LLAMA_UNITS, ("",))

    def test_no_parameters(self):
        with pytest.raises(ValueError, match="ReLU has no parameters"):
            transformer_block_plan(nn.ReLU())

    @settings(max_examples=60, deadline=None)
    @given(
        n=st.integers(2, 6),
        container=st.sampled_from(["dict", "list", "sequential"]),
        tied=st.booleans(),
        depth=st.integers(0, 3),
    )
    def test_covers_everything_once(self, n, container, tied, depth):
        with torch.device("meta"):
            model = llama(container, n=n, tied=tied)
            for level in range(depth):
                model = model_of(
                    **{f"inner{level}": model, f"own{level}": nn.Parameter(torch.zeros(2))}
                )
        plan = transformer_block_plan(model)
        assert plan.uncovered(model) == ()
        order = FSDPParamOrder.from_model(model, units=plan)
        packed = [fqn for unit in order.units for fqn in unit]
        assert sorted(packed) == sorted(name for name, _ in model.named_parameters())
        assert sum(".layers." in f".{unit[0]}." for unit in plan) == n


class TestExperts:
    @pytest.mark.parametrize(
        ("style", "experts"),
        [
            ("list", "moe.experts"),
            ("grouped", "moe.experts"),
            ("routed", "moe.routed_experts.inner_experts"),
        ],
    )
    def test_split(self, style, experts):
        model = llama(n=2, block=lambda: MoEBlock(style))
        plan = transformer_block_plan(model, moe_experts=True)
        assert plan.units[1:5] == (
            (f"layers.0.{experts}",),
            ("layers.0",),
            (f"layers.1.{experts}",),
            ("layers.1",),
        )
        order = FSDPParamOrder.from_model(model, units=plan)
        assert all(fqn.startswith(f"layers.0.{experts}.") for fqn in order.units[1])
        assert not any(".experts." in fqn or "inner_experts" in fqn for fqn in order.units[2])
        assert transformer_block_plan(model, moe_experts=experts.split(".")[1]).units == plan.units

    def test_dense_layers_first(self):
        model = model_of(
            layers=nn.ModuleList(
                [Block(), Block(), Block(), MoEBlock("grouped"), MoEBlock("grouped")]
            )
        )
        assert units(model, moe_experts=True)[2:5] == (
            ("layers.2",),
            ("layers.3.moe.experts",),
            ("layers.3",),
        )

    def test_no_experts(self):
        with pytest.raises(
            ValueError,
            match=r'no block holds a module named "experts"; the first block is \'layers.0\'',
        ):
            transformer_block_plan(llama(), moe_experts=True)
        with pytest.raises(ValueError, match="named 'ffn_experts'"):
            transformer_block_plan(llama(), moe_experts="ffn_experts")


class TestManual:
    def test_the_documented_example(self):
        model = llama(n=6)
        plan = manual_plan(["tok_embeddings", "layers.[0-5]", "norm+output"], model)
        assert plan.units == (
            ("tok_embeddings",),
            *((f"layers.{i}",) for i in range(6)),
            ("norm", "output"),
        )

    @pytest.mark.parametrize(
        ("entry", "expected"),
        [
            ("layers.*", [("layers.0",), ("layers.1",), ("layers.2",)]),
            ("layers.[1-1]", [("layers.1",)]),
            ("layers.*.attn", [("layers.0.attn",), ("layers.1.attn",), ("layers.2.attn",)]),
            ("layers.[0-1].*.*t", [("layers.0.attn.out",), ("layers.1.attn.out",)]),
            ("layers.[0-1]+layers.2", [("layers.0", "layers.1", "layers.2")]),
            ("output + norm", [("output", "norm")]),
            (["output", "norm"], [("output", "norm")]),
            (["layers.[0-1]", "norm+output"], [("layers.0", "layers.1", "norm", "output")]),
            ("layers.0._orig_mod.attn", [("layers.0.attn",)]),
            ("", [("",)]),
            ("no*", [("norm",)]),
        ],
    )
    def test_grammar(self, entry, expected):
        assert manual_plan([entry], llama()).units == tuple(expected)

    def test_range_inside_a_component(self):
        model = model_of(**{f"encoder_layer_{i}x": Block() for i in range(12)})
        assert manual_plan(["encoder_layer_[9-11]x"], model).units == tuple(
            (f"encoder_layer_{i}x",) for i in (9, 10, 11)
        )

    def test_nested_units(self):
        model = llama()
        plan = manual_plan(["layers.0.attn", "layers.0", ""], model)
        assert plan.units == (("layers.0.attn",), ("layers.0",), ("",))

    def test_uncovered(self):
        plan = manual_plan(["layers.*", "tok_embeddings"], llama())
        assert plan.uncovered(llama()) == ("norm.weight", "norm.bias", "output.weight")

    @pytest.mark.parametrize(
        ("entries", "error", "message"),
        [
            ([], ValueError, "there are no units"),
            (["layers.0", []], ValueError, "unit 1 is empty"),
            ("layers.0", TypeError, "must be a list of names"),
            ([3], TypeError, "must be a string or a list"),
            ([["norm", 3]], TypeError, "must be a string or a list"),
            (
                ["tok_embedding"],
                ValueError,
                r"'tok_embedding' matches nothing.*did you mean 'tok_embeddings'",
            ),
            (
                ["layers.[0-5]"],
                ValueError,
                r"'layers.\[0-5\]' matches nothing, there is no module 'layers.3'.*'layers.[012]'",
            ),
            (["attn"], ValueError, r"did you mean 'layers.0.attn'"),
            (
                ["layers.[2-0]"],
                ValueError,
                r"\[2-0\] in 'layers.\[2-0\]' is reversed: write \[0-2\]",
            ),
            (["layers.[0:2]"], ValueError, "malformed range"),
            (["layers.[a-b]"], ValueError, "malformed range"),
            (["layers.0]"], ValueError, "malformed range"),
            (["layers.x*"], ValueError, r"'layers.x\*' matches no module with parameters"),
            (["layers..0"], ValueError, "empty component"),
            (["norm+"], ValueError, r"'norm\+' joins modules, but one of their names is empty"),
            (
                ["layers.0", "layers.[0-1]"],
                ValueError,
                "units: module 'layers.0' is listed twice, before in unit 'layers.0'",
            ),
            (
                ["norm+output", "norm"],
                ValueError,
                r"module 'norm' is listed twice, before in unit 'norm\+output'",
            ),
            (["norm+norm"], ValueError, "'norm' is listed twice in one unit"),
            (
                ["layers.0", "layers.0.attn"],
                ValueError,
                "'layers.0.attn' lies inside 'layers.0', which comes earlier.*: list inner",
            ),
            (["layers.1.act"], ValueError, "'layers.1.act' has no parameters"),
        ],
    )
    def test_errors(self, entries, error, message):
        model = llama()
        model.layers["1"].act = nn.ReLU()
        with pytest.raises(error, match=message):
            manual_plan(entries, model)


class TestPlan:
    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"units": ()}, "there are no units"),
            ({"units": ((),)}, "unit 0 is empty"),
            ({"units": (("a",), ("b", "a"))}, "'a' is in two units, 0 and 1"),
        ],
    )
    def test_constructor_errors(self, kwargs, message):
        with pytest.raises(ValueError, match=message):
            UnitSpec(**kwargs)

    def test_value(self):
        plan = transformer_block_plan(llama())
        again = pickle.loads(pickle.dumps(plan))
        assert again == plan
        assert hash(again) == hash(plan)
        assert tuple(plan) == plan.units
        with pytest.raises(AttributeError):
            plan.units = ()

    def test_is_what_from_model_takes(self):
        model = llama()
        plan = transformer_block_plan(model)
        assert FSDPParamOrder.from_model(model, units=plan) == FSDPParamOrder.from_model(
            model, units=list(plan)
        )
        with pytest.raises(ValueError, match="there are no units"):
            FSDPParamOrder.from_model(model, units=[])
