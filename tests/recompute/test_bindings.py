"""What a function finds by name, or in an object that it holds, is in the replay what its forward found there."""

from __future__ import annotations

import dataclasses
import functools
import queue
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptfused.checkpoint import checkpoint
from tests.recompute.test_replay_state import plain, same

Function = Callable[..., Tensor]
LAYER: Any = None
COUNT = 0


class Scaled:
    factor = 2.0

    def __init__(self) -> None:
        self.scale, self.powers, self.table = 2.0, [1.0], torch.ones(4)

    def __call__(self, x: Tensor) -> Tensor:
        return (x * self.scale * self.factor * sum(self.powers) * self.table).sin().exp()

    method = __call__


@dataclasses.dataclass(slots=True)
class InSlots:
    scale: float = 2.0

    def method(self, x: Tensor) -> Tensor:
        return (x * self.scale).sin().exp()


def _rebound_cell() -> tuple[Function, Callable[[], None]]:
    scale: Any = 2.0

    def change() -> None:
        nonlocal scale
        scale = "of another type"

    return lambda x: (x * scale).sin().exp(), change


def _emptied_cell() -> tuple[Function, Callable[[], None]]:
    scale = 2.0

    def change() -> None:
        nonlocal scale
        del scale

    return lambda x: (x * scale).sin().exp(), change


def _counting_cell() -> tuple[Function, Callable[[], None]]:
    count = 0

    def function(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return (x * count).sin().exp()

    return function, lambda: None


def _counting_global(x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return (x * COUNT).sin().exp()


def _nested() -> tuple[Function, Callable[[], None]]:
    inner, change = _rebound_cell()
    return lambda x: functools.partial(lambda f, x: f(x), inner)(x) * 2, change


def _list() -> tuple[Function, Callable[[], None]]:
    """Each layer sees the results of all before it, as DenseNet's do."""
    seen = [torch.ones(2, 4).requires_grad_() * 2]
    return lambda x: sum([*seen, x]).sin().exp(), lambda: seen.append(torch.ones(2, 4))  # type: ignore[union-attr]


def _deep_list() -> tuple[Function, Callable[[], None]]:
    seen = {"scales": [2.0]}
    return lambda x: (x * sum(seen["scales"])).sin().exp(), lambda: seen["scales"].append(2.0)


def _tensor() -> tuple[Function, Callable[[], None]]:
    scale = torch.full((4,), 2.0)

    def change() -> None:
        nonlocal scale
        scale = torch.zeros(3)

    return lambda x: (x * scale).sin().exp(), change


def _default() -> tuple[Function, Callable[[], None]]:
    def function(x: Tensor, scale: float = 2.0, *, power: float = 2.0) -> Tensor:
        return (x * scale).sin().pow(power)

    def change() -> None:
        function.__defaults__ = (3.0,)
        function.__kwdefaults__["power"] = 3.0

    return function, change


def _partial() -> tuple[Function, Callable[[], None]]:
    function = functools.partial(lambda x, scale: (x * scale).sin().exp(), scale=2.0)
    return function, lambda: function.keywords.update(scale=3.0)


def _function_attribute() -> tuple[Function, Callable[[], None]]:
    def function(x: Tensor) -> Tensor:
        return (x * held.scale).sin().exp()

    held: Any = function
    held.scale = 2.0
    return function, lambda: setattr(held, "scale", 3.0)


def _object(how: str) -> tuple[Function, Callable[[], None]]:
    scaled = Scaled()

    def change() -> None:
        scaled.scale, scaled.table, Scaled.factor = 3.0, torch.zeros(4), 3.0
        scaled.powers.append(2.0)

    functions: dict[str, Function] = {
        "method": scaled.method,
        "call": scaled,
        "cell": lambda x: scaled.method(x),
        "default": lambda x, scaled=scaled: scaled(x),
        "wrapped": functools.wraps(scaled.method)(lambda x: scaled(x)),
    }
    return functions[how], change


def _namespace() -> tuple[Function, Callable[[], None]]:
    options = types.SimpleNamespace(scale=2.0)
    return lambda x: (x * options.scale).sin().exp(), lambda: setattr(options, "scale", 3.0)


def _slots() -> tuple[Function, Callable[[], None]]:
    held = InSlots()
    return held.method, lambda: setattr(held, "scale", 3.0)


def _global() -> tuple[Function, Callable[[], None]]:
    globals()["LAYER"] = nn.Linear(4, 4)
    return lambda x: LAYER(x).sin().exp(), lambda: globals().__setitem__("LAYER", nn.Tanh())


def _module_list() -> tuple[Function, Callable[[], None]]:
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    return lambda x: layers[1](x).sin().exp(), lambda: layers.__setitem__(1, nn.Tanh())


def _long_module_list() -> tuple[Function, Callable[[], None]]:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(150))
    return lambda x: layers[1](x).sin().exp(), lambda: layers.__setitem__(1, nn.Tanh())


HELD: dict[str, Callable[[], tuple[Function, Callable[[], None]]]] = {
    "cell": _rebound_cell,
    "cell-emptied": _emptied_cell,
    "cell-counting": _counting_cell,
    "nested": _nested,
    "list": _list,
    "deep-list": _deep_list,
    "tensor": _tensor,
    "default": _default,
    "partial": _partial,
    "function-attribute": _function_attribute,
    **{f"object-{how}": functools.partial(_object, how) for how in ("method", "call", "cell", "default", "wrapped")},
    "namespace": _namespace,
    "slots": _slots,
    "global": _global,
    "global-counting": lambda: (_counting_global, lambda: None),
    "module-list": _module_list,
    "long-module-list": _long_module_list,
}


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    globals().update(LAYER=None, COUNT=0)
    Scaled.factor = 2.0


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("name", HELD)
def test_the_replay_has_what_the_forward_found(name: str, backwards: int) -> None:
    """Gradients are those without a checkpoint, and afterwards all is as the change between the two left it."""
    found = []
    for call in (plain, checkpoint):
        torch.manual_seed(1)
        globals()["COUNT"] = 0
        Scaled.factor = 2.0
        function, change = HELD[name]()
        x = torch.arange(8.0).reshape(2, 4).div(8).requires_grad_()
        y = call(function, x)
        change()
        for i in range(backwards):
            y.sum().backward(retain_graph=i + 1 < backwards)
        found.append([x.grad, COUNT, Scaled.factor])
    assert same(*found)


@pytest.mark.parametrize("name", ["cell-counting", "global-counting", "list", "object-method", "slots", "default"])
def test_a_second_call_finds_the_change(name: str) -> None:
    found = []
    for call in (plain, checkpoint):
        globals()["COUNT"] = 0
        Scaled.factor = 2.0
        function, change = HELD[name]()
        x = torch.arange(8.0).reshape(2, 4).div(8).requires_grad_()
        first = call(function, x)
        change()
        second = call(function, x)
        (first + second).sum().backward()
        found.append([x.grad, call(function, x).detach()])
    assert same(*found)


@pytest.mark.parametrize("how", ["cell", "global"])
def test_layers_in_a_loop(how: str) -> None:
    found = []
    for call in (plain, checkpoint):
        torch.manual_seed(1)
        layers, x = [nn.Linear(4, 4) for _ in range(3)], torch.randn(2, 4).requires_grad_()
        h = x
        for layer in layers:
            globals()["LAYER"] = layer
            h = call(lambda z: (layer if how == "cell" else LAYER)(z).sin(), h)  # noqa: B023
        h.sum().backward()
        found.append([x.grad, *(layer.weight.grad for layer in layers)])
    assert same(*found)


class _Private:
    __slots__ = ("__layer",)

    def set(self, layer: nn.Module) -> None:
        self.__layer = layer

    def __call__(self, z: Tensor) -> Tensor:
        return self.__layer(z).sin()  # type: ignore[no-any-return]


class _Settings:
    scale = 1.0
    layer: nn.Module


@pytest.mark.parametrize("how", ["wraps", "private slot", "class", "class in a cell"])
def test_layers_in_a_loop_behind(how: str) -> None:
    """A function that wraps one of PyTorch's, a private slot, attributes of a class that the code names or holds."""
    found = []
    for call in (plain, checkpoint):
        torch.manual_seed(1)
        layers, x = [nn.Linear(4, 4) for _ in range(3)], torch.randn(2, 4).requires_grad_()
        h, held, cell = x, _Private(), _Settings

        for i, layer in enumerate(layers):
            held.set(layer)
            _Settings.scale, _Settings.layer = float(i + 1), layer
            functions: dict[str, Any] = {
                "wraps": functools.wraps(nn.Linear.forward)(lambda z: layer(z).sin()),  # noqa: B023
                "private slot": held,
                "class": lambda z: (_Settings.layer(z) * _Settings.scale).sin(),
                "class in a cell": lambda z: (cell.layer(z) * cell.scale).sin(),  # noqa: B023
            }
            h = call(functions[how], h)
        h.sum().backward()
        found.append([x.grad, *(layer.weight.grad for layer in layers)])
    assert same(*found)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's own question
def test_compiled_layers_in_a_loop() -> None:
    found = []
    for call in (plain, checkpoint):
        torch.manual_seed(1)
        layers, x = [nn.Linear(4, 4) for _ in range(2)], torch.randn(2, 4).requires_grad_()
        h = x
        for layer in layers:
            h = call(torch.compile(lambda z: layer(z).sin(), backend="aot_eager"), h)  # noqa: B023
        h.sum().backward()
        found.append([x.grad, *(layer.weight.grad for layer in layers)])
    torch._dynamo.reset()
    assert same(*found)


def test_a_tensor_that_a_name_stood_for_is_guarded() -> None:
    scale = torch.full((4,), 2.0)
    y = checkpoint(lambda x: (x * scale).exp(), torch.ones(4).requires_grad_())
    old, scale = scale, torch.zeros(4)
    old.add_(1)
    with pytest.raises(RuntimeError, match="a tensor of shape .* was changed in place"):
        y.sum().backward()


def test_what_threads_share_is_left_alone() -> None:
    """A queue has what others put into it while a replay lasts."""
    waiting: queue.Queue[int] = queue.Queue()

    def function(x: Tensor) -> Tensor:
        waiting.put(1)
        return x.sin().exp()

    checkpoint(function, torch.ones(2).requires_grad_()).sum().backward()
    assert waiting.qsize() == 2
