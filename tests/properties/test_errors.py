"""Errors: what cannot be right is refused in one clear sentence, and nothing is left behind by it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from tests.devices import generator_state, on_devices
from tests.properties.entries import FUSED, LOSS, C, each, equal, made, source, step

NAMED = r"^(x|src|x, weight|params\['[\w.]+'\]|[\w.]*weight): expected .*, got "


def stack_of_hooks() -> object:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


@on_devices
@each()
def test_after_an_error_all_is_as_it_was(name: str, device: str) -> None:
    """An x of another width is refused by what reads it first, before anything is drawn or left on a stack."""
    call, x = made(name, device=device), source(device)
    expected = step(call, call.run, x)
    torch.manual_seed(7)
    before = generator_state(device)
    for context in (torch.enable_grad, torch.no_grad):
        with (
            context(),
            pytest.raises((ValueError, TypeError, RuntimeError, AssertionError), match=r"\b(16|15|x|src)\b"),
        ):
            call.run(x[..., : C - 1])
    assert name not in {**FUSED, **LOSS} or generator_state(device).equal(before)
    assert stack_of_hooks() is None
    gc.collect(1)  # what the error held is young
    assert equal(step(call, call.run, x), expected)


@on_devices
@each({**FUSED, **LOSS})
def test_an_input_that_does_not_fit_is_named(name: str, device: str) -> None:
    """Its width, its dtype and its device, with what was expected and what came."""
    call, x = made(name, device=device), source(device)
    wrong: tuple[Tensor, ...] = (x[..., : C - 1], x.double(), x.to("meta"), x.long())
    for t in wrong:
        with pytest.raises((ValueError, TypeError), match=NAMED):
            call.run(t)


@on_devices
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@each()
def test_what_is_not_finite_goes_through(name: str, value: float, device: str) -> None:
    """Results are those with everything kept; other samples do not see it."""
    call, x = made(name, 0.0, device), source(device)
    clean = call.run(x).detach()
    with torch.no_grad():
        x[0, 1, 2] = value
    found = [step(call, function, x) for function in (call.run, call.kept)]
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert not found[0][0].isfinite().all()
    assert name in LOSS or found[0][0][1].equal(clean[1])
