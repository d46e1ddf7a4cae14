"""What a block call allocates, multiplies and launches: the C++ block itself, run on meta tensors with a ledger.

csrc/ops/ledger.h is the ledger, csrc/block/count.h runs the block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from ckptfused._extension import _C
from ckptfused.compat.torch_dispatch import has_kernel
from ckptfused.cost.attention import attention_cost, multiprocessors
from ckptfused.cost.products import AttentionWork, LowRank, Product
from ckptfused.cost.saved_tensors import compute_type
from ckptfused.spec import AUX_NAMES, BlockSpec, param_names, param_shapes, quantized_slots, shape_in

LedgerEvent = tuple[str, str, int, Sequence[int], str]  # kind, name, slot or -1, sizes, type of a product's operands


@dataclass(frozen=True)
class Ledger:
    """What happened in one forward or one backward, in order."""

    events: tuple[LedgerEvent, ...]
    slots: tuple[str, ...]
    """Names of the parameter slots; none in a ledger of several blocks."""

    def name(self, event: LedgerEvent) -> str:
        """What an event is about: `"qkv"`, `"d attn.q_w"`, `"d in of attn.q"`, …"""
        _, name, slot, _, _ = event
        if slot < 0 or not self.slots:
            return name
        whole = name in ("d", "cast")
        return f"{name} {self.slots[slot] if whole else self.slots[slot].removesuffix('_w')}"

    @cached_property
    def work(self) -> list[Product | AttentionWork | LowRank]:
        """The products, attention calls and adapters."""
        made: list[Product | AttentionWork | LowRank] = []
        for event in self.events:
            kind, sizes = event[0], event[3]
            if kind == "product":
                made.append(Product(self.name(event), *sizes[:4]))
            elif kind == "attention":
                batch, heads, length, head_dim, products, keys = sizes
                others = None if keys == length else keys
                made.append(AttentionWork(batch, heads, length, head_dim, event[1], products, others))
            elif kind == "low rank":
                made.append(LowRank(self.name(event), *sizes[:4]))
        return made

    @cached_property
    def launches(self) -> Counter[str]:
        """Kernels by name: small ops, `"product"`, and PyTorch's operators."""
        return Counter(event[1] for event in self.events if event[0] == "launch")

    @cached_property
    def peak(self) -> int:
        """The most bytes that were allocated at a time."""
        return max(self._levels)

    @property
    def live(self) -> int:
        """Bytes that were still allocated in the end: those of the results."""
        return self._levels[-1]

    @cached_property
    def _levels(self) -> list[int]:
        now, levels = 0, [0]
        for kind, _, _, sizes, _ in self.events:
            if kind == "allocation":
                now += sizes[1]
            elif kind == "release":
                now -= sizes[1]
            else:
                continue
            levels.append(now)
        return levels


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_that_chooses(device: str) -> str | None:
    """Where the FFN's products may take their activation along: the device whose op a block asks; None: nowhere."""
    asked = has_kernel("ckptfused::ffn_choice", device.upper())
    return device if asked and (device == "cpu" or torch.cuda.is_available()) else None


def counted_device(
    device: str,
    threads: int | None,
    cut_ffn: bool = True,
    attention: tuple[int, ...] = (0, 1, 0, 1),
) -> tuple[tuple[bool, int, int, bool, tuple[int, ...]], str | None]:
    """A device as the extension takes it, and such a device where there is one that chooses kernels."""
    gpu = device == "cuda"
    threads = torch.get_num_threads() if threads is None else threads
    return (gpu, threads, multiprocessors() if gpu else 1, cut_ffn, attention), _device_that_chooses(device)


def attention_on_gpu(
    spec: BlockSpec, dtype: torch.dtype, batch: int, length: int, lengths: Sequence[int] | None
) -> tuple[int, ...]:
    """Scratch and launches of a block's attention, forward and backward."""
    assert spec.attn is not None
    call = (spec.attn, compute_type(spec, dtype), batch, length, lengths)
    return (*attention_cost(*call, backward=False), *attention_cost(*call, backward=True))


def _count(*call: Any) -> tuple[LedgerEvent, ...]:
    return tuple(_C.count(*call))


def _by_slot(tables: Mapping[str, tuple[Sequence[int], torch.dtype]] | None) -> tuple[Any, ...]:
    given = {name: (tuple(sizes), _name(dtype)) for name, (sizes, dtype) in (tables or {}).items()}
    return tuple(map(given.get, AUX_NAMES)) if given else ()


_cached_count = lru_cache(maxsize=512)(_count)


def count(
    spec: BlockSpec,
    batch: int,
    length: int,
    width: int,
    dtype: torch.dtype,
    *,
    needs: Collection[str] | None = None,
    save: bool = True,
    params: Mapping[str, torch.dtype] | None = None,
    lengths: Sequence[int] | None = None,
    tables: Mapping[str, tuple[Sequence[int], torch.dtype]] | None = None,
    threads: int | None = None,
    device: str = "cpu",
    cut_ffn: bool = True,
) -> Ledger:
    """What a forward does or, where `needs` is given, a backward.

    `params`: the filled slots and their dtypes; None: all, of x's dtype. `lengths`: of packed sequences. `tables`:
    shapes and dtypes of cos, sin and q_scale, which are copied where they are not [..., T, rotary_dim / 2] in the
    accumulation type and [..., T] in that of products; None: they are.
    `threads`: None, as many as PyTorch has now. `cut_ffn`: False: the FFN in one piece, whatever its size.
    `device`: "cpu" or "cuda", where neither the platform's workspaces nor the allocator's rounding count, as many
    multiprocessors are assumed as the GPU at hand has (132 without one), and torch.use_deterministic_algorithms as it
    is now. Whether the FFN's products take their activation along is as a block finds it on the current GPU.
    """
    names, shapes = param_names(spec), param_shapes(spec, width)
    types = dict.fromkeys(shapes, dtype) if params is None else dict(params)
    types.update((name, torch.uint8) for name in quantized_slots(spec) & types.keys())  # shapes are their bytes
    filled = tuple((shape_in(shapes[name][0], batch), _name(types[name])) if name in types else None for name in names)
    attention: tuple[int, ...] = (0, 1, 0, 1)
    bounds: tuple[int, ...] = (0,)
    for size in lengths or ():
        bounds = (*bounds, bounds[-1] + size)
    if device == "cuda" and spec.attn is not None:
        attention = attention_on_gpu(spec, dtype, batch, length, lengths)
    asked = None if needs is None else ("x" in needs, *(name in needs and name in types for name in names))
    counted, there = counted_device(device, threads, cut_ffn, attention)
    events = (_cached_count if there is None else _count)(
        spec.to_string(),
        (length, batch, width) if spec.seq_first else (batch, length, width),
        _name(dtype),
        filled,
        bounds if lengths else (),
        _by_slot(tables),
        counted,
        there,
        save,
        asked,
    )
    return Ledger(events, names)
