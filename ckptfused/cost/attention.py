"""The attention half of a walk through a block call: the model of csrc/autograd/attention.cpp."""

from __future__ import annotations

import torch

from ckptfused.cost.frame import multiprocessors, runs_as_float
from ckptfused.cost.project import Projections
from ckptfused.cost.work import Attention
from ckptfused.spec import AttentionSpec
from ckptfused.triton.backend import Shape, attention_backend, backward_backend
from ckptfused.triton.problem import GAP

_QUERY_TILE = 128  # csrc/kernels/cpu/attention.h

Part = tuple[str, int]  # slot, width


def cpu_attention(a: AttentionSpec, batch: int, length: int, dtype: torch.dtype) -> tuple[str, str]:
    """The kernel of attention on the CPU, "flash" (PyTorch's) or "tiles" (ours), and why: csrc/ops/attention_cpu.cpp's
    choice."""
    if special := Shape.of_spec(a, dtype, batch, length).special:
        return "tiles", f"PyTorch's kernel has no {', no '.join(special)}"
    if dtype.itemsize == 2 and runs_as_float(dtype):
        return "tiles", f"this processor has no matrix instructions for {str(dtype).removeprefix('torch.')}"
    if a.causal and 256 < length <= 1024 and batch * a.kv_heads >= 4:
        return "tiles", "causal and a few hundred long: PyTorch's kernel would compute most of what the mask hides"
    return "flash", f"softmax over {'the causal' if a.causal else 'all'} keys and nothing else"


class AttentionWalk(Projections):
    """From n1 to proj, and back."""

    save = False
    qk_in_place = False

    @property
    def _qkv_parts(self) -> list[Part]:
        a = self.attn
        if a.joint:
            return [("attn.q", a.qkv_width)]
        return [("attn.q", a.q_width), ("attn.k", a.kv_width), ("attn.v", a.kv_width)]

    def _kernel(self) -> str:
        """ "flash", "cudnn", "triton" or "tiles"."""
        call = self.call
        if call.device == "cpu":
            return cpu_attention(self.attn, call.batch, call.length, self.P)[0]
        shape = Shape.of_spec(self.attn, self.P, call.batch, call.length)
        return attention_backend(shape, (9, 0))[0]

    def _tiled_scratch(self, backward: bool, tasks: int, longest: int) -> int:
        from ckptfused import _C

        dtype = str(self.P).removeprefix("torch.")
        each = _C.attention_scratch_bytes(backward, dtype, longest, longest, self.attn.head_dim)
        return min(self.call.threads, tasks) * each

    def _flash_scratch(self) -> int:
        """Of FlashAttention-2's backward in PyTorch (flash_api.cpp): dq and the sums of do·o in float32, rows in blocks
        of 128 and heads of 32 entries (64 from 129 on), and under GQA the gradients of k and v by query head.

        Repeatable, it adds up dq without atomics: in as many copies as give every multiprocessor one of the B·H heads,
        ⌈multiprocessors / (B·H)⌉. So with few heads dq is 4·multiprocessors bytes for a row and entry, whatever B·H.
        """
        a, call = self.attn, self.call
        rows, block = -(-call.length // 128) * 128, 32 if a.head_dim <= 128 else 64
        asked = torch.are_deterministic_algorithms_enabled()
        repeatable = asked and not torch.is_deterministic_algorithms_warn_only_enabled()
        copies = -(-multiprocessors() // max(call.batch * a.heads, 1)) if repeatable else 1
        sums = 4 * call.batch * a.heads * rows * (copies * -(-a.head_dim // block) * block + 1)
        return sums + (2 * self.rows(a.q_width, self.P) if a.kv_heads != a.heads else 0)

    def ensure_n1(self) -> None:
        if "n1" not in self.values:
            self.pre_norm("n1", self.attn.pre, self.P)

    def ensure_qkv(self) -> None:
        if "qkv" in self.values and not self.qk_in_place:
            return
        self.ensure_n1()
        self.make("qkv", self.rows(self.attn.qkv_width, self.P))
        self.qk_in_place = False
        self.project("qkv", self.N, self.C, self._qkv_parts)
        if self.spec.parallel != "shared":
            self.drop("n1")

    def ensure_qk(self) -> None:
        if "qk" in self.values:
            return
        self.ensure_qkv()
        a = self.attn
        plain = a.qk_norm == a.rope == "none"
        raw_needed = "qkv" in self.spec.keep or (self.backward and a.qk_norm != "none")
        self.values.add("qk")
        if plain:
            return
        self.qk_in_place = not raw_needed
        if raw_needed:
            self.make("qk", self.rows(a.qkv_width, self.P))

    def ensure_attn(self) -> None:
        if "o" in self.values:
            return
        self.ensure_qk()
        a, call = self.attn, self.call
        self.work.append(Attention(call.batch, a.heads, call.length, a.head_dim))
        self.make("o", self.rows(a.q_width, self.P))
        self.make("lse", self.rows(a.heads, self.A))
        if call.device != "cpu":
            pass  # nothing beside o and lse
        elif self._kernel() == "flash":
            # PyTorch's lse is [B, T, H] in memory, its o has the order of q's.
            copies = self.rows(a.heads, self.A) if a.heads > 1 and call.length > 1 else 0
            with self.time.temporary(copies + self._o_rows()):
                pass
        else:
            lengths = call.lengths or (call.length,) * call.batch
            tasks = a.heads * sum(-(-length // _QUERY_TILE) for length in lengths)
            with self.time.temporary(self._tiled_scratch(False, tasks, max(lengths))):
                pass
        if not self.backward:
            self.drop("qk")
            if not (self.save and "qkv" in self.spec.keep):
                self.drop("qkv")

    def _o_rows(self) -> int:
        """Bytes of a copy of o between the order of x and [B, T, H·D]."""
        copied = self.spec.seq_first and self.call.batch > 1 and self.call.length > 1
        return self.rows(self.attn.q_width, self.P) if copied else 0

    def ensure_proj(self) -> None:
        if "proj" in self.values:
            return
        self.ensure_attn()
        self.make("proj", self.rows(self.C, self.P))
        with self.time.temporary(self._o_rows()):
            self.project("proj", self.N, self.attn.q_width, [("attn.o", self.C)])

    def attention_backward(self, ds: str) -> str | None:
        a = self.attn
        need_n1 = self.need("x", "attn.pre_w", "attn.pre_b")
        qkv_slots = [f"attn.{part}_{kind}" for part in ("q", "k", "v", "q_norm", "k_norm") for kind in "wb"]
        need_qkv = need_n1 or self.need_any(*qkv_slots)
        if not (need_qkv or self.need_any("attn.o_w", "attn.o_b", "attn.post_w", "attn.post_b")):
            return None

        if a.post != "none":
            self.ensure_proj()
        dproj = self.residual_backward("attn", ds)
        self.drop("proj")
        if need_qkv:
            self.time.alloc("d_o", self.rows(a.q_width, self.P))
        if need_qkv or self.need_any("attn.o_w"):
            self.ensure_attn()
        with self.time.temporary(self._o_rows() if "o" in self.values else 0):
            self.project_backward(self.N, a.q_width, [("attn.o", self.C)], self.P if need_qkv else None, False)
        if dproj != ds:
            self.time.free(dproj)
        if not need_qkv:
            return None

        self.ensure_qk()
        self._attention_bwd()
        self.time.free("d_o")
        self.drop("o", "lse", "qk")
        if a.qk_norm == "none":
            self.drop("qkv")

        self.time.alloc("dqkv", self.rows(a.qkv_width, self.P))
        for d, name, heads in (("dq", "attn.q_norm", a.heads), ("dk", "attn.k_norm", a.kv_heads)):
            count = self.vector_grads(f"{name}_w", f"{name}_b")
            self.partials(a.head_dim, count, heads)
            self.time.free(d)
        self.drop("qkv")
        self.time.free("dv")

        if need_n1:
            self.time.alloc("dn1", self.rows(self.C, self.P))
        if self.need_any(*qkv_slots[:6]):
            self.ensure_n1()
        self.project_backward(self.N, self.C, self._qkv_parts, self.P if need_n1 else None, False)
        self.drop("n1")
        self.time.free("dqkv")
        return "dn1" if need_n1 else None

    def _attention_bwd(self) -> None:
        a, call = self.attn, self.call
        self.work.append(Attention(call.batch, a.heads, call.length, a.head_dim, "attention backward", 5))
        for name, width in (("dq", a.q_width), ("dk", a.kv_width), ("dv", a.kv_width)):
            self.time.alloc(name, self.rows(width, self.P))
        lengths, scratch, kernel = call.lengths or (call.length,) * call.batch, 0, backward_backend(self._kernel())
        if kernel == "tiles":
            scratch = self._tiled_scratch(True, len(lengths) * a.kv_heads, max(lengths))
        elif kernel == "flash" and call.device != "cpu":
            scratch = self._flash_scratch()
        elif kernel == "triton":  # delta and lse, padded for each sequence
            scratch = 2 * self.A.itemsize * a.heads * (self.N + GAP * len(lengths))
        with self.time.temporary(scratch):
            pass
