"""What only PyTorch can tell of an argument or of the moment; `ckptfused.spec.checks` has the plain checks."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ckptfused.compat.torch_dispatch import in_transform
from ckptfused.masks import Mask

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_generator(generator: object) -> None:
    """Raise unless dropout can draw from it."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: expected a torch.Generator or None, got {generator!r}")


def is_dtensor(value: object) -> bool:
    """Whether a tensor is distributed."""
    module: Any = sys.modules.get("torch.distributed.tensor")  # slow to import, and without it there is none
    return module is not None and isinstance(value, module.DTensor)


def transformed() -> bool:
    """Whether a transform of torch.func or a forward-mode derivative is taken, or torch.jit.trace traces: for these the
    ops have no rules."""
    return in_transform() or torch.jit.is_tracing()


def check_input(x: Tensor, width: int | None = None, name: str = "x") -> None:
    """Raise unless x is a dense floating tensor with 2 or 3 dimensions, the last one `width` wide."""
    check_plain(name, x)
    if x.dim() not in (2, 3):
        raise ValueError(f"{name}: expected 3 dimensions (or 2 for one sequence), got shape {list(x.shape)}")
    if x.dtype not in _TYPES:
        raise TypeError(f"{name}: expected float64, float32, bfloat16 or float16, got {x.dtype}")
    if width is not None and x.size(-1) != width:
        raise ValueError(f"{name}: expected width {width} in the last dimension, got shape {list(x.shape)}")


def check_plain(name: str, value: Tensor) -> None:
    """Raise for what kernels cannot read: no tensor, one that is distributed, sparse or in a layout of oneDNN's."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if is_dtensor(value):
        raise TypeError(
            f"{name}: expected a whole tensor (FSDP's are whole while a block runs), got a DTensor with placements "
            f"{value.placements}: ckptfused runs no tensor-parallel layers"  # type: ignore[attr-defined]
        )
    if value.layout is not torch.strided:
        raise TypeError(f"{name}: expected a dense (strided) tensor, got layout {value.layout}")


def check_param(name: str, value: Tensor, shape: tuple[int, ...], x: Tensor) -> None:
    """Raise unless a parameter is a dense floating tensor of this shape on x's device."""
    check_plain(name, value)
    if tuple(value.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(value.shape)}")
    if value.device != x.device:
        raise ValueError(f"{name}: expected x's device {x.device}, got {value.device}")
    if not value.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point tensor, got {value.dtype}")


def check_factors(factors: Tensor | None, wanted: bool, batch: int, length: int) -> None:
    """Raise unless factors of q are given where, and only where, a spec has them: [T] or [B, T], without a gradient."""
    if wanted != (factors is not None):
        raise ValueError(f"q_scale: expected {'a tensor' if wanted else 'none'} with the spec's q_scale={wanted}")
    if factors is None:
        return
    if tuple(factors.shape) not in ((length,), (batch, length), (1, length)):
        raise ValueError(f"q_scale: expected shape [{length}] or [{batch}, {length}], got {list(factors.shape)}")
    if not factors.is_floating_point() or factors.requires_grad:
        raise ValueError("q_scale: expected floating factors that need no gradient")


def check_stored(name: str, value: Tensor, size: int, x: Tensor) -> None:
    """Raise unless a tensor beside or of a weight in few bits is dense, on x's device, of so many bytes and frozen."""
    check_plain(name, value)
    if value.nbytes != size or not value.is_contiguous():
        raise ValueError(f"{name}: expected {size} bytes in a row, got {value.nbytes} of shape {list(value.shape)}")
    number = x.is_meta and value.dim() == 0  # a model without data keeps its numbers
    if value.device != x.device and not number:
        raise ValueError(f"{name}: expected x's device {x.device}, got {value.device}")
    if value.requires_grad:
        raise ValueError(f"{name}: expected a frozen weight (requires_grad=False), got one that is trained")


def has_values(x: Tensor) -> bool:
    """Whether anything is computed of a tensor: nothing is on the meta device."""
    return not x.is_meta


def autocast_enabled(x: Tensor) -> bool:
    """Whether autocast is on where x lies. The meta device, which torch.is_autocast_enabled refuses, has it while it
    stands for another (`simulate.autocast_kernels`)."""
    if x.is_meta and not torch.amp.is_autocast_available("meta"):
        return False
    return torch.is_autocast_enabled(x.device.type)


def computing_in(x: Tensor, dtype: torch.dtype | None = None) -> AbstractContextManager[Any]:
    """Autocast to a half-precision type where x lies, whatever is on now; of any other type, none. Meta tensors, of
    which nothing is computed, stay under what there is."""
    if x.is_meta:
        return nullcontext()
    half = dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(x.device.type, dtype if half else None, enabled=half, cache_enabled=False)


def compute_word(x: Tensor, residual: bool = True) -> str:
    """The compute type as the Autocast kernel of an op would add it to the text. residual: x is the residual stream,
    which autocast leaves float32."""
    if not autocast_enabled(x) or x.dtype == torch.float64:
        return ""
    dtype = torch.get_autocast_dtype(x.device.type)
    if dtype == x.dtype:
        return ""
    if residual and x.dtype != torch.float32:
        raise TypeError(f"x: expected float32 under autocast to {dtype}, got {x.dtype}")
    return " compute=bfloat16" if dtype == torch.bfloat16 else " compute=float16"


def check_dtype(name: str, weight: Tensor, x: Tensor, compute: str | None = None) -> None:
    """Raise unless a projection's weight or bias has x's dtype, or something casts it."""
    if weight.dtype != x.dtype and compute is None and not autocast_enabled(x):
        raise TypeError(
            f"{name}: expected x's dtype {x.dtype} (another needs torch.autocast or spec.compute), got {weight.dtype}"
        )


def check_devices(x: Tensor, **inputs: Tensor | None) -> None:
    """Raise unless what is there is a tensor and lies where x does."""
    for name, value in inputs.items():
        if value is None:
            continue
        check_plain(name, value)
        if value.device != x.device:
            raise ValueError(f"{name}: expected x's device {x.device}, got {value.device}")


def check_packed(x: Tensor, cu_seqlens: Tensor, masks: Mask) -> None:
    """Raise unless cu_seqlens can bound the sequences packed in x."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens: expected an int32 or int64 tensor, got {got}")
    if cu_seqlens.dim() != 1 or cu_seqlens.size(0) < 2:
        raise ValueError(f"cu_seqlens: expected shape [sequences + 1], got {list(cu_seqlens.shape)}")
    if x.size(0) != 1:
        raise ValueError(f"x: expected shape [1, N, C] with cu_seqlens, got {list(x.shape)}")
    if masks.kind != "none" or masks.padding_kind != "none":
        raise ValueError("mask, padding: leave them out with cu_seqlens, which bounds the sequences itself")


def rotary_view(name: str, table: Tensor, batch: int, length: int, rotary: int) -> Tensor:
    """cos or sin as [T, r] or [B, T, r], a view; raise if that cannot be."""
    view = table.squeeze(0) if table.dim() == 3 and table.size(0) == 1 else table
    lead_ok = view.dim() == 2 or (view.dim() == 3 and view.size(0) == batch)
    if not (lead_ok and view.size(-2) == length and view.size(-1) in (rotary, rotary // 2)):
        raise ValueError(
            f"{name}: expected shape {[length, rotary // 2]} or {[batch, length, rotary // 2]} "
            f"(or {rotary} wide), got {list(table.shape)}"
        )
    if not table.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point tensor, got {table.dtype}")
    return view
