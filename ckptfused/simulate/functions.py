"""What is put in the place of functions that do not run on meta tensors as they do on real ones."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ckptfused._extension import _C
from ckptfused.compat.kernels import replaced_kernels
from ckptfused.compat.patches import here, instead, patched_attribute
from ckptfused.compat.transformers import packing_lookup, pretrained_model
from ckptfused.cost.attention import attention_cost
from ckptfused.modules import rotary
from ckptfused.simulate.alone import Like, OpCall
from ckptfused.simulate.autocast_kernels import Casts
from ckptfused.simulate.recurrent import OPS as RECURRENT
from ckptfused.simulate.recurrent import recurrent
from ckptfused.simulate.roofline import Work
from ckptfused.simulate.scratch import MOST_FLOPS, scratch_of
from ckptfused.simulate.stand_ins import GroupNorm, Selected, flash_attention, grouped_mm, nowhere, planned_device
from ckptfused.simulate.values import may_ask
from ckptfused.spec import AttentionSpec

aten = torch.ops.aten
_WARNING = "warn_if_padding_and_no_attention_mask"


@contextlib.contextmanager
def functions_for_meta(device: str, work: Work) -> Iterator[dict[Any, tuple[Tensor, Tensor]]]:
    """A model on the meta device runs within it as it does on a device of this kind, as far as memory goes. Only calls
    of this thread do, and of them only those on tensors without data. It yields the rotary tables that it keeps.
    """
    tables: dict[Any, tuple[Tensor, Tensor]] = {}

    def shared(computed: Callable[..., Any]) -> Callable[..., Any]:
        def table(key: Any, length: int, like: Tensor) -> Any:  # blocks of a process share one on a device
            if (key, length) not in tables:
                tables[key, length] = computed(key, length, like)
            return tables[key, length]

        return table

    casts = Casts(device)
    kernels = casts.kernels()
    kernels["aten::scaled_dot_product_attention"] = casts.lower(partial(attention_on_meta, device, work))
    kernels["aten::_grouped_mm"] = partial(grouped_mm_on_meta, work)
    kernels["aten::mish_backward"] = _mish_backward
    kernels["aten::ctc_loss.Tensor"] = _ctc_loss
    kernels["aten::value_selecting_reduction_backward"] = _selected_backward
    kernels["aten::gather_backward"] = _gather_backward
    if device == "cpu":
        kernels["aten::group_norm"] = _group_norm
        kernels |= dict.fromkeys(("aten::max", "aten::min", "aten::median", "aten::nanmedian"), _selected)
        kernels |= {f"aten::{name}": partial(recurrent, name, work) for name in RECURRENT}
    with contextlib.ExitStack() as stack:
        stack.enter_context(casts.functions())
        stack.enter_context(planned_device(device, work.device.capability))
        stack.enter_context(replaced_kernels(kernels))
        stack.enter_context(patched_attribute(rotary, "_computed", here(shared)))
        if device == "cpu":
            stack.enter_context(patched_attribute(torch, "get_rng_state", here(_counted_state)))
            stack.enter_context(patched_attribute(torch.random, "fork_rng", here(_counted_fork)))
        if (place := packing_lookup()) is not None:
            stack.enter_context(patched_attribute(*place, here(lambda plain: partial(_packed, plain))))
        if hasattr(base := pretrained_model(), _WARNING):
            stack.enter_context(patched_attribute(base, _WARNING, instead(_says_nothing)))
        yield tables


def _says_nothing(*given: Any) -> None:
    """A stand-in for a warning that looks at tokens."""


def attention_on_meta(
    device: str,
    work: Work | None,
    below: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` as on a device of this kind: what it saves, and its scratch."""
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if not query.is_meta:
        return below(query, key, value, attn_mask, **options)
    spelled_out = device == "cpu" and not (dropout_p == 0 and _flash_on_cpu(query, key, value, attn_mask))
    # PyTorch adds a mask of booleans as numbers: each call has a copy of its own, until it ends.
    bias = attn_mask.to(query.dtype) if attn_mask is not None and attn_mask.dtype == torch.bool else attn_mask
    if spelled_out or not _fused_allowed(device) or not _heads_fit(query, key, value, enable_gqa):
        materialised = torch.ops.aten._scaled_dot_product_attention_math
        return materialised(query, key, value, bias, **options)[0]
    scratch = (_scratch if device == "cuda" else _scratch_on_cpu)(query, key, is_causal)
    noted = nowhere if work is None else work.attention(is_causal)
    lse = torch.float64 if device == "cpu" and query.dtype == torch.float64 else torch.float32
    return flash_attention(query, key, value, bias, scratch, noted, lse)


def grouped_mm_on_meta(
    work: Work | None, below: Callable[..., Tensor], input: Tensor, weight: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """`F.grouped_mm`, which on tensors without data takes bfloat16 only."""
    if not input.is_meta:
        return below(input, weight, *args, **kwargs)
    return grouped_mm(input, weight, *args, **{**kwargs, "noted": nowhere if work is None else work.grouped})


def _group_norm(
    below: Callable[..., Tensor],
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *others: Any,
) -> Tensor:
    """In the layout of x, as on a CPU alone."""
    if not x.is_meta or x.dim() != 4 or not x.is_contiguous(memory_format=torch.channels_last):
        return below(x, groups, weight, bias, eps, *others)
    return GroupNorm.apply(x, groups, weight, bias, eps)


def _ctc_loss(below: Callable[..., Tensor], log_probs: Tensor, targets: Tensor, *others: Any) -> Tensor:
    """Lengths on the CPU, which PyTorch takes beside tensors of a GPU, as what they are."""
    if not log_probs.is_meta or any(t.is_meta for t in others[:2]):
        return below(log_probs, targets, *others)
    lengths = (t.reshape(-1).tolist() for t in others[:2])
    return torch.ops.aten.ctc_loss.IntList(log_probs, targets, *lengths, *others[2:])  # type: ignore[no-any-return]


def _mish_backward(below: Callable[..., Tensor], grad: Tensor, x: Tensor) -> Tensor:
    """One kernel on devices, which on tensors without data is made of many ops."""
    return torch.empty_like(x) if x.is_meta else below(grad, x)


def _selected(below: Callable[..., Tensor], x: Tensor) -> Tensor:
    return Selected.apply(x, below) if x.is_meta and x.requires_grad and torch.is_grad_enabled() else below(x)


def _selected_backward(
    below: Callable[..., Tensor], grad: Tensor, dim: int, indices: Tensor, sizes: Any, keepdim: bool
) -> Tensor:
    """The gradient of maxima, sorted values and the like, in place as on devices: PyTorch writes none under a mode."""
    if not grad.is_meta:
        return below(grad, dim, indices, sizes, keepdim)
    if not keepdim and len(sizes) > 0:
        grad, indices = grad.unsqueeze(dim), indices.unsqueeze(dim)
    return grad.new_zeros(sizes).scatter_(dim, indices, grad)


def _gather_backward(
    below: Callable[..., Tensor], grad: Tensor, x: Tensor, dim: int, index: Tensor, sparse_grad: bool
) -> Tensor:
    """Likewise."""
    if not grad.is_meta or sparse_grad:
        return below(grad, x, dim, index, sparse_grad)
    return grad.new_zeros(x.shape).scatter_add_(dim, index, grad)


def _counted_state(random_state: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A stand-in for random states that checkpoints keep: they are in the host's memory."""

    def counted() -> Tensor:
        state = random_state()
        state.counted = torch.empty_like(state, device="meta")  # type: ignore[attr-defined]
        return state

    return counted


def _counted_fork(fork_rng: Callable[..., Any]) -> Callable[..., Any]:
    """A stand-in for what a replay runs within: on a CPU it keeps the state that it finds."""

    @contextlib.contextmanager
    def forked(*args: Any, **kwargs: Any) -> Iterator[None]:
        keeps = kwargs.get("device_type") == "meta" and kwargs.get("enabled", True)
        kept = torch.get_rng_state() if keeps else None
        with fork_rng(*args, **kwargs):
            yield
        del kept

    return forked


def _packed(looks: Callable[[Tensor], Tensor | None], positions: Tensor) -> Tensor | None:
    """Which sequence each position is of, as transformers finds it; of positions that are not known, one."""
    try:
        with may_ask():
            return looks(positions)
    except RuntimeError:
        if not positions.is_meta:
            raise
        return None


def _heads_fit(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> bool:
    """Whether PyTorch's kernels take them: none spreads a batch element, or a head unless told that heads come in
    groups (Falcon's one key head comes without).
    """
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return True
    heads = query.size(1) == key.size(1) or (grouped and query.size(1) % key.size(1) == 0)
    return query.size(0) == key.size(0) and key.shape[:2] == value.shape[:2] and heads


def _fused_allowed(device: str) -> bool:
    """Whether a caller lets PyTorch take kernels that keep no probabilities (`torch.nn.attention.sdpa_kernel`)."""
    on = torch.backends.cuda
    return on.flash_sdp_enabled() or (device == "cuda" and (on.mem_efficient_sdp_enabled() or on.cudnn_sdp_enabled()))


def _flash_on_cpu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether PyTorch's flash kernel there takes these; else the probabilities are in memory. It does not draw."""
    if not query.dim() == key.dim() == value.dim() == 4 or not query.size(-1) == key.size(-1) == value.size(-1):
        return False
    if any(t.stride(-1) != 1 for t in (query, key, value)) or 0 in (query.size(-2), key.size(-2)):
        return False
    return mask is None or (mask.dim() in (2, 4) and not mask.requires_grad)


def _scratch(query: Tensor, key: Tensor, causal: bool) -> tuple[int, int]:
    """Scratch bytes of PyTorch's attention on a GPU: its forward takes none."""
    if query.dim() != 4 or query.size(-1) > 256:
        return 0, 0
    batch, heads, length, width = query.shape
    spec = AttentionSpec(heads, key.size(1), width, causal=causal)
    return 0, attention_cost(spec, query.dtype, batch, length, None, backward=True)[0]


def _scratch_on_cpu(query: Tensor, key: Tensor, causal: bool) -> tuple[int, int]:
    """Scratch bytes of forward and backward of PyTorch's flash kernel."""
    heads, threads = key.shape[:-2].numel(), torch.get_num_threads()
    lowered = query.dtype == torch.float32 and torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # type: ignore[attr-defined]
    if lowered and 10 * query.numel() * key.size(-2) <= MOST_FLOPS:
        return _measured_flash(Like.of(query), Like.of(key), causal, threads)
    call = str(query.dtype).removeprefix("torch."), heads, query.size(-2), key.size(-2), query.size(-1)
    forward, backward = (_C.flash_scratch_bytes(*call, threads, each) for each in (False, True))
    return forward, backward


@functools.lru_cache(maxsize=256)
def _measured_flash(q: Like, k: Like, causal: bool, threads: int) -> tuple[int, int]:
    """The same of float32 whose products are bfloat16's (`torch.set_float32_matmul_precision("medium")`): oneDNN lays
    out operands as the processor has it, which one call shows."""
    lse = Like(q.shape[:-1], (q.shape[1] * q.shape[2], q.shape[2], 1), torch.float32)
    forward = OpCall(aten._scaled_dot_product_flash_attention_for_cpu.default, (q, k, k, 0.0, causal))
    backward = OpCall(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default, (q, q, k, k, q, lse, 0.0, causal)
    )
    found = [scratch_of(call) for call in (forward, backward)]
    return tuple(0 if held is None else held.within for held in found)  # type: ignore[return-value]
