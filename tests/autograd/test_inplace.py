"""Nothing that the caller can see is written, and what the caller writes before backward is noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.cases import AXES, Case, all_pairs
from tests.devices import on_devices
from tests.oracle import Function, Inputs, fused, make_inputs, run

CASES = all_pairs()
ENCODER = Case(mask="keep+pad", rope="half", drop="all", batch=2, tokens=33, lora="float32")
PACKED = Case(mask="packed", layout="post", weights="joint", act="relu", tokens=33)
BIASED = Case(mask="add4d", layout="sandwich", qk_norm="rmsnorm", tokens=33)


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


@on_devices
def test_a_change_after_backward_is_fine(device: str) -> None:
    inputs = _leaves(make_inputs(ENCODER, torch.float32, device=device))
    fused(ENCODER.spec())(inputs).backward(inputs.dy)
    for t in inputs.tensors().values():
        _change(t)


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
        for t, copy in watched.saved:
            assert t.equal(copy), tuple(t.shape)


@on_devices
def test_gradients_share_no_memory(device: str) -> None:
    """A gradient is its own tensor: writing to it changes no other gradient, input or dy."""
    case = replace(ENCODER, m=1.0, drop="0")
    inputs = _leaves(make_inputs(case, torch.float32, device=device))
    y = fused(case.spec())(inputs)
    grads = torch.autograd.grad(y, (inputs.x, *inputs.params.values()), inputs.dy)
    owners = [t.untyped_storage().data_ptr() for t in (*grads, y, *inputs.tensors().values())]
    assert len(set(owners)) == len(owners)


def _both(function: Function, inputs: Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.use_deterministic_algorithms(True)  # not warn_only, with which attention's backward need not be repeatable
    torch.utils.deterministic.fill_uninitialized_memory = False
    plain = run(function, inputs)
    torch.utils.deterministic.fill_uninitialized_memory = True
    return plain, run(function, inputs)


@on_devices
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("case", CASES[::2], ids=lambda case: case.id)
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
