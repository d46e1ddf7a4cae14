"""Weights that are stored in few bits, as numbers again, on the device at hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ckptfused.checks import has_values
from ckptfused.spec import BY_BITSANDBYTES, BY_INPUTS, QUANT_SLOTS, QUANTIZATIONS, BlockSpec, Quantized

_HALF = (torch.float32, torch.bfloat16, torch.float16)
_PART = 1 << 20
"""Entries that are there in float32 at once: 4 MiB, which a CPU has in its cache, in few launches of a GPU."""
_NO_KERNEL, _FALLBACK = 2048, 16
"""The block from which on, as for odd rows, bitsandbytes makes numbers by PyTorch's operations on a CPU, and the most
bytes that these take for each: an index in 4 and again in 8, and its value. **Source** `_dequantize_4bit_compute`."""
_SQUARE = 60 * 60
"""Entries of the square by which a CPU transposes. **Source** PyTorch's `copy_same_type_transpose_`."""


def dequantize(
    codes: Tensor, state: Sequence[Tensor | None], form: str, sizes: Sequence[int], dtype: torch.dtype, first: int = 0
) -> Tensor:
    """A weight [out, in] in `dtype`: each code's value times its block's scale, in float32 (integers for float64 in
    that), rounded once; first to the type of the table as torchao's, or of the scales as GPTQ's and AWQ's. Of a longer
    stack of bitsandbytes' 4 bits the entries from `first` on.

    **Shapes** as `spec.Quantized`, whose `form` it is; state: its `QUANT_SLOTS`, None where there is none.
    **Scratch** of bitsandbytes' 4 bits its kernels'; of others scales and offsets in float32, and up to 6 bytes for
    each of 2²⁰ entries, 12 of GPTQ and AWQ.
    **Source** `bitsandbytes.functional.dequantize_4bit`, whose float32 scales these are; of 8 bits `MatMul8bitFp`.
    torchao's `Int8Tensor.dequantize` and `NF4Tensor.get_original_weight`; hqq's `Quantizer.dequantize`;
    gptqmodel's `dequantize_weight` and `dequantize_gemm`.
    """
    spec = _parsed(form)
    if spec.kind in BY_BITSANDBYTES:
        return _entries(codes, state, spec, sizes, dtype, first)
    if spec.kind in BY_INPUTS:
        return _by_inputs(codes, state, spec, sizes, dtype)
    shape = spec.block_shape(*sizes)
    wide = torch.promote_types(dtype, torch.float32) if spec.kind != "table" else torch.float32
    scale, offset = _scales(state, spec, wide)
    made = codes.new_empty(list(sizes), dtype=dtype)
    if spec.kind == "table":
        _fill_pairs(made.view(shape), codes, scale, _numbers(state[3], spec))
    else:
        _fill(made.view(shape), codes, spec, scale, offset)
    return made


@lru_cache(maxsize=256)
def _parsed(form: str) -> Quantized:
    return Quantized.parse("quant", f":{form}")


def _entries(
    codes: Tensor, state: Any, spec: Quantized, sizes: Sequence[int], dtype: torch.dtype, first: int
) -> Tensor:
    """The entries of a stack from `first` on, by way of the whole blocks that they lie in, nested where scales are.
    Of rows that end within a block by way of all of it: on a CPU bitsandbytes reads these otherwise than it wrote them.
    """
    count, total = math.prod(sizes), 2 * codes.nbytes
    if count == total:
        return _four_bits(codes, state, spec, sizes, dtype)
    nested, width = spec.block * max(1, spec.nested), sizes[-1]
    whole = total if width % spec.block else nested
    start, end = first // whole * whole, min(-(-(first + count) // whole) * whole, total)
    if not has_values(codes) and count % whole:  # a count knows no expert: one may lie across more of them
        end = min(end + whole, total)
    part, of_blocks, of_nested = (slice(start // each, -(-end // each)) for each in (2, spec.block, nested))
    scale, offset, nested_scale, table = state
    beside = (scale.reshape(-1)[of_blocks], offset, nested_scale if nested_scale is None else nested_scale[of_nested])
    shape = (total // width, width) if whole == total else (end - start,)
    made = _four_bits(codes.reshape(-1).view(torch.uint8)[part], (*beside, table), spec, shape, dtype)
    return made.view(-1)[first - start :][:count].view(*sizes)


def _four_bits(codes: Tensor, state: Any, spec: Quantized, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    import bitsandbytes  # noqa: F401  (registers the ops)

    scale, ops = state[0].reshape(-1), torch.ops.bitsandbytes
    if spec.nested:
        offset, nested_scale, table = (_numbers(t, spec) for t in state[1:])
        scale = ops.dequantize_blockwise(scale, nested_scale, table, spec.nested, torch.float32)
        scale += offset
    else:
        scale = _numbers(scale, spec)
    made = dtype if dtype in _HALF else torch.float32
    if not has_values(codes) and (spec.block >= _NO_KERNEL or sizes[-1] % 2):
        codes.new_empty(_FALLBACK * math.prod(sizes))
    found: Tensor = ops.dequantize_4bit(codes.view(-1, 1), scale, spec.block, spec.kind, sizes, made)
    return found.to(dtype)


def _numbers(t: Tensor | None, spec: Quantized) -> Tensor:
    """Scales, or what is beside them, as numbers; a ledger's call has their bytes."""
    assert t is not None
    return t.reshape(-1).view(getattr(torch, spec.scales))


def _scales(state: Sequence[Tensor | None], spec: Quantized, wide: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The scale and the offset of each block in a wide type, as a column; as a row where blocks are strided."""
    scale, offset, nested_scale, _ = state
    assert scale is not None
    if spec.kind == "table":  # around a mean, and rounded as NF4Tensor's are
        grouped = scale.reshape(-1, spec.nested).view(torch.int8)
        scale = (grouped / _numbers(nested_scale, spec)[:, None]).view(-1, 1) + _numbers(offset, spec)
        return scale.to(wide), None
    shape = (1, -1) if spec.strided else (-1, 1)
    scale = _numbers(scale, spec).view(shape)
    scale = (scale.mul(1 / 127) if spec.kind == "absmax8" else scale).to(wide)
    if offset is None:
        return scale, None
    return scale, (offset.view(torch.int8) if spec.kind == "int8" else _numbers(offset, spec)).view(shape).to(wide)


def _by_parts(rows: int, columns: int, fill: Callable[[slice], None]) -> None:
    step = max(1, _PART // columns)
    for first in range(0, rows, step):
        fill(slice(first, min(first + step, rows)))


def _fill(made: Tensor, codes: Tensor, spec: Quantized, scale: Tensor, offset: Tensor | None) -> None:
    """(code - offset) * scale for each row of blocks, those of a part of an element of memory together."""
    bits, parts, dtype = QUANTIZATIONS[spec.kind]
    rows, columns = made.shape
    packed = codes.reshape(-1).view(getattr(torch, dtype)).view(-1, columns)
    mask = packed.new_full((), 2**bits - 1) if parts > 1 else packed  # a number would become a tensor at each use
    for part in range(parts):
        first = part * packed.size(0)
        shift = packed.new_full((), bits * (parts - 1 - part)) if parts > 1 else packed

        def fill(of: slice, first: int = first, shift: Tensor = shift) -> None:
            to = slice(first + of.start, min(first + of.stop, rows))
            found = packed[of][: to.stop - to.start]
            if parts > 1:
                found = (found >> shift).bitwise_and_(mask)
            wide = made[to] if made.dtype == scale.dtype else torch.empty_like(found, dtype=scale.dtype)
            wide.copy_(found)
            each = slice(None) if spec.strided or scale.size(0) == 1 else to
            if offset is not None:
                wide.sub_(offset[each])
            wide.mul_(scale[each])
            if wide.dtype != made.dtype:
                made[to].copy_(wide)

        _by_parts(min(packed.size(0), rows - first), columns, fill)


def _fill_pairs(made: Tensor, codes: Tensor, scale: Tensor, table: Tensor) -> None:
    """The table's values of the two codes of each byte, times the scale of their row."""
    values = table.float()
    pairs = torch.cartesian_prod(values, values)
    packed = codes.reshape(-1).view(torch.uint8).view(made.size(0), -1)

    def fill(of: slice) -> None:
        wide = pairs.index_select(0, packed[of].reshape(-1).to(torch.int32)).view(-1, made.size(1))
        made[of].copy_(wide.mul_(scale[of]).to(table.dtype))

    _by_parts(made.size(0), made.size(1), fill)


def _by_inputs(codes: Tensor, state: Any, spec: Quantized, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """(code - offset) * scale, both of an input's block, which the table has of each; AWQ's blocks are in order."""
    out, into = sizes
    parts, awq = QUANTIZATIONS[spec.kind].parts, spec.kind == "awq4"
    words = codes.reshape(-1).view(torch.int32).view(into if awq else -1, -1 if awq else out)
    own, wide = getattr(torch, spec.scales), torch.promote_types(dtype, torch.float32)
    scale = _numbers(state[0], spec).view(-1, out).to(wide)
    packed, shifts = state[1].reshape(-1).view(torch.int32).view(scale.size(0), -1), _shifts(words, spec)
    offset = _integers(packed, shifts, 2, wide)[:, :out]
    if awq:
        blocks = torch.arange(scale.size(0), dtype=torch.int32, device=codes.device)[:, None].expand(-1, spec.block)
    else:
        blocks = state[3].view(torch.int32).remainder(words.new_full((), scale.size(0)))  # below 0 from the last one on
    blocks, made = blocks.reshape(-1), codes.new_empty(list(sizes), dtype=dtype)

    def fill(of: slice) -> None:
        to = of if awq else slice(of.start * parts, min(of.stop * parts, into))
        found = _integers(words[of], shifts, 2 if awq else 1, wide)[: to.stop - to.start, :out]
        found.sub_(offset.index_select(0, blocks[to]))
        found.mul_(scale.index_select(0, blocks[to]))
        turned = found.to(own).t()
        square = turned.new_empty(0 if has_values(turned) or turned.numel() < _SQUARE else _SQUARE)
        made[:, to].copy_(turned.contiguous())
        del square

    _by_parts(words.size(0), out * (1 if awq else parts), fill)
    return made


def _shifts(words: Tensor, spec: Quantized) -> list[Tensor]:
    """By how much each integer of a word is shifted, and last the mask of one: tensors, as a number would become one
    at each use."""
    bits, parts, _ = QUANTIZATIONS[spec.kind]
    places = [part % 2 * 4 + part // 2 for part in range(parts)] if spec.kind == "awq4" else range(parts)
    return [words.new_full((), number) for number in (*(bits * place for place in places), 2**bits - 1)]


def _integers(words: Tensor, shifts: list[Tensor], dim: int, dtype: torch.dtype) -> Tensor:
    """The integers in words of 32 bits, as numbers. dim: 1 where a word's are below each other, 2 where in a row."""
    *shifts, mask = shifts
    sizes = list(words.shape)
    made = words.new_empty((*sizes[:dim], len(shifts), *sizes[dim:]), dtype=dtype)
    for each, shift in zip(made.unbind(dim), shifts, strict=True):
        each.copy_((words >> shift).bitwise_and_(mask))
    return made.flatten(dim - 1, dim)


@torch.no_grad()
def with_plain_weights(params: dict[str, Any], spec: BlockSpec, x: Tensor) -> dict[str, Any]:
    """The parameters of a block by slot, with numbers in the place of weights that are stored in few bits."""
    if not spec.quantized:
        return params
    found = dict(params)
    dtype = x.dtype if spec.compute is None else getattr(torch, spec.compute)
    for prefix, stored in spec.quantized.items():
        half = prefix.split(".")[0]
        into, out = spec.halves[half].products(x.size(-1))[stored.target]
        state = [params[f"{prefix}.{slot}"] for slot in QUANT_SLOTS]
        slot = f"{half}.{stored.target}_w"
        found[slot] = dequantize(params[slot], state, stored.form, (out, into), dtype)
    return found
