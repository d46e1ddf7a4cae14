"""Masks with an entry for each query and key that say no more than places and keys do: causality, windows, padding.

Hugging Face makes such masks for eager attention, for windows and for padded batches. Attention that knows what they
say skips the keys that nobody sees, and such a mask does not have to last until backward.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

from ckptfused.checks import has_values, transformed
from ckptfused.compat.torch_dispatch import without_modes_and_transforms
from ckptfused.compat.torch_memory import StorageWeakRef, storage_id
from ckptfused.eager.attention import shown_by
from ckptfused.masks import Mask

LEAST_TOKENS = 256
"""Below, attention is a tile or two, whatever a mask hides."""
_MOST = 16
_ENTRIES = {"cpu": 1 << 18}
"""Entries of a mask that are looked at together: on a CPU what stays in a core's cache."""
_ENTRIES_ELSEWHERE = 1 << 26


class _Known(NamedTuple):
    storage: StorageWeakRef
    version: int
    found: Mask | None
    askers: set[int]
    """The layers that have asked since it was looked at."""


_known: OrderedDict[tuple[object, ...], _Known] = OrderedDict()


def by_place(masks: Mask, tokens: int, layer: object) -> Mask:
    """The same masks, one by places and keys alone as such: `causal`, `window` and `padding` in the place of `mask`.

    It is looked at once for all layers that are given it, and again where it was written to, or where a layer asks for
    the second time: a step later there may have been writes that PyTorch does not count. On a GPU the host waits for
    the answer. Other masks are returned as they are, and all below `LEAST_TOKENS`, under torch.compile, in a transform,
    while a CUDA graph is captured, without data, and in the memory of NumPy or of other processes.
    """
    mask = masks.mask
    if mask is None or tokens < LEAST_TOKENS or masks.padding is not None or masks.causal or masks.window:
        return masks
    one_for_all_heads = mask.dim() == 4 and (mask.size(1) == 1 or mask.stride(1) == 0)
    if not one_for_all_heads or mask.shape[-2:] != (tokens, tokens) or not _is_readable(mask):
        return masks
    storage = mask.untyped_storage()
    key = (storage_id(storage), mask.storage_offset(), mask.shape, mask.stride(), mask.dtype, masks.kind)
    known, version = _known.get(key), mask._version
    if known is None or known.version != version or known.storage.expired() or id(layer) in known.askers:
        with without_modes_and_transforms(), torch.inference_mode(False), torch.no_grad():
            found = pattern(mask.select(1, 0), masks.kind)
        known = _known[key] = _Known(StorageWeakRef(storage), version, found, set())
        while len(_known) > _MOST:
            _known.popitem(last=False)
    known.askers.add(id(layer))
    return masks if known.found is None else known.found


def _is_readable(mask: Tensor) -> bool:
    """Whether a mask may be looked at, and PyTorch counts what is written to it."""
    if torch.compiler.is_compiling() or transformed() or type(mask) is not Tensor or not has_values(mask):
        return False
    if mask.is_inference() or mask.requires_grad or mask.is_neg():
        return False
    storage = mask.untyped_storage()
    if mask.is_cuda:
        return not torch.cuda.is_current_stream_capturing()
    return storage.resizable() and not storage.is_shared()


def pattern(mask: Tensor, kind: str) -> Mask | None:
    """What a mask [B, T, T] says by place and key, None where it says more."""
    tokens = mask.size(-1)
    # A query sees itself, unless it is padding. In memory of its own: what is remembered does not keep the mask.
    real = shown_by(mask.diagonal(dim1=-2, dim2=-1), kind).clone()
    shown = real[0].nonzero()
    if len(shown) < 2:
        return None
    first, second = int(shown[0]), int(shown[1])
    causal = not bool(shown_by(mask[0, first, second], kind))
    seen = int(shown_by(mask[0, first:, first], kind).sum())
    window = 0 if seen == tokens - first else seen
    if not _is_that(mask, kind, real, causal, window):
        return None
    if bool(real.all()):
        return Mask(causal=causal, window=window)
    return Mask(padding=real, padding_kind="keep", causal=causal, window=window)


def _is_that(mask: Tensor, kind: str, real: Tensor, causal: bool, window: int) -> bool:
    """Whether a mask [B, T, T] hides other keys than the real ones, later ones and those beyond the window, and adds
    nothing to those that it shows."""
    tokens = mask.size(-1)
    rows = max(1, _ENTRIES.get(mask.device.type, _ENTRIES_ELSEWHERE) // tokens)
    for start in range(0, tokens, rows):
        part = mask[:, start : start + rows]
        by_place = torch.ones(part.shape[1:], dtype=torch.bool, device=mask.device)
        if causal:
            by_place.tril_(start)
        if window:
            by_place.triu_(start - window + 1)
            if not causal:
                by_place.tril_(start + window - 1)
        for one, keys in zip(part, real, strict=True):
            expected = by_place & keys
            if not _equal(shown_by(one, kind), expected) or (kind == "add" and not _equal(one == 0, expected)):
                return False
    return True


def _equal(a: Tensor, b: Tensor) -> bool:
    """`torch.equal` of booleans, eight at a time where that can be."""
    if a.is_contiguous() and a.size(-1) % 8 == 0 and a.storage_offset() % 8 == 0:
        a, b = a.view(torch.int64), b.view(torch.int64)
    return torch.equal(a, b)
