"""Hooks within a layer that append what they see to a list of the layer's, as probes and feature extractors do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptfused
from ckptfused import CheckpointPolicy


class Own(nn.Module):
    """A layer that only a generic checkpoint can take, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(nn.functional.dropout(self.first(x).sin(), 0.2))


def under_checkpoint(model: Any) -> None:
    for layer in model.layers:
        layer.forward = lambda x, forward=layer.forward: ckptfused.checkpoint(forward, x)


WAYS: dict[str, Callable[[Any], Any]] = {
    "layers": ckptfused.convert,
    "segments": lambda model: ckptfused.convert(model, policy=CheckpointPolicy.segments(2)),
    "whole": lambda model: ckptfused.convert(model, policy=CheckpointPolicy.segments(1)),
    "checkpoint": under_checkpoint,
}
KINDS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "own": (Own, "first"),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True), "linear1"),
}


def noting(model: Any, where: str, before: bool, detached: bool) -> None:
    for layer in model.layers:
        layer.seen = []

        def note(t: Tensor, layer: Any = layer) -> None:
            layer.seen.append(t.detach() if detached else t)

        module = layer.get_submodule(where)
        if before:
            module.register_forward_pre_hook(lambda _, args, note=note: note(args[0]))
        else:
            module.register_forward_hook(lambda _, args, out, note=note: note(out))


def trained(model: Any, x: Tensor, detached: bool) -> list[Tensor]:
    """What two steps leave: the tensors that were noted, and the gradients, to which these add their squares."""
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        y = x
        for layer in model.layers:
            y = layer(y)
        noted = [t for layer in model.layers for t in layer.seen]
        loss = y.square().mean() if detached else y.square().mean() + sum(t.square().mean() for t in noted)
        loss.backward()
        after = [t for layer in model.layers for t in layer.seen]
        assert len(after) == len(noted) and all(a is b for a, b in zip(after, noted, strict=True))
        found += [t.detach() for t in noted]
        for layer in model.layers:
            layer.seen.clear()
    return found + [p.grad for p in model.parameters()]


@pytest.mark.parametrize("detached", [False, True], ids=["graph", "detached"])
@pytest.mark.parametrize("before", [False, True], ids=["forward", "pre"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_what_hooks_note_is_noted_once(way: str, kind: str, before: bool, detached: bool) -> None:
    """By a hook that was there when the model was converted, and by one that came later."""
    torch.manual_seed(0)
    make, where = KINDS[kind]
    plain: Any = nn.Module()
    plain.layers = nn.ModuleList(make() for _ in range(4))
    early, late = copy.deepcopy(plain), copy.deepcopy(plain)
    x = torch.randn(2, 5, 16)
    noting(plain, where, before, detached)
    wanted = trained(plain, x, detached)
    noting(early, where, before, detached)
    WAYS[way](early)
    WAYS[way](late)
    noting(late, where, before, detached)
    for model in (early, late):
        for got, want in zip(trained(model, x, detached), wanted, strict=True):
            torch.testing.assert_close(got, want)
