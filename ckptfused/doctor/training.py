"""Checks by looking: how the model is set up to train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ckptfused.compat.torch_memory import cpu_has_amx
from ckptfused.compat.transformers import attention_implementation
from ckptfused.doctor.findings import Finding, joined
from ckptfused.doctor.look import HUGGING_FACE, OURS, Look
from ckptfused.profiler.step import misspelt

LONG = 34 / 5
"""Heads times tokens over width, above which attention that is materialised saves more than all else in a layer: of
34 + 5·heads·tokens/width bytes a value in half precision (Korthikanti et al. 2022, arXiv 2205.05198, equation 1)."""


def cache_in_training(look: Look) -> Iterator[Finding]:
    """Keys and values of layers are collected, for nobody; a replay by others adds to them once more.

    Hugging Face's checkpointing and ckptfused's layers leave caches out in training.
    """
    asked = look.step.batch.get("use_cache") if isinstance(look.step.batch, Mapping) else None
    first = next((m for m in _outermost_with_cache(look.model) if m.config.use_cache is True), None)
    generates = any(getattr(m, "can_generate", bool)() for m in look.model.modules())
    if not (look.model.training and generates) or asked is False or (first is None and not asked):
        return
    by = {id(m): c.by for c in look.checkpoints for m in c.module.modules()}  # the innermost one has the last word
    left_out = {id(m) for c in look.checkpoints if c.by in (OURS, HUGGING_FACE) for m in c.module.modules()}
    writers = [m for m in look.model.modules() if hasattr(m, "layer_idx") and id(m) not in left_out]
    again = [m for m in writers if id(m) in by]
    if again:
        yield Finding(
            "error",
            joined(map(look.name, again)),
            f"use_cache=True under {by[id(again[0])]}: its replay adds keys and values to the cache once more, and "
            "attends to them twice, or fails",
            "model.config.use_cache = False",
            refutable=True,
        )
    elif writers:
        yield Finding(
            "advice",
            look.name(first),
            "use_cache=True in training: keys and values of each layer are collected and kept, and nobody reads them",
            "model.config.use_cache = False",
        )


def _outermost_with_cache(module: nn.Module) -> Iterator[Any]:
    """The modules whose configuration says whether caches are made, to themselves and to the modules in them."""
    if hasattr(getattr(module, "config", None), "use_cache"):
        yield module
        return
    for child in module.children():
        yield from _outermost_with_cache(child)


def checkpoint_in_eval(look: Look) -> Iterator[Finding]:
    """Nobody needs activations that no backward will read."""
    if look.model.training or not look.checkpoints or not look.trained:
        return
    idle = all(not c.active for c in look.checkpoints)
    text = "checkpointing is switched on, and the model is in eval mode: " + (
        "it is not at work"
        if idle
        else "under torch.no_grad() it changes nothing, with gradients each layer runs twice"
    )
    yield Finding("advice", "the model", text, "model.train() to train; torch.no_grad() to evaluate")


def nothing_trained(look: Look) -> Iterator[Finding]:
    """Checkpoints without a gradient to compute."""
    if look.checkpoints and not look.trained:
        yield Finding(
            "warning",
            "the model",
            "no parameter requires a gradient: nothing is trained, and checkpoints only cost",
            "requires_grad_() on what is to be trained, or evaluate under torch.no_grad()",
        )


def misspelt_key(look: Look) -> Iterator[Finding]:
    """A name in the batch that forward swallows and nobody reads."""
    # Nearly all letters: others may be meant for what **kwargs reach.
    if said := misspelt(look.model, look.step.batch, 0.8):
        yield Finding(
            "warning",
            "the model",
            f"the batch has a name that forward does not know{said}",
            "rename it: what is under it is not used",
        )


def materialised_attention(look: Look) -> Iterator[Finding]:
    """Eager attention that saves the probabilities of each pair of tokens."""
    length = look.length
    if length is None or not look.trained:
        return
    fused = [c.module for c in look.checkpoints if c.by == OURS]
    inside = {id(m) for module in fused for m in module.modules()}
    places = []
    for module in look.model.modules():
        config: Any = getattr(module, "config", None)
        if id(module) in inside or (not hasattr(module, "layer_idx") and not _attends(module)):
            continue
        if attention_implementation(config) != "eager" or not hasattr(config, "num_attention_heads"):
            continue
        if config.num_attention_heads * length > LONG * config.hidden_size:
            places.append(look.name(module))
    if places:
        yield Finding(
            "warning",
            joined(places),
            f"eager attention with {length:,} tokens: the probabilities of all pairs take more memory than the rest of "
            "a layer",
            'attn_implementation="sdpa" (or flash attention), or ckptfused.convert',
        )


def _attends(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower()


def single_precision(look: Look) -> Iterator[Finding]:
    """All weights in float32 where bfloat16 is as fast as it gets."""
    floats = [p for p in look.model.parameters() if not is_lazy(p) and p.is_floating_point()]
    single = sum(p.numel() for p in floats if p.dtype == torch.float32)
    device = next((p.device.type for p in floats), "cpu")
    if not look.trained or 2 * single <= sum(p.numel() for p in floats) or not knows_bfloat16(device):
        return
    if not torch.is_autocast_enabled(device):
        yield Finding(
            "advice",
            "the model",
            f"it trains in float32 on a device ({device}) that computes in bfloat16: twice the activations",
            "torch.autocast(…, dtype=torch.bfloat16) (Trainer: bf16=True); advice does not count if that is to come",
        )


def knows_bfloat16(device: str) -> bool:
    """Whether a device has matrix products in bfloat16."""
    if device == "cuda":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return device == "cpu" and cpu_has_amx()
