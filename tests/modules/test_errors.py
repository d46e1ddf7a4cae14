"""Bad input gets one clear error that names the argument, what was expected and what came."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ckptfused import FusedCheckpointAttention, FusedCheckpointBlock, FusedCheckpointFFN
from ckptfused.functional import attention_block, block, ffn_block
from ckptfused.spec import Adapter, AttentionSpec, BlockSpec, FFNSpec, param_shapes
from tests.devices import on_devices

B, T, C, H = 2, 5, 16, 4
ATTN = AttentionSpec(heads=H, kv_heads=2, head_dim=4, pre="rmsnorm")
FFN = FFNSpec("swiglu", 24, pre="rmsnorm")
SPEC = BlockSpec(ATTN, FFN)
ROPE = BlockSpec(dataclasses.replace(ATTN, rope="half"), FFN)


def params(spec: BlockSpec = SPEC, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | None]:
    return {name: torch.randn(shape, dtype=dtype) for name, (shape, _) in param_shapes(spec, C).items()}


LORA = BlockSpec(dataclasses.replace(ATTN, lora=(Adapter("o", 2),)), FFN)
X = torch.zeros(B, T, C)
FUNCTIONAL: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "width": ({"x": torch.zeros(B, T, 17)}, ValueError, r"x: expected width 16 .* got shape \[2, 5, 17\]"),
    "dims": ({"x": torch.zeros(1, B, T, C)}, ValueError, r"x: expected 3 dimensions .* got shape \[1, 2, 5, 16\]"),
    "x-type": ({"x": X.long()}, TypeError, r"x: expected float64, .* got torch.int64"),
    "x-no-tensor": ({"x": [1.0]}, TypeError, r"x: expected a tensor, got list"),
    "dtype-mix": (
        {"x": X.double()},
        TypeError,
        r"params\['attn.q_w'\]: expected x's dtype torch.float64 .* got torch.float32",
    ),
    "weight-shape": (
        {"params": {**params(), "attn.k_w": torch.zeros(16, 16)}},
        ValueError,
        r"params\['attn.k_w'\]: expected shape \[8, 16\], got \[16, 16\]",
    ),
    "weight-missing": (
        {"params": {**params(), "ffn.up_w": None}},
        ValueError,
        r"params\['ffn.up_w'\]: expected a tensor of shape \[24, 16\], got None",
    ),
    "adapter-shape": (
        {"spec": LORA, "params": {**params(LORA), "attn.lora0.b": torch.zeros(16, 3)}},
        ValueError,
        r"params\['attn.lora0.b'\]: expected shape \[16, 2\], got \[16, 3\]",
    ),
    "adapter-missing": (
        {"spec": LORA, "params": {**params(LORA), "attn.lora0.a": None}},
        ValueError,
        r"params\['attn.lora0.a'\]: expected a tensor of shape \[2, 16\], got None",
    ),
    "slot-unused": (
        {"params": {**params(), "ffn.out_w": torch.zeros(C)}},
        ValueError,
        r"params\['ffn.out_w'\]: expected None for spec .* got of shape \[16\]",
    ),
    "slot-unknown": ({"params": {**params(), "attn.w_q": None}}, ValueError, r"params: unknown slot 'attn.w_q'"),
    "mask-shape": (
        {"mask": torch.zeros(T, T + 1)},
        ValueError,
        r"mask: expected a shape that broadcasts to \[2, 4, 5, 5\] .* got \[5, 6\]",
    ),
    "mask-dims": ({"mask": torch.zeros(T)}, ValueError, r"mask: expected 2 to 4 dimensions .* got shape \[5\]"),
    "mask-type": ({"mask": torch.zeros(T, T).int()}, TypeError, r"mask: expected a bool or floating.* torch.int32"),
    "padding": ({"padding": torch.zeros(T, B)}, ValueError, r"padding: expected shape \[2, 5\] .* got \[5, 2\]"),
    "cos-unwanted": ({"cos": torch.zeros(T, 2)}, ValueError, r"cos, sin: expected neither with rope='none'"),
    "cos-missing": ({"spec": ROPE}, ValueError, r"cos, sin: expected both with rope='half', got cos None"),
    "cos-shape": (
        {"spec": ROPE, "cos": torch.zeros(T, 3), "sin": torch.zeros(T, 2)},
        ValueError,
        r"cos: expected shape \[5, 2\] or \[2, 5, 2\] \(or 4 wide\), got \[5, 3\]",
    ),
    "packed-batch": (
        {"cu_seqlens": torch.tensor([0, 5])},
        ValueError,
        r"x: expected shape \[1, N, C\] with cu_seqlens, got \[2, 5, 16\]",
    ),
    "packed-type": ({"cu_seqlens": torch.tensor([0.0, 5.0])}, TypeError, r"cu_seqlens: expected an int32 or int64"),
    "spec-kind": (
        {"spec": SPEC.with_inputs(mask="add"), "mask": torch.ones(T, T).bool()},
        ValueError,
        r"mask: expected a mask of the spec's kind 'add', got 'keep'",
    ),
}


@on_devices
@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional(name: str, device: str) -> None:
    changes, error, message = FUNCTIONAL[name]
    arguments: dict[str, Any] = {"x": X, "params": params(), "spec": SPEC, **changes}
    arguments = tree_map_only(Tensor, lambda t: t.to(device), arguments)
    with pytest.raises(error, match=message):
        block(arguments.pop("x"), arguments.pop("params"), arguments.pop("spec"), **arguments)


def test_functional_halves_want_their_own_spec() -> None:
    with pytest.raises(ValueError, match="expected an attention half alone, got 'halves=attn"):
        attention_block(X, params(), SPEC)
    with pytest.raises(ValueError, match="expected an FFN half alone, got 'halves=attn"):
        ffn_block(X, params(), SPEC)
    only = BlockSpec(ffn=FFN)
    with pytest.raises(
        ValueError, match="mask, padding, cu_seqlens, cos, sin, q_scale: leave them out, for the spec has no attention"
    ):
        block(X, params(only), only, mask=torch.zeros(T, T))


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
@pytest.mark.parametrize("site", ["dropout", "attention_dropout", "residual_dropout", "ffn_dropout"])
def test_probability(p: float, site: str) -> None:
    with pytest.raises(ValueError, match=rf"{site}: expected a number in \[0, 1\], got {p}"):
        FusedCheckpointBlock(C, H, **{site: p})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "some"}, r"keep: expected a preset \('inputs', .*\) or a set of the names .*, got 'some'"),
        ({"keep": ("attn", "probabilities")}, r"keep: expected names among attn, mid, .*, got 'probabilities'"),
        ({"keep": ("proj",)}, r"keep: expected names among .*, got 'proj'"),
        ({"num_kv_heads": 3}, r"^num_kv_heads: expected a divisor of nhead=4, got 3"),
        ({"activation": "tanh"}, r"activation: expected one of relu, .* or a callable, got 'tanh'"),
        ({"norm": "batchnorm"}, r"norm: expected one of layernorm, rmsnorm, gemma, layernorm1p, got 'batchnorm'"),
        ({"rope": True, "rotary_dim": 3}, r"rotary_dim: expected an even number .* got 3"),
        ({"rotary_dim": 2}, r"rotary_dim: pass rope= with it, or leave it out, got 2"),
        ({"rope": True, "rope_style": "spiral"}, r"rope_style: expected one of half, interleaved, got 'spiral'"),
        ({"parallel": True}, r"parallel=True: expected norm_first=True, got norm_first=False"),
        ({"window": -2}, r"^window: expected an integer of at least 0, got -2"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_constructor(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FusedCheckpointBlock(C, H, 32, **options)


def test_constructor_types() -> None:
    with pytest.raises(TypeError, match="keep: expected a preset's name or an iterable of names, got 3"):
        FusedCheckpointBlock(C, H, keep=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dropout: expected a number .* got '0.1'"):
        FusedCheckpointBlock(C, H, dropout="0.1")  # type: ignore[arg-type]


@on_devices
@pytest.mark.parametrize("make", [FusedCheckpointBlock, FusedCheckpointAttention], ids=["block", "attention"])
def test_module_input(make: Any, device: str) -> None:
    module, x = make(C, H, batch_first=True).to(device), X.to(device)
    with pytest.raises(ValueError, match=r"src: expected width 16 in the last dimension, got shape \[2, 5, 15\]"):
        module(torch.zeros(B, T, 15, device=device))
    with pytest.raises(TypeError, match=r"in_proj_weight: expected x's dtype torch.float64 .* got torch.float32"):
        module(x.double())
    with pytest.raises(TypeError, match=r"in_proj_weight: expected x's dtype torch.bfloat16 .* got torch.float32"):
        module(x.bfloat16())
    with pytest.raises(ValueError, match=r"src_mask: expected shape \[5, 5\] .* or \[8, 5, 5\] .* got \[4, 5\]"):
        module(x, torch.zeros(4, T, device=device))
    with pytest.raises(ValueError, match=r"src_key_padding_mask: expected shape \[2, 5\] .* got \[2, 6\]"):
        module(x, src_key_padding_mask=torch.zeros(B, T + 1, device=device))
    with pytest.raises(ValueError, match=r"rotary: leave it out, for this module has no rope"):
        module(x, rotary=(torch.zeros(T, 2, device=device), torch.zeros(T, 2, device=device)))
    with pytest.raises(ValueError, match=r"mask, padding: leave them out with cu_seqlens"):
        module(x[:1], torch.zeros(T, T, device=device), cu_seqlens=torch.tensor([0, 2, 5], device=device))
    with pytest.raises(ValueError, match=r"cu_seqlens: expected a batch_first=True module"):
        make(C, H).to(device)(x, cu_seqlens=torch.tensor([0, 2, 5], device=device))


@on_devices
def test_ffn_input(device: str) -> None:
    module, x = FusedCheckpointFFN(C, 32).to(device), X.to(device)
    with pytest.raises(ValueError, match=r"src: expected width 16 in the last dimension, got shape \[2, 5, 15\]"):
        module(torch.zeros(B, T, 15, device=device))
    with pytest.raises(TypeError, match=r"linear1.weight: expected x's dtype torch.float16 .* got torch.float32"):
        module(x.half())
