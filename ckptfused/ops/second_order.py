"""The derivatives of the blocks' backward ops: second ones through plain PyTorch, batched ones one by one.

`block_bwd` is differentiable by its Autograd kernel, so this holds wherever the op runs: in the backward of a block, a
half, a converted layer or a segment, offloaded or replayed by a checkpoint around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckptfused import _extension  # noqa: F401  (registers the ops)
from ckptfused.compat.pytree import broadcast_to_and_flatten, tree_flatten, tree_unflatten
from ckptfused.compat.torch_dispatch import LegacyBatch, below_autograd
from ckptfused.eager.from_op import masks_of_op, plain_block
from ckptfused.spec import AUX_NAMES

_Optional = Tensor | None
# Where the ops have kernels.
_KEYS = ("AutogradCPU", "AutogradCUDA", "AutogradMeta")
_library = torch.library.Library("ckptfused", "IMPL")


class _Problem(NamedTuple):
    """What a backward op is called with beside tensors, and the op below autograd."""

    op: Callable[..., list[Tensor]]
    text: str
    needs: list[bool]


class _Backward(torch.autograd.Function):
    """A backward op as a function of dy, x and the parameters. Its first result is the op's own, to the bit."""

    @staticmethod
    def forward(ctx: Any, problem: _Problem, kept: list[Tensor], dy: Tensor, x: Tensor, *rest: _Optional) -> Any:
        ctx.problem = problem
        ctx.save_for_backward(dy, x, *rest)
        params, aux, state = _split(rest)
        with below_autograd():
            return tuple(problem.op(dy, x, params, aux, kept, state, problem.text, problem.needs))

    @staticmethod
    def backward(ctx: Any, *cotangents: _Optional) -> tuple[Any, ...]:
        dy, x, *rest = ctx.saved_tensors
        params, aux, state = _split(rest)
        text, needs = ctx.problem.text, ctx.problem.needs
        variables: list[Any] = [None if t is None else apart(t) for t in (dy, x, *params)]
        with torch.enable_grad():
            y = plain_block(variables[1], variables[2:], aux, text, masks_of_op(x, aux, text, state))
            inputs = [t for t, need in zip(variables[1:], needs, strict=True) if need and t is not None]
            first = torch.autograd.grad(y, inputs, variables[0], create_graph=True, allow_unused=True)
        pairs = [
            (gradient, cotangent)
            for gradient, cotangent in zip(first, cotangents, strict=True)
            if gradient is not None and gradient.requires_grad and cotangent is not None
        ]
        wanted = [i for i, need in enumerate(ctx.needs_input_grad[2 : 2 + len(variables)]) if need]
        results: list[_Optional] = [None] * (2 + len(rest))
        if pairs:
            found = torch.autograd.grad(
                [gradient for gradient, _ in pairs],
                [variables[i] for i in wanted],
                [cotangent for _, cotangent in pairs],
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
            for i, gradient in zip(wanted, found, strict=True):
                results[i] = gradient
        return (None, None, *results)


def _split(rest: Sequence[_Optional]) -> tuple[list[_Optional], list[_Optional], _Optional]:
    """Parameters, auxiliary inputs and random state."""
    end = len(rest) - 1 - len(AUX_NAMES)
    return [*rest[:end]], [*rest[end:-1]], rest[-1]


def apart(t: Tensor) -> Tensor:
    """A tensor to differentiate by that stands in one place only (a tied weight in two), which nothing else depends on
    (x may on a weight), differentiable in its turn."""
    if torch.is_grad_enabled() and t.requires_grad:
        return t.view_as(t)
    return t.detach().requires_grad_(t.is_floating_point())  # codes of few bits are no numbers


def asks_for_a_graph(*tensors: _Optional) -> bool:
    """Whether a backward op that is called with these tensors is differentiated in its turn."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def plain_gradients(
    function: Callable[..., Tensor], dy: Tensor, variables: Sequence[_Optional], needs: Sequence[bool]
) -> list[Tensor]:
    """The gradients of function(*variables) that are needed, with their graph."""
    own = [t if t is None or not need else apart(t) for t, need in zip(variables, needs, strict=True)]
    wanted = [t for t, need in zip(own, needs, strict=True) if need and t is not None]
    found = torch.autograd.grad(function(*own), wanted, dy, create_graph=True, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]


def _differentiable(
    op: Callable[..., list[Tensor]],
    dy: Tensor,
    x: Tensor,
    params: list[_Optional],
    aux: list[_Optional],
    kept: list[Tensor],
    state: _Optional,
    text: str,
    needs: list[bool],
) -> list[Tensor]:
    """The Autograd kernel: the op itself, and, where a graph of the backward is made, its derivative."""
    if asks_for_a_graph(dy, x, *params):
        return list(_Backward.apply(_Problem(op, text, needs), kept, dy, x, *params, *aux, state))
    with below_autograd():
        return op(dy, x, params, aux, kept, state, text, needs)


def one_by_one(op: Callable[..., list[Tensor]], info: Any, places: Any, *args: Any) -> tuple[list[Tensor], list[int]]:
    """The rule by which `torch.vmap` calls the op: once for each gradient."""
    leaves, structure = tree_flatten(args)
    dims = broadcast_to_and_flatten(places, structure) or []
    results = []
    for i in range(info.batch_size):
        one = [leaf if dim is None else leaf.select(dim, i) for leaf, dim in zip(leaves, dims, strict=True)]
        results.append(op(*tree_unflatten(one, structure)))
    return [torch.stack(each) for each in zip(*results, strict=True)], [0] * len(results[0])


def batched_gradients(op: Callable[..., list[Tensor]], *args: Any) -> list[Tensor]:
    """The same for `is_grads_batched` and `vectorize=True`, which PyTorch maps by the forerunner of `torch.vmap`."""
    batch = LegacyBatch()
    leaves, structure = tree_flatten(args)
    batched = list(map(batch.holds, leaves))
    leaves = [batch.opened(leaf) if mapped else leaf for leaf, mapped in zip(leaves, batched, strict=True)]
    size = next(leaf.size(0) for leaf, mapped in zip(leaves, batched, strict=True) if mapped)
    places = tree_unflatten([0 if mapped else None for mapped in batched], structure)
    results, _ = one_by_one(op, SimpleNamespace(batch_size=size), places, *tree_unflatten(leaves, structure))
    return list(map(batch.closed, results))


def register_derivative(name: str, kernel: Callable[..., list[Tensor]]) -> None:
    """Has the backward op of this name differentiated by `kernel`, which takes the op and its arguments, and mapped
    over batches of gradients one by one.
    """
    op = getattr(torch.ops.ckptfused, name).default
    for key in _KEYS:
        _library.impl(name, partial(kernel, op), key)
    _library.impl(name, partial(batched_gradients, op), "Batched")
    torch.library.register_vmap(f"ckptfused::{name}", partial(one_by_one, op), lib=_library)


for _family in ("block", "attention_block", "ffn_block"):
    register_derivative(f"{_family}_bwd", _differentiable)
