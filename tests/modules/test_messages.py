"""One error for each wrong argument: it names the argument, what was expected and what came."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ckptfused
from ckptfused import (
    FusedCheckpointAttention,
    FusedCheckpointBlock,
    FusedCheckpointFFN,
    FusedCheckpointSequential,
    functional,
    rng,
)
from ckptfused.modules import RotaryTable
from ckptfused.spec import BlockSpec, FFNSpec, param_shapes

B, T, C, H = 2, 5, 16, 4
X = torch.zeros(B, T, C)
FFN = BlockSpec(ffn=FFNSpec("relu", 8))
PARAMS: dict[str, Tensor | None] = {name: torch.zeros(shape) for name, (shape, _) in param_shapes(FFN, C).items()}


def block(*args: Any, **options: Any) -> Any:
    return FusedCheckpointBlock(*args or (C, H, 32), **{"batch_first": True, **options})


def attention(**options: Any) -> Any:
    return FusedCheckpointAttention(C, H, **{"batch_first": True, **options})


def ffn(**options: Any) -> Any:
    return FusedCheckpointFFN(C, 32, **options)


def llama(*args: Any, **options: Any) -> Any:
    return FusedCheckpointBlock.llama(*args or (C, H, 32), **options)


def functional_ffn(x: Any = X, params: Any = PARAMS, spec: Any = FFN, **options: Any) -> Tensor:
    return functional.ffn_block(x, params, spec, **options)


OF_ALL_HALVES = {
    "dropout": ("0.1", TypeError, "dropout: expected a number in [0, 1], got '0.1'"),
    "residual_dropout": (2, ValueError, "residual_dropout: expected a number in [0, 1], got 2"),
    "layer_norm_eps": (-1.0, ValueError, "layer_norm_eps: expected a number of at least 0, got -1.0"),
    "norm": ("x", ValueError, "norm: expected one of layernorm, rmsnorm, gemma, layernorm1p, got 'x'"),
    "bias": ("no", TypeError, "bias: expected a bool, got 'no'"),
    "norm_first": ("no", TypeError, "norm_first: expected a bool, got 'no'"),
    "batch_first": (3, TypeError, "batch_first: expected a bool, got 3"),
    "keep": (5, TypeError, "keep: expected a preset's name or an iterable of names, got 5"),
}
OF_ATTENTION = {
    "num_kv_heads": (3, ValueError, "num_kv_heads: expected a divisor of nhead=4, got 3"),
    "head_dim": (0, ValueError, "head_dim: expected an integer of at least 1, got 0"),
    "rope": ("yes", TypeError, "rope: expected True, False, None, a theta or a RotaryTable, got 'yes'"),
    "rotary_dim": (2, ValueError, "rotary_dim: pass rope= with it, or leave it out, got 2 without rope"),
    "rope_style": ("x", ValueError, "rope_style: expected one of half, interleaved, got 'x'"),
    "qk_norm": ("x", ValueError, "qk_norm: expected one of layernorm, rmsnorm, gemma, layernorm1p, got 'x'"),
    "causal": ("yes", TypeError, "causal: expected a bool, got 'yes'"),
    "window": (1.5, TypeError, "window: expected an integer, got 1.5"),
    "softcap": (-1, ValueError, "softcap: expected a number of at least 0, got -1"),
    "sinks": ("yes", TypeError, "sinks: expected a bool, got 'yes'"),
    "scale": ("big", TypeError, "scale: expected a number, got 'big'"),
    "attention_dropout": (-1, ValueError, "attention_dropout: expected a number in [0, 1], got -1"),
    "heads": (
        2,
        TypeError,
        "heads: unknown keyword; beside those of the signature, attention takes num_kv_heads, head_dim, rope",
    ),
}
OF_FFN = {
    "activation": ("x", ValueError, "activation: expected one of relu, gelu"),
    "ffn_dropout": ("1", TypeError, "ffn_dropout: expected a number in [0, 1], got '1'"),
}
OF_BLOCKS = {"parallel": ("yes", ValueError, "parallel: expected False, True or 'shared', got 'yes'")}
MAKES: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (block, {**OF_ALL_HALVES, **OF_ATTENTION, **OF_FFN, **OF_BLOCKS}),
    (attention, {**OF_ALL_HALVES, **OF_ATTENTION}),
    (ffn, {**OF_ALL_HALVES, **OF_FFN}),
]
CONSTRUCTORS = [
    pytest.param(make, name, *wrong, id=f"{make.__name__}-{name}")
    for make, table in MAKES
    for name, wrong in table.items()
]


@pytest.mark.parametrize(("make", "name", "value", "error", "message"), CONSTRUCTORS)
def test_constructor(make: Callable[..., Any], name: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        make(**{name: value})


def mkldnn(x: Tensor) -> Tensor:
    return x.to_mkldnn()


CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no-heads": (lambda: block(C, 0), ValueError, "nhead: expected an integer of at least 1, got 0"),
    "heads": (
        lambda: block(C, 3),
        ValueError,
        "nhead: expected a divisor of d_model=16 (or pass head_dim=",
    ),
    "width": (lambda: block("16", H), TypeError, "d_model: expected an integer, got '16'"),
    "hidden": (lambda: block(C, H, 0), ValueError, "dim_feedforward: expected an integer of at least 1, got 0"),
    "llama-width": (lambda: llama("16", H), TypeError, "d_model: expected an integer, got '16'"),
    "llama-theta": (lambda: llama(rope_theta="x"), TypeError, "rope: expected True, False, None, a theta"),
    "llama-theta-0": (lambda: llama(rope_theta=0.0), ValueError, "rope: expected a positive theta, got 0.0"),
    "llama-unknown": (
        lambda: llama(heads=3),
        TypeError,
        "heads: unknown keyword; beside those of the signature, attention takes",
    ),
    "rotary-wide": (
        lambda: attention(rope=RotaryTable(8)),
        ValueError,
        "rotary_dim: expected at most head_dim=4, got 8",
    ),
    "from-layer": (
        lambda: FusedCheckpointBlock.from_layer(5),  # type: ignore[arg-type]
        TypeError,
        "layer: expected an nn.TransformerEncoderLayer, got int",
    ),
    "no-generator": (
        lambda: block()(X, generator=5),
        TypeError,
        "generator: expected a torch.Generator or None, got 5",
    ),
    "list-mask": (lambda: block()(X, src_mask=[[0]]), TypeError, "src_mask: expected a tensor, got list"),
    "list-padding": (
        lambda: attention()(X, src_key_padding_mask=[[0]]),
        TypeError,
        "src_key_padding_mask: expected a tensor, got list",
    ),
    "sparse-mask": (
        lambda: block()(X, src_mask=torch.zeros(T, T).to_sparse()),
        TypeError,
        "src_mask: expected a dense (strided) tensor, got layout torch.sparse_coo",
    ),
    "list-bounds": (lambda: block()(X[:1], cu_seqlens=[0, T]), TypeError, "cu_seqlens: expected a tensor, got list"),
    "one-table": (
        lambda: llama()(X, rotary=torch.zeros(T, 2)),
        TypeError,
        "rotary: expected a pair of tensors, cos and sin, or None, got Tensor",
    ),
    "tables": (lambda: llama()(X, rotary=(1, 2)), TypeError, "rotary[0]: expected a tensor, got int"),
    "function-generator": (
        lambda: functional_ffn(generator=5),
        TypeError,
        "generator: expected a torch.Generator or None",
    ),
    "function-spec": (lambda: functional_ffn(spec="ffn"), TypeError, "spec: expected a BlockSpec"),
    "function-params": (lambda: functional_ffn(params=[X]), TypeError, "params: expected a mapping from slot names"),
    "function-weight": (
        lambda: functional_ffn(params={**PARAMS, "ffn.up_w": [1]}),
        TypeError,
        "params['ffn.up_w']: expected a tensor, got list",
    ),
    "explain": (lambda: ckptfused.explain(block(), 3), TypeError, "x: expected a tensor, got int"),  # type: ignore[arg-type]
    "original": (lambda: ckptfused.original(5).__enter__(), TypeError, "model: expected an nn.Module, got int"),  # type: ignore[arg-type]
    "revert": (lambda: ckptfused.revert(5), TypeError, "model: expected an nn.Module, got int"),  # type: ignore[arg-type]
    "convert": (lambda: ckptfused.convert(5), TypeError, "model: expected an nn.Module, got int"),  # type: ignore[arg-type]
    "state-like": (lambda: rng.state(3), TypeError, "like: expected a tensor, got 3"),  # type: ignore[arg-type]
    "state-generator": (lambda: rng.state(X, 3), TypeError, "generator: expected a torch.Generator or None, got 3"),  # type: ignore[arg-type]
    "mask-p": (lambda: rng.dropout_mask([4], "x", rng.state(X), 0), TypeError, "p: expected a number"),  # type: ignore[arg-type]
    "mask-state": (lambda: rng.dropout_mask([4], 0.5, X, 0), TypeError, "rng_state: expected an int64[2] tensor, got"),
    "scale-p": (lambda: rng.keep_scale(2.0), ValueError, "p: expected a number in [0, 1], got 2.0"),
}


@pytest.mark.parametrize("name", CALLS)
def test_call(name: str) -> None:
    call, error, message = CALLS[name]
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        call()


INPUTS: dict[str, tuple[Any, str]] = {
    "none": (None, "expected a tensor, got NoneType"),
    "numpy": (X.numpy(), "expected a tensor, got ndarray"),
    "sparse": (X.to_sparse(), "expected a dense (strided) tensor, got layout torch.sparse_coo"),
    "mkldnn": (mkldnn(X), "expected a dense (strided) tensor, got layout torch._mkldnn"),
}


@pytest.mark.parametrize("x", INPUTS)
@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("make", [block, attention, ffn, lambda: FusedCheckpointSequential(block())])
def test_input(make: Callable[[], Any], generic: bool, x: str) -> None:
    module = make()
    if generic:
        inner: Any = next(m for m in module.modules() if isinstance(m, nn.LayerNorm))
        inner.register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError, match=f"^src: {re.escape(INPUTS[x][1])}"):
        module(INPUTS[x][0])


@pytest.mark.parametrize("x", INPUTS)
def test_input_of_a_function(x: str) -> None:
    with pytest.raises(TypeError, match=f"^x: {re.escape(INPUTS[x][1])}"):
        functional_ffn(INPUTS[x][0])


META = torch.zeros(T, T, device="meta")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("src_mask", {"src_mask": META}),
        ("src_key_padding_mask", {"src_key_padding_mask": torch.zeros(B, T, device="meta")}),
        ("cu_seqlens", {"cu_seqlens": torch.zeros(2, dtype=torch.int32, device="meta")}),
        ("cos", {"rotary": (META[:, :2], META[:, :2])}),
    ],
)
def test_another_device(name: str, given: dict[str, Any]) -> None:
    for module in (llama(), attention(rope=True), FusedCheckpointSequential(llama())):
        with pytest.raises(ValueError, match=f"^{name}: expected x's device cpu, got meta"):
            module(X[:1] if name == "cu_seqlens" else X, **given)


@pytest.mark.parametrize("bounds", [[1, T], [0, T - 1], [0, 3, 2, T]])
@pytest.mark.parametrize("make", [llama, attention, lambda: FusedCheckpointSequential(llama())])
def test_bounds_of_sequences(make: Callable[[], Any], bounds: list[int]) -> None:
    with pytest.raises(RuntimeError, match=f"cu_seqlens: expected numbers that do not fall, from 0 to {T}, got"):
        make()(X[:1], cu_seqlens=torch.tensor(bounds))


def test_another_device_in_a_function() -> None:
    spec = llama(dropout=0.0).spec()
    params = {name: torch.zeros(shape) for name, (shape, _) in param_shapes(spec, C).items()}
    table = torch.zeros(T, 2)
    good: dict[str, Any] = {"cos": table, "sin": table}
    for name, value in {"mask": META, "padding": META[:B], "cos": META[:, :2], "sin": META[:, :2]}.items():
        with pytest.raises(ValueError, match=f"^{name}: expected x's device cpu, got meta"):
            functional.block(X, params, spec, **{**good, name: value})
    with pytest.raises(ValueError, match="^cu_seqlens: expected x's device cpu, got meta"):
        functional.block(X[:1], params, spec, **good, cu_seqlens=torch.zeros(2, dtype=torch.int32, device="meta"))


def test_numbers_of_numpy() -> None:
    made = block(np.int64(C), np.int32(H), np.int64(32), np.float32(0.1), window=np.int64(2), softcap=np.float64(3.0))
    assert made.dropout.p == float(np.float32(0.1))
    assert made.spec() == BlockSpec.parse(made.spec().to_string())
    made(X)
    spec = FFNSpec("relu", np.int64(8), p_hidden=np.float32(0.5))  # type: ignore[arg-type]
    assert BlockSpec.parse(BlockSpec(ffn=spec).to_string()).ffn == spec


@pytest.mark.parametrize("make", [block, ffn])
def test_activation_set_later(make: Callable[[], Any]) -> None:
    module = make()
    module.activation = "gelu"
    assert module.activation is F.gelu
    assert "ffn.act=gelu" in module.spec().to_string()
    with pytest.raises(ValueError, match=r"^activation: expected one of relu, .* got 'tanh'"):
        module.activation = "tanh"
    with pytest.raises(TypeError, match="^activation: expected a name or a callable, got 5"):
        module.activation = 5
    assert module.activation is F.gelu


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_fast_path_knows_the_present_activation() -> None:
    """PyTorch's own path for nested tensors in evaluation asks the layer which activation it has."""
    module = block(dropout=0.0).eval()
    module.activation = "gelu"
    x = torch.randn(1, T, C)
    with torch.no_grad():
        nested = module(torch.nested.nested_tensor([x[0]])).to_padded_tensor(0.0)
        torch.testing.assert_close(nested, module(x), rtol=1e-4, atol=1e-5)
    module.activation = F.silu
    assert module.activation_relu_or_gelu == 0
