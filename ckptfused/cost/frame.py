"""Bytes and products of what every part of a block call uses: the model of csrc/autograd/params.cpp.

`ckptfused.cost.walk` walks through a block call with it, in the order of the C++ code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch

from ckptfused.cost.work import Attention, LowRank, Product, accumulation_type, compute_type
from ckptfused.spec import AttentionSpec, BlockSpec, FFNSpec, param_shapes

_PRODUCT_BLOCK = 1024  # csrc/ops/linear.cpp: rows, columns and depth of a float32 block


def runs_as_float(dtype: torch.dtype) -> bool:
    """Whether this processor's products of a half-precision type are made in float32 blocks."""
    from ckptfused import _C

    return _C.linear_scratch_bytes(1, 1, 1, str(dtype).removeprefix("torch.")) > 0


def product_scratch(n: int, k: int, c: int, dtype: torch.dtype, bias: bool = False, wide: bool = False) -> int:
    """Bytes that a product [n, c] x [c, k] allocates while it runs; wide: into a float32 accumulator."""
    if dtype.itemsize > 2 or not (wide or runs_as_float(dtype)):
        return 0
    n, k, c = (min(size, _PRODUCT_BLOCK) for size in (n, k, c))
    return 4 * (n * c + c * k + (0 if wide else n * k) + (k if bias else 0))


def row_chunks(rows: int) -> int:
    """Partial sums of a gradient that is a sum over rows (csrc/kernels/cpu/rows.h)."""
    size = -(-rows // 64) if rows > 64 * 16 else 16
    return -(-rows // size)


def multiprocessors() -> int:
    """Of the GPU at hand; without one, of an H100."""
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 132


def cuda_row_chunks(rows: int, cols: int) -> int:
    """The same on a GPU (csrc/kernels/cuda/norm_bwd.cu)."""
    warps = min(max((-(-cols // 256) + 1) // 2, 1), 16)
    return max(1, min(-(-rows // 8), multiprocessors() * (16 // warps)))


def cuda_head_chunks(rows: int, heads: int) -> int:
    """Of the q/k norms' gradients, sums over the heads of all rows (csrc/kernels/cuda/qk_bwd.cu)."""
    return max(1, min(-(-rows * heads // 64), 4 * multiprocessors()))


class Timeline:
    """Buffers by name: what is allocated now, and the most that ever was."""

    def __init__(self) -> None:
        self._live: dict[str, int] = {}
        self.now = self.peak = 0

    def __contains__(self, name: str) -> bool:
        return name in self._live

    def alloc(self, name: str, nbytes: int) -> str:
        assert name not in self._live, name
        self._live[name] = nbytes
        self._add(nbytes)
        return name

    def _add(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def free(self, *names: str | None) -> None:
        """Free those of these buffers that are allocated here: what the caller owns has no entry."""
        for name in names:
            self.now -= self._live.pop(name or "", 0)

    def rename(self, old: str, new: str) -> None:
        self._live[new] = self._live.pop(old)

    @contextmanager
    def temporary(self, nbytes: int) -> Iterator[None]:
        """A buffer that lives as long as the context."""
        self._add(nbytes)
        yield
        self._add(-nbytes)


@dataclass(frozen=True)
class Call:
    """What a block is called with, as far as it decides what is allocated."""

    spec: BlockSpec
    batch: int
    length: int
    width: int
    dtype: torch.dtype
    params: Mapping[str, torch.dtype] | None = None  # the filled slots; None: all, of x's dtype
    lengths: tuple[int, ...] | None = None  # of packed sequences
    rope_copies: int = 0
    threads: int = 1
    device: str = "cpu"
    one_kernel: bool = False  # the gate and up products take their activation along (ffn.takes_activation_along)


class Frame:
    """The arguments of a call, its timeline and the list of products that it makes."""

    def __init__(self, call: Call, tiles: tuple[int, int], needs: Collection[str] = (), backward: bool = False) -> None:
        self.call, self.spec, self.backward = call, call.spec, backward
        self.time, self.work = Timeline(), list[Product | Attention | LowRank]()
        self.N, self.C = call.batch * call.length, call.width
        self.R, self.P = call.dtype, compute_type(call.spec, call.dtype)
        self.A = accumulation_type(call.dtype)
        self.shapes = {name: shape for name, (shape, _) in param_shapes(call.spec, call.width).items()}
        self.params = dict.fromkeys(self.shapes, call.dtype) if call.params is None else dict(call.params)
        self.needs = {name for name in needs if name == "x" or name in self.params} if backward else set()
        self.tile_rows, self.tile_cols = tiles
        self.cast: set[str] = set()
        self.grads: dict[str, torch.dtype] = {}
        self.values: set[str] = set()  # what is defined: made here, given, or a view of something else
        self.time.alloc("cos, sin", call.rope_copies)

    @property
    def attn(self) -> AttentionSpec:
        assert self.spec.attn is not None
        return self.spec.attn

    @property
    def ffn(self) -> FFNSpec:
        assert self.spec.ffn is not None
        return self.spec.ffn

    def rows(self, width: int, dtype: torch.dtype) -> int:
        """Bytes of an [N, width] tensor."""
        return self.N * width * dtype.itemsize

    def make(self, name: str, nbytes: int) -> str:
        """A value of the block, in memory of its own."""
        self.values.add(name)
        return self.time.alloc(name, nbytes)

    def drop(self, *names: str) -> None:
        self.values.difference_update(names)
        self.time.free(*names)

    def need(self, *names: str) -> bool:
        return any(name in self.needs for name in names)

    def need_any(self, *names: str) -> bool:
        """Also whether an adapter beside one of these weights is trained (Block::need_any)."""
        prefixes = (prefix for name in names if name.endswith("_w") for prefix in self.adapters(name[:-2]))
        return self.need(*names) or any(self.need(f"{p}.a", f"{p}.b", f"{p}.bias") for p in prefixes)

    def adapters(self, part: str) -> list[str]:
        """The prefixes of the adapters beside a projection ("attn.q")."""
        half, target = part.split(".")
        return [p for p, a in self.spec.adapters.items() if p.startswith(f"{half}.") and a.target == target]

    def need_half(self, half: str) -> bool:
        return any(name.startswith(half) for name in self.needs)

    # Parameters in the types that products and kernels take.

    def weight(self, name: str) -> None:
        if name in self.params and self.params[name] != self.P and name not in self.cast:
            self.cast.add(name)
            self.time.alloc(f"{name} cast", prod(self.shapes[name]) * self.P.itemsize)

    # Gradients.

    def vector_grads(self, *names: str) -> int:
        """Of those that are asked for, in the accumulation type. Returns how many."""
        wanted = [name for name in names if name in self.needs]
        for name in wanted:
            self._grad(name, self.A)
        return len(wanted)

    def _grad(self, name: str, dtype: torch.dtype) -> None:
        if name not in self.grads:
            self.grads[name] = dtype
            self.time.alloc(f"d {name}", prod(self.shapes[name]) * dtype.itemsize)

    def partials(self, width: int, count: int, heads: int = 0) -> None:
        """Partial sums over the rows, or their heads, of `count` vector gradients, while a kernel runs."""
        if self.call.device == "cpu":
            chunks = row_chunks(self.N)
        else:
            chunks = cuda_head_chunks(self.N, heads) if heads else cuda_row_chunks(self.N, width)
        with self.time.temporary(count * chunks * width * self.A.itemsize):
            pass

    def weight_grad(self, name: str, n: int, out: int, into: int) -> None:
        """Gradient of a part [out, into] of a weight, summed over n rows."""
        if name not in self.needs:
            return
        cut_rows = name.startswith("ffn.") and self.tile_rows < self.N
        self._grad(name, self.A if cut_rows else self.P)
        if (self.attn if name.startswith("attn.") else self.ffn).transposed:
            out, into = into, out
        self.product(f"d {name}", out, into, n, wide=self.grads[name] != self.P)

    def bias_grad(self, name: str, width: int, add: bool) -> None:
        if self.vector_grads(name) and add:
            with self.time.temporary(width * self.A.itemsize):
                pass

    # Products.

    def product(self, name: str, n: int, k: int, c: int, bias: bool = False, wide: bool = False) -> None:
        self.work.append(Product(name, n, k, c))
        scratch = product_scratch(n, k, c, self.P, bias, wide) if self.call.device == "cpu" else 0
        with self.time.temporary(scratch):
            pass

    # The residual frame.

    def pre_norm(self, to: str, kind: str, dtype: torch.dtype) -> None:
        if kind == "none" and dtype == self.R:
            self.values.add(to)  # a view
            return
        self.make(to, self.rows(self.C, dtype))

    def residual_backward(self, half: str, ds: str) -> str:
        spec = self.attn if half == "attn" else self.ffn
        if spec.post == "none" and spec.p_res == 0 and spec.m == 1.0 and self.R == self.P:
            return ds
        df = self.time.alloc(f"{half} df", self.rows(self.C, self.P))
        count = self.vector_grads(f"{half}.post_w", f"{half}.post_b")
        self.partials(self.C, count)
        return df

    def norm_backward(
        self, to: str, dn: str | None, prefix: str, kind: str, dres: str | None, owned: bool, need_dx: bool
    ) -> str | None:
        """The buffer that holds dres + d(norm)/dx(dn): a new one, or dres's where that is owned."""
        if dn is None:
            return dres
        count = self.vector_grads(f"{prefix}_w", f"{prefix}_b") if kind != "none" else 0
        if not need_dx and not count:
            return None
        dx = None
        if need_dx:
            dx = dres if owned else self.time.alloc(to, self.rows(self.C, self.R))
        self.partials(self.C, count)
        return dx
