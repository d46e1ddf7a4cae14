"""Diffusion transformers of diffusers that people fine-tune, small, and calls of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.architecture_models import values_of

WIDTH, HEADS, LENGTH = 64, 4, 6
"""Width, heads, and tokens of a text."""
_SIZES = {"num_layers": 2, "attention_head_dim": WIDTH // HEADS, "num_attention_heads": HEADS}
_AXES = (4, 6, 6)


def _text(width: int) -> dict[str, Tensor]:
    return {"encoder_hidden_states": values_of(2, LENGTH, width)}


def _steps(whole: bool = False) -> dict[str, Tensor]:
    """Times as steps or between 0 and 1."""
    return {"timestep": torch.tensor([3, 5]) if whole else torch.tensor([0.1, 0.7], dtype=torch.float64)}


def _latent(*shape: int) -> dict[str, Tensor]:
    return {"hidden_states": values_of(2, *shape)}


def _packed(axes: int) -> dict[str, Tensor]:
    """Tokens of an image and a text, with their places."""
    at = torch.arange(16)
    places = torch.stack([0 * at] * (axes - 2) + [at // 4, at % 4], 1)
    return {**_latent(16, 4), **_text(WIDTH), "img_ids": places, "txt_ids": torch.zeros(LENGTH, axes)}


def _pooled() -> dict[str, Tensor]:
    return {"pooled_projections": values_of(2, WIDTH)}


def _pieces() -> dict[str, Any]:
    """Images and texts one by one, as Z-Image takes them."""
    images, texts = ([values_of(*shape) for _ in range(2)] for shape in ((4, 1, 8, 8), (LENGTH, 32)))
    return {"x": images, "t": torch.tensor([0.1, 0.7], dtype=torch.float64), "cap_feats": texts}


_JOINT = {**_SIZES, "joint_attention_dim": WIDTH, "in_channels": 4}
_PATCHED = {**_SIZES, "sample_size": 8, "patch_size": 2, "in_channels": 4}
_Z_IMAGE = {
    **{"all_patch_size": (2,), "all_f_patch_size": (1,), "in_channels": 4, "dim": WIDTH, "n_layers": 2},
    **{"n_refiner_layers": 1, "n_heads": HEADS, "n_kv_heads": HEADS, "cap_feat_dim": 32, "axes_dims": [4, 6, 6]},
    "axes_lens": [64, 64, 64],
}
_CHROMA = {"approximator_num_channels": 8, "approximator_hidden_dim": 32, "approximator_layers": 1}
_SINGLE = {"num_single_layers": 2}
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "Flux": (
        "FluxTransformer2DModel",
        {**_JOINT, **_SINGLE, "pooled_projection_dim": WIDTH, "axes_dims_rope": _AXES},
        lambda: {**_packed(3), **_pooled(), **_steps()},
    ),
    "Flux 2": (
        "Flux2Transformer2DModel",
        {**_JOINT, **_SINGLE, "timestep_guidance_channels": 32, "axes_dims_rope": (4, 4, 4, 4)},
        lambda: {**_packed(4), **_steps(), "guidance": torch.tensor([0.3, 0.6], dtype=torch.float64)},
    ),
    "Chroma": (
        "ChromaTransformer2DModel",
        {**_JOINT, **_SINGLE, **_CHROMA, "axes_dims_rope": _AXES},
        lambda: {**_packed(3), **_steps()},
    ),
    "SD 3": (
        "SD3Transformer2DModel",
        {**_PATCHED, "joint_attention_dim": WIDTH, "caption_projection_dim": WIDTH, "pooled_projection_dim": WIDTH,
         "out_channels": 4, "pos_embed_max_size": 8},
        lambda: {**_latent(4, 8, 8), **_text(WIDTH), **_pooled(), **_steps(True)},
    ),
    "Qwen-Image": (
        "QwenImageTransformer2DModel",
        {**_SIZES, "in_channels": 16, "out_channels": 4, "joint_attention_dim": WIDTH, "axes_dims_rope": _AXES},
        lambda: {
            **{**_latent(16, 16), **_text(WIDTH), **_steps(), "img_shapes": [[(1, 4, 4)]] * 2},
            "encoder_hidden_states_mask": torch.ones(2, LENGTH, dtype=torch.bool),
        },
    ),
    "Z-Image": ("ZImageTransformer2DModel", _Z_IMAGE, _pieces),
    "Lumina 2": (
        "Lumina2Transformer2DModel",
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": WIDTH, "num_layers": 2, "cap_feat_dim": 32,
         "num_refiner_layers": 1, "num_attention_heads": HEADS, "num_kv_heads": 2, "multiple_of": 16,
         "axes_dim_rope": _AXES, "axes_lens": (32, 32, 32)},
        lambda: {
            **{**_latent(4, 8, 8), **_text(32), **_steps()},
            "encoder_attention_mask": torch.ones(2, LENGTH, dtype=torch.bool),
        },
    ),
    "PixArt": (
        "PixArtTransformer2DModel",
        {**_PATCHED, "out_channels": 8, "cross_attention_dim": WIDTH, "caption_channels": 32,
         "use_additional_conditions": False},
        lambda: {
            **{**_latent(4, 8, 8), **_text(32), **_steps(True)},
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    "Wan": (
        "WanTransformer3DModel",
        {**_SIZES, "patch_size": (1, 2, 2), "in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 32,
         "ffn_dim": 128, "cross_attn_norm": True, "rope_max_seq_len": 32},
        lambda: {**_latent(4, 2, 8, 8), **_text(32), **_steps(True)},
    ),
    "LTX-Video": (
        "LTXVideoTransformer3DModel",
        {**_SIZES, "in_channels": 8, "out_channels": 8, "cross_attention_dim": WIDTH, "caption_channels": 32},
        lambda: {
            **{**_latent(32, 8), **_text(32), "num_frames": 2, "height": 4, "width": 4},
            **{"timestep": torch.tensor([[3] * 32, [5] * 32]), "encoder_attention_mask": torch.ones(2, LENGTH)},
        },
    ),
    "Hunyuan Video": (
        "HunyuanVideoTransformer3DModel",
        {**_SIZES, **_SINGLE, "in_channels": 4, "out_channels": 4, "num_refiner_layers": 1, "patch_size": 2,
         "patch_size_t": 1, "text_embed_dim": 32, "pooled_projection_dim": WIDTH, "rope_axes_dim": _AXES},
        lambda: {
            **{**_latent(4, 2, 8, 8), **_text(32), **_pooled(), **_steps(True)},
            **{"encoder_attention_mask": torch.ones(2, LENGTH), "guidance": torch.tensor([100.0, 700.0])},
        },
    ),
}  # fmt: skip
"""Each with its class, the options that make it small, and a call."""


def diffusion_model(name: str, options: dict[str, Any]) -> Any:
    """A model. **Raises** `ModuleNotFoundError` without diffusers."""
    return getattr(importlib.import_module("diffusers"), name)(**options)
