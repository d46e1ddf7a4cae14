"""A module that runs generically says so, and why: printed, explained, and where a call asks for what only ops take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ckptfused
from ckptfused import FusedCheckpointAttention, FusedCheckpointBlock, FusedCheckpointFFN

C, H = 16, 2


def block() -> FusedCheckpointBlock:
    return FusedCheckpointBlock(C, H, 32, batch_first=True)


def attention() -> FusedCheckpointAttention:
    return FusedCheckpointAttention(C, H, batch_first=True, qk_norm=True)


def ffn() -> FusedCheckpointFFN:
    return FusedCheckpointFFN(C, 32, batch_first=True)


def hook(name: str) -> Callable[[nn.Module], Any]:
    return lambda module: module.get_submodule(name).register_forward_hook(lambda *_: None)


def put(name: str, value: Any) -> Callable[[nn.Module], None]:
    return lambda module: setattr(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], value)


class Dropout(nn.Dropout):
    pass


CASES = [
    (block, hook("linear1"), "linear1 has a hook or a forward of its own"),
    (block, put("linear2.forward", lambda x: x), "linear2 has a hook or a forward of its own"),
    (block, hook("self_attn.out_proj"), "self_attn.out_proj has a hook or a forward of its own"),
    (block, put("activation", torch.tanh), "activation tanh has no kernel"),
    (block, put("activation", nn.Mish()), "activation Mish has no kernel"),
    (
        block,
        put("norm2", nn.LayerNorm((3, C))),
        "norm2 is a LayerNorm that the kernels do not compute over 16",
    ),
    (
        block,
        put("dropout1", Dropout()),
        f"dropout1 is a {__name__}.Dropout, not PyTorch's Dropout",
    ),
    (block, put("self_attn.bias_k", torch.zeros(1, 1, C)), "self_attn has keys and values of another width, bias_k"),
    (attention, hook("norm1"), "norm1 has a hook or a forward of its own"),
    (attention, hook("self_attn.q_norm"), "self_attn.q_norm has a hook or a forward of its own"),
    (attention, put("self_attn.k_norm", nn.RMSNorm(C // H)), "q_norm is a LayerNorm, k_norm a RMSNorm"),
    (
        ffn,
        put("linear1", nn.Sequential(nn.Linear(C, 32))),
        "container.Sequential, not PyTorch's Linear",
    ),
    (ffn, hook("dropout2"), "dropout2 has a hook or a forward of its own"),
]


@pytest.mark.parametrize(("make", "spoil", "why"), CASES, ids=[why[:40] for _, _, why in CASES])
def test_the_reason_is_said(make: Callable[[], Any], spoil: Callable[[Any], Any], why: str) -> None:
    module, x = make(), torch.randn(2, 5, C)
    assert module.generic_reason() is None and "generically" not in repr(module)
    spoil(module)
    assert why in module.generic_reason()
    assert f"runs generically ({module.generic_reason()})" in repr(module)
    step = ckptfused.explain(module, x, show=False).step("everything")
    assert step.reason == module.generic_reason()
    with pytest.raises(ValueError, match="^generator: leave it out, for this call runs generically") as error:
        module(x, generator=torch.Generator())
    assert why in str(error.value)


@pytest.mark.parametrize("make", [block, attention])
@pytest.mark.parametrize("name", ["cu_seqlens", "rotary"])
def test_what_only_ops_take_is_named(make: Callable[[], Any], name: str) -> None:
    module = make()
    module.norm1.register_forward_pre_hook(lambda *_: None)
    given: Any = torch.tensor([0, 2, 5]) if name == "cu_seqlens" else (torch.ones(5, 4), torch.ones(5, 4))
    with pytest.raises(ValueError, match=f"^{name}: leave it out, for this call runs generically .norm1 has a hook"):
        module(torch.randn(1, 5, C), **{name: given})


def test_a_mask_that_needs_a_gradient() -> None:
    mask = torch.zeros(5, 5, requires_grad=True)
    for module in (block(), attention()):
        assert module.generic_reason(mask) == "a mask needs a gradient" and module.generic_reason() is None
        with pytest.raises(ValueError, match="generically .a mask needs a gradient"):
            module(torch.randn(2, 5, C), mask, generator=torch.Generator())


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_nested_tensors() -> None:
    x = torch.nested.nested_tensor([torch.randn(3, C), torch.randn(4, C)])
    with pytest.raises(ValueError, match="generator: .*generically .src is a nested tensor"):
        block().eval()(x, generator=torch.Generator())


def test_a_subclass() -> None:
    class Mine(FusedCheckpointBlock):
        def _ff_block(self, x: torch.Tensor) -> torch.Tensor:
            return x

    assert "runs generically (Mine overrides _sa_block or _ff_block)" in repr(Mine(C, H))


def test_a_weight_of_another_kind() -> None:
    """torchao's quantised weights are such."""
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    module = ffn()
    x, weight = torch.randn(2, 5, C), module.linear2.weight.detach()
    want = module.eval()(x)
    module.linear2.weight = nn.Parameter(two(weight, weight.clone()))
    assert "runs generically (linear2 weight is a tensor of type TwoTensor)" in repr(module)
    torch.testing.assert_close(module(x).a, want)


class Doubled(nn.Parameter):
    """A weight of which `F.linear` makes twice as much."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            y = func(*args, **(kwargs or {}))
            return 2 * y if func is nn.functional.linear else y


def test_a_weight_that_says_what_is_computed_with_it() -> None:
    x, *modules = torch.randn(2, 5, C), ffn().eval(), ffn().eval()
    modules[1].load_state_dict(modules[0].state_dict())
    weight = modules[0].linear2.weight.detach()
    for module, of_it in zip(modules, (Doubled(weight), nn.Parameter(2 * weight)), strict=True):
        module.linear2.weight, module.linear2.bias = of_it, None
    torch.testing.assert_close(modules[0](x), modules[1](x))
    layers = [nn.TransformerEncoderLayer(C, H, 32, 0.0, batch_first=True).double() for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer in layers:
        layer.linear1.weight = Doubled(layer.linear1.weight.detach())
    ckptfused.convert(nn.ModuleList(layers[:1]))
    found = [layer(x.double()) for layer in layers]
    torch.testing.assert_close(*found)
    for y in found:
        y.square().mean().backward()
    for a, b in zip(*(layer.parameters() for layer in layers), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_wide_head() -> None:
    assert "runs generically (heads are 264 wide, kernels reach 256)" in repr(FusedCheckpointBlock(264, 1))
