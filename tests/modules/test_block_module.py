"""FusedCheckpointBlock beyond `nn.TransformerEncoderLayer`: variants, presets, state, and the fused halves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptfused import FusedCheckpointAttention, FusedCheckpointBlock, FusedCheckpointFFN
from ckptfused.modules import RotaryTable
from ckptfused.spec import ACTIVATIONS, BlockSpec
from tests.devices import on_devices, repeatable

B, T, C, H, HIDDEN = 2, 9, 24, 6, 20
# float64: only the order of summation differs, see test_transformer_encoder_layer.py.
CLOSE = {"rtol": 1e-11, "atol": 1e-11}
DOUBLE: dict[str, Any] = {"dtype": torch.float64, "dropout": 0.0}


def scatter(module: nn.Module, device: str = "cpu") -> Any:
    """Moves norms and biases off their initial values, where a swapped pair would not show; then all to the device."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return module.to(device)


def gradients(module: nn.Module, function: Any, x: Tensor, *args: Any) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    y = function(leaf, *args)
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)
    return [y, *torch.autograd.grad((y * weight).sum(), [leaf, *module.parameters()])]


def check_against_plain(module: Any, x: Tensor) -> None:
    """The fused op against the module's own plain layers."""
    assert module.generic_reason() is None
    masks = () if isinstance(module, FusedCheckpointFFN) else (None, None, False)
    expected, actual = gradients(module, module._plain, x, *masks), gradients(module, module, x)
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one, **CLOSE)


def x_like(device: str, batch_first: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*((B, T) if batch_first else (T, B)), C, dtype=dtype).to(device)


VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {"num_kv_heads": 2},
    "mqa-seq-first": {"num_kv_heads": 1, "batch_first": False},
    "head-dim": {"head_dim": 6},
    "head-dim-odd": {"head_dim": 5, "num_kv_heads": 3},
    "rmsnorm": {"norm": "rmsnorm"},
    "gemma": {"norm": "gemma", "norm_first": True},
    "rope": {"rope": True},
    "rope-partial": {"rope": 500.0, "head_dim": 8, "rotary_dim": 4},
    "rope-interleaved": {"rope": True, "rope_style": "interleaved", "norm_first": True},
    "qk-norm": {"qk_norm": "rmsnorm"},
    "qk-norm-as-block": {"qk_norm": True, "rope": True, "num_kv_heads": 2},
    "causal": {"causal": True},
    "window": {"window": 3},
    "window-causal": {"window": 4, "causal": True},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True, "causal": True},
    "gate": {"output_gate": "entry", "num_kv_heads": 2},
    "gate-of-heads": {"output_gate": "head", "rope": True, "batch_first": False},
    "scale": {"scale": 0.7},
    "parallel": {"parallel": True, "norm_first": True},
    "parallel-shared": {"parallel": "shared", "norm_first": True, "activation": "gelu_tanh"},
    "no-bias": {"bias": False, "activation": "swiglu"},
}


@on_devices
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str, device: str) -> None:
    options = {"batch_first": True, **VARIANTS[name]}
    block = scatter(FusedCheckpointBlock(C, H, HIDDEN, **DOUBLE, **options), device)
    check_against_plain(block, x_like(device, options["batch_first"]))


@on_devices
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_activations(activation: str, norm_first: bool, device: str) -> None:
    block = scatter(FusedCheckpointBlock(C, H, HIDDEN, activation=activation, norm_first=norm_first, **DOUBLE), device)
    assert block.linear1.weight.shape == (HIDDEN * (2 if "glu" in activation else 1), C)
    check_against_plain(block, x_like(device, False))


@on_devices
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "none"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_halves(norm: str, norm_first: bool, batch_first: bool, residual: bool, device: str) -> None:
    options: dict[str, Any] = {"norm": norm, "norm_first": norm_first, "batch_first": batch_first, **DOUBLE}
    options["residual"] = residual
    x = x_like(device, batch_first)
    attention = scatter(FusedCheckpointAttention(C, H, num_kv_heads=2, rope=True, causal=True, **options), device)
    check_against_plain(attention, x)
    check_against_plain(scatter(FusedCheckpointFFN(C, HIDDEN, activation="swiglu", **options), device), x)


@on_devices
@pytest.mark.parametrize("norm_first", [False, True])
def test_two_halves_make_the_block(norm_first: bool, device: str) -> None:
    options: dict[str, Any] = {"norm_first": norm_first, "activation": "geglu", **DOUBLE}
    block = scatter(FusedCheckpointBlock(C, H, HIDDEN, **options), device)
    ffn = FusedCheckpointFFN(C, HIDDEN, **options).to(device)
    del options["activation"]
    attention = FusedCheckpointAttention(C, H, **options).to(device)
    attention.load_state_dict({k: v for k, v in block.state_dict().items() if k in attention.state_dict()})
    ffn.load_state_dict({k: v for k, v in block.state_dict().items() if k in ffn.state_dict()})
    assert set(attention.state_dict()) | set(ffn.state_dict()) == set(block.state_dict())
    x = x_like(device, False)
    torch.testing.assert_close(ffn(attention(x)), block(x), **CLOSE)


@on_devices
def test_halves_unbatched(device: str) -> None:
    x = torch.randn(T, C, dtype=torch.float64).to(device)
    for half in (FusedCheckpointAttention(C, H, **DOUBLE), FusedCheckpointFFN(C, HIDDEN, **DOUBLE)):
        half.to(device)
        torch.testing.assert_close(half(x), half(x[:, None])[:, 0], **CLOSE)


@on_devices
def test_llama_preset(device: str) -> None:
    block = FusedCheckpointBlock.llama(C, H, HIDDEN, num_kv_heads=2, rope_theta=5e5, dtype=torch.float64)
    assert block.spec(torch.float64).to_string() == (
        "halves=attn+ffn attn.heads=6 attn.kv_heads=2 attn.head_dim=4 attn.pre=rmsnorm attn.joint=1 "
        "attn.causal=1 attn.rope=half ffn.act=swiglu ffn.hidden=20 ffn.pre=rmsnorm ffn.joint=1"
    )
    shapes = {name: tuple(value.shape) for name, value in block.state_dict().items()}
    assert shapes == {
        "self_attn.in_proj_weight": ((H + 2 * 2) * 4, C),
        "self_attn.out_proj.weight": (C, C),
        "linear1.weight": (2 * HIDDEN, C),
        "linear2.weight": (C, HIDDEN),
        "norm1.weight": (C,),
        "norm2.weight": (C,),
    }
    check_against_plain(scatter(block, device), x_like(device))
    assert FusedCheckpointBlock.llama(4096, 32, device="meta").linear2.in_features == 11008


@on_devices
def test_llama_is_causal(device: str) -> None:
    repeatable(device)
    block = FusedCheckpointBlock.llama(C, H, HIDDEN, dtype=torch.float64).to(device)
    x = x_like(device)
    y = block(x)
    x[:, 5:] += 1
    assert torch.equal(block(x)[:, :5], y[:, :5])


def test_dropout_sites() -> None:
    block = FusedCheckpointBlock(C, H, dropout=0.1, attention_dropout=0.2, residual_dropout=0.3, ffn_dropout=0.4)
    assert (block.self_attn.dropout, block.dropout1.p, block.dropout.p, block.dropout2.p) == (0.2, 0.3, 0.4, 0.3)
    spec = block.spec()
    assert spec.attn is not None
    assert spec.ffn is not None
    assert (spec.attn.p_attn, spec.attn.p_res, spec.ffn.p_hidden, spec.ffn.p_res) == (0.2, 0.3, 0.4, 0.3)
    assert not block.eval().spec().has_dropout
    assert FusedCheckpointBlock(C, H).spec().attn.p_attn == 0.1  # type: ignore[union-attr]


def test_keep() -> None:
    block = FusedCheckpointBlock.llama(C, H, HIDDEN, keep=("qkv", "attn"))
    assert block.keep == ("qkv", "attn")
    assert block.spec().keep == ("attn", "qkv")
    block.keep = "attention+mid"
    assert block.keep == "attention+mid"
    assert block.spec().keep == ("attn", "mid")
    with pytest.raises(ValueError, match="got 'proj'"):
        block.keep = ("proj",)
    assert block.keep == "attention+mid"


@on_devices
def test_packed_sequences_restart_rope_and_attention(device: str) -> None:
    block = scatter(FusedCheckpointBlock.llama(C, H, HIDDEN, **DOUBLE), device)
    parts = [torch.randn(1, length, C, dtype=torch.float64).to(device) for length in (4, 1, 7)]
    bounds = torch.tensor([0, 4, 5, 12], dtype=torch.int32).to(device)
    packed = block(torch.cat(parts, 1), cu_seqlens=bounds)
    torch.testing.assert_close(packed, torch.cat([block(part) for part in parts], 1), **CLOSE)


@on_devices
def test_rotary_tables_given(device: str) -> None:
    block = FusedCheckpointBlock.llama(C, H, HIDDEN, **DOUBLE).to(device)
    x = x_like(device)
    cos, sin = RotaryTable(4)(T + 3, x)
    y = block(x, rotary=(cos[:T], sin[:T]))
    torch.testing.assert_close(y, block(x), **CLOSE)
    # Relative positions alone matter: all three further on gives the same.
    torch.testing.assert_close(block(x, rotary=(cos[3:], sin[3:])), y, **CLOSE)


@on_devices
def test_from_layer_takes_over_parameters(device: str) -> None:
    class Tagged(nn.TransformerEncoderLayer):
        def __init__(self) -> None:
            super().__init__(C, H, HIDDEN, 0.2, F.gelu, batch_first=True, dtype=torch.float64)
            self.tag = "mine"
            self.register_buffer("count", torch.zeros(1))

    layer = Tagged().eval().to(device)
    seen: list[str] = []
    layer.register_forward_hook(lambda *_: seen.append("hook"))
    block = FusedCheckpointBlock.from_layer(layer, keep="mid")
    assert type(block) is FusedCheckpointBlock
    assert block.tag == "mine"
    assert not block.training
    assert block.keep == "mid"
    assert [n for n, _ in block.named_parameters()] == [n for n, _ in layer.named_parameters()]
    assert all(a is b for a, b in zip(block.parameters(), layer.parameters(), strict=True))
    assert dict(block.named_buffers()).keys() == dict(layer.named_buffers()).keys()
    x = x_like(device)
    torch.testing.assert_close(block(x), layer(x), **CLOSE)
    assert seen == ["hook", "hook"]


@on_devices
def test_from_layer_with_a_custom_activation_and_refusals(device: str) -> None:
    layer = nn.TransformerEncoderLayer(C, H, HIDDEN, 0.0, torch.tanh, dtype=torch.float64).to(device)
    block = FusedCheckpointBlock.from_layer(layer)
    assert block.generic_reason() is not None
    x = x_like(device, False)
    torch.testing.assert_close(block(x), layer(x), **CLOSE)

    class Other(nn.TransformerEncoderLayer):
        def _ff_block(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(TypeError, match="Other overrides it"):
        FusedCheckpointBlock.from_layer(Other(C, H))
    with pytest.raises(TypeError, match="got Linear"):
        FusedCheckpointBlock.from_layer(nn.Linear(2, 2))  # type: ignore[arg-type]
    again = FusedCheckpointBlock.from_layer(FusedCheckpointBlock.llama(C, H, HIDDEN, **DOUBLE).to(device))
    assert again(x_like(device)).shape == (B, T, C)


@on_devices
def test_hooks_on_inner_layers_are_called(device: str) -> None:
    block = FusedCheckpointBlock(C, H, HIDDEN, **DOUBLE).to(device)
    x, seen = x_like(device, False), []
    y = block(x)
    handle = block.linear1.register_forward_hook(lambda *_: seen.append("linear1"))
    torch.testing.assert_close(block(x), y, **CLOSE)
    assert seen
    handle.remove()
    assert block.generic_reason() is None


@on_devices
def test_a_learned_mask_gets_its_gradient(device: str) -> None:
    block = FusedCheckpointBlock(C, H, HIDDEN, **DOUBLE).to(device)
    bias = torch.zeros(T, T, dtype=torch.float64, device=device, requires_grad=True)
    block(x_like(device, False), bias).square().sum().backward()
    assert bias.grad is not None
    assert bias.grad.abs().sum() > 0


@on_devices
def test_autocast(device: str) -> None:
    block = FusedCheckpointBlock.llama(C, H, HIDDEN).to(device)
    x = x_like(device, dtype=torch.float32).requires_grad_()
    expected = block(x)
    with torch.autocast(device, torch.bfloat16):
        y = block(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, expected, rtol=0.1, atol=0.1)  # as in test_module_features
    y.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in block.parameters())


def test_spec_is_readable() -> None:
    spec = FusedCheckpointBlock(C, H, HIDDEN).spec()
    assert isinstance(spec, BlockSpec)
    assert spec.seq_first


@pytest.mark.slow
@on_devices
def test_compiles_again_after_a_change(device: str) -> None:
    torch.compiler.reset()
    repeatable(device)
    block = FusedCheckpointBlock(C, H, HIDDEN, dropout=0.5).to(device)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = x_like(device, False, torch.float32)
    mask = (torch.rand(T, T) > 0.8).to(device)
    for p in (0.5, 0.25):
        block.dropout.p = p
        for arguments in ((), (mask,)):
            torch.manual_seed(1)
            expected = block(x, *arguments)
            torch.manual_seed(1)
            assert torch.equal(compiled(x, *arguments), expected)
    block.eval()
    assert torch.equal(compiled(x), block(x))


def test_sinks_are_shown_reset_and_named() -> None:
    block = FusedCheckpointBlock(C, H, HIDDEN, sinks=True, causal=True, batch_first=True)
    attention = block.self_attn
    assert "sinks" in repr(attention)
    with torch.no_grad():
        attention.sinks.fill_(3)
    attention._reset_parameters()
    assert not attention.sinks.any()
    attention.sinks = torch.nn.Parameter(torch.zeros(H + 1))
    with pytest.raises(ValueError, match=rf"self_attn\.sinks: expected shape \[{H}\], got \[{H + 1}\]"):
        block(torch.randn(1, 5, C))
