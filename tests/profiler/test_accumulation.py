"""Steps whose gradients add up over several batches: from the second on all gradients are there from the begin."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from ckptfused import BudgetError, convert, doctor, plan, profile
from ckptfused.cli import main
from ckptfused.planner import frontier
from ckptfused.planner.predicted_steps import PredictedSteps
from ckptfused.planner.sharding import sharded
from ckptfused.planner.step_costs import costs
from ckptfused.profiler import Profile
from ckptfused.profiler.step import TrainingStep, loss_of, model_output
from ckptfused.simulate.devices import device_named
from ckptfused.simulate.meta_copy import copy_to_meta, without_data
from tests.accounting import Events

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # its new name, in peft's own code
]
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES)).train()


def tokens(length: int = 96) -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (2, length))
    return {"input_ids": ids, "labels": ids}


def converted(**options: Any) -> Any:
    model = llama()
    convert(model, **options)
    return model


def lora() -> Any:
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=8, target_modules="all-linear"))
    convert(model)
    return model


class Words(nn.Module):
    """A model with a parameter that no step uses, and one that a step uses twice."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(300, 32, sparse=sparse)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(3))
        self.unused = nn.Parameter(torch.ones(1000))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return (
            x.square().mean()
            if self.words.sparse
            else nn.functional.cross_entropy((x @ self.words.weight.T).flatten(0, 1), labels.flatten())
        )


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "plain": llama,
    "converted": converted,
    "chunked": lambda: converted(loss="chunked"),
    "LoRA": lora,
    "of nobody's kind": Words,
}


def second_batch(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """The most that PyTorch's allocator holds while a batch runs that finds the gradients of another one."""

    def step() -> None:
        loss_of(model_output(model, batch)).backward()

    step()
    made = [p.grad for p in model.parameters() if p.grad is not None]
    owned = [*model.parameters(), *model.buffers(), *batch.values(), *made]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in owned}
    del made, owned
    return sum(storages.values()) + Events(step).peak_bytes(internal=True)


@pytest.mark.parametrize("name", MAKERS)
def test_as_measured(name: str) -> None:
    """To the byte, in each part and by PyTorch's own count; so does a step that sets gradients to zero and keeps them.
    Only gradients that are there, and the one that is added to them, are what accumulating adds."""
    torch.manual_seed(0)
    model, batch = MAKERS[name](), tokens()
    predicted, measured, one = (
        profile(model, batch, device="cpu", gradient_accumulation_steps=3),
        profile(model, batch, gradient_accumulation_steps=2),
        profile(model, batch, device="cpu"),
    )
    kinds = ("peak", "weights", "gradients", "activations", "loss_head", "transients", "all_gradients", "saved")
    assert [getattr(predicted, kind) for kind in kinds] == [getattr(measured, kind) for kind in kinds]
    assert predicted.peak == second_batch(model, batch) > one.peak
    assert predicted.gradients == predicted.accumulated == predicted.all_gradients
    assert one.accumulated == 0 and predicted.peak <= one.peak + predicted.all_gradients
    assert [part.gradients for part in predicted.parts] == [part.gradients for part in one.parts]
    model.zero_grad(set_to_none=False)
    assert second_batch(model, batch) == predicted.peak


def test_sparse_gradients() -> None:
    """Each batch adds its rows to them: of two they count; of more a prediction says so, and no plan takes it for all.
    (Whose rows they are is in the batch's own memory, which a prediction counts once more.)"""
    batch, model = tokens(), Words(sparse=True)
    predicted, measured, more = (
        profile(model, batch, device=device, gradient_accumulation_steps=batches)
        for device, batches in (("cpu", 2), (None, 2), ("cpu", 3))
    )
    assert measured.peak <= predicted.peak <= measured.peak + 2 * batch["input_ids"].nbytes and not predicted.notes
    assert "sparse gradients count as" in " ".join(more.notes)
    with pytest.raises(ValueError, match="no plan keeps a budget where sparse gradients count as those of two batches"):
        plan(model, batch, "1GiB", device="cpu", gradient_accumulation_steps=3)


def test_the_optimizer_steps_once() -> None:
    """After the last batch; the time is that of all."""
    model, batch = llama(), tokens()
    optimizer = torch.optim.AdamW(model.parameters())
    predicted, measured = (
        profile(model, batch, optimizer, device, gradient_accumulation_steps=4) for device in ("cpu", None)
    )
    assert predicted.peak == measured.peak and predicted.optimizer == measured.optimizer
    assert predicted.seconds == pytest.approx(
        4 * (predicted.forward_seconds + predicted.backward_seconds) + predicted.optimizer_seconds
    )
    assert [name for _, name in measured.marks] == ["forward", "backward", "optimizer", "end"]
    assert predicted.timeline[0].bytes[2] == predicted.all_gradients
    assert "gradients accumulated over 4 batches" in str(predicted)
    assert Profile.from_json(predicted.to_json()).gradient_accumulation_steps == 4


@pytest.mark.slow
def test_a_budget_holds() -> None:
    """The least one, and one that lets some layers keep more. A plan for steps of one batch exceeds it.
    What a plan leaves free for oneDNN, which may need less, is in no measurement."""
    torch.manual_seed(0)
    batch, options = tokens(384), {"device": "cpu", "gradient_accumulation_steps": 2}
    with pytest.raises(BudgetError) as refused:
        plan(llama(), batch, 1, **options)
    least = refused.value.least
    found = plan(llama(), batch, budget := int(1.3 * least), **options)
    room = found.profile.workspace
    report = convert(model := llama(), budget=least, batch=batch, **options)
    assert report.policy.is_divided and 0.97 * (least - room) <= second_batch(model, batch) <= least
    found.apply(model)
    assert found.peak <= budget and found.peak - room == pytest.approx(second_batch(model, batch), rel=0.03)
    assert second_batch(model, batch) <= budget
    assert json.loads(found.to_json())["gradient_accumulation_steps"] == 2
    plan(other := llama(), batch, least, device="cpu").apply(other)
    assert second_batch(other, batch) > least - room


def test_what_is_counted_is_what_is_predicted() -> None:
    """Plans all along the front agree to the byte; those of shards need no more than of the whole model."""
    with torch.device("meta"):
        meta_copy, _ = copy_to_meta(llama(), None)
    optimizer = torch.optim.AdamW(list(meta_copy.parameters()))
    step = TrainingStep(without_data(tokens()), optimizer, device_named("h200"), gradient_accumulation_steps=2)
    steps = PredictedSteps(meta_copy, step, lambda text: None)
    found = costs(steps)
    front = frontier.Front(found.units)
    for index in range(0, len(front), 8):
        policy = found.policy(front[index].parts)
        whole = steps.of(policy)
        offloaded, x = sum(mode.offload for mode in policy.layers), 2 * 96 * 64 * 4
        copies = 2 * offloaded * 2 * x / steps.device.copy  # of each batch's, there and back
        needed = max(sum(peak.parts) for peak in whole.phases) + found.base.weights + found.base.optimizer
        assert abs(found.peak(front.peaks[index]) - max(needed, found.least)) <= x * min(1, offloaded)
        seconds = whole.seconds + copies + found.base.optimizer_seconds
        assert found.seconds(front.seconds[index]) == pytest.approx(seconds)
    halves = sharded(found, meta_copy, 2)
    assert halves.state < found.state and halves.least < found.least


def test_the_doctor_counts_them() -> None:
    """Activations are half of a step's memory, and less than two fifths of one that finds all gradients."""
    with torch.device("meta"):
        model = llama()
    batch, sgd = tokens(28), torch.optim.SGD(model.parameters())

    def said(steps: int) -> list[str]:
        found = doctor(model, batch, sgd, gradient_accumulation_steps=steps)
        return [finding.text for finding in found if "activations are" in finding.text]

    assert said(1) == [] and len(said(2)) == 1


def test_what_is_refused_and_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for call in (profile, plan, doctor):
        with pytest.raises(ValueError, match="gradient_accumulation_steps: expected"):
            call(nn.Linear(2, 2), torch.ones(2), gradient_accumulation_steps=0)
    with pytest.raises(ValueError, match="gradient_accumulation_steps: pass budget= with it"):
        convert(llama(), gradient_accumulation_steps=2)
    step = ["profile", "--config", "tests.profiler.test_accumulation:made", "--device", "l40s", "--json"]
    assert main([*step, "--gradient-accumulation-steps", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gradient_accumulation_steps"] == 8 and found["gradients"] == found["all_gradients"]


def made() -> Any:
    return llama(), tokens()


@pytest.mark.parametrize("of_module", [False, True])
def test_a_hook_that_adds_is_no_sum_of_gradients(of_module: bool) -> None:
    """What it makes is beside its terms, which autograd would add in place."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 256), nn.Linear(256, 16)
            if of_module:
                self.down.register_full_backward_hook(lambda m, gx, gy: (gx[0] * 0.9 + gx[0].sin(),))

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            if not of_module:
                y.register_hook(lambda g: g * 0.9 + g.sin())
            return x + self.down(y.exp())  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, x = nn.Sequential(Layer(), Layer()), torch.randn(500, 16)
    predicted, measured = (profile(model, x, torch.optim.SGD, device) for device in ("cpu", None))
    assert predicted.peak >= measured.peak
    assert predicted.peak <= 1.01 * measured.peak
