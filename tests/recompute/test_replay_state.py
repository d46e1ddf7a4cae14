"""What a function reads and writes beside its arguments is for its replay as the forward found it."""

from __future__ import annotations

import copy
import gc
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ckptfused.checkpoint import checkpoint
from ckptfused.recompute import tracked_tensors

torchs = partial(torch_checkpoint.checkpoint, use_reentrant=False)
plain: Callable[..., Any] = lambda function, *args, **kwargs: function(*args, **kwargs)  # noqa: E731


class Average(nn.Module):
    """An exponential mean of its inputs, taken away from them; written in place or replaced."""

    def __init__(self, replace: bool, persistent: bool = True, large: bool = False) -> None:
        super().__init__()
        self.replace = replace
        self.register_buffer("mean", torch.zeros(1 << 19 if large else 4), persistent=persistent)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            new = self.mean[:4] * 0.9 + 0.1 * x.mean(0)
            if self.replace:
                self.mean = new
                self.count = self.count + 1
            else:
                self.mean[:4] = new
                self.count += 1
        return (x - self.mean[:4].clone()).tanh() * int(self.count)


class Recurrent(nn.Module):
    """Keeps its state in attributes, as RecurrentGemma does, and counts its calls."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.state: Tensor | None = torch.zeros(4) if in_place else None
        self.calls = 0
        self.history: list[int] = []
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(self.calls)
        state = torch.zeros_like(self.weight) if self.state is None else self.state
        y = (x * self.weight + state).tanh() / len(self.history)
        if self.in_place:
            assert self.state is not None
            self.state.mul_(0.5).add_(y[0].detach())
        else:
            self.state = y[0].detach()
        return y.exp()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "mean-in-place": lambda: Average(False),
    "mean-replaced": lambda: Average(True),
    "mean-not-persistent": lambda: Average(False, persistent=False),
    "mean-large": lambda: Average(False, large=True),
    "batch-norm": lambda: nn.BatchNorm1d(4),
    "batch-norm-cumulative": lambda: nn.BatchNorm1d(4, momentum=None),
    "spectral": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "spectral-old": lambda: spectral_norm(nn.Linear(4, 4)),
    "state-in-place": lambda: Recurrent(True),
    "state-replaced": lambda: Recurrent(False),
    "observer": lambda: torch.ao.quantization.FakeQuantize(torch.ao.quantization.MovingAverageMinMaxObserver),
}


def state_of(module: nn.Module) -> list[Any]:
    held = [(name, value) for m in module.modules() for name, value in vars(m).items() if not name.startswith("_")]
    return [*module.state_dict().items(), *module.named_buffers(), *held]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (type(a) is type(b) is not bool and isinstance(a, (type, partial, nn.Module)))


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("name", MODULES)
def test_state_is_updated_once(name: str, backwards: int) -> None:
    """Gradients and state of three steps are those without a checkpoint, two calls in flight and two backwards, too."""
    found = []
    for call in (plain, checkpoint):
        torch.manual_seed(1)
        segment = nn.Sequential(nn.Linear(4, 4), MODULES[name](), nn.Tanh())
        x = torch.randn(6, 4).requires_grad_()
        buffers = {n: id(b) for n, b in segment.named_buffers()}
        for _ in range(3):
            loss = call(segment, x).sin().sum() + call(segment, 2 * x).sin().sum()
            for i in range(backwards):
                loss.backward(retain_graph=i + 1 < backwards)
        if name not in ("mean-replaced", "spectral-old"):
            assert {n: id(b) for n, b in segment.named_buffers()} == buffers
        found.append([x.grad, *(p.grad for p in segment.parameters()), *state_of(segment)])
    for ours, expected in zip(found[1], found[0], strict=True):
        assert same(ours, expected)


@pytest.mark.parametrize("name", ["mean-in-place", "state-in-place", "state-replaced"])
def test_torch_updates_it_twice(name: str) -> None:
    found = []
    for call in (plain, torchs):
        torch.manual_seed(1)
        segment = nn.Sequential(nn.Linear(4, 4), MODULES[name](), nn.Tanh())
        call(segment, torch.randn(6, 4).requires_grad_()).sum().backward()
        found.append(state_of(segment))
    assert not all(map(same, *found))


def test_threads_share_the_statistics_of_one_module() -> None:
    norm = nn.BatchNorm1d(4)
    segment = nn.Sequential(norm, nn.Tanh())
    buffers, dicts = [id(b) for b in norm.buffers()], norm._buffers
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(150):
                checkpoint(segment, torch.randn(6, 4).requires_grad_()).sum().backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert norm.num_batches_tracked == 450
    assert [id(b) for b in norm.buffers()] == buffers and norm._buffers is dicts and type(dicts) is dict


@pytest.mark.parametrize("met", ["forward", "replay"])
def test_a_thread_that_comes_while_another_replays(met: str) -> None:
    """The replay of one waits in the middle for a whole step of the other."""
    norm, waits, goes_on = nn.BatchNorm1d(4), threading.Event(), threading.Event()
    replaying = threading.local()

    def segment(x: Tensor) -> Tensor:
        y = norm(x)
        if getattr(replaying, "now", False):
            waits.set()
            assert goes_on.wait(20)
        return (norm(y) * 2).tanh()

    def first() -> None:
        y = checkpoint(segment, torch.randn(6, 4).requires_grad_())
        replaying.now = True
        y.sum().backward()

    early = checkpoint(segment, torch.randn(6, 4).requires_grad_()) if met == "replay" else None
    thread = threading.Thread(target=first)
    thread.start()
    assert waits.wait(20)
    if early is None:
        checkpoint(segment, torch.randn(6, 4).requires_grad_())
    else:
        early.sum().backward()
    goes_on.set()
    thread.join()
    assert norm.num_batches_tracked == 4
    assert type(norm._buffers) is dict


CHANGES: dict[str, Callable[[nn.Sequential], None]] = {
    "eval": lambda m: m.eval() and None,
    "rate": lambda m: setattr(m[1], "p", 0.9),
    "rate-off": lambda m: setattr(m[1], "p", 0.0),
    "attention-rate": lambda m: setattr(m[2].self_attn, "dropout", 0.7),
    "module": lambda m: m.__setitem__(1, nn.Identity()),
    "hook": lambda m: m[0].register_forward_hook(lambda module, args, y: 2 * y) and None,
    "attribute": lambda m: setattr(m[2], "norm_first", True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_replay_has_the_modes_of_its_forward(name: str) -> None:
    found = []
    for call in (plain, checkpoint):
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        segment = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), layer)
        x = torch.randn(2, 5, 8).requires_grad_()
        y = call(segment, x)
        CHANGES[name](segment)
        changed = [dict(vars(m)) for m in segment.modules()]
        y.sin().sum().backward()
        assert [dict(vars(m)) for m in segment.modules()] == changed
        found.append([x.grad, *(p.grad for p in layer.parameters())])
    assert same(*found)


def random(x: Tensor, g: torch.Generator, more: Any = None) -> Tensor:
    mask = torch.rand(x.shape, generator=g)
    for other in () if more is None else more["deep"]:
        mask = mask + torch.rand(x.shape, generator=other)
    return (x * mask).exp()


def test_generators_among_arguments_draw_the_same_again() -> None:
    found = []
    for call in (plain, checkpoint):
        g, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
        x = torch.arange(12.0).div(12).requires_grad_()
        y = call(random, x, g, more={"deep": [other]})
        between = torch.rand(3, generator=g)
        y.sum().backward()
        found.append([x.grad, between, torch.rand(3, generator=g), torch.rand(3, generator=other)])
    assert same(*found)


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return random(x, self.generator)


@pytest.mark.parametrize("place", ["attribute", "closure"])
def test_other_generators_do_too(place: str) -> None:
    found = []
    for call in (plain, checkpoint):
        noise = Noise()
        g = noise.generator
        x = torch.arange(12.0).div(12).requires_grad_()
        call(noise if place == "attribute" else lambda x, g=g: random(x, g), x).sum().backward()
        found.append([x.grad, torch.rand(3, generator=g)])
    assert same(*found)


WEIGHT = torch.randn(4, 4).requires_grad_()


def _named_globally(x: Tensor) -> Tensor:
    return (x @ WEIGHT).exp()


def _changed() -> dict[str, tuple[Callable[[Tensor], Tensor], Tensor, str]]:
    module, frozen = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4).requires_grad_(False)
    norm = nn.BatchNorm1d(4).eval()
    loose = torch.randn(4, 4).requires_grad_()
    return {
        "parameter": (module, module[0].weight, "parameter '0.weight' of Sequential"),
        "bias": (nn.Sequential(module, nn.ReLU()), module[0].bias, "parameter '0.0.bias' of Sequential"),
        "frozen": (lambda x: frozen(x).tanh(), frozen.bias, "parameter 'bias' of Linear"),
        "method": (module.forward, module[0].weight, "parameter '0.weight' of Sequential"),
        "buffer": (lambda x: norm(x).exp(), norm.running_mean, "buffer 'running_mean' of BatchNorm1d"),
        "closure": (lambda x: (x @ loose).exp(), loose, r"a tensor of shape \[4, 4\]"),
        "global": (_named_globally, WEIGHT, r"a tensor of shape \[4, 4\]"),
    }


@pytest.mark.parametrize("name", _changed())
def test_what_the_replay_reads_must_not_be_changed(name: str) -> None:
    function, tensor, place = _changed()[name]
    x = torch.randn(3, 4).requires_grad_()
    y = checkpoint(function, x)
    with torch.no_grad():
        tensor.add_(1)
    with pytest.raises(RuntimeError, match=f"ckptfused.checkpoint: {place} was changed in place .*expected version"):
        y.sum().backward()


def test_a_buffer_that_gets_its_own_values_again_is_not_changed() -> None:
    """DistributedDataParallel's broadcast, before each forward."""
    norm, x = nn.BatchNorm1d(4).eval(), torch.randn(3, 4).requires_grad_()
    y = checkpoint(lambda x: norm(x).exp(), x)
    for buffer in norm.buffers():
        buffer.copy_(buffer.clone())
    y.sum().backward()
    (expected,) = torch.autograd.grad(norm(x).exp().sum(), x)
    assert x.grad is not None and torch.equal(x.grad, expected)


def test_a_changed_buffer_of_a_type_that_cannot_be_compared_raises() -> None:
    holder, x = nn.Module(), torch.randn(2, 4).requires_grad_()
    holder.register_buffer("bits", torch.zeros(8, dtype=torch.uint8).view(torch.bits8))
    y = checkpoint(lambda x, holder: (x * holder.bits.view(torch.uint8)[:4]).exp(), x, holder)
    holder.bits.view(torch.uint8).add_(1)
    with pytest.raises(RuntimeError, match="buffer 'bits' of Module was changed in place"):
        y.sum().backward()


def test_an_optimizer_step_between_forward_and_backward_raises() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.randn(3, 4)
    checkpoint(module, x).sum().backward()
    late = checkpoint(module, x)
    optimizer.step()
    with pytest.raises(RuntimeError, match="parameter '0.weight' of Sequential was changed in place"):
        late.sum().backward()


def test_what_the_replay_does_not_read_may_be_changed() -> None:
    """Two networks in one module, trained in turn: a step of one between forward and backward of the other."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def part(self, x: Tensor) -> Tensor:
            return self.one(x).tanh()

    found = []
    for call in (plain, checkpoint):
        torch.manual_seed(1)
        pair, x = Pair(), torch.randn(3, 4).requires_grad_()
        y = call(pair.part, x)
        with torch.no_grad():
            pair.other.weight.add_(1)
        y.sum().backward()
        found.append([x.grad, pair.one.weight.grad])
    assert same(*found)


def test_a_replaced_parameter_is_still_there_for_the_replay() -> None:
    found = []
    for call in (plain, checkpoint):
        torch.manual_seed(1)
        module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4).requires_grad_()
        old = module[0].weight
        y = call(module, x)
        module[0].weight = new = nn.Parameter(torch.randn(4, 4))
        y.sum().backward()
        assert new.grad is None and module[0].weight is new
        found.append([x.grad, old.grad])
    assert same(*found)


def test_weights_that_are_lent_by_functional_call() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4))
    x, found = torch.randn(3, 4).requires_grad_(), []
    lent = {name: torch.randn_like(p).requires_grad_() for name, p in module.named_parameters()}
    for call in (plain, checkpoint):
        wrapper = nn.Module()
        wrapper.inner = module
        wrapper.forward = lambda x, call=call: call(module, x)  # type: ignore[method-assign]
        y = torch.func.functional_call(wrapper, {f"inner.{name}": p for name, p in lent.items()}, (x,))
        found.append(torch.autograd.grad(y.sin().sum(), [x, *lent.values()]))
    assert same(*found)


def test_a_cache_among_the_arguments_is_filled_once() -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys: Tensor | None = None
            self.lengths: list[int] = []

        def update(self, keys: Tensor) -> Tensor:
            self.keys = keys if self.keys is None else torch.cat((self.keys, keys))
            self.lengths.append(len(self.keys))
            return self.keys

    def attend(x: Tensor, cache: Cache) -> Tensor:
        return (x @ cache.update(x * 2)[-3:].t()).softmax(-1) @ cache.update(x)[-3:]

    found = []
    for call in (plain, checkpoint):
        torch.manual_seed(1)
        x, cache = torch.randn(3, 4).requires_grad_(), Cache()
        call(attend, x, cache).sin().sum().backward(retain_graph=True)
        found.append([x.grad, cache.keys, cache.lengths])
    assert same(*found)


class Late(nn.Module):
    """A large buffer that every third call writes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(size))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            self.table[:4] += 1
        return (self.linear(x) + self.table[:4].clone()).exp().sin()


def seven_calls(call: Callable[..., Any], module: nn.Module, backwards: int) -> list[Any]:
    """The gradients of the input of each call, of which the graph goes through so many backwards."""
    gradients = []
    for _ in range(7):
        x = torch.randn(3, 4).requires_grad_()
        loss = call(module, x).sum()
        for i in range(backwards):
            loss.backward(retain_graph=i + 1 < backwards)
        gradients.append(x.grad)
    return gradients


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("size", [1 << 17, 1 << 19, (1 << 24) + 4], ids=["512KiB", "2MiB", "64MiB"])
def test_a_large_buffer_that_some_calls_write(size: int, backwards: int) -> None:
    found = []
    for call in (plain, checkpoint):
        torch.manual_seed(1)
        late = Late(size)
        found.append([*seven_calls(call, late, backwards), late.linear.weight.grad, late.table[:8], late.calls])
    assert same(*found)


def _as_it_was(module: nn.Module) -> None:
    module.wide.data[0] += 1


def _through_numpy(module: nn.Module) -> None:
    module.narrow.numpy()[0] += 1


def _to_not_a_number(module: nn.Module) -> None:
    module.wide.data.fill_(float("nan")) if module.calls == 2 else module.wide.data.zero_()


def _to_other_memory(module: nn.Module) -> None:
    module.narrow.data = torch.full([2 * module.calls], 3.0)


def _to_another_order(module: nn.Module) -> None:
    module.wide.data = module.wide.data.t()


def _to_another_type(module: nn.Module) -> None:
    module.narrow.data = module.narrow.data.view(torch.int32).view(torch.float32 if module.calls > 3 else torch.int32)


WRITES = [_as_it_was, _through_numpy, _to_not_a_number, _to_other_memory, _to_another_order, _to_another_type]


class SmallBuffers(nn.Module):
    """Buffers, one of them transposed, that some calls write without a word to their version counters."""

    def __init__(self, write: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.write = [write]
        self.calls = 0
        self.register_buffer("wide", (torch.arange(32.0).view(8, 4) / 32).t())
        self.register_buffer("narrow", torch.zeros(2))
        self.register_buffer("flags", torch.ones(3, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = (self.linear(x) + self.narrow.sum() + self.wide[0].sum()).sin().exp()
        if self.calls % 3 == 2:
            self.write[0](self)
        return y * self.narrow.sum().cos() * self.flags[0]


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("write", WRITES)
def test_small_buffers_that_are_written_behind_their_counters(
    write: Callable[[nn.Module], None], backwards: int
) -> None:
    found = []
    for call in (plain, checkpoint):
        torch.manual_seed(1)
        module = SmallBuffers(write)
        results = [gradient.nan_to_num(7.0) for gradient in seven_calls(call, module, backwards)]
        found.append([*results, module.wide.nan_to_num(7.0), module.narrow, module.calls])
    assert same(*found)


class Tagged(Tensor):
    """A class of tensors with a method."""

    def doubled(self) -> Tensor:
        return self.as_subclass(Tensor) * 2


class Running(nn.Module):
    """A mean of its inputs, in a buffer that it is given, replaces or writes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how
        start = None if how == "none" else torch.zeros(4)
        self.register_buffer("mean", start.as_subclass(Tagged) if how == "tagged" else start)
        if how == "quantized":
            self.register_buffer("codes", torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.quint8))
        if how == "sparse":
            self.register_buffer("unread", torch.eye(4).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        found = torch.zeros(4) if self.mean is None else self.mean
        read = found.doubled() if isinstance(found, Tagged) else found * 2
        y = self.linear(x - read).sin().exp()
        if self.how == "quantized":
            y = y * (1 + self.codes.dequantize())
        with torch.no_grad():
            made = 0.9 * found + 0.1 * x.detach().mean(0)
            if self.how in ("none", "replaced", "forces"):
                self.mean = made
            else:
                found.copy_(made)
            if self.how == "quantized":
                self.codes.copy_(made)
        if self.how == "forces":
            start = x.detach().requires_grad_()
            energy = (self.linear(start - self.mean).sin() ** 2).sum()
            y = y * torch.autograd.grad(energy, start, create_graph=True)[0]
        return y


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("how", ["none", "replaced", "written", "tagged", "quantized", "sparse", "forces"])
def test_a_mean_of_inputs_is_updated_once(how: str) -> None:
    """A buffer that is None at first; of a subclass; quantized; beside a sparse one; with a backward in the forward."""
    found = []
    for call in (plain, checkpoint):
        torch.manual_seed(1)
        module, results = Running(how), []
        for _ in range(3):
            x = torch.randn(3, 4).requires_grad_()
            call(module, x).sum().backward()
            results.append(x.grad)
        found.append([*results, module.linear.weight.grad, module.mean.as_subclass(Tensor)])
    assert same(*found)


def test_selective_checkpointing_sees_no_copies_of_buffers() -> None:
    policy = lambda ctx, op, *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE  # noqa: E731
    module, x = Running("replaced"), torch.randn(3, 4).requires_grad_()
    other = copy.deepcopy(module)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    checkpoint(module, x, context_fn=contexts).sum().backward()
    found, x.grad = x.grad, None
    plain(other, x).sum().backward()
    assert same([found, module.mean], [x.grad, other.mean])


@pytest.mark.parametrize("features", [4, 3000])
def test_statistics_that_a_kernel_writes_between_forward_and_backward_raise(features: int) -> None:
    """Behind the version counter."""
    norm, x = nn.BatchNorm1d(features).eval(), torch.randn(3, features).requires_grad_()
    for write in (True, False):
        y = checkpoint(nn.Sequential(norm, nn.Tanh()), x)
        with torch.no_grad():
            if write:
                norm.train()(x + 1)
            norm.eval()
            norm.running_mean.copy_(norm.running_mean.clone())  # as DDP's broadcast does
        with pytest.raises(RuntimeError, match="running_mean") if write else nullcontext():
            y.sum().backward()


def test_a_buffer_whose_storage_is_gone_is_not_read() -> None:
    flat = torch.ones(64)
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4).requires_grad_()
    module.register_buffer("empty", flat[8:12])
    for size in (16, 0):
        flat.untyped_storage().resize_(size)
        checkpoint(module, x).sum().backward()
    assert x.grad is not None


def test_what_is_saved_in_the_place_of_a_replay_is_guarded() -> None:
    table, scale = torch.zeros(1 << 17), torch.ones(4)

    def function(x: Tensor, write: bool) -> Tensor:
        if write:
            table[:4] += 1
        return (x * scale).sin() * scale

    x = torch.randn(3, 4).requires_grad_()
    checkpoint(function, x, False)
    y = checkpoint(function, x, True)
    scale.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_large_buffers_are_not_copied_where_nobody_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4).requires_grad_()
    for i in range(4):
        module.register_buffer(f"table{i}", torch.zeros(1 << 17))
    checkpoint(module, x).sum().backward()
    copied: list[int] = []
    monkeypatch.setattr(tracked_tensors, "_clone", lambda t: copied.append(t.nbytes))
    checkpoint(module, x).sum().backward()
    assert not copied


def test_backwards_through_a_retained_graph_leave_nothing() -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()), torch.randn(3, 4).requires_grad_()
    loss, held = checkpoint(module, x).sum(), []
    tracemalloc.start()
    try:
        for count in (30, 100):
            for _ in range(count):
                loss.backward(retain_graph=True)
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[1] - held[0] <= 100 * 100  # torch.utils.checkpoint: 1.5 KiB each


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_strided_nested_tensor_among_the_arguments() -> None:
    found = []
    for call in (plain, checkpoint):
        parts = [torch.arange(4.0 * n).reshape(n, 4).sin().requires_grad_() for n in (2, 3)]
        nested = torch.nested.as_nested_tensor(parts, layout=torch.strided)
        call(lambda t: torch.nested.to_padded_tensor(t * 2, 0.0).sin().exp(), nested).sum().backward()
        found.append([part.grad for part in parts])
    assert same(*found)


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "vmap": lambda f, x: torch.vmap(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),)),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x.sin())[0],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "grad-of-vmap": lambda f, x: torch.func.grad(lambda x: torch.vmap(f)(x).sum())(x),
    "hessian": lambda f, x: torch.autograd.functional.hessian(lambda x: f(x).sum(), x),
    "batched": lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    linear = nn.Linear(4, 4).requires_grad_(False)
    function = lambda x: linear(x).tanh().exp()  # noqa: E731
    x = torch.randn(3, 4)
    got, expected = (TRANSFORMS[name](partial(call, function), x) for call in (checkpoint, plain))
    torch.testing.assert_close(got, expected)


def test_forward_mode_without_a_transform() -> None:
    x, tangent = torch.randn(3, 4), torch.randn(3, 4)
    with torch.autograd.forward_ad.dual_level(), ExitStack():
        y = checkpoint(lambda x: x.sin().exp(), torch.autograd.forward_ad.make_dual(x, tangent))
        got = torch.autograd.forward_ad.unpack_dual(y).tangent
    assert got is not None
    torch.testing.assert_close(got, x.sin().exp() * x.cos() * tangent)


class Shared(nn.Module):
    """One buffer under several names, or as an attribute and a view beside."""

    def __init__(self, how: str) -> None:
        super().__init__()
        state = torch.tensor([1.0, 2.0, 3.0, 4.0])
        self.register_buffer("one", state)
        if how == "twice":
            self.register_buffer("other", state)
        elif how == "view":
            self.register_buffer("other", state[:])
        else:
            self.other = state

    def forward(self, x: Tensor) -> Tensor:
        self.one.mul_(2)
        return (x * self.other).sin()


def _accumulates(state: Tensor) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        state.add_(1)
        return (x * state).sin()

    return function


@pytest.mark.parametrize("how", ["twice", "view", "attribute"])
def test_buffers_that_share_memory(how: str) -> None:
    found = []
    for call in (plain, checkpoint):
        module, x = Shared(how), torch.tensor([0.1, 0.2, 0.3, 0.4]).requires_grad_()
        y = call(module, x)
        y.sum().backward()
        found.append([x.grad, module.one, module.other])
    assert same(*found)


def test_a_closures_tensor_that_two_calls_write() -> None:
    """Plain PyTorch raises: the second call changes what the first saved."""
    x = torch.tensor([0.1, 0.2]).requires_grad_()
    function = _accumulates(state := torch.ones(2))
    first, _ = checkpoint(function, x), checkpoint(function, x)
    (gradient,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(gradient, 2 * (2 * x.detach()).cos())
    assert torch.equal(state, torch.full((2,), 3.0))


def test_a_nan_beside_the_arguments_is_no_change() -> None:
    table = torch.tensor([[1.0], [torch.nan]]).expand(2, 3)
    x = torch.tensor([0.1, 0.2, 0.3]).requires_grad_()
    checkpoint(lambda x: (x * table[0]).sin(), x).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, x.detach().cos())


def test_states_do_not_chain_one_step_to_the_next() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.last, self.seen = nn.Linear(4, 4), None, {}

        def forward(self, x: Tensor) -> Tensor:
            p = self.linear(x).softmax(-1)
            self.last = self.seen["last"] = -(p * p.log()).sum()
            return (p * x).sin()

    module, inputs = Keeps(), []
    for _ in range(4):
        x = torch.randn(2, 4, requires_grad=True)
        checkpoint(module, x).sum().backward()
        inputs.append(weakref.ref(x))
        del x
    gc.collect()
    assert sum(x() is not None for x in inputs) <= 1


@pytest.mark.parametrize("name", ["lazy", "lazy-norm", "scripted", "traced", "forced-norm"])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_modules_that_change_themselves_or_are_compiled(name: str) -> None:
    class Forced(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.copy_(nn.functional.normalize(self.weight, dim=1))
            return super().forward(x)

    make: dict[str, Callable[[], nn.Module]] = {
        "lazy": lambda: nn.LazyLinear(4),
        "lazy-norm": lambda: nn.LazyBatchNorm1d(),
        "scripted": lambda: torch.jit.script(nn.Linear(4, 4)),
        "traced": lambda: torch.jit.trace(nn.Linear(4, 4), torch.randn(2, 4)),
        "forced-norm": lambda: Forced(4, 4),
    }
    found = []
    for call in (plain, checkpoint):
        torch.manual_seed(1)
        segment, x = nn.Sequential(make[name](), nn.Tanh()), torch.randn(3, 4).requires_grad_()
        call(segment, x).sin().sum().backward()
        found.append([x.grad, *(p.grad for p in segment.parameters())])
    for ours, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, expected)


def test_what_the_last_operation_saves_must_not_be_changed() -> None:
    """Early stop ends the replay before that operation is dispatched."""
    gamma = torch.ones(4)
    linear, x = nn.Linear(4, 4), torch.randn(3, 4).requires_grad_()
    y = checkpoint(lambda x: linear(x).sin() * gamma, x)
    gamma.add_(1)
    with pytest.raises(RuntimeError, match="was changed in place"):
        y.sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's own question
def test_compiled_code_stays_compiled_where_something_else_changed() -> None:
    other, scale = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(4))
    compiled = torch.compile(lambda x: x.sin().cos() * scale, backend="aot_eager")
    x = torch.tensor([0.1, 0.2, 0.3, 0.4]).requires_grad_()
    y = checkpoint(lambda x: compiled(x) if other is not None else x, x)
    with torch.no_grad():
        other.add_(1)
    y.sum().backward()
    torch.testing.assert_close(x.grad, -x.detach().sin().sin() * x.detach().cos())
    torch._dynamo.reset()


def test_states_written_later_raise_once_at_most() -> None:
    running, variance, train = torch.zeros(4), torch.ones(4), [False]

    def function(x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, running, variance, training=train[0]).sin()

    for train[0] in (False, True, True):
        y = checkpoint(function, torch.randn(6, 4).requires_grad_())
        after = running.clone()
        y.sum().backward()
        assert torch.equal(running, after)


@pytest.mark.parametrize("order", ["together", "result-first", "total-first"])
def test_a_closures_tensor_keeps_the_graph_of_the_forward(order: str) -> None:
    """It gets none of a replay's, by which the gradient would come twice."""
    found = []
    for call in (plain, checkpoint):
        total, x = torch.zeros(2), torch.tensor([0.3, 0.7]).requires_grad_()

        y = call(_adds_to(total), x)
        beside = (total * total.detach()).sum()  # has saved the total of now
        losses = {
            "together": [lambda y=y, total=total: y.sum() + total.sum()],
            "result-first": [y.sum, total.sum],
            "total-first": [total.sum, y.sum],
        }[order]
        for loss in [*losses, lambda beside=beside: beside]:
            loss().backward(retain_graph=True)
        found.append([x.grad, total.detach()])
    assert same(*found)


@pytest.mark.parametrize("last", [False, True])
def test_a_closures_tensor_keeps_what_came_after_the_forward(last: bool) -> None:
    """`last`: the replay ends before it adds."""

    def run(call: Callable[..., Any]) -> list[Tensor]:
        total, x = torch.zeros(2), torch.tensor([0.3, 0.7]).requires_grad_()

        def adds_last(x: Tensor) -> Tensor:
            y = x.sin().tanh()
            total.add_(x)
            return y

        y = call(adds_last if last else _adds_to(total), x)
        total.mul_(3)
        y.sum().backward(retain_graph=True)
        total.sum().backward()
        assert x.grad is not None
        return [x.grad, total.detach()]

    assert same(run(checkpoint), run(plain))


def _adds_to(total: Tensor) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        total.add_((h := x.sin()).exp())
        return h.tanh()

    return function


class Accumulates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_((h := x.sin()).exp())
        return h.tanh()


ACCUMULATES: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "closure": lambda: _adds_to(torch.zeros(2)),
    "attribute": Accumulates,
    "view": lambda: _adds_to(torch.zeros(4)[:2]),
}


@pytest.mark.parametrize("name", ACCUMULATES)
def test_what_accumulates_with_a_gradient_more_than_once_raises(name: str) -> None:
    """Its values before the second call have a graph, or are a view: no replay could have them as they were."""
    x, function = torch.tensor([0.3, 0.7]).requires_grad_(), ACCUMULATES[name]()
    checkpoint(function, x)
    with pytest.raises(RuntimeError, match="ckptfused.checkpoint: the function itself changes a"):
        checkpoint(function, 2 * x).sum().backward()


def test_what_a_function_has_changed_before_it_raises() -> None:
    def function(x: Tensor, seen: list[int]) -> Tensor:
        seen.append(1)
        raise ValueError("no more")

    found: list[list[int]] = [[], []]
    for call, seen in zip((plain, checkpoint), found, strict=True):
        with pytest.raises(ValueError, match="no more"):
            call(function, torch.ones(2, requires_grad=True), seen)
    assert found == [[1], [1]]
