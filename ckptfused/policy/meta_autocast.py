"""Autocast for tensors on the meta device: operands are cast as on the device that it stands for.

PyTorch's kernels of autocast look at a tensor's device. Here each op that has such a kernel has one more, which casts
tensors on the meta device by the same rules, at the dispatch key that PyTorch leaves to other libraries' modes.

The rules differ by device. On a GPU norms, softmax, sums, powers, exponentials and logarithms are in float32, and with
them what Hugging Face's norms and losses are made of; on the CPU they stay in the type of their operands. On the CPU
`torch.cat` and `stack` cast to the widest type; a GPU's promote types themselves.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

_KEY = "DeferredInit"
_OWN = ("block", "attention_block", "ffn_block", "linear_cross_entropy")
"""Ops of ckptfused, which cast within themselves and are told to what."""
_PRODUCTS = {
    *("conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input"),
    *("_convolution.deprecated", "prelu", "addmm", "matmul", "mm", "linalg_vecdot", "linear", "addbmm", "baddbmm"),
    *("bmm", "scaled_dot_product_attention"),
}
LOWER = {
    "cpu": _PRODUCTS
    | {"conv1d.padding", "conv2d.padding", "conv3d.padding", "_addmm_activation", "mkldnn_rnn_layer"}
    | {"_native_multi_head_attention"},
    "cuda": _PRODUCTS
    | {
        "_convolution",
        "convolution",
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        "addmv",
        "addr",
        "einsum",
        "mv",
    }
    | {"chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell"}
    | {"rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention"},
}
"""Computed in autocast's type. What is in none of these tables is computed in float32."""
WIDEST = {
    "cpu": {"stack", "cat", "index_copy"},
    "cuda": {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put"}
    | {"tensordot", "scatter_add"},
}
"""Computed in the widest type of their operands."""
RESULT = {
    "cpu": set[str](),
    "cuda": {"prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm"}
    | {"linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList"},
}
"""These are told to have float32 results, and cast within themselves."""


class _Cached(threading.local):
    """Casts of weights, as long as a region of autocast lasts, in a prediction."""

    kind = ""
    casts = WeakTensorKeyDictionary()


_cached = _Cached()


def _policy(name: str) -> str:
    """What autocast does to an op's operands on the device that is stood for."""
    tables = {"lower": LOWER, "widest": WIDEST, "result": RESULT}
    return next((policy for policy, table in tables.items() if name in table[_cached.kind]), "float32")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """A tensor that autocast may cast, as this type. A weight in float32 is cast once in a region."""
    if not isinstance(value, Tensor) or not value.is_meta or not value.is_floating_point():
        return value
    if value.dtype in (torch.float64, dtype):
        return value
    weight = value.requires_grad and value.is_leaf and value._base is None and value.dtype == torch.float32
    if not weight or dtype != torch.get_autocast_dtype(_cached.kind) or not torch.is_autocast_cache_enabled():
        return value.to(dtype)
    if value not in _cached.casts:
        _cached.casts[value] = value.to(dtype)
    return _cached.casts[value]


def _all_cast(given: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda value: _cast(value, dtype), given)


def lower(function: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for an op that is computed in autocast's type."""

    def called(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(_cached.kind):
            return function(*args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_key()[0])):
            args, kwargs = _all_cast((args, kwargs), torch.get_autocast_dtype(_cached.kind))
            return function(*args, **kwargs)

    return called


def _widest(given: Any, lower: torch.dtype) -> torch.dtype:
    types = {t.dtype for t in tree_leaves(given) if isinstance(t, Tensor) and t.is_meta and t.is_floating_point()}
    return torch.float32 if torch.float32 in types else lower


def _with_result(op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments with float32 as the type of the result, where none is given."""
    first = args[0] if args else None
    place = next(place for place, argument in enumerate(op._schema.arguments) if argument.name == "dtype")
    told = args[place] if place < len(args) else kwargs.get("dtype")
    if told is not None or _cast(first, torch.float32) is first:
        return args, kwargs
    return args[:place], kwargs | {"dtype": torch.float32}


def _applied(op: Any, policy: str, args: Any, kwargs: Any) -> Any:
    lower = torch.get_autocast_dtype(_cached.kind)
    if policy == "own":
        return op(*(_told(value, args[0].dtype, lower) for value in args), **kwargs)
    if policy == "result":
        args, kwargs = _with_result(op, args, kwargs)
        return op(*args, **kwargs)
    dtype = {"lower": lower, "float32": torch.float32}.get(policy) or _widest((args, kwargs), lower)
    args, kwargs = _all_cast((args, kwargs), dtype)
    return op(*args, **kwargs)


def _told(value: Any, dtype: torch.dtype, lower: torch.dtype) -> Any:
    """Of an op of ckptfused's, the text that describes it, with the type in which it computes."""
    if not isinstance(value, str) or dtype in (torch.float64, lower):
        return value
    if dtype != torch.float32:
        raise TypeError(f"x: expected float32 under autocast to {lower}, got {dtype}")
    return f"{value} compute={str(lower).removeprefix('torch.')}"


@lru_cache(maxsize=1)
def _key() -> Any:
    """The key, at which there are kernels for all ops that autocast knows, and nothing is in the way of others."""
    key = torch._C._parse_dispatch_key(_KEY)
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, _KEY)
    libraries = [everything]
    for namespace, names in (("aten", _names()), ("ckptfused", _OWN)):
        library = torch.library.Library(namespace, "IMPL")
        for name in names:
            library.impl(name, _kernel(namespace, name, key), _KEY, with_keyset=True)
        libraries.append(library)
    return key, libraries  # a library's kernels last as long as it does


def _names() -> list[str]:
    """PyTorch's ops that autocast knows on either kind of device."""
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    found = [name for name in names if known(name, "AutocastCPU") or known(name, "AutocastCUDA")]
    return sorted(name.removeprefix("aten::") for name in found)


def _kernel(namespace: str, name: str, key: Any) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    known = {
        kind: namespace == "ckptfused" or torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", autocast)
        for kind, autocast in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA"))
    }

    after = torch._C._dispatch_keyset_full_after(key)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not known[_cached.kind] or not torch.is_autocast_enabled(_cached.kind):
            return op.redispatch(keys & after, *args, **kwargs)  # what it is made of may be known
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return _applied(op, "own" if namespace == "ckptfused" else _policy(name), args, kwargs)

    return kernel


@contextlib.contextmanager
def autocast_on_meta(kind: str) -> Iterator[None]:
    """Within it autocast for a device of this kind, "cpu" or "cuda", acts on the meta device as it does there; so that
    models ask for it by either name, and none of it needs a GPU."""

    def meant(name: str) -> str:
        return kind if name == "meta" else name

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda device_type=None, *args: function(*([] if device_type is None else [meant(device_type)]), *args)

    enter = torch.autocast.__init__

    def entered(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        enter(self, meant(device_type), *args, **kwargs)

    def cleared() -> None:
        _cached.casts.clear()
        clear()

    clear, available = torch.clear_autocast_cache, of(torch.amp.is_autocast_available)
    replaced: list[tuple[Any, str, Any]] = [
        (torch, "is_autocast_enabled", of(torch.is_autocast_enabled)),
        (torch, "get_autocast_dtype", of(torch.get_autocast_dtype)),
        (torch, "clear_autocast_cache", cleared),
        (torch.amp, "is_autocast_available", available),
        (torch.autocast, "__init__", entered),
    ]
    if kind == "cuda":
        replaced.append((torch.cuda.amp.common, "amp_definitely_not_available", lambda: False))
        replaced.append((torch.cuda, "is_bf16_supported", lambda *args: True))
    key, _ = _key()
    before, _cached.kind = _cached.kind, kind
    with contextlib.ExitStack() as stack:
        for place, name, function in replaced:
            stack.enter_context(mock.patch.object(place, name, function))
        stack.enter_context(torch._C._IncludeDispatchKeyGuard(key))
        try:
            yield
        finally:
            _cached.casts.clear()
            _cached.kind = before
