"""Stochastic depth: a half is left out of some batch elements, by random numbers that the layer's own code draws."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ckptfused
from tests.models.derive.test_unseen import C, Plain
from tests.models.small import unfused

RATE = 0.4
SEED = 5


def timm(x: Tensor) -> Tensor:
    drawn = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - RATE)
    return x * drawn.div_(1 - RATE)


def transformers(x: Tensor) -> Tensor:
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    drawn = 1 - RATE + torch.rand(shape, dtype=x.dtype, device=x.device)
    drawn.floor_()
    return x.div(1 - RATE) * drawn


def torchvision(x: Tensor) -> Tensor:
    drawn = torch.empty([x.shape[0], 1, 1], dtype=x.dtype, device=x.device)
    drawn = drawn.bernoulli_(1 - RATE)
    drawn.div_(1 - RATE)
    return x * drawn


def torchvision_batch(x: Tensor) -> Tensor:
    drawn = torch.empty([1, 1, 1], dtype=x.dtype, device=x.device).bernoulli_(1 - RATE)
    return x * drawn.div_(1 - RATE)


def by_hand(x: Tensor) -> Tensor:
    return x * (torch.rand(x.shape[0], 1, 1, device=x.device) < 1 - RATE) / (1 - RATE)


def unscaled(x: Tensor) -> Tensor:
    return torch.bernoulli(torch.full((x.shape[0], 1, 1), 1 - RATE, dtype=x.dtype)) * x


SPELLINGS = [timm, transformers, torchvision, torchvision_batch, by_hand, unscaled]
every_spelling = pytest.mark.parametrize("drop", SPELLINGS, ids=[drop.__name__ for drop in SPELLINGS])


class Block(Plain):
    """A block either half of which may be left out."""

    def __init__(self, drop: Callable[[Tensor], Tensor], scaled: bool = False) -> None:
        super().__init__()
        self.drop = drop
        self.ls1, self.ls2 = (nn.Parameter(torch.rand(C) + 0.5) if scaled else None for _ in range(2))

    def scaled(self, x: Tensor, by: Tensor | None) -> Tensor:
        return x if by is None else x * by

    def left_out(self, x: Tensor) -> Tensor:
        return self.drop(x) if self.training else x

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.left_out(self.scaled(self.attn(x), self.ls1))
        return x + self.left_out(self.scaled(self.ffn(x), self.ls2))


def seed(model: nn.Module) -> None:
    """Seeds PyTorch's generator, and those that layers hold."""
    torch.manual_seed(SEED)
    for module in model.modules():
        if isinstance(own := getattr(module, "generator", None), torch.Generator):
            own.manual_seed(SEED)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The result and every gradient of a step with this seed, and where the generator stands then."""
    seed(model)
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    after = torch.get_rng_state()
    dy = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(8)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *model.parameters()], dy), after]


def pair(block: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(*(block() for _ in range(3))).to(dtype)
    converted = copy.deepcopy(plain)
    return plain, converted


@every_spelling
@pytest.mark.parametrize("keep", ["inputs", "all"])
def test_the_same_elements_are_left_out_as_without_conversion(drop: Callable[[Tensor], Tensor], keep: str) -> None:
    """After the same seed, in the result, in every gradient and for whoever draws next."""
    plain, converted = pair(lambda: Block(drop))
    report = ckptfused.convert(converted, keep=keep)
    assert [layer.path for layer in report.layers] == ["fused"] * 3
    x = torch.randn(6, 9, C, dtype=torch.float64)
    with unfused() as reasons:
        for _ in range(2):
            for a, b in zip(step(plain, x), step(converted, x), strict=True):
                torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)
        converted.eval()
        torch.testing.assert_close(converted(x), plain.eval()(x), rtol=1e-9, atol=1e-10)
    assert not reasons


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drop", [timm, transformers, by_hand])
def test_beside_layer_scale_in_the_type_of_training(drop: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    plain, converted = pair(lambda: Block(drop, scaled=True), dtype)
    report = ckptfused.convert(converted)
    assert [layer.path for layer in report.layers] == ["fused"] * 3
    x = torch.randn(6, 9, C).to(dtype)
    exact = step(copy.deepcopy(plain).double(), x.double())
    with unfused() as reasons:
        found = step(converted, x)
    assert not reasons
    for a, b, own in zip(exact[:-1], found, step(plain, x), strict=False):
        error, least = ((t.double() - a).norm() for t in (b, own))
        assert error <= 1.5 * least + 1e-6 * a.norm()  # as far from float64 as the plain block, within rounding


def test_elements_are_left_out_by_one_draw_each_call() -> None:
    """Not once for all layers of a kind: their draws differ, from call to call too."""
    _, converted = pair(lambda: Block(torchvision))
    ckptfused.convert(converted)
    x = torch.randn(64, 9, C, dtype=torch.float64)
    kept = []
    for layer in converted:
        for _ in range(2):
            y = layer(x)
            kept.append((y - x).flatten(1).abs().amax(1) > 0)
            assert 0.6 < kept[-1].double().mean() < 1  # 1 - 0.4², of 64
    assert len({tuple(one.tolist()) for one in kept}) == len(kept)


def test_numbers_that_both_halves_share_are_drawn_once() -> None:
    class Shared(Block):
        def forward(self, x: Tensor) -> Tensor:
            drawn = (torch.rand(x.shape[0], 1, 1, dtype=x.dtype, device=x.device) < 0.5).to(x.dtype)
            x = x + drawn * self.attn(x)
            return x + (1 - drawn) * self.ffn(x)

    plain, converted = pair(lambda: Shared(timm))
    report = ckptfused.convert(converted)
    assert [layer.path for layer in report.layers] == ["fused"] * 3
    x = torch.randn(6, 9, C, dtype=torch.float64)
    for a, b in zip(step(plain, x), step(converted, x), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)


def test_a_condition_that_is_dropped_at_random() -> None:
    """Vectors that shift and scale a norm's result (diffusers' DiT drops labels so)."""

    class Conditioned(Block):
        def __init__(self, drop: Callable[[Tensor], Tensor]) -> None:
            super().__init__(drop)
            self.table = nn.Embedding(2, 2 * C)

        def ffn(self, x: Tensor) -> Tensor:
            labels = (torch.rand(x.shape[0], device=x.device) < 0.5).long()
            scale, shift = self.table(labels)[:, None].chunk(2, -1)
            return self.down(F.gelu(self.up(self.n2(x) * (1 + scale) + shift)))  # type: ignore[no-any-return]

    plain, converted = pair(lambda: Conditioned(timm))
    assert [layer.path for layer in ckptfused.convert(converted).layers] == ["fused"] * 3
    x = torch.randn(6, 9, C, dtype=torch.float64)
    torch.manual_seed(SEED)
    kept = converted(x)
    assert not torch.equal(kept, converted(x))
    for model in (plain, converted):
        torch.testing.assert_close(*slopes(model, x), rtol=1e-6, atol=1e-7)


class MaskDropped(Block):
    def attn(self, x: Tensor) -> Tensor:
        seen = torch.rand(x.shape[0], 1, x.shape[1], x.shape[1]) < 0.8
        return self.attend(*self.heads(x), seen | torch.eye(x.shape[1], dtype=torch.bool))


class Noisy(Block):
    def ffn(self, x: Tensor) -> Tensor:
        return super().ffn(x + 0.1 * torch.rand(x.shape, dtype=x.dtype))


class OwnGenerator(Block):
    """Its numbers come from a generator of its own, of which a recording would have a copy."""

    def __init__(self, drop: Callable[[Tensor], Tensor]) -> None:
        super().__init__(drop)
        self.generator = torch.Generator().manual_seed(3)

    def left_out(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape[0], 1, 1, generator=self.generator) < 0.6)


class Normal(Block):
    def left_out(self, x: Tensor) -> Tensor:
        return x * torch.randn(x.shape[0], 1, 1, dtype=x.dtype)


@pytest.mark.parametrize("cls", [MaskDropped, Noisy, OwnGenerator, Normal])
def test_other_random_numbers_are_the_layers_own(cls: type[Block]) -> None:
    """No op is given them; what is not fused draws them, in another order where one half is."""
    plain, converted = pair(lambda: cls(timm))
    report = ckptfused.convert(converted)
    assert all(layer.path in ("generic", "part") for layer in report.layers)
    x = torch.randn(6, 9, C, dtype=torch.float64)
    for model in (plain, converted):
        torch.testing.assert_close(*slopes(model, x), rtol=1e-6, atol=1e-7)
    draws = {tuple(converted(x).flatten().tolist()) for _ in range(3)}
    assert len(draws) == 3


def slopes(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The slope of a step along one direction of x, by gradients and by differences: with the same numbers drawn."""
    y, dx, *_ = step(model, x)
    dy = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    along = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    ends = []
    for by in (-1e-6, 1e-6):
        seed(model)
        with torch.no_grad():
            ends.append((model(x + by * along) * dy).sum())
    return (dx * along).sum(), (ends[1] - ends[0]) / 2e-6


class Told(Block):
    """It sees some of the keys that it is told to see."""

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:  # type: ignore[override]
        seen = seen & (torch.rand(seen.shape, device=x.device) < 0.8) | torch.eye(x.shape[1], dtype=torch.bool)
        x = x + self.attend(*self.heads(x), seen)
        return x + self.ffn(x)


def test_a_mask_that_is_drawn_is_another_at_each_call() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(Told(timm) for _ in range(2)).double()
    ckptfused.convert(layers)
    x, seen = torch.randn(2, 9, C, dtype=torch.float64), torch.ones(2, 1, 9, 9, dtype=torch.bool)
    first, second = (layers[0](x, seen) for _ in range(2))
    assert not torch.equal(first, second)


def test_a_step_within_a_checkpoint_draws_the_same_again() -> None:
    plain, converted = pair(lambda: Block(timm))
    ckptfused.convert(converted)
    x = torch.randn(6, 9, C, dtype=torch.float64)

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    for a, b in zip(step(plain, x), step(Outer(converted), x), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)


def alone_high(x: Tensor) -> Tensor:
    """One number for all, kept where it is high."""
    return x * torch.floor(0.6 + torch.rand(1, 1, 1, dtype=x.dtype)) / 0.6


def alone_low(x: Tensor) -> Tensor:
    return x * (torch.rand(1) < 0.6) / 0.6


def three_ways(x: Tensor) -> Tensor:
    """Kept between two numbers: of none of those at which it is proved."""
    drawn = torch.rand(x.shape[0], 1, 1, dtype=x.dtype)
    return x * ((drawn >= 0.4) & (drawn < 0.6))


class Rearranged(Block):
    """Its MLP's hidden values are in another order, which a proof that leaves it out would not see."""

    def ffn(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(self.n2(x)))
        return self.down(h.transpose(1, 2).reshape(h.shape))  # type: ignore[no-any-return]


class Forked(Block):
    """Its numbers are those of a seed, at each call."""

    def left_out(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return x * (torch.rand(x.shape[0], 1, 1, dtype=x.dtype) < 0.6)


class Seeded(Block):
    def left_out(self, x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return x * (torch.rand(x.shape[0], 1, 1, dtype=x.dtype) < 0.6)


class PutBack(Block):
    """The generator stands afterwards where it stood."""

    def left_out(self, x: Tensor) -> Tensor:
        before = torch.get_rng_state()
        drawn = torch.rand(x.shape[0], 1, 1, dtype=x.dtype) < 0.6
        torch.set_rng_state(before)
        return x * drawn


class RatesOfATensor(Block):
    def left_out(self, x: Tensor) -> Tensor:
        rates = torch.linspace(0.3, 0.9, x.shape[0], dtype=x.dtype)[:, None, None]
        return x * torch.empty_like(rates).bernoulli_(rates)


class SharedWithTheRest(Block):
    """Both halves have the same numbers; one of them is no half of a block."""

    def forward(self, x: Tensor) -> Tensor:
        drawn = (torch.rand(x.shape[0], 1, 1, dtype=x.dtype) < 0.5).to(x.dtype)
        x = x + drawn * self.attn(x).cumsum(-1)
        return x + drawn * self.ffn(x)


UNSEEN: dict[str, Callable[[], Block]] = {
    "one number, kept where it is high": lambda: Block(alone_high),
    "one number, kept where it is low": lambda: Block(alone_low),
    "kept between two numbers": lambda: Block(three_ways),
    "rearranged, one number": lambda: Rearranged(alone_high),
    "rearranged": lambda: Rearranged(timm),
    "rearranged, kept between": lambda: Rearranged(three_ways),
    "a seed": lambda: Seeded(timm),
    "a seed for a while": lambda: Forked(timm),
    "a state that is put back": lambda: PutBack(timm),
    "rates of a tensor": lambda: RatesOfATensor(timm),
    "shared with the rest": lambda: SharedWithTheRest(timm),
}


@pytest.mark.parametrize("block", UNSEEN.values(), ids=UNSEEN)
def test_what_a_proof_may_not_see(block: Callable[[], Block]) -> None:
    plain, converted = pair(block)
    ckptfused.convert(converted)
    for rows in (6, 1):
        x = torch.randn(rows, 9, C, dtype=torch.float64)
        for a, b in zip(step(plain, x), step(converted, x), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)


def test_a_half_that_nothing_is_seen_of_is_not_fused() -> None:
    for block, path in ((three_ways, "generic"), (alone_high, "fused"), (alone_low, "fused")):
        _, converted = pair(lambda block=block: Block(block))  # type: ignore[misc]
        assert [layer.path for layer in ckptfused.convert(converted).layers] == [path] * 3
