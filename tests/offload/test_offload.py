"""Inputs that go to the host and come back: what moves and when, on a device that CPU memory stands in for."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ckptfused
from ckptfused import FusedCheckpointBlock, FusedCheckpointSequential
from ckptfused.offload.copies import CudaCopies
from tests.offload.fake import Memory, faked

B, T, C, HIDDEN = 2, 6, 16, 24
COUNT = 4


class Own(nn.Module):
    """A layer that no adapter knows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(C, HIDDEN), nn.Linear(HIDDEN, C)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        y = x + self.down(torch.relu(self.up(x)))
        return y if other is None else y + other


class Stack(nn.Module):
    """Layers in a row behind a projection, as embeddings are."""

    def __init__(self, layer: Callable[[], nn.Module], count: int = COUNT) -> None:
        super().__init__()
        self.first = nn.Linear(C, C)
        self.layers = nn.ModuleList(layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(C, 4, HIDDEN, dropout=0.2, batch_first=True)


class Sequential(Stack):
    """The same of our own blocks."""

    def __init__(self, segments: int = COUNT, offload: bool = True) -> None:
        super().__init__(Own, 0)
        blocks = [FusedCheckpointBlock.llama(C, 4, HIDDEN, dropout=0.2) for _ in range(COUNT)]
        self.layers.append(FusedCheckpointSequential(*blocks, segments=segments, offload=offload))


def fused(offload: bool = True, keep: str = "inputs") -> nn.Module:
    model = Stack(encoder_layer)
    assert ckptfused.convert(model, keep, offload=offload).fused == COUNT
    return model


def generic(offload: bool = True) -> nn.Module:
    model = Stack(Own)
    assert [layer.path for layer in ckptfused.convert(model, offload=offload).layers] == ["generic"] * COUNT
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {"fused": fused, "generic": generic, "Sequential": Sequential}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=list(MODELS))
late_or_soon = pytest.mark.parametrize("late", [True, False], ids=["late", "soon"])


def source() -> Tensor:
    return torch.randn(B, T, C, generator=torch.Generator().manual_seed(3))


def grads(model: nn.Module, y: Tensor, **options: Any) -> list[Tensor]:
    return list(torch.autograd.grad(y.square().sum(), list(model.parameters()), **options))


def step(model: nn.Module, x: Tensor | None = None) -> list[Tensor]:
    torch.manual_seed(7)
    y = model(source() if x is None else x)
    return [y.detach(), *grads(model, y)]


def on_the_cpu(model: nn.Module, x: Tensor | None = None) -> list[Tensor]:
    """A step of a copy of the model without the fake, where everything stays."""
    return step(copy.deepcopy(model), x)


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return len(got) == len(want) and all(map(torch.equal, got, want))


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
    """Of two graphs, of each of which backward goes through the last layer alone."""
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


@pytest.mark.parametrize("make", [fused, Sequential])
def test_second_derivatives(make: Callable[[], nn.Module]) -> None:
    model = make()

    def penalty(one: nn.Module) -> list[Tensor]:
        torch.manual_seed(7)
        x = source().requires_grad_()
        (dx,) = torch.autograd.grad(one(x).square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(dx.square().sum(), list(one.parameters()), allow_unused=True)[:-1])

    want = penalty(copy.deepcopy(model))
    with faked():
        assert same(penalty(model), want)


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
