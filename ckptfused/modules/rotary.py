"""Tables of cosines and sines for rotary position embeddings: one for all modules of a process that read the same."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ckptfused.compat.torch_compile import constant_result
from ckptfused.compat.torch_dispatch import FakeTensor, is_traceable_wrapper_subclass, without_modes_and_transforms
from ckptfused.spec.checks import check_integer, check_number

_FIRST_LENGTH = 512
_ANY_LENGTH = 32768  # 16 MiB for heads 128 wide, once a process: up to there a graph for any length reads the table
RotaryTables = tuple[Tensor, Tensor]


class _Key(NamedTuple):
    """All that a table depends on, but for its length."""

    dim: int
    theta: float
    dtype: torch.dtype
    device: torch.device


class _Table:
    """cos and sin of the positions met so far, for everybody with the same key. Grows in powers of two."""

    def __init__(self, key: _Key) -> None:
        self.key = key
        self.pair = _stored(key, _FIRST_LENGTH)
        self.captured: list[RotaryTables] = []
        """What a CUDA graph reads: it has to outlive a longer table that takes its place."""
        self._growing = threading.Lock()

    def reaching(self, length: int) -> RotaryTables:
        """cos and sin of at least so many positions."""
        pair = self.pair  # read once: another thread may put a longer one in place
        if length <= pair[0].size(0):
            return pair
        with self._growing:
            if length > self.pair[0].size(0):
                self.pair = _stored(self.key, 1 << (length - 1).bit_length())
            return self.pair

    def for_capture(self, length: int) -> RotaryTables | None:
        """The table for a CUDA graph; None where it is too short: what is computed now is not there yet."""
        pair = self.pair
        if length > pair[0].size(0):
            return None
        if not any(kept is pair for kept in self.captured):
            self.captured.append(pair)
        return pair

    def __deepcopy__(self, memo: Any) -> _Table:
        return self


_tables: WeakValueDictionary[_Key, _Table] = WeakValueDictionary()
_making = threading.Lock()


def _shared(key: _Key) -> _Table:
    with _making:
        table = _tables.get(key)
        if table is None:
            _tables[key] = table = _Table(key)
        return table


def _computed(key: _Key, length: int, like: Tensor) -> RotaryTables:
    """cos and sin of positions 0 … length - 1, computed in float64 where `like` is; a fake tensor makes fake ones."""
    steps, positions = (like.new_ones(n, dtype=torch.int64).cumsum(0) - 1 for n in (key.dim // 2, length))
    frequencies = torch.pow(key.theta, -2.0 * steps.double() / key.dim)
    angles = positions[:, None] * frequencies
    return angles.cos().to(key.dtype), angles.sin().to(key.dtype)


def _stored(key: _Key, length: int) -> RotaryTables:
    """A table to be read in other calls: no mode and no transform of this one gets at it, and backward may save it."""
    with without_modes_and_transforms(), torch.inference_mode(False), torch.no_grad():
        return _computed(key, length, torch.empty(0, device=key.device))


@constant_result
def _constant(words: str, dtype: torch.dtype, device: torch.device, length: int) -> RotaryTables:
    """The table when torch.compile traces, for so many positions. The compiled graph holds it, for others to share.

    words: width and theta, as text: torch.compile may trace a float as a symbol.
    """
    dim, theta = words.split()
    table = _shared(_Key(int(dim), float(theta), dtype, device))
    # Parameters have fixed shapes, with dynamic=True, too.
    with torch.inference_mode(False):
        cos, sin = (nn.Parameter(t, requires_grad=False) for t in table.reaching(length))
    cos.table = table  # type: ignore[attr-defined]
    return cos, sin


class RotaryTable(nn.Module):
    """cos and sin of position times frequency, kept for the positions met so far.

    There is one table for each (theta, width, type, device) in a process. All modules that read it share it; it is
    freed with the last of them. It is found by the tensor of a call, so it has no part in `state_dict`, buffers, or
    what moves a module. It is computed in float64 and stored in float32 (float64 for a float64 tensor), and grows in
    powers of two. A graph for any length (`torch.compile`, `torch.export`) reads a table of 32,768 positions, or
    computes its own: beyond that, in an exported program, and with PyTorch 2.11, which takes every graph for one.

    **Shapes** dim: the rotary width r (even). Result of a call: cos and sin, each [T, r/2].
    **Raises** `ValueError` or `TypeError` for a width or theta out of range.
    **Source** Su et al. 2021, RoFormer (arXiv 2104.09864), equation 15: frequencies theta^(-2i/r).
    """

    def __init__(self, dim: int, theta: float = 1e4) -> None:
        super().__init__()
        check_integer("rotary_dim", dim, 2)
        if dim % 2:
            raise ValueError(f"rotary_dim: expected an even number of at least 2, got {dim}")
        check_number("rope", theta)
        if not theta > 0:
            raise ValueError(f"rope: expected a positive theta, got {theta!r}")
        self.dim = dim
        self.theta = float(theta)
        self._words = f"{self.dim} {self.theta!r}"
        self._read: dict[tuple[torch.device, torch.dtype], _Table] = {}

    def forward(self, length: int, like: Tensor | None = None) -> RotaryTables:
        """cos and sin of positions 0 … length - 1, for a tensor on this device and of this type (None: PyTorch's
        defaults): views of the table.
        """
        like = torch.empty(0) if like is None else like
        device, dtype = like.device, torch.float64 if like.dtype == torch.float64 else torch.float32
        if torch.compiler.is_dynamo_compiling():
            return self._traced(length, like, dtype)
        if like.is_meta or isinstance(like, FakeTensor) or is_traceable_wrapper_subclass(like):
            return _computed(_Key(self.dim, self.theta, dtype, device), length, like)
        table = self._read.get((device, dtype))
        if table is None:
            table = self._read[device, dtype] = _shared(_Key(self.dim, self.theta, dtype, device))
        if like.is_cuda and torch.cuda.is_current_stream_capturing():
            pair = table.for_capture(length) or _computed(table.key, length, like)
        else:
            pair = table.reaching(length)
        return pair[0][:length], pair[1][:length]

    def _traced(self, length: int, like: Tensor, dtype: torch.dtype) -> RotaryTables:
        """The table where torch.compile traces: for this length alone, or for any."""
        from torch.fx.experimental.symbolic_shapes import has_static_value

        if has_static_value(length):
            cos, sin = _constant(f"{self._words}", dtype, like.device, length)
            return cos[:length], sin[:length]
        if not torch.compiler.is_exporting():  # an exported program has no guards, and so no bound on its length
            cos, sin = _constant(f"{self._words}", dtype, like.device, _ANY_LENGTH)
            if length <= cos.size(0):
                return cos.narrow(0, 0, length), sin.narrow(0, 0, length)  # a slice would settle the length
        return _computed(_Key(self.dim, self.theta, dtype, like.device), length, like)

    def packed(self, cu_seqlens: Tensor, length: int, like: Tensor) -> RotaryTables:
        """cos and sin of positions that start anew in each of the packed sequences; new tensors."""
        cos, sin = self(length, like)
        place = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        start = cu_seqlens[torch.searchsorted(cu_seqlens, place, right=True) - 1]
        position = (place - start).clamp(0, length - 1)  # bounds out of range are refused by the op
        return cos[position], sin[position]

    def _apply(self, fn: Any, recurse: bool = True) -> RotaryTable:
        self._read.clear()  # the module moves, perhaps: a table that nobody reads any more is freed
        return super()._apply(fn, recurse)  # type: ignore[return-value]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_read": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._read = {}
        self._words = f"{self.dim} {self.theta!r}"
        self._buffers.clear()  # version 0.1 had tables of its own

    def extra_repr(self) -> str:
        return f"{self.dim}, theta={self.theta}"
