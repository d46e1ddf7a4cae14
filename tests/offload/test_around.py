"""Offloading among other things that people do: checkpoints, threads, copies of models, errors."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ckptfused
from ckptfused import FusedCheckpointSequential
from ckptfused.offload.copies import CudaCopies
from tests.offload.fake import faked
from tests.offload.models import (
    Own,
    Stack,
    encoder_layer,
    every_model,
    fused,
    generic,
    grads,
    on_the_cpu,
    same,
    source,
    step,
)


def test_nothing_is_saved_without_grad_mode() -> None:
    model = fused()
    with faked() as copies:
        with torch.no_grad():
            model(source())
        with torch.inference_mode():
            model(source())
        assert copies.log == [] and copies.hosts == []


@every_model
def test_an_exception_in_forward(make: Callable[[], nn.Module]) -> None:
    model = make()
    want = on_the_cpu(model)
    with faked() as copies:
        x = model.layers[0](model.first(source()))
        with pytest.raises((ValueError, RuntimeError, AssertionError)):
            model.layers[-1](x[..., :3])
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        del x
        gc.collect()
        copies.check()
        assert copies.held() == 0
        assert same(step(model), want)


@every_model
def test_a_checkpoint_around_has_the_say(make: Callable[[], nn.Module]) -> None:
    model = make()
    want = on_the_cpu(model)
    with faked() as copies:
        torch.manual_seed(7)
        y = torch_checkpoint(model, source(), use_reentrant=False)
        assert same([y.detach(), *grads(model, y)], want)
        with torch.autograd.graph.save_on_cpu():
            assert same(step(model), want)
        assert copies.log == []
        assert same(step(model), want)
        assert copies.moved("out") == [0, 1, 2]


@every_model
def test_a_reentrant_checkpoint_around(make: Callable[[], nn.Module]) -> None:
    """Its forward is without gradients; what its replay saves is offloaded."""
    model = make()
    x = source().requires_grad_()
    want = on_the_cpu(model, x)
    with faked() as copies:
        torch.manual_seed(7)
        y = torch_checkpoint(model, x, use_reentrant=True)
        y.square().sum().backward()
        assert same([y.detach(), *[p.grad for p in model.parameters() if p.grad is not None]], want)
        assert copies.moved("out") == copies.moved("in")[::-1] == [0, 1, 2]


@every_model
def test_threads(make: Callable[[], nn.Module]) -> None:
    """Steps of one model, each in a thread of its own, at once."""
    model = make().eval()
    want = [on_the_cpu(model, scale * source()) for scale in (1, 2, 3, 4)]
    got: list[list[Tensor]] = [[], [], [], []]
    ready = threading.Barrier(4)

    def work(i: int) -> None:
        for _ in range(5):
            ready.wait(5)
            y = model((i + 1) * source())
            got[i] = [y.detach(), *grads(model, y)]

    with faked(late=False) as copies:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(map(same, got, want))
        assert len(copies.hosts) == 4 * 5 * 3 and copies.held() == 0


def test_two_models_have_orders_of_their_own() -> None:
    one, other = fused(), generic()
    want = [on_the_cpu(one), on_the_cpu(other)]
    with faked() as copies:
        torch.manual_seed(7)
        first = one(source())
        second = other(source())
        assert copies.moved("out") == [*range(6)]  # both last ones stay
        assert same([first.detach(), *grads(one, first)], want[0])
        assert same([second.detach(), *grads(other, second)], want[1])


@pytest.mark.parametrize(
    "twice", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
@every_model
def test_copies_of_a_model(make: Callable[[], nn.Module], twice: Callable[[nn.Module], nn.Module]) -> None:
    """They offload, layers of one model in one order, and leave the first model's alone."""
    model = make()
    want = on_the_cpu(model)
    with faked() as copies:
        y = model(source())
        twin = twice(model)
        assert same(step(twin), want)
        assert copies.moved("out") == [*range(6)] and copies.held() == 3
        grads(model, y)


def test_torch_save() -> None:
    file = io.BytesIO()
    torch.save(fused(), file)
    file.seek(0)
    model = torch.load(file, weights_only=False)
    with faked() as copies:
        step(model)
    assert copies.moved("out") == [0, 1, 2]


def test_convert_again_and_revert_turn_it_off() -> None:
    for off in (ckptfused.convert, ckptfused.revert):
        model = fused()
        off(model)
        with faked() as copies:
            step(model)
        assert copies.log == []


def test_original_layers_save_what_they_did() -> None:
    model = fused()
    with faked() as copies, ckptfused.original(model):
        step(model)
    assert copies.log == []


@pytest.mark.slow
def test_compiled() -> None:
    model = fused().eval()
    want = on_the_cpu(model)
    torch._dynamo.reset()
    with faked() as copies:
        got = step(torch.compile(model, backend="aot_eager", fullgraph=True))
    assert all(torch.allclose(g, w, rtol=1e-4, atol=1e-5) for g, w in zip(got, want, strict=True))
    assert copies.log == []


def test_what_is_said() -> None:
    model = Stack(encoder_layer)
    report = ckptfused.convert(model, offload=True)
    assert "offload" in str(report) and "nothing moves on the CPU" in report.notes[-1]
    assert "offload" not in str(ckptfused.convert(model))
    with pytest.raises(TypeError, match="offload: expected a bool, got 'yes'"):
        ckptfused.convert(model, offload="yes")  # type: ignore[arg-type]
    sequential = FusedCheckpointSequential(Own(), Own(), segments=2, offload=True)
    assert "offload=True" in repr(sequential) and "offload" not in repr(FusedCheckpointSequential(Own()))
    assert all(other.offload for other in (sequential[:1], sequential + nn.Sequential(Own()), sequential * 2))
    with pytest.raises(TypeError, match="offload: expected a bool, got 2"):
        sequential.offload = 2  # type: ignore[assignment]


def test_ordinary_memory_where_pinning_fails() -> None:
    """Here it always does, for there is no device to pin it for."""
    if torch.cuda.is_available():
        pytest.skip("memory can be pinned here")
    copies = object.__new__(CudaCopies)
    copies._warned = False
    x = torch.randn(3, 4).t()
    with pytest.warns(UserWarning, match="could not be pinned"):
        host = copies._buffer(x)
    assert host.device.type == "cpu" and host.stride() == x.stride()
    copies._buffer(x)  # says it once: warnings are errors here
