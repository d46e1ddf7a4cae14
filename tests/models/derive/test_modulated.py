"""Blocks that a vector for each batch element modulates (DiT's adaLN) are one op, with the gradient of that vector."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptfused
from ckptfused.layer.parts import Reason
from ckptfused.layer.spec_text import Mode
from ckptfused.models.derive.derive import derive
from ckptfused.models.derive.family import DERIVED
from tests.models.derive.modulated import DIT, MODULATED
from tests.models.derive.others import called
from tests.models.derive.written import HALVED, made

LINE = "a, b, g, d, e, h = self.adaLN(cond).chunk(6, dim=1)"
KINDS = pytest.mark.parametrize("kind", MODULATED)


BOTH = "attn.modulated=1 ffn.modulated=1 attn.joint=1"
SCALED = f"{BOTH} attn.post=layerscale ffn.post=layerscale"
WORDS = {
    **{"sandwich": f"{BOTH} attn.post=rmsnorm ffn.post=rmsnorm"},
    **dict.fromkeys(("single", "joint"), f"{SCALED} parallel=shared"),
}
"""What is said of a block, where it is not `SCALED`."""


@KINDS
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_they_are_derived(kind: str, p: float) -> None:
    source = MODULATED[kind]
    found = derive(made(source, p=p), called(source), {})
    assert found.proof is not None, found.why
    words, shared = {*found.proof.text.split()}, "parallel=shared" in found.proof.text
    assert {*WORDS.get(kind, SCALED).split()} <= words
    assert ("ffn.p_hidden=0.1" in words) == ("attn.p_attn=0.1" in words) == (p > 0)
    assert ("attn.p_res=0.1" in words) == (p > 0 and kind in {*MODULATED} - {*WORDS})
    assert [one.stem for one in found.layout.vectors] == ["attn.pre", "attn.post", *["ffn.pre"][shared:], "ffn.post"]
    assert max(found.proof.errors.values()) < 1e-12


@pytest.mark.parametrize("tokens", [6, 24])
@pytest.mark.parametrize("batch", [2, 24])
@pytest.mark.parametrize("form", ["[B, C]", "[B, 1, C]", "[B, 6, C]", "[B]"])
def test_lengths_that_are_those_of_something_else(form: str, batch: int, tokens: int) -> None:
    """Its forward says what a condition is: x is as long as wide, as the batch, or as there are vectors."""
    if form == "[B, 1, C]":
        source = DIT.replace("self.adaLN(cond).chunk", "self.adaLN(cond[:, 0]).chunk")
    elif form == "[B, 6, C]":
        source = DIT.replace("self.adaLN(cond).chunk(6, dim=1)", "cond.unbind(1)")
    elif form == "[B]":
        source = DIT.replace("nn.Sequential(nn.SiLU(),", "nn.Sequential(nn.Embedding(99, width), nn.SiLU(),")
    else:
        source = DIT
    x, cond = called(DIT, tokens=tokens, batch=batch)
    given = {"[B, C]": cond, "[B, 1, C]": cond[:, None], "[B, 6, C]": cond[:, None].repeat(1, 6, 1)}
    found = derive(made(source), (x, given.get(form, torch.arange(batch))), {})
    assert found.proof is not None, found.why


@pytest.mark.parametrize("tokens", [7, 10, 22, 40])
def test_two_conditions_that_are_alike_are_no_tables(tokens: int) -> None:
    """Though they have an even width, and a few rows fewer than there are tokens."""
    source = DIT.replace(LINE, "a, b, g, d, e, h = (self.one(cond) + self.two(also)).unbind(1)")
    source = source.replace("def forward(self, x, cond)", "def forward(self, x, cond, also)").replace(
        "self.adaLN = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))",
        "self.one, self.two = nn.Linear(16, width), nn.Linear(16, width)",
    )
    x, _ = called(DIT, tokens=tokens)
    found = derive(made(source), (x, torch.randn(2, 6, 16), torch.randn(2, 6, 16)), {})
    assert found.proof is not None, found.why


def test_a_condition_by_index() -> None:
    """Labels [B], of which the layer makes its vectors itself."""
    source = DIT.replace("nn.Sequential(nn.SiLU(),", "nn.Sequential(nn.Embedding(10, width), nn.SiLU(),")
    x, _ = called(DIT)
    found = derive(made(source), (x, torch.tensor([3, 8])), {})
    assert found.proof is not None, found.why


class Stack(nn.Module):
    """Layers that one condition modulates, and a call of theirs."""

    def __init__(self, source: str, layers: int = 3, p: float = 0.0) -> None:
        super().__init__()
        block = made(source, p=p)
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(layers))
        torch.manual_seed(5)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        """The last layer's result."""
        for block in self.blocks:
            x = block(x, cond)
        return x


def step(model: nn.Module, x: Tensor, cond: Tensor) -> list[Tensor]:
    """The result and every gradient, that of the condition among them."""
    leaves = [x.detach().requires_grad_(), cond.detach().requires_grad_()]
    y = model(*leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [*leaves, *model.parameters()], dy)]


def converted(model: nn.Module, **options: Any) -> Any:
    """A copy, converted."""
    own = copy.deepcopy(model)
    assert len(ckptfused.convert(own, **options).layers) == len(own.blocks)  # type: ignore[arg-type]
    return own


def why_not_fused(model: Any, *args: Any) -> str:
    """Why the first layer does not run as one op; "" where it does."""
    found = DERIVED.call(model.blocks[0], Mode(), args, {})
    return found.text if isinstance(found, Reason) else ""


@KINDS
@pytest.mark.parametrize("keep", ["inputs", "all"])
def test_every_gradient_is_the_layers_own(kind: str, keep: str) -> None:
    model, args = Stack(MODULATED[kind]).double(), called(MODULATED[kind], 13, 3, torch.float64)
    own = converted(model, keep=keep)
    assert not why_not_fused(own, *args)
    for a, b in zip(step(own, *args), step(model, *args), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@KINDS
def test_it_keeps_its_input_and_a_few_vectors(kind: str) -> None:
    """A layer keeps one tensor that grows with the tokens, its input."""
    model, (x, cond) = Stack(MODULATED[kind]), called(MODULATED[kind], tokens=64)
    own, long = converted(model), []

    def pack(t: Tensor) -> Tensor:
        if t.numel() >= x.numel() and not any(t is p for p in own.parameters()):
            long.append(t.untyped_storage().data_ptr())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        own(x.requires_grad_(), cond)
    assert len(set(long)) == 3


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings(
    "ignore:Mismatch dtype between input and weight:UserWarning"
)  # the layer's own, of its norms
def test_under_autocast(kind: str, dtype: torch.dtype) -> None:
    """Vectors in half precision beside x in float32. The unconverted model rounds as much."""
    model, args = Stack(MODULATED[kind]), called(MODULATED[kind], tokens=33)
    true = step(copy.deepcopy(model).double(), *(t.double() for t in args))
    with torch.autocast("cpu", dtype):
        own = converted(model)
        assert not why_not_fused(own, *args)
        found, plain = step(own, *args), step(model, *args)
    for a, b, t in zip(found, plain, true, strict=True):
        assert (a - t).norm() <= 2 * (b - t).norm() + 1e-6 * t.norm()


def test_a_graph_that_is_kept_and_one_that_is_shared() -> None:
    """The same condition twice in one step, and two backward passes: what is made of it is made for each call."""
    model, (x, cond) = Stack(DIT).double(), called(DIT, dtype=torch.float64)
    found: list[list[Tensor]] = []
    for each in (model, converted(model)):
        leaf, errors = cond.clone().requires_grad_(), []
        losses = [each(x, leaf).square().sum(), each(2 * x, leaf).square().sum()]
        kept = [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for loss in losses]
        try:
            kept += [torch.autograd.grad(loss, leaf)[0] for loss in losses]
        except RuntimeError as error:
            errors.append(error)
        assert not errors
        found.append(kept)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_second_derivatives() -> None:
    model, (x, cond) = Stack(DIT, layers=1).double(), called(DIT, 5, dtype=torch.float64)
    own = converted(model)
    assert torch.autograd.gradgradcheck(own, (x.requires_grad_(), cond.requires_grad_()))


def test_frozen_conditions_and_weights() -> None:
    """Vectors that need no gradient get none, and those that alone are trained get theirs."""
    model, (x, cond) = Stack(DIT).double(), called(DIT, dtype=torch.float64)
    model.requires_grad_(False)
    model.blocks[1].adaLN.requires_grad_(True)
    own = converted(model)
    for each in (model, own):
        each(x, cond).square().sum().backward()
    for a, b in zip(own.parameters(), model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-10)


CUT = {
    "no gradients": (LINE, f"with torch.no_grad():\n            {LINE}"),
    "a line without gradients": (LINE, f"{LINE}\n        with torch.no_grad():\n            b = 2 * b"),
    "gradients halved": ("self.adaLN(cond)", "Halved.apply(self.adaLN(cond))"),
    "the condition's halved": ("self.adaLN(cond)", "self.adaLN(Halved.apply(cond))"),
    "a gate's halved": ("g.unsqueeze(1) *", "Halved.apply(g.unsqueeze(1)) *"),
}


@pytest.mark.parametrize("cut", CUT)
def test_gradients_end_where_the_layer_ends_them(cut: str) -> None:
    source = (HALVED if "Halved" in CUT[cut][1] else "") + DIT.replace(*CUT[cut])
    model, (x, cond) = Stack(source, layers=2).double(), called(DIT, dtype=torch.float64)
    steps = []
    for each in (model, converted(model)):
        leaves = [x.clone().requires_grad_(), cond.clone().requires_grad_(), *each.parameters()]
        y = each(*leaves[:2])
        steps.append([y, *torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)])
    for a, b in zip(*steps, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", ["enabled=False", "dtype=torch.bfloat16"])
def test_autocast_is_what_it_was_where_vectors_are_made(inner: str, outer: bool) -> None:
    """A region of the layer's own has its vectors in float32 within autocast, or in bfloat16 without."""
    model = Stack(DIT.replace(LINE, f"with torch.autocast('cpu', {inner}):\n            {LINE}"), layers=1)
    own, types = converted(model), []
    x, cond = called(DIT)
    block = own.blocks[0]
    with torch.autocast("cpu", torch.bfloat16, outer):
        assert not why_not_fused(own, x, cond)
        call = DERIVED.call(block, Mode(), (x, cond), {})
        assert not isinstance(call, Reason)
        types = [t.dtype for t in call[1][0].slots if t is not None and t.shape == (2, 24)]  # type: ignore[union-attr]
    assert set(types) == {torch.float32 if "False" in inner else torch.bfloat16}


@pytest.mark.parametrize("order", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)], ids=str)
def test_regions_without_gradients_cast_as_the_call_does(order: tuple[torch.dtype, torch.dtype]) -> None:
    """To float16, where 1e5 overflows, or to bfloat16, where it does not; whichever came first."""
    region = "with torch.no_grad():\n            w = self.adaLN(cond * 1e5)\n        "
    model = Stack(DIT.replace(LINE, region + LINE.replace("self.adaLN(cond)", "(w * 1e-5).float()")), layers=1)
    own, args = converted(model), called(DIT)
    for dtype in order:
        with torch.autocast("cpu", dtype):
            assert own(*args).isfinite().all() == model(*args).isfinite().all() == (dtype == torch.bfloat16)


def test_autocast_that_is_off_around_a_half_is_off() -> None:
    """The layer's author has turned it off against overflow."""
    half = "x = x + h.unsqueeze(1) * self.feed(modulate(self.norm2(x), d, e))"
    off = "with torch.autocast('cpu', enabled=False):\n            " + half.replace("d, e)", "d, e).float()")
    model = Stack(DIT.replace(half, off), layers=1)
    with torch.no_grad():
        model.blocks[0].fc1.weight.mul_(3e5)  # type: ignore[union-attr, operator]
        model.blocks[0].fc2.weight.mul_(1e-5)  # type: ignore[union-attr, operator]
    own, args = converted(model), called(DIT)
    with torch.autocast("cpu", torch.float16):
        assert own(*args).isfinite().all() and model(*args).isfinite().all()
    assert not why_not_fused(own, *args)


OBJECTS = {
    "a weight": ("partial(F.linear, weight=self.l2.weight)", "f(c)"),
    "a module": ("self.l2", "f(c)"),
    "a function": ("lambda t: self.l2(t)", "f(c)"),
    "an array": ("np.array([2.0, 1.0])", "c * float(f[0])"),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_modules_that_are_given_objects_run_as_written(kind: str) -> None:
    """What the recorded copy gave its module is the copy's own."""
    given, used = OBJECTS[kind]
    source = f"""
from functools import partial
import numpy as np


class Maker(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lin = nn.Linear(width, 6 * width)

    def forward(self, c, f):
        return self.lin({used})
""" + DIT.replace(
        "self.adaLN = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))",
        "self.adaLN, self.l2 = Maker(width), nn.Linear(width, width)",
    ).replace("self.adaLN(cond)", f"self.adaLN(cond, {given})")
    model, (x, cond) = Stack(source, layers=2).double(), called(DIT, 13, 3, torch.float64)
    steps = []
    for each in (model, converted(model)):
        for _ in range(2):
            y = each(x, cond)
        steps.append([y, *torch.autograd.grad(y.square().sum(), [*each.parameters()], allow_unused=True)])
    for a, b in zip(*steps, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("targets", [["adaLN.1"], ["qkv", "adaLN.1", "proj", "fc1"]], ids=len)
@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=str)
def test_adapters_of_what_makes_the_vectors(when: str, targets: list[str], options: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **options)
    model, args = Stack(DIT, layers=2).double(), called(DIT, dtype=torch.float64)
    plain = copy.deepcopy(model)
    if when == "after":
        model = converted(model)
        step(model, *args)
    for each in (plain, model):
        torch.manual_seed(3)
        peft.inject_adapter_in_model(config, each)
        each.double()
    own = model if when == "after" else converted(model)
    results = [each.train()(*args) for each in (own, plain)]
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)
    found = [
        torch.autograd.grad(y.square().sum(), [p for p in each.parameters() if p.requires_grad])
        for y, each in zip(results, (own, plain), strict=True)
    ]
    assert len(found[0]) > 3
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shape", [(1, 24), (2, 24)])
def test_batches_of_one_and_one_condition_for_all(shape: tuple[int, int]) -> None:
    """Whatever came first."""
    model = Stack(DIT, layers=2).double()
    own = converted(model)
    draw = torch.Generator().manual_seed(1)
    for batch, tokens in ((1, 12), (1, 13), (1, 14), (1, 15), (2, 12), (4, 12), (1, 16)):
        x = torch.randn(batch, tokens, 24, generator=draw, dtype=torch.float64)
        cond = torch.randn(batch if shape[0] > 1 else 1, 24, generator=draw, dtype=torch.float64)
        assert not why_not_fused(own, x, cond)
        for a, b in zip(step(own, x, cond), step(model, x, cond), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def _hooked(model: Any) -> None:
    model.blocks[0].adaLN[1].register_forward_hook(lambda module, args, y: 2 * y)


def _patched(model: Any) -> None:
    inner = model.blocks[0].adaLN[1]
    inner.forward = lambda x: 2 * nn.functional.linear(x, inner.weight, inner.bias)


def _dropping(model: Any) -> None:
    model.blocks[0].adaLN = nn.Sequential(nn.Dropout(0.5), *model.blocks[0].adaLN)


@pytest.mark.parametrize("change", [_hooked, _patched, _dropping])
def test_what_makes_the_vectors_is_watched(change: Callable[[Any], None]) -> None:
    model, args = Stack(DIT).double(), called(DIT, dtype=torch.float64)
    own = converted(model)
    step(own, *args)
    for each in (model, own):
        change(each)
    assert why_not_fused(own, *args)
    torch.manual_seed(1)
    found = step(own, *args)
    torch.manual_seed(1)
    for a, b in zip(found, step(model, *args), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_torch_compile_runs_it_generically() -> None:
    model, args = Stack(MODULATED["gains"]).double(), called(DIT, dtype=torch.float64)
    compiled = torch.compile(converted(model), backend="aot_eager")
    for a, b in zip(step(compiled, *args), step(model, *args), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
