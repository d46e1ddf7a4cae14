"""Runs every CUDA C++ kernel on small, odd sizes: what test_sanitizer puts under compute-sanitizer.

    python tests/gpu/sanitized.py [cpu]

Inputs are made on the CPU, so that few kernels but ours run. On the CPU the same calls go to its kernels, which shows
that their arguments are right.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

import ckptfused  # noqa: F401  (registers the ops)

OPS = torch.ops.ckptfused
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16

# Of rows: the type of the residual stream, the compute type, that of the norms' parameters.
Types = tuple[torch.dtype, torch.dtype, torch.dtype]
NARROW: tuple[Types, ...] = ((BF16,) * 3, (F32,) * 3)
OTHERS: tuple[Types, ...] = ((F64,) * 3, (F16,) * 3, (F32, BF16, BF16), (F32, BF16, F32))
# Several rows a block, one, one of more than 512 threads; above 16384 columns none is held in registers.
WIDTHS = {1: NARROW, 7: NARROW + OTHERS, 33: NARROW, 264: NARROW, 1024: NARROW + OTHERS, 10000: NARROW, 20000: NARROW}


class Make:
    """Tensors whose memory starts so many elements behind a multiple of 16 bytes. With 0, kernels read 16 bytes at a
    time and hold rows in registers wherever the width allows it."""

    def __init__(self, device: str, offset: int) -> None:
        self.device, self.offset = device, offset

    def __call__(self, *shape: int, kind: torch.dtype) -> Tensor:
        values = torch.randn(torch.Size(shape).numel() + self.offset).to(kind).to(self.device)[self.offset :]
        assert (values.data_ptr() % 16 == 0) == (self.offset == 0)
        return values.view(shape)

    def state(self) -> Tensor:
        return torch.tensor([3, 4]).to(self.device)


def rows(make: Make, cols: int, types: Types) -> None:
    """Norms, residuals and their backwards on 5 rows."""
    stream, compute, weights = types
    n, acc = 5, torch.float64 if compute == F64 else F32

    def wide() -> Tensor:
        return make(n, cols, kind=stream)

    def narrow() -> Tensor:
        return make(n, cols, kind=compute)

    w, b, state = make(cols, kind=weights), make(cols, kind=weights), make.state()
    for norm in ("layernorm", "rmsnorm", "gemma"):
        bias = b if norm == "layernorm" else None
        dw, db = make(3, cols, kind=acc), make(3, cols, kind=acc) if bias is not None else None
        OPS.norm_fwd(wide(), w, bias, narrow(), norm, 1e-5)
        OPS.norm_bwd(narrow(), wide(), w, wide(), wide(), dw, db, norm, 1e-5)
        OPS.residual_fwd(
            *(wide(), narrow(), state, w, bias, w, bias, wide(), narrow()),
            *(norm, 1e-5, norm, 1e-5, 0.5, 0.1, 1, []),
        )
        OPS.residual_bwd(*(wide(), narrow(), state, w, narrow(), dw, db, norm, 1e-5, 0.5, 0.1, 1, []))
        OPS.sum_grads([dw], [make(cols, kind=weights)])
    # Without a norm: kernels of their own.
    OPS.norm_bwd(narrow(), wide(), None, wide(), wide(), None, None, "none", 1e-5)
    OPS.residual_bwd(wide(), None, state, None, narrow(), None, None, "none", 1e-5, 0.5, 0.1, 1, [])


def hidden(make: Make, cols: int, dtype: torch.dtype) -> None:
    """Activations and their backwards on 5 rows."""
    state, tail = make.state(), (0.1, 2, cols, 0, 0, [])

    def new() -> Tensor:
        return make(5, cols, kind=dtype)

    for act in ("swiglu", "gelu"):
        gate, dg = new(), new() if act == "swiglu" else None
        OPS.activation_fwd(gate, new(), state, new(), act, *tail)
        OPS.activation_bwd(gate, new(), new(), state, new(), dg, new(), act, *tail)


def losses(make: Make, cols: int, dtype: torch.dtype) -> None:
    """A loss with the gradient over its logits, and the gradient alone, of 5 tokens."""
    acc = torch.float64 if dtype == F64 else F32
    loss, lse, logits = make(5, kind=acc), make(5, kind=acc), make(5, cols, kind=dtype)
    target = torch.zeros_like(loss, dtype=torch.int64)
    for softcap in (0.0, 30.0):
        how = (-100, 0.1, 1.0, softcap, 0.01)
        OPS.cross_entropy_fwd(logits, target, None, loss, lse, None, True, *how)
        OPS.cross_entropy_bwd(logits, target, None, lse, make(5, kind=acc), cols, 0, *how)


def heads(make: Make, dim: int, rope: str, dtype: torch.dtype) -> None:
    """q/k norm and RoPE of 2 sequences of 3 tokens with 3 heads."""
    acc = torch.float64 if dtype == F64 else F32

    def new() -> Tensor:
        return make(2, 3, 3, dim, kind=dtype)

    w, dw, db = make(dim, kind=dtype), make(2, dim, kind=acc), make(2, dim, kind=acc)
    cos, sin = (make(1, 3, dim // 2, kind=acc) for _ in range(2))
    for norm, weight, bias in (("none", None, None), ("rmsnorm", w, None), ("layernorm", w, w)):
        grads = (dw if weight is not None else None, db if bias is not None else None)
        OPS.qk_fwd(new(), weight, bias, cos, sin, new(), norm, 1e-5, rope, dim)
        OPS.qk_bwd(new(), new(), weight, cos, sin, new(), *grads, norm, 1e-5, rope, dim)
        # In one launch with k's heads, and v's.
        how = (norm, 1e-5, rope, dim)
        OPS.qk_fwd(new(), weight, bias, cos, sin, new(), *how, new(), weight, bias, new())
        OPS.qk_bwd(
            *(new(), new(), weight, cos, sin, new(), *grads, *how),
            *(new(), new(), weight, new(), *(torch.empty_like(g) if g is not None else None for g in grads)),
            *(new(), new()),
        )


def run(device: str) -> None:
    torch.manual_seed(0)
    for make in (Make(device, 0), Make(device, 1)):
        for cols, kinds in WIDTHS.items():
            for types in kinds:
                rows(make, cols, types)
            for dtype in dict.fromkeys(compute for _, compute, _ in kinds):
                hidden(make, cols, dtype)
                losses(make, cols, dtype)
        for dim in (2, 20, 64, 128):
            for rope in ("half", "interleaved"):
                for dtype in (BF16, F32, F64) if dim == 64 else (BF16,):
                    heads(make, dim, rope, dtype)
    state = OPS.rng_state(torch.empty(1, device=device), 0)
    for shape in ([3, 67], [5, 1], [2, 4096]):
        OPS.dropout_mask(shape, 0.1, state, 1)


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    run(device)
    if device == "cuda":
        torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
