"""Test units found in, or named for, models of many shapes."""

import pickle

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from unit_models import (
    Block,
    MoEBlock,
    OtherBlock,
    TwoAttentions,
    blocks,
    embedding,
    encoder_decoder,
    flux,
    gpt,
    head,
    leaves_beside_blocks,
    llama,
    model_of,
    norm,
    parametrized,
    shared_block,
    swin,
    vit,
    wrapped,
)

from torch_ext_bucketing.fsdp.plans import manual_plan, transformer_block_plan
from torch_ext_bucketing.fsdp.units import FSDPParamOrder, Units


@pytest.fixture(autouse=True)
def _meta():
    with torch.device("meta"):
        yield


LLAMA = "tok_embeddings layers.0 layers.1 layers.2 norm+output"


def units(model, **kwargs):
    """Join the names of each unit with "+"."""
    return " ".join(map("+".join, transformer_block_plan(model, **kwargs).units))


HYBRID = (Block, OtherBlock, OtherBlock, OtherBlock, Block)
TRANSFORMER_H = "transformer.wte transformer.wpe transformer.h.0 transformer.h.1"
CASES = {
    "a dict": (llama, LLAMA),
    "a list": (lambda: llama("list"), LLAMA),
    "a sequential": (lambda: llama("sequential"), LLAMA),
    "wrapped blocks": (lambda: wrapped(llama()), LLAMA),
    "a wrapped model": (lambda: torch.compile(wrapped(llama())), LLAMA),
    "parametrized": (lambda: parametrized(llama(scale=nn.Parameter(torch.zeros(4)))), f"{LLAMA} "),
    "a single layer": (lambda: llama(n=1), "tok_embeddings layers.0 norm+output"),
    "any name": (
        lambda: model_of(wte=embedding(), hidden_stuff=blocks(2), fin=norm()),
        "wte hidden_stuff.0 hidden_stuff.1 fin",
    ),
    "a stage of a pipeline, with holes in the keys": (
        lambda: model_of(
            layers=nn.ModuleDict({"7": Block(), "9": Block()}), tok_embeddings=None, norm=None
        ),
        "layers.7 layers.9",
    ),
    "huggingface": (
        lambda: model_of(
            model=model_of(embed_tokens=embedding(), layers=blocks(2), norm=norm()), lm_head=head()
        ),
        "model.embed_tokens model.layers.0 model.layers.1 model.norm+lm_head",
    ),
    "gpt in a dict": (gpt, f"{TRANSFORMER_H} transformer.ln_f+lm_head"),
    "a dict of parts": (lambda: gpt(nn.ModuleList), TRANSFORMER_H),
    "a dict of parts, sequential": (lambda: gpt(nn.Sequential), TRANSFORMER_H),
    "a list of lists": (
        lambda: model_of(stages=nn.ModuleList([blocks(2), blocks(2)])),
        "stages.0.0 stages.0.1 stages.1.0 stages.1.1",
    ),
    "tied embeddings are one unit": (
        lambda: llama(tied=True),
        "tok_embeddings+norm+output layers.0 layers.1 layers.2",
    ),
    "head and norm before the blocks": (
        lambda: model_of(tok=embedding(), head=head(), norm=norm(), layers=blocks(2)),
        "tok layers.0 layers.1 norm+head",
    ),
    "flux": (
        flux,
        "img_in txt_in double_blocks.0 double_blocks.1 single_blocks.0 single_blocks.1 final_layer",
    ),
    "vit, with parameters of its own": (vit, "patch_embed blocks.0 blocks.1 norm+head "),
    "encoder and decoder": (
        encoder_decoder,
        "shared encoder.block.0 encoder.block.1 encoder.final_norm "
        "decoder.embed decoder.block.0 decoder.block.1 decoder.final_norm+lm_head",
    ),
    "encoder and decoder, tied": (
        lambda: encoder_decoder(tied=True),
        "shared+decoder.final_norm+lm_head encoder.block.0 encoder.block.1 encoder.final_norm "
        "decoder.block.0 decoder.block.1",
    ),
    "stages hold the blocks": (
        swin,
        "patch_embed layers.0.blocks.0 layers.0.blocks.1 layers.0.reduction "
        "layers.1.blocks.0 layers.1.blocks.1 layers.1.reduction+head",
    ),
    "pairs of attentions": (
        lambda: model_of(layers=blocks(2, TwoAttentions)),
        "layers.0 layers.1",
    ),
    "hybrid blocks": (
        lambda: model_of(layers=nn.ModuleList([cls() for cls in HYBRID])),
        "layers.0 layers.1 layers.2 layers.3 layers.4",
    ),
    "multi-token prediction": (
        lambda: llama(mtp=nn.ModuleList([Block()])),
        f"{LLAMA} mtp.0",
    ),
    "lists of leaves beside blocks": (
        leaves_beside_blocks,
        "codebooks.0 codebooks.1 codebooks.2 layers.0 layers.1 norm+heads.0+heads.1",
    ),
    "the root is the list": (lambda: nn.Sequential(Block(), Block()), "0 1"),
    "sequentials that are alike": (
        lambda: model_of(
            net=nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)])
        ),
        "net.0 net.1",
    ),
    "a shared block is one unit": (shared_block, "layers.0 layers.1"),
}
NO_LISTS = {
    "pipeline": lambda: nn.Sequential(nn.Linear(2, 2), norm(), nn.Linear(2, 2), norm()),
    "activation": lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
    "block and head": lambda: nn.Sequential(Block(), nn.Linear(2, 2)),
    "linear": lambda: nn.Linear(2, 2),
    "sequentials that are unlike": lambda: nn.ModuleList(
        [nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.ReLU(), nn.Linear(2, 2, bias=False))]
    ),
}


class TestBlocks:
    @pytest.mark.parametrize("case", CASES)
    def test_units(self, case):
        make, expected = CASES[case]
        assert units(make()) == expected

    def test_vit_root_parameters(self):
        model = vit()
        plan = transformer_block_plan(model)
        assert FSDPParamOrder.from_model(model, units=plan).units[-1] == ("cls_token", "pos_embed")
        assert plan.uncovered(model) == ()

    @pytest.mark.parametrize("n", [1, 2, 3])
    @pytest.mark.parametrize("style", ["list", "grouped", "routed"])
    def test_experts_are_not_blocks(self, style, n):
        found = units(llama(n=n, block=lambda: MoEBlock(style))).split()
        assert [u for u in found if "layers" in u] == [f"layers.{i}" for i in range(n)]

    @pytest.mark.parametrize("case", NO_LISTS)
    def test_what_is_no_list_of_blocks(self, case):
        with pytest.raises(ValueError, match=r"no repeated blocks found in \w+.*manual_plan"):
            transformer_block_plan(NO_LISTS[case]())
        with pytest.raises(ValueError, match="ReLU has no parameters"):
            transformer_block_plan(nn.ReLU())

    @settings(max_examples=60)
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
                own = nn.Parameter(torch.zeros(2))
                model = model_of(**{f"inner{level}": model, f"own{level}": own})
        plan = transformer_block_plan(model)
        assert plan.uncovered(model) == ()
        order = FSDPParamOrder.from_model(model, units=plan)
        packed = [fqn for unit in order.units for fqn in unit]
        assert sorted(packed) == sorted(name for name, _ in model.named_parameters())
        assert sum(".layers." in f".{unit[0]}." for unit in plan) == n


ERRORS = {
    "the list of units is empty": [[]],
    "unit 1 is empty": [["layers.0", []]],
    r"'tok_embedding' matches nothing.*did you mean 'tok_embeddings'": [["tok_embedding"]],
    r"'layers.\[0-5\]' matches nothing, the model lacks module 'layers.3'.*'layers.[012]'": [
        ["layers.[0-5]"]
    ],
    r"did you mean 'layers.0.attn'": [["attn"]],
    r"\[2-0\] in 'layers.\[2-0\]' is reversed: write \[0-2\]": [["layers.[2-0]"]],
    "malformed range": [["layers.[0:2]"], ["layers.[a-b]"], ["layers.0]"]],
    r"'layers.x\*' matches no module with parameters": [["layers.x*"]],
    "empty component": [["layers..0"]],
    r"'norm\+' joins modules, but one of their names is empty": [["norm+"]],
    "units: module 'layers.0' is listed twice, before in unit 'layers.0'": [
        ["layers.0", "layers.[0-1]"]
    ],
    r"module 'norm' is listed twice, before in unit 'norm\+output'": [["norm+output", "norm"]],
    r"'norm' is listed twice, before in unit 'norm\+norm'": [["norm+norm"]],
    "'layers.0.attn' lies inside 'layers.0', which comes earlier.*: list inner": [
        ["layers.0", "layers.0.attn"]
    ],
    "'layers.1.mlp.act' has no parameters": [["layers.1.mlp.act"]],
}
"""Names of units that the first words say what is wrong with."""


class TestManual:
    @pytest.mark.parametrize(
        ("entry", "expected"),
        [
            ("layers.[0-1]", [("layers.0",), ("layers.1",)]),
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
            ("*.0.attn", [("layers.0.attn",)]),
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
        ("message", "entries"), [(m, e) for m, rows in ERRORS.items() for e in rows]
    )
    def test_errors(self, message, entries):
        with pytest.raises(ValueError, match=message):
            manual_plan(entries, llama())

    @pytest.mark.parametrize(
        ("entries", "message"),
        [
            ("layers.0", "must be a list of names"),
            ([3], "must be a string or a list"),
            ([["norm", 3]], "must be a string or a list"),
        ],
    )
    def test_what_is_no_list_of_names(self, entries, message):
        with pytest.raises(TypeError, match=message):
            manual_plan(entries, llama())


class TestPlan:
    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"given": ()}, "the list of units is empty"),
            ({"given": ((),)}, "unit 0 is empty"),
            ({"given": (("a",), ("b", "a"))}, "'a' is in two units, 0 and 1"),
        ],
    )
    def test_constructor_errors(self, kwargs, message):
        with pytest.raises(ValueError, match=message):
            Units.of_modules(**kwargs)

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
        with pytest.raises(ValueError, match="the list of units is empty"):
            FSDPParamOrder.from_model(model, units=[])
