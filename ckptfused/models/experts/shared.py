"""The MLP that all tokens go through beside a mixture's experts: the FFN half of a block without a residual."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ckptfused.checkpoint import checkpoint
from ckptfused.eager.activation import activation
from ckptfused.layer.call import build_call
from ckptfused.layer.hooks import hooked_everywhere, lent_weights
from ckptfused.layer.parts import FFN, Inputs, Parts, Reason
from ckptfused.layer.projections import activation as activation_of
from ckptfused.layer.quantized import unparametrized
from ckptfused.layer.sdpa import same_sdpa
from ckptfused.layer.spec_text import Mode
from ckptfused.models.experts.read import SMALL, nearly_equal, trying
from ckptfused.recompute.made_again import not_recorded
from ckptfused.state.undone import without_trace

_NAMES = ("gate_proj", "up_proj", "down_proj")
_PLAIN = (int, float, bool, str, type(None))
_proved: WeakKeyDictionary[nn.Module, tuple[Hashable, Reason | None]] = WeakKeyDictionary()
"""What became of the trial of a module, and of what it was."""


def forward_beside(module: nn.Module) -> Callable[..., Any]:
    """What a module beside experts runs in its forward's place, and keeps its input alone: the FFN op, where it is such
    an MLP, or a checkpoint, whose result is not made again. It can be copied and pickled with its module."""
    return partial(_beside if _NAMES[-1] in module._modules else _generic, module)


def _beside(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        return _generic(module, *args, **kwargs)
    y = _fused(module, args[0])
    return _generic(module, *args) if isinstance(y, Reason) else y


def _generic(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with not_recorded():
        return checkpoint(same_sdpa(partial(type(module).forward, module)), *args, **kwargs)


def _fused(module: Any, x: Tensor) -> Tensor | Reason:
    """The result of an MLP for x [B, T, C] or [N, C], or why it is not the op's."""
    if x.dim() not in (2, 3) or not x.numel() or hooked_everywhere() or lent_weights(module):
        return Reason("this call is not the op's")
    if (why := unproved(module)) is not None:
        return why
    gate, up, down = (module._modules.get(name) for name in _NAMES)
    half = FFN(module.act_fn, gate, up, down, residual=False)  # type: ignore[arg-type]
    call = build_call(Parts(ffn=half), Inputs(x if x.dim() == 3 else x[None]), Mode())
    return call if isinstance(call, Reason) else call.run().view(x.shape)


def unproved(module: Any) -> Reason | None:
    """Why a module is not down(act(gate(x)) * up(x)), or down(act(up(x))): its class's forward is tried on small random
    weights, once for what the module's attributes are."""
    act = module._modules.get("act_fn", vars(module).get("act_fn"))
    key = (type(module).forward, act, _plain(module), *module._modules)
    known = _proved.get(module)
    if known is None or known[0] != key:
        try:
            with trying():
                known = key, _tried(module)
        except Exception as error:  # of code that was not read
            known = key, Reason(f"it could not be tried on small weights ({type(error).__name__}: {error})")
        _proved[module] = known
    return known[1]


def _plain(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    return tuple((name, value) for name, value in vars(module).items() if isinstance(value, _PLAIN))


def _tried(module: Any) -> Reason | None:
    gated = module._modules.get(_NAMES[0]) is not None
    if {*module._modules} - {"act_fn"} != {*_NAMES[not gated :]}:
        return Reason("it has other parts than an MLP")
    kind = activation_of(module.act_fn, gated, "")
    if isinstance(kind, Reason):
        return kind
    small = unparametrized(module)
    shapes = dict(zip(_NAMES, ((SMALL.width, SMALL.hidden),) * 2 + ((SMALL.hidden, SMALL.width),), strict=True))
    for name in _NAMES[not gated :]:
        small._modules[name] = nn.Linear(*shapes[name], dtype=torch.float64)
    x = torch.randn(SMALL.tokens, SMALL.width, dtype=torch.float64)
    with without_trace(module) as left:
        found = [type(module).forward(small, each) for each in (x, 10 * x)]
    if left or _plain(small) != _plain(module):
        return Reason(f"its forward changes {left[0] if left else 'attributes'}, beside what it returns")
    for each, made in zip((x, 10 * x), found, strict=True):
        gate = small.gate_proj(each) if gated else None
        if not nearly_equal(made, small.down_proj(activation(gate, small.up_proj(each), kind))):
            return Reason("its forward computes something else than an MLP")
    return None
