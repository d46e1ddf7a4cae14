"""What other chunked losses stop at, shown beside ours, each pinned, so that a test says when the other changes.

Liger (`pip install --no-deps liger-kernel`, Triton) is no part of the test group: its test is skipped without it.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ckptfused

lce: Any = ckptfused.linear_cross_entropy
TOKENS, WIDTH, CLASSES = 600, 16, 3000


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, WIDTH, generator=generator).requires_grad_() for n in (TOKENS, CLASSES))
    return x, weight, torch.randint(CLASSES, (TOKENS,), generator=generator)


class TestPyTorch:
    """`torch.nn.functional.linear_cross_entropy` of 2.13, in chunks."""

    pytestmark = pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch has none")

    @staticmethod
    def theirs(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
        call: Any = F.linear_cross_entropy  # type: ignore[attr-defined]
        chunks = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
        return call(x, weight, target, options=chunks, **options)

    def test_the_same_loss_and_gradients(self) -> None:
        x, weight, target = inputs()
        losses = [f(x, weight, target) for f in (lce, self.theirs)]
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*(torch.autograd.grad(loss, (x, weight)) for loss in losses))

    def test_a_second_backward(self) -> None:
        x, weight, target = inputs()
        ours, theirs = lce(x, weight, target), self.theirs(x, weight, target)
        first = [g.clone() for g in torch.autograd.grad(ours, (x, weight), retain_graph=True)]
        torch.testing.assert_close(torch.autograd.grad(ours, (x, weight)), tuple(first), rtol=0, atol=0)
        torch.autograd.grad(theirs, (x, weight), retain_graph=True)
        with pytest.raises(RuntimeError, match="backward called twice"):
            torch.autograd.grad(theirs, (x, weight))

    def test_a_second_derivative(self) -> None:
        x, weight, target = inputs()
        first = torch.autograd.grad(self.theirs(x, weight, target), x, create_graph=True)[0]
        assert not first.requires_grad  # and nothing says so
        first = torch.autograd.grad(lce(x, weight, target), x, create_graph=True)[0]
        got = torch.autograd.grad(first.square().sum(), x)[0]
        plain = torch.autograd.grad(F.cross_entropy(F.linear(x, weight), target), x, create_graph=True)[0]
        torch.testing.assert_close(got, torch.autograd.grad(plain.square().sum(), x)[0])

    def test_compile_without_a_graph_break(self) -> None:
        x, weight, target = inputs()
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(self.theirs, fullgraph=True, backend="aot_eager")(x, weight, target)
        got = torch.compile(lce, fullgraph=True, backend="aot_eager")(x, weight, target)
        torch.testing.assert_close(got, lce(x, weight, target))

    def test_function_transforms(self) -> None:
        x, weight, target = (t.detach() for t in inputs())
        with pytest.raises(RuntimeError, match="setup_context"):
            torch.func.grad(lambda x: self.theirs(x, weight, target))(x)
        assert torch.func.grad(lambda x: lce(x, weight, target))(x).shape == x.shape

    def test_softcap(self) -> None:
        x, weight, target = inputs()
        with pytest.raises(TypeError, match="softcap"):
            self.theirs(x, weight, target, softcap=3.0)
        capped = 3 * torch.tanh(F.linear(x, weight) / 3)
        torch.testing.assert_close(lce(x, weight, target, softcap=3.0), F.cross_entropy(capped, target))

    def test_no_target_counts(self) -> None:
        """Plain gradients are 0 then."""
        x, weight, target = inputs()
        for loss, zero in ((self.theirs, False), (lce, True)):
            grad = torch.autograd.grad(loss(x, weight, target.fill_(-100)), x)[0]
            assert grad.eq(0).all() if zero else grad.isnan().any()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_liger_leaves_adapters_of_the_head_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward hands the base layer's weight to its loss, which plain PyTorch stands for here, as its kernels need a
    GPU: the loss is that of the model without the head's adapter, which is not trained."""
    for package in ("transformers", "peft", "triton", "liger_kernel"):
        pytest.importorskip(package)
    import peft
    from liger_kernel.transformers.model import llama as liger

    from tests.models.small import llama
    from tests.models.zoo import text_batch

    def loss(hidden_states: Tensor, lm_head_weight: Tensor, labels: Tensor, **_: Any) -> Tensor:
        logits = F.linear(hidden_states, lm_head_weight)[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, labels[:, 1:].flatten())

    monkeypatch.setattr(liger, "LigerForCausalLMLoss", loss)
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "lm_head"])
    plain: Any = peft.get_peft_model(llama(), config).train()
    theirs, ours = copy.deepcopy(plain), copy.deepcopy(plain)
    inner = theirs.base_model.model
    inner.forward = MethodType(liger.lce_forward, inner)
    ckptfused.convert(ours, loss="chunked")
    batch = text_batch()
    with_adapter = plain(**batch).loss
    bare = copy.deepcopy(plain)
    torch.nn.init.zeros_(bare.base_model.model.lm_head.lora_B["default"].weight)
    without = bare(**batch).loss
    assert abs(with_adapter - without) > 1e-3
    torch.testing.assert_close(theirs(**batch).loss, without)
    torch.testing.assert_close(ours(**batch).loss, with_adapter)
    found = {}
    for name, model in (("theirs", theirs), ("ours", ours)):
        model(**batch).loss.backward()
        found[name] = [p.grad is not None for key, p in model.named_parameters() if "lm_head.lora" in key]
    assert not any(found["theirs"]) and all(found["ours"])
