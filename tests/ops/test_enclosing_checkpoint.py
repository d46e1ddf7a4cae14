"""Fused calls inside a `torch.utils.checkpoint`: every replay draws what its forward drew, whatever that restores."""

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

WIDTH = 32
Result = tuple[Tensor, ...]
MODULES: dict[str, Callable[..., FusedModule]] = {
    "block": lambda **options: FusedCheckpointBlock.llama(WIDTH, 4, 64, dropout=0.3, **options),
    "post-norm": lambda **options: FusedCheckpointBlock(WIDTH, 4, 64, 0.3, batch_first=True, **options),
    "attention": lambda **options: FusedCheckpointAttention(WIDTH, 4, 0.3, batch_first=True, **options),
    "ffn": lambda **options: FusedCheckpointFFN(WIDTH, 64, 0.3, **options),
}
unrestored = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
restored = partial(checkpoint, use_reentrant=False)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def step(function: Callable[[Tensor], Tensor], *modules: nn.Module) -> Result:
    """Output, gradients, and the default generator after forward and after backward."""
    x = torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
    torch.manual_seed(3)
    y = function(x)
    forward = torch.get_rng_state()
    parameters = [p for module in modules for p in module.parameters()]
    grads = torch.autograd.grad(y.square().sum(), [x, *parameters])
    return y.detach(), *grads, forward, torch.get_rng_state()


def same(got: Result, want: Result) -> bool:
    return all(a.equal(b) for a, b in zip(got, want, strict=True))


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest) -> FusedModule:
    torch.manual_seed(0)
    return MODULES[request.param]()


def test_a_replay_draws_what_the_forward_drew(module: FusedModule) -> None:
    """Several calls are in a checkpoint that restores nothing; the default generator is left alone in backward."""
    other = nn.Linear(WIDTH, WIDTH)

    def segment(x: Tensor) -> Tensor:
        return module(other(module(x)).tanh())

    want = step(segment, module, other)
    assert same(step(lambda x: unrestored(segment, x), module, other), want)
    assert same(step(lambda x: restored(segment, x), module, other), want)


def test_what_draws_after_it_is_as_in_the_forward(module: FusedModule) -> None:
    """Where the checkpoint restores the default generator, a replayed call moves it on."""

    def segment(x: Tensor) -> Tensor:
        return torch.dropout(module(torch.dropout(x, 0.4, True)), 0.4, True)

    assert same(step(lambda x: restored(segment, x), module), step(segment, module))


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


def test_ckptfused_checkpoint_around_a_call(module: FusedModule) -> None:
    def segment(x: Tensor) -> Tensor:
        return module(module(x))

    for options in ({}, {"preserve_rng_state": False}):
        assert same(
            step(lambda x, options=options: ckptfused.checkpoint(segment, x, **options), module), step(segment, module)
        )


@pytest.mark.parametrize("inner", [restored, unrestored], ids=["inner-restored", "inner-unrestored"])
@pytest.mark.parametrize("outer", [restored, unrestored], ids=["outer-restored", "outer-unrestored"])
def test_checkpoints_in_checkpoints(module: FusedModule, outer: Any, inner: Any) -> None:
    def pair(x: Tensor) -> Tensor:
        return module(module(x).tanh())

    def nested(x: Tensor) -> Tensor:
        return inner(pair, module(inner(pair, x)).sin())

    want = step(lambda x: pair(module(pair(x)).sin()), module)
    assert same(step(lambda x: outer(nested, x), module), want)
    assert same(step(lambda x: outer(lambda x: outer(nested, x), x), module), want)


def test_a_second_backward_draws_the_same(module: FusedModule) -> None:
    x = torch.randn(2, 9, WIDTH, requires_grad=True)
    y = unrestored(lambda x: module(module(x)), x)
    first, second = (torch.autograd.grad(y.sin().sum(), [x, *module.parameters()], retain_graph=True) for _ in range(2))
    assert same(first, second)


def test_a_backward_inside_the_checkpoint(module: FusedModule) -> None:
    """The replay of an inner checkpoint, which runs within the forward of another, draws for itself alone."""

    def segment(x: Tensor, inner: Any) -> Tensor:
        y = inner(lambda x: module(module(x)), x)
        (g,) = torch.autograd.grad(y.sum(), x)
        return module(x + g)

    want = step(lambda x: segment(x, lambda f, x: f(x)), module)
    plain = step(lambda x: unrestored(lambda x: segment(x * 1, unrestored), x, early_stop=False), module)
    assert same(plain, want)


def test_what_is_held_goes_with_the_checkpoint(module: FusedModule) -> None:
    before = len(enclosing_checkpoint._drawn), len(enclosing_checkpoint._left)
    x = torch.randn(2, 9, WIDTH, requires_grad=True)
    y = unrestored(lambda x: module(module(x)), x)
    assert len(enclosing_checkpoint._drawn) == before[0] + 1
    y.sum().backward()
    del y
    assert (len(enclosing_checkpoint._drawn), len(enclosing_checkpoint._left)) == before


def test_hooks_of_another_kind_are_left_alone(module: FusedModule) -> None:
    """Saved tensors on the host, inside and around a checkpoint, whose hooks are still found below them."""
    host = torch.autograd.graph.save_on_cpu

    def segment(x: Tensor) -> Tensor:
        with host():
            return module(module(x))

    want = step(lambda x: module(module(x)), module)
    assert same(step(segment, module), want)
    assert same(step(lambda x: unrestored(segment, x), module), want)
    with host():
        assert same(step(lambda x: unrestored(segment, x), module), want)
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


def test_a_changed_input_still_raises(module: FusedModule) -> None:
    x = torch.randn(2, 9, WIDTH, requires_grad=True)
    middle = x * 1
    y = unrestored(module, middle)
    with torch.no_grad():
        middle.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_a_module_keeps_is_left_to_the_checkpoint_around_it() -> None:
    """It holds no more than the input; the replay makes what `keep` names."""
    module = MODULES["block"](keep="all")
    x = torch.randn(2, 9, WIDTH, requires_grad=True)

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
    module = FusedCheckpointBlock.llama(WIDTH, 4, 64)
    compiled = torch.compile(lambda x: restored(module, x), backend="aot_eager", fullgraph=True)
    assert same(step(compiled, module), step(module, module))


@pytest.mark.parametrize("name", [*MODULES, "sequential"])
@pytest.mark.parametrize("around", [checkpoint, ckptfused.checkpoint], ids=["torch", "ckptfused"])
def test_selective_checkpointing_counts_no_question_about_random_states(name: str, around: Callable[..., Any]) -> None:
    torch.manual_seed(1)
    two = lambda: ckptfused.FusedCheckpointSequential(MODULES["block"](), MODULES["ffn"]())  # noqa: E731
    module, linear = two() if name == "sequential" else MODULES[name](), nn.Linear(WIDTH, WIDTH)
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    found = []
    for call in (lambda f, x: f(x), partial(around, use_reentrant=False, context_fn=contexts)):
        found.append(step(lambda x, call=call: call(lambda x: module(linear(x)), x), module, linear))
    assert all(map(torch.equal, *found))


def test_fake_tensors_have_no_random_states() -> None:
    block = MODULES["block"]()
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.randn(2, 4, WIDTH, requires_grad=True)
        restored(lambda x: block(x), x).sum().backward()
