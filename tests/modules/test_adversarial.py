"""What broke once under hostile use: patched layers, empty inputs, odd saved-tensor hooks, other modes of autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn

from ckptfused import FusedCheckpointBlock, FusedCheckpointFFN, FusedCheckpointSequential
from ckptfused.layer import spec_text
from ckptfused.spec import MOST_TEXTS, parse
from tests.devices import on_devices, repeatable

WIDTH = 16
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


def _block(dropout: float = 0.0, **options: Any) -> FusedCheckpointBlock:
    return FusedCheckpointBlock(WIDTH, 2, 32, dropout, **{"batch_first": True, **options})


def _llama(**options: Any) -> FusedCheckpointBlock:
    return FusedCheckpointBlock.llama(WIDTH, 2, 32, **options)


def _plain(block: nn.Module, kind: type[nn.TransformerEncoderLayer] = nn.TransformerEncoderLayer) -> nn.Module:
    """PyTorch's layer with the block's parameters."""
    layer = kind(WIDTH, 2, 32, 0.0, batch_first=True)
    layer.load_state_dict(block.state_dict())
    return layer


def _gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    x = x.detach().clone().requires_grad_()
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, *module.parameters()))]


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"norm_first": True},
    {"norm_first": True, "parallel": True},
    {"norm_first": True, "parallel": "shared", "batch_first": False},
    {"norm_first": True, "activation": "swiglu", "num_kv_heads": 1, "rope": True, "qk_norm": True},
]


@on_devices
@pytest.mark.parametrize("keep", ["inputs", "all"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_tokens(layout: dict[str, Any], dropout: float, keep: str, device: str) -> None:
    """Empty batches give empty outputs and gradients of zero, as PyTorch's layers do."""
    block = _block(dropout, keep=keep, **layout).to(device)
    for module in (block, FusedCheckpointSequential(block, copy.deepcopy(block))):
        for shape in ((0, 5, WIDTH), (3, 0, WIDTH), (0, 0, WIDTH), (0, WIDTH)):
            y, dx, *grads = _gradients(module, torch.empty(shape, device=device))
            assert y.shape == dx.shape == torch.Size(shape)
            assert not any(g.any() for g in grads)


def test_a_subclass_that_computes_something_else_is_obeyed() -> None:
    def doubled(self: nn.TransformerEncoderLayer, x: Tensor) -> Tensor:
        return 2 * nn.TransformerEncoderLayer._ff_block(self, x)

    mine = type("Mine", (FusedCheckpointBlock,), {"_ff_block": doubled})
    theirs = type("Theirs", (nn.TransformerEncoderLayer,), {"_ff_block": doubled})
    block = mine(WIDTH, 2, 32, 0.0, batch_first=True)
    assert block.generic_reason() is not None
    torch.testing.assert_close(block(X), _plain(block, theirs)(X))


def test_a_layer_with_a_forward_of_its_own_is_obeyed() -> None:
    """Hooks of accelerate, PEFT and others put one there."""
    block = _block()
    layer: Any = _plain(block)
    owner: Any
    for owner in (block, layer):
        owner.linear1.forward = lambda x: x.new_ones(*x.shape[:-1], 32)
    torch.testing.assert_close(block(X), layer(X))
    layer.forward = lambda src: src
    with pytest.raises(TypeError, match="one of its own"):
        FusedCheckpointBlock.from_layer(layer)


def test_a_block_with_a_forward_of_its_own_is_called_in_a_sequential() -> None:
    class Scaled(FusedCheckpointBlock):
        def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
            return 3 * super().forward(src, *args, **kwargs)

    scaled = Scaled(WIDTH, 2, 32, 0.0, batch_first=True)
    patched = _block()
    patched.forward = lambda src, *args, **kwargs: 5 * src  # type: ignore[method-assign]
    for block in (scaled, patched):
        assert FusedCheckpointSequential(block, _block().eval())[0] is block
        assert FusedCheckpointSequential(block)(X).equal(block(X))


def _set(name: str, value: Callable[[Any], Any]) -> Callable[[nn.Module], None]:
    owner, _, attribute = name.rpartition(".")

    def change(block: nn.Module) -> None:
        layer = block.get_submodule(owner)
        setattr(layer, attribute, value(getattr(layer, attribute)))

    return change


def _parameter(*shape: int, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda _: nn.Parameter(torch.zeros(*shape, **kwargs))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("linear1.weight", _parameter(64, WIDTH), r"linear1\.weight: expected shape \[32, 16\], got \[64, 16\]"),
        ("linear1.bias", _parameter(64), r"linear1\.bias: expected shape \[32\], got \[64\]"),
        ("linear2.bias", _parameter(17), r"linear2\.bias: expected shape \[16\], got \[17\]"),
        ("linear2.weight", lambda w: nn.Parameter(w.bfloat16()), r"linear2\.weight: expected x's dtype torch\.float32"),
        ("self_attn.in_proj_weight", _parameter(64, WIDTH), r"in_proj_weight: expected shape \[48, 16\], got"),
        ("self_attn.out_proj.weight", _parameter(32, WIDTH), r"out_proj\.weight: expected shape \[16, 16\], got"),
        ("self_attn.out_proj.bias", lambda b: nn.Parameter(b.half()), r"out_proj\.bias: expected x's dtype"),
        ("norm1.weight", _parameter(17), r"norm1\.weight: expected shape \[16\], got \[17\]"),
        ("norm2.bias", _parameter(WIDTH, device="meta"), r"norm2\.bias: expected x's device cpu, got meta"),
    ],
    ids=lambda v: v if isinstance(v, str) and "\\" not in v else "",
)
def test_a_parameter_that_does_not_fit(name: str, value: Callable[[Any], Any], message: str) -> None:
    """These ran: on a part of the weight, leaving rows of its gradient unwritten, or in another type."""
    block = _block()
    _set(name, value)(block)
    with pytest.raises((ValueError, TypeError), match=message):
        block(X)


def test_a_half_checks_its_parameters_too() -> None:
    ffn = FusedCheckpointFFN(WIDTH, 32)
    ffn.linear1 = nn.Linear(WIDTH, 40)
    with pytest.raises(ValueError, match=r"linear1\.weight: expected shape \[32, 16\], got \[40, 16\]"):
        ffn(X)


def test_a_mask_on_another_device() -> None:
    with pytest.raises(ValueError, match="src_mask: expected x's device cpu, got meta"):
        _block()(X, torch.zeros(5, 5, device="meta"))


def test_constructor_values() -> None:
    assert _llama(rope=None).self_attn.rotary is None
    with pytest.raises(ValueError, match="^scale: expected a number other than 0"):
        _block(scale=0.0)


@pytest.mark.parametrize("bounds", [[-1, 5], [0, 9], [1, 5], [0, 3], [0, 4, 2, 5]])
def test_sequence_bounds_out_of_range(bounds: list[int]) -> None:
    with pytest.raises(RuntimeError, match="cu_seqlens: expected numbers that do not fall, from 0 to 5"):
        _llama()(X[:1], cu_seqlens=torch.tensor(bounds))


def _spread(t: Tensor) -> Tensor:
    """The same values with gaps between them."""
    apart = torch.empty([2 * n for n in t.shape], dtype=t.dtype, device=t.device)[
        tuple(slice(None, None, 2) for _ in t.shape)
    ]
    return apart.copy_(t)


@on_devices
@pytest.mark.parametrize("keep", ["inputs", "all"])
@pytest.mark.parametrize("make", [_llama, _block], ids=["llama", "post-norm"])
def test_saved_tensors_come_back_with_other_strides(
    make: Callable[..., FusedCheckpointBlock], keep: str, device: str
) -> None:
    repeatable(device)
    block, x = make(dropout=0.2, keep=keep).to(device), X.to(device)
    for module in (block, FusedCheckpointSequential(block, copy.deepcopy(block))):
        expected = _gradients(module, x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, _spread):
            got = _gradients(module, x)
        assert all(a.equal(b) for a, b in zip(got, expected, strict=True))


@on_devices
@pytest.mark.parametrize("x", [X, X[0]], ids=["batch", "one sequence"])
@pytest.mark.parametrize("wrap", [lambda block: block, FusedCheckpointSequential], ids=["block", "sequential"])
def test_the_output_may_be_changed_in_place(wrap: Callable[..., nn.Module], x: Tensor, device: str) -> None:
    repeatable(device)
    module, x = wrap(_block()).to(device), x.to(device)
    with torch.no_grad():
        y = module(x)
        assert x.dim() == 2 or not y._is_view()
    if x.dim() == 3:
        y.add_(torch.ones(WIDTH, device=device, requires_grad=True))
    expected = (2 * module(x)).sum()
    y = module(x)
    y.mul_(2)
    assert y.sum().equal(expected)
    y.sum().backward()


def test_compiling_at_memory_budget_zero_is_refused_with_dropout() -> None:
    """Every value would be made again for backward, the dropout state too: gradients of another mask."""
    with functorch_config.patch(activation_memory_budget=0.0):
        plain = _block(norm_first=True)
        compiled: Any = torch.compile(plain, backend="aot_eager", fullgraph=True)
        got = _gradients(compiled, X)
        for a, b in zip(got, _gradients(plain, X), strict=True):
            torch.testing.assert_close(a, b)
        with pytest.raises(Exception, match="activation_memory_budget above 0"):
            torch.compile(_block(dropout=0.2), backend="aot_eager", fullgraph=True)(X)
    torch._dynamo.reset()


def test_a_schedule_of_dropout_probabilities_fills_no_cache() -> None:
    """Every distinct probability is a spec of its own; all of them were remembered for good."""
    block = _block()
    for step in range(MOST_TEXTS + 100):
        block.dropout1.p = 0.1 + step * 1e-4
        y = block(X)
    assert parse.cache_info().currsize == spec_text._text.cache_info().currsize == MOST_TEXTS
    y.sum().backward()  # its spec was parsed anew, and is still at hand
