"""PyTorch's fast path of attention that is not trained (`torch.backends.mha`), on the CPU at hand: a frozen encoder's.

It is one kernel for a whole module, which tensors without data do not take: what the module holds is measured, where it
runs alone.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptfused.compat.pytree import tree_leaves, tree_map
from ckptfused.compat.torch_memory import allocations
from ckptfused.simulate.alone import Like, OpCall
from ckptfused.simulate.roofline import Work

_MODULES = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class _Measured(NamedTuple):
    """One call of a module."""

    results: Any
    """The results, a `Like` for each tensor."""
    within: int
    """Bytes that it holds beside them until it ends."""
    seconds: float


@contextmanager
def measured_fast_paths(model: nn.Module, work: Work) -> Iterator[None]:
    """A context in which modules without data that would take the fast path need what they were measured to need."""
    found = [m for m in model.modules() if type(m) in _MODULES and not m.training and "forward" not in vars(m)]
    found = found if work.machine is not None and torch.backends.mha.get_fastpath_enabled() else []
    for module in found:
        vars(module)["forward"] = partial(_forward, module, work)
    try:
        yield
    finally:
        for module in found:
            vars(module).pop("forward", None)


def _forward(module: nn.Module, work: Work, *args: Any, **kwargs: Any) -> Any:
    parameters = dict(module.named_parameters())
    tensors = [t for t in tree_leaves((parameters, args, kwargs)) if isinstance(t, Tensor)]
    trained = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if work.machine is None or trained or not any(t.is_meta for t in tensors):
        return type(module).forward(module, *args, **kwargs)
    call = OpCall(_run, (module, parameters, args, kwargs))
    known = work.machine.whole_layers
    if call.kind not in known:
        measured: list[Any] = []
        known[call.kind] = measured[-1] if call.run(lambda run: measured.extend((run(), run()))) else None
    found = known[call.kind]
    if found is None:
        return type(module).forward(module, *args, **kwargs)
    out = tree_map(lambda like: _made(like) if isinstance(like, Like) else like, found.results)
    tensors[0].new_empty(found.within, dtype=torch.uint8)
    work.spend(found.seconds)
    return out


def _made(like: Like) -> Tensor:
    return torch.empty_strided(like.shape, like.strides, dtype=like.dtype, device="meta")


def _run(module: nn.Module, parameters: Any, args: Any, kwargs: Any) -> _Measured:
    """The most of a call whose masks hide nothing, since what they leave is gathered, and of one whose masks hide the
    last token of all but one sequence, since what they leave is then of several lengths.
    """
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    masks = [t for name, t in given.items() if "mask" in name and isinstance(t, Tensor)]
    function: Callable[[], Any] = partial(torch.func.functional_call, module, parameters, args, kwargs)
    within, results, seconds = 0, None, 0.0
    for hidden in (False, True) if masks else (False,):
        for mask in masks:
            mask.zero_()
            if hidden and mask.dim() > 1:
                mask[1:, ..., -1:] = True if mask.dtype == torch.bool else -inf
        begin = time.perf_counter()
        results, changes = allocations(function)
        seconds = time.perf_counter() - begin
        within = max(within, max(accumulate(changes, initial=0)) - sum(changes))
    return _Measured(tree_map(lambda t: Like.of(t) if isinstance(t, Tensor) else t, results), within, seconds)
