"""attention_fwd and attention_bwd for CUDA tensors: PyTorch's kernels where they do the job, else ours.

Triton and the kernels' modules are imported at the first call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backend import Shape, attention_backend, backward_backend, has_triton
from .problem import Problem, accumulation_type, expect, make_problem, operand


def _backend(op: str, a: Problem) -> str:
    name, reason = attention_backend(Shape.of(a), torch.cuda.get_device_capability(a.q.device))
    expect(name != "triton" or has_triton(), op, f"this call needs Triton, which is not installed ({reason})")
    return name


def attention_fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The op attention_fwd.

    **Shapes** q [B, H, Tq, D]; k, v [B, G, Tk, D]. Result: o like q with memory [B, Tq, H, D]; lse [B, H, Tq],
    float32 (float64 of float64).
    **Source** Dao et al. 2022, 2023; ``F.scaled_dot_product_attention``.
    """
    with torch._C._AutoDispatchBelowAutograd(), torch.cuda.device(q.device):
        a = make_problem("attention_fwd", q, k, v, *rest)
        backend = _backend("attention_fwd", a)
        if backend == "triton":
            from .launch import launch_forward

            return launch_forward(a)
        o, lse = (_flash_fwd if backend == "flash" else _cudnn_fwd)(a)
        return _rows(o), lse.reshape(a.q.shape[:3]).contiguous()


def attention_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The op attention_bwd. **Shapes** as attention_fwd; dq, dk, dv like q, k, v with memory [B, T, heads, D]."""
    op = "attention_bwd"
    with torch._C._AutoDispatchBelowAutograd(), torch.cuda.device(q.device):
        a = make_problem(op, q, k, v, *rest)
        for t in (do, o):
            expect(
                t.shape == q.shape and t.dtype == q.dtype and t.device == q.device,
                op,
                f"expected do and o like q, {q.dtype} {list(q.shape)} on {q.device}, got {t.dtype} {list(t.shape)} "
                f"on {t.device}",
            )
        acc = accumulation_type(q.dtype)
        expect(
            lse.shape == q.shape[:3] and lse.dtype == acc and lse.device == q.device,
            op,
            f"lse: expected {acc} {list(q.shape[:3])} on {q.device}, got {lse.dtype} {list(lse.shape)} on {lse.device}",
        )
        do, o, lse = operand(do), operand(o), lse.contiguous()
        backend = backward_backend(_backend(op, a))
        if backend == "triton":
            from .launch import launch_backward

            return launch_backward(a, do, o, lse)
        dq, dk, dv = (_flash_bwd if backend == "flash" else _cudnn_bwd)(a, do, o, lse)
        return _rows(dq), _rows(dk), _rows(dv)


def _rows(t: Tensor) -> Tensor:
    """t [B, heads, T, D] with memory [B, T, heads, D]: itself if it has that already."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _no_state(like: Tensor) -> Tensor:
    """In place of the random state: without dropout the kernels do not read it."""
    return torch.zeros((2,), dtype=torch.uint64, device=like.device)


def _flash_fwd(a: Problem) -> tuple[Tensor, Tensor]:
    o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(a.q, a.k, a.v, 0.0, a.causal, scale=a.scale)
    return o, lse


def _flash_bwd(a: Problem, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Repeatable under torch.use_deterministic_algorithms: the op looks at the setting itself.
    state = _no_state(a.q)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        do, a.q, a.k, a.v, o, lse, None, None, a.q.shape[2], a.k.shape[2], 0.0, a.causal, state, state, scale=a.scale
    )


def _cudnn_fwd(a: Problem) -> tuple[Tensor, Tensor]:
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        a.q, a.k, a.v, None, True, 0.0, a.causal, False, scale=a.scale
    )
    return o, lse


def _cudnn_bwd(a: Problem, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    state = torch.zeros((), dtype=torch.int64, device=a.q.device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        do, a.q, a.k, a.v, o, lse.unsqueeze(-1), state, state, None, None, None, a.q.shape[2], a.k.shape[2], 0.0,
        a.causal, scale=a.scale,
    )  # fmt: skip
