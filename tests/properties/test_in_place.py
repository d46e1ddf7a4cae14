"""In place: nothing that the caller can see is written, what the caller writes before backward is noticed, and what a
forward writes is written once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptfused
from tests.cases import AXES, Case, all_pairs, by_turns
from tests.devices import on_devices
from tests.oracle import Function, Inputs, fused, make_inputs, run
from tests.properties.entries import CHANGED, OURS, C, each, equal, made, source, step, wanted


@on_devices
@each()
def test_a_changed_input_raises(name: str, device: str) -> None:
    call, x = made(name, device=device), source(device) * 1
    loss = call.run(x).sin().sum()
    x.detach().add_(1)
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()


@on_devices
@each()
def test_a_step_of_the_optimizer_before_backward_raises(name: str, device: str) -> None:
    call, x = made(name, device=device), source(device)
    loss = call.run(x).sin().sum()
    for p in call.leaves:
        p.grad = torch.ones_like(p)
    torch.optim.SGD(call.leaves, lr=0.1).step()
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()


@on_devices
@each()
def test_what_comes_after_backward_is_free(name: str, device: str) -> None:
    call, x = made(name, device=device), source(device) * 1
    call.run(x).sin().sum().backward()
    with torch.no_grad():
        for t in (x, *call.leaves):
            t.add_(1)


@on_devices
@each()
def test_the_result_may_be_changed_in_place(name: str, device: str) -> None:
    call, x = made(name, device=device), source(device)
    expected = [2 * t for t in step(call, call.run, x, loss=torch.sum)]
    got = step(call, lambda x: call.run(x).mul_(2), x, loss=torch.sum)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)  # 2 is exact but where a small number is rounded


@on_devices
@each()
def test_a_step_writes_gradients_alone(name: str, device: str) -> None:
    """Neither values nor versions of what the caller has change, in two backwards; each gradient has memory of its
    own.
    """
    call, x = made(name, device=device), source(device)
    y = call.run(x)
    dy = torch.randn_like(y)
    owned = {"x": x, "y": y, "dy": dy, **dict(call.module.named_parameters()), **dict(call.module.named_buffers())}
    before = {key: (t._version, t.detach().clone(), t.data_ptr()) for key, t in owned.items()}
    for _ in range(2):
        found = torch.autograd.grad(y, wanted(call, x), dy, retain_graph=True)
        for key, t in owned.items():
            version, value, address = before[key]
            assert t._version == version and t.equal(value) and t.data_ptr() == address, key
        if name in OURS:
            memory = [t.untyped_storage().data_ptr() for t in (*found, *owned.values())]
            assert len(set(memory)) == len(memory)


@on_devices
@each()
def test_scratch_that_nobody_wrote_is_not_read(name: str, device: str) -> None:
    call, x = made(name, device=device), source(device)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    found = []
    for torch.utils.deterministic.fill_uninitialized_memory in (False, True):
        found.append(step(call, call.run, x))
    assert all(t.isfinite().all() for t in found[1])
    assert equal(*found)


class Average(nn.Module):
    """A layer that no adapter knows: dropout, and an exponential mean that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout = nn.Linear(C, C), nn.Dropout(0.3)
        self.register_buffer("mean", torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return x + self.dropout((self.inner(x) - self.mean).tanh())


def _converted(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    ckptfused.convert(model)
    return model


WRITERS: dict[str, Callable[[nn.Sequential], Callable[[Tensor], Tensor]]] = {
    "converted": _converted,
    "checkpoint": lambda model: partial(ckptfused.checkpoint, model),
    "checkpoint_sequential": lambda model: partial(ckptfused.checkpoint_sequential, model, 2),
    "each its own segment": lambda model: partial(ckptfused.checkpoint_sequential, model, 3),
    "sequential": lambda model: ckptfused.FusedCheckpointSequential(*model, segments=2),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_a_forward_writes_is_written_once(name: str) -> None:
    """In three steps, with the modes of the forward when it is replayed in eval mode."""
    plain = nn.Sequential(*(Average() for _ in range(3)))
    model = copy.deepcopy(plain)
    found: list[list[Any]] = []
    for one, forward in ((plain, plain), (model, WRITERS[name](model))):
        x = source()
        torch.manual_seed(2)
        for _ in range(3):
            loss = forward(x).sin().sum()
            one.eval()
            gradients = torch.autograd.grad(loss, [x, *one.parameters()])
            one.train()
        found.append([*gradients, *one.buffers(), torch.get_rng_state()])
    assert equal(*found)


CASES = all_pairs()
ENCODER = Case(mask="keep+pad", rope="half", drop="all", batch=2, tokens=33, lora="float32")
PACKED = Case(mask="packed", layout="post", weights="joint", act="relu", tokens=33)
BIASED = Case(mask="add4d", layout="sandwich", qk_norm="rmsnorm", tokens=33)


def _id(value: Any) -> str:
    return value.id if isinstance(value, Case) else str(value)


def _leaves(inputs: Inputs) -> Inputs:
    params = {name: t.detach().requires_grad_() for name, t in inputs.params.items()}
    return replace(inputs, x=inputs.x.detach().requires_grad_(), params=params)


def _change(t: Tensor) -> None:
    with torch.no_grad():
        if t.dtype == torch.bool:
            t.logical_not_()
        else:
            t.add_(1)


def _saved(inputs: Inputs) -> list[str]:
    weights = [name for name in inputs.params if name.endswith(("_w", ".a", ".b"))]
    return ["x", *weights, *(f"aux.{name}" for name in inputs.aux)]


WRITES = [(case, name) for case in (ENCODER, PACKED, BIASED) for name in _saved(make_inputs(case))]


@on_devices
@pytest.mark.parametrize("keep", ["inputs", "all"])
@pytest.mark.parametrize(("case", "name"), WRITES, ids=lambda v: v if isinstance(v, str) else v.id)
def test_a_change_before_backward_raises(case: Case, name: str, keep: str, device: str) -> None:
    inputs = _leaves(make_inputs(case, torch.float32, device=device))
    y = fused(case.spec().with_keep(keep))(inputs)
    _change(inputs.tensors()[name])
    with pytest.raises(RuntimeError, match=r"(?i)in-?place"):
        y.backward(inputs.dy)


class _Watched:
    """Saved tensors with a copy of each, taken when it was saved."""

    def __init__(self) -> None:
        self.saved: list[tuple[Tensor, Tensor]] = []

    def pack(self, t: Tensor) -> Tensor:
        self.saved.append((t.detach(), t.detach().clone()))
        return t


def _dtype(case: Case, device: str) -> torch.dtype:
    """On a CPU the type that test_keep does not give the case; on a GPU the same one, whose kernels are compiled."""
    return (torch.float32, torch.bfloat16)[(CASES.index(case) + (device == "cpu")) % 2]


@on_devices
@pytest.mark.parametrize("keep", ["inputs", "all"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_nothing_of_the_callers_is_written(case: Case, keep: str, device: str) -> None:
    inputs = _leaves(make_inputs(case, _dtype(case, device), device=device))
    before, watched = inputs.clone(), _Watched()
    with torch.autograd.graph.saved_tensors_hooks(watched.pack, lambda t: t):
        y = fused(case.spec().with_keep(keep))(inputs)
    y_before = y.detach().clone()
    for _ in range(2):
        y.backward(inputs.dy, retain_graph=True)
        assert y.equal(y_before)
        for name, t in inputs.tensors().items():
            assert t.equal(before.tensors()[name]), name
        assert watched.saved
        for t, value in watched.saved:
            assert t.equal(value), tuple(t.shape)


def _both(function: Function, inputs: Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.use_deterministic_algorithms(True)  # not warn_only, with which attention's backward need not be repeatable
    torch.utils.deterministic.fill_uninitialized_memory = False
    plain = run(function, inputs)
    torch.utils.deterministic.fill_uninitialized_memory = True
    return plain, run(function, inputs)


@on_devices
@pytest.mark.parametrize(("case", "autocast"), by_turns(CASES[::2], [False, True]), ids=_id)
def test_poisoned_scratch_changes_nothing(case: Case, autocast: bool, device: str) -> None:
    """Fresh memory full of NaN: whatever reads a value that nobody wrote gives another result."""
    inputs = make_inputs(case, torch.float32, device=device)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        plain, poisoned = _both(fused(case.spec()), inputs)
    for name, t in plain.items():
        assert poisoned[name].isfinite().all(), name
        assert poisoned[name].equal(t), name


@on_devices
@pytest.mark.parametrize("keep", AXES["keep"])
def test_poisoned_scratch_with_each_preset(keep: str, device: str) -> None:
    inputs = make_inputs(ENCODER, torch.bfloat16, device=device)
    plain, poisoned = _both(fused(ENCODER.spec().with_keep(keep)), inputs)
    assert all(poisoned[name].equal(t) for name, t in plain.items())
