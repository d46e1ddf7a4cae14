"""What steps leave behind, and what a prediction cannot see: counted, or no plan promises a budget."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import ckptfused
from ckptfused import profile
from ckptfused.compat.torch_memory import allocations

C = 32


def layers(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(C), nn.Linear(C, 4 * C), nn.Tanh(), nn.Linear(4 * C, C)) for _ in range(count))
    )


X = torch.randn(8, 16, C)
Hook = Callable[[nn.Sequential], object]


def _each(model: nn.Sequential, put: Callable[[int, Tensor], object], backward: bool = False) -> None:
    for i, layer in enumerate(model):
        if backward and i == 0:  # whose input has no gradient
            continue
        if backward:
            layer.register_full_backward_hook(lambda m, gi, go, i=i: put(i, go[0].clone()) and None)
        else:
            layer.register_forward_hook(lambda m, a, y, i=i: put(i, y.detach() * 2) and None)


def _replaces(model: nn.Sequential) -> dict[int, Tensor]:
    kept: dict[int, Tensor] = {}
    _each(model, kept.__setitem__)
    return kept


def _replaces_gradients(model: nn.Sequential) -> dict[int, Tensor]:
    kept: dict[int, Tensor] = {}
    _each(model, kept.__setitem__, backward=True)
    return kept


def _last_two(model: nn.Sequential) -> deque[Tensor]:
    kept: deque[Tensor] = deque(maxlen=6)
    _each(model, lambda i, t: kept.append(t))
    return kept


@pytest.mark.parametrize("hook", [_replaces, _replaces_gradients, _last_two])
def test_what_hooks_keep_is_there_in_the_next_step(hook: Hook) -> None:
    """It is there beside what replaces it, in real steps from the second one on (the third, of the last two)."""
    model = layers()
    without = profile(model, X, device="cpu").peak
    kept: Any = hook(model)
    predicted = profile(model, X, device="cpu")
    assert not kept, "a prediction left something in what is the user's"
    assert predicted.notes == ()
    assert without < predicted.peak <= without + 7 * X.nbytes
    real = _peak_of_a_later_step(model)
    assert real <= predicted.peak <= real + X.nbytes


def _peak_of_a_later_step(model: nn.Module) -> int:
    """By the allocator, beside what was there before the first."""
    weights = sum(p.nbytes for p in model.parameters()) + X.nbytes

    def steps() -> None:
        for _ in range(4):
            model(X).sum().backward()
            model.zero_grad(set_to_none=True)

    _, events = allocations(steps)
    level = peak = 0
    for size in events:
        level += size
        peak = max(peak, level)
    return weights + peak


def _grows(model: nn.Sequential) -> list[Tensor]:
    kept: list[Tensor] = []
    _each(model, lambda i, t: kept.append(t))
    return kept


class Remembers(nn.Module):
    """A layer whose buffer gets longer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.memory = layers(), nn.Buffer(torch.empty(0, C))

    def forward(self, x: Tensor) -> Tensor:
        self.memory = torch.cat([self.memory, x.detach().mean(0)])
        return self.body(x)


class Circle(torch.autograd.Function):
    """It keeps its own result, which Python's collector has to find."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.y = y = x.exp()
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * ctx.y


class Circles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = layers()

    def forward(self, x: Tensor) -> Tensor:
        return Circle.apply(self.body(x))  # type: ignore[no-any-return]


class Shifted(nn.Module):
    """A layer that trains a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.shift = layers(), torch.zeros(C, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.shift


class SavedOnHost(nn.Module):
    """Layers whose checkpoints record their first forward, too, in hooks that save a tensor itself where it is on the
    CPU: a result that is saved with its graph stands in a circle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(C, C), layers()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autograd.graph.save_on_cpu():
            for layer in self.body:
                x = checkpoint(torch.enable_grad()(layer.forward), x, use_reentrant=True)
        return x


class Notes(nn.Module):
    """A layer that keeps its input in steps of its choice, by their number, and in others lets all go."""

    def __init__(self, keeps: Callable[[int], bool], clears: Callable[[int], bool] = lambda step: False) -> None:
        super().__init__()
        self.body, self.steps, self.kept = layers(), 0, list[Tensor]()
        self.keeps, self.clears = keeps, clears

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        if self.clears(self.steps):
            self.kept.clear()
        if self.keeps(self.steps):
            self.kept.append(x.detach() * 2)
        return self.body(x)


COUNTS = "steps counts steps: what later ones do is not predicted"


def _late_list() -> nn.Module:
    return Notes(lambda step: step > 2)


def _list_of_second_steps() -> nn.Module:
    return Notes(lambda step: step % 2 == 0)


def _list_of_third_steps() -> nn.Module:
    return Notes(lambda step: step % 3 == 0)


LATE = (_late_list, _list_of_second_steps, _list_of_third_steps)


def _hooked_list() -> nn.Module:
    model = layers()
    _grows(model)
    return model


@pytest.mark.parametrize("make", [_hooked_list, Remembers, Circles, SavedOnHost, *LATE])
def test_what_grows_is_refused(make: Callable[[], nn.Module]) -> None:
    model = make()
    notes = profile(model, X, device="cpu").notes
    assert len(notes) == 1 + isinstance(model, Notes)
    assert notes[:-1] == ((COUNTS,) if isinstance(model, Notes) else ())
    assert notes[-1].startswith("each step leaves ") and "later steps need more" in notes[-1]
    with pytest.raises(ValueError, match="no plan keeps a budget where each step leaves"):
        ckptfused.convert(model, budget="1GiB", batch=X, device="cpu")


@pytest.mark.parametrize("period", [2, 3])
def test_what_is_cleared_in_some_steps_counts_as_long_as_it_is_there(period: int) -> None:
    model = Notes(lambda step: step % period == 0, clears=lambda step: step % period == 1)
    predicted = profile(model, X, device="cpu")
    assert predicted.notes == (COUNTS,)
    assert predicted.peak == profile(Notes(lambda step: False), X, device="cpu").peak + X.nbytes
    assert _peak_of_a_later_step(model) <= predicted.peak
    assert ckptfused.plan(model, X, budget="1GiB", device="cpu").peak > 0


def test_a_plan_counts_what_only_later_steps_leave() -> None:
    """Its steps of other policies, of which fewer are looked at, begin with it too."""
    empty, full = Notes(lambda step: False), Notes(lambda step: step == 2)
    without, found = (ckptfused.plan(model, X, budget="1GiB", device="cpu").peak for model in (empty, full))
    assert found >= without + X.nbytes


def test_numbers_that_are_written_down_are_no_reason() -> None:
    """A loss a step beside 4 MB of weights is said, and a budget kept for 10,000 steps."""
    model, kept = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()), list[Tensor]()
    model.register_forward_hook(lambda m, a, y: kept.append(y.detach().mean()))
    x = torch.randn(2, 1024)
    assert profile(model, x, device="cpu").notes[0].startswith("each step leaves 4 B more behind")
    assert ckptfused.plan(model, x, budget="1GiB", device="cpu").peak > 0
    assert kept == []


def _keeps_gradients(model: nn.Module) -> None:
    kept: dict[Any, Tensor] = {}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: kept.__setitem__(p, p.grad.clone()))  # type: ignore[union-attr]


def _masks_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.register_hook(lambda g: g * 0.5)


def _masks_at_nodes(model: nn.Module) -> list[Any]:
    nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]  # type: ignore[union-attr]
    for node in nodes:
        node.register_hook(lambda given, made: None)  # type: ignore[union-attr]
    return nodes


def _keeps_before_nodes(model: nn.Module) -> list[Any]:
    nodes: list[Any] = [get_gradient_edge(p).node for p in model.parameters()]
    kept: dict[int, Tensor] = {}
    for i, node in enumerate(nodes):
        node.register_prehook(lambda made, i=i: kept.__setitem__(i, made[0].clone()))
    return nodes


def _compiled(model: nn.Module) -> None:
    model[0].compile(backend="aot_eager")  # type: ignore[index, operator]


def _compiled_forward(model: nn.Module) -> None:
    layer: Any = model[0]  # type: ignore[index]
    layer.forward = torch.compile(layer.forward, backend="aot_eager")


def _compiled_class(model: nn.Module) -> None:
    kind: Any = type(model[0])  # type: ignore[index]
    forward = torch.compile(kind.forward, backend="aot_eager")
    model[0].__class__ = type("Decorated", (kind,), {"forward": forward})  # type: ignore[index, operator]


HOOKED = (_keeps_gradients, _masks_gradients, _masks_at_nodes, _keeps_before_nodes)
COMPILED = (_compiled, _compiled_forward, _compiled_class)


@pytest.mark.parametrize("change", [*HOOKED, *COMPILED])
def test_what_no_copy_has_is_refused(change: Callable[[nn.Module], list[Any] | None]) -> None:
    model = layers()
    assert profile(model, X, device="cpu").notes == ()
    held = change(model)
    notes = profile(model, X, device="cpu").notes
    assert len(notes) == 1
    assert ("without torch.compile" if change in COMPILED else "hooks on gradients (18") in notes[0]
    with pytest.raises(ValueError, match="no plan keeps a budget where"):
        ckptfused.plan(model, X, budget="1GiB", device="cpu")
    del held  # without which hooks on nodes are gone


def test_a_hook_on_a_batch_is_refused() -> None:
    x = X.clone().requires_grad_()
    assert profile(layers(), x, device="cpu").notes == ()
    x.register_hook(lambda grad: grad * 0.5)
    with pytest.raises(ValueError, match=r"no plan keeps a budget where hooks on gradients \(1, .* of the batch"):
        ckptfused.plan(layers(), x, budget="1GiB", device="cpu")


def test_a_hook_on_a_tensor_of_nobody_is_refused() -> None:
    model = Shifted()
    assert profile(model, X, device="cpu").notes == ()
    model.shift.register_hook(lambda grad: grad * 0.5)
    with pytest.raises(ValueError, match="no plan keeps a budget where hooks on gradients .* of shift"):
        ckptfused.plan(model, X, budget="1GiB", device="cpu")


@torch.compile(backend="aot_eager")
def _activation(x: Tensor) -> Tensor:
    return (x * 2).tanh().exp()


def test_a_compiled_function_that_a_layer_calls_is_refused() -> None:
    class Calls(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return _activation(super().forward(x))

    model = nn.Sequential(*(Calls(C, C) for _ in range(3)))
    notes = profile(model, X, device="cpu").notes
    assert len(notes) == 1
    assert "without torch.compile" in notes[0]
    with pytest.raises(ValueError, match=r"no plan keeps a budget where .* torch\.compile"):
        ckptfused.plan(model, X, budget="1GiB", device="cpu")


def test_a_module_around_what_is_compiled_is_refused() -> None:
    model = torch.compile(layers(), backend="aot_eager")
    assert "without torch.compile" in str(profile(model, X, device="cpu").notes)


def test_hooks_that_update_early_are_ours() -> None:
    model = layers()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    ckptfused.convert(model, release=optimizer)
    assert profile(model, X, optimizer, device="cpu").notes == ()


def test_a_closure_over_the_model_is_left_as_it_was() -> None:
    """A copy's hooks know the model that it was made of."""
    model: Any = layers()
    model.kept, model.last = {}, None

    def put(i: int, t: Tensor) -> None:
        model.kept[i] = model.last = t

    _each(model, put)
    _each(model, put, backward=True)
    profile(model, X, device="cpu")
    assert model.kept == {}
    assert model.last is None


class Counts(nn.Module):
    """A model whose steps do more where it says so, by their number; none leaves anything behind."""

    def __init__(self, times: Callable[[int], int]) -> None:
        super().__init__()
        self.body, self.steps, self.times = layers(), 0, times

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        for _ in range(self.times(self.steps)):
            x = x.exp().sin()
        y: Tensor = self.body(x.requires_grad_())
        return y


@pytest.mark.parametrize("does", [lambda step: step % 2 == 0, lambda step: step % 3 == 0, lambda step: step > 2])
def test_the_step_that_needs_the_most_counts(does: Callable[[int], bool]) -> None:
    """Though it is not the first, and leaves nothing; in a plan, under each policy."""

    def make(always: bool) -> nn.Module:
        first = nn.Sequential(nn.Linear(C, C), Counts(lambda step: 3 * (always or does(step))))
        return nn.Sequential(first, *layers())

    some, all_ = make(False), make(True)
    assert profile(some, X, device="cpu").peak == profile(all_, X, device="cpu").peak
    budgets = "1GiB", str(int(0.9 * profile(all_, X, device="cpu").peak))
    for budget in budgets:
        assert ckptfused.plan(some, X, budget, device="cpu").peak == ckptfused.plan(all_, X, budget, device="cpu").peak


def test_steps_that_need_more_and_more_are_refused() -> None:
    model = nn.Sequential(nn.Linear(C, C), Counts(lambda step: step))
    assert "steps need more the later they are" in str(profile(model, X, device="cpu").notes)
    with pytest.raises(ValueError, match="no plan keeps a budget where steps need more the later they are"):
        ckptfused.plan(nn.Sequential(model, *layers()), X, budget="1GiB", device="cpu")


def test_the_note_of_a_model_that_counts() -> None:
    model = Counts(lambda step: 0)
    found = profile(model, X, device="cpu")
    assert found.notes == (COUNTS,) and model.steps == 0
    assert ckptfused.plan(nn.Sequential(model, *layers()), X, budget="1GiB", device="cpu").notes[0] == f"0.{COUNTS}"


class Seeded(nn.Module):
    """A model whose numbers say nothing of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.seed, self.turn, self.longest = layers(), 0, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.seed, self.turn, self.longest = time.time_ns(), 1 - self.turn, max(self.longest, x.size(1))
        return self.body(x)  # type: ignore[no-any-return]


def test_numbers_that_count_no_steps() -> None:
    assert profile(Seeded(), X, device="cpu").notes == ()
