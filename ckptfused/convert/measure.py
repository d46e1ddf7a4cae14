"""Bytes that a layer's own forward saves for backward, counted on fake tensors: nothing is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

TOKENS = 256


def saved_by_autograd(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes in unique storages that autograd saves in one call, parameters, buffers and inputs' own copies aside.

    **Shapes** `args`, `kwargs`: as the layer takes them, real or meta tensors; x requires a gradient.
    Each storage counts once, as it is held once; x itself counts, since the call keeps it alive.
    """
    mode = FakeTensorMode()
    move = lambda value: mode.from_tensor(value) if isinstance(value, Tensor) else value  # noqa: E731
    args, kwargs = torch.utils._pytree.tree_map(move, (args, kwargs))
    tensors: dict[str, Tensor] = {
        name: mode.from_tensor(t) for name, t in (*layer.named_parameters(), *layer.named_buffers())
    }
    owned = {storage(t) for t in tensors.values()}
    owned |= {storage(t) for t in tree_leaves((args[1:], kwargs)) if isinstance(t, Tensor)}
    found: dict[int, tuple[Any, int]] = {}

    def pack(t: Tensor) -> Tensor:
        if storage(t) not in owned:
            # The storage is held, so that no other takes its place.
            found[storage(t)] = (t.untyped_storage(), t.untyped_storage().nbytes())
        return t

    with mode, torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        torch.func.functional_call(layer, tensors, args, kwargs)
    return sum(size for _, size in found.values())


def _fake(mode: FakeTensorMode, t: Tensor) -> Tensor:
    """A tensor without data. A meta tensor becomes one of the CPU, so that attention takes a kernel that exists."""
    if not t.is_meta:
        return mode.from_tensor(t)
    with mode:
        return torch.empty_like(t, device="cpu").requires_grad_(t.requires_grad)


def storage(t: Tensor) -> int:
    """What tells one storage from another."""
    return t.untyped_storage()._cdata
