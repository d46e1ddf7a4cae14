"""The unconverted model with ckptfused's dropout masks: PyTorch's own layers, `F.dropout` replaced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ckptfused import rng
from ckptfused.compat.torch_autograd import graph_task
from tests.models.zoo import Sites


class RecordStates(TorchDispatchMode):
    """The random state of every fused call, in order.

    A backward asks for none, but that of each op after a checkpointed piece, which the piece's replay hands over.
    """

    def __init__(self, replayed: Sequence[int] = ()) -> None:
        """replayed: the states, by place, that backward asks for, in order."""
        super().__init__()
        self.states: list[Tensor] = []
        self._expected, self._replayed = [*replayed], list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.ckptfused.rng_state.default:
            if graph_task() == -1:
                self.states.append(result)
            else:
                self._replayed += [i for i, state in enumerate(self.states) if torch.equal(result, state)] or [-1]
        return result

    def __exit__(self, kind: Any, *args: Any) -> None:
        super().__exit__(kind, *args)
        assert kind is not None or self._replayed == self._expected


def replayed_states(layers: list[nn.Module], sites: Callable[[Any], Sites] | None, keep: str) -> list[int]:
    """The states, by place, that a backward of layers asks for which are called one after the other: of a second op,
    before which there is attention to an encoder, and of T5's, before which there is all of its attention."""
    ops = [1 if sites is None else 1 + max(op for op, _ in sites(layer)) for layer in layers]
    after_a_piece = [count > 1 or type(layer).__name__ == "T5Block" for layer, count in zip(layers, ops, strict=True)]
    found = [end - 1 for end, after in zip(accumulate(ops), after_a_piece, strict=True) if after]
    return found[::-1] if keep == "inputs" else []


@contextlib.contextmanager
def with_masks(
    layers: list[nn.Module], states: list[Tensor], sites: Callable[[Any], Sites] | None = None
) -> Iterator[None]:
    """A context in which dropout in a layer draws the masks that the ops of the fused layer drew from `states`, in
    order.

    sites: which op and which site each dropout call of a layer draws from, in order. None: one op a layer, and
    attention probabilities (4-d) are site 0; the others follow in the order residual (1), hidden (2; only where a
    layer drops three times), residual (3).
    """
    waiting: list[tuple[Tensor, int]] = []
    here: list[nn.Module] = []
    plain = F.dropout

    def masked(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if p == 0 or not training:
            return x
        if not here:
            return plain(x, p, training, inplace)
        state, site = (waiting[0][0], 0) if sites is None and x.dim() == 4 else waiting.pop(0)
        swap = x.dim() == 3 and not getattr(getattr(here[0], "self_attn", None), "batch_first", True)
        wide = x.transpose(0, 1) if swap else x.view(1, *x.shape) if x.dim() == 2 else x
        keep = rng.dropout_mask(tuple(wide.shape), p, state, site)
        keep = keep.transpose(0, 1) if swap else keep.view(x.shape)
        return x * keep * rng.keep_scale(p)

    left = list(states)
    hooks = []
    for layer in layers:
        order = (
            sites(layer)
            if sites is not None
            else ((0, 1), (0, 2), (0, 3))
            if _drops_inside(layer)
            else ((0, 1), (0, 3))
        )
        own = [left.pop(0) for _ in range(1 + max(op for op, _ in order))]

        def enter(module: nn.Module, args: Any, draws: Any = tuple((own[op], site) for op, site in order)) -> None:
            here[:], waiting[:] = [module], draws

        def leave(*_: Any) -> None:
            assert sites is None or not waiting, "fewer dropout calls than sites"
            here.clear()

        hooks += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
    assert not left, "more random states than ops"
    with mock.patch.object(F, "dropout", masked), mock.patch.object(F, "scaled_dot_product_attention", _attention):
        yield
    for hook in hooks:
        hook.remove()


def _drops_inside(layer: Any) -> bool:
    return bool(getattr(layer, "activation_dropout", 0))


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` with a dropout that can be replaced."""
    assert not enable_gqa
    logits = q @ k.mT * (q.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        logits = logits.masked_fill(torch.ones_like(logits[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        logits = logits.masked_fill(~attn_mask, -torch.inf) if hides else logits + attn_mask
    return F.dropout(logits.softmax(-1), dropout_p) @ v
