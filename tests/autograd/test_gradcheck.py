"""Every gradient against finite differences in float64: halves and block, with dropout, each keep preset."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import AXES, Case, by_turns
from tests.devices import on_devices, repeatable
from tests.oracle import Inputs, fused, make_inputs

SMALL = {"width": 4, "hidden": 3, "head_dim": 4, "tokens": 4, "batch": 2}

BLOCKS = {
    "encoder": Case(**SMALL, act="relu", layout="post", bias="all", weights="joint", mask="pad-drop", seq_first=True),
    "llama": Case(**SMALL, act="swiglu", norm="rmsnorm", rope="half", heads="4/2", mask="causal"),
    "gemma": Case(
        **SMALL,
        act="geglu_tanh",
        layout="sandwich",
        norm="gemma",
        rope="half-partial",
        qk_norm="gemma",
        heads="3/1",
        mask="causal",
        window=3,
        softcap=5.0,
        scale=0.3,
    ),
    "neox": Case(
        **SMALL, act="gelu", layout="parallel", rope="half-partial", weights="interleaved", bias="all", mask="add2d"
    ),
    "gpt-j": Case(**SMALL, act="quick_gelu", layout="parallel", rope="interleaved", mask="causal"),
    "shared": Case(**SMALL, act="silu", layout="shared", qk_norm="layernorm", transposed=True, m=0.5, mask="keep4d"),
    "both norms": Case(**SMALL, act="relu2", layout="pre+out", qk_norm="rmsnorm", bias="qkv"),
    "packed": Case(**SMALL | {"batch": 1, "tokens": 8}, act="reglu", norm="layernorm-nobias", mask="packed-causal"),
    "adapters": Case(**SMALL, act="swiglu", norm="rmsnorm", rope="half", mask="causal", bias="all", lora="twice"),
    "joint adapters": Case(
        **SMALL, act="geglu", layout="sandwich", weights="interleaved", transposed=True, seq_first=True, lora="drop"
    ),
    "attention": Case(**SMALL, layout="attn", rope="half", heads="4/2", mask="causal", bias="all"),
    "ffn": Case(**SMALL, layout="ffn", act="quick_geglu", weights="joint", bias="all", m=0.5),
    "mlp": Case(**SMALL, layout="mlp", act="swiglu", bias="all", lora="all"),
    "mlp with a norm": Case(**SMALL, layout="normed-mlp", act="gelu", norm="rmsnorm"),
}


def _check(case: Case, device: str, fast: bool = False, check: Any = torch.autograd.gradcheck) -> None:
    repeatable(device)  # gradcheck asks for the same gradient twice
    inputs, spec = make_inputs(case, device=device), case.spec()
    function = fused(spec)
    names = list(inputs.params)

    def call(x: Tensor, *params: Tensor) -> Tensor:
        return function(Inputs(x, dict(zip(names, params, strict=True)), inputs.aux, inputs.dy))

    tensors = [t.requires_grad_() for t in (inputs.x, *inputs.params.values())]
    assert check(call, tensors, fast_mode=fast)


@on_devices
@pytest.mark.parametrize(("name", "drop"), by_turns(BLOCKS, ["all", "0"]))
def test_variants(name: str, drop: str, device: str) -> None:
    case = BLOCKS[name]
    _check(Case(**{**vars(case), "drop": drop}), device)


@on_devices
@pytest.mark.parametrize("keep", AXES["keep"])
@pytest.mark.parametrize("name", ["llama", "gemma", "encoder", "adapters", "attention", "ffn"])
def test_keep_presets_with_dropout(name: str, keep: str, device: str) -> None:
    """Along random directions: test_keep shows that presets are equal bit for bit."""
    case = BLOCKS[name]
    _check(Case(**{**vars(case), "drop": "all", "keep": keep}), device, fast=True)


@on_devices
@pytest.mark.parametrize(("name", "drop"), by_turns(BLOCKS, ["0", "all"]))
def test_second_order(name: str, drop: str, device: str) -> None:
    """The gradients' own gradients, by x, by every parameter and by what comes back into the block."""
    case = BLOCKS[name]
    _check(Case(**{**vars(case), "drop": drop}), device, fast=True, check=torch.autograd.gradgradcheck)
