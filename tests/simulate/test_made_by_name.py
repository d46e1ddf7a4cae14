"""Tensors that a forward makes on the CPU by name, without the input's device, where that is the device: steps of
models that do, predicted and measured."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptfused import convert, plan, profile, revert
from ckptfused.simulate.values import MOST_ENTRIES

T, WIDTH = 192, 32
_tables: dict[int, Tensor] = {}
_hidden: dict[int, Tensor] = {}


def lower(n: int) -> Tensor:
    """A triangle of ones."""
    return torch.ones(n, n).tril()


@functools.lru_cache(maxsize=8)
def remembered(n: int) -> Tensor:
    """The same, made once."""
    return lower(n)


def tabled(n: int) -> Tensor:
    """The same, in a table of the module's."""
    if n not in _tables:
        _tables[n] = lower(n)
    return _tables[n]


def noted(n: int) -> Tensor:
    """The same, as an attribute of the function."""
    if not hasattr(noted, "table"):
        noted.table = lower(n)  # type: ignore[attr-defined]
    return noted.table  # type: ignore[attr-defined, no-any-return]


def hidden(n: int) -> Tensor:
    """The same, in a table that nobody finds by the names in this code."""
    table: dict[int, Tensor] = getattr(sys.modules[__name__], "_" + "hidden")
    return table.setdefault(n, lower(n))


class Attention(nn.Module):
    """One head of attention with a mask that each call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return x + self.out(self.attend(q, k, v)[:, 0])

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError


class Added(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.full((q.size(-2), q.size(-2)), -torch.inf).triu(1)
        return (q @ k.mT + mask).softmax(-1) @ v


class Filled(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.ones(q.size(-2), q.size(-2)).tril().to(q.device) == 0
        return (q @ k.mT).masked_fill(hidden, -1e4).softmax(-1) @ v


class Given(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.zeros(q.size(-2), q.size(-2)).masked_fill_(torch.ones(q.size(-2), q.size(-2)).triu(1) == 1, -1e4)
        return F.scaled_dot_product_attention(q, k, v, mask)


class Biased(Attention):
    """ALiBi, in float64 first, from positions; autograd saves the mask beside the scores."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.size(-2))
        distances = (places[:, None] - places).abs().double()
        return ((q @ k.mT) * torch.exp(-distances).to(q)).softmax(-1) @ v


class Noisy(nn.Module):
    """Keeps noise of its own, and skips itself by chance (LayerDrop): a value that is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.0:
            return x
        return x + self.down(self.up(x) * torch.randn(x.size(-2), 4 * WIDTH))


class Recurrent(nn.Module):
    """Begins with a state of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.cell = nn.Linear(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), WIDTH)
        for step in self.into(x)[:, :3].unbind(1):
            state = self.cell(step, state)
        return x + state[:, None]


class Rotated(nn.Module):
    """Positions by complex numbers, as in Llama's first code: backward copies their conjugates."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.size(1)).float(), 0.1 ** torch.linspace(0, 4, WIDTH // 2))
        turned = torch.view_as_complex(self.inner(x).unflatten(-1, (-1, 2))) * torch.polar(torch.ones(()), angles)
        return x + torch.view_as_real(turned).flatten(2)


class Looking(nn.Module):
    """Chooses by values of what it makes: lists, counts, chance."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for scale in torch.linspace(0.5, 1.0, 3).tolist():
            x = x + scale
        rows = torch.arange(x.size(1)) % 2 == 0
        if torch.empty(1).uniform_() < 2 and int(rows.sum()) == x.size(1) // 2:
            x = x.index_copy(1, rows.nonzero()[:, 0], self.inner(x[:, rows]))
        return torch.sin(x.cpu() * torch.tensor([0.5] * WIDTH))


LAYERS = {kind.__name__: kind for kind in (Added, Filled, Given, Biased, Noisy, Recurrent, Rotated, Looking)}


class Remembering(nn.Module):
    """Reads triangles that it, or somebody else, keeps from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n = x.size(1)
        if not hasattr(self, "own"):
            self.own = lower(n)
        return x + (self.own * remembered(n) * tabled(n) * noted(n) * hidden(n)) @ self.inner(x)


def model(name: str) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(LAYERS[name]() for _ in range(3))), torch.randn(2, T, WIDTH)


class Packed(nn.Module):
    """A recurrent layer over sequences whose lengths it is given, or makes of a list."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.into, self.inner = nn.Linear(WIDTH, WIDTH), kind(WIDTH, 40, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        lengths = torch.tensor([T, T // 2]) if lengths is None else lengths.cpu()
        packed = nn.utils.rnn.pack_padded_sequence(self.into(x), lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.inner(packed)[0], batch_first=True)[0]


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_is_predicted_to_the_byte(name: str) -> None:
    predicted, measured = (profile(*model(name), torch.optim.SGD, way) for way in ("cpu", None))
    assert [note.startswith("the model looks at random numbers") for note in predicted.notes] == [True] * (
        name in ("Noisy", "Looking")
    )
    assert predicted.peak == measured.peak
    assert [layer.saved for layer in predicted.layers] == [layer.saved for layer in measured.layers]


@pytest.mark.parametrize("given", [False, True], ids=["made", "given"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_lengths_of_packed_sequences_count(kind: type[nn.RNNBase], given: bool) -> None:
    """The layer runs alone on as many sequences at each step: what it keeps is what it was measured to keep."""
    batch: dict[str, Tensor] = {"x": torch.randn(2, T, WIDTH)}
    if given:
        batch["lengths"] = torch.tensor([T // 2, T])
    predicted, measured = (profile(Packed(kind), batch, torch.optim.SGD, way) for way in ("cpu", None))
    assert measured.peak <= predicted.peak <= 1.02 * measured.peak


@pytest.mark.parametrize("name", ["Added", "Given"])
def test_a_step_stays_within_its_budget(name: str) -> None:
    stack, x = model(name)
    least = plan(stack, x, "1GiB", torch.optim.SGD, "cpu").front[0].peak
    found = plan(stack, x, least + (1 << 14), torch.optim.SGD, "cpu")
    convert(stack, policy=found.policy)
    assert profile(stack, x, torch.optim.SGD).peak <= found.peak <= found.budget
    revert(stack)


def test_what_is_kept_from_call_to_call_has_values_afterwards() -> None:
    stack, x = nn.Sequential(Remembering(), Remembering()), torch.randn(2, T, WIDTH)
    profile(stack, x, torch.optim.SGD, "cpu")
    assert T in _hidden  # by the prediction, which cannot undo it
    expected = x
    for layer in stack:
        expected = expected + lower(T) @ layer.inner(expected)  # type: ignore[operator]
    assert torch.equal(stack(x), expected)


def test_no_large_one_is_made_to_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of a terabyte is predicted."""
    x = torch.empty(1, 1 << 19, WIDTH, device="meta")
    found = profile(nn.Sequential(Added()), x, torch.optim.SGD, "cpu")
    assert x.size(1) ** 2 > MOST_ENTRIES and found.peak > 2 * 4 * x.size(1) ** 2


def test_on_another_device_it_is_the_hosts() -> None:
    """On a card a mask that is made on the host is copied there; only the copy counts."""
    stack, x = model("Filled")
    assert profile(stack, x, torch.optim.SGD, "h100").peak > 0
