"""Adapters beside a projection that both halves of a layer share: each half has its rows of B, or its columns of A."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("peft")

import peft

import ckptfused
from tests.models.derive.modulated import JOINT, SINGLE
from tests.models.derive.test_modulated import Stack, called
from tests.models.small import unfused

FORMS = {"last": SINGLE, "first and last": JOINT}
TARGETS = {
    "last": (["out"], ["qkv", "fc1", "out"]),
    "first and last": (["both"], ["out"], ["both", "out", "adaLN.1"]),
}


def adapted(form: str, targets: list[str], layers: int = 2, **options: Any) -> Any:
    """Layers in float64 with adapters that add something."""
    torch.manual_seed(0)
    model = Stack(FORMS[form], layers=layers).double()
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **options)
    peft.inject_adapter_in_model(config, model)
    return model.double().train()


def results(model: Any, args: tuple[Tensor, ...], count: int) -> Tensor:
    with torch.no_grad():
        return torch.stack([model(*args) for _ in range(count)])


def step(model: Any, args: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in args]
    y = model(*leaves)
    trained = [p for p in model.parameters() if p.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [*leaves, *trained])]


@pytest.mark.parametrize(("form", "targets"), [(form, t) for form, of in TARGETS.items() for t in of], ids=str)
@pytest.mark.parametrize("options", [{}, {"lora_bias": True}, {"use_rslora": True, "lora_alpha": 3}], ids=str)
@pytest.mark.parametrize("keep", ["inputs", "all"])
def test_every_gradient_is_the_layers_own(form: str, targets: list[str], options: Any, keep: str) -> None:
    model, args = adapted(form, targets, **options), called(FORMS[form], dtype=torch.float64)
    own = copy.deepcopy(model)
    ckptfused.convert(own, keep=keep)
    expected = step(model, args)
    with unfused() as reasons:
        found = step(own, args)
    assert not reasons
    for a, b in zip(found, expected, strict=True):  # the gradient of k's biases is nothing but rounding
        torch.testing.assert_close(a, b, rtol=1e-9, atol=float(1e-11 * b.abs().max()))


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
def test_several_adapters_and_what_becomes_of_them() -> None:
    model, args = adapted("first and last", ["both", "out"]), called(JOINT, dtype=torch.float64)
    other = peft.LoraConfig(r=3, target_modules=["out"], init_lora_weights=False, lora_alpha=5)
    peft.inject_adapter_in_model(other, model, adapter_name="other")
    model.double()
    own = copy.deepcopy(model)
    ckptfused.convert(own)
    layers = [[m for m in each.modules() if hasattr(m, "lora_A")] for each in (model, own)]
    for change in (
        lambda m: m.set_adapter("default"),
        lambda m: m.set_adapter(["default", "other"]) if "other" in m.lora_A else None,
        lambda m: m.set_scale("default", 0.5),
        lambda m: m.merge(),
        lambda m: m.unmerge(),
    ):
        for modules in layers:
            for m in modules:
                change(m)
        with unfused() as reasons:
            y = own(*args)
        assert not reasons
        torch.testing.assert_close(y, model(*args), rtol=1e-9, atol=1e-10)


def test_dropout_before_the_last_projection() -> None:
    """Each half drops what is its own: as often as the layer's, and independently. The result is linear in the masks,
    so its mean is that of evaluation, and its variance the layer's."""
    args, count = called(SINGLE, dtype=torch.float64), 2000
    plain, own = (adapted("last", ["out"], layers=1, lora_dropout=0.5) for _ in range(2))
    ckptfused.convert(own)
    with unfused() as reasons:
        found = results(own, args, count)
    assert not reasons
    expected, mean = results(plain, args, count), results(plain.eval(), args, 1)[0]
    error = expected.std(0) / count**0.5
    assert (error > 0).all()
    assert ((found.mean(0) - mean).abs() < 6 * error).all()
    # Of sums of some sixty numbers, the relative error of a standard deviation of 2,000 is 1.6 %.
    torch.testing.assert_close(found.std(0), expected.std(0), rtol=0.15, atol=0.0)


def test_dropout_before_a_first_product_that_is_shared() -> None:
    """The layer draws one mask for it; its parts here would have masks of their own."""
    model, args = adapted("first and last", ["both"], lora_dropout=0.5), called(JOINT, dtype=torch.float64)
    ckptfused.convert(model)
    with unfused() as reasons:
        model(*args)
    assert len(reasons) == 2 and all("whose parts go different ways" in str(reason) for reason in reasons), reasons
