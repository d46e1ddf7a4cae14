"""Gives the ops that Triton makes their CUDA kernels. Triton itself is imported at the first call of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention import attention_bwd, attention_fwd
from .tuning import ffn_choice

_library: torch.library.Library | None = None


def _ffn_choice(like: Tensor, dtype: torch.dtype, n: int, c: int, f: int, act: str) -> str:
    return ffn_choice(n, c, f, act, dtype, like.device)[0]


def _ffn_up_fwd(*args: Any, **options: Any) -> None:
    from ckptfused.triton.ffn.launch import ffn_up_fwd

    ffn_up_fwd(*args, **options)


def _ffn_up_bwd(*args: Any, **options: Any) -> None:
    from ckptfused.triton.ffn.launch import ffn_up_bwd

    ffn_up_bwd(*args, **options)


def register_kernels() -> bool:
    """Register them, once; False where PyTorch has no CUDA.

    Without Triton the attention ops say that they need it.
    """
    global _library
    if _library is None and torch.version.cuda is not None:
        _library = torch.library.Library("ckptfused", "IMPL")
        _library.impl("attention_triton_fwd", attention_fwd, "CUDA")
        _library.impl("attention_triton_bwd", attention_bwd, "CUDA")
        _library.impl("ffn_choice", _ffn_choice, "CUDA")  # cuBLAS where there is no Triton
        _library.impl("ffn_up_fwd", _ffn_up_fwd, "CUDA")
        _library.impl("ffn_up_bwd", _ffn_up_bwd, "CUDA")
    return _library is not None
