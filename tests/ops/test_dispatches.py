"""What a tiny block in evaluation, whose call costs as much as its work, dispatches and asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import profile

from ckptfused import FusedCheckpointBlock, _extension
from ckptfused.layer import call


def block() -> FusedCheckpointBlock:
    return FusedCheckpointBlock.from_layer(nn.TransformerEncoderLayer(16, 4, 64, 0.1, batch_first=True)).eval()


def test_evaluation_makes_no_views_of_whole_weights() -> None:
    """One op, in it four products, attention and two sums with their norms; what is used whole is not narrowed."""
    fused, x = block(), torch.randn(2, 5, 16)
    with torch.no_grad():
        fused(x)
        with profile() as found:
            fused(x)
    names = [event.name for event in found.events()]
    assert names.count("ckptfused::block_fwd") == 1 and names.count("aten::addmm") == 4
    assert names.count("ckptfused::residual_fwd") == 2 and names.count("ckptfused::attention_fwd") == 1
    assert "aten::narrow" not in names


def test_tensors_that_surely_fit_are_asked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, x = block(), torch.randn(2, 5, 16)
    with torch.no_grad():
        expected = fused(x)
        monkeypatch.setattr(call, "expected", pytest.fail)  # what is asked one by one
        assert torch.equal(fused(x), expected)


SLOTS: list[tuple[tuple[int, ...], str]] = [((4, 3), "projection"), ((4,), "norm"), ((2, 3), "adapter"), ((), "")]
FITTING: list[Any] = [torch.zeros(4, 3), torch.zeros(4).bfloat16(), torch.zeros(2, 3), "anything"]
WRONG: dict[str, tuple[int, Any]] = {
    "shape": (0, torch.zeros(3, 4)),
    "type": (0, torch.zeros(4, 3).bfloat16()),
    "device": (0, torch.zeros(4, 3, device="meta")),
    "layout": (0, torch.zeros(4, 3).to_sparse()),
    "no tensor": (0, [0.0]),
    "a norm of integers": (1, torch.zeros(4, dtype=torch.int64)),
    "an adapter's type": (2, torch.zeros(2, 3).double()),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_may_not_fit_is_asked_one_by_one(name: str) -> None:
    fits = _extension._C.ExpectedTensors(SLOTS).fit
    x = torch.zeros(1, 1, 3)
    assert fits(x, FITTING) and fits(x, [None, *FITTING[1:]])
    place, wrong = WRONG[name]
    assert not fits(x, [wrong if i == place else value for i, value in enumerate(FITTING)])
    assert not fits(x, FITTING[:-1]) and not fits(None, FITTING)
