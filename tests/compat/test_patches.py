"""What is replaced is replaced for whom it is meant, and put back whatever the order in which threads come and go."""

from __future__ import annotations

import ast
import queue
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ckptfused
from ckptfused.compat import kernels
from ckptfused.compat.patches import here, patched_attribute
from ckptfused.simulate.autocast_kernels import autocast_on_meta

WIDTH = 16

PACKAGE = Path(ckptfused.__file__).parent


def in_thread(function: Callable[[], Any]) -> Any:
    """What a function returns or raises in another thread."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert found, "the thread does not end"
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def place() -> Any:
    return types.SimpleNamespace(name=lambda: "original")


def around(word: str) -> Callable[[Any], Any]:
    return lambda plain: lambda: f"{word} {plain()}"


@pytest.mark.parametrize("first_goes_first", [True, False])
def test_contexts_end_in_any_order(first_goes_first: bool) -> None:
    """Contexts of threads that overlap end so."""
    owner = place()
    original = owner.name
    first, second = (
        patched_attribute(owner, "name", around("first")),
        patched_attribute(owner, "name", around("second")),
    )
    first.__enter__()
    second.__enter__()
    assert owner.name() == "second first original"
    for context, left in ((first, "second"), (second, "")) if first_goes_first else ((second, "first"), (first, "")):
        context.__exit__(None, None, None)
        assert owner.name() == f"{left} original".strip()
    assert owner.name is original


def test_what_is_inherited_is_inherited_again() -> None:
    class Own(nn.Linear):
        pass

    with patched_attribute(Own, "forward", lambda plain: lambda self, x: plain(self, x) + 1):
        layer = Own(2, 2)
        assert torch.equal(layer(torch.zeros(2)), layer.bias + 1)
    assert "forward" not in vars(Own) and torch.equal(layer(torch.zeros(2)), layer.bias)


def test_what_others_put_there_meanwhile_stays() -> None:
    owner = place()
    theirs = lambda: "theirs"  # noqa: E731
    with patched_attribute(owner, "name", around("ours")):
        owner.name = theirs
    assert owner.name is theirs


def test_a_stand_in_for_one_thread() -> None:
    owner = place()
    with patched_attribute(owner, "name", here(around("ours"))):
        assert owner.name() == "ours original" and in_thread(owner.name) == "original"


def test_kernels_are_those_of_one_thread() -> None:
    q = torch.randn(1, 2, 3, 4)
    want = F.scaled_dot_product_attention(q, q, q)
    zero = {"aten::scaled_dot_product_attention": lambda below, q, *args, **kwargs: torch.zeros_like(q)}
    with kernels.replaced_kernels(zero):
        assert not F.scaled_dot_product_attention(q, q, q).any()
        assert torch.equal(in_thread(lambda: F.scaled_dot_product_attention(q, q, q)), want)
        with kernels.without_replaced():
            assert torch.equal(F.scaled_dot_product_attention(q, q, q), want)
        with kernels.replaced_kernels({}):
            assert torch.equal(F.scaled_dot_product_attention(q, q, q), want)
    assert torch.equal(F.scaled_dot_product_attention(q, q, q), want)


class Attends(nn.Module):
    """A layer, within whose forward something else happens."""

    def __init__(self, within: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.inner, self.within = nn.Linear(WIDTH, WIDTH), within

    def forward(self, x: Tensor) -> Tensor:
        q = self.inner(x)[:, None]
        self.within()
        return x + F.scaled_dot_product_attention(q, q, q)[:, 0]


def real_attention() -> tuple[Tensor, Tensor]:
    """Attention of real tensors and its gradient."""
    torch.manual_seed(0)
    q = torch.randn(1, 1, 8, 8, requires_grad=True)
    y = F.scaled_dot_product_attention(q, q, q)
    return y.detach(), torch.autograd.grad(y.square().sum(), q)[0]


def looked_at(model: nn.Module) -> str:
    return str(ckptfused.convert(model))


def predicted(model: nn.Module) -> str:
    return str(ckptfused.profile(model, torch.randn(2, 8, WIDTH), device="cpu"))


@pytest.mark.parametrize("way", [looked_at, predicted])
def test_another_thread_trains_while_a_layer_is_counted(way: Callable[[nn.Module], str]) -> None:
    """Its attention, too, is that of real tensors; so is what this thread computes of them meanwhile."""
    own = F.scaled_dot_product_attention
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()  # what is in a list is taken out again
    want = real_attention()

    def meanwhile() -> None:
        found.put((*in_thread(real_attention), F.scaled_dot_product_attention is own))

    model = nn.Sequential(Attends(meanwhile), Attends(meanwhile))
    assert "→ not counted" not in way(model) and found.qsize() >= 1
    while not found.empty():
        y, grad, same = found.get()
        assert same and torch.equal(y, want[0]) and torch.equal(grad, want[1])
    assert F.scaled_dot_product_attention is own


WATCHED = [(torch, "is_autocast_enabled"), (torch, "get_rng_state"), (torch.autocast, "__init__")]
WATCHED += [(torch, "clear_autocast_cache"), (nn.Module, "__call__"), (F, "scaled_dot_product_attention")]


def test_predictions_that_overlap() -> None:
    """The first ends within the second. Both say what one alone says, and nothing stays replaced."""
    before = [getattr(*where) for where in WATCHED]
    alone = predicted(nn.Sequential(Attends(), Attends()))
    inside, ended = threading.Event(), threading.Event()
    found: list[str] = []

    def first_within() -> None:
        inside.set()
        second_begun.wait(60)

    second_begun = threading.Event()

    def second_within() -> None:
        second_begun.set()
        ended.wait(60)

    def first() -> None:
        found.append(predicted(nn.Sequential(Attends(first_within), Attends())))
        ended.set()

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait(60)
    found.append(predicted(nn.Sequential(Attends(second_within), Attends())))
    thread.join(60)
    assert found == [alone, alone]
    assert all(getattr(*where) is value for where, value in zip(WATCHED, before, strict=True))


class Casts(TorchDispatchMode):
    """Counts the casts of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default and args[0].shape == (8, 8)
        return func(*args, **(kwargs or {}))


def test_casts_of_weights_are_those_of_one_prediction() -> None:
    """A region of autocast that ends in another thread leaves this one's casts."""
    weight = torch.empty(8, 8, device="meta", requires_grad=True)

    def casts(between: Callable[[], Any]) -> int:
        with autocast_on_meta("cpu"), torch.autocast("meta", torch.bfloat16), Casts() as found:
            F.linear(torch.empty(2, 8, device="meta"), weight)
            between()
            F.linear(torch.empty(2, 8, device="meta"), weight)
        return found.count

    assert casts(lambda: in_thread(lambda: casts(lambda: None))) == 1


def test_every_patch_is_under_the_lock() -> None:
    """Nothing else of the package replaces an attribute for a while, or gives an operation of PyTorch's a kernel."""
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name == "compat":
            continue
        text = path.read_text()
        assert "mock" not in {getattr(node, "module", "") for node in ast.walk(ast.parse(text))}, path
        assert "import mock" not in text and "monkeypatch" not in text and 'Library("_"' not in text, path
        assert 'Library("aten"' not in text and "_IncludeDispatchKeyGuard" not in text, path
