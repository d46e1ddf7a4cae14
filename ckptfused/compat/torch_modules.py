"""What `nn.Module`s hold beside parameters, buffers and children. PyTorch 2.11 to 2.13 have every name."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BatchNorm = nn.modules.batchnorm._BatchNorm
"""The base of all batch norms. `_BatchNorm`."""
Convolution = nn.modules.conv._ConvNd
"""The base of all convolutions. `_ConvNd`."""
DropoutBase = nn.modules.dropout._DropoutNd
"""The base of all dropouts but those of RNNs. `_DropoutNd`."""
ENCODER_HALVES = ("_sa_block", "_ff_block")
"""The methods of `nn.TransformerEncoderLayer` that compute its halves."""
DECODER_PARTS = ("_sa_block", "_mha_block", "_ff_block")
"""The methods of `nn.TransformerDecoderLayer` that compute its parts; `cross_attention` calls the second."""
COMPILED_CALL, COMPILED_MODULE = "_compiled_call_impl", "_orig_mod"
"""Where `module.compile()` keeps what it made, and `torch.compile(module)` the module."""
REPLICATE = "_replicate_for_data_parallel"
"""The method by which `nn.DataParallel` copies a module for another GPU."""
OWN_SDPA: Any = torch._C._nn.scaled_dot_product_attention
"""What `F.scaled_dot_product_attention` is, unless somebody replaced it."""


def _default_eps(dtype: torch.dtype) -> float:
    """What `F.rms_norm` adds to the variance where it is given no eps: that of the type, or of float32, in which it
    computes (PyTorch 2.13). Both are powers of two far apart.
    """
    own, wide = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    x = torch.full((1, 8), 1e-3, dtype=dtype, device="cpu")
    normed = F.rms_norm(x, (8,))
    added = float(x[0, 0] / normed[0, 0]) ** 2 - float(x[0, 0]) ** 2
    return wide if added < (own * wide) ** 0.5 else own


DEFAULT_EPS = {t: _default_eps(t) for t in (torch.bfloat16, torch.float16)}
"""The eps of PyTorch's RMSNorm in half precision, as measured."""
_LAYERS_CALL = (
    *("linear", "layer_norm", "rms_norm", "dropout", "relu", "gelu", "silu"),
    *("softmax", "multi_head_attention_forward"),
)


def _own_function(name: str) -> Any:
    function = getattr(F, name)
    code = getattr(function, "__code__", None)
    own = function is getattr(torch._C._nn, name, None) if code is None else code.co_filename == F.__file__
    return function if own else None


_OWN_FUNCTIONS = {name: _own_function(name) for name in _LAYERS_CALL}
_KNOWN_ALIKE = ("deepspeed.",)
"""Whose functions in the place of PyTorch's compute the same: ZeRO-3's `F.linear`, which keeps no copy of a weight."""
_EVERYWHERE: tuple[dict[int, Any], ...] = (
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
    nn.modules.module._global_backward_hooks,
    nn.modules.module._global_backward_pre_hooks,
)


def replaced_function() -> str | None:
    """Which of the functions of `torch.nn.functional` that layers are made of is not PyTorch's own, if any.
    torch.compile folds the answer and guards on it."""
    for name, own in _OWN_FUNCTIONS.items():
        found = getattr(F, name)
        if found is not own and not str(getattr(found, "__module__", "")).startswith(_KNOWN_ALIKE):
            return name
    return None


def global_hooks() -> Iterator[Any]:
    """The hooks on all modules. `_global_forward_hooks` and the three others."""
    return itertools.chain.from_iterable(hooks.values() for hooks in _EVERYWHERE if hooks)


def forward_hooks(module: nn.Module) -> dict[int, Any]:
    """The hooks after a module's forward. `_forward_hooks`."""
    return module._forward_hooks


def call_always(module: nn.Module, key: int) -> None:
    """Has a hook after a module's forward be called where that raises, too: a replay ends so, once it has what backward
    needs. `_forward_hooks_always_called`."""
    module._forward_hooks_always_called[key] = True


def forward_pre_hooks(module: nn.Module) -> dict[int, Any]:
    """The hooks before a module's forward. `_forward_pre_hooks`."""
    return module._forward_pre_hooks


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks around its backward. `_backward_hooks`, `_backward_pre_hooks`."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of any of these kinds: one look at all, for each call of a layer asks."""
    after = module._forward_hooks or module._backward_hooks
    return bool(after or module._forward_pre_hooks or module._backward_pre_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module runs what torch.compile made of it, in its place, as a module around it or as its forward.
    `_torchdynamo_orig_callable`."""
    forward = vars(module).get("forward") or getattr(type(module), "forward", None)  # torch.jit's raises
    compiled = getattr(module, COMPILED_CALL, None) is not None or COMPILED_MODULE in module._modules
    return compiled or hasattr(forward, "_torchdynamo_orig_callable")


def is_packed(module: nn.Module) -> bool:
    """Whether PyTorch's own quantisation holds a module's weight. `_packed_params`."""
    return hasattr(module, "_packed_params")


def projects_alike(attention: nn.MultiheadAttention) -> bool:
    """Whether keys and values are as wide as queries, with one weight for all three. `_qkv_same_embed_dim`."""
    return attention._qkv_same_embed_dim


def cross_attention(layer: nn.TransformerDecoderLayer, x: Any, *args: Any) -> Any:
    """A decoder layer's attention to the encoder's result. `_mha_block`."""
    return layer._mha_block(x, *args)


# True of PyTorch 2.11 to 2.13: the function asks `has_torch_function` once, hands over, and goes on with its own code.
_COMPOSED: tuple[Callable[..., Any], ...] = (F.multi_head_attention_forward,)


def _never(_: Any) -> bool:
    return False


def _opened(function: Any) -> Callable[..., Any]:
    names = {**function.__globals__, "has_torch_function": _never}
    found = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    found.__kwdefaults__ = function.__kwdefaults__
    return found


OPENED = {function: _opened(function) for function in _COMPOSED}
"""By the function: its code, whose calls reach the mode that is on instead of itself."""
