"""What a small loss, whose calls cost as much as its work, dispatches: nothing beside what it has to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import profile

import ckptfused
from ckptfused import _extension
from ckptfused.loss import function

COPIES = ("aten::narrow", "aten::zeros", "aten::to", "aten::_to_copy", "aten::copy_", "aten::clone", "aten::contiguous")


def dispatched(call: Callable[[], Any]) -> Counter[str]:
    """The operations that a call runs, those within others too."""
    call()
    with profile() as found:
        call()
    return Counter(event.name for event in found.events())


def small(rows: int = 64, classes: int = 10, width: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, weight = torch.randn(rows, width, requires_grad=True), torch.randn(classes, width, requires_grad=True)
    return x, weight, torch.randint(classes, (rows,))


def test_a_training_step() -> None:
    """Forward makes the logits, the loss with its gradient, both products of that, and the sum. Backward multiplies
    each gradient by the loss's, which is divided by the number of targets without an operation."""
    x, weight, target = small()
    seen = dispatched(lambda: torch.autograd.grad(ckptfused.linear_cross_entropy(x, weight, target), (x, weight)))
    assert seen["aten::mm"] == 3 and seen["aten::sum"] == 1 and seen["aten::mul_"] == 2
    assert seen["ckptfused::linear_cross_entropy_fwd"] == seen["ckptfused::cross_entropy_fwd"] == 1
    # The loss, the log-sum-exp, the class, both gradients, the logits, and the quotients of forward and backward.
    assert seen["aten::empty"] == 8
    assert seen["aten::div"] == seen["ckptfused::linear_cross_entropy_bwd"] == 0
    left = {name: seen[name] for name in COPIES if seen[name]}
    assert set(left) <= {"aten::to"} and seen["aten::_to_copy"] == 0, left


def test_pieces_are_views() -> None:
    """Where the logits are cut, tensors are cut by rows as before."""
    x, weight, target = small(rows=64, classes=256)
    whole = dispatched(lambda: ckptfused.linear_cross_entropy(x, weight, target))
    cut = dispatched(lambda: ckptfused.linear_cross_entropy(x, weight, target, scratch=32 * 256 * 4))
    assert whole["aten::narrow"] == 0 and whole["ckptfused::cross_entropy_fwd"] == 1
    assert cut["aten::narrow"] > 0 and cut["ckptfused::cross_entropy_fwd"] == 2


def test_python_checks_only_what_may_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick look is sure of plain calls alone; the checks that name an argument see all others."""
    checked: list[Any] = []
    check = function.check_arguments
    monkeypatch.setattr(function, "check_arguments", lambda *args: (checked.append(args), check(*args)))
    x, weight, target = small()
    bias, class_weight = torch.randn(10), torch.rand(10)
    ckptfused.linear_cross_entropy(x, weight, target, bias, class_weight=class_weight, label_smoothing=0.1)
    assert not checked
    ckptfused.linear_cross_entropy(x, weight, target, num_items=3)
    with torch.autocast("cpu", torch.bfloat16):
        ckptfused.linear_cross_entropy(x, weight.detach().bfloat16(), target)
    assert len(checked) == 2


def _wrong() -> dict[str, tuple[Any, ...]]:
    x, weight, target = small()
    bias, trained = torch.randn(10), torch.rand(10, requires_grad=True)
    return {
        "x": ([1.0], weight, target, None, None),
        "x of integers": (torch.ones(64, 64, dtype=torch.int64), weight, target, None, None),
        "a sparse x": (x.detach().to_sparse(), weight, target, None, None),
        "a number": (torch.randn(()), weight, target, None, None),
        "the weight's type": (x, weight.double(), target, None, None),
        "the weight's width": (x, weight[:, :-1], target, None, None),
        "no classes": (x, weight[:0], target, None, None),
        "a weight with three dimensions": (x, weight[None], target, None, None),
        "the target's type": (x, weight, target.int(), None, None),
        "the target's shape": (x, weight, target[1:], None, None),
        "the target's device": (x, weight, target.to("meta"), None, None),
        "no target": (x, weight, None, None, None),
        "the bias's shape": (x, weight, target, bias[1:], None),
        "the bias's type": (x, weight, target, bias.long(), None),
        "the bias's device": (x, weight, target, bias.to("meta"), None),
        "class_weight's gradient": (x, weight, target, bias, trained),
        "class_weight's shape": (x, weight, target, bias, trained.detach()[None]),
    }


@pytest.mark.parametrize("name", _wrong())
def test_no_quick_look_lets_a_wrong_argument_pass(name: str) -> None:
    args = _wrong()[name]
    assert not _extension._C.loss_arguments_fit(*args)
    with pytest.raises((TypeError, ValueError)):
        ckptfused.linear_cross_entropy(*args[:4], class_weight=args[4])
