"""How attention calls PyTorch's CUDA kernels, on meta tensors: their schemas and the layouts of their results.

Only a GPU would see those otherwise. What the ops of backward get is what PyTorch's own autograd
gives them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ckptfused.triton import attention, backend

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


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def set_to(name: str) -> None:
        monkeypatch.setattr(attention, "attention_backend", partial(backend.attention_backend, override=name))

    return set_to


def tensors(*head_counts: int) -> list[Tensor]:
    """As the block has them: heads of rows."""
    shapes = [(BATCH, LENGTH, heads, DIM) for heads in head_counts]
    return [torch.empty(shape, dtype=torch.bfloat16, device="meta").transpose(1, 2) for shape in shapes]


OPTIONS = (None, None, None, None, "none", "none", SCALE, True, 0, 0.0, 0.0)


@both
@heads
def test_results(choose: Callable[[str], None], chosen: str, kv_heads: int) -> None:
    choose(chosen)
    q, k, v, do = tensors(4, kv_heads, kv_heads, 4)
    with Recorder() as recorder:
        o, lse = attention.attention_fwd(q, k, v, *OPTIONS)
        grads = attention.attention_bwd(do, q, k, v, o, lse, *OPTIONS)
    assert [op for op, _ in recorder.calls] == [OPS[chosen], BACKWARD_OPS[chosen]]
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((BATCH, 4, LENGTH), torch.float32, True)
    for result, like in zip((o, *grads), (q, q, k, v), strict=True):
        assert (result.shape, result.dtype) == (like.shape, like.dtype)
        assert result.transpose(1, 2).is_contiguous()


@both
@heads
def test_arguments_are_those_of_autograd(choose: Callable[[str], None], chosen: str, kv_heads: int) -> None:
    choose(chosen)
    q, k, v, do = tensors(4, kv_heads, kv_heads, 4)
    with Recorder() as ours:
        o, lse = attention.attention_fwd(q, k, v, *OPTIONS)
        attention.attention_bwd(do, q, k, v, o, lse, *OPTIONS)
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


@pytest.mark.parametrize("deterministic", [False, True])
@both
def test_backward_is_repeatable_where_asked_for(
    choose: Callable[[str], None], chosen: str, deterministic: bool
) -> None:
    choose(chosen)
    torch.use_deterministic_algorithms(deterministic)
    q, k, v, do = tensors(4, 4, 4, 4)
    with Recorder() as recorder:
        o, lse = attention.attention_fwd(q, k, v, *OPTIONS)
        attention.attention_bwd(do, q, k, v, o, lse, *OPTIONS)
    assert recorder.calls[0][0] == OPS[chosen]
    assert recorder.calls[1][0] == BACKWARD_OPS["flash" if deterministic else chosen]
