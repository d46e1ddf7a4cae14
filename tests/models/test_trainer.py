"""Training loops of other libraries run on a converted model as on the plain one."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import ckptfused
from tests.accounting import CountOps
from tests.models.compare import all_close, close, gradients, no_worse, run, train
from tests.models.small import llama, parameters, twins, unfused
from tests.models.test_families import DRAWS
from tests.models.zoo import VOCABULARY, text_batch


class Texts(torch.utils.data.Dataset):
    """Random ids, the same each time."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCABULARY, (11,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def fine_tune(model: Any, folder: Path, steps: int = 4, resume: str | None = None, **options: Any) -> Any:
    """The trainer after its steps, and the losses."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=3,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **{"save_strategy": "no", **options},
    )
    trainer = Trainer(model, arguments, train_dataset=Texts())
    trainer.train(resume_from_checkpoint=resume)
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_curves_agree(got: list[float], want: list[float]) -> None:
    assert len(got) == len(want)
    assert got == pytest.approx(want, rel=1e-5, abs=1.01e-4)  # the log rounds to four places
    assert len(set(got)) > 1


trainer_warnings = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipping": {"max_grad_norm": 0.05},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
}


@trainer_warnings
@pytest.mark.parametrize("name", OPTIONS)
def test_trainer(name: str, tmp_path: Path) -> None:
    plain, model = twins()
    options = OPTIONS[name]
    with unfused() as reasons, CountOps() as ops:
        _, got = fine_tune(model, tmp_path / "a", **copy.deepcopy(options))
    assert not reasons
    calls = 2 * 4 * options.get("gradient_accumulation_steps", 1)
    assert ops.blocks == (calls, calls)
    _, want = fine_tune(plain, tmp_path / "b", **copy.deepcopy(options))
    assert_curves_agree(got, want)


@trainer_warnings
def test_trainer_with_packed_batches(tmp_path: Path) -> None:
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    class Ragged(Texts):
        def __getitem__(self, index: int) -> dict[str, Any]:
            ids = super().__getitem__(index)["input_ids"][: 4 + index % 7].tolist()
            return {"input_ids": ids, "labels": ids}

    losses = []
    for model in twins():
        model.config.use_cache = False  # with a cache, the model does not look for packed sequences
        arguments = TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=4, logging_steps=1, report_to="none",
            use_cpu=True, save_strategy="no", disable_tqdm=True, learning_rate=1e-3,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=Ragged(), data_collator=DataCollatorWithFlattening())
        with unfused() as reasons:
            trainer.train()
        assert not reasons
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert_curves_agree(losses[1], losses[0])


@trainer_warnings
@pytest.mark.parametrize("into", ["converted", "plain"])
def test_resuming_a_trainer(into: str, tmp_path: Path) -> None:
    """A checkpoint of a converted model is one of the plain model, and either goes on from it."""
    plain, model = twins()
    _, want = fine_tune(plain, tmp_path / "whole", steps=4)
    _, first = fine_tune(model, tmp_path / "halves", steps=4, save_strategy="steps", save_steps=2)
    assert_curves_agree(first, want)
    other = llama(seed=3)
    if into == "converted":
        ckptfused.convert(other)
    checkpoint = tmp_path / "halves" / "checkpoint-2"
    _, resumed = fine_tune(other, tmp_path / "halves", steps=4, resume=str(checkpoint))
    assert_curves_agree(resumed, want)


def test_accelerate(tmp_path: Path) -> None:
    """Prepared after convert and before it, unwrapped, saved."""
    accelerate = pytest.importorskip("accelerate")
    plain, first = twins()
    second = copy.deepcopy(plain)
    results = []
    for model in (plain, first, second):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepared, optimizer = accelerator.prepare(model, optimizer)
        if model is second:
            assert ckptfused.convert(prepared).fused == 2
        for _ in range(4):
            with accelerator.accumulate(prepared):
                out = prepared(**text_batch())
                accelerator.backward(out.loss)
                accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        results.append(parameters(accelerator.unwrap_model(prepared)))
        accelerator.save_model(prepared, str(tmp_path / str(len(results))))
    close(results[1], results[0], 1e-5)
    close(results[2], results[0], 1e-5)


@pytest.mark.slow
def test_accelerate_bf16_and_hooks() -> None:
    """`accelerate` patches the forward of the model for mixed precision, of layers for offloading."""
    accelerate = pytest.importorskip("accelerate")
    plain, model = twins()
    want = run(plain, text_batch())
    accelerate.hooks.add_hook_to_module(model.model.layers[0], accelerate.hooks.ModelHook())
    close(run(model, text_batch()), want, 1e-5)
    assert ckptfused.convert(model).fused == 1  # the patched one is checkpointed as it is
    close(run(model, text_batch()), want, 1e-5)
    assert ckptfused.revert(model) == 2
    with unfused() as reasons:
        close(run(model, text_batch()), want, 1e-5)
    assert not reasons and not any("forward" in vars(layer) for layer in model.model.layers[1:])
    ckptfused.convert(model)
    accelerate.hooks.remove_hook_from_module(model.model.layers[0])
    assert ckptfused.convert(model).fused == 2
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    draws: list[Any] = []
    for seed in range(DRAWS):
        plain, model = twins(seed=seed)
        truth = run(plain, text_batch())
        draws.append((*(run(accelerator.prepare(one), text_batch()) for one in (model, plain)), truth))
        accelerator.free_memory()
    accelerate.state.AcceleratorState._reset_state(True)
    no_worse(draws, torch.bfloat16)


@pytest.mark.filterwarnings("ignore")  # Lightning's own, about its loaders and torch's interfaces
def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    losses = []
    for model in twins():
        module = Module(model)
        trainer = lightning.Trainer(
            max_steps=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, gradient_clip_val=0.5, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(Texts(), batch_size=3))
        losses.append(module.losses)
        trainer.save_checkpoint(tmp_path / f"{len(losses)}.ckpt")
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    states = [torch.load(tmp_path / f"{i}.ckpt", weights_only=False)["state_dict"] for i in (1, 2)]
    close(states[1], states[0], 1e-5)


def test_a_loop_with_accumulation_and_clipping() -> None:
    def step(model: Any) -> dict[str, Tensor]:
        model.zero_grad()
        losses = []
        for seed in range(3):
            ids = torch.randint(0, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(seed))
            loss = model(input_ids=ids, labels=ids).loss / 3
            loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return {"loss": sum(losses), "norm": norm, **gradients(model)}  # type: ignore[dict-item]

    plain, model = twins()
    want = train(plain, step)
    assert all(found["norm"] > 0.1 for found in want)
    all_close(train(model, step), want, 1e-5)


def autocast_step(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**text_batch()).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def test_autocast_bfloat16() -> None:
    """Against float32, no worse than twice the unconverted model under autocast, in each of a few steps."""
    draws: list[Any] = []
    for seed in range(DRAWS):
        plain, model = twins(seed=seed)
        truth = train(copy.deepcopy(plain), lambda one: run(one, text_batch()))
        with unfused() as reasons:
            ours = train(model, autocast_step)
        assert not reasons
        draws += zip(ours, train(plain, autocast_step), truth, strict=True)
    no_worse(draws, torch.bfloat16)


def scaled_steps(model: Any) -> tuple[list[tuple[float, bool]], list[dict[str, Tensor]]]:
    """Float16 steps with a scaler: its scale and whether weights moved; loss and gradients of those that moved."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=2)
    log, steps = [], []
    for _ in range(22):
        before = parameters(model)
        with torch.autocast("cpu", torch.float16):
            loss = model(**text_batch()).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found = {"loss": loss.detach(), **gradients(model)}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = any(not torch.equal(p, before[name]) for name, p in model.named_parameters())
        log.append((scaler.get_scale(), moved))
        if moved:
            steps.append(found)
    assert all(p.isfinite().all() for p in model.parameters())
    return log, steps


def clipped_step(model: Any) -> dict[str, Tensor]:
    found = run(model, text_batch())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return found


def scale_gradient(x: Tensor, factor: float) -> None:
    x.register_hook(lambda grad: grad * factor)


@pytest.mark.parametrize("fault", [1.0, 1.05], ids=["right", "fault"])
def test_float16_with_a_grad_scaler(fault: float) -> None:
    """An overflow is seen and its step skipped as in the unconverted model, and the scale moves alike.

    All other steps, against float32, are no worse than twice the unconverted model's; a planted fault is.
    """
    plain, model = twins()
    truth = copy.deepcopy(plain)
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *call: scale_gradient(call[-1], fault))
    (log, ours), (wanted, own) = scaled_steps(model), scaled_steps(plain)
    assert {moved for _, moved in wanted} == {True, False}
    with contextlib.nullcontext() if fault == 1 else pytest.raises(AssertionError):
        assert log == wanted
        no_worse(zip(ours, own, train(truth, clipped_step, len(own)), strict=True), torch.float16)
