"""Converted models whose layers nobody wrote an adapter for: what is derived runs as one op and computes the same, and
whatever changes what a layer computes is seen at its next call."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import queue
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import ckptfused
from ckptfused.models.derive import calls
from tests.models.compare import close
from tests.models.derive.written import GPT, LLAMA, arguments, made
from tests.models.dropout_oracle import RecordStates, with_masks
from tests.models.small import unfused

DOUBLE = torch.float64


class Stack(nn.Module):
    """Layers one after the other, all called with the same arguments beside x."""

    def __init__(self, source: str, p: float = 0.0, count: int = 2) -> None:
        super().__init__()
        source = source.replace("longest=64", "longest=256")
        blocks = [made(source.replace(".float()", ".double()").replace("torch.float32", "torch.float64"), p=p)]
        self.layers = nn.ModuleList([blocks[0], *(copy.deepcopy(blocks[0]) for _ in range(count - 1))])
        self.double()
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.3, 0.3)

    def forward(self, x: Tensor, *beside: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, *beside)
        return x


def step(model: nn.Module, source: str, tokens: int = 9) -> dict[str, Tensor]:
    """The result of a model and all gradients."""
    x, *beside = arguments(source, tokens, dtype=DOUBLE)
    x = x.clone().requires_grad_()
    model.zero_grad(set_to_none=True)
    y = model(x, *beside)
    y.square().mean().backward()
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}  # type: ignore[dict-item]


def twins(source: str, p: float = 0.0, count: int = 2) -> tuple[Any, Any]:
    """A model and its converted copy, whose layers are derived."""
    torch.manual_seed(0)
    plain = Stack(source, p, count)
    converted = copy.deepcopy(plain)
    report = ckptfused.convert(converted)
    assert {layer.family for layer in report.layers} == {"derived"}
    assert report.fused == (0 if "cos" in source else count)  # nobody tells what cos is before the first call
    return plain, converted


def same(plain: Any, converted: Any, source: str, fused: int, tokens: int = 9) -> None:
    """A step of both gives the same, so many calls of the converted one being fused."""
    count = len(plain.layers)
    want = step(plain, source, tokens)
    with unfused() as reasons:
        got = step(converted, source, tokens)
    assert count - len(reasons) == fused, reasons
    close(got, want, 1e-10)


@pytest.mark.parametrize("source", [GPT, LLAMA], ids=["gpt", "llama"])
def test_what_is_derived_computes_the_same(source: str) -> None:
    plain, converted = twins(source)
    for tokens in (9, 14):
        same(plain, converted, source, 2, tokens)
    names = [name for name, _ in converted.named_modules()], list(converted.state_dict())
    assert names == ([name for name, _ in plain.named_modules()], list(plain.state_dict()))
    for other in (copy.deepcopy(converted), copy.copy(converted)):
        same(plain, other, source, 2)
    ckptfused.revert(converted)
    assert all(vars(a).keys() == vars(b).keys() for a, b in zip(converted.modules(), plain.modules(), strict=True))


def test_a_kind_is_derived_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are alike share what was proved, and so do copies, calls of other lengths, and later conversions."""
    asked: list[int] = []
    whole = calls.derive
    monkeypatch.setattr(calls, "derive", lambda *given, **options: asked.append(1) or whole(*given, **options))
    plain, converted = twins(GPT.replace("1e-5)", "2e-5)"), count=4)
    for tokens in (9, 11, 9):
        same(plain, converted, GPT, 4, tokens)
    assert ckptfused.convert(copy.deepcopy(plain)).fused == 4
    assert len(asked) == 1
    converted.eval()
    same(plain.eval(), converted, GPT, 4)
    assert len(asked) == 2
    same(plain.train(), converted.train(), GPT, 4)
    assert len(asked) == 2


SITES = {GPT: ((0, 0), (0, 1), (0, 3)), LLAMA: ((0, 0), (0, 1), (0, 2), (0, 3))}


@pytest.mark.parametrize("source", [GPT, LLAMA], ids=["gpt", "llama"])
def test_dropout_draws_at_the_sites_of_the_layer(source: str) -> None:
    plain, converted = twins(source, p=0.2)
    with RecordStates() as recorded:
        got = step(converted, source)
    with with_masks(list(plain.layers), recorded.states, lambda layer: SITES[source]):
        want = step(plain, source)
    close(got, want, 1e-10)


def patched_function(model: Any) -> None:
    space = type(model.layers[0]).forward.__globals__
    plain = space["new_gelu"]
    space["new_gelu"] = lambda x: plain(x) * 1.5


def patched_class(model: Any) -> None:
    cls = type(model.layers[0].attn)
    plain = cls.forward
    cls.forward = lambda self, x: plain(self, x) * 0.5


def own_forward(model: Any) -> None:
    for layer in model.layers:
        layer.attn.forward = MethodType(lambda self, x: 0.3 * x, layer.attn)


def another_module(model: Any) -> None:
    for layer in model.layers:
        layer.ln_2 = nn.Identity()


def written_buffer(model: Any) -> None:
    for layer in model.layers:
        layer.attn.bias.fill_(1.0)


def hooked(model: Any) -> None:
    for layer in model.layers:
        layer.ln_1.register_forward_hook(lambda module, args, y: 2 * y)


def no_bias(model: Any) -> None:
    for layer in model.layers:
        layer.ln_1.bias = None


def another_rate(model: Any) -> None:
    for layer in model.layers:
        layer.dropout.p = 1.0


def other_heads(model: Any) -> None:
    for layer in model.layers:
        layer.attn.heads = 2


CHANGES: list[tuple[Callable[[Any], None], int]] = [
    *((change, 0) for change in (own_forward, hooked, another_rate)),  # of what is dropped whole nothing can be proved
    *(
        (change, 2)
        for change in (
            patched_function,
            patched_class,
            another_module,
            written_buffer,
            no_bias,
            other_heads,
        )
    ),
]


@pytest.mark.parametrize(("change", "fused"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_what_changes_is_seen(change: Callable[[Any], None], fused: int) -> None:
    """After a change the layer computes what its code now says, derived again or as it is."""
    plain, converted = twins(GPT)
    same(plain, converted, GPT, 2)
    before = step(plain, GPT)["y"]
    change(plain)
    if change not in (patched_function, patched_class):  # of both
        change(converted)
    assert not torch.allclose(step(plain, GPT)["y"], before)
    same(plain, converted, GPT, fused)


def test_a_step_is_predicted_by_layers_that_are_derived() -> None:
    """Also where they have masks in buffers, of which a model without data has no values of its own."""
    _, converted = twins(GPT)
    batch = arguments(GPT, 24, dtype=DOUBLE)
    predicted, measured = (ckptfused.profile(converted, tuple(batch), device=device) for device in ("cpu", None))
    assert (predicted.saved, predicted.peak) == (measured.saved, measured.peak)


class Normed(nn.Module):
    """A layer that no rule takes, with statistics that run."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.norm(self.conv(x.mT)).mT)


def mamba() -> nn.Module:
    """A model whose layers find their activation in a dict of transformers' that makes a module at each look."""
    config = transformers.MambaConfig(vocab_size=20, hidden_size=16, num_hidden_layers=2, state_size=4, use_cache=False)
    return transformers.MambaForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (mamba, torch.zeros(2, 5, dtype=torch.long)),
        (lambda: nn.Sequential(Normed(), Normed()), torch.ones(2, 5, 8)),
    ],
    ids=["mamba", "batch norm"],
)
def test_a_layer_is_not_read_again_at_each_step(
    make: Callable[[], Any], x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read, times, own = make().train(), list[nn.Module](), list[int](), calls.derive
    monkeypatch.setattr(calls, "derive", lambda layer, *a, **k: read.append(layer) or own(layer, *a, **k))
    ckptfused.convert(model)
    for _ in range(4):
        y = model(x)
        (y.logits if hasattr(y, "logits") else y).sum().backward()
        times.append(len(read))
    assert times == [times[0]] * 4


def test_what_depends_on_the_length_is_as_it_is_there() -> None:
    source = GPT.replace("        return x\n", "        return x if x.shape[1] < 12 or x.shape[1] == 256 else 2 * x\n")
    plain, converted = twins(source)
    same(plain, converted, GPT, 2, tokens=11)
    same(plain, converted, GPT, 0, tokens=12)


def test_what_is_no_block_at_the_length_of_the_example_may_be_one_at_another() -> None:
    """A layer that `convert` cannot derive is looked at again when it is called."""
    source = GPT.replace("        return x\n", "        return x if x.shape[1] < 12 else 2 * x\n")
    torch.manual_seed(0)
    plain = Stack(source)
    converted = copy.deepcopy(plain)
    report = ckptfused.convert(converted)
    assert {(layer.path, layer.family) for layer in report.layers} == {("generic", None)}
    assert "another shape" in report.layers[0].reason or "no rule takes mul" in report.layers[0].reason
    same(plain, converted, GPT, 2, tokens=11)
    same(plain, converted, GPT, 0, tokens=12)
    same(plain, converted, GPT, 2, tokens=9)


COUNT, TOLD = itertools.count(), queue.Queue[int]()


@pytest.mark.parametrize("asked", ["not torch.is_grad_enabled()", "torch.is_autocast_enabled('cpu')"])
def test_a_layer_that_asks_for_a_mode(asked: str) -> None:
    """It is fused in the one in which it is a block, and runs as it is in the other."""
    source = GPT.replace("        return x\n", f"        return 2 * x if {asked} else x\n")
    plain, converted = twins(source)
    same(plain, converted, GPT, 2)
    x = arguments(GPT, 9, dtype=DOUBLE)[0]
    with torch.no_grad() if "grad" in asked else torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(converted(x), plain(x), rtol=1e-10, atol=1e-12)


SEEN: list[Any] = []
LOOKED: dict[str, Any] = {}
BESIDE: dict[str, Any] = {
    "a list": lambda x: SEEN.append(x.sum()),
    "a dict": lambda x: LOOKED.update(x=x),
    "NumPy": lambda x: np.random.rand(),
    "a counter": lambda x: next(COUNT),
    "a queue": lambda x: TOLD.put(1),
}


@pytest.mark.parametrize("what", BESIDE)
def test_what_is_done_beside_the_result_is_done(what: str) -> None:
    """Such a layer is not derived, and the look at it leaves nothing."""
    torch.manual_seed(0)
    model = Stack(GPT.replace("        return x\n", "        BESIDE(x)\n        return x\n"))
    type(model.layers[0]).forward.__globals__["BESIDE"] = BESIDE[what]
    before = len(SEEN), len(LOOKED), np.random.get_state()[1].tolist()  # type: ignore[union-attr, index, call-overload]
    report = ckptfused.convert(model)
    assert {(layer.path, layer.family) for layer in report.layers} == {("generic", None)}, report
    assert (len(SEEN), len(LOOKED), np.random.get_state()[1].tolist()) == before  # type: ignore[union-attr, index, call-overload]


def test_a_layer_that_asks_where_it_stands() -> None:
    """Each is derived by itself; one that only knows is not."""
    torch.manual_seed(0)
    plain = Stack(GPT.replace("x = x + m", "x = x + m * (1.0 + self.layer_idx)"))
    for i, layer in enumerate(plain.layers):
        layer.layer_idx = i  # type: ignore[assignment]
    converted = copy.deepcopy(plain)
    assert ckptfused.convert(converted).fused == 2
    same(plain, converted, GPT, 2)


def test_a_model_is_not_held() -> None:
    _, converted = twins(GPT)
    step(converted, GPT)
    weight = weakref.ref(converted.layers[0].c_fc.weight)
    del converted
    gc.collect()
    assert weight() is None


def test_under_an_outer_checkpoint() -> None:
    """It counts what its forward saves: the look at a layer, in the forward alone, is no part of that."""
    torch.manual_seed(0)
    plain = Stack(GPT.replace("1e-5)", "3e-5)"))
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    x = arguments(GPT, dtype=DOUBLE)[0].requires_grad_()
    torch.utils.checkpoint.checkpoint(converted, x, use_reentrant=False).sum().backward()
    got, x.grad = x.grad, None
    plain(x).sum().backward()
    torch.testing.assert_close(got, x.grad, rtol=1e-10, atol=1e-12)


def test_a_model_goes_through_a_file() -> None:
    linear = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)))
    known = calls._Known(linear)
    assert pickle.loads(pickle.dumps(known)).layer() is None and copy.deepcopy(known).layer() is None


def test_looking_at_a_layer_makes_no_parametrized_weight() -> None:
    """What is made at each look moves buffers (spectral_norm's iterations), and so what later calls compute."""
    plain = Stack(GPT)
    for module in [m for m in plain.modules() if isinstance(m, nn.Linear)]:
        nn.utils.parametrizations.spectral_norm(module)
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    for _ in range(2):
        found, wanted = step(converted, GPT), step(plain, GPT)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, msg=name)
        buffers = zip(converted.named_buffers(), plain.buffers(), strict=True)
        assert not [name for (name, a), b in buffers if not torch.equal(a, b)]
