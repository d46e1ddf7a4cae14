"""The loss head against PyTorch's linear + cross_entropy: every option, type, piece and derivative."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import ckptfused
from ckptfused import rng
from ckptfused.cost.loss import loss_saved_bytes
from ckptfused.eager.loss import eager_linear_cross_entropy
from ckptfused.loss import HeadAdapter, LossOutput
from ckptfused.ops.loss_second_order import adapter_dropout
from ckptfused.spec import HEAD, Adapter, LossSpec
from tests.accounting import Events

lce: Any = ckptfused.linear_cross_entropy
KEEPS = ("gradients", "inputs")
TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Problem:
    """A head with its inputs; [2, 9] tokens of width 24, 77 classes, unless said otherwise."""

    dtype: torch.dtype = torch.float64
    shape: tuple[int, ...] = (2, 9)
    width: int = 24
    classes: int = 77
    bias: bool = False
    weighted: bool = False
    adapters: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def tensors(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Leaves by name; of another dtype with the same, rounded, values."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            values = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(self.dtype)
            return values.to(dtype or self.dtype).requires_grad_()

        made = {"x": normal(*self.shape, self.width), "weight": normal(self.classes, self.width, scale=0.2)}
        if self.bias:
            made["bias"] = normal(self.classes)
        for i in range(self.adapters):
            made |= {f"a{i}": normal(3, self.width), f"b{i}": normal(self.classes, 3, scale=0.3)}
        return made

    @functools.cached_property
    def target(self) -> Tensor:
        target = torch.randint(self.classes, self.shape, generator=torch.Generator().manual_seed(1))
        target.view(-1)[1::4] = self.options.get("ignore_index", -100)
        return target

    def class_weight(self, dtype: torch.dtype) -> Tensor | None:
        return torch.linspace(0.5, 2, self.classes, dtype=dtype) if self.weighted else None

    def loss(self, tensors: dict[str, Tensor], **more: Any) -> Any:
        adapters = [HeadAdapter(tensors[f"a{i}"], tensors[f"b{i}"], scale=0.5) for i in range(self.adapters)]
        options = {**self.options, **more, "adapters": adapters}
        x, weight, bias = tensors["x"], tensors["weight"], tensors.get("bias")
        return lce(x, weight, self.target, bias, class_weight=self.class_weight(torch.float64), **options)

    def stock(self, tensors: dict[str, Tensor]) -> Tensor:
        """The same by PyTorch's own functions: logits as a whole, as models write it."""
        o = self.options
        x = tensors["x"]
        logits = F.linear(x, tensors["weight"], tensors.get("bias"))
        for i in range(self.adapters):
            logits = logits + 0.5 * F.linear(F.linear(x, tensors[f"a{i}"]), tensors[f"b{i}"])
        wide = logits.double() if x.dtype == torch.float64 else logits.float()
        wide = wide * o.get("logit_scale", 1.0)
        if o.get("softcap"):
            wide = torch.tanh(wide / o["softcap"]) * o["softcap"]
        wide, target = wide.flatten(0, -2), self.target.flatten()
        if o.get("shift"):
            target = F.pad(self.target[..., 1:], (0, 1), value=o.get("ignore_index", -100)).flatten()
        known = {k: o[k] for k in ("ignore_index", "label_smoothing") if k in o}
        reduction = o.get("reduction", "mean")
        counted = target != o.get("ignore_index", -100)
        weight = self.class_weight(wide.dtype)
        how = "sum" if "num_items" in o else reduction
        loss = F.cross_entropy(wide, target, weight, reduction=how, **known)
        if o.get("z_loss"):
            squares = o["z_loss"] * wide.logsumexp(-1).square() * counted
            if how == "mean":
                total = counted.sum() if weight is None else weight[target.where(counted, 0)].where(counted, 0).sum()
                squares = squares.sum() / total
            loss = loss + (squares.sum() if how == "sum" else squares)
        loss = loss / o["num_items"] if "num_items" in o else loss
        return loss.view(self.shape) if reduction == "none" else loss


def gradients(loss: Tensor, tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    dloss = torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).view(loss.shape)
    found = torch.autograd.grad(loss, list(tensors.values()), dloss, **options)
    return dict(zip(tensors, found, strict=True))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "cap": {"softcap": 3.0},
    "scale": {"logit_scale": 0.25},
    "z": {"z_loss": 1e-2},
    "ignore 5": {"ignore_index": 5},
    "items": {"num_items": 7},
    "shift": {"shift": True},
    "all": {"label_smoothing": 0.2, "softcap": 5.0, "logit_scale": -0.5, "z_loss": 1e-2, "num_items": 11.0},
    "all, none": {"label_smoothing": 0.2, "softcap": 5.0, "logit_scale": 2.0, "z_loss": 1e-2, "reduction": "none"},
}


WAYS = tuple(itertools.product(KEEPS, (1, "1GiB")))
"""What is kept, and logits in the smallest pieces or as a whole."""


@pytest.mark.parametrize("name", OPTIONS)
def test_float64_gives_pytorchs_loss_and_gradients(name: str) -> None:
    for bias, weighted, adapters in itertools.product((False, True), (False, True), (0, 2)):
        problem = Problem(bias=bias, weighted=weighted, adapters=adapters, options=OPTIONS[name])
        tensors = problem.tensors()
        loss = problem.stock(tensors)
        expected = {"loss": loss, **gradients(loss, tensors)}
        for keep, scratch in WAYS:
            loss = problem.loss(tensors, keep=keep, scratch=scratch)
            got = {"loss": loss, **gradients(loss, tensors)}
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12, msg=f"{problem}, {keep}, {scratch}")


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_errors_are_at_most_twice_eager_pytorchs(name: str, dtype: torch.dtype) -> None:
    """Both runs round at the same places in another order; half an ulp of the scale is what a rounded truth is off."""
    problem = Problem(dtype, (4, 40), 96, 517, bias=True, weighted="none" in name, adapters=1, options=OPTIONS[name])
    true_tensors, tensors = problem.tensors(torch.float64), problem.tensors()
    true_loss, eager_loss = problem.stock(true_tensors), problem.stock(tensors)
    true = {"loss": true_loss, **gradients(true_loss, true_tensors)}
    eager = {"loss": eager_loss, **gradients(eager_loss, tensors)}
    for keep, scratch in WAYS:
        loss = problem.loss(tensors, keep=keep, scratch=scratch)
        assert loss.dtype == torch.float32
        got = {"loss": loss, **gradients(loss, tensors)}
        for place, value in true.items():
            scale = torch.linalg.vector_norm(value)
            error = torch.linalg.vector_norm(got[place].double() - value) / scale
            base = torch.linalg.vector_norm(eager[place].double() - value) / scale
            assert error <= 2 * base + torch.finfo(dtype).eps / 2, f"{place}: {error:.3e}, eager {base:.3e}"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_both_keeps_give_the_same_bits_in_one_piece(dtype: torch.dtype) -> None:
    problem = Problem(dtype, bias=True, adapters=1, options={"softcap": 4.0, "label_smoothing": 0.1})
    tensors = problem.tensors()
    made = [gradients(problem.loss(tensors, keep=keep), tensors) for keep in KEEPS]
    for name in tensors:
        assert made[0][name].equal(made[1][name]), name
        assert made[0][name].dtype == tensors[name].dtype


def test_a_frozen_head_has_the_same_bits_in_pieces_too() -> None:
    """The rows go in the same pieces, forward and backward, where no weight's gradient is added up."""
    problem = Problem(torch.bfloat16, (4, 40), 32, 517, adapters=1)
    tensors = problem.tensors()
    tensors["weight"].requires_grad_(False)
    leaves = {name: t for name, t in tensors.items() if t.requires_grad}
    for scratch in (1, 40_000, "1GiB"):
        made = [gradients(problem.loss(tensors, keep=keep, scratch=scratch), leaves) for keep in KEEPS]
        assert made[0]["x"].equal(made[1]["x"])


@pytest.mark.parametrize("keep", KEEPS)
def test_a_float16_weights_gradient_may_be_large_before_the_mean(keep: str) -> None:
    """In one piece, too: the sum over the tokens, 1e5 here, is beyond float16, the mean is not."""
    x = torch.full((1000, 8), 200.0, dtype=torch.float16)
    weight = torch.zeros(2, 8, dtype=torch.float16, requires_grad=True)
    lce(x, weight, torch.zeros(1000, dtype=torch.int64), keep=keep, scratch="1GiB").backward()
    assert weight.grad is not None and weight.grad.tolist() == [[-100.0] * 8, [100.0] * 8]


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("keep", KEEPS)
def test_ops(keep: str, reduction: str) -> None:
    problem = Problem(torch.float32, bias=True, adapters=1)
    tensors = problem.tensors()
    spec = LossSpec(keep=keep, reduction=reduction, lora=(Adapter(HEAD, 3, 0.5, 0.2),), scratch=2000)
    adapters = [tensors["a0"], tensors["b0"], None]
    head = (tensors["x"], tensors["weight"], tensors["bias"], problem.target, None, adapters)
    ops, state, needs = torch.ops.ckptfused, rng.state(tensors["x"]), [True] * 5 + [False]
    text = spec.to_string()
    with torch.no_grad():
        lse, kept = (made := ops.linear_cross_entropy_fwd(*head, state, text, needs))[1], made[3:]
    kept = kept if keep == "gradients" and reduction == "sum" else []
    dloss = torch.ones(problem.shape if reduction == "none" else ())
    for op, args in (
        (ops.linear_cross_entropy_fwd, (*head, state, text, needs)),
        (ops.linear_cross_entropy_bwd, (dloss, *head, lse, kept, state, text, needs)),
    ):
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("keep", KEEPS)
def test_saved_bytes(keep: str) -> None:
    """What a call keeps alive beside what the caller owns, counted by the allocator, is what `cost` says."""
    for dtype, frozen in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        problem = Problem(dtype, (4, 64), 64, 1000, bias=True, adapters=1)
        tensors = problem.tensors()
        tensors["weight"].requires_grad_(not frozen)
        events = Events(functools.partial(problem.loss, tensors, keep=keep, reduction="sum"))
        needs = [True, not frozen, True, True, True, False]
        spec = LossSpec(keep=keep, lora=(Adapter(HEAD, 3, 0.5),))
        expected = loss_saved_bytes(spec, (4, 64, 64), (1000, 64), needs, dtype, dtype)
        small = 3 * 64 * 4 * 8  # the loss; each token's loss and class
        assert expected <= events.live_bytes() <= expected + small


@pytest.mark.parametrize("keep", KEEPS)
def test_logits_exist_a_piece_at_a_time(keep: str) -> None:
    """The peak of a forward and of a backward is what they return, one piece of logits and a few numbers a token."""
    tokens, width, classes = 512, 32, 2000
    problem = Problem(torch.float32, (tokens,), width, classes)
    tensors = problem.tensors()
    logits, scratch = tokens * classes * 4, 200_000
    piece, few = scratch + 64 * tokens * 4, 100 * tokens  # pieces are rounded up to 16 rows or 64 classes
    gradients_of_both = (tokens + classes) * width * 4
    forward = Events(lambda: problem.loss(tensors, keep=keep, scratch=scratch))
    loss = forward.result
    made = gradients_of_both if keep == "gradients" else 0
    assert forward.peak_bytes(internal=True) <= made + piece + few < logits / 2
    backward = Events(lambda: torch.autograd.grad(loss, list(tensors.values())))
    if keep == "gradients":
        assert backward.peak_bytes(internal=True) <= few  # they are scaled in place
    else:
        assert backward.peak_bytes(internal=True) <= gradients_of_both + piece + few


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(keep: str, reduction: str) -> None:
    options = {"softcap": 2.0, "label_smoothing": 0.1, "z_loss": 0.1, "reduction": reduction, "keep": keep}
    problem = Problem(shape=(3,), width=2, classes=5, bias=True, adapters=1, options=options)
    tensors = problem.tensors()

    def function(*values: Tensor) -> Tensor:
        return problem.loss(dict(zip(tensors, values, strict=True)), scratch=60)

    assert torch.autograd.gradcheck(function, tuple(tensors.values()))
    assert torch.autograd.gradgradcheck(function, tuple(tensors.values()), fast_mode=True)


@pytest.mark.parametrize("keep", KEEPS)
def test_a_second_backward_gives_the_same_again(keep: str) -> None:
    problem = Problem(torch.float32, bias=True)
    tensors = problem.tensors()
    loss = problem.loss(tensors, keep=keep)
    first = gradients(loss, tensors, retain_graph=True)
    kept = {name: value.clone() for name, value in first.items()}
    second, last = gradients(loss, tensors, retain_graph=True), gradients(loss, tensors)
    for name in tensors:
        assert kept[name].equal(first[name]) and kept[name].equal(second[name]) and kept[name].equal(last[name])
    with pytest.raises(RuntimeError, match="second time"):
        gradients(loss, tensors)


@pytest.mark.parametrize("keep", KEEPS)
def test_what_is_asked_for_is_made_and_nothing_else(keep: str) -> None:
    """Three products with gradients kept, four with inputs; a frozen weight takes one away."""
    problem = Problem(torch.float32)
    product = 2 * 18 * problem.width * problem.classes
    for frozen, partial in itertools.product((False, True), repeat=2):
        tensors = problem.tensors()
        tensors["weight"].requires_grad_(not frozen)
        with FlopCounterMode(display=False) as counter:
            loss = problem.loss(tensors, keep=keep)
        forward = counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(loss, tensors["x"] if partial or frozen else list(tensors.values()))
        backward = counter.get_total_flops()
        made = 1 if frozen else 2
        if keep == "gradients":
            assert (forward, backward) == ((1 + made) * product, 0)
        else:
            assert (forward, backward) == (product, (2 if partial else 1 + made) * product)


def test_without_gradients_nothing_is_made_for_them() -> None:
    problem = Problem(torch.float32)
    tensors = problem.tensors()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        assert not problem.loss(tensors).requires_grad
    assert counter.get_total_flops() == 2 * 18 * problem.width * problem.classes


def test_an_infinite_logit_is_the_largest_and_a_nan_comes_first() -> None:
    weight = torch.zeros(1100, 1)
    weight[700], weight[900] = math.inf, math.nan
    x, target = torch.ones(1, 1), torch.zeros(1, dtype=torch.long)
    for rows, expected in ((900, 700), (1100, 900)):
        made = ckptfused.linear_cross_entropy(x, weight[:rows], target, return_tokens=True)
        assert isinstance(made, LossOutput)
        assert made.predicted.item() == F.linear(x, weight[:rows]).argmax(-1).item() == expected


def test_tokens_come_from_the_same_pass() -> None:
    problem = Problem(options={"label_smoothing": 0.1, "z_loss": 0.1})
    tensors = problem.tensors()
    made = problem.loss(tensors, return_tokens=True)
    assert isinstance(made, LossOutput)
    logits = F.linear(tensors["x"], tensors["weight"])
    torch.testing.assert_close(made.lse, logits.logsumexp(-1).detach())
    assert made.predicted.equal(logits.argmax(-1))
    each = problem.loss(tensors, reduction="none")
    torch.testing.assert_close(made.token_loss, each.detach())
    assert not made.token_loss.requires_grad and not made.lse.requires_grad
    assert made.token_loss[problem.target == -100].eq(0).all()


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_token_counts(keep: str, reduction: str) -> None:
    """0 for a sum, NaN for a mean, exactly as PyTorch's; gradients likewise."""
    problem = Problem(torch.float32)
    for shape in ((2, 9), (0, 9)):
        tensors = problem.tensors()
        x = tensors["x"].detach()[: shape[0]].requires_grad_()
        target = torch.full(shape, -100)
        loss = lce(x, tensors["weight"], target, reduction=reduction, keep=keep)
        logits = F.linear(x, tensors["weight"]).flatten(0, 1)
        expected = F.cross_entropy(logits, target.flatten(), reduction=reduction)
        torch.testing.assert_close(loss, expected, equal_nan=True)
        got = torch.autograd.grad(loss, (x, tensors["weight"]))
        assert all(t.eq(0).all() for t in got)


def test_one_token_without_a_batch() -> None:
    problem = Problem(shape=())
    tensors = problem.tensors()
    target = torch.tensor(3)
    got = lce(tensors["x"], tensors["weight"], target)
    torch.testing.assert_close(got, F.cross_entropy(F.linear(tensors["x"], tensors["weight"]), target))


@pytest.mark.parametrize("keep", KEEPS)
def test_an_argument_changed_in_place_raises(keep: str) -> None:
    problem = Problem(torch.float32)
    for name in ("x", "weight"):
        tensors = {key: t.detach().clone().requires_grad_() for key, t in problem.tensors().items()}
        loss = problem.loss(
            {key: t * 1 for key, t in tensors.items()} | {name: (changed := tensors[name] * 1)}, keep=keep
        )
        changed.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("keep", KEEPS)
def test_dropout_in_adapters_is_that_of_its_masks(keep: str) -> None:
    problem = Problem(adapters=2)
    tensors = problem.tensors()
    lora = tuple(Adapter(HEAD, 3, 0.5, p) for p in (0.3, 0.1))
    adapters = [HeadAdapter(tensors[f"a{i}"], tensors[f"b{i}"], None, 0.5, lora[i].p) for i in range(2)]
    args = (tensors["x"], tensors["weight"], problem.target)
    loss = lce(*args, adapters=adapters, keep=keep, reduction="sum", generator=torch.Generator().manual_seed(3))
    state = rng.state(tensors["x"], generator=torch.Generator().manual_seed(3))
    spec = LossSpec(lora=lora)
    flat = [t for i in range(2) for t in (tensors[f"a{i}"], tensors[f"b{i}"], None)]
    masks = adapter_dropout(tensors["x"], spec, state)
    expected = eager_linear_cross_entropy(*args[:2], None, problem.target, None, flat, spec, masks).loss
    torch.testing.assert_close(loss, expected)
    wanted = gradients(expected, tensors)
    torch.testing.assert_close(gradients(loss, tensors), wanted)
    pieces = lce(
        *args, adapters=adapters, keep=keep, reduction="sum", scratch=1, generator=torch.Generator().manual_seed(3)
    )
    torch.testing.assert_close(gradients(pieces, tensors), wanted)


@pytest.mark.parametrize("keep", KEEPS)
def test_autocast(keep: str) -> None:
    problem = Problem(torch.float32, (4, 40), 96, 517, bias=True, adapters=1)
    true_tensors = problem.tensors(torch.float64)
    true = gradients(problem.stock(true_tensors), true_tensors)
    tensors = problem.tensors()
    with torch.autocast("cpu", torch.bfloat16):
        eager_loss, loss = problem.stock(tensors), problem.loss(tensors, keep=keep)
    eager, got = gradients(eager_loss, tensors), gradients(loss, tensors)
    for name, value in true.items():
        assert got[name].dtype == torch.float32
        error, base = (torch.linalg.vector_norm(t[name].double() - value) for t in (got, eager))
        assert error <= 2 * base, name


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.extended)])
@pytest.mark.parametrize("keep", KEEPS)
def test_compiled_without_a_graph_break(keep: str, backend: str) -> None:
    problem = Problem(torch.float32, bias=True, options={"softcap": 3.0, "shift": True})
    tensors = problem.tensors()

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return problem.loss({"x": x * 2, "weight": weight, "bias": bias}, keep=keep)

    assert problem.target.shape == (2, 9)  # made before
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    expected = gradients(function(*tensors.values()), tensors)
    got = gradients(compiled(*tensors.values()), tensors)
    torch.testing.assert_close(got, expected)


def test_module() -> None:
    problem = Problem(torch.float32)
    tensors = problem.tensors()
    loss = ckptfused.LinearCrossEntropyLoss(label_smoothing=0.1, keep="inputs")
    got = loss(tensors["x"], tensors["weight"], problem.target, num_items=4)
    expected = lce(tensors["x"], tensors["weight"], problem.target, label_smoothing=0.1, num_items=4)
    assert got.equal(expected)
    assert "label_smoothing=0.1" in repr(loss)
    with pytest.raises(TypeError, match="smooth: expected an option among ignore_index"):
        ckptfused.LinearCrossEntropyLoss(smooth=1)


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"keep": "all"}, ValueError, "keep: expected one of gradients, inputs, got 'all'"),
        ({"reduction": "avg"}, ValueError, "reduction: expected one of mean, sum, none, got 'avg'"),
        ({"scratch": "many"}, ValueError, "scratch: expected a number of bytes"),
        ({"label_smoothing": 2}, ValueError, r"label_smoothing: expected a number in \[0, 1\], got 2"),
        ({"shift": "yes"}, TypeError, "shift: expected a bool, got 'yes'"),
        ({"return_tokens": 3}, TypeError, "return_tokens: expected a bool, got 3"),
    ],
)
def test_what_is_wrong_with_an_option_is_said_at_once(
    option: dict[str, Any], error: type[Exception], message: str
) -> None:
    for call in (lambda: ckptfused.LinearCrossEntropyLoss(**option), lambda: lce(X, W, T, **option)):
        with pytest.raises(error, match=message):
            call()


X, W, T = torch.zeros(4, 8), torch.zeros(5, 8), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(4, 7)}, ValueError, r"x, weight: expected \[\.\.\., C\] and \[V, C\], got \[4, 7\] and"),
        ({"x": None}, TypeError, "x: expected a tensor"),
        ({"weight": W.double()}, TypeError, "weight: expected x's dtype"),
        ({"target": T.int()}, TypeError, "target: expected int64"),
        ({"target": T[:3]}, ValueError, r"target: expected shape \[4\]"),
        ({"target": T + 5}, IndexError, r"target: expected a class, 0 to 4, or ignore_index \(-100\), got 5 in row 0"),
        ({"target": T - 1}, IndexError, "got -1 in row 0"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias: expected shape \[5\]"),
        ({"class_weight": torch.zeros(4)}, ValueError, r"class_weight: expected shape \[5\]"),
        ({"class_weight": torch.zeros(5, requires_grad=True)}, ValueError, "class_weight: expected a tensor"),
        ({"reduction": "avg"}, ValueError, "reduction: expected one of mean, sum, none"),
        ({"reduction": "none", "num_items": 3}, ValueError, "num_items: leave it out with"),
        ({"num_items": torch.zeros(2)}, ValueError, "num_items: expected a tensor with one number"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing: expected"),
        ({"softcap": -1.0}, ValueError, "softcap: expected"),
        ({"z_loss": -1.0}, ValueError, "z_loss: expected"),
        ({"logit_scale": "2"}, TypeError, "logit_scale: expected a number"),
        ({"keep": "all"}, ValueError, "keep: expected one of gradients, inputs"),
        ({"scratch": "many"}, ValueError, "scratch: expected a number of bytes"),
        ({"scratch": 0}, ValueError, "scratch: expected an integer of at least 1"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index: expected an integer"),
        ({"adapters": [(W, W)]}, TypeError, r"adapters\[0\]: expected a HeadAdapter"),
        ({"adapters": [HeadAdapter(torch.zeros(2, 8), torch.zeros(5, 3))]}, ValueError, r"adapters\[0\]\.b: expected"),
        ({"generator": 5}, TypeError, "generator: expected a torch.Generator"),
    ],
)  # fmt: skip
def test_messages(change: dict[str, Any], error: type[Exception], message: str) -> None:
    call = {"x": X, "weight": W, "target": T, **change}
    with pytest.raises(error, match=message):
        lce(**call)


def test_memory_that_is_exchanged_before_a_graph_of_the_backward() -> None:
    """Gradients that forward made read no weight; the graph of a backward does."""
    problem = Problem()
    tensors = problem.tensors()
    loss = lce(tensors["x"], tensors["weight"], problem.target)
    tensors["weight"].data = tensors["weight"].data * 2
    with pytest.raises(RuntimeError, match="got other memory since forward"):
        torch.autograd.grad(loss, tensors["x"], create_graph=True)
