"""The callback in Lightning's Trainer: weights are those of training without it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("lightning")

import lightning.pytorch as lightning

import ckptfused
from ckptfused.integrations import LightningCallback
from ckptfused.integrations.peak import PeakMeter
from tests.integrations.test_transformers import converted

pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore")]  # Lightning's own, about workers and its logger


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def training_step(self, x: Tensor, index: int) -> Tensor:
        return self.encoder(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> Any:
    return torch.utils.data.DataLoader(torch.randn(8, 5, 16, generator=torch.Generator().manual_seed(1)), batch_size=2)


def fit(folder: Path, callbacks: list[Any], resume: Any = None, **options: Any) -> Module:
    module = Module()
    options = {"max_epochs": 2, "enable_checkpointing": False, **options}
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
        default_root_dir=folder, **options,
    )  # fmt: skip
    trainer.fit(module, batches(), ckpt_path=resume)
    return module


def assert_same_weights(a: Module, b: Module) -> None:
    for name, value in a.state_dict().items():
        torch.testing.assert_close(value, b.state_dict()[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_weights_are_those_of_the_plain_module(accumulation: int, tmp_path: Path, caplog: Any) -> None:
    callback = LightningCallback("encoder", every=3)
    with caplog.at_level(logging.INFO, "ckptfused.integrations.run"):
        module = fit(tmp_path, [callback], accumulate_grad_batches=accumulation)
    assert_same_weights(module, fit(tmp_path, [], accumulate_grad_batches=accumulation))
    assert callback.report.fused == 2 and converted(module)
    assert callback.peaks and min(callback.peaks.values()) > 0
    assert callback.summary() in caplog.messages and "2 of 2 layers fused" in callback.summary()


def test_a_budget_is_compared_with_steps(tmp_path: Path, caplog: Any) -> None:
    callback = LightningCallback("encoder", every=1, budget="1GiB", batch=(torch.randn(2, 5, 16),))
    with caplog.at_level(logging.INFO, "ckptfused.integrations.run"):
        fit(tmp_path, [callback])
    assert len(callback.peaks) == 8 and "of the plan's" in caplog.text
    assert 0.5 * callback.report.peak < max(callback.peaks.values())


class Reading(lightning.Callback):
    """Looks at gradients before Lightning frees them."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append(any(p.grad is not None for p in pl_module.parameters()))


@pytest.mark.parametrize("asked", [True, False])
def test_gradients_stay_for_who_reads_them(asked: bool, tmp_path: Path) -> None:
    reading, batch = Reading(), (torch.randn(2, 5, 16),)
    plans = []
    for others, free in (([reading], True), ([], asked)):
        callback = LightningCallback("encoder", every=1, budget="1GiB", batch=batch, free_gradients=free)
        fit(tmp_path, [callback, *others])
        plans.append(callback.report.peak)
    assert reading.seen[1:] == [True] * 7
    assert (plans[0] > plans[1]) == asked


@pytest.mark.parametrize(("accumulation", "free"), [(1, True), (2, True), (1, False)])
def test_no_step_needs_more_than_the_plan(accumulation: int, free: bool, tmp_path: Path) -> None:
    """Lightning frees a step's gradients after the next one's forward: they are freed before, or planned for."""
    torch.manual_seed(0)
    x = torch.randn(8, 64, 64)

    class Wide(Module):
        def __init__(self) -> None:
            super().__init__()
            layer = torch.nn.TransformerEncoderLayer(64, 2, 512, dropout=0.0, batch_first=True)
            self.encoder = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

        def training_step(self, x: Tensor, index: int) -> Tensor:
            return self.encoder(x).sum()  # a plan for the encoder knows no other loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    least = None
    for budget in ("1GiB", None):
        callback = LightningCallback("encoder", every=1, budget=budget or least, batch=(x[:2],), free_gradients=free)
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=1, callbacks=[callback], accumulate_grad_batches=accumulation, logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(Wide(), torch.utils.data.DataLoader(x, batch_size=2))
        assert callback.report.peak is not None
        assert max(callback.peaks.values()) <= callback.report.peak, (budget, callback.peaks)
        least = int(0.9 * callback.report.peak)


@pytest.mark.parametrize("every", [2, 100])
def test_all_batches_of_a_step_count(every: int, tmp_path: Path) -> None:
    """From the second on there are gradients that add up."""
    of_each = LightningCallback("encoder", every=1)
    fit(tmp_path, [of_each], accumulate_grad_batches=2)
    callback = LightningCallback("encoder", every=every)
    fit(tmp_path, [callback], accumulate_grad_batches=2)
    assert [*callback.peaks] == ([1, 2, 4, 6, 8] if every == 2 else [1])[: len(callback.peaks)]
    assert callback.peaks[1] == of_each.peaks[1] and len(callback.peaks) == 1 + (every == 2) * len(of_each.peaks) // 2


def test_gradients_that_go_within_a_step_count_until_then() -> None:
    """PyTorch's profiler knows of a release what it saw allocated, as where each step is measured."""
    model = torch.nn.Linear(64, 64)
    first = PeakMeter(model, None)
    model(torch.ones(2, 64)).sum().backward()
    first.ends()
    gradients = sum(p.nbytes for p in model.parameters())
    second = PeakMeter(model, None)
    model.zero_grad()
    taken = torch.ones(64, 64)  # in the place of the weight's
    assert second.ends() == 2 * gradients - model.bias.nbytes and taken.nbytes == model.weight.nbytes


@pytest.mark.parametrize("reverts", [False, True])
def test_resuming_and_reverting(reverts: bool, tmp_path: Path) -> None:
    """A checkpoint holds the plain module's weights, from which training goes on with the callback."""
    saving = lightning.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    options = {"enable_checkpointing": True}
    module = fit(tmp_path, [LightningCallback("encoder", revert_before_saving=reverts), saving], **options)
    assert converted(module) != reverts
    held = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    assert held["state_dict"].keys() == Module().state_dict().keys()
    callback = LightningCallback("encoder")
    resumed = fit(tmp_path, [callback], tmp_path / "epoch=0.ckpt")
    assert callback.report.fused == 2
    assert_same_weights(resumed, module)


def test_without_a_module_all_of_it_is_converted(tmp_path: Path) -> None:
    callback = LightningCallback(keep="attention")
    module = fit(tmp_path, [callback])
    assert callback.report.fused == 2 and callback.report.policy == ckptfused.CheckpointPolicy.uniform("attention")
    assert converted(module)
