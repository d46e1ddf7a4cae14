"""Layers of which one half is derived and the other runs as it is written: mixtures of experts."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ckptfused
from ckptfused.models import steps
from tests.models.compare import close
from tests.models.derive.experts import EXPERTS, FUSED_TOO
from tests.models.derive.written import HALVED, made
from tests.models.dropout_oracle import RecordStates, with_masks
from tests.models.small import unfused
from tests.models.zoo import Sites


class Stack(nn.Module):
    """Two blocks, and what their routers said."""

    def __init__(self, source: str = EXPERTS, p: float = 0.0) -> None:
        super().__init__()
        block = made(source, p=p).double()
        self.layers = nn.ModuleList([block, copy.deepcopy(block)])
        self.heard: list[Tensor] = []
        for parameter in self.layers[1].parameters():
            nn.init.normal_(parameter, 0.3, 0.3)

    def listen(self) -> None:
        """Has hooks collect the logits of routers, as an auxiliary loss does."""
        for layer in self.layers:
            layer.moe.router.register_forward_hook(lambda module, args, y: self.heard.append(y))  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        self.heard.clear()
        for layer in self.layers:
            x = layer(x)
        return x


def step(model: Stack, tokens: int = 9) -> dict[str, Tensor]:
    """The result of a model and all gradients, those of the auxiliary loss among them."""
    x = torch.randn(2, tokens, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)  # a fused half that drops nothing draws nothing
    y = model(x)
    heard = len(model.heard)
    (y.square().mean() + sum(logits.logsumexp(-1).square().mean() for logits in model.heard)).backward()
    made = {"y": y.detach(), "x": x.grad, "heard": torch.tensor(float(heard))}
    return made | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}  # type: ignore[dict-item]


def twins(source: str = EXPERTS, p: float = 0.0) -> tuple[Any, Any]:
    """A model and its converted copy."""
    plain = Stack(source, p)
    converted = copy.deepcopy(plain)
    report = ckptfused.convert(converted)
    assert [(layer.family, layer.path) for layer in report.layers] == [("derived", "part")] * 2, str(report)
    assert "nonzero of a tensor" in report.layers[0].reason
    return plain, converted


def same(plain: Any, converted: Any, fused: int = 2, tokens: int = 9) -> None:
    with unfused() as reasons:
        got = step(converted, tokens)
    assert 2 - len(reasons) == fused, reasons
    close(got, step(plain, tokens), 1e-10)


def draws_at(plain: Any, converted: Any, sites: Sites, replayed: Sequence[int] = ()) -> None:
    """The fused half's dropout has the masks of these sites of its op. replayed: as `RecordStates`."""
    with RecordStates(replayed) as recorded:
        got = step(converted)
    with with_masks(list(plain.layers), recorded.states, lambda layer: sites):
        want = step(plain)
    close(got, want, 1e-10)


def replays_its_draws(converted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of what is checkpointed are those of the same draws, not replayed."""
    got = step(converted)
    monkeypatch.setattr(steps, "checkpointed", lambda layer, step, x: step.function(x, *step.args))
    close(got, step(converted), 1e-12)


@pytest.mark.parametrize(("old", "new"), [("nothing", "else"), *FUSED_TOO])
def test_the_attention_half_is_derived(old: str, new: str) -> None:
    plain, converted = twins(EXPERTS.replace(old, new))
    for tokens in (9, 14):
        same(plain, converted, tokens=tokens)
    converted.eval()
    same(plain.eval(), converted)
    with torch.no_grad():
        x = torch.randn(2, 9, 24, dtype=torch.float64)
        torch.testing.assert_close(converted(x), plain(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("keep", ["inputs", "all"])
def test_the_router_is_called_once_and_heard(keep: str) -> None:
    plain = Stack()
    converted = copy.deepcopy(plain)
    plain.listen()
    converted.listen()
    ckptfused.convert(converted, keep=keep)
    same(plain, converted)
    assert len(plain.heard) == 2 and step(converted)["heard"] == 2


NOTING = """        logits = self.router(flat)
        self.count.add_(1)
        self.noise.normal_(generator=self.generator)
        self.said.append(1)
        random.random(), np.random.rand()
"""


def test_reading_leaves_no_trace() -> None:
    """What the module that is not followed counts, draws and notes, it does once a call."""
    source = "import random\nimport numpy as np\n" + EXPERTS.replace("        logits = self.router(flat)\n", NOTING)
    plain = Stack(source)
    for layer in plain.layers:
        moe: Any = layer.moe
        moe.register_buffer("count", torch.zeros(()))
        moe.noise, moe.generator, moe.said = torch.zeros(3), torch.Generator(), []
    converted = copy.deepcopy(plain)
    for layer in converted.layers:
        layer.moe.generator = torch.Generator()  # type: ignore[union-attr]
    drawn: list[Any] = []
    for model in (plain, converted):
        random.seed(1), np.random.seed(1)  # type: ignore[func-returns-value]
        if model is converted:
            ckptfused.convert(model)
        for tokens in (9, 14, 9):
            step(model, tokens)
        drawn.append((random.random(), np.random.rand()))
        for layer in model.layers:
            moe = layer.moe
            assert (float(moe.count), len(moe.said)) == (3, 3)
    assert drawn[0] == drawn[1]
    for one, other in zip(plain.layers, converted.layers, strict=True):
        assert torch.equal(one.moe.noise, other.moe.noise)  # type: ignore[union-attr,arg-type]


def test_reading_calls_no_other_ranks(tmp_path: Path) -> None:
    """They read at another time, or not at all."""
    summed = EXPERTS.replace(
        "logits = self.router(flat)", "logits = self.router(flat); dist.all_reduce(logits.detach())"
    )
    converted = Stack("import torch.distributed as dist\n" + summed)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert [layer.path for layer in ckptfused.convert(converted).layers] == ["generic"] * 2
    finally:
        dist.destroy_process_group()


def test_hooks_within_the_fused_half_are_not_stepped_over() -> None:
    plain, converted = twins()
    for model in (plain, converted):
        for layer in model.layers:
            layer.ln_2.register_forward_hook(lambda module, args, y: 2 * y)
    same(plain, converted)
    for model in (plain, converted):
        model.layers[0].attn.c_proj.register_forward_hook(lambda module, args, y: 3 * y)
    same(plain, converted, fused=1)


def test_what_is_made_without_gradients_is_so_again() -> None:
    ungraded = "with torch.no_grad(): z = 2 * h\n        return x + self.gain * (h + z)"
    plain = Stack(EXPERTS.replace("return x + self.gain * h", ungraded))
    converted = copy.deepcopy(plain)
    assert [layer.path for layer in ckptfused.convert(converted).layers] == ["part"] * 2
    same(plain, converted)


@pytest.mark.parametrize(
    "change",
    [
        ("return x + self.gain * h", "return x + self.gain * Halved.apply(h)"),
        ("return x + self.gain * h", "return x + self.gain * h if x.size(1) < 9 else x - h"),
        ("x = x + self.attn(self.ln_1(x))", "z = x; x = x + self.attn(self.ln_1(x)); x = x + 0.1 * z"),
        ("x = x + self.attn(self.ln_1(x))", "x = self.ln_1(x) + self.attn(self.ln_1(x))"),
        ("h, _ = self.moe(self.ln_2(x))", "h, _ = self.moe.forward(self.ln_2(x))"),
        ("h, _ = self.moe(self.ln_2(x))", "h, r = self.moe(self.ln_2(x)); h = h * r.mean()"),
    ],
    ids=["halved", "another length", "x again", "another stream", "no call", "logits"],
)
def test_what_cannot_be_called_again_is_generic(change: tuple[str, str]) -> None:
    plain = Stack(HALVED + EXPERTS.replace(*change))
    converted = copy.deepcopy(plain)
    assert [layer.path for layer in ckptfused.convert(converted).layers] == ["generic"] * 2
    same(plain, converted, fused=0)


def test_what_changes_is_seen() -> None:
    plain, converted = twins()
    same(plain, converted)
    for model in (plain, converted):
        model.layers[0].attn.heads = 2
        model.layers[1].moe.experts.append(copy.deepcopy(model.layers[1].moe.experts[0]))
        model.layers[1].gain = nn.Parameter(torch.ones(24, dtype=torch.float64))
    same(plain, converted)


def test_dropout_of_the_fused_half_draws_at_its_sites() -> None:
    source = EXPERTS.replace("MoE(width, 4, p)", "MoE(width, 4, 0.0)")
    draws_at(*twins(source, p=0.2), sites=((0, 0), (0, 1)))


def test_dropout_of_the_other_half_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    replays_its_draws(twins(p=0.2)[1], monkeypatch)


def test_a_module_that_returns_something_else_than_was_read_is_an_error() -> None:
    _, converted = twins()
    for layer in converted.layers:
        layer.moe.register_forward_hook(lambda module, args, y: (*y, y[0]))
    with pytest.raises(RuntimeError, match="module:moe gave 3 tensors, expected 2 as when it was read"):
        step(converted)
