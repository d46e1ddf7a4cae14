"""What a module of experts computes: read from what its class says of it, and proved on small weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptfused.checks import autocast_enabled, is_dtensor
from ckptfused.compat.transformers import experts_functions, gate_of, is_expert_parallel, own_experts_forward
from ckptfused.eager.experts import eager_experts, experts_activation
from ckptfused.layer.hooks import watched
from ckptfused.layer.parts import Reason
from ckptfused.layer.quantized import Stack, stored_stack, unparametrized
from ckptfused.spec import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS, QUANT_SLOTS
from ckptfused.spec.experts import CLAMPED, ExpertsSpec

COMPUTED_AS_SAID = ("eager", "grouped_mm", "batched_mm", None)
"""Implementations that compute what the flags say; others (deepgemm, sonicmoe, kernels of a hub) are left alone."""
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_NEAR = 1e-5  # some classes compute in float32 whatever they are given
_LIMITS, _ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")


class Small(NamedTuple):
    """Sizes of weights on which code that was not read is tried."""

    tokens: int
    width: int
    hidden: int
    experts: int

    def call(self) -> tuple[Tensor, Tensor, Tensor]:
        """Random x, ids and weights of a call, in float64."""
        x = torch.randn(self.tokens, self.width, dtype=torch.float64)
        ids = torch.rand(self.tokens, self.experts).topk(2).indices
        return x, ids, torch.rand(self.tokens, 2, dtype=torch.float64)


SMALL = Small(tokens=7, width=5, hidden=6, experts=3)


def is_experts(module: nn.Module) -> bool:
    """Whether a module runs the experts implementation that its config names."""
    return is_expert_parallel(module) is not None and own_experts_forward(type(module)) is not None


def has_experts(module: nn.Module) -> bool:
    """Whether such a module is in a module, or is it."""
    return any(map(is_experts, module.modules()))


class Weights(NamedTuple):
    """The stacks of the first and the last product and their biases, as the op takes them."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    stored: tuple[Tensor | None, ...]
    """What is beside stacks in few bits; empty where both are numbers."""
    quant: tuple[tuple[Any, ...], ...]
    """How those are stored: the fields of `spec.Quantized`."""
    dtypes: frozenset[torch.dtype]
    """The types of all of them as numbers."""
    checks: tuple[Callable[[], None], ...]
    """For before a backward: that stacks in few bits are still those of the forward."""


def weights_of(module: Any) -> Weights:
    """The weights at this call; as numbers where others than bitsandbytes parametrize them."""
    names = {"up": "gate_up_proj" if module.has_gate else "up_proj", "down": "down_proj"}
    few = {t: stack for t, name in names.items() if isinstance(stack := stored_stack(module, name), Stack)}
    plain: dict[str, Tensor] = {t: getattr(module, name) for t, name in names.items() if t not in few}
    up_bias, down_bias = (getattr(module, f"{name}_bias") if module.has_bias else None for name in names.values())
    up, down = (few[t].codes if t in few else plain[t] for t in names)
    none: tuple[Tensor | None, ...] = (None,) * len(QUANT_SLOTS)
    stored = tuple(part for t in names for part in (few[t].stored.state if t in few else none)) if few else ()
    all_of = (*plain.values(), *few.values(), *(bias for bias in (up_bias, down_bias) if bias is not None))
    quant = tuple((t, *stack.stored.form) for t, stack in few.items())
    checks = tuple(stack.stored.check for stack in few.values() if stack.stored.check is not None)
    return Weights(up, down, up_bias, down_bias, stored, quant, frozenset(t.dtype for t in all_of), checks)


def _unusable(module: Any, weights: Weights, gathered_later: bool = False) -> Reason | None:
    """Why the weights of a module of experts cannot be the op's, as they are now. gathered_later: FSDP2 may have them
    in shards until it runs.
    """
    if is_expert_parallel(module):
        return Reason("it is expert parallel")
    stored = {target for target, *_ in weights.quant}
    for name, t in zip(("up", "down", "up_bias", "down_bias"), weights[:4], strict=True):
        if t is None or name in stored:
            continue
        if is_dtensor(t):
            if gathered_later:
                continue
            return Reason("a weight is a DTensor")
        if type(t) not in (Tensor, nn.Parameter) or not t.is_floating_point() or t.element_size() == 1:
            return Reason(f"a weight is stored as {type(t).__name__} of {t.dtype}")
    return None


def unfit(module: Any, x: Tensor) -> Reason | None:
    """Why a call with x, [N, C], is not the op's."""
    if x.dim() != 2:
        return Reason(f"it is called with x {list(x.shape)}")
    weights = weights_of(module)
    if weights.dtypes != {x.dtype} and not autocast_enabled(x):
        return Reason("its weights and its input have different types")
    return _unusable(module, weights)


def read_experts(module: Any, implementation: Any, gathered_later: bool = False) -> ExpertsSpec | Reason:
    """What a module of experts computes, or why it is left alone. implementation: what its config names.
    gathered_later: as `_unusable`'s."""
    if implementation not in COMPUTED_AS_SAID:
        return Reason(f"its implementation is {implementation!r}")
    if any(not hasattr(module, flag) for flag in _FLAGS):
        return Reason("its class does not say how its weights are stored")
    if getattr(module, "has_post_expert_norm", False):  # not before transformers 5.20
        return Reason("a norm follows each expert")
    for name in getattr(module, "parametrizations", ()):
        if not isinstance(stack := stored_stack(module, name), Stack):
            return stack or Reason(f"torch.nn.utils.parametrize makes its {name}")
    try:
        weights = weights_of(module)
    except AttributeError as error:
        return Reason(f"another module than its class says: {error}")
    if (why := watched(module, "it") or _unusable(module, weights, gathered_later)) is not None:
        return why
    try:
        with trying():
            return _proved(module)
    except Exception as error:  # of code that was not read
        return Reason(f"it could not be tried on small weights ({type(error).__name__}: {error})")


@contextmanager
def trying() -> Iterator[None]:
    """A context in which code is tried on small weights: its random numbers are the same each time, and the generators
    of CPU and GPUs stay as they are (`torch.manual_seed` is for all devices)."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)
        yield


def _proved(module: Any) -> ExpertsSpec | Reason:
    small = small_experts(module)
    values = torch.randn(64, SMALL.hidden * (2 if module.has_gate else 1), dtype=torch.float64)
    values = torch.cat((values, values * 10))
    act = gate_of(small) if module.has_gate else module.act_fn
    expected = act(values)
    near = (spec for spec in _candidates(module) if nearly_equal(experts_activation(values, spec), expected))
    spec = next(near, None)
    if spec is None:
        return Reason("its activation is none of ckptfused's")
    x, ids, scores = SMALL.call()
    ours = on_small_weights(small, x, ids, scores, (), spec)
    for name in ("eager", "batched_mm"):
        forward = experts_functions().get_interface(name, own_experts_forward(type(module)))
        if not nearly_equal(forward(small, x, ids, scores), ours):
            return Reason(f"its {name} forward computes something else than its class says")
    return spec


def on_small_weights(module: Any, x: Tensor, ids: Tensor, scores: Tensor, adapters: Any, spec: ExpertsSpec) -> Tensor:
    """What the op makes with the weights of `small_experts`."""
    found = weights_of(module)
    return eager_experts(x, ids, scores, found.up, found.up_bias, found.down, found.down_bias, adapters, (), spec)


def small_experts(module: Any) -> Any:
    """A shallow copy of a module of experts with few and small random weights in float64, parametrized by nobody."""
    _, width, hidden, count = SMALL
    small = unparametrized(module)
    small.num_experts = count
    wide = hidden * (2 if module.has_gate else 1)
    stem = "gate_up_proj" if module.has_gate else "up_proj"
    shapes = {stem: (count, wide, width), "down_proj": (count, width, hidden)}
    if module.is_transposed:
        shapes = {name: (e, into, out) for name, (e, out, into) in shapes.items()}
    if module.has_bias:
        shapes |= {f"{stem}_bias": (count, wide), "down_proj_bias": (count, width)}  # type: ignore[dict-item]
    for name, shape in shapes.items():
        small._parameters[name] = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    return small


def _candidates(module: Any) -> Iterator[ExpertsSpec]:
    layout = {"interleaved": module.has_gate and not module.is_concatenated, "transposed": module.is_transposed}
    for act in GATED_ACTIVATIONS if module.has_gate else PLAIN_ACTIVATIONS:
        yield ExpertsSpec(act=act, **layout)
    limit = next((value for name in _LIMITS if (value := getattr(module, name, None)) is not None), None)
    if not module.has_gate or limit is None:
        return
    own = next((value for name in _ALPHAS if (value := getattr(module, name, None)) is not None), 1.0)
    for alpha in dict.fromkeys((float(own), 1.0)):
        for offset in (1.0, 0.0):
            yield ExpertsSpec(act=CLAMPED, limit=float(limit), alpha=alpha, offset=offset, **layout)


def nearly_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two results on small weights are one but for rounding."""
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=_NEAR, atol=_NEAR)
