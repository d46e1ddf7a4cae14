"""Models whose blocks others wrote, small, in float64 and without dropout; those of libraries that are installed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.architecture_diffusers import MODELS, diffusion_model
from benchmarks.architecture_models import TOKENS, Subject, of_values, randomized, tokens_of, values_of
from benchmarks.blocks_by_hand import HEADS, HIDDEN, WIDTH, LitBlock, MetaBlock, MinBlock, NanoBlock, Stack, angles

VOCABULARY = 96
IMAGE, PATCH = 32, 8
TIMM = {"embed_dim": WIDTH, "depth": 2, "num_heads": HEADS}
DIFFUSERS = {"num_attention_heads": HEADS, "attention_head_dim": 16, "num_layers": 2}


def others() -> Iterator[Subject]:
    """Kinds of blocks: of libraries, and by hand."""
    for name, (kind, make, given) in KINDS.items():
        yield Subject(name, kind, partial(_random, make), partial(_loss, given))


def import_torchvision() -> None:
    """Imports torchvision where it is installed: where its operators do not load (a wheel for CUDA beside a PyTorch for
    the CPU), without them, since no block needs them.
    """
    register = torch.library.register_fake

    def registered(op: Any, *args: Any, **kwargs: Any) -> Any:
        space, _, name = str(op).partition("::")
        if space == "torchvision" and not hasattr(torch.ops.torchvision, name):
            return lambda function: function
        return register(op, *args, **kwargs)

    with mock.patch("torch.library.register_fake", registered), contextlib.suppress(ImportError):
        importlib.import_module("torchvision")


def _random(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return randomized(make())


def _loss(given: Callable[[], dict[str, Any] | tuple[Any, ...]], model: Any) -> Tensor:
    args = given()
    made = model(**args) if isinstance(args, dict) else model(*args)
    made = made["logits"] if isinstance(made, dict) and "logits" in made else made
    made = made.sample if hasattr(made, "sample") else made
    return of_values(made[0] if isinstance(made, tuple | list) else made)


def _image() -> tuple[Any, ...]:
    return (values_of(2, 3, IMAGE, IMAGE),)


def _latent() -> Tensor:
    return values_of(2, 4, 8, 8)


def _text() -> tuple[Any, ...]:
    return (tokens_of() % 30,)


def _of(path: str, *args: Any, **options: Any) -> Any:
    """A model of a library that may not be installed."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)(*args, **options)


def _naflex() -> Any:
    sizes = {"patch_size": PATCH, "embed_dim": WIDTH, "depth": 2, "num_heads": HEADS}
    return _of("timm.models.naflexvit.NaFlexVit", _of("timm.models.naflexvit.NaFlexVitCfg", **sizes))


def _litgpt(name: str, **options: Any) -> Any:
    sizes = {"n_layer": 2, "n_embd": WIDTH, "n_head": HEADS, "intermediate_size": HIDDEN, "block_size": 32, **options}
    config = importlib.import_module("litgpt").Config.from_name(name, **sizes, padded_vocab_size=VOCABULARY)
    return _of("litgpt.GPT", config)


def _x_transformers() -> Any:
    sizes = {"dim": WIDTH, "depth": 2, "heads": HEADS, "attn_dim_head": 16}
    layers = _of("x_transformers.Decoder", **sizes, attn_flash=True, rotary_pos_emb=True)
    return _of("x_transformers.TransformerWrapper", num_tokens=VOCABULARY, max_seq_len=32, attn_layers=layers)


def _dit_batch() -> dict[str, Any]:
    return {"hidden_states": _latent(), "timestep": torch.tensor([3, 5]), "class_labels": torch.tensor([1, 2])}


def _causal() -> Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]


def _lit() -> nn.Module:
    at = angles(TOKENS)
    return Stack(LitBlock, torch.stack((at.cos(), at.sin()), -1), _causal())


def _meta() -> nn.Module:
    at = angles(TOKENS)
    hidden = torch.full((TOKENS, TOKENS), float("-inf"), dtype=torch.float64).triu(1)
    return Stack(MetaBlock, torch.polar(torch.ones_like(at), at), hidden)


KINDS: dict[str, tuple[str, Callable[[], nn.Module], Callable[[], Any]]] = {
    "torchvision": (
        "VisionTransformer",
        partial(_of, "torchvision.models.VisionTransformer", IMAGE, PATCH, 2, HEADS, WIDTH, HIDDEN),
        _image,
    ),
    "timm": (
        "VisionTransformer",
        partial(_of, "timm.models.vision_transformer.VisionTransformer", IMAGE, PATCH, **TIMM, init_values=0.1),
        _image,
    ),
    "timm NaFlexViT": ("NaFlexVit", _naflex, _image),
    "timm EVA": (
        "Eva",
        partial(_of, "timm.models.eva.Eva", IMAGE, PATCH, **TIMM, use_rot_pos_emb=True, ref_feat_shape=(4, 4)),
        _image,
    ),
    "OpenCLIP": (
        "VisionTransformer",
        partial(
            _of, "open_clip.transformer.VisionTransformer", IMAGE, PATCH, WIDTH, 2, HEADS, 2.0, 0.1, output_dim=WIDTH
        ),
        _image,
    ),
    "OpenCLIP's text": (
        "TextTransformer",
        partial(
            _of, "open_clip.transformer.TextTransformer", TOKENS, VOCABULARY, WIDTH, HEADS, 2, 2.0, output_dim=WIDTH
        ),
        _text,
    ),
    "LitGPT": ("GPT", partial(_litgpt, "Llama-3.2-1B", n_query_groups=2, head_size=16), _text),
    "LitGPT's Pythia": ("GPT", partial(_litgpt, "pythia-14m"), _text),
    "torchtune": (
        "llama3",
        partial(_of, "torchtune.models.llama3.llama3", VOCABULARY, 2, HEADS, 2, WIDTH, 32, intermediate_dim=HIDDEN),
        _text,
    ),
    "torchtune's CLIP": (
        "clip_vision_encoder",
        partial(_of, "torchtune.models.clip.clip_vision_encoder", IMAGE, PATCH, WIDTH, 2, HEADS, max_num_tiles=1),
        lambda: (values_of(2, 1, 1, 3, IMAGE, IMAGE),),
    ),
    "x-transformers": ("Decoder", _x_transformers, _text),
    "ESM-2": ("ESM2", partial(_of, "esm.model.esm2.ESM2", 2, WIDTH, HEADS), _text),
    "vit-pytorch": (
        "ViT",
        partial(
            _of,
            "vit_pytorch.ViT",
            image_size=IMAGE,
            patch_size=PATCH,
            num_classes=8,
            dim=WIDTH,
            depth=2,
            heads=HEADS,
            dim_head=16,
            mlp_dim=HIDDEN,
        ),
        _image,
    ),
    "diffusers": (
        "Transformer2DModel",
        partial(_of, "diffusers.Transformer2DModel", **DIFFUSERS, in_channels=WIDTH, norm_num_groups=4),
        lambda: (values_of(2, WIDTH, 4, 4),),
    ),
    "DiT": (
        "DiTTransformer2DModel",
        partial(_of, "diffusers.DiTTransformer2DModel", **DIFFUSERS, in_channels=4, sample_size=8, norm_num_groups=4),
        _dit_batch,
    ),
    **{name: (kind, partial(diffusion_model, kind, options), given) for name, (kind, options, given) in MODELS.items()},
    "nanoGPT": ("NanoBlock", partial(Stack, NanoBlock), _text),
    "minGPT": ("MinBlock", partial(Stack, MinBlock), _text),
    "lit-llama": ("LitBlock", _lit, _text),
    "Meta's Llama": ("MetaBlock", _meta, _text),
}
"""Each with the class of its model or block, how it is made, and a batch."""
