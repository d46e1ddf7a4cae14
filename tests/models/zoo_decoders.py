"""Gemma 2, Gemma 3 (text), Phi-3, GPT-2, GPT-NeoX, OPT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from tests.models.zoo import VOCABULARY, Specimen, add, text_batch
from tests.models.zoo_llama import SIZES, decoder_layers

Make = Callable[[float, str], nn.Module]
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
GEMMA: dict[str, Any] = {**SIZES, **ALTERNATING, "head_dim": 16, "query_pre_attn_scalar": 20}
PHI3: dict[str, Any] = {**SIZES, "pad_token_id": 0}
GPT2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 4}
NEOX: dict[str, Any] = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
OPT: dict[str, Any] = {
    **{k: v for k, v in NEOX.items() if k != "intermediate_size"},
    "ffn_dim": 88,
}


def gemma2(**options: Any) -> Make:
    def make(p: float, implementation: str) -> nn.Module:
        config = Gemma2Config(**GEMMA, attention_dropout=p, attn_implementation=implementation, **options)
        return Gemma2ForCausalLM(config)

    return make


def gemma3(**options: Any) -> Make:
    def make(p: float, implementation: str) -> nn.Module:
        config = Gemma3TextConfig(**GEMMA, attention_dropout=p, attn_implementation=implementation, **options)
        return Gemma3ForCausalLM(config)

    return make


def phi3(**options: Any) -> Make:
    def make(p: float, implementation: str) -> nn.Module:
        drops = {"attention_dropout": p, "resid_pdrop": p}
        return Phi3ForCausalLM(Phi3Config(**PHI3, **drops, attn_implementation=implementation, **options))

    return make


def gpt2(**options: Any) -> Make:
    def make(p: float, implementation: str) -> nn.Module:
        drops = {"attn_pdrop": p, "resid_pdrop": p, "embd_pdrop": p}
        return GPT2LMHeadModel(GPT2Config(**GPT2, **drops, attn_implementation=implementation, **options))

    return make


def neox(**options: Any) -> Make:
    def make(p: float, implementation: str) -> nn.Module:
        drops = {"attention_dropout": p, "hidden_dropout": p}
        return GPTNeoXForCausalLM(GPTNeoXConfig(**NEOX, **drops, attn_implementation=implementation, **options))

    return make


def opt(**options: Any) -> Make:
    def make(p: float, implementation: str) -> nn.Module:
        drops = {"attention_dropout": p, "dropout": p}
        return OPTForCausalLM(OPTConfig(**OPT, **drops, attn_implementation=implementation, **options))

    return make


def gpt2_layers(model: Any) -> list[nn.Module]:
    return list(model.transformer.h)


def neox_layers(model: Any) -> list[nn.Module]:
    return list(model.gpt_neox.layers)


def opt_layers(model: Any) -> list[nn.Module]:
    return list(model.model.decoder.layers)


def decoder(name: str, make: Make, layers: Any = decoder_layers, left: bool = False, **rest: Any) -> None:
    add(Specimen(name, make, lambda: text_batch(left=left), layers, **rest))


decoder("gemma2", gemma2(attn_logit_softcapping=3.0), implementations=("eager",))
decoder("gemma2-uncapped-bias", gemma2(attn_logit_softcapping=None, attention_bias=True), implementations=("eager",))
decoder("gemma3", gemma3(), left=True)
decoder("gemma3-bidirectional", gemma3(use_bidirectional_attention=True, attn_logit_softcapping=3.0))
decoder("phi3", phi3())
decoder("phi3-partial-window", phi3(rope_parameters={"partial_rotary_factor": 0.5}, sliding_window=5), left=True)
PLACES: dict[str, Any] = {"layers": gpt2_layers, "own_dropout": ("transformer.drop",), "since": (5, 3)}
decoder("gpt2", gpt2(), **PLACES)
decoder("gpt2-unscaled", gpt2(scale_attn_weights=False, n_inner=88), left=True, **PLACES)
decoder("gpt2-by-layer", gpt2(scale_attn_by_inverse_layer_idx=True, activation_function="relu"), **PLACES)
PLACES = {"layers": neox_layers, "own_dropout": ("gpt_neox.emb_dropout",)}
decoder("neox", neox(), **PLACES)
decoder(
    "neox-serial",
    neox(use_parallel_residual=False, attention_bias=False, rope_parameters={"partial_rotary_factor": 1.0}),
    left=True,
    **PLACES,
)
BIASED = "k_proj.bias"  # without RoPE it moves all logits of a query alike
PLACES = {"layers": opt_layers}
decoder("opt", opt(), **PLACES, zero=BIASED)
decoder("opt-post", opt(do_layer_norm_before=False, activation_function="gelu"), **PLACES, left=True, zero=BIASED)
decoder("opt-bare", opt(enable_bias=False, layer_norm_elementwise_affine=False), **PLACES)
