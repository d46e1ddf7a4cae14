"""What a proof at two small sizes does not see by itself: names outside of the layer, other lengths, values far away,
what a forward leaves in its arguments, settings of a thread. A converted layer computes what it computes, or is as it
was.
"""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import functools
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ckptfused
from ckptfused.compat.torch_modules import DEFAULT_EPS
from ckptfused.models.derive import calls
from tests.models.small import unfused

C, H, T = 24, 4, 12


class Plain(nn.Module):
    """A block whose `scale` multiplies what attention adds."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.o, self.up, self.down = nn.Linear(C, 3 * C), nn.Linear(C, C), nn.Linear(C, 48), nn.Linear(48, C)

    def heads(self, x: Tensor) -> Iterator[Tensor]:
        """q, k and v. **Shapes** x [B, T, C]; each [B, H, T, C / H]."""
        return (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o(o.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def attn(self, x: Tensor) -> Tensor:
        return self.attend(*self.heads(x))

    def ffn(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.n2(x))))  # type: ignore[no-any-return]

    def scale(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale() * self.attn(x)
        return x + self.ffn(x)


def with_scale(scale: Callable[[Any], float]) -> type[Plain]:
    return type("Block", (Plain,), {"scale": scale})


def twins(cls: type[Plain]) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    plain = nn.Sequential(*(cls() for _ in range(2))).double()
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    return plain, converted


def batch(tokens: int = T) -> Tensor:
    return torch.randn(2, tokens, C, dtype=torch.float64, generator=torch.Generator().manual_seed(tokens))


def assert_alike(plain: nn.Module, converted: nn.Module, *args: Tensor) -> None:
    given = [[t.clone().requires_grad_(t.requires_grad) for t in args] for _ in range(2)]
    results = [model(*of) for model, of in zip((plain, converted), given, strict=True)]
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


def assert_fused(plain: nn.Module, converted: nn.Module, *lengths: int) -> None:
    """Both give the same at these lengths, the converted model by the op."""
    with unfused() as reasons:
        for tokens in lengths:
            assert_alike(plain, converted, batch(tokens))
    assert not reasons


# The number that a layer's code finds outside of it, and what changes it.


class Namespace:
    scale = 1.0


class Inherits(Namespace):
    """The attribute is its base's."""


@dataclasses.dataclass(slots=True)
class Slots:
    scale: float = 1.0


class Config:
    """Its class has one number, and says another by one outside."""

    by_class = 1.0

    @property
    def scale(self) -> float:
        return float(settings.SCALE)  # type: ignore[attr-defined]


settings = types.ModuleType("settings_of_a_test")
settings.SCALE = 1.0  # type: ignore[attr-defined]
settings.inner = types.SimpleNamespace(scale=1.0)  # type: ignore[attr-defined]
exec("def factor(): return SCALE", vars(settings))
sys.modules["settings_of_a_test"] = settings
held, config = Slots(), Config()
outside = nn.Module()
outside.scale = 1.0  # type: ignore[assignment]
pointed = nn.Module()
pointed.scale = 1.0  # type: ignore[assignment]
pointer = weakref.ref(pointed)


def _cell() -> tuple[Callable[[Any], float], Callable[[float], None]]:
    value = 1.0

    def put(new: float) -> None:
        nonlocal value
        value = new

    return lambda _: value, put


def _imported(_: Any) -> float:
    from settings_of_a_test import SCALE

    return float(SCALE)


def _by_default(_: Any, held: list[float] = [1.0]) -> float:  # noqa: B006
    return held[0]


def _with_attribute() -> float:
    return 1.0


_with_attribute.by = 1.0  # type: ignore[attr-defined]


class Called:
    def __call__(self) -> float:
        return float(settings.SCALE)  # type: ignore[attr-defined]


class Private:
    __slots__ = ("__scale",)

    def __init__(self) -> None:
        self.__scale = 1.0

    def scale(self) -> float:
        return self.__scale

    def put(self, value: float) -> None:
        self.__scale = value


@functools.lru_cache
def _cached() -> float:
    return float(settings.SCALE)  # type: ignore[attr-defined]


def _clear(value: float) -> None:
    settings.SCALE = value  # type: ignore[attr-defined]
    _cached.cache_clear()


called, private = Called(), Private()
settings.registry = {"by": 1.0, "how": F.gelu, "dtype": torch.float32}  # type: ignore[attr-defined]
settings.sizes = {"m": {"by": 1.0}}  # type: ignore[attr-defined]
_read, _put = _cell()
queued = deque([1.0])


class ByClass:
    """A class that is asked by its methods."""

    _scale = 1.0
    _only: ByClass | None = None

    def __init__(self) -> None:
        self.value = 1.0

    @classmethod
    def factor(cls) -> float:
        return cls._scale

    @classmethod
    def only(cls) -> ByClass:
        if cls._only is None:
            cls._only = cls()
        return cls._only


ByClass.only()


OUTSIDE: dict[str, tuple[Callable[[Any], Any], Callable[[float], None]]] = {
    "a class": (lambda _: Namespace.scale, lambda v: setattr(Namespace, "scale", v)),
    "a classmethod": (lambda _: ByClass.factor(), lambda v: setattr(ByClass, "_scale", v)),
    "a singleton": (lambda _: ByClass.only().value, lambda v: setattr(ByClass.only(), "value", v)),
    "a base": (lambda _: Inherits.scale, lambda v: setattr(Namespace, "scale", v)),
    "a module": (lambda _: settings.SCALE, lambda v: setattr(settings, "SCALE", v)),
    "an object in a module": (lambda _: settings.inner.scale, lambda v: setattr(settings.inner, "scale", v)),
    "a function's global": (lambda _: settings.factor(), lambda v: setattr(settings, "SCALE", v)),
    "an import within": (_imported, lambda v: setattr(settings, "SCALE", v)),
    "slots": (lambda _: held.scale, lambda v: setattr(held, "scale", v)),
    "a property": (lambda _: config.scale, lambda v: setattr(settings, "SCALE", v)),
    "a configuration's class": (lambda _: config.by_class, lambda v: setattr(Config, "by_class", v)),
    "a cell": (_read, _put),
    "a default": (_by_default, lambda v: _by_default.__defaults__[0].__setitem__(0, v)),  # type: ignore[index]
    "a function's attribute": (lambda _: _with_attribute.by, lambda v: setattr(_with_attribute, "by", v)),  # type: ignore[attr-defined]
    "a registry": (lambda _: settings.registry["by"], lambda v: settings.registry.update(by=v)),
    "a registry in one": (lambda _: settings.sizes["m"]["by"], lambda v: settings.sizes["m"].update(by=v)),
    "an object that is called": (lambda _: called(), lambda v: setattr(settings, "SCALE", v)),
    "private slots": (lambda _: private.scale(), private.put),
    "a cache": (lambda _: _cached(), _clear),
    "a deque": (lambda _: queued[0], lambda v: queued.__setitem__(0, v)),
    "an nn.Module": (lambda _: outside.scale, lambda v: setattr(outside, "scale", v)),
    "a weak reference": (lambda _: pointer().scale, lambda v: setattr(pointed, "scale", v)),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_a_number_that_the_code_finds_outside_changes(kind: str) -> None:
    scale, change = OUTSIDE[kind]
    plain, converted = twins(with_scale(scale))
    try:
        for value in (1.0, 2.0, 1.0, 3.0):
            change(value)
            assert_fused(plain, converted, T)
    finally:
        change(1.0)


class Twice(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("whose", ["the layer", "a module within"])
def test_a_class_is_replaced(whose: str) -> None:
    plain, converted = twins(Plain)
    assert_alike(plain, converted, batch())
    for model in (plain, converted):
        for layer in model:
            if whose == "the layer":
                layer.__class__ = with_scale(lambda _: 2.0)
            else:
                layer.n2.__class__ = Twice
    assert_alike(plain, converted, batch())


@dataclasses.dataclass
class Compared:
    scale: float = dataclasses.field(default=1.0, compare=False)


def test_an_object_in_the_place_of_one_that_says_it_is_equal() -> None:
    class Held(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.config = Compared()

        def scale(self) -> float:
            return self.config.scale

    plain, converted = twins(Held)
    for value in (1.0, 2.0):
        for model in (plain, converted):
            for layer in model:
                layer.config = Compared(value)
        assert_fused(plain, converted, T)


class Refusing:
    def __eq__(self, other: object) -> bool:
        raise KeyError("it is not compared")

    __hash__ = None  # type: ignore[assignment]


def test_objects_that_raise_when_they_are_compared() -> None:
    class Held(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.held = Refusing()

    plain, converted = twins(Held)
    for _ in range(2):
        assert_alike(plain, converted, batch())
        for layer in converted:
            layer.held = Refusing()


SCALE = contextvars.ContextVar("SCALE", default=1.0)
LOCAL = threading.local()
ARRAY = np.ones(3)


@pytest.mark.parametrize("kind", ["ContextVar", "local", "NumPy array"])
def test_what_leaves_no_trace_is_not_derived(kind: str) -> None:
    scale, change = {
        "ContextVar": (lambda _: SCALE.get(), lambda v: SCALE.set(v)),
        "local": (lambda _: getattr(LOCAL, "scale", 1.0), lambda v: setattr(LOCAL, "scale", v)),
        "NumPy array": (lambda _: float(ARRAY.mean()), lambda v: ARRAY.fill(v)),
    }[kind]
    change(3.0)
    plain, converted = twins(with_scale(scale))
    for value in (3.0, 2.0):
        change(value)
        with unfused() as reasons:
            assert_alike(plain, converted, batch())
        assert kind in reasons[0].text
    change(1.0)


def test_an_array_in_the_place_of_another_one() -> None:
    class Held(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.w = [np.ones(3)]

        def scale(self) -> float:
            return float(self.w[0].mean())

    plain, converted = twins(Held)
    assert_alike(plain, converted, batch())
    for model in (plain, converted):
        for layer in model:
            layer.w = [np.full(3, 2.0)]
    assert_alike(plain, converted, batch())


# Lengths, types and modes that a proof does not try.


class ByLength(Plain):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x) / max(1, x.size(1) // 5)  # goes with 5 and 40 as the length does, not with 7
        return x + self.ffn(x)


class FromFirst(Plain):
    """Its rows begin elsewhere where there are many."""

    def attn(self, x: Tensor) -> Tensor:
        first = 0 if x.size(1) < 20 else C
        w = torch.cat((self.qkv.weight, self.qkv.weight))[first : first + 3 * C]
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in F.linear(self.n1(x), w).chunk(3, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Powered(Plain):
    def ffn(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.n2(x))).pow(2 if x.size(1) < 20 else 3))  # type: ignore[no-any-return]


class CutAtLength(Plain):
    def ffn(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(x.size(1) < 20):
            h = F.gelu(self.up(self.n2(x)))
        return self.down(h)  # type: ignore[no-any-return]


class RoundedAtLength(Plain):
    def ffn(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(self.n2(x)))
        return self.down(h if x.size(1) < 20 else h.to(torch.float8_e4m3fn).to(x.dtype))  # type: ignore[no-any-return]


@pytest.mark.parametrize("cls", [ByLength, FromFirst, Powered, CutAtLength, RoundedAtLength])
def test_whole_numbers_by_length(cls: type[Plain]) -> None:
    plain, converted = twins(cls)
    for tokens in (12, 40, 12, 64):
        x = batch(tokens)
        assert_alike(plain, converted, x)
        found = []
        for model in (plain, converted):
            model.zero_grad()
            model(x).square().sum().backward()
            found.append([p.grad for p in model.parameters()])
        for a, b in zip(*found, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-8)


def test_whole_numbers_by_mode_and_type() -> None:
    plain, converted = twins(with_scale(lambda _: 1 if torch.is_grad_enabled() else 2))
    assert_alike(plain, converted, batch())
    with torch.no_grad():
        assert_alike(plain, converted, batch())
    plain, converted = twins(with_scale(lambda self: 1 if self.up.weight.dtype == torch.float64 else 2))
    assert_alike(plain, converted, batch())
    x = batch().float()
    torch.testing.assert_close(plain.float()(x), converted.float()(x), rtol=1e-4, atol=1e-4)


def test_whether_a_gradient_is_asked_for() -> None:
    plain, converted = twins(with_scale(lambda self: 2.0 - self.up.weight.requires_grad))
    for frozen in (False, True, False):
        for model in (plain, converted):
            model.requires_grad_(not frozen)
        assert_alike(plain, converted, batch())


def test_lengths_that_masks_and_slices_follow_stay_fused() -> None:
    """Numbers that go with the length are what they have to be."""

    class Sliced(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool).tril())

        def attn(self, x: Tensor) -> Tensor:
            n, tokens = x.size(0), x.size(1)
            q, k, v = self.qkv(self.n1(x)).view(n, tokens, 3, H, C // H).permute(2, 0, 3, 1, 4)
            mask = self.mask[None, None, :tokens, :tokens]  # type: ignore[index]
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return self.o(o.transpose(1, 2).reshape(n * tokens, C).view(n, tokens, -1))  # type: ignore[no-any-return]

    plain, converted = twins(Sliced)
    assert_fused(plain, converted, 12, 40, 7, 64)


# Values that random numbers of unit size do not reach.


class Clipped(Plain):
    def ffn(self, x: Tensor) -> Tensor:
        h = self.up(self.n2(x))
        return self.down(F.relu(h) - F.relu(h - 8.0))  # type: ignore[no-any-return]


class ClippedGate(Plain):
    def ffn(self, x: Tensor) -> Tensor:
        g, u = self.up(self.n2(x)).chunk(2, -1)
        return F.linear((F.silu(g) - F.relu(g - 9.0)) * u, self.down.weight[:, :24])


class Outside(Plain):
    def ffn(self, x: Tensor) -> Tensor:
        n = x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-12)
        return self.down(F.gelu(self.up(n)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("cls", [Clipped, ClippedGate, Outside])
def test_values_far_from_those_of_the_proof(cls: type[Plain]) -> None:
    plain, converted = twins(cls)
    for by in (1.0, 30.0, 1e-6):
        for model in (plain, converted):
            with torch.no_grad():
                for layer in model:
                    layer.up.weight.mul_(max(by, 1.0))
                    layer.o.weight.zero_()
                    layer.o.bias.zero_()
        assert_alike(plain, converted, batch() * by)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_rms_norm_without_eps_has_pytorchs(dtype: torch.dtype) -> None:
    """The result of rows as small as embeddings are at first is as near to float64's as PyTorch's own."""

    class Rms(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.n1, self.n2 = nn.RMSNorm(C), nn.RMSNorm(C)  # type: ignore[assignment]

    plain, converted = twins(Rms)
    x = (0.02 * batch()).to(dtype)
    exact = plain(x.double()) - x.double()
    with unfused() as reasons:
        errors = [((m.to(dtype)(x).double() - x.double() - exact).norm() / exact.norm()) for m in (plain, converted)]
    assert not reasons
    assert errors[1] <= 1.5 * errors[0] + torch.finfo(dtype).eps
    assert DEFAULT_EPS[dtype] in (torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


# What a forward is given, and leaves there.


def test_what_a_forward_puts_into_its_arguments_is_there() -> None:
    class Noting(Plain):
        def forward(self, x: Tensor, losses: list[Tensor], kept: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            y = super().forward(x)
            losses.append(y.square().mean())
            kept["y"] = y.detach()
            return y

    found = []
    for model in twins(Noting):
        losses: list[Tensor] = []
        kept: list[dict[str, Tensor]] = [{}, {}]
        y = batch()
        for layer, one in zip(model, kept, strict=True):
            y = layer(y, losses, one)
        (y.sum() + sum(losses)).backward()
        assert len(losses) == 2 and all(list(one) == ["y"] for one in kept)
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_tables_that_no_longer_say_each_number_twice() -> None:
    """At every call, also of a shape that was seen, whichever comes first."""

    def turned(t: Tensor) -> Tensor:
        a, b = t.chunk(2, -1)
        return torch.cat((-b, a), -1)

    class Rope(Plain):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
            q, k, v = self.heads(x)
            q, k = q * cos + turned(q) * sin, k * cos + turned(k) * sin
            x = x + self.attend(q, k, v)
            return x + self.ffn(x)

    plain, converted = twins(Rope)
    half = torch.randn(T, 3, dtype=torch.float64)
    twice, other = torch.cat((half, half), -1), torch.randn(T, 6, dtype=torch.float64)
    for angles in (twice, other, twice):
        for a, b in zip(plain, converted, strict=True):
            with unfused() as reasons:
                assert_alike(a, b, batch(), angles.cos(), angles.sin())
            assert bool(reasons) == (angles is other)
    cos, sin = twice.cos(), twice.sin()
    assert_alike(plain[0], converted[0], batch(), cos, sin)
    cos[:, 3:] *= 2  # in place: the same tensor says something else
    torch.testing.assert_close(plain[0](batch(), cos, sin), converted[0](batch(), cos, sin), rtol=1e-9, atol=1e-9)


# Layers that change for ever, or not at all.


def test_another_number_at_each_call_does_not_pile_up() -> None:
    class Scaled(Plain):
        def forward(self, x: Tensor, alpha: float) -> Tensor:  # type: ignore[override]
            x = x + alpha * self.attn(x)
            return x + self.ffn(x)

    plain, converted = twins(Scaled)
    for i in range(calls.MOST_FORMS + 20):
        torch.testing.assert_close(plain[0](batch(), i / 100), converted[0](batch(), i / 100), rtol=1e-9, atol=1e-9)
    kind = vars(converted[0])[calls.KNOWN].seen[0].kind
    assert len(kind.forms) == calls.MOST_FORMS and len(kind.calls) <= calls.MOST_CALLS


def test_the_same_values_written_anew_are_no_change() -> None:
    class Masked(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bias", torch.zeros(C))

        def attn(self, x: Tensor) -> Tensor:
            return super().attn(x) + self.bias

    plain, converted = twins(Masked)
    weights = copy.deepcopy(converted.state_dict())
    with unfused() as reasons:
        for _ in range(calls.MOST_CHANGES + 2):
            converted.load_state_dict(weights)
            converted(batch())
    assert not reasons
    assert_alike(plain, converted, batch())


def test_a_layer_that_came_to_rest_is_fused_again() -> None:
    class Annealed(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.by = 0.0

        def scale(self) -> float:
            return self.by

    plain, converted = twins(Annealed)
    x = batch()
    for i in range(calls.MOST_CHANGES + 3):
        for model in (plain, converted):
            model[0].by = 1 + i / 100  # type: ignore[assignment]
        converted(x)
    with unfused() as reasons:
        for _ in range(calls.MOST_CHANGES + 1):
            converted(x)
    assert 0 < len(reasons) <= calls.MOST_CHANGES
    with unfused() as reasons:
        assert_alike(plain, converted, x)
    assert not reasons


def test_layers_that_hold_their_parent_in_a_list() -> None:
    class Child(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.parent: list[Any] = []

        def scale(self) -> float:
            return float(self.parent[0].k)

    torch.manual_seed(0)
    plain = nn.Sequential(*(Child() for _ in range(3))).double()
    plain.k = 1.0  # type: ignore[assignment]
    for layer in plain:
        layer.parent.append(plain)
    converted = copy.deepcopy(plain)
    report = ckptfused.convert(converted)
    assert [layer.path for layer in report.layers] == ["fused"] * 3
    for k in (1.0, 2.0):
        plain.k = converted.k = k  # type: ignore[assignment]
        assert_fused(plain, converted, T)


# What a forward makes itself, on the device that PyTorch takes where none is said.


def own_mask(x: Tensor, kind: str) -> Tensor:
    tokens = x.size(1)
    if kind == "triu of ones":
        return ~torch.triu(torch.ones(tokens, tokens), 1).bool()
    if kind == "positions":
        i = torch.arange(tokens)
        return (i[:, None] >= i[None]) & (i[:, None] - i[None] < 5)
    return torch.full((tokens, tokens), float("-inf")).triu(1).to(x)


@pytest.mark.parametrize("kind", ["triu of ones", "positions", "added"])
def test_masks_that_a_forward_makes_on_a_cpu(kind: str) -> None:
    class Masked(Plain):
        def attn(self, x: Tensor) -> Tensor:
            return self.attend(*self.heads(x), own_mask(x, kind))

    plain, converted = twins(Masked)
    assert_fused(plain, converted, 12, 40, 7)


def test_tables_that_a_forward_makes_on_a_cpu() -> None:
    class Rope(Plain):
        def attn(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(x)
            width = C // H
            inverse = 10000 ** -(torch.arange(0, width, 2).to(x) / width)
            angle = torch.arange(x.size(1)).to(x)[:, None] * inverse
            cos, sin = (torch.cat((t, t), -1) for t in (angle.cos(), angle.sin()))
            q, k = (t * cos + torch.cat((-t[..., width // 2 :], t[..., : width // 2]), -1) * sin for t in (q, k))
            return self.attend(q, k, v)

    plain, converted = twins(Rope)
    assert_fused(plain, converted, 12, 40, 7)


class Rotary(nn.Module):
    """Turns what it is given by tables that it makes at each call."""

    def __init__(self, width: int, spelled: str) -> None:
        super().__init__()
        self.spelled = spelled
        self.register_buffer("inverse", 10000 ** -(torch.arange(0, width, 2) / width))

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.outer(torch.arange(x.size(-2), device=x.device).to(x.dtype), self.inverse)
        cos, sin = angle.cos(), angle.sin()
        a, b = x.chunk(2, -1)
        if self.spelled == "by the negated sine":
            return torch.cat((a * cos + b * sin, a * (-sin) + b * cos), -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@pytest.mark.parametrize("spelled", ["by the sine", "by the negated sine"])
def test_q_and_k_are_turned_by_tables_of_their_own(spelled: str) -> None:
    """A rotation that is called on each makes the same tables twice, which are made once."""

    class Rope(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.turn, self.other = Rotary(C // H, spelled), Rotary(C // H, spelled)

        def attn(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(x)
            return self.attend(self.turn(q), self.turn(k), v)

    class Apart(Rope):
        def attn(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(x)
            return self.attend(self.turn(q), self.other(k), v)

    plain, converted = twins(Rope)
    assert {layer.path for layer in ckptfused.convert(copy.deepcopy(plain)).layers} == {"fused"}
    assert_fused(plain, converted, 12, 40, 7)
    plain, converted = twins(Apart)
    for model in (plain, converted):
        for layer in model:
            layer.other.inverse.mul_(0.5)
    assert_alike(plain, converted, batch())


def test_a_number_that_a_layer_trains_first_is_no_width() -> None:
    class Numbered(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.ones(1))
            self.register_buffer("eps", torch.tensor(-1e-6))

        def ffn(self, x: Tensor) -> Tensor:
            h = self.up(self.n2(x))
            return self.down(
                torch.where(
                    h > 0, (self.by * h + 0.5) * h, (torch.expm1(torch.min(h, self.eps)) - h) * self.by + 0.5 * h
                )
            )  # type: ignore[no-any-return]

    torch.manual_seed(0)
    report = ckptfused.convert(nn.Sequential(*(Numbered() for _ in range(2))).double())
    assert [(layer.path, layer.after) for layer in report.layers] == [("fused", 8 * C)] * 2


class Settings:
    nothing = None
    names = ("a", "b")


def test_layers_of_one_kind_are_read_once() -> None:
    """Whatever their code finds outside: nothing of that is another for each of them."""

    def scale(self: Any) -> float:
        return 1.0 if Settings.nothing is None and Settings.names and config.by_class and _read(self) else 2.0

    _, converted = twins(with_scale(scale))
    converted(batch())
    first, second = (vars(layer)[calls.KNOWN].seen[0].kind for layer in converted)
    assert first is second


# One number that multiplies what a half adds, trained or not (ReZero).


class Numbers(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor([0.7]))
        self.register_buffer("c", torch.tensor(0.25))

    def attn_by(self, x: Tensor) -> Tensor:
        return self.a * self.attn(x)

    def ffn_by(self, x: Tensor) -> Tensor:
        return self.ffn(x) * self.b

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn_by(x)
        return x + self.ffn_by(x)


class OfParameters(Numbers):
    def attn_by(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a) * self.attn(x)

    def ffn_by(self, x: Tensor) -> Tensor:
        return self.ffn(x) * (self.b.exp() + self.a)


class Shared(Numbers):
    def ffn_by(self, x: Tensor) -> Tensor:
        return self.a * F.dropout(self.ffn(x), 0.0, self.training)


class OfABuffer(Numbers):
    def attn_by(self, x: Tensor) -> Tensor:
        return self.attn(x) * self.c


@pytest.mark.parametrize("cls", [Numbers, OfParameters, Shared, OfABuffer])
def test_a_number_multiplies_what_a_half_adds(cls: type[Numbers]) -> None:
    plain, converted = twins(cls)
    with unfused() as reasons:
        for value in (0.3, -2.0):
            with torch.no_grad():
                for model in (plain, converted):
                    for layer in model:
                        layer.a.fill_(value)
                        layer.c.fill_(value)
            found = []
            for model in (plain, converted):
                model.zero_grad()
                y = model(batch(40))
                y.square().sum().backward()
                found.append([y, *(p.grad for p in model.parameters())])
            for one, other in zip(*found, strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    torch.testing.assert_close(other, one, rtol=1e-8, atol=1e-9)
    assert not reasons
    assert {layer.path for layer in ckptfused.convert(copy.deepcopy(plain)).layers} == {"fused"}


class OfTheInput(Numbers):
    def attn_by(self, x: Tensor) -> Tensor:
        return self.a * x.mean() * self.attn(x)


class TimesX(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a * x + self.attn(x)
        return x + self.ffn(x)


class Cut(Numbers):
    def ffn_by(self, x: Tensor) -> Tensor:
        return self.ffn(x) * self.b.detach()


class OfAToken(Numbers):
    def attn_by(self, x: Tensor) -> Tensor:
        return self.attn(x) * self.a.expand(x.size(1), 1).cumsum(0)


class Squared(Numbers):
    def ffn_by(self, x: Tensor) -> Tensor:
        return (self.ffn(x) * self.b).square()


@pytest.mark.parametrize("cls", [OfTheInput, TimesX, Cut, OfAToken, Squared])
def test_other_numbers_are_as_they_are_written(cls: type[Numbers]) -> None:
    plain, converted = twins(cls)
    found = []
    for model in (plain, converted):
        y = model(batch())
        y.square().sum().backward()
        found.append([y, *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other, one, rtol=1e-8, atol=1e-9)
