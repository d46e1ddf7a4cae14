"""Steps whose weights are updated in backward: as measured to the byte, and gradients are never all there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from ckptfused import CheckpointPolicy, convert, plan, profile, revert
from ckptfused.cli import main
from ckptfused.models.install import install
from ckptfused.models.release import releases_of
from tests.accounting import Events
from tests.cases import by_turns
from tests.profiler.test_accumulation import SIZES, tokens

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # its new name, in peft's own code
]
VARIANTS: dict[str, Callable[[Any], object]] = {
    "plain": lambda model: None,
    "checkpointed": lambda model: model.gradient_checkpointing_enable(),
    "converted": convert,
    "chunked": lambda model: convert(model, loss="chunked"),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "AdamW": torch.optim.AdamW,
    "fused AdamW": lambda weights: torch.optim.AdamW(weights, fused=True),
}
KINDS = ("peak", "weights", "optimizer", "gradients", "activations", "loss_head", "transients", "all_gradients")


def llama(variant: str = "converted") -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    VARIANTS[variant](model)
    return model


def allocated(model: Any, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> int:
    """The most that PyTorch's allocator holds above weights and optimizer state, in the midst of training."""

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return Events(step).peak_bytes(internal=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), by_turns(OPTIMIZERS, [(v, length) for v in VARIANTS for length in (8, 96)]))
def test_as_measured(name: str, case: tuple[str, int]) -> None:
    """To the byte, in each part and by PyTorch's own count; so is a model that was converted so. Each optimizer, where
    weights set the peak and where activations do."""
    variant, length = case
    model, batch = llama(variant), tokens(length)
    optimizer = OPTIMIZERS[name](model.parameters())
    predicted, measured, usual = (
        profile(model, batch, optimizer, "cpu", release=True),
        profile(model, batch, optimizer, release=True),
        profile(model, batch, optimizer, "cpu"),
    )
    assert [getattr(predicted, kind) for kind in KINDS] == [getattr(measured, kind) for kind in KINDS]
    assert predicted.gradients == predicted.all_gradients == 0 and predicted.release
    assert predicted.peak < usual.peak or case == ("plain", 96)  # whose peak is before there are gradients
    assert not releases_of(model)
    if variant in ("converted", "chunked"):
        convert(model, loss="chunked" if variant == "chunked" else None, release=optimizer)
        assert profile(model, batch, device="cpu").peak == profile(model, batch).peak == predicted.peak
        assert allocated(model, batch, optimizer) == predicted.above_state
        revert(model)


def test_what_it_saves() -> None:
    """All gradients but those of the layer, or of the embeddings, that is being updated: by hand."""
    model, batch = llama("chunked"), tokens(1)
    optimizer = torch.optim.SGD(model.parameters())
    predicted = profile(model, batch, optimizer, "cpu", release=True)
    usual = profile(model, batch, optimizer, "cpu")
    layer, words = (sum(p.nbytes for p in part.parameters()) for part in (model.model.layers[0], model.lm_head))
    assert usual.gradients == sum(p.nbytes for p in model.parameters())
    largest = max(layer, words)
    assert largest <= predicted.above_state < largest + layer // 8  # activations of two tokens


def test_a_measured_step_leaves_no_trace() -> None:
    model, batch = llama(), tokens(8)
    optimizer = torch.optim.AdamW(model.parameters())
    convert(model, release=optimizer)
    before = [p.clone() for p in model.parameters()]
    profile(model, batch)
    assert all(map(torch.equal, before, model.parameters())) and not optimizer.state
    model(**batch).loss.backward()
    assert not torch.equal(before[0], next(model.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("length", [8, 96])
def test_a_plan(length: int) -> None:
    """What was counted by layers is what the whole step needs, and that is what PyTorch's allocator says."""
    model, batch = llama("plain"), tokens(length)
    optimizer = torch.optim.AdamW(model.parameters())
    usual = plan(model, batch, "64MiB", optimizer, "cpu")
    free = plan(model, batch, "64MiB", optimizer, "cpu", release=True)
    assert free.peak <= usual.peak
    least = plan(model, batch, free.front[0].peak, optimizer, "cpu", release=True)
    assert least.peak <= least.budget < plan(model, batch, usual.front[0].peak, optimizer, "cpu").peak
    install(model, least.policy)
    own = profile(model, batch, optimizer, release=True)
    assert own.peak <= least.peak
    assert json.loads(least.to_json())["release"] is True and CheckpointPolicy.from_json(least.policy.to_json())


@pytest.mark.parametrize("step", [{"gradient_accumulation_steps": 2}, {"optimizer": None}, {"shards": 2}])
def test_what_cannot_be(step: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="release: expected a step with an optimizer, of one batch, on one device"):
        plan(nn.Linear(2, 2), torch.ones(2), **{"optimizer": torch.optim.SGD} | step, device="cpu", release=True)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--config", "llama-3-8b", "--seq", "512", "--checkpoint", "ckptfused-and-loss", "--json"]
    peaks = []
    for more in ([], ["--release"]):
        assert main(["profile", *asked, *more]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["peak"])
    assert peaks[1] < peaks[0] - 12 * 2**30  # of 14.96 GiB of gradients
