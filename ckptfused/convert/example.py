"""A call that a layer without an adapter takes, by its forward's signature and the model's configuration."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.convert.measure import TOKENS

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# Parts of the names of arguments without which a layer runs in training.
_ABSENT = ("mask", "past", "cache", "bias", "output_", "encoder_")


def example(model: nn.Module, name: str, layer: nn.Module) -> Arguments:
    """Arguments for `layer`, which stands at `name` in `model`: x [1, TOKENS, C], positions, and nothing else.

    **Raises** `LookupError` where the width of x or what an argument takes is not known.
    """
    owners = list(_owners(model, name))
    parameter = next((p for p in layer.parameters() if p.is_floating_point()), torch.empty(0))
    x = torch.empty(1, TOKENS, _width(layer, owners), dtype=parameter.dtype, device=parameter.device)
    positions = torch.arange(TOKENS, device=x.device)[None]
    _, *others = inspect.signature(type(layer).forward.__get__(layer)).parameters.values()
    kwargs: dict[str, Any] = {}
    for other in others:
        if other.kind in (other.VAR_POSITIONAL, other.VAR_KEYWORD):
            continue
        if other.name == "position_embeddings" and (tables := _rotary(owners, layer, x, positions)) is not None:
            kwargs[other.name] = tables
        elif other.name == "position_ids" and "position_embeddings" not in kwargs:
            kwargs[other.name] = positions
        elif other.default is other.empty:
            if not any(part in other.name for part in _ABSENT):
                raise LookupError(f"{type(layer).__name__}.forward: what {other.name} takes is not known")
            kwargs[other.name] = None
    return (x.requires_grad_(),), kwargs


def _owners(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """The modules around the one at `name`, the innermost first."""
    parts = name.split(".")
    return (model.get_submodule(".".join(parts[:i])) for i in reversed(range(len(parts))))


def _width(layer: nn.Module, owners: list[nn.Module]) -> int:
    """The last dimension of x: the configuration says it, or the first layer that x goes through."""
    for owner in owners:
        width = getattr(getattr(owner, "config", None), "hidden_size", None)
        if isinstance(width, int):
            return width
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            return module.in_features
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            return module.normalized_shape[-1]
        if next(module.parameters(recurse=False), None) is not None:
            break
    raise LookupError(f"{type(layer).__name__}: the width of its input is not known")


def _rotary(owners: list[nn.Module], layer: nn.Module, x: Tensor, positions: Tensor) -> Any:
    """The tables that a model of Hugging Face's hands to its layers; None where it has none."""
    for owner in owners:
        rotary = getattr(owner, "rotary_emb", None)
        if isinstance(rotary, nn.Module):
            kind = getattr(layer, "layer_type", getattr(layer, "attention_type", None))
            takes_kind = "layer_type" in inspect.signature(type(rotary).forward).parameters
            with torch.no_grad():  # a copy, since tables that grow keep how far they grew
                return copy.deepcopy(rotary)(x, positions, *((kind,) if takes_kind else ()))
    return None
