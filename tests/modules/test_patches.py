"""Patches of PyTorch's classes, and hooks on all modules: they have the effect that they have on plain layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)

from ckptfused import FusedCheckpointAttention, FusedCheckpointBlock, FusedCheckpointFFN, FusedCheckpointSequential
from ckptfused.modules import GemmaNorm, GroupedAttention, RotaryTable
from ckptfused.modules.fused import FusedModule

C, H, HIDDEN = 16, 2, 24
Make = Callable[[], Any]


def block() -> FusedCheckpointBlock:
    return FusedCheckpointBlock(C, H, HIDDEN, 0.0, nn.GELU(), batch_first=True)


def llama() -> FusedCheckpointBlock:
    return FusedCheckpointBlock.llama(C, H, HIDDEN, qk_norm="gemma")


def attention() -> FusedCheckpointAttention:
    return FusedCheckpointAttention(C, H, 0.0, batch_first=True)


def ffn() -> FusedCheckpointFFN:
    return FusedCheckpointFFN(C, HIDDEN, 0.0, nn.SiLU(), batch_first=True, norm="none")


def sequential() -> FusedCheckpointSequential:
    return FusedCheckpointSequential(block(), attention(), ffn(), llama())


MADE: tuple[Make, ...] = (block, llama, attention, ffn, sequential)
# What each of them stands in for.
CLASSES: dict[Make, tuple[type, ...]] = {
    block: (nn.Linear, nn.Dropout, nn.MultiheadAttention, nn.LayerNorm, nn.GELU, nn.TransformerEncoderLayer),
    llama: (nn.Linear, nn.Dropout, nn.RMSNorm, GroupedAttention, RotaryTable, GemmaNorm, nn.TransformerEncoderLayer),
    attention: (nn.MultiheadAttention, nn.Dropout, nn.LayerNorm),
    ffn: (nn.Linear, nn.Dropout, nn.SiLU),
    sequential: (nn.Linear, nn.Dropout, nn.RMSNorm),
}
PATCHES = [(make, cls) for make, classes in CLASSES.items() for cls in classes]

HOOKS: dict[Callable[..., Any], Callable[..., Any]] = {
    register_module_forward_pre_hook: lambda module, args: scaled(args) if isinstance(module, nn.Dropout) else None,
    register_module_forward_hook: lambda module, _, y: scaled(y) if isinstance(module, nn.Dropout) else None,
    register_module_full_backward_pre_hook: lambda module, dy: scaled(dy) if isinstance(module, nn.Dropout) else None,
    register_module_full_backward_hook: lambda module, dx, _: scaled(dx) if isinstance(module, nn.Dropout) else None,
}


def plain(module: Any) -> Callable[[Tensor], Tensor]:
    """What the layers of a module compute, in plain PyTorch."""
    if isinstance(module, FusedCheckpointSequential):

        def run(x: Tensor) -> Tensor:
            for part in map(plain, module):
                x = part(x)
            return x

        return run
    return module._plain if isinstance(module, FusedCheckpointFFN) else lambda x: module._plain(x, None, None, False)


def results(function: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


def reasons(module: nn.Module) -> list[str | None]:
    return [part.generic_reason() for part in module.modules() if isinstance(part, FusedModule)]


def close(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)  # float64: they differ in rounding alone


def scaled(y: Any) -> Any:
    return tuple(map(scaled, y)) if isinstance(y, tuple) else None if y is None else y * 1.25


@pytest.mark.parametrize("method", ["forward", "__call__"])
@pytest.mark.parametrize(("make", "cls"), PATCHES, ids=[f"{make.__name__}-{cls.__name__}" for make, cls in PATCHES])
def test_a_patched_class(make: Make, cls: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if method == "__call__" and cls in (nn.TransformerEncoderLayer, RotaryTable):
        pytest.skip("nothing calls the parent class, and only GroupedAttention the table")
    module, x = make().double(), torch.randn(2, 5, C, dtype=torch.float64, requires_grad=True)
    before = results(module, module, x)
    own = getattr(cls, method)
    monkeypatch.setattr(cls, method, lambda self, *args, **kwargs: scaled(own(self, *args, **kwargs)))
    want, got = results(plain(module), module, x), results(module, module, x)
    assert not torch.equal(before[0], want[0])
    close(got, want)
    if make is not sequential:
        assert all(f"{cls.__name__}" in (why or "") for why in reasons(module))
    monkeypatch.undo()
    assert not any(reasons(module))
    assert all(torch.equal(a, b) for a, b in zip(results(module, module, x), before, strict=True))


# What each of them calls of torch.nn.functional.
FUNCTIONS: dict[Make, tuple[str, ...]] = {
    block: ("linear", "layer_norm", "gelu", "dropout", "multi_head_attention_forward"),
    llama: ("linear", "rms_norm", "silu"),
    ffn: ("linear", "silu", "dropout"),
    sequential: ("linear", "rms_norm"),
}


@pytest.mark.parametrize(
    ("make", "name"),
    [(make, name) for make, names in FUNCTIONS.items() for name in names],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_patched_function(make: Make, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its effect, but DeepSpeed's, in the place of `F.linear` under ZeRO-3, which computes the same."""
    module, x = make().double(), torch.randn(2, 5, C, dtype=torch.float64, requires_grad=True)
    before, own = results(module, module, x), getattr(nn.functional, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        return scaled(own(*args, **kwargs))

    monkeypatch.setattr(nn.functional, name, patched)
    want, got = results(plain(module), module, x), results(module, module, x)
    assert not torch.equal(before[0], want[0])
    close(got, want)
    assert make is sequential or all(f"F.{name} is not" in (why or "") for why in reasons(module))
    patched.__module__ = "deepspeed.runtime.zero.linear"
    assert not any(reasons(module))
    monkeypatch.undo()
    assert all(torch.equal(a, b) for a, b in zip(results(module, module, x), before, strict=True))


def test_a_patched_call_of_all_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = block().double(), torch.randn(2, 5, C, dtype=torch.float64, requires_grad=True)
    own, called = nn.Module.__call__, []

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        called.append(self)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", call)
    results(module, module, x)
    assert {module.linear1, module.norm2, module.dropout} <= set(called)


@pytest.mark.parametrize("name", ["_sa_block", "_ff_block"])
def test_a_method_of_one_block(name: str) -> None:
    module, x = block(), torch.randn(2, 5, C)
    fused, own = module(x), getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: own(*args, **kwargs) * 2)
    assert name in (module.generic_reason() or "")
    assert not torch.allclose(module(x), fused)


@pytest.mark.filterwarnings("ignore:.*ackward hook:UserWarning")
@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
@pytest.mark.parametrize("register", HOOKS, ids=lambda register: register.__name__)
def test_hooks_on_all_modules(make: Make, register: Callable[..., Any]) -> None:
    module, x = make().double(), torch.randn(2, 5, C, dtype=torch.float64, requires_grad=True)
    before = results(module, module, x)
    handle = register(HOOKS[register])
    try:
        want, got = results(plain(module), module, x), results(module, module, x)
        said = reasons(module)
    finally:
        handle.remove()
    assert set(said) == {"hooks on all modules"}
    assert not all(torch.equal(a, b) for a, b in zip(before, want, strict=True))
    close(got, want)
    assert not any(reasons(module))
    assert all(torch.equal(a, b) for a, b in zip(results(module, module, x), before, strict=True))
