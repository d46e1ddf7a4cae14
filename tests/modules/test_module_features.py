"""What every `nn.Module` can do, for each of the four classes: be copied, saved, moved, cast, printed, made without
memory."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptfused import FusedCheckpointAttention, FusedCheckpointBlock, FusedCheckpointFFN, FusedCheckpointSequential
from tests.devices import on_devices, repeatable

C, H, HIDDEN = 24, 6, 20
KEEP = ("attn",)


def block(**options: Any) -> nn.Module:
    return FusedCheckpointBlock(C, H, HIDDEN, **{"keep": KEEP, **options})


def llama(**options: Any) -> nn.Module:
    return FusedCheckpointBlock.llama(C, H, HIDDEN, **{"num_kv_heads": 3, "keep": KEEP, **options})


def attention(**options: Any) -> nn.Module:
    return FusedCheckpointAttention(C, H, qk_norm=True, rope=True, window=5, **{"keep": KEEP, **options})


def ffn(**options: Any) -> nn.Module:
    return FusedCheckpointFFN(C, HIDDEN, activation="geglu", **{"keep": ("gu",), **options})


def sequential(**options: Any) -> nn.Module:
    return FusedCheckpointSequential(*(make(**options) for make in (block, attention, ffn)), segments=2)


on_classes = pytest.mark.parametrize("make", [block, llama, attention, ffn, sequential], ids=lambda make: make.__name__)
Make = Callable[..., nn.Module]


def scattered(make: Make, device: str = "cpu", **options: Any) -> nn.Module:
    """The module in training without dropout, norms and biases off their initial values."""
    module = make(**{"dropout": 0.0, **options})
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return module.to(device)


def source(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """A batch for modules of either order of its dimensions."""
    return torch.randn(2, 9, C).to(device, dtype)


def results(module: nn.Module, x: Tensor) -> list[Tensor]:
    """y and the gradient of x and of every parameter."""
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *module.parameters()])]


def check_same(module: nn.Module, other: nn.Module, x: Tensor) -> None:
    assert repr(other) == repr(module)
    for expected, actual in zip(results(module, x), results(other, x), strict=True):
        assert torch.equal(actual, expected)


def saved_and_loaded(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "save": lambda module: saved_and_loaded(module, weights_only=False),
}


@on_devices
@on_classes
@pytest.mark.parametrize("how", COPIES)
def test_copies(how: str, make: Make, device: str) -> None:
    repeatable(device)
    module = scattered(make, device)
    module(source(device))  # a copy of a module that has run, too
    other = COPIES[how](module)
    owners = [t.data_ptr() for m in (module, other) for t in (*m.parameters(), *m.buffers())]
    assert len(set(owners)) == len(owners)
    check_same(module, other, source(device))


@on_devices
@on_classes
def test_state_dict(make: Make, device: str) -> None:
    repeatable(device)
    module, fresh = scattered(make, device), make(dropout=0.0).to(device)
    fresh.load_state_dict(saved_and_loaded(module.state_dict(), weights_only=True))
    check_same(module, fresh, source(device))


CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "double": lambda module: module.double(),
    "to": lambda module: module.to(torch.float16),
}


@on_devices
@on_classes
@pytest.mark.parametrize("cast", CASTS)
def test_types(cast: str, make: Make, device: str) -> None:
    module = scattered(make, device)
    x = source(device)
    expected = module(x)
    module = CASTS[cast](module)
    dtype = next(module.parameters()).dtype
    actual = results(module, x.to(dtype))
    assert all(t.dtype == dtype and t.isfinite().all() for t in actual)
    # bfloat16 has 8 bits: a relative error of 2^-8 an operation, some ten of them in a row (a block of the sequence).
    tolerance = 1e-5 if dtype == torch.float64 else 0.1
    torch.testing.assert_close(actual[0].float(), expected, rtol=tolerance, atol=tolerance)


@on_devices
@on_classes
def test_moves(make: Make, device: str) -> None:
    """To the device and back, and through the meta device, which forgets the values."""
    repeatable(device)
    module = scattered(make)
    there = copy.deepcopy(module).to(device)
    assert {t.device.type for t in (*there.parameters(), *there.buffers())} == {device}
    assert results(there, source(device))[0].device.type == device
    check_same(module, copy.deepcopy(there).to("cpu"), source())
    again = copy.deepcopy(module).to("meta").to_empty(device=device)
    again.load_state_dict(module.state_dict())
    check_same(there, again, source(device))


@on_devices
@on_classes
def test_made_on_the_meta_device(make: Make, device: str) -> None:
    repeatable(device)
    module, other = scattered(make, device), make(dropout=0.0, device="meta")
    assert all(t.is_meta for t in (*other.parameters(), *other.buffers()))
    other.to_empty(device=device)
    other.load_state_dict(module.state_dict())
    check_same(module, other, source(device))


@on_classes
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_meta_tensors_go_through(dtype: torch.dtype, dropout: float, make: Make) -> None:
    module, x = make(dropout=dropout, device="meta", dtype=dtype), source(dtype=dtype).to("meta")
    shapes = [x.shape, x.shape, *(p.shape for p in module.parameters())]
    for t, shape in zip(results(module, x), shapes, strict=True):
        assert (t.is_meta, t.shape, t.dtype) == (True, shape, dtype)


@on_classes
def test_a_wrong_type_on_the_meta_device_is_refused(make: Make) -> None:
    with pytest.raises(TypeError, match=r"expected x's dtype torch.float64 .* got torch.float32"):
        make(device="meta")(source(dtype=torch.float64).to("meta"))


WORDS = {
    "block": ("FusedCheckpointBlock(", "keep=('attn',)", "norm_first=False", "batch_first=False"),
    "llama": ("FusedCheckpointBlock(", "keep=('attn',)", "norm_first=True", "kv_heads=3", "theta=10000.0"),
    "attention": ("FusedCheckpointAttention(", "keep=('attn',)", "window=5", "theta=10000.0"),
    "ffn": ("FusedCheckpointFFN(", "keep=('gu',)"),
    "sequential": ("FusedCheckpointSequential(", "segments=2", "keep=('gu',)", "FusedCheckpointAttention("),
}


@on_classes
def test_repr(make: Make) -> None:
    text = repr(make())
    for part in WORDS[make.__name__]:
        assert part in text
