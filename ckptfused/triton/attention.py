"""attention_triton_fwd and attention_triton_bwd: the attention calls of a GPU that PyTorch's kernels do not do.

csrc/ops/attention_cuda.cpp chooses. Triton and the kernels' modules are imported at the first call.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .backend import has_triton
from .problem import Problem, accumulation_type, call_error, make_problem, operand

AUXILIARY = ("mask", "padding", "cu_seqlens", "rng_state")  # the first arguments of `rest`


def _problem(op: str, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Problem:
    problem = make_problem(op, q, k, v, *rest)
    if not has_triton():
        said = "this call needs Triton, which is not installed: PyTorch's kernels do not do it"
        raise call_error(op, f"{said} (ckptfused.explain says why)")
    return problem


def attention_fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The op attention_fwd.

    **Shapes** q [B, H, Tq, D]; k, v [B, G, Tk, D]. Result: o like q with memory [B, Tq, H, D]; lse [B, H, Tq],
    float32 (float64 of float64).
    **Source** Dao et al. 2022, 2023; ``F.scaled_dot_product_attention``.
    """
    a = _problem("attention_fwd", q, k, v, *rest)
    from .launch import launch_forward
    from .records import Launches

    return launch_forward(a, Launches(dict(zip(("q", "k", "v", *AUXILIARY), (q, k, v, *rest), strict=False))))


def attention_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The op attention_bwd. **Shapes** as attention_fwd; dq, dk, dv like q, k, v with memory [B, T, heads, D]."""
    op = "attention_bwd"
    a = _problem(op, q, k, v, *rest)
    for t in (do, o):
        if t.shape != q.shape or t.dtype != q.dtype or t.device != q.device:
            raise call_error(
                op,
                f"expected do and o like q, {q.dtype} {list(q.shape)} on {q.device}, got {t.dtype} {list(t.shape)} "
                f"on {t.device}",
            )
    acc = accumulation_type(q.dtype)
    if lse.shape != q.shape[:3] or lse.dtype != acc or lse.device != q.device:
        raise call_error(
            op,
            f"lse: expected {acc} {list(q.shape[:3])} on {q.device}, got {lse.dtype} {list(lse.shape)} on {lse.device}",
        )
    from .launch import launch_backward
    from .records import Launches

    tensors = dict(zip(("do", "q", "k", "v", "o", "lse", *AUXILIARY), (do, q, k, v, o, lse, *rest), strict=False))
    return launch_backward(a, operand(do), operand(o), lse.contiguous(), Launches(tensors))
