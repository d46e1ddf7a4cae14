"""Blocks in the words of code that is loaded with a model, or was before its class was in transformers: masks that
multiply, floors of logits, numbers as tensors, tables that are made at the first call, rows of one weight."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ckptfused
from ckptfused.models.derive.derive import derive
from tests.models.derive.test_spellings import both, steps
from tests.models.derive.test_unseen import C, H, Plain, batch
from tests.models.small import unfused

D = C // H
LEAST = torch.finfo(torch.float32).min


class Written(Plain):
    """A block whose `logits` changes those of its attention; `ones` is 1 where a query sees a key."""

    def __init__(self, logits: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.logits = logits
        self.register_buffer("ones", torch.ones(300, 300).tril(), persistent=False)
        self.register_buffer("far", -0.1 * (torch.arange(300)[:, None] - torch.arange(300)).abs(), persistent=False)
        slopes = torch.tensor([0.5, 0.25, 0.1, 0.05])[:, None, None]
        self.register_buffer("alibi", (slopes * self.far).masked_fill(self.ones == 0, -math.inf), persistent=False)
        apart = torch.arange(300)[:, None] - torch.arange(300)
        near, later = self.ones * (apart < 16), torch.where(apart < 0, -1e9, -0.2 * (apart - 8).clamp(min=0))
        self.register_buffer("near", near, persistent=False)
        self.register_buffer("reach", (apart < 16).float(), persistent=False)
        self.register_buffer("later", later, persistent=False)
        blocks = (torch.arange(300)[:, None] // 9 == torch.arange(300) // 9).float()
        self.register_buffer("blocks", blocks, persistent=False)
        self.bias, self.number = nn.Parameter(torch.randn(H, 300, 300)), nn.Parameter(torch.tensor(1.7))

    def seen(self, w: Tensor, of: str = "ones") -> Tensor:
        t: Tensor = getattr(self, of)[..., : w.size(-2), : w.size(-1)]
        return t.to(w.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        w = q @ k.transpose(-1, -2)
        w = self.logits(self, w / torch.full([], D**0.5, dtype=w.dtype, device=w.device))
        return self.o((w.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def alike(block: nn.Module, path: str) -> None:
    """`both` for a block of which it is known at its first call what it takes."""
    found = derive(block, (batch(12),), {})
    assert path == ("generic" if found.proof is None else "part" if found.why else "fused"), found.why
    plain = nn.Sequential(block, copy.deepcopy(block)).double()
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    for tokens in (12, 7):
        with unfused() as reasons:
            for a, b in zip(steps(plain, batch(tokens)), steps(converted, batch(tokens)), strict=True):
                torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)
        assert bool(reasons) == (path == "generic")


def _times(large: float) -> Callable[[Any, Tensor], Tensor]:
    return lambda block, w: w * block.seen(w) - large * (1 - block.seen(w))


def _plus(large: float) -> Callable[[Any, Tensor], Tensor]:
    return lambda block, w: (1 - block.seen(w)) * -large + block.seen(w) * w


def agrees(block: nn.Module) -> None:
    """Whether a converted model of two such blocks steps as it did, by whatever path."""
    plain = nn.Sequential(block, copy.deepcopy(block)).double()
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    for tokens in (12, 40):
        for a, b in zip(steps(plain, batch(tokens)), steps(converted, batch(tokens)), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)


def _shown(w: Tensor, mask: Tensor) -> Tensor:
    return w * mask - 1e10 * (1 - mask)


def _where(fill: float) -> Callable[[Any, Tensor], Tensor]:
    return lambda block, w: torch.where(block.seen(w) == 1, w, torch.full_like(w, fill))


def _filled(fill: float) -> Callable[[Any, Tensor], Tensor]:
    return lambda block, w: w.masked_fill(block.seen(w) == 0, fill)


def _added(fill: float) -> Callable[[Any, Tensor], Tensor]:
    return lambda block, w: w + torch.full((w.size(-1),) * 2, fill, device=w.device).triu(1).to(w.dtype)


def _floored(least: float) -> Callable[[Any, Tensor], Tensor]:
    return lambda block, w: torch.max(_added(-math.inf)(block, w), torch.tensor(least, dtype=w.dtype, device=w.device))


def _clamped(least: float) -> Callable[[Any, Tensor], Tensor]:
    return lambda block, w: _added(-math.inf)(block, w).clamp(min=least)


FUSED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a mask that multiplies (GPT)": _times(1e10),
    "likewise with less": _times(1e4),
    "likewise as a sum": _plus(1e9),
    "where, of a tensor of numbers": _where(LEAST),
    "filled with less": _filled(-1e4),
    "added, of another type (Phi)": _added(-10000.0),
    "a floor (Baichuan, OPT)": _floored(LEAST),
    "a clamp": _clamped(LEAST),
    "what it holds is added (ALiBi)": lambda block, w: w + block.seen(w, "alibi"),
    "no causal mask, a distance": lambda block, w: w + block.seen(w, "far"),
}
OTHERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a mask that multiplies and hides little": _times(30.0),
    "the other way round": lambda block, w: w * (1 - block.seen(w)) - 1e10 * (1 - block.seen(w)),
    "half of what is seen": lambda block, w: w * (block.seen(w) / 2) - 1e10 * (1 - block.seen(w)),
    "added twice where it is seen": lambda block, w: w * block.seen(w) - 1e10 * (2 - block.seen(w)),
    "where, of little": _where(-30.0),
    "where, of the logits themselves": lambda block, w: torch.where(block.seen(w) == 1, w, w - 1e9),
    "where, of two numbers": lambda block, w: torch.where(block.seen(w) == 1, w, block.seen(w, "far") - 1e5),
    "filled with little": _filled(-30.0),
    "a floor among the logits": _floored(-0.2),
    "a clamp from above": lambda block, w: _added(-math.inf)(block, w).clamp(max=0.3),
    "a clamp from both sides": lambda block, w: _added(-math.inf)(block, w).clamp(min=-1e30, max=0.3),
    "a bias that is trained": lambda block, w: w + block.bias[:, : w.size(-2), : w.size(-1)],
    "a number of a weight": lambda block, w: _added(-math.inf)(block, w) / torch.tensor(block.number),
    "two masks of its own": lambda block, w: _filled(LEAST)(block, w).masked_fill(block.seen(w, "reach") == 0, LEAST),
    "two masks that multiply": lambda block, w: _shown(_shown(w, block.seen(w)), block.seen(w, "near")),
    "multiplied by one mask of two": lambda block, w: w * block.seen(w) - 1e10 * (1 - block.seen(w, "near")),
    "a mask that multiplies, and a bias": lambda block, w: w * block.seen(w) + block.seen(w, "later"),
    "a mask by blocks that multiplies": lambda block, w: _shown(w, block.seen(w, "blocks")),
    "over a number of the layer's": lambda block, w: _added(-math.inf)(block, w) / block.ones.sum(),
}


@pytest.mark.parametrize("logits", FUSED.values(), ids=FUSED)
def test_masks_in_other_words(logits: Callable[[Any, Tensor], Tensor]) -> None:
    block = Written(logits)
    del block.bias, block.number
    both(block, "fused")


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("logits", OTHERS.values(), ids=OTHERS)
def test_other_logits_are_no_masks(logits: Callable[[Any, Tensor], Tensor]) -> None:
    """Their FFN half is fused: gradients are those of the block as written in either case."""
    block = Written(logits).double()
    plain = nn.Sequential(block, copy.deepcopy(block))
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    found = derive(block, (batch(12),), {})
    assert found.proof is None or found.why, found.proof
    for tokens in (12, 7, 40):
        leaf = batch(tokens).requires_grad_()
        for model in (plain, converted):
            model.zero_grad()
            model(leaf).square().sum().backward()
        for (name, a), b in zip(plain.named_parameters(), converted.parameters(), strict=True):
            if a.grad is None:
                assert b.grad is None or not b.grad.any()
            else:
                torch.testing.assert_close(b.grad, a.grad, rtol=1e-9, atol=1e-10, msg=name)


def test_a_mask_that_it_holds_is_read_at_each_call() -> None:
    plain = nn.Sequential(*(Written(FUSED["what it holds is added (ALiBi)"]) for _ in range(2))).double()
    for block in plain:
        del block.bias, block.number
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    steps(converted, batch(12))
    for model in (plain, converted):
        model[1].alibi.mul_(3)
    with unfused() as reasons:
        for a, b in zip(steps(plain, batch(12)), steps(converted, batch(12)), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)
    assert not reasons


@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_a_bias_of_each_head_whatever_their_number(heads: int) -> None:
    """A batch of as many as there are heads, as in a proof, is another thing."""

    class Biased(Plain):
        def __init__(self) -> None:
            super().__init__()
            apart = (torch.arange(300)[:, None] - torch.arange(300)).abs()
            self.register_buffer("far", -torch.rand(heads, 1, 1) * apart)

        def heads(self, x: Tensor) -> Any:
            return (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))

        def attn(self, x: Tensor) -> Tensor:
            return self.attend(*self.heads(x), self.far[:, : x.size(1), : x.size(1)])

    both(Biased(), "fused")


def test_a_mask_that_needs_a_gradient_gets_one() -> None:
    block = Plain()
    mask = torch.full((60, 60), -1e9).triu(1).double().requires_grad_()
    block.mask = mask  # type: ignore[assignment]
    block.attn = lambda x: Plain.attend(block, *block.heads(x), block.mask[: x.size(1), : x.size(1)])  # type: ignore
    plain = nn.Sequential(block).double()
    found = []
    for convert in (False, True):
        if convert:
            ckptfused.convert(plain)
        plain(batch(12)).square().sum().backward()
        assert mask.grad is not None
        found.append(mask.grad.clone())
        mask.grad = None
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-10)


class Packed(Plain):
    """A block whose q, k and v are made of rows of one weight, as `rows` says."""

    def __init__(self, rows: Callable[[Tensor], Any], biases: Callable[[Tensor], Any] | None) -> None:
        super().__init__()
        self.rows, self.biases = rows, biases
        self.weight, self.bias = nn.Parameter(torch.randn(3 * C, C) / 5), nn.Parameter(torch.randn(3 * C))
        del self.qkv

    def heads(self, x: Tensor) -> Any:
        n = self.n1(x)
        biases = (None,) * 3 if self.biases is None else self.biases(self.bias)
        made = (F.linear(n, w, b) for w, b in zip(self.rows(self.weight), biases, strict=True))
        return (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in made)


def _chunks(t: Tensor) -> Any:
    return t.chunk(3)


@pytest.mark.parametrize(
    ("rows", "biases", "path"),
    [
        (lambda w: (w[:C], w[C : 2 * C], w[2 * C :]), lambda b: (b[:C], b[C : 2 * C], b[2 * C :]), "fused"),
        (_chunks, _chunks, "fused"),
        (lambda w: w.unflatten(0, (3, C)), lambda b: b.unflatten(0, (3, C)), "fused"),
        (lambda w: (w[2 * C :], w[:C], w[C : 2 * C]), lambda b: (b[2 * C :], b[:C], b[C : 2 * C]), "fused"),
        (lambda w: (w[1 : C + 1], w[C : 2 * C], w[:C]), lambda b: (b[1 : C + 1], b[C : 2 * C], b[:C]), "fused"),
        (_chunks, lambda b: b.chunk(3)[::-1], "part"),  # rows of one place, biases of another
        (lambda w: (w[::3], w[1::3], w[2::3]), lambda b: (b[::3], b[1::3], b[2::3]), "part"),
    ],
    ids=["slices", "chunks", "unflattened", "another order", "one row on", "other biases", "every third row"],
)
def test_rows_of_one_weight(rows: Any, biases: Any, path: str) -> None:
    block = Packed(rows, biases)
    alike(block, path)


def test_rows_of_one_weight_without_a_bias() -> None:
    block = Packed(_chunks, None)
    del block.bias
    block.bias = None  # type: ignore[assignment]
    alike(block, "fused")


class Unit(nn.Module):
    """The norm of a vector's length (lucidrains'), times what `by` makes of its weight."""

    def __init__(self, by: Callable[[Tensor], Tensor], p: float = 2.0) -> None:
        super().__init__()
        self.by, self.p, self.g = by, p, nn.Parameter(torch.rand(C))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, p=self.p, dim=-1) * C**0.5 * self.by(self.g)


@pytest.mark.parametrize(
    ("by", "p", "path"), [(lambda g: g, 2.0, "fused"), (lambda g: g + 1, 2.0, "fused"), (lambda g: g, 1.0, "generic")]
)
def test_norms_by_length(by: Any, p: float, path: str) -> None:
    block = Plain()
    block.n1, block.n2 = Unit(by, p), Unit(by, p)  # type: ignore[assignment]
    both(block, path)


def test_a_norm_by_length_of_nothing_is_nothing() -> None:
    """A token of zeros stays one: no division by 0."""
    block = Plain()
    block.n1, block.n2 = Unit(lambda g: g), Unit(lambda g: g)  # type: ignore[assignment]
    plain = nn.Sequential(block, copy.deepcopy(block))
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    x = batch(12).float()
    x[:, 3] = 0
    for a, b in zip(steps(plain, x), steps(converted, x), strict=True):
        assert b.isfinite().all()
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)


def halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


class Turned(Plain):
    """A block that makes its tables at the first call, and again for a longer one, and keeps them."""

    def __init__(self, keeps: str, stacked: bool = False) -> None:
        super().__init__()
        self.keeps, self.stacked, self.cos, self.sin, self.length = keeps, stacked, None, None, 0
        self.cache: Any = {} if keeps == "dict" else []

    def tables(self, t: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if t > self.length or (self.keeps == "one length" and t != self.length):
            angles = torch.outer(torch.arange(t).double(), 1e4 ** (-torch.arange(0, D, 2) / D))
            made = [f(torch.cat((angles, angles), -1)).to(like) for f in (torch.cos, torch.sin)]
            self.length = t
            if self.keeps == "dict":
                self.cache["cos"], self.cache["sin"] = made
            elif self.keeps == "list":
                self.cache = made
            else:
                self.cos, self.sin = made  # type: ignore[assignment]
        held = {"dict": lambda: (self.cache["cos"], self.cache["sin"]), "list": lambda: self.cache}
        cos, sin = held.get(self.keeps, lambda: (self.cos, self.sin))()
        return cos[:t], sin[:t]

    def heads(self, x: Tensor) -> Any:
        q, k, v = super().heads(x)
        cos, sin = self.tables(x.size(1), x)
        q, k = (t * cos + halves(t) * sin for t in (q, k))
        return torch.stack((q, k, v), 2).unbind(2) if self.stacked else (q, k, v)


@pytest.mark.parametrize("stacked", [False, True], ids=["apart", "stacked"])
@pytest.mark.parametrize("keeps", ["attributes", "dict", "list"])
def test_tables_that_are_made_at_the_first_call(keeps: str, stacked: bool) -> None:
    """Calls that make or lengthen the tables are not fused; those after them are, shorter ones, too."""
    plain = nn.Sequential(Turned(keeps, stacked), Turned(keeps, stacked)).double()
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    expected = [(12, True), (12, False), (7, False), (16, True), (16, False), (12, False)]
    for tokens, runs_as_written in expected:
        with unfused() as reasons:
            for a, b in zip(steps(plain, batch(tokens)), steps(converted, batch(tokens)), strict=True):
                torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)
        assert bool(reasons) == runs_as_written, (tokens, reasons)


def test_tables_that_are_made_anew_for_each_length() -> None:
    """A length that comes again after another one is a change again (ESM-2); a loop that keeps to one is fused."""
    plain = nn.Sequential(Turned("one length"), Turned("one length")).double()
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    for tokens, runs_as_written in [(12, True), (12, False), (12, False), (16, True), (16, False), (16, False)]:
        with unfused() as reasons:
            for a, b in zip(steps(plain, batch(tokens)), steps(converted, batch(tokens)), strict=True):
                torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)
        assert bool(reasons) == runs_as_written, (tokens, reasons)


class Held(Plain):
    """A block with tables that it holds, `how` saying in what and under which name."""

    def __init__(self, how: str, first: int = 0, interleaved: bool = False, sign: float = 1.0) -> None:
        super().__init__()
        self.how, self.interleaved, self.sign = how, interleaved, sign
        at = (torch.arange(300) - first).clamp(min=0).double()
        angles = torch.outer(at, 1e4 ** (-torch.arange(0, D, 2) / D))
        angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        self.cache: Any = {0: sin, "0": cos, "": sin} if how == "keys alike" else {"a.b": cos, "c": sin}
        if how == "a colon":
            self.register_buffer("rope:cos", cos)
            self.register_buffer("rope:sin", sin)
        elif how == "buffers":
            self.register_buffer("cos", cos)
            self.register_buffer("sin", sin)
        elif how == "dict":
            self.cache = {"cos": cos, "sin": sin}

    def tables(self) -> tuple[Tensor, Tensor]:
        if self.how in ("buffers", "dict"):
            return (self.cos, self.sin) if self.how == "buffers" else (self.cache["cos"], self.cache["sin"])
        if self.how == "a colon":
            return getattr(self, "rope:cos"), getattr(self, "rope:sin")
        return (self.cache["0"], self.cache[0]) if self.how == "keys alike" else (self.cache["a.b"], self.cache["c"])

    def heads(self, x: Tensor) -> Any:
        q, k, v = super().heads(x)
        cos, sin = (t[: x.size(1)].to(x.dtype) for t in self.tables())
        turned = torch.stack((-q[..., 1::2], q[..., ::2]), -1).flatten(-2) if self.interleaved else halves(q)
        other = torch.stack((-k[..., 1::2], k[..., ::2]), -1).flatten(-2) if self.interleaved else halves(k)
        if self.sign < 0:
            return q * cos - turned * sin, k * cos - other * sin, v
        return q * cos + turned * sin, k * cos + other * sin, v


@pytest.mark.parametrize("how", ["buffers", "dict", "a colon", "keys alike", "a key with a dot"])
def test_tables_that_it_holds(how: str) -> None:
    alike(Held(how), "generic" if how == "a key with a dot" else "fused")


@pytest.mark.parametrize("how", ["buffers", "dict"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("first", [3, 6, 9])
def test_tables_that_turn_nothing_in_their_first_rows(first: int, sign: float, interleaved: bool, how: str) -> None:
    """What the few tokens of a proof do not tell is not guessed."""
    agrees(Held(how, first, interleaved, sign))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_two_channels_that_are_turned_later(sign: float) -> None:
    """Halves and neighbours are one there, and the direction is not told by rows that turn nothing."""

    class Two(Held):
        def heads(self, x: Tensor) -> Any:
            q, k, v = Plain.heads(self, x)
            cos, sin = (t[: x.size(1), ::3].to(x.dtype) for t in self.tables())

            def turned(t: Tensor) -> Tensor:
                first = t[..., :2] * cos + self.sign * halves(t[..., :2]) * sin
                return torch.cat((first, t[..., 2:]), -1)

            return turned(q), turned(k), v

    agrees(Two("buffers", 9, False, sign))


def test_tables_whose_halves_differ_further_on() -> None:
    block = Held("buffers")
    block.cos[20:, : D // 2] *= 0.5
    agrees(block)


@pytest.mark.parametrize("how", ["buffers", "dict"])
def test_compiled_they_are_read_at_each_call(how: str) -> None:
    plain = nn.Sequential(Held(how), Held(how)).double()
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    compiled = torch.compile(converted, backend="eager")
    torch.testing.assert_close(compiled(batch(12)), plain(batch(12)))
    for model in (plain, converted):
        model[1].tables()[1].mul_(-1)
    torch.testing.assert_close(compiled(batch(12)), plain(batch(12)))


def test_which_of_two_masks_a_call_makes_counts() -> None:
    """The second of two, a window, is another one than the first at a length."""

    class Either(Plain):
        def __init__(self) -> None:
            super().__init__()
            apart = torch.arange(300)[:, None] - torch.arange(300)
            self.register_buffer("masks", torch.stack((apart >= 0, (apart >= 0) & (apart < 16))))

        def attn(self, x: Tensor) -> Tensor:
            _, near = self.masks[:, : x.size(1), : x.size(1)].unbind(0)
            q, k, v = self.heads(x)
            w = torch.where(near, q @ k.transpose(-1, -2) / D**0.5, LEAST)
            return self.o((w.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    agrees(Either())


def test_methods_in_a_list_are_the_copys() -> None:
    class Steps(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.steps = [self.attn, self.ffn]

        def forward(self, x: Tensor) -> Tensor:
            for step in self.steps:
                x = x + step(x)
            return x

    block = Steps()
    found = derive(block.double(), (batch(12),), {})
    assert found.proof is not None and not found.why, found.why


class OfOneLength(Plain):
    """A block whose mask has one length (CLIP's text model)."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.full((12, 12), -math.inf).triu(1).double()

    def attn(self, x: Tensor) -> Tensor:
        self.mask = self.mask.to(x)
        return self.attend(*self.heads(x), self.mask)


def test_a_block_of_one_length_is_read_at_that_one() -> None:
    plain = nn.Sequential(OfOneLength(), OfOneLength()).double()
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    for _ in range(2):
        with unfused() as reasons:
            for a, b in zip(steps(plain, batch(12)), steps(converted, batch(12)), strict=True):
                torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)
        assert not reasons
    for model in (plain, converted):
        with pytest.raises(RuntimeError, match=r"must match|broadcast"):
            model(batch(7))


class FromEight(OfOneLength):
    """A block that takes eight tokens or more, and scales its logits by their number: at one length nothing says so."""

    def attn(self, x: Tensor) -> Tensor:
        if x.size(1) < 8:
            raise RuntimeError("eight tokens or more")
        q, k, v = self.heads(x)
        w = q @ k.transpose(-1, -2) * torch.full([], x.size(1)).to(x) * 0.05
        return self.o((w.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_what_is_read_at_one_length_holds_of_no_other() -> None:
    plain = nn.Sequential(FromEight(), FromEight()).double()
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    for tokens in (12, 16, 12, 9):
        for a, b in zip(steps(plain, batch(tokens)), steps(converted, batch(tokens)), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)


class TokensFirst(Plain):
    """A block of [T, B, C] whose table is [T, 1, R / 2, 2] and turns the first R channels of each head (ChatGLM)."""

    R = 4

    def turned(self, t: Tensor, table: Tensor) -> Tensor:
        pairs, rest = t[..., : self.R].unflatten(-1, (-1, 2)), t[..., self.R :]
        by = table[: t.size(0)].view(t.size(0), -1, 1, self.R // 2, 2)
        a, b, cos, sin = pairs[..., 0], pairs[..., 1], by[..., 0], by[..., 1]
        return torch.cat((torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(3), rest), -1)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (t.unflatten(-1, (H, -1)) for t in self.qkv(self.n1(x)).chunk(3, -1))
        q, k, v = (t.permute(1, 2, 0, 3) for t in (self.turned(q, table), self.turned(k, table), v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)
        x = x + self.o(o.flatten(2))
        return x + self.ffn(x)


class Stack(nn.Module):
    """Layers that are called with one table."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(2))
        self.batches = 1

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.size(0)).to(x), 1e4 ** (-torch.arange(0, 4, 2).to(x) / 4))
        table = torch.stack((angles.cos(), angles.sin()), -1)[:, None].expand(-1, self.batches, -1, -1)
        for layer in self.layers:
            x = layer(x, table)
        return x


@pytest.mark.parametrize("each", [False, True], ids=["one table", "one for each batch element"])
def test_tables_of_tokens_first(each: bool) -> None:
    plain = Stack(TokensFirst).double()
    plain.batches = 3 if each else 1
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    for tokens in (12, 9):
        x = torch.randn(tokens, 3, C, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        with unfused() as reasons:
            for a, b in zip(steps(plain, x), steps(converted, x), strict=True):
                torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)
        assert not reasons, reasons
