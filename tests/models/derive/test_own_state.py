"""What a layer's forward writes beside its result, and what it reads of tensors beside values: it runs as written."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ckptfused
from ckptfused.models.derive.derive import derive
from tests.models.compare import close
from tests.models.small import unfused


class Noted:
    """An object with slots."""

    __slots__ = ("loss",)

    def __init__(self) -> None:
        self.loss = torch.tensor(0.0)


class Block(nn.Module):
    """A pre-norm block that does something of its own with the MLP's result."""

    def __init__(self, note: Callable[[Any, Tensor], None] | None = None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(24), nn.LayerNorm(24)
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
        self.up, self.down = nn.Linear(24, 96), nn.Linear(96, 24)
        self.note = [note]
        self._loss: Any = torch.tensor(0.0)
        self.held: dict[str, Any] = {"loss": torch.tensor(0.0), "inner": [[torch.tensor(0.0)]]}
        self.slots, self.counter, self._calls = Noted(), Counter({"calls": 0}), 0
        self.register_buffer("_seen", torch.zeros(()))

    def attend(self, x: Tensor, **masks: Any) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 6)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, **masks).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x, is_causal=True)
        h = self.down(F.gelu(self.up(self.norm2(x))))
        if self.note[0] is not None:
            self.note[0](self, h)
        return x + (0.5 if 1 < self._calls < 4 else 1.0) * h


def private(block: Any, h: Tensor) -> None:
    block._loss = h.square().mean()


def in_a_dict(block: Any, h: Tensor) -> None:
    block.held["loss"] = h.square().mean()


def in_a_list_of_lists(block: Any, h: Tensor) -> None:
    block.held["inner"][0][0] = h.square().mean()


def in_a_slot(block: Any, h: Tensor) -> None:
    block.slots.loss = h.square().mean()


def in_a_private_buffer(block: Any, h: Tensor) -> None:
    block._seen = block._seen + h.size(0)


def in_a_counter(block: Any, h: Tensor) -> None:
    block.counter["calls"] += 1


def of_a_weight(block: Any, h: Tensor) -> None:
    block.up.weight.seen = getattr(block.up.weight, "seen", 0) + 1


def calls(block: Any, h: Tensor) -> None:
    block._calls += 1


def on_a_projection(block: Any, h: Tensor) -> None:
    block.out.last = h.square().mean()


def mode_of_a_norm(block: Any, h: Tensor) -> None:
    block.norm1.train(not block.norm1.training)


def losses(block: Any) -> Tensor:
    """All that a block may have noted."""
    noted = block._loss + block.held["loss"] + block.held["inner"][0][0] + block.slots.loss + block._seen
    noted = noted + getattr(block.out, "last", 0) + block.norm1.training
    return noted + block.counter["calls"] + getattr(block.up.weight, "seen", 0) + block._calls


@pytest.mark.parametrize(
    "note",
    [
        *(private, in_a_dict, in_a_list_of_lists, in_a_slot, in_a_private_buffer, in_a_counter, of_a_weight, calls),
        *(on_a_projection, mode_of_a_norm),
    ],
)
def test_what_a_forward_notes_is_noted(note: Callable[[Any, Tensor], None]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Block(note), Block(note)).double()
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    for step in range(5):
        x = torch.randn(2, 12, 24, generator=torch.Generator().manual_seed(step)).double()
        found = []
        for model in (plain, converted):
            model.zero_grad()
            y = model(x)
            noted = torch.stack([losses(block) for block in model]).sum()
            (y.square().mean() + 10 * noted).backward()
            found.append({"y": y.detach(), "noted": noted.detach()} | {n: p.grad for n, p in model.named_parameters()})
        close(found[1], found[0], 1e-10)  # type: ignore[arg-type]


class Scaled(nn.Linear):
    """A projection that its weight's own number scales."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self.weight, "gain", 1.0)


def tagged(block: nn.Module) -> nn.Module:
    """The block with such a projection."""
    block.out = Scaled(24, 24)
    return block


@pytest.mark.parametrize("when", ["before", "after a step", "another"])
def test_a_number_that_a_weight_has_is_read(when: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(tagged(Block()), tagged(Block())).double()
    if when == "another":
        plain[1].out.weight.gain = 0.25
    if when == "before":
        plain[0].out.weight.gain = plain[1].out.weight.gain = 0.25
    converted = copy.deepcopy(plain)
    for model in (plain, converted):
        for block, same in zip(model, plain, strict=True):
            block.out.weight.__dict__.update(vars(same.out.weight))  # a copy has none
    ckptfused.convert(converted)
    x = torch.randn(2, 12, 24).double()
    for gain in (None, 0.5):
        for model in (plain, converted):
            if when == "after a step" and gain:
                model[0].out.weight.gain = gain
        torch.testing.assert_close(converted(x), plain(x), rtol=1e-10, atol=1e-10)


def test_names_that_no_code_reads_change_nothing() -> None:
    layer = Block().double()
    for p in layer.parameters():
        p.main_grad = torch.zeros_like(p)  # type: ignore[attr-defined]
    x = torch.randn(2, 12, 24).double().requires_grad_()
    assert derive(layer, (x,), {}).why == ""
    model = nn.ModuleList([layer])
    ckptfused.convert(model)
    with unfused() as reasons:
        for _ in range(3):
            model[0](x).sum().backward()
            for p in layer.parameters():
                p.main_grad += p.grad  # type: ignore[attr-defined]
    assert not reasons


class Told(Block):
    """A block that its input, or its mask, tells whether it is causal."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        causal = getattr(x if mask is None else mask, "causal", False)
        x = x + self.attend(x, is_causal=causal)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@pytest.mark.parametrize("masked", [False, True])
def test_an_attribute_of_an_argument_is_read(masked: bool) -> None:
    plain = Told().double()
    converted = nn.ModuleList([copy.deepcopy(plain)])
    ckptfused.convert(converted)
    for causal in (False, True, False):
        x, mask = torch.randn(2, 12, 24).double(), torch.ones(12, 12) if masked else None
        (x if mask is None else mask).causal = causal  # type: ignore[attr-defined]
        torch.testing.assert_close(converted[0](x, mask), plain(x, mask), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("part", ["up", "norm2"])
def test_what_is_scripted_stays_as_it_is(part: str) -> None:
    plain = Block().double()
    setattr(plain, part, torch.jit.script(getattr(plain, part)))
    model = nn.ModuleList([plain])
    ckptfused.convert(model)
    x = torch.randn(2, 12, 24).double().requires_grad_()
    for _ in range(3):
        model[0](x).square().mean().backward()
    model.eval()
    with torch.no_grad():
        model[0](x)
    assert x.grad is not None and plain.qkv.weight.grad is not None


class Masked(Block):
    """A block with a mask."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attend(x, attn_mask=mask)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@pytest.mark.parametrize("tokens", [12, 300])
def test_a_mask_that_was_made_in_inference_mode(tokens: int) -> None:
    with torch.inference_mode():
        mask = torch.rand(tokens, tokens) < 0.7
        mask.fill_diagonal_(True)
    layer = Masked().double()
    converted = nn.ModuleList([copy.deepcopy(layer)])
    ckptfused.convert(converted)
    found = []
    for one in (layer, converted[0]):
        x = torch.randn(2, tokens, 24, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
        with unfused() as reasons:
            one(x, mask.clone() if one is layer else mask).square().mean().backward()
        assert not reasons
        found.append({"x": x.grad} | {n: p.grad for n, p in one.named_parameters()})
    close(found[1], found[0], 1e-10)  # type: ignore[arg-type]
