"""A call that a layer without an adapter takes, by its forward's signature and the model's configuration."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.models.family import EXAMPLE_TOKENS
from ckptfused.simulate.meta_copy import without_data
from ckptfused.simulate.values import KnownValues as KnownValues
from ckptfused.state.undone import without_trace

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]
# Parts of the names of arguments without which a layer runs in training.
_ABSENT = ("mask", "past", "cache", "bias", "output_", "encoder_")


class Tables:
    """The tables that a model's rotary module makes for its layers, made when they are asked for."""

    def __init__(self, rotary: nn.Module, kind: str | None, width: int, dtype: torch.dtype) -> None:
        self._rotary, self._whole = without_data(rotary), copy.deepcopy(rotary)
        takes_kind = "layer_type" in inspect.signature(type(rotary).forward).parameters
        self._kind = (kind,) if takes_kind else ()
        self._width, self._dtype = width, dtype

    def made(self) -> Any:
        """cos and sin of positions 0 … EXAMPLE_TOKENS - 1, without their values."""
        x = torch.empty(1, EXAMPLE_TOKENS, self._width, dtype=self._dtype, device="meta")
        positions = _positions(torch.empty(0))
        known = KnownValues([(positions.to("meta"), positions)])
        with without_trace(self._rotary), torch.no_grad(), known:
            return self._rotary(x, positions.to("meta"), *self._kind)

    def values(self, device: torch.device) -> Any:
        """The same with their values."""
        x = torch.empty(1, EXAMPLE_TOKENS, self._width, dtype=self._dtype, device=device)
        with without_trace(self._whole), torch.no_grad():
            return self._whole(x, _positions(x), *self._kind)


KnownTables = dict[Any, Tables]
"""Tables by what they depend on: layers share them."""


def example(model: nn.Module, name: str, layer: nn.Module, known: KnownTables | None = None) -> CallArguments:
    """Arguments for `layer`, which stands at `name` in `model`: x [1, EXAMPLE_TOKENS, C], positions, and nothing else.
    Nothing of the model runs for it: rotary tables are `Tables`.

    **Raises** `LookupError` where the width of x or what an argument takes is not known.
    """
    owners = list(_owners(model, name))
    floats = (p for p in _own_parameters(layer) if p.is_floating_point())
    parameter = min(floats, key=lambda p: max(p.dim(), 1), default=torch.empty(0))  # a norm's, before stored weights
    x = torch.empty(1, EXAMPLE_TOKENS, _width(layer, owners), dtype=parameter.dtype, device=parameter.device)
    _, *others = inspect.signature(type(layer).forward.__get__(layer)).parameters.values()
    kwargs: dict[str, Any] = {}
    for other in others:
        if other.kind in (other.VAR_POSITIONAL, other.VAR_KEYWORD):
            continue
        if other.name == "position_embeddings" and (tables := _rotary(owners, layer, x, known)) is not None:
            kwargs[other.name] = tables
        elif other.name == "position_ids" and "position_embeddings" not in kwargs:
            kwargs[other.name] = _positions(x)
        elif other.default is other.empty:
            if not any(part in other.name for part in _ABSENT):
                raise LookupError(f"{type(layer).__name__}.forward: what {other.name} takes is not known")
            kwargs[other.name] = None
    return (x.requires_grad_(),), kwargs


def _own_parameters(layer: nn.Module) -> Iterator[Tensor]:
    """A layer's parameters without its adapters', which may have another type."""
    wrappers = [module for module in layer.modules() if "base_layer" in module._modules]
    named = (found for module in wrappers for found in module.named_parameters())
    added = {id(p) for name, p in named if not name.startswith("base_layer.")}
    return (p for p in layer.parameters() if id(p) not in added)


def with_tables(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments as a layer takes them, with the tables made."""
    return {name: value.made() if isinstance(value, Tables) else value for name, value in kwargs.items()}


def with_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
    """An example whose tables have values. **Raises** whatever making them does."""
    device = args[0].device
    return args, {name: v.values(device) if isinstance(v, Tables) else v for name, v in kwargs.items()}


def _positions(x: Tensor) -> Tensor:
    return torch.arange(EXAMPLE_TOKENS, device=x.device)[None]


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
        vectors = (p for p in module.parameters(recurse=False) if p.numel() > 1)  # a number tells no width
        if (weight := next(vectors, None)) is not None:
            if weight.dim() == 1:  # a norm of somebody's own
                return weight.numel()
            break
    raise LookupError(f"{type(layer).__name__}: the width of its input is not known")


def _rotary(owners: list[nn.Module], layer: nn.Module, x: Tensor, known: KnownTables | None) -> Tables | None:
    """The tables that a model of Hugging Face's hands to its layers; None where it has none."""
    for owner in owners:
        rotary = getattr(owner, "rotary_emb", None)
        if isinstance(rotary, nn.Module):
            kind = _kind(layer)
            key = id(rotary), kind, x.size(-1), x.dtype
            known = {} if known is None else known
            if key not in known:
                known[key] = Tables(rotary, kind, x.size(-1), x.dtype)
            return known[key]
    return None


def _kind(layer: nn.Module) -> str | None:
    """Which of a model's kinds of attention a layer has, where it or its attention says so."""
    said = (getattr(m, name, None) for m in layer.modules() for name in ("layer_type", "attention_type"))
    return next((kind for kind in said if isinstance(kind, str)), None)
