"""Fake kernels (shapes without data, for torch.compile) and FLOP formulas (for torch.utils.flop_counter)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ckptfused import _extension, cost  # noqa: F401  (the first registers the ops)
from ckptfused.checks import has_values
from ckptfused.compat.torch_compile import partitioner_budget
from ckptfused.compat.torch_memory import StorageWeakRef, storage_behind
from ckptfused.cost.loss import loss_flops
from ckptfused.cost.open_ledger import counting
from ckptfused.eager.dequantize import dequantize
from ckptfused.spec import BlockSpec, param_names, parse, parse_loss

_FAMILIES = ("block", "attention_block", "ffn_block")
_DESTINATION_PASSING = (
    *("norm_fwd", "norm_bwd", "residual_fwd", "residual_bwd"),
    *("activation_fwd", "activation_bwd", "qk_fwd", "qk_bwd", "ffn_up_fwd", "ffn_up_bwd"),
    *("cross_entropy_fwd", "cross_entropy_bwd", "sum_grads"),
)


def _dims(spec: BlockSpec, shape: Sequence[Any]) -> tuple[Any, Any, Any]:
    """B, T, C of an x of this shape."""
    return (shape[1], shape[0], shape[2]) if spec.seq_first else (shape[0], shape[1], shape[2])


def _block_fwd(
    x: Tensor,
    params: Sequence[Tensor | None],
    aux: Sequence[Tensor | None],
    rng_state: Tensor | None,
    spec: str,
    save: bool,
) -> list[Tensor]:
    outputs = [x.new_empty(x.shape)]
    if save:
        parsed = parse(spec)
        values = cost.kept_values(parsed, *_dims(parsed, x.shape), x.dtype)
        outputs += [x.new_empty(shape, dtype=dtype) for shape, dtype in values.values()]
    return outputs


def _block_bwd(
    dy: Tensor,
    x: Tensor,
    params: Sequence[Tensor | None],
    aux: Sequence[Tensor | None],
    kept: Sequence[Tensor],
    rng_state: Tensor | None,
    spec: str,
    needs: Sequence[bool],
) -> list[Tensor]:
    inputs = [x, *params]
    return [t.new_empty(t.shape) for t, need in zip(inputs, needs, strict=True) if need and t is not None]


def _attention_fwd(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    batch, heads, length, dim = q.shape
    o = q.new_empty((batch, length, heads, dim)).transpose(1, 2)
    return o, q.new_empty((batch, heads, length), dtype=cost.accumulation_type(q.dtype))


def _attention_bwd(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, ...]:
    def like(t: Tensor) -> Tensor:
        batch, heads, length, dim = t.shape
        return t.new_empty((batch, length, heads, dim)).transpose(1, 2)

    return like(q), like(k), like(v)


def _attention_tile_bwd(do: Tensor, q: Tensor, *args: Any) -> Tensor:
    batch, heads, length, dim = q.shape
    return q.new_empty((batch, length, heads, dim)).transpose(1, 2)


def _loss_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    adapters: Sequence[Tensor | None],
    *rest: Any,
) -> list[Tensor]:
    wide = cost.accumulation_type(x.dtype)
    # As csrc/loss/loss.cpp keeps them between forward and backward.
    kept = [x.dtype, torch.float32 if weight.dtype == torch.float16 else weight.dtype]
    tensors = (x, weight, bias, *adapters)
    types = kept + [wide] * (len(tensors) - len(kept))
    grads = [
        t.new_empty(t.shape, dtype=dtype)
        for t, dtype, need in zip(tensors, types, rest[-1], strict=True)
        if need and t is not None
    ]
    tokens = [x.new_empty(target.shape, dtype=dtype) for dtype in (wide, wide, torch.int64)]
    return [*tokens, *grads]


def _loss_bwd(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    adapters: Sequence[Tensor | None],
    *rest: Any,
) -> list[Tensor]:
    tensors = (x, weight, bias, *adapters)
    return [t.new_empty(t.shape) for t, need in zip(tensors, rest[-1], strict=True) if need and t is not None]


def _norm(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


def _norm_grads(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float, needs: Sequence[bool]
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, need in zip((x, weight, bias), needs, strict=True) if need and t is not None]


def _rng_state(like: Tensor, call_id: int, *, generator: torch.Generator | None = None) -> Tensor:
    if torch.is_grad_enabled() and partitioner_budget() == 0:
        raise RuntimeError(
            "ckptfused: dropout needs torch._functorch.config.activation_memory_budget above 0: "
            "at 0 torch.compile draws backward's dropout masks anew, and the gradients are wrong"
        )
    return like.new_empty((2,), dtype=torch.int64)


def _dropout_mask(shape: Sequence[int], p: float, rng_state: Tensor, site: int) -> Tensor:
    return rng_state.new_empty(shape, dtype=torch.bool)


def _copy_on_write(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    # Without values, it is the CPU's whatever the tensors are.
    guard = torch.empty(0, dtype=torch.uint8, device="meta" if tensors[0].device.type == "meta" else "cpu")
    if counting() is None:
        return [torch.empty_like(x) for x in tensors], guard
    # Storages of their own, of which no allocator knows, since all views of a copy share what it gets.
    storages = [torch.UntypedStorage(0, device="meta") for _ in tensors]
    memory = [getattr(x.untyped_storage(), "shared", x.untyped_storage()) for x in tensors]
    for storage in storages:
        storage.shared = memory  # type: ignore[attr-defined]
    guard.sharing = _Sharing(storages, memory)  # type: ignore[attr-defined]
    placed = zip(tensors, storages, strict=True)
    return [x.new_empty(0).set_(storage, x.storage_offset(), x.shape, x.stride()) for x, storage in placed], guard  # type: ignore[call-overload]


class _Sharing:
    """Copies on the meta device while they may share memory, all of which is there until it and the last that shares
    any has ended: when it ends, one that is left and was not written gets its own."""

    def __init__(self, storages: Sequence[torch.UntypedStorage], memory: Sequence[Any]) -> None:
        self._left = [StorageWeakRef(storage) for storage in storages]
        self._memory = memory

    def __del__(self) -> None:
        for left in self._left:
            if hasattr(storage := storage_behind(left), "shared"):
                _end_sharing(storage)


def is_copy_on_write(t: Tensor) -> bool:
    """Whether a tensor on the meta device shares another's memory until it is written."""
    return t.layout == torch.strided and hasattr(t.untyped_storage(), "shared")


def surplus_of(t: Tensor) -> list[Tensor]:
    """What `hold_surplus` has a storage hold."""
    return getattr(t.untyped_storage(), "surplus", [])


def hold_surplus(t: Tensor, memory: list[Tensor]) -> None:
    """Has the storage of a meta tensor hold others beside its own bytes, for as long as a view of it lives: no
    allocator is asked where such a storage is resized."""
    _hold(t.untyped_storage(), memory)


def _hold(storage: Any, memory: list[Tensor]) -> None:
    storage.surplus = [*getattr(storage, "surplus", []), *memory]


def gets_own_memory(t: Tensor) -> None:
    """Before a tensor on the meta device is written: if it copies on write, as much as that spans, for as long as a
    view of it lives."""
    if is_copy_on_write(t):
        _end_sharing(t.untyped_storage())


def _end_sharing(storage: Any) -> None:
    del storage.shared
    _hold(storage, [torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")])


def or_counted(fake: Callable[..., Any], op: Any, block: bool = False) -> Callable[..., Any]:
    """The fake kernel of an op; where a ledger is open its C++ code itself, on meta tensors."""

    @wraps(fake)
    def kernel(*args: Any) -> Any:
        ledger = counting()
        if ledger is None:
            return fake(*args)
        if not block:
            return ledger.run(op, *args)
        forward = isinstance(args[4], str)  # x, params, aux, rng_state, spec, …
        return ledger.block(op, args[0 if forward else 1], args[4 if forward else 6], *args)

    return kernel


def _dequantized(codes: Tensor, state: Any, form: str, sizes: Any, dtype: Any, first: int = 0) -> Tensor:
    if not has_values(codes):
        return dequantize(codes, state, form, sizes, dtype, first)  # a ledger counts what it does
    return codes.new_empty(sizes, dtype=dtype)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _fwd_flops(x_shape: Any, params: Any, aux: Any, rng: Any, spec: str, *args: Any, **kwargs: Any) -> int:
    parsed = parse(spec)
    return cost.forward_flops(parsed, *_dims(parsed, x_shape))


def _bwd_flops(
    dy_shape: Any, x_shape: Any, params: Any, aux: Any, kept: Any, rng: Any, spec: str, needs: Any, **kwargs: Any
) -> int:
    parsed = parse(spec)
    wanted = [name for name, need in zip(("x", *param_names(parsed)), needs, strict=True) if need]
    return cost.backward_flops(parsed, *_dims(parsed, x_shape), needs=wanted)


def _loss_fwd_flops(x: Any, weight: Any, *rest: Any, **_: Any) -> int:
    return loss_flops(parse_loss(rest[-2]), x, weight, rest[-1], backward=False, kept=False)


def _loss_bwd_flops(dloss: Any, x: Any, weight: Any, *rest: Any, **_: Any) -> int:
    kept, _, spec, needs = rest[-4:]
    return loss_flops(parse_loss(spec), x, weight, needs, backward=True, kept=bool(kept))


def _register() -> None:
    fake = torch.library.register_fake
    for family in _FAMILIES:
        forward, backward = (getattr(torch.ops.ckptfused, f"{family}_{way}") for way in ("fwd", "bwd"))
        fake(f"ckptfused::{family}_fwd", or_counted(_block_fwd, forward.default, block=True))
        fake(f"ckptfused::{family}_bwd", or_counted(_block_bwd, backward.default, block=True))
        register_flop_formula(forward)(_fwd_flops)
        register_flop_formula(backward)(_bwd_flops)
    register_flop_formula(torch.ops.ckptfused.linear_cross_entropy_fwd)(_loss_fwd_flops)
    register_flop_formula(torch.ops.ckptfused.linear_cross_entropy_bwd)(_loss_bwd_flops)
    for name in _DESTINATION_PASSING:
        fake(f"ckptfused::{name}", _nothing)
    fake("ckptfused::attention_fwd", _attention_fwd)
    fake("ckptfused::attention_bwd", _attention_bwd)
    fake("ckptfused::attention_tile_fwd", _attention_fwd)
    fake("ckptfused::attention_tile_bwd", _attention_tile_bwd)
    for name, kernel in (
        *(("linear_cross_entropy_fwd", _loss_fwd), ("linear_cross_entropy_bwd", _loss_bwd)),
        *(("norm", _norm), ("norm_grads", _norm_grads)),
    ):
        fake(f"ckptfused::{name}", or_counted(kernel, getattr(torch.ops.ckptfused, name).default))
    fake("ckptfused::rng_state", _rng_state)
    fake("ckptfused::copy_on_write", _copy_on_write)
    fake("ckptfused::dropout_mask", _dropout_mask)
    fake("ckptfused::dequantize", _dequantized)
    torch.library.impl("ckptfused::dequantize", ("cpu", "cuda"))(dequantize)


_register()
