"""Entry points inside a `torch.utils.checkpoint`: every replay draws what its forward drew, whatever that restores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ckptfused
from ckptfused import FusedCheckpointAttention, FusedCheckpointBlock, FusedCheckpointFFN
from ckptfused.modules.fused import FusedModule
from ckptfused.ops import enclosing_checkpoint
from tests.accounting import CountOps, saved_bytes
from tests.properties.entries import CHANGED, ENTRIES, FUSED, HIDDEN, OURS, B, C, Call, T, each, made

Result = tuple[Tensor, ...]
MODULES: dict[str, Callable[..., FusedModule]] = {
    "block": lambda **options: FusedCheckpointBlock.llama(C, 4, HIDDEN, dropout=0.3, **options),
    "post-norm": lambda **options: FusedCheckpointBlock(C, 4, HIDDEN, 0.3, batch_first=True, **options),
    "attention": lambda **options: FusedCheckpointAttention(C, 4, 0.3, batch_first=True, **options),
    "ffn": lambda **options: FusedCheckpointFFN(C, HIDDEN, 0.3, **options),
}
unrestored = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
restored = partial(checkpoint, use_reentrant=False)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def layer_of(call: Call) -> Layer:
    """A layer that is the entry point, with a result like x whatever comes of it."""

    def forward(x: Tensor) -> Tensor:
        y = call.run(x)
        return y if y.shape == x.shape else x.sin() * y.square().mean()

    return Layer(call.module, forward)


class Layer(nn.Module):
    def __init__(self, inner: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.function = inner, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.fixture(params=OURS)
def layer(request: pytest.FixtureRequest) -> Layer:
    return layer_of(made(request.param))


@pytest.fixture(params=ENTRIES)
def any_layer(request: pytest.FixtureRequest) -> Layer:
    """Plain PyTorch's layers, too, whose checkpoint has to restore the random state."""
    return layer_of(made(request.param))


def step(function: Callable[[Tensor], Tensor], *modules: nn.Module) -> Result:
    """Output, gradients, and the default generator after forward and after backward."""
    x = torch.randn(B, T, C, generator=torch.Generator().manual_seed(1), requires_grad=True)
    torch.manual_seed(3)
    y = function(x)
    forward = torch.get_rng_state()
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    grads = torch.autograd.grad(y.square().sum(), [x, *parameters])
    return y.detach(), *grads, forward, torch.get_rng_state()


def same(got: Result, want: Result) -> bool:
    return all(a.equal(b) for a, b in zip(got, want, strict=True))


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest) -> FusedModule:
    torch.manual_seed(0)
    return MODULES[request.param]()


def test_a_replay_draws_what_the_forward_drew(layer: Layer) -> None:
    """Several calls are in a checkpoint that restores nothing; the default generator is left alone in backward."""
    other = nn.Linear(C, C)

    def segment(x: Tensor) -> Tensor:
        return layer(other(layer(x)).tanh())

    want = step(segment, layer, other)
    assert same(step(lambda x: unrestored(segment, x), layer, other), want)
    assert same(step(lambda x: restored(segment, x), layer, other), want)


def test_what_draws_after_it_is_as_in_the_forward(any_layer: Layer) -> None:
    """Where the checkpoint restores the default generator, a replayed call moves it on."""

    def segment(x: Tensor) -> Tensor:
        return torch.dropout(any_layer(torch.dropout(x, 0.4, True)), 0.4, True)

    assert same(step(lambda x: restored(segment, x), any_layer), step(segment, any_layer))


@pytest.mark.parametrize("around", [restored, unrestored], ids=["restored", "unrestored"])
def test_a_generator_of_the_callers(module: FusedModule, around: Any) -> None:
    """Given explicitly: the replay draws the same, and the generator stays where the forward left it."""
    want = step(lambda x: module(module(x, generator=(g := seeded())), generator=g), module)
    g = seeded()

    def segment(x: Tensor) -> Tensor:
        return module(module(x, generator=g), generator=g)

    after = seeded()
    step(lambda x: module(module(x, generator=after), generator=after), module)
    assert same(step(lambda x: around(segment, x), module), want)
    assert g.get_state().equal(after.get_state())
    one = step(lambda x: module(x, generator=seeded()), module)
    assert same(step(lambda x: around(module, x, generator=seeded()), module), one)
    assert same(step(lambda x: around(lambda x: module(x, generator=seeded()), x), module), one)


def test_ckptfused_checkpoint_around_a_call(layer: Layer) -> None:
    def segment(x: Tensor) -> Tensor:
        return layer(layer(x))

    for options in ({}, {"preserve_rng_state": False}):
        assert same(
            step(lambda x, options=options: ckptfused.checkpoint(segment, x, **options), layer), step(segment, layer)
        )


def test_checkpoints_that_restore_the_random_state(any_layer: Layer) -> None:
    def nested(x: Tensor) -> Tensor:
        return restored(any_layer, ckptfused.checkpoint(any_layer, x).sin())

    want = step(lambda x: any_layer(any_layer(x).sin()), any_layer)
    for around in (restored, ckptfused.checkpoint):
        assert same(step(lambda x, around=around: around(nested, x), any_layer), want)


def test_a_reentrant_checkpoint(any_layer: Layer) -> None:
    """Which takes no gradient but by backward()."""
    found = []
    for around in (lambda f, x: f(x), partial(checkpoint, use_reentrant=True)):
        any_layer.zero_grad()
        x = torch.randn(B, T, C, generator=torch.Generator().manual_seed(1), requires_grad=True)
        torch.manual_seed(3)
        around(any_layer, x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in any_layer.parameters() if p.grad is not None)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("inner", [restored, unrestored], ids=["inner-restored", "inner-unrestored"])
@pytest.mark.parametrize("outer", [restored, unrestored], ids=["outer-restored", "outer-unrestored"])
def test_checkpoints_in_checkpoints(layer: Layer, outer: Any, inner: Any) -> None:
    def pair(x: Tensor) -> Tensor:
        return layer(layer(x).tanh())

    def nested(x: Tensor) -> Tensor:
        return inner(pair, layer(inner(pair, x)).sin())

    want = step(lambda x: pair(layer(pair(x)).sin()), layer)
    assert same(step(lambda x: outer(nested, x), layer), want)
    assert same(step(lambda x: outer(lambda x: outer(nested, x), x), layer), want)


def test_a_second_backward_draws_the_same(layer: Layer) -> None:
    x = torch.randn(B, T, C, requires_grad=True)
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
    loss = unrestored(lambda x: layer(layer(x)), x).sin().sum()
    first, second = (torch.autograd.grad(loss, wanted, retain_graph=True) for _ in range(2))
    assert same(first, second)


def test_a_backward_inside_the_checkpoint(layer: Layer) -> None:
    """The replay of an inner checkpoint, which runs within the forward of another, draws for itself alone."""

    def segment(x: Tensor, inner: Any) -> Tensor:
        y = inner(lambda x: layer(layer(x)), x)
        (g,) = torch.autograd.grad(y.sum(), x)
        return layer(x + g)

    want = step(lambda x: segment(x, lambda f, x: f(x)), layer)
    plain = step(lambda x: unrestored(lambda x: segment(x * 1, unrestored), x, early_stop=False), layer)
    assert same(plain, want)


@each(FUSED)
def test_what_is_held_goes_with_the_checkpoint(name: str) -> None:
    layer = layer_of(made(name))
    before = len(enclosing_checkpoint._drawn), len(enclosing_checkpoint._left)
    x = torch.randn(B, T, C, requires_grad=True)
    y = unrestored(lambda x: layer(layer(x)), x)
    assert len(enclosing_checkpoint._drawn) == before[0] + 1
    y.sum().backward()
    del y
    assert (len(enclosing_checkpoint._drawn), len(enclosing_checkpoint._left)) == before


def test_hooks_of_another_kind_are_left_alone(layer: Layer) -> None:
    """Saved tensors on the host, inside and around a checkpoint, whose hooks are still found below them."""
    host = torch.autograd.graph.save_on_cpu

    def segment(x: Tensor) -> Tensor:
        with host():
            return layer(layer(x))

    want = step(lambda x: layer(layer(x)), layer)
    assert same(step(segment, layer), want)
    assert same(step(lambda x: unrestored(segment, x), layer), want)
    with host():
        assert same(step(lambda x: unrestored(segment, x), layer), want)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("generic", [False, True], ids=["fused", "generic"])
def test_a_checkpoint_around_one_module_replays_nothing(name: str, generic: bool) -> None:
    """It runs as often as without, be it fused or checkpointed generically."""
    torch.manual_seed(0)
    module = MODULES[name]()
    if generic:
        inner: Any = getattr(module, "norm1", None) or module.norm2
        inner.register_forward_hook(lambda *_: None)
    calls: list[Any] = []
    module.register_forward_pre_hook(lambda *given: calls.append(given))

    def counted(function: Callable[[Tensor], Tensor]) -> tuple[Result, int, int]:
        calls.clear()
        with CountOps() as count:
            result = step(function, module)
        return result, len(calls), sum(n for name, n in count.calls.items() if name.endswith("_fwd"))

    want = counted(module)
    assert want[1:] == (1, 0 if generic else 1)
    wrapped = checkpoint_wrapper(module, preserve_rng_state=False)
    for function in (wrapped, lambda x: unrestored(module, x), lambda x: restored(partial(module), x)):
        got = counted(function)
        assert same(got[0], want[0])
        assert got[1:] == want[1:]
    replayed = counted(lambda x: restored(lambda x: module(x), x))
    assert same(replayed[0], want[0])
    assert replayed[1:] == (2, 0 if generic else 1)  # called again, up to the operation that saves its inputs alone


def test_a_changed_input_still_raises(any_layer: Layer) -> None:
    x = torch.randn(B, T, C, requires_grad=True)
    middle = x * 1
    y = unrestored(any_layer, middle)
    with torch.no_grad():
        middle.add_(1)
    with pytest.raises(RuntimeError, match=CHANGED):
        y.sum().backward()


def test_what_a_module_keeps_is_left_to_the_checkpoint_around_it() -> None:
    """It holds no more than the input; the replay makes what `keep` names."""
    module = MODULES["block"](keep="all")
    x = torch.randn(B, T, C, requires_grad=True)

    def held(function: Callable[[Tensor], Tensor]) -> int:
        return saved_bytes(lambda: function(x), module)

    assert held(lambda x: unrestored(module, x)) == x.numel() * 4
    assert same(step(lambda x: unrestored(module, x), module), step(module, module))


def test_a_hook_on_a_module_that_a_checkpoint_is_around(module: FusedModule) -> None:
    """What it saves is replayed, with the masks of the forward."""
    want = step(lambda x: module(x).sin(), module)
    module.register_forward_hook(lambda module, args, y: y.sin())
    assert same(step(lambda x: unrestored(module, x), module), want)


def test_compiled_it_is_as_it_was() -> None:
    torch.manual_seed(0)
    module = FusedCheckpointBlock.llama(C, 4, HIDDEN)
    compiled = torch.compile(lambda x: restored(module, x), backend="aot_eager", fullgraph=True)
    assert same(step(compiled, module), step(module, module))


@pytest.mark.parametrize("name", [*MODULES, "sequential"])
@pytest.mark.parametrize("around", [checkpoint, ckptfused.checkpoint], ids=["torch", "ckptfused"])
def test_selective_checkpointing_counts_no_question_about_random_states(name: str, around: Callable[..., Any]) -> None:
    torch.manual_seed(1)
    two = lambda: ckptfused.FusedCheckpointSequential(MODULES["block"](), MODULES["ffn"]())  # noqa: E731
    module, linear = two() if name == "sequential" else MODULES[name](), nn.Linear(C, C)
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    found = []
    for call in (lambda f, x: f(x), partial(around, use_reentrant=False, context_fn=contexts)):
        found.append(step(lambda x, call=call: call(lambda x: module(linear(x)), x), module, linear))
    assert all(map(torch.equal, *found))


def test_fake_tensors_have_no_random_states() -> None:
    block = MODULES["block"]()
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.randn(B, T, C, requires_grad=True)
        restored(lambda x: block(x), x).sum().backward()
