"""Whether `F.scaled_dot_product_attention` is PyTorch's own at this call.

Whoever replaces it (`torch.distributed.tensor.experimental.context_parallel`, attention libraries) wants attention
computed in another way. A fused block never calls it, so it has to ask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from ckptfused.compat.torch_dispatch import function_modes
from ckptfused.compat.torch_modules import OWN_SDPA


def sdpa_replaced() -> bool:
    """Whether another function stands in the place of `F.scaled_dot_product_attention`, or a `TorchFunctionMode` may
    put one there. torch.compile folds the answer and guards on it.
    """
    return functional.scaled_dot_product_attention is not OWN_SDPA or under_foreign_mode()


def under_foreign_mode() -> bool:
    """Whether a `TorchFunctionMode` is active that may replace functions. Backward runs outside of it."""
    return any(map(_foreign, function_modes()))


def same_sdpa(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for a checkpoint: a replay that meets another attention than its forward **raises** `RuntimeError`.

    Under torch.compile forward and replay are traced together.
    """
    if torch.compiler.is_compiling():
        return function
    return partial(_checked, function, functional.scaled_dot_product_attention)


def _checked(function: Callable[..., Any], found: Any, *args: Any, **kwargs: Any) -> Any:
    now = functional.scaled_dot_product_attention
    if now is not found:
        raise RuntimeError(
            "scaled_dot_product_attention: expected in backward, where the layers run again, the function of the "
            f"forward, {found}, got {now}. Run backward within the same context"
        )
    return function(*args, **kwargs)


def refuse_replaced_sdpa(who: str) -> None:
    """**Raises** `RuntimeError` where attention that never calls `F.scaled_dot_product_attention` would miss what
    stands in its place.
    """
    if sdpa_replaced():
        raise RuntimeError(
            f"{who}: expected PyTorch's own scaled_dot_product_attention and no TorchFunctionMode around it, got "
            f"{functional.scaled_dot_product_attention} and modes {function_modes()}; only attention without grouped "
            "heads, RoPE, q/k norm, window, soft-cap, scale and causal=True calls what stands there"
        )


def _foreign(mode: Any) -> bool:
    """Whether a mode may replace attention: PyTorch's own (of devices, of export) do not, but for those of
    `torch.distributed`.
    """
    module = type(mode).__module__
    return not module.startswith("torch.") or module.startswith("torch.distributed.")
