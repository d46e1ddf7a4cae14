"""Which kernels a block will use for an input, and why; what it keeps and what it makes again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ckptfused import cost
from ckptfused._extension import _C
from ckptfused.call import Call
from ckptfused.checks import autocast_enabled, check_plain
from ckptfused.layer.parts import Reason
from ckptfused.modules.fused import FusedModule
from ckptfused.sizes import counted, size
from ckptfused.spec import AttentionSpec, BlockSpec, FFNSpec
from ckptfused.triton import backend, tuning

__all__ = ["Explanation", "Step", "explain"]


@dataclass(frozen=True)
class Step:
    """A step of forward: its kernel, why that one, and what backward does about its result.

    A kernel in brackets is another step, whose kernel makes this one's result too.
    """

    name: str
    kernel: str
    reason: str = ""
    backward: str = ""


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; as a string, a table for a person."""

    title: str
    steps: tuple[Step, ...]
    saved: dict[str, int]
    """Bytes held until backward, by name; empty where nothing is saved."""
    replayed: dict[str, int]
    """FLOPs of what backward makes again, by name."""
    notes: tuple[str, ...] = ()

    def step(self, name: str) -> Step:
        """The step of that name. **Raises** `KeyError`."""
        for step in self.steps:
            if step.name == name:
                return step
        raise KeyError(name)

    def __str__(self) -> str:
        rows = [("step", "kernel", "in backward", "why")]
        rows += [(s.name, s.kernel, s.backward, s.reason) for s in self.steps]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [self.title, ""]
        for row in rows:
            lines.append(
                "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]]).rstrip()
            )
        if self.saved:
            parts = ", ".join(f"{name} {size(count, 1)}" for name, count in self.saved.items())
            lines += ["", f"Saved for backward: {size(sum(self.saved.values()), 1)} ({parts})."]
        lines += [*([] if self.saved else [""]), *self.notes]
        return "\n".join(lines)


def explain(block: FusedModule, x: Tensor, *args: Any, show: bool = True, **kwargs: Any) -> Explanation:
    """Say which kernel each step of `block(x, *args, **kwargs)` and of its backward will use, and why.

    Nothing is computed: the answers come from the functions that choose when the block runs, and from `ckptfused.cost`.
    They are for the present state of the block (training or not, `keep`), of autocast and of grad mode.

    **Shapes** x and the other arguments as `forward` takes them. x on the meta device stands for one on the block's.
    show: print the table, too.
    **Raises** `TypeError` for a module that is no `FusedCheckpointBlock`, `FusedCheckpointAttention` or
    `FusedCheckpointFFN`; otherwise what `forward` raises for these arguments.
    """
    if not isinstance(block, FusedModule):
        raise TypeError(
            "block: expected a FusedCheckpointBlock, FusedCheckpointAttention or FusedCheckpointFFN (of a "
            f"FusedCheckpointSequential: one of its blocks), got {type(block).__name__}"
        )
    check_plain("x", x)
    kwargs.pop("generator", None)
    device = next(block.parameters()).device
    if x.device.type == "meta" and device.type != "meta":
        x = torch.empty((), dtype=x.dtype, device=device).expand(x.shape).requires_grad_(x.requires_grad)
    title = f"{type(block).__name__} on {x.device}, x {list(x.shape)} {_name(x.dtype)}"
    call = Reason("x is a nested tensor") if x.is_nested else block.prepare(x, *args, **kwargs)
    if isinstance(call, Reason):
        step = Step("everything", "the layers themselves under torch.utils.checkpoint", call.text, "made again")
        found = Explanation(title, (step,), {}, {})
    else:
        found = _fused(title, block, call)
    if show:
        print(found)
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Setting:
    """A block call, as far as it decides kernels."""

    def __init__(self, call: Call) -> None:
        self.x, spec = call.x, BlockSpec.parse(call.text)
        kind = self.x.device.type
        if autocast_enabled(self.x) and self.x.dtype == torch.float32:  # as csrc/autograd/function.cpp
            compute = _name(torch.get_autocast_dtype(kind))
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
        if _C.runs_as_float(_name(self.dtype)):
            return "float32 blocks", f"this processor has no matrix instructions for {_name(self.dtype)}"
        if self.dtype == torch.float32 and _C.mkl_is_slow():
            return "PyTorch's product", "large ones by oneDNN: MKL leaves this processor's AVX-512 alone"
        return "PyTorch's product", ""

    def attention(self, a: AttentionSpec) -> tuple[str, str]:
        """A name in _ATTENTION, and the reason."""
        if not self.cuda:
            return self._cpu_attention(a)
        shape = backend.Shape.of_spec(a, self.dtype, self.batch, self.length)
        return backend.attention_backend(shape, torch.cuda.get_device_capability(self.x.device))

    def _cpu_attention(self, a: AttentionSpec) -> tuple[str, str]:
        """As csrc/ops/attention_cpu.cpp chooses; the reason is this page's."""
        if "flash attention" in cost.forward_ledger(self.spec, *self.dims, self.x.dtype).launches:
            return "flash", f"softmax over {'the causal' if a.causal else 'all'} keys and nothing else"
        if special := backend.Shape.of_spec(a, self.dtype, self.batch, self.length).special:
            return "tiles", f"PyTorch's kernel has no {', no '.join(special)}"
        if _C.runs_as_float(_name(self.dtype)):
            return "tiles", f"this processor has no matrix instructions for {_name(self.dtype)}"
        return "tiles", "causal and a few hundred long: PyTorch's kernel would compute most of what the mask hides"

    def gate_up(self, f: FFNSpec) -> tuple[str, str, bool]:
        """Kernel, reason, and whether the activation is in it."""
        rows = self.batch * self.length
        if not self.cuda or f.post != "none" or f.out != "none" or f.lora or not rows:  # as Block::choose_up_kernel
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


_ATTENTION = {
    "flash": "PyTorch's flash kernel",
    "cudnn": "cuDNN through PyTorch",
    "triton": "Triton",
    "tiles": "our tiles",
}


def _norm(kind: str) -> str:
    return {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "gemma": "RMSNorm with 1 + w"}[kind]


def _attention_steps(s: _Setting, a: AttentionSpec, after: dict[str, str]) -> list[Step]:
    steps = []
    product, why = s.product()
    if a.pre != "none":
        steps.append(Step("norm before attention", s.rows, _norm(a.pre), "made again"))
    steps.append(Step("QKV product", product, why, after["qkv"]))
    steps += _adapters(s, a, ("q", "k", "v"), after["qkv"])
    turned = ["q/k norm"] * (a.qk_norm != "none") + [f"RoPE ({a.rope})"] * (a.rope != "none")
    if turned:
        steps.append(Step("q, k", s.rows, " and ".join(turned), "made again"))
    name, reason = s.attention(a)
    steps.append(Step("attention", _ATTENTION[name], reason, after["attention"]))
    steps.append(Step("output projection", product, why, after["proj"]))
    steps += _adapters(s, a, ("o",), after["proj"])
    return [*steps, _residual(s, "attention", a)]


def _adapters(s: _Setting, half: AttentionSpec | FFNSpec, targets: tuple[str, ...], after: str) -> list[Step]:
    """The adapters beside a product, if there are any."""
    found = [adapter for adapter in half.lora if adapter.target in targets]
    if not found:
        return []
    acc = _name(cost.accumulation_type(s.x.dtype))
    parts = [f"{a.target}: rank {a.rank}" + (f", dropout {a.p:g}" if a.p else "") for a in found]
    names = ", ".join(dict.fromkeys(adapter.target for adapter in found))
    kernel = "PyTorch's products" if s.cuda else "blocks of rows"
    return [Step(f"adapters of {names}", kernel, f"{'; '.join(parts)}; in {acc}, rounded once", after)]


def _residual(s: _Setting, half: str, spec: AttentionSpec | FFNSpec) -> Step:
    """The one kernel that closes a half."""
    parts = [_norm(spec.post)] if spec.post != "none" else []
    parts += [f"dropout {spec.p_res:g}"] if spec.p_res else []
    parts += ["sum", *([_norm(spec.out)] if spec.out != "none" else [])]
    return Step(f"residual of {half}", s.rows, ", ".join(parts) + " in one pass", "its gradient")


def _ffn_steps(s: _Setting, f: FFNSpec, after: dict[str, str]) -> list[Step]:
    steps = []
    product, why = s.product()
    if f.pre != "none":
        before = s.spec.attn if not s.spec.parallel else None  # as Block::ensure_mid
        kernel = "(residual of attention)" if before is not None and before.out == "none" else s.rows
        steps.append(Step("norm before FFN", kernel, _norm(f.pre), "made again"))
    first = "gate and up products" if f.gated else "up product"
    kernel, reason, activated = s.gate_up(f)
    steps.append(Step(first, kernel, reason, after["gu"]))
    steps += _adapters(s, f, ("gate", "up"), after["gu"])
    dropped = f" and dropout {f.p_hidden:g}" if f.p_hidden else ""
    kernel = f"({first})" if activated else s.rows
    steps.append(Step("activation", kernel, f"{f.act}{dropped} in one pass", "made again with its gradient"))
    steps.append(Step("down product", product, why, after["down"]))
    steps += _adapters(s, f, ("down",), after["down"])
    steps.append(Step("tiles of the FFN", "", s.tiles(f)[2], "the same"))
    return [*steps, _residual(s, "FFN", f)]


def _fused(title: str, block: FusedModule, call: Call) -> Explanation:
    s = _Setting(call)
    title += "" if s.dtype == s.x.dtype else f", products in {_name(s.dtype)}"
    spec, work = s.spec, cost.forward_products(s.spec, *s.dims)
    again = cost.replayed(spec)
    held = {"qkv": ("qkv",), "attention": ("attn",), "proj": ("mid", "proj"), "gu": ("gu",), "down": ("out",)}
    kept = {name: any(value in spec.keep for value in values) for name, values in held.items()}
    after = {name: "made again" if name in again else "kept" if kept[name] else "not needed" for name in held}
    steps = [] if spec.attn is None else _attention_steps(s, spec.attn, after)
    steps += [] if spec.ffn is None else _ffn_steps(s, spec.ffn, after)

    wanted = (s.x, *(slot for slot in call.slots if slot is not None))
    saves = torch.is_grad_enabled() and any(t.requires_grad for t in wanted)
    if not saves:
        steps = [Step(step.name, step.kernel, step.reason) for step in steps]
        note = "Nothing is saved: no gradient is asked for."
        return Explanation(title, tuple(steps), {}, {}, (note, *_missing(s)))
    saved = {"x": s.x.numel() * s.x.element_size()}
    values = cost.kept_values(spec, *s.dims, s.x.dtype)
    saved |= {name: torch.Size(shape).numel() * dtype.itemsize for name, (shape, dtype) in values.items()}
    if spec.has_dropout:
        saved["random state"] = cost.saved_bytes(spec, *s.dims, s.x.dtype) - sum(saved.values())
    replayed = {name: work[name].flops for name in again}
    return Explanation(title, tuple(steps), saved, replayed, (*_notes(s, replayed), *_missing(s)))


def _notes(s: _Setting, replayed: dict[str, int]) -> list[str]:
    total = cost.forward_flops(s.spec, *s.dims) + cost.backward_flops(s.spec, *s.dims)
    share = sum(replayed.values()) / total if total else 0.0
    names = {"qkv": "QKV", "attention": "attention", "proj": "output projection", "gu": "gate/up", "down": "down"}
    made = ", ".join(names[name] for name in replayed) or "no product"
    notes = [f"Made again in backward: {made}; {100 * share:.0f} % of the step's FLOPs."]
    if s.cuda and s.spec.attn is not None and s.attention(s.spec.attn)[0] == "cudnn":
        own = "its own and, for the replay, that of forward" if "attention" in replayed else "its own"
        notes.append(
            "cuDNN's plans are built on the host at a shape's first forward and first backward, once a thread: "
            f"backward's thread builds {own}."
        )
    packed = s.spec.attn is not None and s.spec.attn.packed
    if not packed:
        device = "cuda" if s.cuda else "cpu"
        forward = cost.forward_scratch(s.spec, *s.dims, s.x.dtype, device=device)
        backward = cost.backward_scratch(s.spec, *s.dims, s.x.dtype, device=device)
        notes.append(
            f"Most memory at a time: forward {size(forward, 1)}, backward {size(backward, 1)}, results included."
        )
    return notes


def _missing(s: _Setting) -> list[str]:
    """What this call needs and will raise without."""
    if not s.cuda:
        return []
    notes = []
    if not _C.cuda_architectures:
        notes.append("ckptfused was built for the CPU alone: this call will raise on a CUDA device.")
    if s.spec.attn is not None and s.attention(s.spec.attn)[0] == "triton" and not backend.has_triton():
        notes.append("Triton, which attention needs here, is not installed: this call will raise.")
    return notes
