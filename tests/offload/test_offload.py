"""Inputs that go to the host and come back: what moves and when, on a device that CPU memory stands in for."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ckptfused
from ckptfused import CheckpointPolicy, FusedCheckpointSequential
from tests.offload.fake import Memory, faked
from tests.offload.models import (
    B,
    C,
    Own,
    Sequential,
    Stack,
    T,
    encoder_layer,
    every_model,
    fused,
    generic,
    grads,
    late_or_soon,
    on_the_cpu,
    same,
    source,
    step,
)


@late_or_soon
@every_model
def test_bits_order_and_memory(make: Callable[[], nn.Module], late: bool) -> None:
    """All inputs but the last go out while the next layer computes, and come back one ahead; nothing stays."""
    model = make()
    want = on_the_cpu(model)
    with faked(late) as copies:
        got = step(model)
    assert same(got, want)
    assert copies.log == [("out", 0), ("out", 1), ("out", 2), ("in", 2), ("in", 1), ("in", 0)]
    assert copies.most <= 2
    assert copies.held() == 0


@late_or_soon
@pytest.mark.parametrize("keep", ["mid", "attention+mid", "all"])
def test_kept_values_stay(keep: str, late: bool) -> None:
    model = fused(keep=keep)
    want = on_the_cpu(model)
    with faked(late) as copies:
        assert same(step(model), want)
    assert copies.moved("out") == [0, 1, 2]


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_segments(segments: int) -> None:
    model = Sequential(segments)
    want = on_the_cpu(model)
    with faked() as copies:
        assert same(step(model), want)
    assert copies.moved("out") == copies.moved("in")[::-1] == [*range(segments - 1)]


@late_or_soon
@pytest.mark.parametrize("segments", [1, 2, 3])
@pytest.mark.parametrize("layer", [encoder_layer, Own])
def test_segments_of_a_converted_model(layer: Callable[[], nn.Module], segments: int, late: bool) -> None:
    model = Stack(layer)
    ckptfused.convert(model, policy=CheckpointPolicy.segments(segments, offload=True))
    want = on_the_cpu(model)
    with faked(late) as copies:
        assert same(step(model), want)
    assert copies.moved("out") == copies.moved("in")[::-1] == [*range(segments - 1)]
    assert copies.held() == 0


def test_other_modules_of_a_sequential() -> None:
    """Each saves its input, but for a Sequential inside, which decides for itself."""
    inner = FusedCheckpointSequential(Own(), Own(), segments=2)
    model = FusedCheckpointSequential(nn.Linear(C, C), encoder_layer(), inner, Own(), segments=4, offload=True)
    x = source().requires_grad_()
    want = on_the_cpu(model, x)
    with faked() as copies:
        assert same(step(model, x), want)
    assert copies.moved("out") == [0]  # the second's: the first has the user's x, which is a leaf
    inner.offload = True
    with faked() as copies:
        model.offload = True  # forgets what it knew of the device
        assert same(step(model, x), want)
    assert copies.moved("out") == [0, 1]  # and the first of those inside


@pytest.mark.parametrize("make", [fused, generic])
def test_memory_is_free_between_forward_and_backward(make: Callable[[], nn.Module]) -> None:
    model = make()
    inputs: list[Memory] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, args: inputs.append(Memory(args[0])))
    with faked() as copies:
        y = model(source())
        assert copies.held() == 3
        assert [memory.is_free() for memory in inputs] == [True, True, True, False]
        del y
        assert copies.held() == 0 and inputs[3].is_free()


@every_model
def test_the_first_backward_leaves_what_a_second_one_needs(make: Callable[[], nn.Module]) -> None:
    model = make()
    want = on_the_cpu(model)[1:]
    with faked() as copies:
        torch.manual_seed(7)
        y = model(source())
        assert same(grads(model, y, retain_graph=True), want)
        assert copies.held() == 3
        assert same(grads(model, y), want)
        assert copies.moved("out") == [0, 1, 2] and copies.moved("in") == [2, 1, 0, 2, 1, 0]
        assert copies.held() == 0
        assert copies.most <= 2 or make is generic  # a retained graph of a checkpoint holds what its replay made


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "last first"])
@late_or_soon
@every_model
def test_two_forwards_before_a_backward(make: Callable[[], nn.Module], late: bool, order: tuple[int, int]) -> None:
    """The first forward's last layer was not the last."""
    model = make()
    want = [on_the_cpu(model)[1:], on_the_cpu(model, 2 * source())[1:]]
    with faked(late) as copies:
        outputs: list[Any] = []
        for scale in (1, 2):
            torch.manual_seed(7)
            outputs.append(model(scale * source()))
        assert copies.moved("out") == [*range(7)]
        for i in order:
            assert same(grads(model, outputs[i]), want[i])
            outputs[i] = None
        assert copies.held() == 0 and copies.most <= 2


@late_or_soon
def test_backward_of_a_part(late: bool) -> None:
    """What was fetched ahead and not asked for goes when another is, and with its graph, copied or not."""
    model = fused()
    torch.manual_seed(7)
    twin = copy.deepcopy(model)
    with faked(late) as copies:
        middle = model.first(source())
        for layer in model.layers[:3]:
            middle = layer(middle)
        y = model.layers[3](middle)
        (dy,) = torch.autograd.grad(y.square().sum(), middle, retain_graph=True)
        assert copies.moved("in") == [2]
        del y
        got = torch.autograd.grad(middle, list(model.layers[2].parameters()), dy)
        assert copies.moved("in") == [2, 1]
        del middle
        copies.check()  # a copy under way holds what it reads
        assert copies.held() == 0
    torch.manual_seed(7)
    y = twin(source())
    assert same(list(got), list(torch.autograd.grad(y.square().sum(), list(twin.layers[2].parameters()))))


def test_one_is_ahead_at_most() -> None:
    """Two graphs, through each of which backward goes through the last layer alone."""
    model = fused()
    last = list(model.layers[-1].parameters())
    with faked(late=False) as copies:
        outputs = [model(source()) for _ in range(2)]
        for i in (0, 1, 0):
            torch.autograd.grad(outputs[i].sum(), last, retain_graph=True)
            assert copies.count() == 1
        assert copies.moved("in") == [3, 2, 6, 3, 2]


@pytest.mark.parametrize(("number", "late"), [(0, True), (1, False), (3, True)])
@pytest.mark.parametrize("make", [fused, generic])
def test_an_input_that_was_changed_raises(make: Callable[[], nn.Module], number: int, late: bool) -> None:
    """Whether it is on the host or stays, before its copy or after it."""
    model, inputs = make(), []
    model.layers[number].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with faked(late):
        y = model(source())
        with torch.no_grad():
            inputs.pop(0).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation|changed in place"):
            grads(model, y)
        del y


def test_what_stays_is_checked_too() -> None:
    """Hooks take PyTorch's own check of every saved tensor away."""
    mask = torch.zeros(T, T)
    for change in (lambda model: model.layers[1].linear1.weight, lambda model: mask):
        model = Stack(encoder_layer)
        ckptfused.convert(model, offload=True)
        with faked():
            x = model.first(source())
            for layer in model.layers:
                x = layer(x, src_mask=mask)
            with torch.no_grad():
                change(model).add_(1)
            with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* expected version \d+"):
                grads(model, x)


def test_parameters_buffers_and_their_views_stay() -> None:
    model = fused()
    for layer in model.layers:
        layer.register_buffer("table", source())
        layer.register_parameter("prompt", nn.Parameter(source()))
    with faked() as copies:
        for layer in model.layers:
            for x in (layer.table, layer.prompt, layer.prompt[:1], layer.prompt.view(-1, T, C), layer.prompt.detach()):
                y = layer(x)
        grads(model.layers[-1], y, allow_unused=True)
    assert copies.log == []


def test_what_shares_memory_or_has_gaps_stays() -> None:
    model = fused()
    with faked() as copies:
        x = model.first(source())
        for part in (x[:1], x[:, :-1], x[:, :, :].expand(B, T, C)[1:]):
            y = model.layers[0](part)
            y = model.layers[1](y)
        assert copies.moved("out") == [0, 1]  # those of the second layer, but the last


@late_or_soon
def test_other_layouts_come_back_alike(late: bool) -> None:
    """An input that was transposed."""
    found = []
    for copied in (True, False):
        model = fused()
        model.load_state_dict({name: torch.full_like(p, 0.1).cos_() for name, p in model.state_dict().items()})
        wide = model.first(source().transpose(0, 1).contiguous()).transpose(0, 1)
        assert not wide.is_contiguous()
        with faked(late) if copied else contextlib.nullcontext() as copies:
            torch.manual_seed(7)
            y = model.layers[1](model.layers[0](wide))
            found.append(list(torch.autograd.grad(y.pow(3).sum(), list(model.layers[0].parameters()))))
            assert copies is None or copies.moved("in") == [0]
    assert same(*found)


def test_a_second_argument_with_a_gradient_stays() -> None:
    """A decoder's view of the encoder is every layer's, so no layer's copy of it frees anything."""
    model = generic()
    other = model.first(source())
    with faked() as copies:
        x = model.first(source())
        for layer in model.layers:
            x = layer(x, other=other)
        assert copies.moved("out") == [0, 1, 2]
        grads(model, x)
        assert copies.held() == 0


def test_an_input_by_name() -> None:
    model = fused()
    with faked() as copies:
        x = model.first(source())
        for layer in model.layers:
            x = layer(src=x)
        assert copies.moved("out") == [0, 1, 2]
