"""PyTorch's own behaviour of `nn.TransformerEncoderLayer`, with the class swapped.

In float64 the two differ by the order of summation alone, a few hundred units of 1e-16 here: 1e-11 is far
above that and far below what any mistake makes. On a GPU, too: each of the two runs there.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptfused import FusedCheckpointBlock
from tests.devices import generator_state, on_devices

B, T, C, H = 3, 7, 16, 4
CLOSE = {"rtol": 1e-11, "atol": 1e-11}
# Said by PyTorch itself where the encoder makes a nested tensor, or says why it does not.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
]


def pair(
    device: str, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[nn.TransformerEncoderLayer, FusedCheckpointBlock]:
    """PyTorch's layer and ours with the same parameters, norms and biases off their initial values."""
    options = {"d_model": C, "nhead": H, "dim_feedforward": 24, "dropout": 0.0, "dtype": dtype, **options}
    layer = nn.TransformerEncoderLayer(**options)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    block = FusedCheckpointBlock(**options)
    block.load_state_dict(layer.state_dict())
    return layer.to(device), block.to(device)


def source(layer: nn.TransformerEncoderLayer, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(*((B, T) if layer.self_attn.batch_first else (T, B)), C, dtype=dtype)
    return x.to(layer.linear1.weight.device)


def check(layer: nn.Module, block: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> None:
    """The same output, and the same gradient of x and of every parameter."""
    results = []
    for module in (layer, block):
        leaf = x.clone().requires_grad_()
        y = module(leaf, *args, **kwargs)
        weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)
        grads = torch.autograd.grad((y * weight).sum(), [leaf, *module.parameters()])
        results.append((y, *grads))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, **CLOSE)


def masks(kind: str, device: str, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Arguments by the name of the mask that they hold; key 0 is visible to every query."""
    hidden = torch.rand(T, T) < 0.4
    hidden[:, 0] = False
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[1, 4:] = True
    padding[2, 6:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(T, dtype=dtype)
    many = torch.randn(B * H, T, T, dtype=dtype)
    arguments: dict[str, Any] = {
        "none": {},
        "bool": {"src_mask": hidden},
        "float": {"src_mask": torch.randn(T, T, dtype=dtype).masked_fill(hidden, -torch.inf)},
        "bool-heads": {"src_mask": (many > 0.5) & hidden},
        "float-heads": {"src_mask": many},
        "padding": {"src_key_padding_mask": padding},
        "padding-float": {"src_key_padding_mask": torch.randn(B, T, dtype=dtype).masked_fill(padding, -torch.inf)},
        "both": {"src_mask": hidden, "src_key_padding_mask": padding},
        "causal": {"src_mask": causal, "is_causal": True},
        "causal-bool": {"src_mask": causal.isneginf(), "is_causal": True},
        "causal-padding": {"src_mask": causal.isneginf(), "src_key_padding_mask": padding, "is_causal": True},
    }[kind]
    return {name: t.to(device) if isinstance(t, Tensor) else t for name, t in arguments.items()}


MASKS = (
    *("none", "bool", "float", "bool-heads", "float-heads", "padding", "padding-float", "both"),
    *("causal", "causal-bool", "causal-padding"),
)


def test_constructor_and_forward_are_a_superset() -> None:
    for name in ("__init__", "forward"):
        theirs = list(inspect.signature(getattr(nn.TransformerEncoderLayer, name)).parameters.values())
        ours = list(inspect.signature(getattr(FusedCheckpointBlock, name)).parameters.values())
        for mine, parameter in zip(ours, theirs, strict=False):
            assert (mine.name, mine.kind) == (parameter.name, parameter.kind)
            assert mine.default is parameter.default or mine.default == parameter.default
        assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in ours[len(theirs) :])
    assert isinstance(FusedCheckpointBlock(C, H), nn.TransformerEncoderLayer)


def test_same_initial_parameters_for_the_same_seed() -> None:
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(C, H)
    torch.manual_seed(3)
    block = FusedCheckpointBlock(C, H)
    assert list(block.state_dict()) == list(layer.state_dict())
    for expected, actual in zip(layer.parameters(), block.parameters(), strict=True):
        assert torch.equal(actual, expected)


@on_devices
@pytest.mark.parametrize(
    ("batch_first", "norm_first", "bias"), list(itertools.product([False, True], [False, True], [False, True]))
)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_options(batch_first: bool, norm_first: bool, bias: bool, activation: str, device: str) -> None:
    layer, block = pair(device, batch_first=batch_first, norm_first=norm_first, bias=bias, activation=activation)
    check(layer, block, source(layer))


@on_devices
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_masks(kind: str, batch_first: bool, device: str) -> None:
    layer, block = pair(device, batch_first=batch_first)
    check(layer, block, source(layer), **masks(kind, device))


@on_devices
@pytest.mark.parametrize("kind", ["none", "bool", "both", "causal-padding"])
def test_eval_without_gradients(kind: str, device: str) -> None:
    layer, block = pair(device, batch_first=True, dropout=0.3)
    layer.eval()
    block.eval()
    x, arguments = source(layer), masks(kind, device)
    with torch.no_grad():
        torch.testing.assert_close(block(x, **arguments), layer(x, **arguments), **CLOSE)
    with torch.inference_mode():
        torch.testing.assert_close(block(x, **arguments), layer(x, **arguments), **CLOSE)


@on_devices
@pytest.mark.parametrize("norm_first", [False, True])
def test_eps(norm_first: bool, device: str) -> None:
    layer, block = pair(device, layer_norm_eps=0.5, norm_first=norm_first)
    check(layer, block, source(layer))


@on_devices
@pytest.mark.parametrize(
    "activation",
    [F.relu, torch.relu, F.gelu, F.silu, nn.ReLU(), nn.ReLU(inplace=True), nn.GELU(), nn.GELU("tanh"), nn.SiLU()],
    ids=lambda a: str(a) if isinstance(a, nn.Module) else f"{a.__module__ or 'torch'}.{a.__name__}",
)
def test_known_callable_activations_are_fused(activation: Callable[[Tensor], Tensor], device: str) -> None:
    layer, block = pair(device, activation=activation)
    assert block.generic_reason() is None
    check(layer, block, source(layer))


@on_devices
@pytest.mark.parametrize("activation", [torch.tanh, nn.Mish(), lambda x: x * 2], ids=["tanh", "mish", "lambda"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_unknown_activations_take_the_generic_path(
    activation: Callable[[Tensor], Tensor], norm_first: bool, device: str
) -> None:
    layer, block = pair(device, activation=activation, norm_first=norm_first)
    assert block.generic_reason() is not None
    check(layer, block, source(layer), **masks("both", device))


@on_devices
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", ["none", "bool", "float-heads", "padding"])
def test_unbatched(batch_first: bool, kind: str, device: str) -> None:
    layer, block = pair(device, batch_first=batch_first)
    arguments = masks(kind, device)
    if kind == "float-heads":
        arguments["src_mask"] = arguments["src_mask"][:H]
    if kind == "padding":
        arguments["src_key_padding_mask"] = arguments["src_key_padding_mask"][1]
    x = torch.randn(T, C, dtype=torch.float64).to(device)
    check(layer, block, x, **arguments)
    assert block(x).shape == x.shape


@on_devices
@pytest.mark.parametrize("kind", ["src_mask", "src_key_padding_mask"])
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_fully_masked_rows_are_finite(kind: str, additive: bool, dropout: float, device: str) -> None:
    _, block = pair(device, batch_first=True, dropout=dropout)
    mask = torch.zeros(T, T, dtype=torch.bool) if kind == "src_mask" else torch.zeros(B, T, dtype=torch.bool)
    mask[1] = True
    x = torch.randn(B, T, C, dtype=torch.float64).to(device).requires_grad_()
    given = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(mask, -torch.inf) if additive else mask
    given = given.to(device)
    for training in (True, False):
        y = block.train(training)(x, **{kind: given})
        grads = torch.autograd.grad(y.square().sum(), [x, *block.parameters()])
        assert y.isfinite().all()
        assert all(grad.isfinite().all() for grad in grads)


@on_devices
def test_causal_without_a_mask(device: str) -> None:
    layer, block = pair(device)
    x = source(layer)
    y = block(x, is_causal=True)
    torch.testing.assert_close(y, layer(x, **masks("causal", device)), **CLOSE)


@on_devices
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["none", "bool", "padding", "both", "causal"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_inside_transformer_encoder(training: bool, kind: str, batch_first: bool, device: str) -> None:
    layer, block = pair(device, batch_first=batch_first)
    stacks = [
        nn.TransformerEncoder(each, 3, norm=nn.LayerNorm(C, dtype=torch.float64, device=device))
        for each in (layer, block)
    ]
    arguments = masks(kind, device)
    arguments["mask"] = arguments.pop("src_mask", None)
    for stack in stacks:
        stack.train(training)
    check(*stacks, source(layer), **arguments)


@on_devices
@pytest.mark.parametrize("kind", ["none", "padding", "bool"])
def test_inside_transformer_encoder_nested_tensors(kind: str, device: str) -> None:
    layer, block = pair(device, batch_first=True, dtype=torch.float32, dropout=0.1)
    theirs, ours = (nn.TransformerEncoder(each, 2).eval() for each in (layer, block))
    arguments = masks(kind, device, torch.float32)
    arguments["mask"] = arguments.pop("src_mask", None)
    x = source(layer, torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(ours(x, **arguments), theirs(x, **arguments))


@on_devices
def test_nested_tensor_in_eval(device: str) -> None:
    layer, block = pair(device, batch_first=True, dtype=torch.float32)
    layer.eval()
    block.eval()
    nested = torch.nested.nested_tensor([torch.randn(4, C), torch.randn(7, C)], device=device)
    with torch.no_grad():
        expected, actual = layer(nested), block(nested)
    for one, other in zip(expected.unbind(), actual.unbind(), strict=True):
        torch.testing.assert_close(other, one)


@on_devices
def test_dropout_draws_in_training_only(device: str) -> None:
    _, block = pair(device, dropout=0.5)
    x = torch.randn(T, B, C, dtype=torch.float64).to(device)
    assert not torch.equal(block(x), block(x))
    block.eval()
    before = generator_state(device)
    assert torch.equal(block(x), block(x))
    assert torch.equal(before, generator_state(device))


@on_devices
def test_dropout_of_one_drops_both_branches(device: str) -> None:
    layer, block = pair(device, dropout=1.0, norm_first=True)
    x = source(layer)
    torch.testing.assert_close(block(x), layer(x), **CLOSE)


@on_devices
def test_state_dict_goes_both_ways(device: str) -> None:
    _, block = pair(device)
    other = nn.TransformerEncoderLayer(C, H, 24, 0.0, device=device, dtype=torch.float64)
    other.load_state_dict(block.state_dict())
    check(other, block, source(other))


@on_devices
def test_live_changes_take_effect(device: str) -> None:
    layer, block = pair(device)
    for module in (layer, block):
        module.norm_first = True
        module.norm1.eps = 0.1
        module.activation = F.gelu
        module.linear1 = nn.Linear(C, 40, device=device, dtype=torch.float64)
        module.linear2 = nn.Linear(40, C, device=device, dtype=torch.float64)
    block.load_state_dict(layer.state_dict())
    check(layer, block, source(layer))


@on_devices
@pytest.mark.parametrize(
    ("shape", "arguments"),
    [
        ((T, B, C + 1), {}),
        ((T,), {}),
        ((T, B, C, 1), {}),
        ((T, B, C), {"src_mask": torch.zeros(T, T + 1)}),
        ((T, B, C), {"src_mask": torch.zeros(B * H + 1, T, T)}),
        ((T, B, C), {"src_key_padding_mask": torch.zeros(B, T + 1, dtype=torch.bool)}),
        ((T, B, C), {"src_key_padding_mask": torch.zeros(T, B, dtype=torch.bool)}),
        ((T, B, C), {"src_mask": torch.zeros(T, T, dtype=torch.int32)}),
    ],
    ids=["width", "1-d", "4-d", "mask", "mask-heads", "padding", "padding-turned", "mask-type"],
)
def test_what_pytorch_refuses_is_refused(shape: tuple[int, ...], arguments: dict[str, Tensor], device: str) -> None:
    layer, block = pair(device, dtype=torch.float32)
    x, arguments = torch.randn(*shape).to(device), {name: t.to(device) for name, t in arguments.items()}
    with pytest.raises((RuntimeError, AssertionError, ValueError, TypeError)):
        layer(x, **arguments)
    with pytest.raises((ValueError, TypeError), match="expected .* got"):
        block(x, **arguments)
