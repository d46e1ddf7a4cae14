"""A block call, as far as it decides which kernels run: asked of the functions that choose when the block runs."""

from __future__ import annotations

import torch

from ckptfused import cost
from ckptfused._extension import _C
from ckptfused.checks import autocast_enabled
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
        self.x, spec = call.x, BlockSpec.parse(call.text)
        kind = self.x.device.type
        if autocast_enabled(self.x) and self.x.dtype == torch.float32:  # as csrc/autograd/function.cpp
            compute = name_of(torch.get_autocast_dtype(kind))
            spec = BlockSpec.parse(f"{call.text} compute={compute}") if compute != "float32" else spec
        self.spec = spec
        self.cuda = kind == "cuda"
        self.dtype = cost.compute_type(spec, self.x.dtype)
        length, batch = self.x.shape[:2] if spec.seq_first else (self.x.shape[1], self.x.shape[0])
        self.batch, self.length, self.width = batch, length, self.x.shape[2]
        self.rows = "CUDA C++" if self.cuda else f"row kernel ({_C.cpu_target()})"

    @property
    def dims(self) -> tuple[int, int, int]:
        return self.batch, self.length, self.width

    def product(self) -> tuple[str, str]:
        if self.cuda:
            return "cuBLAS", ""
        if _C.runs_as_float(name_of(self.dtype)):
            return "float32 blocks", f"this processor has no matrix instructions for {name_of(self.dtype)}"
        if self.dtype == torch.float32 and _C.mkl_is_slow():
            return "PyTorch's product", "large ones by oneDNN: MKL leaves this processor's AVX-512 alone"
        return "PyTorch's product", ""

    def attention(self, a: AttentionSpec) -> tuple[str, str]:
        """A name in ATTENTION, and the reason."""
        if not self.cuda:
            return self._cpu_attention(a)
        shape = backend.Shape.of_spec(a, self.dtype, self.batch, self.length)
        return backend.attention_backend(shape, torch.cuda.get_device_capability(self.x.device))

    def _cpu_attention(self, a: AttentionSpec) -> tuple[str, str]:
        """The kernel that csrc/ops/attention_cpu.cpp chooses, and a reason in words."""
        if "flash attention" in cost.forward_ledger(self.spec, *self.dims, self.x.dtype).launches:
            return "flash", f"softmax over {'the causal' if a.causal else 'all'} keys and nothing else"
        if special := backend.Shape.of_spec(a, self.dtype, self.batch, self.length).special:
            return "tiles", f"PyTorch's kernel has no {', no '.join(special)}"
        if _C.runs_as_float(name_of(self.dtype)):
            return "tiles", f"this processor has no matrix instructions for {name_of(self.dtype)}"
        return "tiles", "causal and a few hundred long: PyTorch's kernel would compute most of what the mask hides"

    def gate_up(self, f: FFNSpec) -> tuple[str, str, bool]:
        """Kernel, reason, and whether the activation is in it."""
        rows = self.batch * self.length
        apart = f.post != "none" or f.out != "none" or f.lora or f.quant  # as Block::choose_up_kernel
        if not self.cuda or apart or not rows:
            return *self.product(), False
        name, reason = tuning.ffn_choice(rows, self.width, f.hidden, f.act, self.dtype, self.x.device)
        return ("cuBLAS", reason, False) if name == tuning.CUBLAS else (f"Triton ({name})", reason, True)

    def tiles(self, f: FFNSpec) -> tuple[int, int, str]:
        """Rows and columns of a tile, and the reason."""
        n, width = self.batch * self.length, self.dtype.itemsize
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
