"""Mixtral, Qwen3-MoE, with the auxiliary loss over the router logits."""

from __future__ import annotations

from typing import Any

from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.models.zoo import Specimen, add, text_batch
from tests.models.zoo_llama import decoder_layers, maker

# All experts take part: with fewer, rounding in bf16 decides which, and no error can be compared.
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1}
QWEN: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 40, "head_dim": 20, **EXPERTS}

for name, make, path in (
    ("mixtral", maker(MixtralForCausalLM, MixtralConfig, num_local_experts=4, **EXPERTS), "part"),
    (
        "mixtral-window",
        maker(MixtralForCausalLM, MixtralConfig, num_local_experts=4, sliding_window=5, **EXPERTS),
        "part",
    ),
    ("qwen3-moe", maker(Qwen3MoeForCausalLM, Qwen3MoeConfig, **QWEN), "part"),
    ("qwen3-moe-dense", maker(Qwen3MoeForCausalLM, Qwen3MoeConfig, **QWEN, mlp_only_layers=[0]), ("fused", "part")),
):
    add(Specimen(name, make, text_batch, decoder_layers, path))
