"""Runs every CUDA C++ kernel once on small, odd sizes: what test_sanitizer puts under compute-sanitizer.

Inputs are made on the CPU, so that few kernels but ours run.
"""

from __future__ import annotations

import torch
from torch import Tensor

import ckptfused  # noqa: F401  (registers the ops)

OPS = torch.ops.ckptfused


def rows(cols: int, dtype: torch.dtype) -> None:
    """Norms, residuals and their backwards on 5 rows whose memory starts one element off a 16-byte boundary."""

    def new(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(torch.Size(shape).numel() + 1).to(kind).cuda()[1:].view(shape)

    acc = torch.float32
    n, w, b = 5, new(cols), new(cols)
    state = torch.tensor([3, 4]).cuda()
    for norm in ("layernorm", "rmsnorm", "gemma"):
        bias = b if norm == "layernorm" else None
        dw, db = new(cols, kind=acc), new(cols, kind=acc) if bias is not None else None
        OPS.norm_fwd(new(n, cols), w, bias, new(n, cols), norm, 1e-5)
        OPS.norm_bwd(new(n, cols), new(n, cols), w, new(n, cols), new(n, cols), dw, db, norm, 1e-5)
        OPS.residual_fwd(
            *(new(n, cols), new(n, cols), state, w, bias, w, bias, new(n, cols), new(n, cols)),
            *(norm, 1e-5, norm, 1e-5, 0.5, 0.1, 1, []),
        )
        OPS.residual_bwd(
            *(new(n, cols), new(n, cols), state, w, new(n, cols), dw, db, norm, 1e-5, 0.5, 0.1, 1, []),
        )
    for act in ("swiglu", "gelu"):
        gate = new(n, cols)
        dg = new(n, cols) if act == "swiglu" else None
        OPS.activation_fwd(gate, new(n, cols), state, new(n, cols), act, 0.1, 2, cols, 0, 0, [])
        OPS.activation_bwd(
            *(gate, new(n, cols), new(n, cols), state, new(n, cols), dg, new(n, cols), act, 0.1, 2, cols, 0, 0, [])
        )


def heads(dim: int, rope: str, dtype: torch.dtype) -> None:
    """q/k norm and RoPE of 2 sequences of 3 tokens with 3 heads."""
    shape = (2, 3, 3, dim)
    x, y = torch.randn(shape).to(dtype).cuda(), torch.randn(shape).to(dtype).cuda()
    w, dw = torch.randn(dim).to(dtype).cuda(), torch.randn(dim).cuda()
    cos, sin = torch.randn(1, 3, dim // 2).cuda(), torch.randn(1, 3, dim // 2).cuda()
    for norm, weight, grad in (("none", None, None), ("rmsnorm", w, dw)):
        OPS.qk_fwd(x, weight, None, cos, sin, y, norm, 1e-5, rope, dim)
        OPS.qk_bwd(x, y, weight, cos, sin, torch.randn(shape).to(dtype).cuda(), grad, None, norm, 1e-5, rope, dim)


def main() -> None:
    torch.manual_seed(0)
    for cols in (1, 7, 33, 257, 1024, 4096, 20000):
        for dtype in (torch.float32, torch.bfloat16) if cols < 4096 else (torch.bfloat16,):
            rows(cols, dtype)
    for dim in (2, 20, 64, 128):
        for rope in ("half", "interleaved"):
            heads(dim, rope, torch.bfloat16)
    state = OPS.rng_state(torch.empty(1, device="cuda"), 0)
    for shape in ([3, 67], [5, 1], [2, 4096]):
        OPS.dropout_mask(shape, 0.1, state, 1)
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
