"""Blocks whose x is [T, B, C], as PyTorch's `MultiheadAttention` has it by default, are one op on x as it lies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ckptfused
from ckptfused.models.derive.derive import derive
from ckptfused.spec import parse
from tests.models.small import unfused

C, H = 24, 4


class Block(nn.Module):
    """Norms before the halves, `nn.MultiheadAttention` (OpenAI's CLIP)."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.attn = nn.MultiheadAttention(C, H, dropout=p)
        self.up, self.down, self.drop = nn.Linear(C, 48), nn.Linear(48, C), nn.Dropout(p)

    def attend(self, n: Tensor, mask: Tensor | None, pad: Tensor | None) -> Tensor:
        return self.attn(n, n, n, need_weights=False, attn_mask=mask, key_padding_mask=pad)[0]  # type: ignore[no-any-return]

    def ffn(self, n: Tensor) -> Tensor:
        return self.drop(self.down(self.drop(F.gelu(self.up(n)))))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, mask: Tensor | None = None, pad: Tensor | None = None) -> Tensor:
        x = x + self.drop(self.attend(self.n1(x), mask, pad))
        return x + self.ffn(self.n2(x))


class PostNorm(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None, pad: Tensor | None = None) -> Tensor:
        x = self.n1(x + self.drop(self.attend(x, mask, pad)))
        return self.n2(x + self.ffn(x))  # type: ignore[no-any-return]


class Returning(Block):
    """It returns a tuple (fairseq)."""

    def forward(self, x: Tensor, mask: Tensor | None = None, pad: Tensor | None = None) -> Any:
        return super().forward(x, mask, pad), None


class ByHand(Block):
    """Heads folded into the batch, a causal mask of its own."""

    def attend(self, n: Tensor, mask: Tensor | None, pad: Tensor | None) -> Tensor:
        T, B, _ = n.shape
        q, k, v = F.linear(n, self.attn.in_proj_weight, self.attn.in_proj_bias).chunk(3, -1)
        q, k, v = (t.contiguous().view(T, B * H, C // H).transpose(0, 1) for t in (q, k, v))
        scores = torch.bmm(q * (C // H) ** -0.5, k.transpose(1, 2))
        scores = scores + torch.full((T, T), -torch.inf, device=n.device).triu(1)
        probs = F.dropout(scores.softmax(-1), self.attn.dropout, self.training)
        return self.attn.out_proj(torch.bmm(probs, v).transpose(0, 1).reshape(T, B, C))  # type: ignore[no-any-return]


def masks(kind: str, tokens: int, batch: int) -> dict[str, Tensor]:
    hidden = torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(1)) < 0.3
    hidden.fill_diagonal_(False)
    lengths = torch.arange(batch).remainder(3)
    pad = torch.arange(tokens) >= tokens - lengths[:, None]
    of_all = {
        "none": {},
        "bool": {"mask": hidden},
        "float": {"mask": torch.zeros(tokens, tokens, dtype=torch.float64).masked_fill(hidden, -torch.inf)},
        "padding": {"pad": pad},
        "each head": {"mask": hidden.expand(batch * H, tokens, tokens).contiguous()},
    }
    return of_all[kind]


def step(layers: nn.ModuleList, x: Tensor, given: dict[str, Tensor]) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    y: Any = leaf
    for layer in layers:
        y = layer(y, **given)
        y = y[0] if isinstance(y, tuple) else y
    dy = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(8)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *layers.parameters()], dy)]


def pair(cls: type[Block], **options: Any) -> tuple[nn.ModuleList, nn.ModuleList]:
    torch.manual_seed(0)
    plain = nn.ModuleList(cls() for _ in range(2)).double()
    converted = copy.deepcopy(plain)
    report = ckptfused.convert(converted, **options)
    assert [layer.family for layer in report.layers] == ["derived"] * 2
    return plain, converted


@pytest.mark.parametrize("cls", [Block, PostNorm, Returning])
@pytest.mark.parametrize("kind", ["none", "bool", "float", "padding", "each head"])
def test_masks(cls: type[Block], kind: str) -> None:
    plain, converted = pair(cls)
    with unfused() as reasons:
        for tokens, batch in ((9, 4), (6, 2), (5, 11)):
            x, given = torch.randn(tokens, batch, C, dtype=torch.float64), masks(kind, tokens, batch)
            assert not derive(plain[0], (x,), given).why
            for a, b in zip(step(plain, x, given), step(converted, x, given), strict=True):
                torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)
    assert not reasons


@pytest.mark.parametrize("keep", ["inputs", "all"])
@pytest.mark.parametrize("shape", [(9, 2), (2, 9), (300, 1), (7, 7)])
def test_a_causal_mask_of_its_own(keep: str, shape: tuple[int, int]) -> None:
    """At every shape, the one where neither dimension tells which it is among them; one token a sequence says less than
    two, one sequence is taken for one token.
    """
    plain, converted = pair(ByHand, keep=keep)
    x = torch.randn(*shape, C, dtype=torch.float64)
    with unfused() as reasons:
        for a, b in zip(step(plain, x, {}), step(converted, x, {}), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)
    assert bool(reasons) == (shape[1] == 1)


@pytest.mark.parametrize("cls", [Block, PostNorm, ByHand])
def test_every_dropout_is_where_it_was(cls: type[Block]) -> None:
    found = derive(cls(0.3), (torch.randn(9, 4, C),), {})
    assert found.proof is not None and not found.why
    spec = parse(found.proof.text)
    assert (spec.attn.p_attn, spec.attn.p_res, spec.ffn.p_hidden, spec.ffn.p_res) == (0.3,) * 4  # type: ignore[union-attr]
    assert found.layout.seq_first and max(found.proof.errors.values()) < 1e-12


def test_it_keeps_one_input_as_it_lies() -> None:
    _, converted = pair(Block)
    x = torch.randn(9, 4, C, dtype=torch.float64, requires_grad=True)
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        converted[0](x)
    assert [t.data_ptr() == x.data_ptr() for t in kept if t.shape == x.shape] == [True]
    assert sum(t.numel() for t in kept if not isinstance(t, nn.Parameter) and t.shape != x.shape) < x.numel()


class OfBoth(Block):
    """Attention over the first dimension, then over the second."""

    def forward(self, x: Tensor, mask: Tensor | None = None, pad: Tensor | None = None) -> Tensor:
        x = x + self.attend(self.n1(x), mask, pad)
        return x + self.attend(self.n2(x).transpose(0, 1), mask, pad).transpose(0, 1)


class Shifted(Block):
    """Tokens of the first dimension attend, those of the second are mixed."""

    def ffn(self, n: Tensor) -> Tensor:
        return super().ffn(n.roll(1, 1))


class SeenByValue(Block):
    """Its padding is where x is small: made of an x that the op is given the other way round."""

    def forward(self, x: Tensor, mask: Tensor | None = None, pad: Tensor | None = None) -> Tensor:
        small = x[:, :, 0].abs() < 0.3
        return super().forward(x, None, (small & (x[:1, :, 0] != x[:, :, 0])).t())


@pytest.mark.parametrize("cls", [OfBoth, Shifted, SeenByValue])
def test_what_is_not_such_a_block_runs_as_written(cls: type[Block]) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList(cls() for _ in range(2)).double()
    for layer in plain if cls is OfBoth else ():
        del layer.up, layer.down
    converted = copy.deepcopy(plain)
    assert all(layer.path != "fused" for layer in ckptfused.convert(converted).layers)
    x = torch.randn(9, 4, C, dtype=torch.float64)
    for a, b in zip(step(plain, x, {}), step(converted, x, {}), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)


class Scaled(Block):
    """LayerScale of shape [1, 1, C], a parameter or a buffer."""

    def __init__(self, p: float = 0.0, buffer: bool = False) -> None:
        super().__init__(p)
        scale = torch.rand(1, 1, C) + 0.5
        if buffer:
            self.register_buffer("scale", scale)
        else:
            self.scale = nn.Parameter(scale)

    def forward(self, x: Tensor, mask: Tensor | None = None, pad: Tensor | None = None) -> Tensor:
        x = x + self.scale * self.attend(self.n1(x), mask, pad)
        return x + self.scale * self.ffn(self.n2(x))


@pytest.mark.parametrize("buffer", [False, True])
def test_a_scale_of_three_dimensions(buffer: bool) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList(Scaled(buffer=buffer) for _ in range(2)).double()
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    x = torch.randn(9, 4, C, dtype=torch.float64)
    with unfused() as reasons:
        for a, b in zip(step(plain, x, {}), step(converted, x, {}), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)
    assert bool(reasons) == buffer
