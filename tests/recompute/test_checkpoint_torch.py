"""What `ckptfused.checkpoint` shares with `torch.utils.checkpoint`: random numbers, autocast, nesting, compile."""

from __future__ import annotations

import functools
import inspect
import itertools
import queue
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

import ckptfused
from ckptfused.checkpoint import checkpoint, checkpoint_sequential
from tests.devices import on_devices


def layers(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 8))


def batch(grad: bool = True, device: str = "cpu") -> Tensor:
    return torch.randn(5, 8, device=device).requires_grad_(grad)


def gradients(loss: Tensor, module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    wanted = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
    return list(torch.autograd.grad(loss, wanted))


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_it_is_a_function_of_the_package_and_of_the_module() -> None:
    assert ckptfused.checkpoint is checkpoint is sys.modules["ckptfused.checkpoint"].checkpoint
    assert ckptfused.checkpoint_sequential is checkpoint_sequential


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint_sequential"])
def test_it_takes_what_torch_takes(name: str) -> None:
    ours = inspect.signature(getattr(ckptfused, name)).parameters
    theirs = inspect.signature(getattr(torch_checkpoint, name)).parameters
    assert list(ours)[:2] == list(theirs)[:2]
    keywords = {*theirs, "preserve_rng_state"} - ({"kwargs"} if name == "checkpoint_sequential" else set())
    assert keywords <= set(ours)
    assert ours["use_reentrant"].default is False
    for parameter in set(theirs) & set(ours) - {"use_reentrant"}:
        assert ours[parameter].default == theirs[parameter].default


@pytest.mark.parametrize("call", [checkpoint, lambda f, x, **kw: checkpoint_sequential([f, f], 2, x, **kw)])
def test_reentrant_is_refused(call: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="expected use_reentrant=False, got True"):
        call(torch.exp, batch(), use_reentrant=True)


@on_devices
@pytest.mark.parametrize("where", ["positional", "keyword", "list"])
def test_dropout_is_replayed_and_the_generator_goes_on(where: str, device: str) -> None:
    module, x = layers(0.5).to(device), batch(device=device)

    def run(call: Callable[..., Tensor]) -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(5)
        function = lambda x=None, xs=(): module(xs[0] if x is None else x)  # noqa: E731
        if where == "positional":
            y = call(function, x * 1)
        else:
            y = call(function, **({"x": x * 1} if where == "keyword" else {"xs": [x * 1]}))
        return gradients(y.square().sum(), module, x), torch.rand(3, device=device)

    got, after = run(checkpoint)
    expected, plain_after = run(lambda function, *args, **kwargs: function(*args, **kwargs))
    assert same(got, expected) and torch.equal(after, plain_after)


def test_the_random_state_is_left_alone_on_request() -> None:
    module, x = layers(0.5), batch()
    y = checkpoint(module, x, preserve_rng_state=False)
    torch.manual_seed(5)
    got = gradients(y.square().sum(), module, x)
    torch.manual_seed(5)
    module(x.clone())
    after = torch.rand(3)
    assert len(got) == 5 and not torch.equal(after, torch.rand(3))
    torch.manual_seed(5)
    y = checkpoint(module, x, preserve_rng_state=False)
    state = torch.get_rng_state()
    gradients(y.square().sum(), module, x)
    assert not torch.equal(state, torch.get_rng_state())  # the replay drew


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_as_it_was(dtype: torch.dtype, device: str) -> None:
    module, x = layers().to(device), batch(device=device)
    seen: queue.SimpleQueue[Any] = queue.SimpleQueue()  # a list of ours would not show the replay's

    def function(*, x: Tensor) -> Tensor:
        seen.put((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)))
        return module(x)

    with torch.autocast(device, dtype):
        y = checkpoint(function, x=x * 1)
        expected = module(x * 1)
    assert y.dtype == expected.dtype == dtype
    assert same(*(gradients(t.float().square().sum(), module, x) for t in (y, expected)))
    assert [seen.get_nowait() for _ in range(2)] == [(True, dtype)] * 2


def test_nested() -> None:
    module, x = layers(0.3), batch()

    def inner(x: Tensor, more: dict[str, Tensor]) -> Tensor:
        return module(x) * more["scale"].exp_()

    def run(call: Callable[..., Tensor]) -> list[Tensor]:
        def middle(x: Tensor) -> Tensor:
            return call(inner, x.tanh_(), more={"scale": x.cos()}) + call(module, x)

        torch.manual_seed(3)
        y = call(lambda x: call(middle, x.sin_()).cos(), x * 1)
        return [y.detach(), *gradients(y.square().sum(), module, x)]

    def copying(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        copies = [t.clone() for t in args]
        return function(*copies, **{key: {k: t.clone() for k, t in value.items()} for key, value in kwargs.items()})

    assert same(run(checkpoint), run(copying))


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_it_only_calls(grad: Callable[[], Any]) -> None:
    module, x, calls = layers(), batch(), []
    with grad():
        y = checkpoint(lambda x: calls.append(1) or module(x), x)
        assert torch.equal(y, module(x.clone())) and not y.requires_grad and len(calls) == 1


@pytest.mark.parametrize("call", [checkpoint, lambda function, *args: checkpoint_sequential([function], 1, *args)])
def test_a_function_that_turns_grad_mode_on(call: Callable[..., Any]) -> None:
    def function(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x.exp()

    x = torch.tensor([0.3, 0.7]).requires_grad_()
    with torch.no_grad():
        y = call(function, x)
    assert torch.equal(*torch.autograd.grad(y.sum(), x), x.detach().exp())


def test_inside_vmap() -> None:
    x = batch(grad=False)
    with torch.no_grad():
        y = torch.vmap(lambda row: checkpoint(torch.exp_, row))(x)
    assert torch.equal(y, x.exp())


@pytest.mark.parametrize("frozen", ["input", "weights", "one weight"])
def test_only_some_need_gradients(frozen: str) -> None:
    module, x = layers(), batch(grad=frozen != "input")
    for i, parameter in enumerate(module.parameters()):
        parameter.requires_grad_(frozen == "input" or (frozen == "one weight" and i != 2))
    y, expected = checkpoint(module, x * 1), module(x * 1)
    assert same(*(gradients(t.square().sum(), module, x) for t in (y, expected)))


def test_no_tensors_at_all() -> None:
    weight = batch()
    y = checkpoint(lambda power: weight.pow(power).exp(), 2)
    y.sum().backward()
    got, weight.grad = weight.grad, None
    weight.pow(2).exp().sum().backward()
    assert got is not None and weight.grad is not None and torch.equal(got, weight.grad)


def test_second_backward_and_second_order() -> None:
    x, weight = batch(), batch()
    loss = checkpoint(lambda x, w: (x.mul_(2).exp() * w).sin(), x * 1, w=weight).sum()
    expected_loss = ((x * 2).exp() * weight).sin().sum()
    for graph in (False, True):
        got = torch.autograd.grad(loss, [x, weight], retain_graph=True, create_graph=graph)
        expected = torch.autograd.grad(expected_loss, [x, weight], retain_graph=True, create_graph=graph)
        assert same(list(got), list(expected))
    got, expected = (torch.autograd.grad(g[0].sum(), [x, weight]) for g in (got, expected))
    torch.testing.assert_close(got, expected)  # sums in another order


def test_backward_inside() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin_()
        z = y.cos()
        return torch.autograd.grad(z.sum(), y, retain_graph=True)[0], z

    x = batch()
    got = torch.autograd.grad(checkpoint(function, x * 1)[1].sum(), x)[0]
    assert torch.equal(got, torch.autograd.grad(function(x * 1)[1].sum(), x)[0])


def test_any_outputs() -> None:
    x = batch()
    result = checkpoint(lambda x: {"a": [x.exp(), 3, None], "b": (x.detach().argmax(), "text"), "c": x}, x)
    assert result["a"][1:] == [3, None] and result["b"] == (x.argmax(), "text")
    assert torch.equal(result["c"], x)
    (result["a"][0].sum() + result["c"].sum()).backward()
    assert x.grad is not None and torch.equal(x.grad, x.detach().exp() + 1)


@pytest.mark.parametrize("early", [True, False])
def test_early_stop(early: bool) -> None:
    ends = itertools.count()  # a list would be in the replay as the forward found it, and afterwards as it left it

    def function(x: Tensor) -> Tensor:
        y = x.exp_().exp()
        next(ends)
        return y + 1

    checkpoint(function, batch(), early_stop=early).sum().backward()
    assert next(ends) == (1 if early else 2)


def _fickle() -> Callable[[Tensor], Tensor]:
    calls = itertools.count()

    def function(x: Tensor) -> Tensor:
        return (x[:2] if next(calls) else x).exp()

    return function


def test_determinism_check() -> None:
    with pytest.raises(torch_checkpoint.CheckpointError, match="different metadata"):
        checkpoint(_fickle(), batch()).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        checkpoint(_fickle(), batch(), determinism_check="none").sum().backward()
    assert not isinstance(caught.value, torch_checkpoint.CheckpointError)
    with pytest.raises(ValueError, match="determinism_check"):
        checkpoint(torch.exp, batch(), determinism_check="other")


def test_debug() -> None:
    with pytest.raises(torch_checkpoint.CheckpointError, match="Stack traces of the operators"):
        checkpoint(_fickle(), batch(), debug=True).sum().backward()


def test_an_error_in_the_function_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        checkpoint(lambda x: x / (1 // 0), batch())


def _save(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> torch_checkpoint.CheckpointPolicy:
    """Saves all but what is written later, which selective checkpointing refuses."""
    policy = torch_checkpoint.CheckpointPolicy
    return policy.PREFER_RECOMPUTE if op._schema.is_mutable else policy.MUST_SAVE


@pytest.mark.parametrize("policy", [[torch.ops.aten.addmm.default], _save], ids=["products", "all"])
def test_selective(policy: Any) -> None:
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Tanh())
    x = batch()
    context = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, policy)
    y, expected = checkpoint(module, x * 1, context_fn=context), module(x * 1)
    assert same(*(gradients(t.square().sum(), module, x) for t in (y, expected)))


@pytest.mark.parametrize("segments", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["module", "list"])
def test_sequential(kind: str, segments: int) -> None:
    module, x = layers(0.5), batch()
    before = x.detach().clone()
    torch.manual_seed(5)
    y = checkpoint_sequential(module if kind == "module" else list(module), segments, x)
    torch.manual_seed(5)
    expected = module(x * 1)
    assert torch.equal(y, expected) and torch.equal(x, before)
    assert same(*(gradients(t.square().sum(), module, x) for t in (y, expected)))


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "function": (lambda: checkpoint(5, batch()), "function: expected a callable, got 5"),
    "context": (lambda: checkpoint(torch.sin, batch(), context_fn=3), "context_fn: expected a callable, got 3"),
    "early_stop": (lambda: checkpoint(torch.sin, batch(), early_stop="no"), "early_stop: expected a bool, got 'no'"),
    "rng": (lambda: checkpoint(torch.sin, batch(), preserve_rng_state=2), "preserve_rng_state: expected a bool, got 2"),
    "determinism": (
        lambda: checkpoint(torch.sin, batch(), determinism_check="all"),
        "determinism_check: expected one of default, none, got 'all'",
    ),
    "functions": (lambda: checkpoint_sequential(torch.sin, 1, batch()), "functions: expected an nn.Sequential or"),
    "step": (lambda: checkpoint_sequential([torch.sin, 2], 1, batch()), r"functions\[1\]: expected a callable, got 2"),
    "segments": (lambda: checkpoint_sequential(layers(), 1.5, batch()), "segments: expected an integer, got 1.5"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_name_themselves(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.parametrize("segments", [0, 6])
def test_sequential_refuses(segments: int) -> None:
    with pytest.raises(ValueError, match=f"expected 1 to 5 segments, one function each, got {segments}"):
        checkpoint_sequential(layers(), segments, batch())


def _keyword(x: Tensor, more: list[Tensor], *, table: dict[str, Tensor]) -> Tensor:
    return (x.exp_() * more[0].sin_() + table["k"].mul_(2).tanh()).square()


def _twice(x: Tensor, other: Tensor) -> Tensor:
    return x.exp_() * other.sin()


COMPILED: dict[str, Callable[[Callable[..., Tensor], nn.Module, Tensor], Tensor]] = {
    "in-place": lambda call, module, x: call(module, x * 1),
    "trees": lambda call, module, x: call(_keyword, x * 1, [x * 2], table={"k": module(x * 3)}),
    "nested": lambda call, module, x: call(lambda x: call(module, x.exp_()) * x, x * 1),
    "sequential": lambda call, module, x: checkpoint_sequential(module, 3, x * 1),
    "again": lambda call, module, x: call(_twice, *([module(x * 1)] * 2)),
}


INDUCTOR = [pytest.mark.slow, pytest.mark.once, pytest.mark.extended]
"""Inductor compiles the graph that AOTAutograd has made."""


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "aot_eager") for name in COMPILED),
        *(pytest.param(name, "inductor", marks=INDUCTOR) for name in COMPILED),
    ],
)
def test_compiled(name: str, backend: str) -> None:
    torch._dynamo.reset()
    module, x = layers(), batch()
    step = functools.partial(COMPILED[name], checkpoint, module)
    y, expected = torch.compile(step, fullgraph=True, backend=backend)(x), step(x)
    torch.testing.assert_close(y, expected)  # Inductor's own exp and tanh
    torch.testing.assert_close(*(gradients(t.square().sum(), module, x) for t in (y, expected)))


def test_compiled_leaves_the_callers_tensors() -> None:
    torch._dynamo.reset()
    x = batch()
    before = x.detach().clone()
    y = torch.compile(lambda x: checkpoint(layers_free, x), fullgraph=True, backend="aot_eager")(x)
    y.sum().backward()
    assert torch.equal(x, before) and x.grad is not None and torch.equal(x.grad, (before > 0) * before.relu().exp())


def layers_free(x: Tensor) -> Tensor:
    return x.relu_().exp()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # raised by Dynamo, looking
def test_a_compiled_function_inside() -> None:
    torch._dynamo.reset()
    module, x = nn.Sequential(*layers(), nn.BatchNorm1d(8)), batch()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(module, backend="aot_eager")
    for _ in range(2):
        y, expected = checkpoint(lambda x: compiled(x), x * 1), module(x * 1)
        torch.testing.assert_close(*(gradients(t.square().sum(), module, x) for t in (y, expected)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert module[-1].num_batches_tracked == 4
