"""The unconverted model with ckptfused's dropout masks: PyTorch's own layers, `F.dropout` replaced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ckptfused import rng


class RecordStates(TorchDispatchMode):
    """The random state of every fused call, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.ckptfused.rng_state.default:
            self.states.append(result)
        return result


@contextlib.contextmanager
def with_masks(layers: list[nn.Module], states: list[Tensor]) -> Iterator[None]:
    """Within, dropout in layer i draws the masks that the fused layer i drew from `states[i]`.

    Sites by shape and order: attention probabilities are 4-d (site 0); the others follow in the order residual
    (1), hidden (2; only where a layer drops three times), residual (3).
    """
    calls: list[tuple[Tensor, float]] = []
    current: list[Tensor] = []
    plain = F.dropout

    def masked(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if p == 0 or not training:
            return x
        if not current:
            return plain(x, p, training, inplace)
        calls.append((x, p))
        wide = x.view(1, *x.shape) if x.dim() == 2 else x
        site = 0 if x.dim() == 4 else sites[len([c for c, _ in calls if c.dim() != 4]) - 1]
        keep = rng.dropout_mask(tuple(wide.shape), p, current[0], site).view(x.shape)
        t = round(p * 65536)
        return x * keep * (65536 / (65536 - t))

    counts = {layer: _dropouts(layer) for layer in layers}
    sites = (1, 3)
    hooks = []
    for layer, state in zip(layers, states, strict=True):

        def enter(module: nn.Module, args: Any, state: Tensor = state) -> None:
            nonlocal sites
            calls.clear()
            sites = (1, 2, 3) if counts[module] > 2 else (1, 3)
            current[:] = [state]

        hooks.append(layer.register_forward_pre_hook(enter))
        hooks.append(layer.register_forward_hook(lambda *_: current.clear()))
    with mock.patch.object(F, "dropout", masked):
        yield
    for hook in hooks:
        hook.remove()


def _dropouts(layer: Any) -> int:
    """How many times a layer drops outside its attention probabilities."""
    return 3 if getattr(layer, "activation_dropout", 0) else 2
