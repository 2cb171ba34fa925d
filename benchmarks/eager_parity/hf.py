"""Make tiny models of transformers and timm, with their own weights drawn anew."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from torch_ext_bucketing.fsdp.plans import transformer_block_plan
from torch_ext_bucketing.testing import text

from .base import VOCAB, Model, Unit

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "use_cache": False,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16}
_LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    **_EXPERTS,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
_MAMBA = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8}
_NO_DROPOUT = {
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
}


class OfTokens(nn.Module):
    """Mean cross-entropy of a model of transformers, on tokens and targets."""

    def __init__(self, kind: str, head: str, config: dict[str, Any]) -> None:
        super().__init__()
        import transformers

        torch.manual_seed(0)
        made = getattr(transformers, f"{kind}Config")(**{**_SMALL, **_NO_DROPOUT, **config})
        self.inner = getattr(transformers, f"{kind}{head}")(made).float().train()
        self.two = head == "ForConditionalGeneration"

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        second = {"decoder_input_ids": tokens.roll(1, -1)} if self.two else {}
        logits = self.inner(input_ids=tokens, **second).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class OfImages(nn.Module):
    """Mean cross-entropy of a model of timm, on images."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        super().__init__()
        import timm

        torch.manual_seed(0)
        self.inner = timm.create_model(name, num_classes=10, **options).train()
        for buffer in self.inner.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.bfloat16()  # a mask in float32 would widen activations
        first = next(m for m in self.inner.modules() if isinstance(m, nn.Conv2d))
        # The dtype of parameters is that of the unit's only inside the unit.
        first.register_forward_pre_hook(lambda conv, args: (args[0].to(conv.weight.dtype),))

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.inner(images).float(), targets)


def _images(step: int, rank: int, size: int) -> tuple[torch.Tensor, ...]:
    tokens, targets = text.batch(step, rank, size=size, seq=3 * 32 * 32)
    return tokens.unflatten(1, (3, 32, 32)).float() / VOCAB, targets[:, 0] % 10


def _units(model: nn.Module) -> list[Unit]:
    return [*(unit for unit in transformer_block_plan(model) if unit != ("",)), ""]


_CAUSAL = "ForCausalLM"
_TOKENS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", _CAUSAL, {}),
    "llama_tied": ("Llama", _CAUSAL, {"tie_word_embeddings": True}),
    "gpt2": ("GPT2", "LMHeadModel", _GPT2),
    "qwen3": ("Qwen3", _CAUSAL, {}),
    "qwen3_moe": ("Qwen3Moe", _CAUSAL, {**_EXPERTS, "num_experts_per_tok": 2}),
    "mixtral": ("Mixtral", _CAUSAL, {**_EXPERTS, "num_experts_per_tok": 2}),
    "gemma2": ("Gemma2", _CAUSAL, {}),
    "bert": ("Bert", "ForMaskedLM", {}),
    "phi3": ("Phi3", _CAUSAL, {}),
    "mamba2": ("Mamba2", _CAUSAL, _MAMBA),
    "deepseek_v3": ("DeepseekV3", _CAUSAL, _LATENT),
    "t5": ("T5", "ForConditionalGeneration", _T5),
}
_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
_SWIN = {"img_size": 32, "patch_size": 2, "embed_dim": 16, "window_size": 4}
_IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", _VIT),
    "convnext": ("convnext_atto", {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)}),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {**_SWIN, "depths": (2, 2), "num_heads": (2, 4), "drop_path_rate": 0.0},
    ),
}


def _entry(kind: Callable[..., nn.Module], about: tuple[Any, ...], **options: Any) -> Model:
    return Model(
        lambda layers, dim=None: kind(*about),
        _units,
        parallelism=("fsdp",),
        backends=("aot_eager",),
        group="hf",
        own_weights=True,
        **options,
    )


HF_MODELS = {
    **{f"hf_{n}": _entry(OfTokens, t, needs=("transformers",)) for n, t in _TOKENS.items()},
    **{
        f"timm_{n}": _entry(OfImages, t, needs=("timm", "torchvision"), batch=_images)
        for n, t in _IMAGES.items()
    },
}
