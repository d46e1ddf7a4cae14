"""FlashAttention as transformers calls it: what a recording has in its place, and where its sequences are packed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptfused.compat.patches import instead, patched_attribute
from ckptfused.compat.transformers import FLASH_CALL, FLASH_TYPE, attention_implementation, flash_module
from ckptfused.eager.attention import position_mask, sink_logits
from ckptfused.layer.parts import Reason
from ckptfused.models.derive.recording.recorder import RefusedError
from ckptfused.models.hugging_face import FLASH, FLASH_WITH_SINKS, packed_bounds

_ELSEWHERE = ("cache", "block_table", "position_bias")
"""Arguments with which the kernels compute something else than softmax(QKᵀ)V: paged caches."""


@contextmanager
def spelled_out() -> Iterator[None]:
    """A context in which, for this thread, transformers' call of FlashAttention's kernels is what they compute in
    PyTorch's functions: no kernel takes tensors without data, or float64.
    """
    with ExitStack() as patches:
        if (module := flash_module()) is not None:
            patches.enter_context(patched_attribute(module, FLASH_CALL, instead(_attention)))
            patches.enter_context(patched_attribute(module, FLASH_TYPE, instead(lambda *_: None)))
        yield


def runs_flash(layer: nn.Module) -> bool:
    """Whether a layer's configuration asks for FlashAttention."""
    configs = (getattr(module, "config", None) for module in layer.modules())
    return any(attention_implementation(config) in FLASH for config in configs)


def packed(layer: nn.Module, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | Reason | None:
    """The bounds of the sequences that FlashAttention finds packed in a call without a mask; None: each row is one."""
    names = list(inspect.signature(type(layer).forward).parameters)[1:]
    return packed_bounds(x, {**dict(zip(names, args, strict=False)), **kwargs})


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    query_length: int,
    is_causal: bool,
    dropout: float = 0.0,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attn_implementation: str = "",
    **others: Any,
) -> Tensor:
    """What the kernels compute. **Shapes** query [B, T, H, D], key, value [B, T, G, D], attention_mask [B, T],
    s_aux [H]: sinks, which some kernels leave out.
    """
    if s_aux is not None and attn_implementation not in FLASH_WITH_SINKS:
        raise RefusedError(f"flash attention with sinks (s_aux) by {attn_implementation}, which may have none")
    if found := [name for name in _ELSEWHERE if others.get(name) is not None]:
        raise RefusedError(f"flash attention with {found[0]}")
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    shape = (*k.shape[:2], q.shape[1] // k.shape[1], *k.shape[2:])
    k, v = (t[:, :, None].expand(shape).reshape(q.shape[0], q.shape[1], *t.shape[2:]) for t in (k, v))
    logits = torch.matmul(q, k.transpose(2, 3)) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    hides = torch.finfo(logits.dtype).min
    if is_causal or sliding_window:
        sees = position_mask(query_length, k.shape[2], is_causal, sliding_window or 0, q.device)
        logits = logits.masked_fill(~sees, hides)
    if attention_mask is not None:
        logits = logits.masked_fill(~attention_mask[:, None, None, :], hides)
    if s_aux is not None:
        logits = torch.cat((logits, sink_logits(s_aux, logits)), -1)
    probs = torch.softmax(logits, -1)
    probs = F.dropout(probs if s_aux is None else probs[..., :-1], dropout)
    return torch.matmul(probs, v).transpose(1, 2)
