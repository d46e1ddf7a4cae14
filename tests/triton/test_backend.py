"""The choice of an attention kernel."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ckptfused._extension import _C
from ckptfused.spec import AttentionSpec
from ckptfused.triton.backend import AttentionShape, attention_backend
from ckptfused.triton.configs import BLOCK_D, OPTION_CLASSES, SHARED, STAGES, attention_config, block_d, device_class
from ckptfused.triton.problem import GAP
from tests import forks
from tests.forks import python

PLAIN = AttentionShape(special=(), dtype=torch.bfloat16, batch=2, heads=4, length=100, head_dim=128)
HOPPER, BLACKWELL, AMPERE, ADA = (9, 0), (10, 0), (8, 0), (8, 9)
CUDNN = 91900  # torch 2.11's


def choice(capability: tuple[int, int] = HOPPER, override: str | None = None, cudnn: int = CUDNN, **change: Any) -> str:
    name, reason = attention_backend(replace(PLAIN, **change), capability, override, cudnn)
    assert reason
    return name


@pytest.mark.parametrize(
    ("capability", "change", "expected"),
    [
        (HOPPER, {}, "cudnn"),
        (BLACKWELL, {}, "cudnn"),
        (AMPERE, {}, "flash"),
        (ADA, {}, "flash"),
        ((12, 0), {}, "flash"),
        ((7, 5), {}, "triton"),
        (HOPPER, {"dtype": torch.float16, "head_dim": 64}, "cudnn"),
        (HOPPER, {"dtype": torch.float32}, "triton"),
        (HOPPER, {"head_dim": 136}, "flash"),
        (HOPPER, {"head_dim": 256}, "flash"),
        (HOPPER, {"head_dim": 264}, "triton"),
        (HOPPER, {"head_dim": 100}, "triton"),
        (ADA, {"head_dim": 208}, "triton"),  # flash has no gradient there
        (AMPERE, {"head_dim": 208}, "flash"),
        (HOPPER, {"cudnn": 91500}, "flash"),
        (HOPPER, {"cudnn": 0}, "flash"),
        (HOPPER, {"length": 1}, "flash"),
        (HOPPER, {"length": 0}, "triton"),
        (HOPPER, {"batch": 65536}, "flash"),
        *((HOPPER, {"special": (name,)}, "triton") for name in _C.attention_special),
    ],
)
def test_choice(capability: tuple[int, int], change: dict[str, Any], expected: str) -> None:
    assert choice(capability, **change) == expected


@pytest.mark.parametrize(
    ("override", "change", "expected"),
    [
        ("triton", {}, "triton"),
        ("flash", {}, "flash"),
        ("cudnn", {"capability": AMPERE}, "cudnn"),
        ("cudnn", {"head_dim": 256}, "flash"),
        ("cudnn", {"cudnn": 0}, "flash"),
        ("cudnn", {"dtype": torch.float32}, "triton"),
        ("flash", {"special": ("masks",)}, "triton"),
        ("flash", {"length": 0}, "triton"),
        ("flash", {"capability": ADA, "head_dim": 200}, "triton"),
    ],
)
def test_what_the_environment_asks_for(override: str, change: dict[str, Any], expected: str) -> None:
    assert choice(override=override, **change) == expected


@pytest.mark.parametrize("override", [None, "cudnn"])
def test_deterministic_algorithms(override: str | None) -> None:
    """The choice follows PyTorch: cuDNN's gradient is not repeatable; with a warning it is used all the same."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert choice(override=override) == "cudnn"
    torch.use_deterministic_algorithms(True)
    assert choice(override=override) == "flash"
    assert "not repeatable" in attention_backend(PLAIN, HOPPER, override, CUDNN)[1]


@pytest.mark.parametrize(
    ("backends", "set_priority", "hopper", "ampere"),
    [
        ([SDPBackend.CUDNN_ATTENTION], False, "cudnn", "cudnn"),
        ([SDPBackend.FLASH_ATTENTION], False, "flash", "flash"),
        ([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION], False, "cudnn", "flash"),
        ([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION], True, "flash", "flash"),
        ([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], True, "cudnn", "cudnn"),
        ([SDPBackend.MATH], False, "triton", "triton"),
    ],
)
def test_what_scaled_dot_product_attention_may_use(
    backends: list[SDPBackend], set_priority: bool, hopper: str, ampere: str
) -> None:
    before = torch._C._get_sdp_priority_order()
    with sdpa_kernel(backends, set_priority=set_priority):
        settings = _C.current_settings()
        assert (choice(HOPPER), choice(AMPERE)) == (hopper, ampere)
    torch._C._set_sdp_priority_order(before)
    assert (choice(HOPPER), choice(AMPERE)) == ("cudnn", "flash")
    with _C.UnderSettings(settings):  # as a backward computes under its forward's
        assert (choice(HOPPER), choice(AMPERE)) == (hopper, ampere)
    assert torch._C._get_sdp_priority_order() == before


def test_cudnn_is_last_where_pytorch_is_told_so() -> None:
    code = (
        "import torch; from ckptfused.triton.backend import AttentionShape, attention_backend\n"
        "print(attention_backend(AttentionShape((), torch.bfloat16, 1, 1, 64, 64), (9, 0), None, 91900)[0])"
    )
    assert python(code, TORCH_CUDNN_SDPA_DEPRIORITIZED="1").stdout.strip() == "flash"


@pytest.mark.gpu
def test_the_choice_is_pytorchs_own() -> None:
    """The choice of `scaled_dot_product_attention`, where one of its kernels can do the job."""
    names = {SDPBackend.FLASH_ATTENTION.value: "flash", SDPBackend.CUDNN_ATTENTION.value: "cudnn"}
    others = []
    for head_dim, length, kv_heads in product((64, 128), (2, 100, 512), (4, 1)):  # wider: attention_gpu.cpp
        shape = replace(PLAIN, head_dim=head_dim, length=length)
        q, k, v = (
            torch.zeros(2, heads, length, head_dim, dtype=shape.dtype, device="cuda", requires_grad=True)
            for heads in (4, kv_heads, kv_heads)
        )
        its = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True)
        ours = attention_backend(shape, torch.cuda.get_device_capability(), None)[0]
        if ours != names.get(its):
            others.append((head_dim, length, kv_heads, ours, SDPBackend(its).name))
    assert not others


@pytest.mark.parametrize(
    ("change", "special"),
    [
        ({}, ()),
        ({"mask": "keep"}, ("masks",)),
        ({"padding": "drop"}, ("padding",)),
        ({"packed": True}, ("packed sequences",)),
        ({"window": 3, "softcap": 2.0}, ("window", "soft cap")),
        ({"window": 5}, ()),  # covers every key
        ({"p_attn": 0.1}, ("dropout",)),
        ({"p_attn": 1e-9}, ()),  # rounds to none
        ({"scale": 0.1}, ()),
        ({"scale": -0.1, "causal": True}, ("scale of 0 or less",)),
        ({"scale": -0.1}, ("scale of 0 or less",)),
        ({"scale": 1e-42}, ("scale of 0 or less",)),  # 0 where float32 flushes
    ],
)
def test_what_is_special_in_a_block(change: dict[str, Any], special: tuple[str, ...]) -> None:
    spec = AttentionSpec(heads=4, kv_heads=2, head_dim=16, **change)
    assert AttentionShape.of_spec(spec, torch.bfloat16, 2, 5) == AttentionShape(special, torch.bfloat16, 2, 4, 5, 16)
    if special:
        reason = attention_backend(AttentionShape.of_spec(spec, torch.bfloat16, 2, 5), HOPPER)[1]
        assert all(f"no {name}" in reason for name in special)


def test_wrong_override_is_refused() -> None:
    code = "import os; os.environ['CKPTFUSED_ATTENTION'] = 'fast'; import ckptfused.triton.backend"
    run = forks.python(code)
    assert "CKPTFUSED_ATTENTION: expected one of triton, flash, cudnn, got 'fast'" in run.stderr


def test_importing_needs_no_triton() -> None:
    """Without Triton all is registered just the same, and what needs it says so."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import importlib.util, torch\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'triton' else find(name, *rest)\n"
        "import ckptfused\n"
        "import ckptfused.triton.attention as attention, ckptfused.triton.register as register\n"
        "assert register.register_kernels() == (torch.version.cuda is not None)\n"
        "q = torch.ones(1, 1, 4, 8)\n"
        "attention.attention_fwd(q, q, q, *[None] * 4, 'none', 'none', 1.0, True, 0, 0.0, 0.0)\n"
    )
    run = forks.python(code)
    assert "attention_fwd: this call needs Triton, which is not installed" in run.stderr


def test_one_gap() -> None:
    pytest.importorskip("triton")
    from ckptfused.triton import attention_delta

    assert attention_delta.GAP.value == GAP


def test_there_is_a_tile_for_everything() -> None:
    classes = {
        (8, 0): "sm_80",
        (8, 7): "sm_80",
        (9, 0): "sm_90",
        (10, 0): "sm_100",
        (10, 3): "sm_100",
        (12, 0): "sm_120",
    }
    for capability in (*classes, (12, 1), (7, 5), (8, 6), (8, 9), (11, 0)):
        assert device_class(capability) == classes.get(capability, "sm_120" if capability[0] == 12 else "generic")
        assert device_class(capability) in SHARED
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            for head_dim in (1, 7, *BLOCK_D, 100, 192):
                for stage in STAGES:
                    for dropout, options in product((False, True), OPTION_CLASSES):
                        c = attention_config(stage, dtype, head_dim, dropout, capability, options)
                        assert c.block_n % 8 == 0 and c.block_m <= GAP
                        assert not c.piece or block_d(head_dim) % c.piece == 0
                assert block_d(head_dim) in BLOCK_D
