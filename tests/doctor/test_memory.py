"""Models too large for a step that saves everything: parts of it are compared, or replays alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import ckptfused
from ckptfused.doctor import certificate, doctor, saving, steps
from tests.doctor import models
from tests.doctor.models import batch, stack, torch_checkpoint, wrapped
from tests.doctor.test_certificate import called, same, state

pytestmark = pytest.mark.once


@pytest.fixture
def _a_third_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one of three layers' activations."""
    parts = [1]

    def share_noted(model: nn.Module, share: saving.Share) -> Any:
        parts[0] = share.parts
        return saving.everything_saved(model, share)

    monkeypatch.setattr(certificate, "everything_saved", share_noted)
    monkeypatch.setattr(steps, "_host_memory", lambda: (1000 * (parts[0] >= 3), 1000))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "functions": lambda: stack(lambda: nn.Dropout(0.5)),
    "reentrant": lambda: stack(lambda: nn.Dropout(0.5), torch_checkpoint(use_reentrant=True)),
    "wrapped": lambda: wrapped(lambda: nn.Dropout(0.5)),
    "converted": lambda: converted(),
    "fused": lambda: nn.Sequential(*(ckptfused.FusedCheckpointBlock(8, 2, 16) for _ in range(3))),
}


def converted() -> nn.Module:
    model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2) for _ in range(3)))
    ckptfused.convert(model)
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("_a_third_fits")
def test_a_step_that_saves_a_third_at_a_time(name: str) -> None:
    """A certificate of all gradients; each part of it replays what is in the other parts."""
    model = MODELS[name]()
    before = state(model)
    found = doctor(model, batch())
    assert found.healthy and found.certificate.startswith("Certificate: loss, "), found
    assert "those of one that saves everything, in 3 parts for lack of memory (" in found.certificate
    same(before, state(model))


@pytest.mark.usefixtures("_a_third_fits")
def test_each_part_replays_the_others() -> None:
    model = wrapped(lambda: nn.Dropout(0.5))
    with called(models.Layer) as layers:
        doctor(model, batch())
    tried, step = 1 + 1, 3 + 3  # in one and in two parts, the first calls of which find no memory
    assert layers.call_count == step + (tried - 2) + 3 * (step - 1)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.usefixtures("_a_third_fits")
def test_a_fault_in_any_part_is_seen(place: int) -> None:
    """Also one that no module's result shows: the last thing that a checkpoint does."""
    model = wrapped(nn.Identity, preserve_rng_state=False)
    model.layers[place]._checkpoint_wrapped_module.register_forward_hook(
        lambda module, args, result: nn.functional.dropout(result, 0.5).sin()
    )
    found = doctor(model, batch())
    assert not found.healthy and "the gradients are off by" in found[0].text, found
    assert found[0].place.startswith(f"layers.{place}"), found


def test_a_step_that_does_not_fit_is_compared_by_its_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_host_memory", lambda: (1, 1000))
    good = doctor(stack(lambda: nn.Dropout(0.5)), batch())
    assert good.healthy and good.certificate.startswith(
        "No certificate: a step that saves everything ran out of memory"
    )
    wrong = doctor(stack(models.PythonDropout), batch())
    assert [(f.severity, f.place) for f in wrong] == [("error", "layers.1.piece")]
