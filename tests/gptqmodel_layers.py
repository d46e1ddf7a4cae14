"""Layers of GPTQModel's, which asks for a newer torch than is tested here: its own where it is installed, else
stand-ins that have its layout and its names."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptfused.compat.quantizers import AWQ_LINEAR, GPTQ_LINEARS
from ckptfused.layer.source import vouch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column that each integer of a word is of."""


class Way(NamedTuple):
    """How weights are stored: bits, inputs that share a scale, whether these lie apart, and the type of scales."""

    id: str
    bits: int = 4
    block: int = 16
    act_order: bool = False
    scales: torch.dtype = torch.float16
    awq: bool = False


class Numbers(NamedTuple):
    """A weight as integers. **Shapes** codes [in, out], zeros and scales [blocks, out], blocks [in]."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    blocks: Tensor

    def weight(self) -> Tensor:
        """[in, out], each entry rounded once, as the scales are."""
        differences = (self.codes - self.zeros[self.blocks]).double()
        return (differences * self.scales.double()[self.blocks]).to(self.scales.dtype)


def integers(weight: Tensor, way: Way) -> Numbers:
    """The integers that are nearest to a weight [out, in]. Blocks may be of unequal length where they lie apart."""
    w = weight.detach().double().t()
    blocks = torch.arange(w.size(0)) // way.block
    if way.act_order:
        blocks = blocks[torch.randperm(w.size(0), generator=torch.Generator().manual_seed(w.numel()))]
    of_blocks = [w[blocks == block] for block in range(int(blocks.max()) + 1)]
    most, least = (torch.stack([getattr(of, name)(0) for of in of_blocks]) for name in ("amax", "amin"))
    most, least = most.clamp(min=0), least.clamp(max=0)  # an integer stands for 0
    scales = ((most - least) / (2**way.bits - 1)).to(way.scales)
    wide = scales.double()
    zeros = (-least / wide).round().clamp(0, 2**way.bits - 1)
    codes = (w / wide[blocks] + zeros[blocks]).round().clamp(0, 2**way.bits - 1)
    return Numbers(codes.int(), zeros.int(), scales, blocks.int())


def packed(codes: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Integers side by side in words of 32 bits, of neighbours along a dimension, the first one low."""
    each = 32 // bits
    codes = codes.movedim(dim, 0).long()
    missing = -codes.size(0) % each
    groups = torch.cat([codes, codes.new_zeros(missing, *codes.shape[1:])]).unflatten(0, (-1, each))
    words = sum(groups[:, order[place] if order else place] << (bits * place) for place in range(each))
    assert isinstance(words, Tensor)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.int().movedim(0, dim).contiguous()


class _StandIn(nn.Module):
    """Has the buffers of GPTQModel's layers, and multiplies numbers that it makes of them."""

    bias: Tensor | None
    adapter: Any = None
    online_full_had = online_partial_had = planar = False

    def __init__(self, layer: nn.Linear, way: Way) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bits, self.group_size = way.bits, way.block
        found = integers(layer.weight, way)
        order = AWQ_ORDER if way.awq else None
        self.register_buffer("qweight", packed(found.codes, way.bits, 1 if way.awq else 0, order))
        self.register_buffer("qzeros", packed(found.zeros, way.bits, 1, order))
        self.register_buffer("scales", found.scales)
        if not way.awq:
            self.register_buffer("g_idx", found.blocks)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().to(way.scales))

    def forward(self, x: Tensor) -> Tensor:
        """[*, in] to [*, out]."""
        y = x @ self.numbers().to(x.dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def numbers(self) -> Tensor:
        """The weight [in, out] of what the buffers are now."""
        awq = "g_idx" not in self._buffers
        order = AWQ_ORDER if awq else tuple(range(32 // self.bits))
        codes = _unpacked(self.qweight, self.bits, 1 if awq else 0, order)[: self.in_features, : self.out_features]
        zeros = _unpacked(self.qzeros, self.bits, 1, order)[:, : self.out_features]
        blocks = torch.arange(self.in_features) // self.group_size if awq else self.g_idx
        return Numbers(codes, zeros, self.scales, blocks).weight()  # type: ignore[arg-type]


def _unpacked(words: Any, bits: int, dim: int, order: tuple[int, ...]) -> Tensor:
    found = [(words.long() >> (bits * order.index(column))) & (2**bits - 1) for column in range(len(order))]
    return torch.stack(found, dim + 1).flatten(dim, dim + 1)


def _named(name: str) -> type[_StandIn]:
    module, _, cls = name.rpartition(".")
    made = type(cls, (_StandIn,), {"__module__": module, "__qualname__": cls})
    made.forward = _StandIn.forward
    vouch([made], {})
    return made


GPTQ_STAND_IN, AWQ_STAND_IN = _named(GPTQ_LINEARS[0]), _named(AWQ_LINEAR)


def stand_in(layer: nn.Linear, way: Way) -> nn.Module:
    """The layer as GPTQModel would store it."""
    return (AWQ_STAND_IN if way.awq else GPTQ_STAND_IN)(layer, way)


def own_layer(layer: nn.Linear, way: Way, name: str) -> nn.Module:
    """The same as a layer of GPTQModel's own, by the name of its class."""
    module, _, cls = name.rpartition(".")
    kind: Any = getattr(importlib.import_module(module), cls)
    kind.SUPPORTS_GROUP_SIZE = sorted({*kind.SUPPORTS_GROUP_SIZE, 8, 16})  # tests have small layers
    sizes = {"in_features": layer.in_features, "out_features": layer.out_features, "bias": layer.bias is not None}
    made = kind(bits=way.bits, group_size=way.block, sym=False, desc_act=way.act_order, **sizes, register_buffers=True)
    like = stand_in(layer, way)
    for key, t in like.named_buffers():
        assert getattr(made, key).shape == t.shape, key
        setattr(made, key, t)
    made.optimized = True  # without a compiler
    made.post_init()
    return made  # type: ignore[no-any-return]
