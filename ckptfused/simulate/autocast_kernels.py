"""Autocast for tensors on the meta device: operands are cast as on the device that it stands for.

PyTorch's kernels of autocast look at a tensor's device. Here each op that has such a kernel gets one more, in the
thread that predicts, which casts tensors on the meta device by the same rules.

The rules differ by device. On a GPU norms, softmax, sums, powers, exponentials and logarithms are in float32, and with
them what Hugging Face's norms and losses are made of; on the CPU they stay in the type of their operands. On the CPU
`torch.cat` and `stack` cast to the widest type; a GPU's promote types themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import DefaultDeviceType
from torch.utils.weak import WeakTensorKeyDictionary

from ckptfused.compat.kernels import Kernel, operation, replaced_kernels, without_replaced
from ckptfused.compat.patches import here, instead, patched_attribute
from ckptfused.compat.pytree import tree_flatten, tree_unflatten
from ckptfused.compat.torch_dispatch import has_kernel, operations, schema_of, tensors_of

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


class Casts:
    """Autocast in one prediction. kind: of the device that is stood for, "cpu" or "cuda"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._order = slice(None, None, -1 if _casts_last_first() else 1)
        self._for_training = _caches_for_training()  # asked for here: it would be cast for, too
        self._cached = WeakTensorKeyDictionary()
        """Casts of weights, as long as a region lasts."""

    def kernels(self) -> dict[str, Kernel]:
        """Kernels of all ops that autocast casts for, by name."""
        names = {f"aten::{name}": _policy(self.kind, name) for name in _names(self.kind)}
        return {
            name: partial(self._applied, operation(name), policy)
            for name, policy in (names | {f"ckptfused::{name}": "own" for name in _OWN}).items()
        }

    def lower(self, kernel: Kernel) -> Kernel:
        """A kernel in the place of an op that is computed in autocast's type."""

        def called(below: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_autocast_enabled(self.kind):
                return kernel(below, *args, **kwargs)
            with without_replaced():
                args, kwargs = self._all_cast((args, kwargs), torch.get_autocast_dtype(self.kind))
                return kernel(below, *args, **kwargs)

        return called

    def _applied(self, op: Any, policy: str, below: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(self.kind):
            return below(*args, **kwargs)  # what it is made of may be cast for
        lower = torch.get_autocast_dtype(self.kind)
        if policy == "own":
            args = tuple(_told(value, args[0].dtype, lower) for value in args)
        elif policy == "result":
            args, kwargs = self._with_result(op, args, kwargs)
        else:
            dtype = {"lower": lower, "float32": torch.float32}.get(policy) or self._widest((args, kwargs), lower)
            args, kwargs = self._all_cast((args, kwargs), dtype)
        with without_replaced():
            return op(*args, **kwargs)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        """A tensor that autocast may cast, as this type. A weight in float32 is cast once in a region."""
        if not isinstance(value, Tensor) or not self._is_there(value) or not value.is_floating_point():
            return value
        if value.dtype in (torch.float64, dtype):
            return value
        weight = value.requires_grad and value.is_leaf and value._base is None and value.dtype == torch.float32
        if not weight or dtype != torch.get_autocast_dtype(self.kind) or not torch.is_autocast_cache_enabled():
            return value.to(dtype)
        if value not in self._cached:
            with torch.set_grad_enabled(torch.is_grad_enabled() or self._for_training):
                self._cached[value] = value.to(dtype)
        return self._cached[value]

    def _is_there(self, t: Tensor) -> bool:
        """Whether it is on the device that is stood for: without data, or made there by name."""
        return t.is_meta or (self.kind == "cpu" and t.is_cpu)

    def _widest(self, given: Any, lower: torch.dtype) -> torch.dtype:
        types = {t.dtype for t in tensors_of(given) if self._is_there(t) and t.is_floating_point()}
        return torch.float32 if torch.float32 in types else lower

    def _all_cast(self, given: Any, dtype: torch.dtype) -> Any:
        """In the order in which PyTorch casts them, from which that of their gradients follows."""
        leaves, structure = tree_flatten(given)
        for place in range(len(leaves))[self._order]:
            leaves[place] = self._cast(leaves[place], dtype)
        return tree_unflatten(leaves, structure)

    def _with_result(self, op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with float32 as the type of the result, where none is given."""
        first = args[0] if args else None
        place = next(place for place, argument in enumerate(schema_of(op).arguments) if argument.name == "dtype")
        told = args[place] if place < len(args) else kwargs.get("dtype")
        if told is not None or self._cast(first, torch.float32) is first:
            return args, kwargs
        return args[:place], kwargs | {"dtype": torch.float32}

    @contextlib.contextmanager
    def functions(self) -> Iterator[None]:
        """A context in which PyTorch's functions of autocast take "meta", in this thread, for the device that is stood
        for.
        """

        def meant(plain: Callable[..., Any]) -> Callable[..., Any]:
            def told(value: Any) -> Any:
                return self.kind if isinstance(value, str) and value == "meta" else value

            return lambda *args, **kwargs: plain(*map(told, args), **{k: told(v) for k, v in kwargs.items()})

        def clearing(plain: Callable[[], None]) -> Callable[[], None]:
            def cleared() -> None:
                self._cached.clear()
                plain()

            return cleared

        stand_ins: list[tuple[Any, str, Any]] = [
            (torch, "is_autocast_enabled", here(meant)),
            (torch, "get_autocast_dtype", here(meant)),
            (torch, "clear_autocast_cache", here(clearing)),
            (torch.amp, "is_autocast_available", here(meant)),
            (torch.autocast, "__init__", here(meant)),
        ]
        if self.kind == "cuda":
            stand_ins.append((torch.cuda.amp.common, "amp_definitely_not_available", instead(lambda: False)))
            stand_ins.append((torch.cuda, "is_bf16_supported", instead(lambda *args: True)))
            # Of a checkpoint that is given no tensor: there, the GPU.
            stand_ins.append((DefaultDeviceType, "get_device_type", instead(lambda: "meta")))
        with contextlib.ExitStack() as stack:
            for place, name, make in stand_ins:
                stack.enter_context(patched_attribute(place, name, make))
            yield


@lru_cache(maxsize=1)
def _casts_last_first() -> bool:
    """Whether PyTorch's autocast casts the last operand first. It casts them as arguments of one C++ call, whose order
    is the compiler's: last to first of GCC, first to last of Clang."""
    order: list[str] = []
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        first, last = (torch.zeros(1, 1, requires_grad=True) for _ in range(2))
        for name, t in (("first", first), ("last", last)):
            t.register_hook(lambda grad, name=name: order.append(name))
        torch.mm(first, last).backward()
    return order == ["first", "last"]  # what was cast later is gone back through earlier


@lru_cache(maxsize=1)
def _caches_for_training() -> bool:
    """Whether what PyTorch casts of a weight under `no_grad`, and keeps, has a gradient when it is used again."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        weight = torch.zeros(1, 1, requires_grad=True)
        with torch.no_grad():
            torch.mm(weight, weight)
        return torch.mm(weight, weight).requires_grad


def _policy(kind: str, name: str) -> str:
    """What autocast does to an op's operands on the device that is stood for."""
    tables = {"lower": LOWER, "widest": WIDEST, "result": RESULT}
    return next((policy for policy, table in tables.items() if name in table[kind]), "float32")


def _told(value: Any, dtype: torch.dtype, lower: torch.dtype) -> Any:
    """The text that describes an op of ckptfused's, with the type in which it computes."""
    if not isinstance(value, str) or dtype in (torch.float64, lower):
        return value
    if dtype != torch.float32:
        raise TypeError(f"x: expected float32 under autocast to {lower}, got {dtype}")
    return f"{value} compute={str(lower).removeprefix('torch.')}"


@lru_cache(maxsize=2)
def _names(kind: str) -> tuple[str, ...]:
    """PyTorch's ops that autocast knows on a device of this kind."""
    names = [name for name in operations() if name.startswith("aten::")]
    found = [name for name in names if has_kernel(name, {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}[kind])]
    return tuple(sorted(name.removeprefix("aten::") for name in found))


@contextlib.contextmanager
def autocast_on_meta(kind: str) -> Iterator[None]:
    """A context in which autocast for a device of this kind, "cpu" or "cuda", acts on the meta device as it does there;
    so that models ask for it by either name, and none of it needs a GPU."""
    casts = Casts(kind)
    with casts.functions(), replaced_kernels(casts.kernels()):
        yield
