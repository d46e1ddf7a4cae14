"""What is put in the place of functions that do not run on meta tensors as they do on real ones."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from ckptfused.convert.stand_ins import flash_attention, grouped_mm
from ckptfused.layer.sdpa import COUNTED
from ckptfused.modules import rotary
from ckptfused.policy.work import Work
from ckptfused.spec import AttentionSpec
from ckptfused.triton.attention_cost import attention_cost


@contextlib.contextmanager
def functions_for_meta(device: str, work: Work) -> Iterator[None]:
    """A model on the meta device runs within it as it does on a device of this kind, as far as memory goes."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if device == "cpu" and dropout_p > 0:  # no flash kernel there draws
            materialised = torch.ops.aten._scaled_dot_product_attention_math
            options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            return materialised(query, key, value, attn_mask, **options)[0]
        # PyTorch adds a mask of booleans as numbers: each call has a copy of its own.
        bias = attn_mask.to(query.dtype) if attn_mask is not None and attn_mask.dtype == torch.bool else attn_mask
        scratch = _scratch(query, key, is_causal) if device == "cuda" else 0
        return flash_attention(query, key, value, bias, scratch, work.attention(is_causal))

    setattr(attention, COUNTED, True)
    tables: dict[Any, Any] = {}
    computed = rotary._computed

    def table(key: Any, length: int, like: Tensor) -> Any:  # blocks of a process share one on a device
        if (key, length) not in tables:
            tables[key, length] = computed(key, length, like)
        return tables[key, length]

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(rotary, "_computed", table))
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention))
        stack.enter_context(mock.patch.object(F, "grouped_mm", partial(grouped_mm, noted=work.grouped), create=True))
        masking: Any = sys.modules.get("transformers.masking_utils")
        if hasattr(masking, "find_packed_sequence_indices"):
            # It looks at the positions, which are those of whole sequences.
            stack.enter_context(mock.patch.object(masking, "find_packed_sequence_indices", return_value=None))
        yield


def _scratch(query: Tensor, key: Tensor, causal: bool) -> int:
    """Of the backward of PyTorch's attention on a GPU."""
    if query.dim() != 4 or query.size(-1) > 256:
        return 0
    batch, heads, length, width = query.shape
    spec = AttentionSpec(heads, key.size(1), width, causal=causal)
    return attention_cost(spec, query.dtype, batch, length, None, backward=True)[0]
