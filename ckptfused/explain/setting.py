"""A block call, as far as it decides which kernels run: asked of the functions that choose when the block runs."""

from __future__ import annotations

from functools import cached_property

import torch

from ckptfused import cost
from ckptfused._extension import _C
from ckptfused.checks import compute_word
from ckptfused.cost.products import AttentionWork
from ckptfused.ops.call import Call
from ckptfused.sizes import counted, size
from ckptfused.spec import AttentionSpec, BlockSpec, FFNSpec
from ckptfused.triton import backend, tuning

ATTENTION = {
    "flash": "PyTorch's flash kernel",
    "cudnn": "cuDNN through PyTorch",
    "triton": "Triton",
    "tiles": "our tiles",
}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Setting:
    """A block call, as far as it decides kernels."""

    def __init__(self, call: Call) -> None:
        self.x, self.text = call.x, call.text + compute_word(call.x)
        self.spec = BlockSpec.parse(self.text)
        self.cuda = self.x.device.type == "cuda"
        self.dtype = cost.compute_type(self.spec, self.x.dtype)
        length, batch = self.x.shape[:2] if self.spec.seq_first else (self.x.shape[1], self.x.shape[0])
        self.batch, self.length, self.width = batch, length, self.x.shape[2]
        self.rows = "CUDA C++" if self.cuda else f"row kernel ({_C.cpu_target()})"

    @property
    def dims(self) -> tuple[int, int, int]:
        return self.batch, self.length, self.width

    def product(self) -> tuple[str, str]:
        return ("cuBLAS", "") if self.cuda else _C.product_choice(name_of(self.dtype))

    @cached_property
    def query_tile(self) -> int | None:
        """Tokens of a tile, where the block goes by tiles of queries."""
        if self.spec.attn is None:
            return None
        work = cost.forward_ledger(self.spec, *self.dims, self.x.dtype, device="cuda" if self.cuda else "cpu").work
        return max((w.length for w in work if isinstance(w, AttentionWork) and w.keys is not None), default=None)

    def attention(self, a: AttentionSpec) -> tuple[str, str]:
        """A name in ATTENTION, and the reason."""
        if tile := self.query_tile:
            count = -(-self.length // tile)
            return (
                "flash" if self.cuda else "tiles",
                f"{count} blocks of {tile:,} queries, for q, k, v, o and their gradients are more than scratch=",
            )
        shape = backend.AttentionShape.of_spec(a, self.dtype, self.batch, self.length)
        if self.cuda:
            return backend.attention_backend(shape, torch.cuda.get_device_capability(self.x.device))
        sizes = (self.batch, a.heads, self.length, a.head_dim)
        flash, reason = _C.flash_choice(shape.bits, name_of(self.dtype), sizes)
        return "flash" if flash else "tiles", reason

    def gate_up(self, f: FFNSpec) -> tuple[str, str, bool]:
        """Kernel, reason, and whether the activation is in it."""
        rows = self.batch * self.length
        if not self.cuda or not _C.may_fuse_up(self.text, rows):
            return *self.product(), False
        name, reason = tuning.ffn_choice(rows, self.width, f.hidden, f.act, self.dtype, self.x.device)
        return ("cuBLAS", reason, False) if name == tuning.CUBLAS else (f"Triton ({name})", reason, True)

    def tiles(self, f: FFNSpec) -> tuple[int, int, str]:
        """Rows and columns of a tile, and the reason."""
        n, width = self.batch * self.length, self.dtype.itemsize
        if self.query_tile:
            n = self.query_tile * (self.batch if self.spec.seq_first else 1)
        device = "cuda" if self.cuda else "cpu"
        rows, cols = cost.ffn_tiles(n, self.width, f.hidden, f.gated, width, self.spec.scratch, device)
        scratch = f"{size((3 if f.gated else 2) * n * f.hidden * width, 1)} of hidden-wide scratch in one piece"
        if (rows, cols) == (n, f.hidden):
            return rows, cols, scratch
        cut = (
            f"{-(-n // rows)} tiles of {counted(rows, 'row')}"
            if rows < n
            else f"{-(-f.hidden // cols)} tiles of {counted(cols, 'column')}"
        )
        return rows, cols, f"{cut}: {scratch} would be more than a block takes"
