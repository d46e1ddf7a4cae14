"""The checked arguments of attention_fwd and attention_bwd, as csrc/ops/attention.cpp checks them for the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MASK_CODES = {"none": 0, "keep": 1, "drop": 2, "add": 3}  # as in tiles.py
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Rows of a tile are apart by 32-bit offsets: at most 256 rows of this stride.
_MAX_ROW_STRIDE = 1 << 22
_MAX_HEAD_DIM = 256
# Arguments for whose values nothing is compiled anew: another number of tokens or heads runs the same kernel.
SIZES = ("window", "threshold", "tiles", "heads", "kv_heads", "queries", "keys", "sequences")
GAP = 128  # rows behind each sequence's in shift and delta, the scratch of backward; no tile has more queries


def backward_rows(heads: int, tokens: int, sequences: int) -> int:
    """Elements of shift and of delta each; tokens: of all sequences."""
    return heads * (tokens + GAP * sequences)


def accumulation_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def call_error(op: str, message: str) -> RuntimeError:
    """To be raised. Its text is made only where it is: a call's checks take much of its host time."""
    return RuntimeError(f"{op}: {message}")


def expect(fine: bool, op: str, message: str) -> None:
    if not fine:
        raise call_error(op, message)


@dataclass(frozen=True)
class Problem:
    """**Shapes**: q [B, H, Tq, D]; k, v [B, G, Tk, D], the entries of a row side by side, other strides free; mask
    [B, H, Tq, Tk] and padding [B, Tk], expanded, bool as uint8 (int64 for
    float64); cu_seqlens int32 or int64 [S + 1], on the device."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    padding: Tensor | None
    cu_seqlens: Tensor | None
    rng_state: Tensor | None
    mask_kind: int
    padding_kind: int
    scale: float
    causal: bool
    window: int  # 0: none, also when it covers every key
    softcap: float
    threshold: int  # of 65536; 0: no dropout

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    @property
    def wide(self) -> bool:
        """Whether dropout numbers its calls in 64 bits: where they may need that (of packed sequences nobody here knows
        the longest), and in exact types, whose kernels gain nothing by less."""
        batch, heads, queries, _ = self.q.shape
        calls = batch * heads * queries * -(-self.k.shape[2] // 8)
        half = self.q.element_size() == 2
        return self.threshold > 0 and (not half or self.cu_seqlens is not None or calls > 1 << 32)


def operand(t: Tensor) -> Tensor:
    """t, or a copy of it that the kernels can read."""
    rows = t.shape[3] <= 1 or t.stride(3) == 1
    return t if rows and t.stride(2) <= _MAX_ROW_STRIDE else t.contiguous()


def _as_type(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask in another type, in as little memory."""
    once = mask[tuple(slice(0, None if step else 1) for step in mask.stride())]
    return once.to(dtype).expand(mask.shape)


def _mask(
    op: str, name: str, mask: Tensor | None, kind: str, sizes: Sequence[int], q: Tensor
) -> tuple[Tensor | None, int]:
    device = q.device
    if mask is None:
        if kind != "none":
            raise call_error(op, f"{name}: expected a tensor for kind {kind}, got none")
        return None, 0
    if kind not in ("keep", "drop", "add"):
        raise call_error(op, f"{name}_kind: expected keep, drop or add, got {kind}")
    if mask.device != device:
        raise call_error(op, f"{name}: expected a tensor on {device}, got one on {mask.device}")
    if kind == "add":
        if mask.dtype not in DTYPES:
            raise call_error(op, f"{name}: expected Double, Float, BFloat16 or Half, got {mask.dtype}")
        if mask.dtype.itemsize > (summed := accumulation_type(q.dtype)).itemsize:
            mask = _as_type(mask, summed)  # as which it is added
    else:
        if mask.dtype != torch.bool:
            raise call_error(op, f"{name}: expected Bool for kind {kind}, got {mask.dtype}")
        mask = mask.view(torch.uint8)
    if q.dtype == torch.float64 and mask.dtype.itemsize < 8:
        # Triton 3.6 compiles no float64 product that reads beside a narrower load.
        mask = _as_type(mask, torch.float64 if mask.is_floating_point() else torch.int64)
    ends = list(zip(reversed(mask.shape), reversed(sizes), strict=False))
    if mask.dim() > len(sizes) or any(have not in (1, want) for have, want in ends):
        raise call_error(op, f"{name}: expected a shape that broadcasts to {list(sizes)}, got {list(mask.shape)}")
    return mask.expand(sizes), MASK_CODES[kind]


def _check_operands(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    shape, keys = q.shape, k.shape
    fits = (
        len(shape) == len(keys) == 4
        and shape[0] == keys[0]
        and shape[3] == keys[3]
        and keys[1] > 0
        and shape[1] % keys[1] == 0
        and keys == v.shape
    )
    if not fits:
        raise call_error(
            op,
            "expected q [B, H, T, D] and k, v [B, G, T, D] with H a multiple of G, got "
            f"q {list(shape)}, k {list(keys)}, v {list(v.shape)}",
        )
    if q.dtype not in DTYPES:
        raise call_error(op, f"q: expected Double, Float, BFloat16 or Half, got {q.dtype}")
    if not q.dtype == k.dtype == v.dtype:
        raise call_error(op, f"expected q, k and v of one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise call_error(op, f"expected q, k and v on one device, got {q.device}, {k.device}, {v.device}")
    if shape[3] > _MAX_HEAD_DIM:
        raise call_error(op, f"expected head widths up to {_MAX_HEAD_DIM}, got {shape[3]}")


def _check_packed(op: str, q: Tensor, k: Tensor, cu_seqlens: Tensor) -> None:
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise call_error(
            op, f"cu_seqlens: expected Int or Long [S + 1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )
    if q.shape[0] != 1 or k.shape[2] != q.shape[2]:
        raise call_error(
            op,
            "cu_seqlens: expected q, k and v of one packed batch [1, heads, N, D], got "
            f"q {list(q.shape)} and k {list(k.shape)}",
        )


def make_problem(
    op: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, padding: Tensor | None, cu_seqlens: Tensor | None,
    rng_state: Tensor | None, mask_kind: str, padding_kind: str, scale: float, causal: bool, window: int,
    softcap: float, p: float,
) -> Problem:  # fmt: skip
    """Checks what can be checked without waiting for the device: not that cu_seqlens goes from 0 to N without falling.

    Tokens outside of all sequences attend to nothing; numbers that fall, or lie outside, read other memory.
    """
    _check_operands(op, q, k, v)
    if window < 0:
        raise call_error(op, f"window: expected 0 (none) or more, got {window}")
    if softcap < 0.0:
        raise call_error(op, f"softcap: expected 0 (none) or more, got {softcap}")
    if not 0.0 <= p <= 1.0:
        raise call_error(op, f"p: expected a probability in [0, 1], got {p}")
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    mask, kind = _mask(op, "mask", mask, mask_kind, (batch, heads, queries, keys), q)
    padding, pad_kind = _mask(op, "padding", padding, padding_kind, (batch, keys), q)
    if cu_seqlens is not None:
        _check_packed(op, q, k, cu_seqlens)
        if kind or pad_kind:
            raise call_error(
                op,
                "mask, padding: expected none beside cu_seqlens, which bounds the sequences itself, "
                f"got kinds {mask_kind} and {padding_kind}",
            )
        place = cu_seqlens.device  # a copy from the host would wait, and could not be captured in a graph
        if place != q.device:
            raise call_error(op, f"cu_seqlens: expected a tensor on {q.device}, got one on {place}")
        cu_seqlens = cu_seqlens.contiguous()
    if p > 0.0:
        fits = (
            rng_state is not None
            and rng_state.shape == (2,)
            and rng_state.dtype == torch.int64
            and rng_state.device == q.device
        )
        if not fits:
            came = "none" if rng_state is None else f"{rng_state.dtype} {list(rng_state.shape)} on {rng_state.device}"
            raise call_error(op, f"rng_state: expected Long [2] on {q.device}, got {came}")
    threshold = round(p * 65536)
    return Problem(
        operand(q), operand(k), operand(v), mask, padding, cu_seqlens, rng_state if threshold else None, kind, pad_kind,
        scale, causal, 0 if window >= max(queries, keys) else window, softcap, threshold,
    )  # fmt: skip
