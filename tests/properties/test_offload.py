"""Offload: inputs that go to the host and come back change no bit, whatever moves them and whatever is around it."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.devices import on_devices
from tests.properties.entries import each, equal, made, source, step


@on_devices
@each()
def test_saved_tensors_on_the_host(name: str, device: str) -> None:
    """PyTorch's own context, around the forward alone; hooks are found below a checkpoint's."""
    call, x = made(name, device=device), source(device)
    expected = step(call, call.run, x)
    with torch.autograd.graph.save_on_cpu():
        assert equal(step(call, call.run, x), expected)

    def within(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return call.run(x)

    assert equal(step(call, within, x), expected)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
