"""torch.library.opcheck on every op: schema, autograd registration, fake kernel, AOT with dynamic shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ckptfused import rng
from ckptfused.spec import AUX_NAMES, BlockSpec, param_names
from tests.cases import Case
from tests.devices import on_devices
from tests.oracle import make_inputs

OPS = torch.ops.ckptfused
BLOCKS = [
    ("block", Case(act="swiglu", norm="rmsnorm", rope="half", heads="4/2", mask="causal", drop="all", keep="inputs")),
    ("block", Case(act="gelu", layout="post", bias="all", mask="keep4d", keep="all", seq_first=True, batch=2)),
    ("attention_block", Case(layout="attn", qk_norm="rmsnorm", drop="all", keep="attention")),
    ("ffn_block", Case(layout="ffn", act="geglu", weights="joint", keep="all")),
    ("ffn_block", Case(layout="mlp")),
    ("block", Case(act="swiglu", mask="causal", bias="all", lora="all")),
]


def block_args(case: Case, device: str) -> tuple[Tensor, list[Any], list[Any], BlockSpec]:
    inputs, spec = make_inputs(case, torch.float32, device=device), case.spec()
    params = [inputs.params.get(name) for name in param_names(spec)]
    params = [p if p is None else p.detach().requires_grad_() for p in params]
    aux = [inputs.aux.get(name) for name in AUX_NAMES]
    return inputs.x.detach().requires_grad_(), params, aux, spec


def detached(params: list[Any]) -> list[Any]:
    return [p if p is None else p.detach() for p in params]


@on_devices
@pytest.mark.parametrize(("name", "case"), BLOCKS, ids=lambda v: v if isinstance(v, str) else v.id)
def test_block(name: str, case: Case, device: str) -> None:
    x, params, aux, spec = block_args(case, device)
    checks = None
    if spec.has_dropout:  # two runs draw two masks: the comparing check has nothing to compare
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    args = (x, params, aux, spec.to_string())
    torch.library.opcheck(getattr(OPS, name), args, **({"test_utils": checks} if checks else {}))


@on_devices
@pytest.mark.parametrize(("name", "case"), BLOCKS, ids=lambda v: v if isinstance(v, str) else v.id)
def test_block_fwd_and_bwd(name: str, case: Case, device: str) -> None:
    x, params, aux, spec = block_args(case, device)
    state = rng.state(x) if spec.has_dropout else None
    forward = (x.detach(), detached(params), aux, state, spec.to_string(), True)
    torch.library.opcheck(getattr(OPS, f"{name}_fwd"), forward)
    y, *kept = getattr(OPS, f"{name}_fwd")(*forward)
    needs = [True, *(p is not None for p in params)]
    backward = (torch.randn_like(y), x.detach(), detached(params), aux, kept, state, spec.to_string(), needs)
    torch.library.opcheck(getattr(OPS, f"{name}_bwd"), backward)


def empty(*shape: int) -> Tensor:
    return torch.empty(shape)


def small_op_args() -> dict[str, tuple[Any, ...]]:
    """One call of every small op. Outputs that the op writes are last among the tensors."""
    n, c, f, (b, h, g, t, d) = 6, 16, 24, (1, 4, 2, 6, 8)
    x, w, state = torch.randn(n, c), torch.randn(c), torch.tensor([3, 0])
    q, k = torch.randn(b, h, t, d), torch.randn(b, g, t, d)
    angles = torch.randn(1, t, d // 2)
    how = (None, None, None, state, "none", "none", 0.3, True, 0, 0.0, 0.2)
    o, lse = OPS.attention_fwd(q, k, k, *how)
    rows = torch.randn(b, t, h, d)
    return {
        "norm_fwd": (x, w, w, empty(n, c), "layernorm", 1e-5),
        "norm_bwd": (x, x + 1, w, x - 1, empty(n, c), empty(2, c), empty(2, c), "layernorm", 1e-5),
        "sum_grads": ([x, x + 1], [w.clone(), w.bfloat16()]),
        "residual_fwd": (
            *(x, x + 1, state, w, None, w, None, empty(n, c), empty(n, c)),
            *("rmsnorm", 1e-5, "gemma", 1e-5, 0.5, 0.1, 1, []),
        ),
        "residual_bwd": (x, x + 1, state, w, empty(n, c), empty(3, c), None, "rmsnorm", 1e-5, 0.5, 0.1, 1, []),
        "activation_fwd": (
            *(torch.randn(n, f), torch.randn(n, f), state, empty(n, f)),
            *("swiglu", 0.1, 2, f, 0, 0, []),
        ),
        "activation_bwd": (
            *(torch.randn(n, f), torch.randn(n, f), torch.randn(n, f), state, empty(n, f), empty(n, f), empty(n, f)),
            *("swiglu", 0.1, 2, f, 0, 0, []),
        ),
        "activation_bwd by coefficients": (
            *(torch.randn(n, f), torch.randn(n, f), torch.randn(n, f), None, empty(n, f), None, empty(n, f)),
            *("xielu", 0.0, 2, f, 0, 0, [], torch.tensor([0.8, 1.0, 0.5, -0.1]), torch.zeros(n, 4)),
        ),
        "qk_fwd": (
            *(rows, w[:d], None, angles.cos(), angles.sin(), empty(b, t, h, d), "rmsnorm", 1e-5, "half", d),
            *(rows[:, :, :1] - 1, w[:d] + 1, None, empty(b, t, 1, d)),
        ),
        "qk_bwd": (
            *(rows + 1, rows, w[:d], angles.cos(), angles.sin(), empty(b, t, h, d), empty(1, d), None),
            *("rmsnorm", 1e-5, "half", d),
            *(rows[:, :, :1] - 1, rows[:, :, 1:2], w[:d] + 1, empty(b, t, 1, d), empty(2, d), None),
            *(rows[:, :, :1] + 3, empty(b, t, 1, d)),
        ),
        "attention_fwd": (q, k, k, *how),
        "attention_bwd": (torch.randn(b, h, t, d), q, k, k, o, lse, *how),
        "attention_tile_fwd": (q[:, :, 1:4], k, k, *how, [0, 1, t]),
        "attention_tile_bwd": (
            *(torch.randn(b, h, 3, d), q[:, :, 1:4], k, k, o[:, :, 1:4], lse[:, :, 1:4]),
            *(torch.zeros(b, g, t, d), torch.zeros(b, g, t, d), *how, [0, 1, t]),
        ),
        "cross_entropy_fwd": (
            *(torch.randn(n, c), torch.arange(n), None, empty(n), empty(n), torch.empty(n, dtype=torch.int64)),
            *(True, -100, 0.1, 1.0, 30.0, 0.01),
        ),
        "cross_entropy_bwd": (
            *(torch.randn(n, c), torch.arange(n), torch.ones(2 * c + 1), torch.randn(n), torch.randn(n)),
            *(2 * c, 5, -100, 0.1, 1.0, 30.0, 0.01),
        ),
        "dropout_mask": ([2, 3, 20], 0.3, state, 1),
        "rng_state": (x, 0),
        "copy_on_write": ([x[1:].detach().requires_grad_(), x.detach()],),
    }


@on_devices
@pytest.mark.parametrize("name", list(small_op_args()) if hasattr(OPS, "norm_fwd") else [])
def test_small_op(name: str, device: str) -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    if device == "cuda" and name.startswith("attention_tile"):
        pytest.skip("a block goes by tiles of queries on the CPU alone")
    if name == "rng_state":  # draws anew at every call
        checks = checks[:3]
    with torch.device(device):
        args = small_op_args()[name]
    torch.library.opcheck(getattr(OPS, name.split()[0]), args, test_utils=checks)


def test_the_guard_of_copies_is_the_cpus() -> None:
    """The tensor that ends a sharing has no memory, on a GPU neither."""
    with FakeTensorMode():
        _, guard = OPS.copy_on_write([torch.empty(2, 3, device="cuda")])
    assert guard.device.type == "cpu"


def test_every_op_is_checked() -> None:
    names = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("ckptfused::")
    }
    blocks = {f"{family}{way}" for family in ("block", "attention_block", "ffn_block") for way in ("", "_fwd", "_bwd")}
    of_triton = {
        "ffn_choice",
        "ffn_up_fwd",
        "ffn_up_bwd",
        "attention_triton_fwd",
        "attention_triton_bwd",
    }  # no kernel for the CPU: tests/triton/interpreted
    of_loss = {f"linear_cross_entropy{way}" for way in ("", "_fwd", "_bwd")}  # tests/loss
    of_experts = {f"experts{way}" for way in ("", "_fwd", "_bwd")}  # tests/ops/test_experts.py
    of_norm = {"norm", "norm_grads"}  # tests/ops/test_norm.py
    others = {"grad_chunks", "dequantize"}  # the first makes a number, the other has tests/ops/test_quantized.py
    assert (
        names
        == blocks | {name.split()[0] for name in small_op_args()} | of_triton | of_loss | of_experts | of_norm | others
    )
