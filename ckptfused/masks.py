"""Masks of every convention, normalised once into one `Mask`.

Only views are made, never a copy: what a block saves for backward is the caller's own tensor.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch import bool as torch_bool

from ckptfused.spec.checks import check_flag

__all__ = ["NO_MASK", "Mask", "encoder_mask", "sdpa_mask"]


class Mask(NamedTuple):
    """What may attend to what.

    `mask` is a 4-d view broadcastable to [B, H, T, T], `padding` is [B, T]; their kinds are "none", "keep"
    (bool, True may be attended to), "drop" (bool, True may not) or "add" (floating, added to the logits; -5e8 or
    less, in float16 its lowest, hides as -inf does, so a row of such values sees nothing and gives zeros).
    With `window` key j is visible where i - j < window, and j - i too where it is not `causal`.
    """

    mask: Tensor | None = None
    kind: str = "none"
    padding: Tensor | None = None
    padding_kind: str = "none"
    causal: bool = False
    window: int = 0


NO_MASK = Mask()


def _kind(name: str, mask: Tensor, bool_kind: str) -> str:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(mask).__name__}")
    if mask.dtype == torch_bool:
        return bool_kind
    if not mask.is_floating_point():
        raise TypeError(f"{name}: expected a bool or floating-point tensor, got {mask.dtype}")
    return "add"


def _check_broadcast(name: str, mask: Tensor, view: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
    for have, want in zip(view.shape, sizes, strict=True):
        if have != 1 and have != want:
            raise ValueError(
                f"{name}: expected a shape that broadcasts to {list(sizes)} (batch, heads, queries, keys), "
                f"got {list(mask.shape)}"
            )
    return view


def _padding_view(name: str, padding: Tensor, batch: int, length: int) -> Tensor:
    view = padding.unsqueeze(0) if padding.dim() == 1 and batch == 1 else padding
    if view.dim() != 2 or view.size(0) != batch or view.size(1) != length:
        raise ValueError(f"{name}: expected shape {[batch, length]} (batch, keys), got {list(padding.shape)}")
    return view


def sdpa_mask(
    mask: Tensor | None, padding: Tensor | None, batch: int, heads: int, length: int, causal: bool = False
) -> Mask:
    """Masks by the convention of `F.scaled_dot_product_attention`: bool True may be attended to.

    **Shapes** mask: 2 to 4 dimensions, broadcastable to [B, H, T, T], bool or floating (added).
    padding: [B, T], bool (True: a real token) or floating (added).
    **Saves** nothing of its own: the results are views.
    **Raises** `ValueError` for a wrong shape, `TypeError` for a wrong type.
    **Source** `torch.nn.functional.scaled_dot_product_attention`, `attn_mask`.
    """
    kind = padding_kind = "none"
    if mask is not None:
        kind = _kind("mask", mask, "keep")
        if not 2 <= mask.dim() <= 4:
            raise ValueError(
                f"mask: expected 2 to 4 dimensions that broadcast to {[batch, heads, length, length]} "
                f"(batch, heads, queries, keys), got shape {list(mask.shape)}"
            )
        view = mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask
        mask = _check_broadcast("mask", mask, view, (batch, heads, length, length))
    if padding is not None:
        padding_kind = _kind("padding", padding, "keep")
        padding = _padding_view("padding", padding, batch, length)
    return Mask(mask, kind, padding, padding_kind, causal)


def encoder_mask(
    src_mask: Tensor | None,
    src_key_padding_mask: Tensor | None,
    is_causal: bool,
    batch: int,
    heads: int,
    length: int,
) -> Mask:
    """Masks by the convention of `nn.TransformerEncoderLayer`: bool True may not be attended to.

    With `is_causal`, `src_mask` is, as in PyTorch, taken at the caller's word for the causal mask, and
    the kernels' own causal structure stands in for it. Unlike PyTorch, `src_mask` may then be None.

    **Shapes** src_mask: [T, T], [B·H, T, T], or 4-d broadcastable to [B, H, T, T]; bool or floating (added).
    src_key_padding_mask: [B, T] ([T] for one sequence), bool (True: padding) or floating (added).
    **Saves** nothing of its own: the results are views.
    **Raises** `ValueError` for a wrong shape, `TypeError` for a wrong type.
    **Source** `torch.nn.MultiheadAttention`, `attn_mask` and `key_padding_mask`.
    """
    kind = padding_kind = "none"
    if src_mask is not None:
        kind = _kind("src_mask", src_mask, "drop")
        view = _encoder_view(src_mask, batch, heads, length)
        src_mask = _check_broadcast("src_mask", src_mask, view, (batch, heads, length, length))
    if src_key_padding_mask is not None:
        padding_kind = _kind("src_key_padding_mask", src_key_padding_mask, "drop")
        src_key_padding_mask = _padding_view("src_key_padding_mask", src_key_padding_mask, batch, length)
    if type(is_causal) is not bool:
        is_causal = check_flag("is_causal", is_causal)
    if is_causal:
        src_mask, kind = None, "none"
    return Mask(src_mask, kind, src_key_padding_mask, padding_kind, is_causal)


def _encoder_view(src_mask: Tensor, batch: int, heads: int, length: int) -> Tensor:
    if src_mask.dim() == 2 and src_mask.size(0) == length and src_mask.size(1) == length:
        return src_mask[None, None]
    if src_mask.dim() == 3 and src_mask.size(0) == batch * heads:
        return src_mask.unflatten(0, (batch, heads))
    if src_mask.dim() == 4:
        return src_mask
    raise ValueError(
        f"src_mask: expected shape {[length, length]} (queries, keys) or {[batch * heads, length, length]} "
        f"(batch·heads, queries, keys), got {list(src_mask.shape)}"
    )
