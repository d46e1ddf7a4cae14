"""What attention on a GPU allocates beside its results, and how many kernels it launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckptfused._extension import _C
from ckptfused.spec import AttentionSpec
from ckptfused.triton.backend import AttentionShape, attention_backend, capability_at_hand
from ckptfused.triton.problem import accumulation_type, backward_rows


def multiprocessors() -> int:
    """Number of multiprocessors of the GPU at hand; without one, of an H100."""
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 132


def attention_cost(
    a: AttentionSpec, dtype: torch.dtype, batch: int, length: int, lengths: Sequence[int] | None, backward: bool
) -> tuple[int, int]:
    """Bytes of scratch, and launches, of a block's call in this compute type on the GPU at hand (without one: a H100).

    The kernels of PyTorch's flash attention are counted as in flash_api.cpp. cuDNN's backward starts as many, by what
    profilers show on sm_90: compute_dot_do_o, flash_bprop, convert_dq and, where query heads share keys,
    fmha_reduce_head for dk and for dv.
    """
    name = attention_backend(AttentionShape.of_spec(a, dtype, batch, length), capability_at_hand())[0]
    if not backward:
        return 0, 3 if name == "triton" and a.packed else 1  # o and lse are filled first
    if name == "triton":
        sequences = len(lengths or (length,) * batch)
        scratch = 2 * accumulation_type(dtype).itemsize * backward_rows(a.heads, batch * length, sequences)
        return scratch, 6 if a.packed else 3  # delta, dk with dv, dq; the three are zeroed first
    groups = a.kv_heads != a.heads
    scratch = (_flash_scratch if name == "flash" else _cudnn_scratch)(a, batch, length)
    return scratch, 3 + 2 * groups  # do·o, the gradients, dq; sums over query heads


def _cudnn_scratch(a: AttentionSpec, batch: int, length: int) -> int:
    """Scratch bytes of cuDNN's backward, as its frontend asks for them (scaled_dot_product_flash_attention.h): dq and
    the sums of do·o in float32, and under GQA the gradients of k and v by query head. What its plan adds nobody
    publishes."""
    by_query_head = 2 * 2 * batch * length * a.q_width  # half precision
    return 4 * batch * a.heads * length * (a.head_dim + 1) + (by_query_head if a.kv_heads != a.heads else 0)


def _flash_scratch(a: AttentionSpec, batch: int, length: int) -> int:
    """Scratch bytes of FlashAttention-2's backward in PyTorch: flash_gpu_scratch of csrc/ops/attention_gpu.h."""
    return _C.flash_gpu_scratch((batch, a.heads, a.kv_heads, length, length, a.head_dim), multiprocessors())
