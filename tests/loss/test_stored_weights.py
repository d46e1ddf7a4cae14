"""Heads whose weight is stored in few bits: as those with its numbers, which are there while a pass runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("bitsandbytes")

import ckptfused
from ckptfused.cost import loss_ledgers
from ckptfused.loss import HeadAdapter, HeadWeight
from ckptfused.spec import HEAD, QUANT_SLOTS, LossSpec, Quantized
from tests.accounting import Events
from tests.quantized import WAYS, Way, stored

lce: Any = ckptfused.linear_cross_entropy
CLASSES, WIDTH, TOKENS = 80, 64, 24
WAY = Way("nf4", 64, nested=True)


def head(way: Way = WAY, dtype: torch.dtype = torch.float32) -> tuple[HeadWeight, Tensor]:
    """A weight in few bits, and its numbers."""
    found, nested, plain = stored(torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0)), way, dtype)
    beside = tuple(found.get(slot) for slot in QUANT_SLOTS)
    return HeadWeight(found["w"], (way.kind, way.block, nested), beside, (CLASSES, WIDTH)), plain


def call(dtype: torch.dtype = torch.float32, adapters: int = 1) -> tuple[Tensor, Tensor, list[HeadAdapter]]:
    """x, target and adapters."""
    torch.manual_seed(1)
    x = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    made = [
        HeadAdapter(
            torch.randn(3, WIDTH, requires_grad=True), torch.randn(CLASSES, 3, requires_grad=True), scale=0.5, p=0.25
        )
        for _ in range(adapters)
    ]
    return x, torch.randint(CLASSES, (TOKENS,)), made


def results(weight: Any, dtype: torch.dtype = torch.float32, **options: Any) -> list[Tensor]:
    """The loss and the gradients of x and adapters, with the same dropout."""
    x, target, adapters = call(dtype)
    loss = lce(x, weight, target, adapters=adapters, generator=torch.Generator().manual_seed(2), **options)
    return [loss, *torch.autograd.grad(loss.sum(), [x, *(t for a in adapters for t in (a.a, a.b))])]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"keep": "inputs"}, {"reduction": "none"}, {"scratch": 1}], ids=str)
def test_bits_are_those_of_the_numbers(way: Way, dtype: torch.dtype, options: dict[str, Any]) -> None:
    weight, plain = head(way, dtype)
    for found, expected in zip(results(weight, dtype, **options), results(plain, dtype, **options), strict=True):
        assert torch.equal(found, expected)


def test_in_autocast() -> None:
    weight, plain = head(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = results(weight), results(plain)
    assert all(map(torch.equal, found, expected))


def test_no_numbers_are_there_between_loss_and_gradient() -> None:
    weight = head()[0]
    x, target, _ = call()
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = lce(x, weight, target)
    assert any(t.data_ptr() == weight.codes.data_ptr() for t in saved)
    assert all(t.shape != (CLASSES, WIDTH) for t in saved)
    loss.backward()
    assert x.grad is not None


def test_it_is_dequantized_once_a_pass_that_multiplies() -> None:
    for keep, times in (("gradients", [1, 0]), ("inputs", [1, 1])):
        weight = head()[0]
        x, target, _ = call()
        found = []
        with profile() as forward:
            loss = lce(x, weight, target, keep=keep, scratch=1)
        with profile() as backward:
            loss.backward()
        for events in (forward.events(), backward.events()):
            found.append([event.name for event in events or ()].count("ckptfused::dequantize"))
        assert found == times


@pytest.mark.parametrize("keep", ["gradients", "inputs"])
def test_second_derivatives(keep: str) -> None:
    weight, plain = head()
    found = []
    for w in (weight, plain):
        x, target, adapters = call()
        loss = lce(x, w, target, adapters=adapters, keep=keep, generator=torch.Generator().manual_seed(2))
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), [x, adapters[0].a, adapters[0].b]))
    for one, other in zip(*found, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other)


def test_transforms() -> None:
    weight, plain = head()
    x, target, _ = call()
    of = [torch.func.grad(lambda x, w=w: lce(x, w, target))(x.detach()) for w in (weight, plain)]
    torch.testing.assert_close(of[0], of[1])


def test_a_change_in_between_is_an_error() -> None:
    weight, _ = head()
    x, target, _ = call()
    loss = lce(x, weight, target, keep="inputs")
    weight.codes.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_compiled() -> None:
    weight, plain = head()
    compiled = torch.compile(lambda x, target: lce(x, weight, target), backend="aot_eager", fullgraph=True)
    x, target, _ = call()
    (found,) = torch.autograd.grad(compiled(x, target), x)
    (expected,) = torch.autograd.grad(lce(x, plain, target), x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("keep", ["gradients", "inputs"])
def test_ledger(keep: str) -> None:
    """The numbers, and the scratch of making them, are in a pass's peak, to the byte, and gone after it."""
    weight, plain = head(Way("nf4"))
    x, target, _ = call()
    spec = LossSpec(quant=(Quantized(HEAD, *weight.form),), classes=CLASSES, keep=keep)
    ledgers = loss_ledgers(spec, x, weight.codes, adapters=weight.state)
    op = torch.ops.ckptfused.linear_cross_entropy
    forward = Events(lambda: op(x, weight.codes, None, target, None, weight.state, spec.to_string()))
    loss = forward.result[0]
    dloss = torch.tensor(0.5)
    backward = Events(lambda: torch.autograd.grad(loss, x, dloss))
    measured = [(events.peak_bytes(), events.live_bytes()) for events in (forward, backward)]
    assert measured == [(ledger.peak, ledger.live) for ledger in ledgers]
    of_numbers = loss_ledgers(LossSpec(keep=keep), x, plain)
    assert [of.live for of in ledgers] == [of.live for of in of_numbers]
    assert ledgers[0].peak >= of_numbers[0].peak + plain.nbytes
    assert ledgers[0].work == of_numbers[0].work


def test_flops() -> None:
    counts = []
    for w in head():
        x, target, _ = call()
        with FlopCounterMode(display=False) as counter:
            lce(x, w, target).backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 2 * 2 * TOKENS * CLASSES * WIDTH


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"codes": torch.zeros(3, dtype=torch.uint8)}, "weight: w: expected 2560 bytes in a row, got 3"),
        ({"state": (None,) * 4}, "weight: scale: expected a tensor of nf4, got None"),
        ({"shape": (CLASSES, WIDTH + 1)}, r"expected \[..., C\] and \[V, C\], got \[24, 64\] and \[80, 65\]"),
        ({"shape": (0, WIDTH)}, "at least one class"),
        ({"form": ("nf5", 64)}, r"weight\[0\].kind: expected one of nf4, .*, got 'nf5'"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], match: str) -> None:
    weight, _ = head()
    x, target, _ = call()
    with pytest.raises(ValueError, match=match):
        lce(x, weight._replace(**change), target)


def test_spec() -> None:
    with pytest.raises(ValueError, match="classes: expected 1 or more of a stored weight, got 0"):
        LossSpec(quant=(Quantized(HEAD, "nf4", 64),))
    with pytest.raises(ValueError, match="classes: expected 0 of a weight of numbers, got 5"):
        LossSpec(classes=5)
