"""Modules within a layer that no recording can follow: what they return is told by shape, and the layer calls them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from ckptfused.compat.pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from ckptfused.compat.torch_dispatch import DispatchMode
from ckptfused.models.derive.copies import layer_copy
from ckptfused.models.derive.recording.names import function_name, words_of
from ckptfused.models.derive.recording.recorder import RefusedError
from ckptfused.models.experts.read import is_experts

CAST_CALLS = words_of(
    "linear matmul rmatmul mm addmm bmm baddbmm einsum grouped_mm _grouped_mm scaled_dot_product_attention",
)
"""Calls that autocast has computed in another type."""


class Opaque(nn.Module):
    """The stand-in of a module in copies of its layer. Its one call in a recording is `called_whole`.

    A tensor that it returns of the shape of the first that it takes, or of its rows, is some function of that; others
    are empty.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._of: list[nn.Module] = [module]  # no child: it holds no weights
        self._returns: tuple[list[Any], TreeSpec] | None = None

    def called_whole(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if has_torch_function(tensors):
            return handle_torch_function(self.called_whole, tensors, *args, **kwargs)
        if not tensors or tensors[0].dim() < 2 or not tensors[0].is_floating_point():
            raise RefusedError("a module that cannot be followed takes no tensor [..., C] first")
        if self._returns is None:
            module = self._of.pop()
            returned = _of_experts if is_experts(module) else _returned if len(tensors) == 1 else _returned_by_shapes
            self._returns = returned(module, tensors[0], args, kwargs)
        x, (leaves, tree) = tensors[0], self._returns
        ways: dict[int, Any] = {id(_LIKE): lambda t: t, id(_ROWS): lambda t: t.flatten(0, -2)}
        made = [ways[id(leaf)]((x * (1.5 + i)).sin()) if id(leaf) in ways else leaf for i, leaf in enumerate(leaves)]
        return tree_unflatten([x.new_empty(0) if leaf is _OTHER else leaf for leaf in made], tree)

    forward = called_whole


_LIKE, _ROWS, _OTHER = object(), object(), object()


def _of_experts(module: nn.Module, x: Tensor, args: Any, kwargs: Any) -> tuple[list[Any], TreeSpec]:
    """What experts return that are called with rows, ids and weights."""
    return [_LIKE], tree_flatten(x)[1]


def _returned(module: nn.Module, x: Tensor, args: Any, kwargs: Any) -> tuple[list[Any], TreeSpec]:
    """What a module returns that is called with x, by a copy's call with two rows, whose weights are all one number."""
    weights = [p for p in module.parameters() if p.is_floating_point()]
    dtype = weights[0].dtype if weights else torch.float32
    one = lambda t: torch.ones((), dtype=t.dtype).expand(t.shape)  # noqa: E731
    here = lambda t: torch.zeros_like(t, device="cpu") if t.is_meta else t.to("cpu", copy=True)  # noqa: E731
    own = layer_copy(module, lambda t, parameter: one(t) if parameter else here(t))
    rows = torch.ones(*(1 for _ in x.shape[:-2]), 2, x.size(-1), dtype=dtype)
    args, kwargs = tree_map(lambda v: rows if isinstance(v, Tensor) else v, (args, kwargs))
    with torch.no_grad(), torch.random.fork_rng(devices=()), _Shapes(), _alone():
        leaves, tree = tree_flatten(own(*args, **kwargs))
    return _kinds(leaves, rows), tree


def _returned_by_shapes(module: nn.Module, x: Tensor, args: Any, kwargs: Any) -> tuple[list[Any], TreeSpec]:
    """What a module returns that is called so, by a copy's call on tensors without data: it takes more than x."""
    own = layer_copy(module, lambda t, parameter: torch.empty_like(t, device="meta"))
    args, kwargs = tree_map(lambda v: v.detach().to("meta") if isinstance(v, Tensor) else v, (args, kwargs))
    with torch.no_grad(), _alone():
        leaves, tree = tree_flatten(own(*args, **kwargs))
    return _kinds(leaves, x), tree


def _kinds(leaves: list[Any], x: Tensor) -> list[Any]:
    kinds = {x.flatten(0, -2).shape: _ROWS, x.shape: _LIKE}
    return [kinds.get(v.shape, _OTHER) if isinstance(v, Tensor) else v for v in leaves]


class _Shapes(TorchFunctionMode):
    """Products are of the right shape, and cost nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function_name(func) not in CAST_CALLS:
            return func(*args, **(kwargs or {}))
        without = tree_map(lambda v: v.to("meta") if isinstance(v, Tensor) else v, (args, kwargs or {}))
        made = func(*without[0], **without[1])
        return torch.ones(made.shape, dtype=made.dtype)


def _alone() -> AbstractContextManager[Any]:
    """Where there are other ranks, a context that sends them nothing: they may not be here."""
    return _Alone() if dist.is_available() and dist.is_initialized() else nullcontext()


class _Alone(DispatchMode):
    """**Raises** `RefusedError` where a collective is called."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RefusedError(f"a module that cannot be followed calls {func}")
        return func(*args, **(kwargs or {}))
