"""Shrunk configurations of Hugging Face's models, of any type: by the names that configurations give to their sizes."""

from __future__ import annotations

from typing import Any

_WIDTHS = {
    64: "hidden_size d_model n_embd embed_dim dim embedding_size dim_model word_embed_proj_dim lru_width emb_dim "
    "conv_dim output_hidden_size",
    112: "intermediate_size ffn_dim n_inner ffn_hidden_size d_ff dim_ff decoder_ffn_dim encoder_ffn_dim "
    "intermediate_size_mlp dense_intermediate_size dff",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads num_local_experts "
    "num_experts n_routed_experts moe_num_experts num_hidden_layers n_layer n_layers num_layers decoder_layers "
    "encoder_layers encoder_num_hidden_layers encoder_num_attention_heads linear_num_value_heads mamba_num_heads",
    2: "num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_topk moe_k "
    "linear_num_key_heads n_shared_experts",
    16: "head_dim qk_nope_head_dim v_head_dim kv_lora_rank kv_channels attention_head_dim dim_head d_kv head_size "
    "linear_key_head_dim linear_value_head_dim mamba_d_state ssm_state_size state_size",
    8: "qk_rope_head_dim rotary_dim sliding_window local_attention window_size attention_window_size "
    "attention_chunk_size patch_size num_mel_bins",
    24: "q_lora_rank",
    32: "image_size moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
    "shared_intermediate_size expert_ffn_hidden_size",
    96: "vocab_size vocab_size_per_layer_input",
    1: "n_group topk_group first_k_dense_replace num_nextn_predict_layers moe_num_shared_experts",
}
_LENGTHS = (
    "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length seq_length "
    "original_max_position_embeddings max_source_positions max_length"
)
_SIZES = {name: size for size, names in _WIDTHS.items() for name in names.split()} | dict.fromkeys(_LENGTHS.split(), 64)
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id")

# Where these are None, they are to be what a width and a number of heads say, which not every model works out.
_UNSET = {"head_dim": 16, "num_key_value_heads": 2}
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "git": {"vision_config": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16},
    "reformer": {"is_decoder": True, "axial_pos_shape": (8, 8), "axial_pos_embds_dim": (32, 32)},
    "esm": {"vocab_size": 96, "pad_token_id": 0, "mask_token_id": 4},
    "swin": {"depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4},
    "yolos": {"image_size": [32, 32]},
    "xglm": {"vocab_size": 96},
    "zaya": {},
}
"""What a model type needs beside."""
SINGLE = ("xglm",)
"""Model types that do not run in float64."""
_MLA = {"head_dim": 8, "num_key_value_heads": 4}


def smaller(kind: Any, name: str, decoder: bool = True) -> Any:
    """A configuration of this class, shrunk and without dropout, for a decoder or an encoder."""
    defaults = vars(kind())
    options: dict[str, Any] = {k: n for k, n in _SIZES.items() if type(defaults.get(k)) is int}
    options |= {k: n for k, n in _UNSET.items() if k in defaults and defaults[k] is None}
    options |= {k: 0.0 for k, v in defaults.items() if "drop" in k and type(v) is float}
    options |= {k: 0 if k == "pad_token_id" else 1 for k in _TOKENS if type(defaults.get(k)) is int}
    options |= {"apply_spec_augment": False} if "apply_spec_augment" in defaults else {}  # drawn by NumPy
    options |= {"is_decoder": decoder} if "is_decoder" in defaults else {}
    if "qk_rope_head_dim" in defaults:
        options |= {k: n for k, n in _MLA.items() if k in defaults}
    return kind(**{**options, **OWN.get(name, {})})
