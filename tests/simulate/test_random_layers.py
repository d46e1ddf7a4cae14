"""Stacks of random layers on the CPU: no step needs more than was predicted for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ckptfused import checkpoint, profile
from ckptfused.profiler import Profile

pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")]
C = 16


class Columns(nn.Module):
    """A layer for [B, C, T], of [B, T, C]."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.mT)
        return y.mT


class Attention(nn.Module):
    """By a mask of booleans where one is given."""

    def __init__(self, heads: int, causal: bool, p: float = 0.0, masked: bool = False) -> None:
        super().__init__()
        self.qkv, self.heads, self.causal, self.p, self.masked = nn.Linear(C, 3 * C), heads, causal, p, masked

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = x.new_ones(x.size(1), x.size(1), dtype=torch.bool) if self.masked else None
        y = F.scaled_dot_product_attention(q, k, v, mask, self.p, is_causal=self.causal and mask is None)
        return y.transpose(1, 2).flatten(2)


class Sums(nn.Module):
    """Einstein sums, whose operands are views of weights."""

    def __init__(self, out: int = C) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(size) / 4) for size in ((C, C), (C,), (out, C)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("btc,dc->btd", torch.einsum("btc,cd,d->btd", x, self.a, self.b), self.c)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x).sigmoid() * self.b(x)
        return y


class Wide(nn.Module):
    """Twice as wide by a function, and back."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.inner = function, nn.Linear(2 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(self.function(x))
        return y


class Plain(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Within(nn.Module):
    """A layer under PyTorch's checkpoint, whose function may hold its input beside what it is given."""

    def __init__(self, reentrant: bool, by_keyword: bool = False) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(C, C), nn.GELU())
        self.reentrant, self.by_keyword = reentrant, by_keyword

    def forward(self, x: Tensor) -> Tensor:
        if self.by_keyword:
            y: Tensor = torch_checkpoint(lambda *, z: self.inner(z), z=x, use_reentrant=False)
        elif self.reentrant:
            y = torch_checkpoint(self.inner, x, use_reentrant=True)
        else:
            y = torch_checkpoint(lambda d: self.inner(x) + d, x.new_zeros(1), use_reentrant=False)
        return y


class Products(nn.Module):
    """Three gradients of one value, of which two are made at once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y.addcmul(y, y, value=0.5)


FUNCTIONS = (nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Softplus, nn.Mish, nn.Hardswish, nn.ELU, nn.LeakyReLU)
LAYERS: dict[str, Callable[[random.Random], nn.Module]] = {
    "linear": lambda r: nn.Linear(C, C, bias=r.random() < 0.5),
    "ffn": lambda r: nn.Sequential(nn.Linear(C, 24), r.choice(FUNCTIONS)(), nn.Linear(24, C)),
    "layer norm": lambda r: nn.LayerNorm(C, elementwise_affine=r.random() < 0.7),
    "rms norm": lambda r: nn.RMSNorm(C),
    "batch norm": lambda r: Columns(nn.BatchNorm1d(C, affine=r.random() < 0.7, track_running_stats=r.random() < 0.7)),
    "group norm": lambda r: Columns(nn.GroupNorm(4, C, affine=r.random() < 0.7)),
    "instance norm": lambda r: Columns(nn.InstanceNorm1d(C, affine=r.random() < 0.5)),
    "convolution": lambda r: Columns(nn.Conv1d(C, C, 3, padding=1, groups=r.choice((1, 4)))),
    "prelu": lambda r: Columns(nn.PReLU(r.choice((1, C)))),
    "attention": lambda r: Attention(r.choice((1, 2, 4)), r.random() < 0.5),
    "attention, masked": lambda r: Attention(2, False, r.choice((0.0, 0.1)), masked=True),
    "attention, masked, dropped": lambda r: Attention(2, False, 0.1, masked=True),
    "einsum": lambda r: Sums(),
    "gate": lambda r: Gate(),
    "dropout": lambda r: nn.Dropout(0.3),
    "cat": lambda r: Wide(lambda x: torch.cat([x, x.tanh()], -1)),
    "numbers": lambda r: Wide(lambda x: torch.stack([x, x * 2 / 3], -2).flatten(-2)),
    "quotients": lambda r: Plain(lambda x: x + torch.div(x, 2, rounding_mode="floor")),
    "sums": lambda r: Plain(lambda x: x.cumsum(1).softmax(-1)),
    "held by keyword": lambda r: Within(False, by_keyword=True),
    "held by closure": lambda r: Within(False),
    "reentrant": lambda r: Within(True),
    "products": lambda r: Products(),
    "selected": lambda r: Plain(lambda x: x / (2 + x.max() - x.median()) + x.sort(-1)[0]),
    "roots": lambda r: Plain(lambda x: x.cos() * x.float().pow(2).mean(-1, keepdim=True).rsqrt().to(x.dtype)),
}
OPTIMIZERS: tuple[Any, ...] = (
    None,
    torch.optim.AdamW,
    lambda trained: torch.optim.AdamW(trained, foreach=True),
    lambda trained: torch.optim.SGD(trained, 0.1, momentum=0.9, foreach=True),
)
HOW = ("float32", "bfloat16", "autocast")


class Layer(nn.Module):
    """One of `LAYERS`, in training or evaluation, perhaps frozen, checkpointed, beside a residual."""

    def __init__(self, r: random.Random, name: str = "") -> None:
        super().__init__()
        self.inner = LAYERS[name or r.choice(list(LAYERS))](r)
        self.residual, self.checkpointed = r.random() < 0.5, r.random() < 0.25
        self.train(r.random() < 0.85).requires_grad_(r.random() < 0.9)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.apart, x) if self.checkpointed else self.apart(x)

    def apart(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return x + y if self.residual else y


def profiles(model: nn.Module, x: Tensor, how: str, make: Any = None) -> tuple[Profile, Profile]:
    """Predicted and measured."""
    if how == "bfloat16":
        model, x = model.bfloat16(), x.bfloat16()
    optimizer = None if make is None else make([p for p in model.parameters() if p.requires_grad])
    autocast = "bfloat16" if how == "autocast" else None
    return profile(model, x, optimizer, "cpu", autocast), profile(model, x, optimizer, None, autocast)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("seed", range(12))
def test_no_step_needs_more_than_was_predicted(seed: int, how: str) -> None:
    """What is predicted in excess are biases added to columns, and what a norm holds before it has its result."""
    r = random.Random(seed)
    model = nn.Sequential(nn.Linear(C, C), *(Layer(r) for _ in range(r.randint(2, 6))))
    x = torch.randn(r.choice((1, 2, 3)), r.choice((4, 7, 16)), C)
    predicted, measured = profiles(model, x, how, r.choice(OPTIMIZERS))
    assert measured.peak <= predicted.peak <= measured.peak + 0.05 * measured.above_state


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_predicted_to_the_byte(name: str, how: str) -> None:
    """The last of a step, whose gradient is an expanded number, and one that a replay is made of."""
    for checkpointed in (False, True):
        layer = Layer(random.Random(1), name)
        layer.residual, layer.checkpointed = False, checkpointed
        predicted, measured = profiles(nn.Sequential(nn.Linear(C, C), layer.train()), torch.randn(2, 16, C), how)
        assert (predicted.peak, predicted.saved) == (measured.peak, measured.saved)


def test_a_sum_of_gradients_is_taken_over_once() -> None:
    """The first sum of three gradients of one value ends after it has become the second."""
    beside = Layer(random.Random(1), "products")
    beside.residual, beside.checkpointed = True, False
    model = nn.Sequential(nn.Linear(C, C), beside, Within(True), nn.Linear(C, C))
    predicted, measured = profiles(model, torch.randn(2, 7, C), "float32")
    assert (predicted.peak, predicted.saved) == (measured.peak, measured.saved)


class Held(nn.Module):
    """A list of layers under two checkpoints, of which the inner one's function holds the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(C, C), nn.GELU())])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.within, x)
        return y

    def within(self, x: Tensor) -> Any:
        return torch_checkpoint(lambda *, z: self.layers[0](z), z=x, use_reentrant=False)


def test_what_a_layer_is_given_stays_a_copy_on_write() -> None:
    """Where a step is measured, too: who asks for its memory to write has it copied."""
    predicted, measured = profiles(nn.Sequential(nn.Linear(C, C), Held()), torch.randn(2, 16, C), "float32")
    assert (predicted.peak, predicted.saved) == (measured.peak, measured.saved)


def test_a_checkpoint_that_is_given_no_tensor_is_replayed_in_its_autocast() -> None:
    """By PyTorch, on a GPU; here it would take the CPU's."""
    found = [
        profile(nn.Sequential(nn.Linear(C, C), layer), torch.randn(2, 16, C), None, "h100", "bfloat16")
        for layer in (Within(False, by_keyword=True), Within(True))
    ]
    assert found[0].saved == found[1].saved


def test_a_step_whose_last_op_has_a_number_saves_it() -> None:
    """Also where it writes a view: its number is with the graph of what that is a view of."""
    for last in (lambda y: y * 0.5, lambda y: (y[:, :2].mul_(2.0), y)[1]):
        predicted, measured = profiles(nn.Sequential(nn.Linear(C, C), Plain(last)), torch.randn(2, 16, C), "float32")
        assert predicted.saved == measured.saved


def test_casts_are_made_in_the_order_of_pytorch() -> None:
    """By it autograd casts their gradients: here which is first decides the peak."""
    predicted, measured = (
        profile(Sums(24), torch.randn(1, 5, C), None, device, "bfloat16", 2) for device in ("cpu", None)
    )
    assert predicted.peak == measured.peak
