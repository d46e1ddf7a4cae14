"""Planted faults that a step proves: each is named, with its layer and its cause."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ckptfused
from ckptfused.doctor import Findings, certificate, doctor
from tests.doctor import models
from tests.doctor.models import Stack, batch, stack, torch_checkpoint, wrapped

pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")]


class Fault(NamedTuple):
    make: Callable[[], nn.Module]
    place: str
    words: str
    severity: str = "error"


FAULTS = {
    "dropout without its random state": Fault(
        lambda: wrapped(lambda: nn.Dropout(0.5), preserve_rng_state=False),
        "layers.1.piece",
        "Dropout drew its random numbers anew in its replay",
    ),
    "dropout without its random state, reentrant": Fault(
        lambda: stack(lambda: nn.Dropout(0.5), torch_checkpoint(use_reentrant=True, preserve_rng_state=False)),
        "layers.1.piece",
        "Dropout drew its random numbers anew in its replay",
    ),
    "dropout of a function": Fault(
        lambda: stack(models.FunctionalDropout, torch_checkpoint(preserve_rng_state=False), place=2),
        "layers.2.piece",
        "FunctionalDropout drew its random numbers anew",
    ),
    "a generator that is not replayed": Fault(
        lambda: stack(models.PythonDropout), "layers.1.piece", "PythonDropout drew its random numbers anew"
    ),
    "a router with a generator of its own": Fault(
        lambda: stack(models.NoisyRouter), "layers.1.piece.gate", "a router chose otherwise in its replay"
    ),
    "a power iteration": Fault(
        lambda: stack(lambda: nn.utils.spectral_norm(nn.Linear(models.WIDTH, models.WIDTH))),
        "layers.1.piece",
        "its buffer 'weight_v' was updated between its forward and its replay",
    ),
    "statistics of batch norm": Fault(
        lambda: stack(lambda: nn.BatchNorm1d(models.WIDTH)),
        "layers.1.piece",
        "after a step, its buffers have a wrong value (updated twice, in forward and again in its replay): "
        "running_mean, running_var, num_batches_tracked",
    ),
    "a buffer that the replay reads": Fault(
        lambda: stack(models.Average),
        "layers.1.piece",
        "its buffer 'mean' was updated between its forward and its replay",
    ),
    "an attribute that the replay reads": Fault(
        lambda: stack(lambda: models.Counts(read=True)),
        "layers.1.piece",
        "its attribute 'calls' was 0 in forward and 1 in its replay",
    ),
    "an attribute that is counted twice": Fault(
        lambda: stack(lambda: models.Counts(read=False)),
        "layers.1.piece",
        "its attribute 'calls' is 2 after a step, 1 where everything is saved",
        "warning",
    ),
    "a hook that counts": Fault(
        lambda: models.counted(stack(nn.Identity)), "layers.1.up", "Linear gave other results in its replay"
    ),
    "a parameter that forward writes": Fault(
        lambda: stack(models.Codebook),
        "layers.1.piece",
        "its parameters were written between its forward and its replay, which computed with the new values: code",
    ),
    "a parameter that is moved twice": Fault(
        lambda: stack(lambda: models.CodebookAside(True)),
        "layers.1.piece",
        "its parameters or tensors have a wrong value (updated twice, in forward and again in its replay): code",
    ),
    "a tensor that is moved twice": Fault(
        lambda: stack(lambda: models.CodebookAside(False), torch_checkpoint(use_reentrant=True)),
        "layers.1.piece",
        "its parameters or tensors have a wrong value (updated twice, in forward and again in its replay): code",
    ),
    **{
        f"tensors within ({how})": Fault(
            lambda how=how: stack(lambda: models.CodebookWithin(how)),  # type: ignore[misc]
            "layers.1.piece",
            "its parameters or tensors have a wrong value (updated twice, in forward and again in its replay): books",
        )
        for how in ("dict", "list", "object", "grows")
    },
    "an iterator after the last module": Fault(
        lambda: Stack([models.Layer(), models.Advances(map(float, itertools.count(1)))], torch_checkpoint()),
        "layers.1",
        "its own code computed other values for backward in its replay than in forward",
    ),
    "an iterator after the last module, reentrant": Fault(
        lambda: Stack(
            [models.Layer(), models.Advances(map(float, itertools.count(1)))], torch_checkpoint(use_reentrant=True)
        ),
        "layers.1",
        "Advances gave other results in its replay than in forward",
    ),
    "a clock after the last module": Fault(
        lambda: Stack([models.Layer(), models.Advances(models.clock())], torch_checkpoint()),
        "layers.1",
        "its own code computed other values for backward in its replay than in forward",
    ),
    "an iterator of the checkpointed function": Fault(
        lambda: models.around(map(float, itertools.count(1))),
        "layers.0",
        "its own code computed other values for backward in its replay than in forward",
    ),
    "an iterator of the checkpointed function, reentrant": Fault(
        lambda: models.around(map(float, itertools.count(1)), reentrant=True),
        "layers.0",
        "its own code computed other values for backward in its replay than in forward",
    ),
    "autocast that ends before the replay": Fault(
        lambda: stack(nn.Identity, torch_checkpoint(context_fn=models.single_replay)),
        "layers.2.up",  # backward fails at the last layer, whose replay is the first
        "a cast: it computed under autocast bfloat16 in forward and off in its replay",
    ),
    "dropout with a small probability": Fault(
        lambda: stack(lambda: nn.Dropout(0.03), torch_checkpoint(preserve_rng_state=False), place=2),
        "layers.2.piece",
        "Dropout drew its random numbers anew in its replay",
    ),
    "statistics that hardly move": Fault(
        lambda: stack(lambda: nn.BatchNorm1d(models.WIDTH, momentum=1e-6)),
        "layers.1.piece",
        "after a step, its buffers have a wrong value",
    ),
    "a default type that changes": Fault(
        models.ChangesDefaultType, "layers.0, layers.1, layers.2", "its own code computed other values for backward"
    ),
    "an argument that is changed": Fault(
        models.ChangesArgument, "a", "argument 'scale' was changed in place between its forward and its replay"
    ),
    "a cast": Fault(
        lambda: models.CastStack([models.Layer(), models.CastLayer(models.Casts())], torch_checkpoint()),
        "layers.1.piece",
        "a cast: its results are bfloat16 in forward and float32 in its replay",
    ),
    "a mode": Fault(
        lambda: models.Turned([models.Layer(), models.Layer(), models.Layer(nn.Dropout(0.5))], torch_checkpoint()),
        "layers.2.piece",
        "it was in train mode in forward and in eval mode in its replay",
    ),
    "control flow": Fault(
        lambda: stack(models.Branches), "layers.1.piece", "its replay called other modules than its forward"
    ),
    "an input that is changed in place": Fault(
        lambda: Stack(
            [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(models.WIDTH, models.WIDTH))] * 1, torch_checkpoint()
        ),
        "layers.0",
        "its backward fails under checkpointing only: RuntimeError: one of the variables needed for gradient",
    ),
    "frozen inputs of a reentrant checkpoint": Fault(
        lambda: frozen_first(stack(nn.Identity, torch_checkpoint(use_reentrant=True))),
        "layers.0, layers.1, layers.2",
        "its inputs are frozen and the checkpoint is reentrant: no gradient gets to 12 parameters",
    ),
}


def frozen_first(model: Any) -> nn.Module:
    model.first.requires_grad_(False)
    return model


def proved(found: Findings) -> list[tuple[str, str, str]]:
    return [(f.severity, f.place, f.text) for f in found]


@pytest.mark.parametrize("fault", [pytest.param(fault, id=name) for name, fault in FAULTS.items()])
def test_a_fault_is_named(fault: Fault) -> None:
    """A fault is named with its layer; where everything is saved, or ckptfused.checkpoint does it, there is none."""
    model = fault.make()
    before = state(model)
    found = doctor(model, batch())
    assert [f for f in found if f.place == fault.place and fault.words in f.text and f.severity == fault.severity], (
        found
    )
    assert {f.place.split(".piece")[0] for f in found.of("error")} <= {fault.place.split(".piece")[0]}
    same(state(model), before)


@pytest.mark.parametrize(
    "piece",
    [
        nn.Identity,
        lambda: nn.Dropout(0.5),
        models.FunctionalDropout,
        models.PythonDropout,
        models.NoisyRouter,
        lambda: nn.BatchNorm1d(models.WIDTH),
        models.Average,
        lambda: models.Counts(read=True),
    ],
)
@pytest.mark.parametrize("how", ["nothing", "ckptfused.checkpoint", "convert"])
def test_what_is_right_is_certified(piece: Callable[[], nn.Module], how: str) -> None:
    call = ckptfused.checkpoint if how == "ckptfused.checkpoint" else None
    model = Stack([models.Layer(piece()) for _ in range(3)], call)
    if how == "convert":
        assert len(ckptfused.convert(model).layers) == 3
    before = state(model)
    found = doctor(model, batch())
    assert not proved(found) and found.certificate.startswith("Certificate: loss, "), found
    same(state(model), before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_right_checkpoint_is_certified(reentrant: bool) -> None:
    """PyTorch's own, functional and wrapped, with dropout; one within another; selective; a model without any."""
    impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    outer = torch_checkpoint(use_reentrant=reentrant)
    nested = stack(lambda: stack(lambda: nn.Dropout(0.5), outer).layers[1], outer)
    for model in (
        stack(lambda: nn.Dropout(0.5), outer),
        wrapped(lambda: nn.Dropout(0.5), checkpoint_impl=impl),
        nested,
    ):
        found = doctor(model, batch())
        assert not proved(found), found
        assert "(3 checkpointed calls with " in found.certificate


def test_selective_checkpointing_is_certified() -> None:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

    found = doctor(stack(lambda: nn.Dropout(0.5), torch_checkpoint(context_fn=contexts)), batch())
    assert not proved(found), found


def called(kind: Any) -> Any:
    """Counts the calls of a class's forward."""
    return mock.patch.object(kind, "forward", autospec=True, side_effect=kind.forward)


@pytest.mark.parametrize(
    ("piece", "preserve", "steps"),
    [
        (lambda: nn.Dropout(0.5), True, 2),
        (lambda: nn.Dropout(0.5), False, 2),
        (lambda: nn.BatchNorm1d(models.WIDTH), True, 3),
    ],
    ids=["right", "a cause that is certain", "another"],
)
def test_it_takes_three_steps_at_most(piece: Callable[[], nn.Module], preserve: bool, steps: int) -> None:
    """Two where all is well; each replays what one outside of the doctor would."""
    model = wrapped(piece, preserve_rng_state=preserve)
    with called(Stack) as whole, called(models.Layer) as layers:
        doctor(model, batch())
    assert whole.call_count == steps and layers.call_count == 3 * (2 * steps - 1)


def test_wrong_statistics_are_no_certificate() -> None:
    """Though all gradients are right."""
    found = doctor(stack(lambda: nn.BatchNorm1d(models.WIDTH)), batch())
    assert found.certificate == "No certificate: a step as configured and one that saves everything differ."


def test_the_size_of_a_wrong_gradient_is_that_of_a_run_by_hand() -> None:
    model = wrapped(lambda: nn.Dropout(0.5), preserve_rng_state=False)
    found = doctor(model, batch())
    states = torch.get_rng_state()
    wrong = gradients(model)
    torch.set_rng_state(states)
    for i, layer in enumerate(model.layers):
        model.layers[i] = layer._checkpoint_wrapped_module
    right = gradients(model)
    off = (wrong - right).norm() / right.norm()
    assert f"the gradients are off by {off:.0%}" in " ".join(f.text for f in found)


def gradients(model: nn.Module) -> Tensor:
    model.zero_grad()
    model(batch()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("replayed", [True, False])
def test_an_iterator_is_told_from_rounding_on_a_device_that_rounds_anew(
    replayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where equal steps may have other bits, what a replay computes is an error if rounding cannot explain it."""
    monkeypatch.setattr(certificate, "_exact", lambda model: False)
    tiny = (1 + i * 2**-22 for i in itertools.count())
    numbers = map(float, itertools.count(1)) if replayed else tiny
    found = doctor(Stack([models.Layer(), models.Advances(numbers)], torch_checkpoint()), batch())
    assert found.healthy != replayed, found
    assert any("not deterministic" in f.text for f in found) != replayed, found


def test_an_iterator_outside_of_checkpoints_is_no_error() -> None:
    """The steps cannot be compared then, and every replay can."""
    found = doctor(Stack([models.Advances(map(float, itertools.count(1)))]), batch())
    assert found.healthy and "two equal steps give other bits" in found[0].text, found
    assert found.certificate.endswith("What each replay computed was, bit for bit, what its forward had.")


class Accumulates(torch.autograd.Function):
    """An operation whose gradient has other bits each time, as sums of atomics on a GPU."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        Accumulates.calls += 1
        return dy * (1 + Accumulates.calls * 2**-20)


class Atomic(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Accumulates.apply(x)


def test_operations_that_are_not_deterministic_are_no_error() -> None:
    found = doctor(stack(Atomic), batch())
    assert [(f.severity, "not deterministic" in f.text) for f in found] == [("warning", True)], found


class Sums(nn.Module):
    """Uses its input and a weight more than once, so that a reentrant checkpoint adds in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.linear(x.sin()) + self.linear(x.cos()) + x


def test_another_order_of_sums_is_no_error() -> None:
    shared = Sums()
    model = Stack([shared, shared, shared], torch_checkpoint(use_reentrant=True))
    found = doctor(model, batch(64))
    assert found.healthy, found
    assert [f.severity for f in found] in ([], ["advice"])


class Fails(nn.Module):
    """Raises in forward, or in backward; has changed its buffer by then."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.linear, self.backward = nn.Linear(models.WIDTH, models.WIDTH), backward

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1  # type: ignore[operator]
        self.last = x
        x = self.linear(x + torch.rand_like(x) + random.random() + np.random.rand())
        if not self.backward:
            raise ValueError("planted")
        x.register_hook(self.fail)
        return x.sum()

    def fail(self, grad: Tensor) -> None:
        raise ValueError("planted")


@pytest.mark.parametrize("backward", [False, True])
def test_an_error_of_the_model_leaves_everything_as_it_was(backward: bool) -> None:
    model = Fails(backward)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    grads, before = [p.grad for p in model.parameters()], state(model)
    with pytest.raises(ValueError, match="planted"):
        doctor(model, batch())
    same(state(model), before)
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert "last" not in vars(model)


def test_everything_is_afterwards_as_it_was() -> None:
    """Parameters that forward writes, gradients, hooks that step an optimizer in backward, its state, generators."""
    model = stack(lambda: nn.utils.spectral_norm(nn.Linear(models.WIDTH, models.WIDTH)), ckptfused.checkpoint)
    code = nn.Parameter(torch.zeros(models.WIDTH), requires_grad=False)
    model.register_parameter("code", code)
    model.register_forward_pre_hook(lambda *_: draws_and_writes(code))
    optimizer = torch.optim.AdamW(model.parameters())
    gradients(model)
    optimizer.step()
    model.first.weight.register_post_accumulate_grad_hook(forgets)
    values = {k: v.clone() for k, v in model.named_parameters()}
    moments = [v.clone() for s in optimizer.state.values() for v in s.values()]
    versions, before = [p._version for p in model.parameters() if p is not code], state(model)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    found = doctor(model, batch(), optimizer)
    assert found.healthy and found.certificate.startswith("Certificate"), found
    assert all(torch.equal(v, values[k]) for k, v in model.named_parameters())
    assert all(map(torch.equal, moments, [v for s in optimizer.state.values() for v in s.values()]))
    assert versions == [p._version for p in model.parameters() if p is not code]
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert (states[2] == np.random.get_state()[1]).all()
    same(state(model), before)
    assert model.first.weight._post_accumulate_grad_hooks  # type: ignore[attr-defined]


def draws_and_writes(t: Tensor) -> None:
    t.data.add_(torch.rand(1) + random.random() + np.random.rand())


def forgets(p: Tensor) -> None:
    p.data.mul_(0)


def test_a_batch_is_neither_changed_nor_kept() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(models.WIDTH, models.WIDTH)

        def forward(self, x: Tensor, *, names: dict[str, Tensor]) -> dict[str, Tensor]:
            names["y"].mul_(2)
            return {"loss": self.linear(x * names["y"]).sum()}

    x, y = batch().requires_grad_(), batch()
    given = {"x": x, "names": {"y": y}}
    assert doctor(Writes(), given).certificate.startswith("Certificate: loss, 3 gradients")
    assert x.grad is None and torch.equal(y, batch()) and given.keys() == {"x", "names"}


def test_a_checkpoint_of_another_library_is_compared_by_its_replays() -> None:
    wrong = doctor(stack(lambda: nn.Dropout(0.5), models.Foreign.apply), batch())
    assert [(f.severity, f.place) for f in wrong] == [("error", "layers.1.piece")], wrong
    assert "drew its random numbers anew in its replay" in wrong[0].text and "another library's" in wrong[0].text
    right = doctor(stack(nn.Identity, models.Foreign.apply), batch())
    assert not len(right) and right.certificate.endswith(
        "replays 3 calls. Results of modules were compared in forward and replay."
    ), right


def test_compiled_modules_run_as_they_were_written() -> None:
    model = wrapped(lambda: nn.Dropout(0.5), preserve_rng_state=False)
    compiled = torch.compile(model, backend="eager")
    found = doctor(compiled, batch())
    assert any(f.place == "layers.1.piece" and "anew" in f.text for f in found), found


def test_tied_weights_autocast_and_modes_are_no_error() -> None:
    model = stack(lambda: nn.Dropout(0.5))
    model.layers[2] = model.layers[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = doctor(model, batch())
    assert not proved(found) and found.certificate.startswith("Certificate"), found
    assert not proved(doctor(model.eval(), batch()))


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that a step could change, by value."""
    found: dict[str, Any] = {"rng": torch.get_rng_state(), "python": hash(random.getstate())}
    for name, module in model.named_modules():
        for kind, held in (("parameter", module._parameters), ("buffer", module._buffers)):
            found |= {
                f"{name}.{kind}.{key}": None if t is None else t.detach().to_dense().clone() for key, t in held.items()
            }
        found[f"{name}.names"] = sorted(vars(module))
        found |= {
            f"{name}.{key}": repr(v) for key, v in vars(module).items() if isinstance(v, bool | int | float | str)
        }
        for key, v in vars(module).items():
            if isinstance(v, torch.Generator):
                found[f"{name}.{key}"] = v.get_state()
    found |= {f"{name}.grad": None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return found


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]) if isinstance(value, Tensor) else value == b[name], name


def test_what_a_test_compares_is_all_there_is() -> None:
    """`checkpoint` of PyTorch's is as it was after a step, too."""
    from torch.utils import checkpoint as module

    before = module._checkpoint_without_reentrant_generator, module.CheckpointFunction, nn.Module.__call__
    doctor(stack(nn.Identity), batch())
    assert before == (module._checkpoint_without_reentrant_generator, module.CheckpointFunction, nn.Module.__call__)
    assert checkpoint is module.checkpoint
