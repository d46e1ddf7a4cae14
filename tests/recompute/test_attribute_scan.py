"""What modules and arguments hold beside tensors is updated once, wherever a forward keeps it."""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ckptfused.checkpoint import checkpoint
from ckptfused.state.reach import below
from tests import forks
from tests.recompute.test_replay_state import plain, same


class Bag(dict):  # type: ignore[type-arg]
    """A dict that shows its values otherwise than it holds them."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) * 2

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)


class Base(nn.Module):
    total = 0
    log: ClassVar[list[int]] = []


class Counts(Base):
    """Counts its calls in one of many places; `next` is how many there were."""

    def __init__(self, next: Callable[[Any], float], **held: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.next = next
        vars(self).update(held)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight * self.next(self)).tanh().exp()


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: float) -> float:
        self.calls += 1
        return x * self.calls


def _class_counter(m: Any) -> float:
    type(m).total += 1
    return float(m.total)


def _base_log(m: Any) -> float:
    m.log.append(len(m.log))
    return float(len(m.log))


def _new_class_attribute(m: Any) -> float:
    Base.fresh = getattr(Base, "fresh", 0) + 1  # type: ignore[attr-defined]
    return float(Base.fresh)  # type: ignore[attr-defined]


def _nested(m: Any) -> float:
    m.state["deep"]["list"].append(1)
    m.state["deep"]["n"] += 1
    m.state["new"] = {"n": m.state["deep"]["n"]}
    return float(m.state["deep"]["n"] + len(m.state["deep"]["list"]))


def _tensor_in_a_list(m: Any) -> float:
    m.state[0]["t"].add_(1)
    return float(m.state[0]["t"])


def _empty(m: Any) -> float:
    m.state.setdefault("n", []).append(1)
    return float(len(m.state["n"]))


def _counted(m: Any) -> float:
    m.state["n"] += 1
    return float(m.state["n"])


def _queue(m: Any) -> float:
    m.state[0].append(m.state[0].popleft() + 1)
    m.state[1].add(m.state[0][-1])
    return float(m.state[0][-1] + len(m.state[1]))


def _ordered(m: Any) -> float:
    m.state.move_to_end(next(iter(m.state)))
    return float(next(iter(m.state)))


HELD: dict[str, Callable[[], Counts]] = {
    "nested": lambda: Counts(_nested, state={"deep": {"list": [], "n": 0}}),
    "tensor-in-a-list": lambda: Counts(_tensor_in_a_list, state=[{"t": torch.zeros(())}]),
    "empty": lambda: Counts(_empty, state={}),
    "counter": lambda: Counts(_counted, state=Counter(n=1)),
    "default-dict": lambda: Counts(_counted, state=defaultdict(int)),
    "dict-subclass": lambda: Counts(_counted, state=Bag(n=1)),
    "ordered": lambda: Counts(_ordered, state=OrderedDict({1: 0, 2: 0, 3: 0})),
    "queue-and-set": lambda: Counts(_queue, state=(deque([1, 2]), {7})),
    "module-in-a-list": lambda: Counts(lambda m: m.state[0](1.0), state=[Child()]),
    "class": lambda: Counts(_class_counter),
    "list-of-a-class-above": lambda: Counts(_base_log),
    "new-in-a-class": lambda: Counts(_new_class_attribute),
}


def held(value: Any) -> Any:
    """Plain data of what a place holds."""
    if isinstance(value, nn.Module):
        return held({name: v for name, v in vars(value).items() if not name.startswith("_")})
    if isinstance(value, dict):
        return [(key, held(v)) for key, v in dict.items(value)]
    if isinstance(value, (list, tuple, deque)):
        return [held(v) for v in value]
    return value if isinstance(value, (int, float, Tensor, set)) else None


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("name", HELD)
def test_it_is_updated_once(name: str, backwards: int) -> None:
    """Gradients and state of three steps are those without a checkpoint, two calls in flight and two backwards, too."""
    found = []
    for call in (plain, checkpoint):
        torch.manual_seed(1)
        Counts.total, Base.log[:] = 0, []
        vars(Base).get("fresh") is None or delattr(Base, "fresh")
        segment = nn.Sequential(HELD[name](), nn.Tanh())
        x = torch.randn(6, 4).requires_grad_()
        for _ in range(3):
            loss = call(segment, x).sin().sum() + call(segment, 2 * x).sin().sum()
            for i in range(backwards):
                loss.backward(retain_graph=i + 1 < backwards)
        ours = [*held(segment), Counts.total, len(Base.log), getattr(Base, "fresh", 0)]
        found.append([x.grad, *(p.grad for p in segment.parameters()), *ours])
    assert same(found[0], found[1])


def test_a_subclass_of_dict_among_the_arguments() -> None:
    found = []
    for call in (plain, checkpoint):
        x, cache = torch.arange(4.0).requires_grad_(), Bag(n=1.0)

        def function(x: Tensor, cache: Bag) -> Tensor:
            cache["n"] = cache["n"] + 1
            return (x * cache["n"]).exp()

        call(function, x, cache).sum().backward()
        found.append([x.grad, *dict.values(cache)])
    assert same(*found)


class RngStates(nn.Module):
    def __init__(self, how: Callable[[Any], Any], **held: Any) -> None:
        super().__init__()
        self.how = how
        vars(self).update(held)

    def forward(self, x: Tensor) -> Tensor:
        return (x * float(self.how(self))).exp()


class Named(nn.Module):
    """Its own code names NumPy's generator, that of a function which it calls Python's."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * float(np.random.rand() + _helper())).exp()


def _helper() -> float:
    return random.random()


draw = random.random

DRAWS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "numpy-attribute": lambda: RngStates(lambda m: m.rng.random(), rng=np.random.default_rng(1)),
    "numpy-in-a-dict": lambda: RngStates(lambda m: m.state["rng"].random(), state={"rng": np.random.default_rng(1)}),
    "numpy-legacy": lambda: RngStates(lambda m: m.rng.normal(), rng=np.random.RandomState(1)),
    "python-attribute": lambda: RngStates(lambda m: m.rng.gauss(0, 1), rng=random.Random(1)),
    "numpy-closure": lambda: (lambda rng: lambda x: (x * rng.random()).exp())(np.random.default_rng(1)),
    "numpy-global": lambda: lambda x: (x * np.random.normal()).exp(),
    "python-global": lambda: lambda x: (x * random.gauss(0, 1)).exp(),
    "python-function": lambda: lambda x: (x * draw()).exp(),
    "named-by-a-class": Named,
}


@pytest.mark.parametrize("name", DRAWS)
def test_generators_draw_the_same_again(name: str) -> None:
    found = []
    for call in (plain, checkpoint):
        random.seed(1)
        np.random.seed(1)
        function, x = DRAWS[name](), torch.arange(4.0).div(4).requires_grad_()
        first, second = call(function, x), call(function, x)
        between = [random.random(), np.random.normal()]
        (first + second).sin().sum().backward()
        after = [float(function(torch.ones(1))), random.gauss(0, 1), np.random.normal()]
        found.append([x.grad, *between, *after])
    assert same(*found)


def test_global_generators_are_left_alone_without_preserve_rng_state() -> None:
    x = torch.ones(2, requires_grad=True)
    random.seed(1)
    checkpoint(lambda x: (x * random.random()).exp(), x, preserve_rng_state=False).sum().backward()
    drawn = random.random()
    random.seed(1)
    assert drawn == [random.random() for _ in range(3)][-1]


def test_a_module_that_gets_and_loses_children() -> None:
    """Submodules are looked for again where others are there."""
    found = []
    for call in (plain, checkpoint):
        torch.manual_seed(1)
        segment, x = nn.Sequential(nn.Linear(4, 4), nn.ModuleList()), torch.randn(2, 4).requires_grad_()
        segment[1].forward = lambda x, s=segment: s[1][-1](x) if len(s[1]) else x
        for change in (lambda s: None, lambda s: s[1].append(nn.BatchNorm1d(4)), lambda s: s[1].append(Child())):
            change(segment)
            call(segment, x).sin().sum().backward()
        found.append([x.grad, segment[1][0].num_batches_tracked, segment[1][1].calls])
    assert same(*found)


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True) for _ in range(count))

    def one(self, x: Tensor, i: int) -> Tensor:
        y: Tensor = self.layers[i](x)
        return y


def _python_calls(count: int) -> int:
    """How many functions, also C functions, one checkpointed step of one of so many layers calls."""
    model, x = Layers(count), torch.randn(1, 3, 8).requires_grad_()
    seen = [0]

    def profile(frame: Any, event: str, argument: Any) -> None:
        seen[-1] += event in ("call", "c_call")

    for _ in range(4):  # the first fills caches; a collection of other tests' garbage may call what it likes
        seen.append(0)
        sys.setprofile(profile)
        try:
            y = checkpoint(model.one, x, 0)
        finally:
            sys.setprofile(None)
        y.sum().backward()
    return min(seen[2:])


def test_what_a_method_of_a_whole_model_costs() -> None:
    """Each of more than 128 modules costs the same, 15 calls of C functions at most, however many there are; one of an
    encoder layer's ten modules with two parameters costs 14.5."""
    few, some, many = map(_python_calls, (14, 20, 40))
    assert (many - some) / 200 <= 15
    assert many - some <= 1.05 * 20 / 6 * (some - few)


class Late(nn.Module):
    """A rate that is None until a first call, and a counter."""

    def __init__(self, rate: float | None = None) -> None:
        super().__init__()
        self.rate, self.on = rate, np.bool_(True)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.rate is None:
            self.rate = 0.5
        return nn.functional.dropout(x, self.rate) * self.calls * (1.0 if self.on else 3.0)


@pytest.mark.parametrize("count", [4, 200])
@pytest.mark.parametrize("what", ["rate", "numpy", "mode", "flag", "late"])
def test_the_first_of_many_modules_has_attributes_of_another_type(what: str, count: int) -> None:
    """A rate that is a whole number or None in the first instance of a class, and a fraction in the next; all may be
    NumPy's, as those of `np.linspace` are."""
    number: Any = np.float64 if what == "numpy" else lambda rate: rate
    found = []
    for call in (plain, checkpoint):
        torch.manual_seed(1)
        head = [nn.Dropout(number(0 if what == "rate" else 0.1)), nn.Dropout(number(0.5)), Late(), Late(0.25)]
        segment = nn.Sequential(*head, nn.Linear(4, 4), nn.Tanh())
        segment.others = nn.ModuleList(nn.Tanh() for _ in range(count))
        segment.forward = lambda x, steps=segment[:6]: steps(x)  # type: ignore[method-assign]
        x = torch.randn(16, 4).requires_grad_()
        for _ in range(2):
            y = call(segment, x)
            if what == "mode":
                segment.eval()
            elif what == "flag":
                head[2].on = ~head[2].on
            elif what in ("rate", "numpy"):
                head[0].p, head[1].p = number(1 if what == "rate" else 0.25), number(0.9)
            else:
                head[2].rate, head[3].rate = 0.75, None
            y.sum().backward()
        found.append([x.grad, *(value for m in head for value in vars(m).values() if isinstance(value, (int, float)))])
    assert same(*found)


def test_submodules_are_those_of_now() -> None:
    root = nn.Sequential(nn.Linear(4, 4), nn.Sequential())
    for change in (lambda: None, lambda: root[1].append(nn.Tanh()), lambda: root[1].__setitem__(0, nn.ReLU())):
        change()
        assert below(root) == below(root) == list(root.modules())


def test_before_anybody_imported_fsdp() -> None:
    """A checkpoint looks for modules of FSDP's, which may not be there."""
    done = forks.python("""
        import sys, torch, ckptfused
        for name in [name for name in sys.modules if name.startswith("torch.distributed.fsdp")]:
            del sys.modules[name]
        x = torch.ones(2, 4, requires_grad=True)
        ckptfused.checkpoint(torch.nn.Linear(4, 4), x).sum().backward()
        assert x.grad is not None
    """)
    assert done.returncode == 0, done.stderr
