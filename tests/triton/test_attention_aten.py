"""How attention calls PyTorch's CUDA kernels, on meta tensors: their schemas and the layouts of their results.

Only a GPU would see those otherwise. What the ops of backward get is what PyTorch's own autograd gives them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ckptfused._extension import _C

BATCH, LENGTH, DIM, SCALE = 2, 5, 16, 0.3
OPS = {
    "flash": torch.ops.aten._scaled_dot_product_flash_attention,
    "cudnn": torch.ops.aten._scaled_dot_product_cudnn_attention,
}
BACKWARD_OPS = {
    "flash": torch.ops.aten._scaled_dot_product_flash_attention_backward,
    "cudnn": torch.ops.aten._scaled_dot_product_cudnn_attention_backward,
}
both = pytest.mark.parametrize("chosen", OPS)
heads = pytest.mark.parametrize("kv_heads", [4, 2, 1])


class Recorder(TorchDispatchMode):
    """The calls of the ops above, their arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (*OPS.values(), *BACKWARD_OPS.values()):
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
            self.calls.append((func.overloadpacket, given))
        return func(*args, **(kwargs or {}))


def described(arguments: dict[str, Any]) -> dict[str, Any]:
    return {n: (t.dtype, tuple(t.shape)) if isinstance(t, Tensor) else t for n, t in arguments.items()}


def tensors(*head_counts: int) -> list[Tensor]:
    """Tensors as the block has them: heads of rows."""
    shapes = [(BATCH, LENGTH, heads, DIM) for heads in head_counts]
    return [torch.empty(shape, dtype=torch.bfloat16, device="meta").transpose(1, 2) for shape in shapes]


def call(chosen: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """o, lse and the gradients of q, k and v."""
    o, lse = _C.testing.attention_aten_fwd(chosen, q, k, v, SCALE, True)
    return o, lse, _C.testing.attention_aten_bwd(chosen, do, q, k, v, o, lse, SCALE, True)


@both
@heads
def test_results(chosen: str, kv_heads: int) -> None:
    q, k, v, do = tensors(4, kv_heads, kv_heads, 4)
    with Recorder() as recorder:
        o, lse, grads = call(chosen, q, k, v, do)
    assert [op for op, _ in recorder.calls] == [OPS[chosen], BACKWARD_OPS[chosen]]
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((BATCH, 4, LENGTH), torch.float32, True)
    for result, like in zip((o, *grads), (q, q, k, v), strict=True):
        assert (result.shape, result.dtype) == (like.shape, like.dtype)
        assert result.transpose(1, 2).is_contiguous()


@both
@heads
def test_arguments_are_those_of_autograd(chosen: str, kv_heads: int) -> None:
    q, k, v, do = tensors(4, kv_heads, kv_heads, 4)
    with Recorder() as ours:
        call(chosen, q, k, v, do)
    options = (0.0, True, False) if chosen == "flash" else (None, True, 0.0, True, False)
    with Recorder() as autograd:
        y = OPS[chosen](*(t.requires_grad_() for t in (q, k, v)), *options, scale=SCALE)[0]
        torch.autograd.grad(y, (q, k, v), do)
    given = ours.calls[0][1]
    assert (given["dropout_p"], given["is_causal"], given["scale"]) == (0.0, True, SCALE)
    (_, mine), (_, its) = ours.calls[1], autograd.calls[1]
    mine, its = described(mine), described(its)
    for name in ("philox_seed", "philox_offset"):  # not read without dropout
        assert mine.pop(name)[0].itemsize == its.pop(name)[0].itemsize == 8
    assert mine == its
    schema = BACKWARD_OPS[chosen].default._schema
    assert {a.name for a in schema.arguments} == {*mine, "philox_seed", "philox_offset"}


@pytest.mark.parametrize("order", ["batch first", "sequence first"])
def test_cudnn_gets_layouts_that_follow_from_qs(order: str) -> None:
    """PyTorch 2.11 looks cuDNN's plans up by the strides of q, k and v alone: with others of o or do than its own
    forward makes, a plan that an eager layer built would be run on the wrong memory."""
    width = 3 * 4 * DIM
    shape = (BATCH, LENGTH, width) if order == "batch first" else (LENGTH, BATCH, width)
    qkv = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    rows = qkv if order == "batch first" else qkv.transpose(0, 1)
    q, k, v = rows.view(BATCH, LENGTH, 3, 4, DIM).permute(2, 0, 3, 1, 4)
    with Recorder() as recorder:
        made = OPS["cudnn"](q, k, v, None, True, 0.0, True, False, scale=SCALE)[0]
        for do in (torch.empty_like(q), torch.empty(q.shape, dtype=q.dtype, device="meta")):
            call("cudnn", q, k, v, do)
    backward = [given for op, given in recorder.calls if op == BACKWARD_OPS["cudnn"]]
    assert len(backward) == 2
    for given in backward:
        assert given["out"].stride() == given["grad_out"].stride() == made.stride()


@both
def test_rows_that_do_not_begin_at_16_bytes_are_copied(chosen: str) -> None:
    """PyTorch's kernels read 16 bytes at a time, and do not ask where a row begins."""

    def shifted(by: int, row: int) -> Tensor:
        flat = torch.empty(BATCH * LENGTH * row + by, dtype=torch.bfloat16, device="meta")
        return flat.as_strided((BATCH, 4, LENGTH, DIM), (LENGTH * row, DIM, row, 1), by)

    fine, late, uneven = shifted(8, 4 * DIM), shifted(4, 4 * DIM), shifted(0, 4 * DIM + 4)
    with Recorder() as recorder:
        call(chosen, late, fine, uneven, late)
    for _, given in recorder.calls:
        rows = [given[name] for name in ("query", "key", "value", "grad_out", "out") if name in given]
        for t in rows:
            assert t.storage_offset() * 2 % 16 == 0
            assert all(stride * 2 % 16 == 0 for stride in t.stride()[:3])
        assert given["key"].data_ptr() == fine.data_ptr() and given["key"].storage_offset() == 8
