"""Triton 3.6's interpreter, mended where it is wrong: only for tests, only while TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def _float32(data: np.ndarray) -> np.ndarray:
    """bfloat16, held as uint16, as float32."""
    return (data.astype(np.uint32) << 16).view(np.float32)


def _bfloat16(data: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest bfloat16, ties to even as the hardware does, as uint16."""
    rounded = torch.from_numpy(np.ascontiguousarray(data)).bfloat16()
    return rounded.view(torch.int16).numpy().view(np.uint16)


def mend() -> None:
    """Products and casts of bfloat16 (the interpreter multiplies the bits as integers, and cuts instead of rounding),
    and loop bounds under NumPy 2.4 (int() of a one-element array is an error there)."""
    builder = interpreter.InterpreterBuilder
    create_dot, cast_impl, patch_tensor = builder.create_dot, builder.cast_impl, interpreter._patch_lang_tensor

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (interpreter.TensorHandle(_float32(t.data), tl.float32) for t in (a, b))
        return create_dot(self, a, b, d, *rest)

    def cast(self: Any, src: Any, dst_type: Any, *rest: Any) -> Any:
        pair = (src.dtype.scalar, dst_type.scalar)
        if pair == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(_bfloat16(src.data), tl.bfloat16)
        if pair == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(_float32(src.data), tl.float32)
        return cast_impl(self, src, dst_type)

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    builder.create_dot = dot
    # (create_fp_to_fp, the third caster, is for eight-bit types only)
    builder.cast_impl = cast
    for name in ("create_fp_ext", "create_fp_trunc"):
        setattr(builder, name, cast)
    interpreter._patch_lang_tensor = patch
