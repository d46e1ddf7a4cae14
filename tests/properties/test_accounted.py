"""Accounted: what an entry point saves, and which products it makes again, equal what `ckptfused.cost` says."""

from __future__ import annotations

import itertools

import pytest
import torch

from ckptfused import cost
from ckptfused.cost.loss import loss_saved_bytes
from ckptfused.cost.products import Product
from ckptfused.spec import HEAD, Adapter, BlockSpec, LossSpec
from tests.accounting import Events, saved_bytes
from tests.devices import on_devices
from tests.properties.entries import CLASSES, CONVERTED, FUSED, GENERIC, LOSS, B, C, Call, T, each, made, source, wanted

RATES = pytest.mark.parametrize("p", [0.0, 0.25])
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
# Inputs saved, the caller's own x among them; generator states; forwards of a layer that are run again.
REPLAYS = dict.fromkeys(GENERIC, (1, 1, 1)) | {
    "generic sequential": (2, 2, 2),
    "converted generic": (3, 3, 3),
    "converted generic segment": (1, 7, 5),  # two in the segment's replay, which each of the three has of its own, too
    "checkpoint": (1, 1, 2),
    "checkpoint_sequential": (3, 2, 2),  # the last segment is none
}


def in_replays(call: Call) -> int:
    """FLOPs of the matrix products that backward makes again: a segment's replay runs all its calls but the last."""

    def flops(spec: BlockSpec, *names: str) -> int:
        work = cost.forward_products(spec, B, T, C)
        return sum(w.flops for name, w in work.items() if isinstance(w, Product) and name in (names or work))

    replayed = sum(flops(spec, *cost.replayed(spec)) for spec in itertools.chain(*call.segments))
    return replayed + sum(flops(spec) for segment in call.segments for spec in segment[:-1])


@on_devices
@TYPES
@RATES
@each({**FUSED, "converted": CONVERTED["converted"]})
def test_a_fused_call_saves_its_input_and_its_random_state(
    name: str, p: float, dtype: torch.dtype, device: str
) -> None:
    call, x = made(name, p, device, dtype), source(device, dtype)
    calls = sum(map(len, call.segments))
    for train in (True, False):
        call.module.train(train)
        expected = len(call.segments) * x.nbytes + (16 * calls if p and train else 0)
        assert saved_bytes(lambda: call.run(x), call.module) == expected


@RATES
@each({**CONVERTED, **GENERIC})
def test_what_is_allocated_in_forward_and_stays(name: str, p: float) -> None:
    """Bytes are the allocator's, with generator states that no hook sees."""
    call, x = made(name, p), source()
    call.run(x).sum().backward()  # what is made once for a device
    live, kept = (Events(lambda f=f: f(x)) for f in (call.run, call.kept))
    state = torch.get_rng_state().nbytes
    if name == "converted segment":
        assert live.live_bytes() == live.result.nbytes + 4 * state
    elif name in CONVERTED:
        made_again = sum(cost.kept_bytes(s.with_keep("all"), B, T, C, x.dtype) for (s,) in call.segments)
        assert kept.live_bytes() - live.live_bytes() == made_again
    else:
        inputs, states, _ = REPLAYS[name]
        expected = live.result.nbytes + (inputs - 1) * x.nbytes + states * state
        if name == "checkpoint_sequential":
            last = Events(lambda: call.module[-1](x))  # type: ignore[index]
            expected += last.live_bytes() - last.result.nbytes
        assert live.live_bytes() == expected


@RATES
@each()
def test_what_backward_makes_again(name: str, p: float) -> None:
    """The products of a step with everything kept, and those of its replays."""
    call, x, steps = made(name, p), source(), []
    for function in (call.run, call.kept):
        forward = Events(lambda f=function: f(x))
        backward = Events(lambda y=forward.result: torch.autograd.grad(y.sum(), wanted(call, x)))
        steps.append((forward.product_flops(), backward.product_flops()))
    again = sum(steps[0]) - sum(steps[1])
    if name in GENERIC:
        layers = 3 if name.startswith("converted") or name == "checkpoint_sequential" else REPLAYS[name][2]
        assert again * layers == steps[1][0] * REPLAYS[name][2]
    elif name in LOSS:
        assert again == steps[0][0]
    else:
        assert again == in_replays(call)


@on_devices
@TYPES
@RATES
@each(LOSS)
def test_a_loss_head_saves_its_input_and_a_number_a_token(name: str, p: float, dtype: torch.dtype, device: str) -> None:
    call, x = made(name, p, device, dtype), source(device, dtype)
    spec = LossSpec(keep="inputs", reduction="mean", lora=(Adapter(HEAD, 3, 1.0, p),))
    expected = loss_saved_bytes(spec, tuple(x.shape), (CLASSES, C), [True] * 5 + [False], dtype, dtype, device=device)
    assert saved_bytes(lambda: call.run(x), call.module) == expected + x.nbytes
