"""Models of many shapes, for tests that find, name or pack units. They have no forward."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.utils.parametrize as parametrize
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

DIM, VOCAB = 4, 12


class Attention(nn.Module):
    """Owns a parameter, registered before its children."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 4 * DIM)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * DIM, DIM)


class Block(nn.Module):
    """Owns parameters, registered before its children and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_scale = nn.Parameter(torch.ones(DIM))
        self.attn = Attention()
        self.gate = nn.Parameter(torch.ones(DIM))
        self.mlp = Mlp()
        self.norm = nn.LayerNorm(DIM)


class OtherBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = Attention()
        self.norm = nn.LayerNorm(DIM)


class TwoAttentions(nn.Module):
    """A block with a list of two attentions, which is not a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.attns = nn.ModuleList([OtherBlock(), OtherBlock()])
        self.mlp = Mlp()


class GroupedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(4, DIM, DIM))
        self.w2 = nn.Parameter(torch.zeros(4, DIM, DIM))


class MoE(nn.Module):
    """Experts by ``style``: a list, one tensor for all, or the latter inside a routing module."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 4)
        if style == "list":
            self.experts = nn.ModuleList([Mlp() for _ in range(8)])
        elif style == "grouped":
            self.experts = GroupedExperts()
        else:
            self.routed_experts = model_of(inner_experts=GroupedExperts(), dispatch=nn.Identity())
        self.shared_experts = Mlp()
        self.bias = nn.Parameter(torch.zeros(4))


class MoEBlock(nn.Module):
    def __init__(self, style: str = "grouped") -> None:
        super().__init__()
        self.attn = Attention()
        self.moe = MoE(style)
        self.norm = nn.LayerNorm(DIM)


def model_of(**children: Any) -> nn.Module:
    """Make a module with these children and parameters, in this order."""
    model = nn.Module()
    for name, child in children.items():
        setattr(model, name, child)
    return model


def blocks(n: int = 3, cls: Callable[[], nn.Module] = Block) -> nn.ModuleList:
    return nn.ModuleList([cls() for _ in range(n)])


def embedding() -> nn.Embedding:
    return nn.Embedding(VOCAB, DIM)


def norm() -> nn.LayerNorm:
    return nn.LayerNorm(DIM)


def head() -> nn.Linear:
    return nn.Linear(DIM, VOCAB, bias=False)


def llama(
    container: str = "dict",
    n: int = 3,
    tied: bool = False,
    block: Callable[[], nn.Module] = Block,
    **extra: Any,
) -> nn.Module:
    items = {str(i): block() for i in range(n)}
    layers = nn.ModuleDict(items) if container == "dict" else nn.ModuleList(items.values())
    if container == "sequential":
        layers = nn.Sequential(*items.values())
    model = model_of(tok_embeddings=embedding(), layers=layers, norm=norm(), output=head(), **extra)
    if tied:
        model.output.weight = model.tok_embeddings.weight
    return model


def gpt(kind: Any = None) -> nn.Module:
    """Make a GPT with all children in a dict, which is not a list of blocks."""
    h = blocks(2) if kind is not nn.Sequential else nn.Sequential(*blocks(2))
    parts = {"wte": embedding(), "wpe": nn.Embedding(8, DIM), "h": h}
    if kind is not None:
        return model_of(transformer=nn.ModuleDict(parts))
    inner = nn.ModuleDict({**parts, "ln_f": norm()})
    return model_of(transformer=inner, lm_head=head())


def vit() -> nn.Module:
    return model_of(
        cls_token=nn.Parameter(torch.zeros(1, 1, DIM)),
        pos_embed=nn.Parameter(torch.zeros(1, 5, DIM)),
        patch_embed=nn.Conv2d(3, DIM, 2),
        blocks=nn.Sequential(Block(), Block()),
        norm=norm(),
        head=nn.Linear(DIM, 10),
    )


def encoder_decoder(tied: bool = False) -> nn.Module:
    model = model_of(
        shared=embedding(),
        encoder=model_of(block=blocks(2), final_norm=norm()),
        decoder=model_of(embed=embedding(), block=blocks(2), final_norm=norm()),
        lm_head=head(),
    )
    if tied:
        model.decoder.embed = model.shared
        model.lm_head.weight = model.shared.weight
    return model


def swin() -> nn.Module:
    """Make a list of stages, each with a list of blocks and a downsampling layer."""
    stages = [model_of(blocks=blocks(2), reduction=nn.Linear(DIM, DIM)) for _ in range(2)]
    return model_of(
        patch_embed=nn.Conv2d(3, DIM, 2), layers=nn.ModuleList(stages), head=nn.Linear(DIM, 10)
    )


def flux() -> nn.Module:
    """Make a model of several projections, two lists of blocks and a final layer."""
    return model_of(
        img_in=nn.Linear(3, DIM),
        txt_in=nn.Linear(5, DIM),
        double_blocks=blocks(2),
        single_blocks=blocks(2, OtherBlock),
        final_layer=nn.Linear(DIM, 3),
    )


def leaves_beside_blocks() -> nn.Module:
    codebooks = nn.ModuleList([embedding() for _ in range(3)])
    heads = nn.ModuleList([head() for _ in range(2)])
    return model_of(codebooks=codebooks, layers=blocks(2), norm=norm(), heads=heads)


def shared_block() -> nn.Module:
    block = Block()
    return model_of(layers=nn.ModuleList([block, Block(), block]))


def wrapped(model: nn.Module) -> nn.Module:
    """Wrap one block in an activation checkpoint, and compile another one in a checkpoint."""
    model.layers["0"] = checkpoint_wrapper(model.layers["0"])
    model.layers["1"] = torch.compile(checkpoint_wrapper(model.layers["1"]))
    return model


def parametrized(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, _ in list(module.named_parameters(recurse=False)):
            parametrize.register_parametrization(module, name, nn.Identity(), unsafe=True)
    return model
