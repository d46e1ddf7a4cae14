"""Under torch.set_flush_denormal(True), which acts on the thread that calls it, results depend on no number of threads.

float16's subnormals are normal in float32, so that nothing is flushed of them. Those of float32 and bfloat16 are, on
every thread that takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from ckptfused.functional import ffn_block
from ckptfused.spec import Adapter, BlockSpec, FFNSpec, param_shapes

OPS = torch.ops.ckptfused
TINY = {torch.float16: 3e-6, torch.bfloat16: 1e-39, torch.float32: 1e-39}
N, C = 3000, 64  # rows enough for two threads in every kernel


@pytest.fixture(autouse=True)
def _flushed() -> Iterator[None]:
    """Flushed here, not in the worker, which started before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    OPS.norm_fwd(torch.ones(N, C), None, None, torch.empty(N, C), "rmsnorm", 1e-5)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)


def _tiny(dtype: torch.dtype, *shape: int) -> Tensor:
    sign = torch.where(torch.arange(shape[-1]) % 3 == 0, -1.0, 1.0)
    return torch.full(shape, TINY[dtype], dtype=torch.float64).mul(sign).to(dtype)


def _norm(dtype: torch.dtype) -> list[Tensor]:
    x, y, dx, dw = _tiny(dtype, N, C), *(torch.empty(N, C, dtype=dtype) for _ in range(2)), torch.empty(1, C)
    OPS.norm_fwd(x, None, None, y, "rmsnorm", 1e-12)
    OPS.norm_bwd(x, x, torch.ones(C), None, dx, dw, None, "rmsnorm", 1e-12)
    return [y, dx, dw]


def _residual(dtype: torch.dtype) -> list[Tensor]:
    x, total, normed = _tiny(dtype, N, C), *(torch.empty(N, C, dtype=dtype) for _ in range(2))
    OPS.residual_fwd(x, x, None, None, None, None, None, total, normed, "none", 0.0, "rmsnorm", 1e-12, 2.0, 0.0, 1, [])
    return [total, normed]


def _activation(dtype: torch.dtype) -> list[Tensor]:
    g, u, h = torch.full((N, C), 4.0).to(dtype), _tiny(dtype, N, C), torch.empty(N, C, dtype=dtype)
    OPS.activation_fwd(g, u, None, h, "swiglu", 0.0, 2, C, 0, 0, [])
    return [h]


def _rope(dtype: torch.dtype) -> list[Tensor]:
    x, y = _tiny(dtype, 1, N, 2, C), torch.empty(1, N, 2, C, dtype=dtype)
    angle = torch.full((1, N, C // 2), 1.0)
    OPS.qk_fwd(x, None, None, angle.cos(), angle.sin(), y, "none", 0.0, "half", C)
    return [y]


def _attention(dtype: torch.dtype) -> list[Tensor]:
    q, v = torch.ones(1, 4, 300, 16).to(dtype), _tiny(dtype, 1, 4, 300, 16)
    how = (torch.ones(300, 300, dtype=torch.bool), None, None, None, "keep", "none", 0.1, False, 0, 0.0, 0.0)
    o, lse = OPS.attention_fwd(q, q, v, *how)
    return [o, lse, *OPS.attention_bwd(v, q, q, v, o, lse, *how)]


def _adapters(dtype: torch.dtype) -> list[Tensor]:
    spec = BlockSpec(ffn=FFNSpec("relu", 32, lora=(Adapter("up", 4),)))
    params = {name: torch.ones(shape).to(dtype) for name, (shape, _) in param_shapes(spec, C).items()}
    params["ffn.up_w"].zero_()
    return [ffn_block(_tiny(dtype, 1, N, C), params, spec)]


WORK: dict[str, Callable[[torch.dtype], list[Tensor]]] = {
    "norm": _norm,
    "residual": _residual,
    "activation": _activation,
    "rope": _rope,
    "attention": _attention,
    "adapters": _adapters,
}


@pytest.mark.parametrize("dtype", TINY, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("stem", WORK)
def test_threads_change_no_bit(stem: str, dtype: torch.dtype) -> None:
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(WORK[stem](dtype))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("stem", WORK)
def test_nothing_of_float16_is_lost(stem: str) -> None:
    torch.set_num_threads(2)
    flushed = WORK[stem](torch.float16)
    torch.set_flush_denormal(False)
    kept = WORK[stem](torch.float16)
    torch.set_flush_denormal(True)
    assert kept[0].any()
    for got, expected in zip(flushed, kept, strict=True):
        assert torch.equal(got, expected)


def test_a_norm_of_subnormals() -> None:
    x, y = torch.full((N, C), 3e-6, dtype=torch.float16), torch.empty(N, C, dtype=torch.float16)
    OPS.norm_fwd(x, None, None, y, "rmsnorm", 1e-12)
    torch.testing.assert_close(y, torch.full_like(y, 0.948), atol=1e-3, rtol=0)
