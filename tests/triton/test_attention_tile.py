"""Tiles of queries on a GPU: which keys and heads PyTorch's flash kernel is given, and what becomes of its gradients.

Its place on the CPU takes attention in the type it is given, the last query on the last key, as the kernel has it
(`torch.nn.attention.bias.causal_lower_right` calls it so).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ckptfused._extension import _C

BATCH, DIM, SCALE = 2, 8, 0.3
FLASH = "_scaled_dot_product_flash_attention"


def scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """[B, H, Tq, Tk], the last query on the last key."""
    made = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * SCALE
    queries, keys = made.shape[-2:]
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    return made.masked_fill(hidden, -torch.inf) if causal else made


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """o and lse [B, H, Tq]."""
    logits = scores(q, k, causal)
    return logits.softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), logits.logsumexp(-1)


def gradients(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """The gradients of q, k and v in closed form: within an op nothing is differentiated."""
    heads = k.shape[1]
    p = (scores(q, k, causal) - lse[..., None]).exp()
    dp = do @ v.repeat_interleave(q.shape[1] // heads, 1).transpose(-1, -2)
    ds = p * (dp - (do * o).sum(-1, keepdim=True)) * SCALE
    of_heads = (ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ do)
    return (ds @ k.repeat_interleave(q.shape[1] // heads, 1), *(t.unflatten(1, (heads, -1)).sum(2) for t in of_heads))


class Flash:
    """The calls that the kernel's place was given: queries, keys and heads of each."""

    def __init__(self) -> None:
        self.forwards: list[tuple[int, int, int]] = []
        self.backwards: list[tuple[int, int, int]] = []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, debug: bool = False, *,
        scale: float,
    ) -> Any:  # fmt: skip
        assert (dropout_p, debug, scale) == (0.0, False, SCALE)
        self.forwards.append((q.shape[2], k.shape[2], q.shape[1]))
        o, lse = attention(*(t.double() for t in (q, k, v)), is_causal)
        o = o.transpose(1, 2).contiguous().transpose(1, 2)
        none = q.new_empty(0)
        return o.to(q.dtype), lse.to(self.wide(q)), none, none, q.shape[2], k.shape[2], none, none, none

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cum_q: Any, cum_k: Any, max_q: int,
        max_k: int, dropout_p: float, is_causal: bool, seed: Tensor, offset: Tensor, *, scale: float,
    ) -> Any:  # fmt: skip
        assert (max_q, max_k, scale) == (q.shape[2], k.shape[2], SCALE)
        self.backwards.append((max_q, max_k, q.shape[1]))
        grads = gradients(*(t.double() for t in (do, q, k, v, o, lse)), is_causal)
        return tuple(g.transpose(1, 2).contiguous().transpose(1, 2).to(q.dtype) for g in grads)

    @staticmethod
    def wide(q: Tensor) -> torch.dtype:
        return torch.float64 if q.dtype == torch.float64 else torch.float32


@pytest.fixture
def flash() -> Iterator[Flash]:
    """In the kernel's place."""
    made = Flash()
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(FLASH, made.forward, "CPU")
        library.impl(f"{FLASH}_backward", made.backward, "CPU")
        yield made


def tensors(length: int, heads: int, kv_heads: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """q, k, v and the gradient of o, heads of rows."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(BATCH, length, count, DIM) for count in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes]


def by_tiles(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, tile: int) -> tuple[Tensor, ...]:
    """o and the gradients of q, k and v; those of k and v as they are summed."""
    acc = Flash.wide(q)
    dk, dv = (torch.zeros_like(t, dtype=acc) for t in (k, v))
    outs, dqs = [], []
    length = q.shape[2]
    for first in range(0, length, tile):
        count = min(tile, length - first)
        place = [0, first, length]
        own, grad = q.narrow(2, first, count), do.narrow(2, first, count)
        o, lse = _C.testing.attention_tile_fwd_gpu(own, k, v, SCALE, causal, place)
        assert lse.is_contiguous() and o.transpose(1, 2).is_contiguous()
        outs.append(o)
        dqs.append(_C.testing.attention_tile_bwd_gpu(grad, own, k, v, o, lse, dk, dv, SCALE, causal, place))
    return torch.cat(outs, 2), torch.cat(dqs, 2), dk, dv


def whole(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """The same in float64, by autograd."""
    inputs = [t.double().requires_grad_() for t in (q, k, v)]
    o, _ = attention(*inputs, causal)
    return (o.detach(), *torch.autograd.grad(o, inputs, do.double()))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("tile", [4, 5, 13])
def test_tiles_are_the_whole(flash: Flash, causal: bool, heads: tuple[int, int], tile: int) -> None:
    call = tensors(13, *heads, torch.float64)
    for made, wanted in zip(by_tiles(*call, causal, tile), whole(*call, causal), strict=True):
        torch.testing.assert_close(made, wanted, atol=1e-12, rtol=1e-12)
    group = heads[0] // heads[1]
    ends = [(min(tile, 13 - first), min(first + tile, 13) if causal else 13) for first in range(0, 13, tile)]
    assert flash.forwards == [(*end, heads[0]) for end in ends]
    assert flash.backwards == [(*end, heads[1]) for end in ends for _ in range(group)]


@pytest.mark.parametrize("causal", [True, False])
def test_rounding_of_each_tile_costs_no_accuracy(flash: Flash, causal: bool) -> None:
    """A tile's part of dk and dv comes in half precision, and their sum is rounded once more. Against float64 that is
    at most twice what one call for all queries loses, whose parts by query head are rounded likewise."""
    call = tensors(256, 4, 2, torch.bfloat16)
    wanted = whole(*call, causal)
    q, k, v, do = call
    o, lse = attention(*(t.double() for t in (q, k, v)), causal)
    at_once = [torch.zeros_like(t, dtype=torch.float32) for t in (k, v)]
    for first in range(2):  # as the kernel does by itself under GQA: by query head, then their sum
        own = [t[:, first::2] for t in (do.double(), q.double())]
        _, *parts = gradients(own[0], own[1], k.double(), v.double(), o[:, first::2], lse[:, first::2], causal)
        for total, part in zip(at_once, parts, strict=True):
            total += part.to(torch.bfloat16)
    for tile in (16, 64):
        _, _, *sums = by_tiles(*call, causal, tile)
        for made, once, exact in zip(sums, at_once, wanted[2:], strict=True):
            lost, usual = ((t.to(torch.bfloat16).double() - exact).norm() for t in (made, once))
            assert lost <= 2 * usual


def test_what_the_kernel_lacks_is_refused() -> None:
    q, k, v, _ = tensors(8, 2, 2, torch.bfloat16)
    with pytest.raises(RuntimeError, match="no scale of 0 or less"):
        _C.testing.attention_tile_fwd_gpu(q, k, v, -SCALE, True, [0, 0, 8])
