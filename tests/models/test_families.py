"""Every family: loss and all gradients of the converted model against the unconverted one."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("transformers")

import ckptfused
from tests.cases import by_turns
from tests.models import (  # noqa: F401
    zoo_decoders,
    zoo_encoders,
    zoo_llama,
    zoo_moe,
    zoo_seq2seq,
    zoo_torch,
)
from tests.models.compare import close, no_worse, run
from tests.models.dropout_oracle import RecordStates, replayed_states, with_masks
from tests.models.zoo import ZOO, Specimen, randomize, set_dropout

DRAWS = 4
CASES = [
    pytest.param(s, i, id=f"{s.name}-{i}", marks=() if k == n % len(s.implementations) else pytest.mark.extended)
    for n, s in enumerate(ZOO.values())
    for k, i in enumerate(s.implementations)
]
RUNS = [
    pytest.param(s, i, mode, id=f"{s.name}-{i}-{mode}", marks=() if (n + k + m) % 2 == 0 else pytest.mark.extended)
    for n, s in enumerate(ZOO.values())
    for k, i in enumerate(s.implementations)
    for m, mode in enumerate(("train", "eval"))
]


def build(specimen: Specimen, p: float, implementation: str, seed: int = 0) -> nn.Module:
    model = randomize(specimen.make(p, implementation), seed)
    set_dropout(model, specimen.own_dropout, 0.0)
    return model.train()


def converted(model: nn.Module, specimen: Specimen, keep: str = "inputs") -> nn.Module:
    model = copy.deepcopy(model)
    report = ckptfused.convert(model, keep)
    assert specimen.expects(model, tuple(x.path for x in report.layers)), str(report)
    return model


def in_type(batch: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The batch with its floating-point tensors in this type."""
    return {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}


def without_zero(found: dict[str, Tensor], specimen: Specimen, relative: float) -> dict[str, Tensor]:
    """Leaves out the gradients that are 0 but for rounding, once it is seen that they are.

    Such a sum is as wide as that of the same projection's weight, term by term, so its rounding is measured by that.
    """
    zero = [name for name in found if name.endswith(specimen.zero)]
    for name in zero:
        weight = found[name.removesuffix("bias") + "weight"]
        assert found[name].double().norm() <= relative * weight.double().norm(), name
    return {name: value for name, value in found.items() if name not in zero}


@pytest.mark.parametrize(("specimen", "implementation", "mode"), RUNS)
def test_float32(specimen: Specimen, implementation: str, mode: str) -> None:
    model = build(specimen, 0.0, implementation).train(mode == "train")
    batch = specimen.batch()
    if mode == "eval":
        for part in model.modules():  # with a cache, eval runs the original layers
            if hasattr(getattr(part, "config", None), "use_cache"):
                part.config.use_cache = False
    got, want = (without_zero(run(m, batch), specimen, 1e-5) for m in (converted(model, specimen), model))
    close(got, want, 1e-5)


@pytest.mark.once
@pytest.mark.parametrize(("specimen", "implementation"), CASES)
def test_bfloat16(specimen: Specimen, implementation: str) -> None:
    """At most twice the family's own error against float32."""

    def draw(seed: int) -> tuple[dict[str, Tensor], ...]:
        model = build(specimen, 0.0, implementation, seed).bfloat16()
        batch = in_type(specimen.batch(), torch.bfloat16)
        truth = run(copy.deepcopy(model).float(), in_type(batch, torch.float32))
        eps = torch.finfo(torch.bfloat16).eps
        own, ours = (without_zero(run(m, batch), specimen, eps) for m in (model, converted(model, specimen)))
        return ours, own, without_zero(truth, specimen, 1e-5)

    with contextlib.suppress(AssertionError):  # an error of a formula is in every draw, that of rounding a lottery
        no_worse([draw(seed) for seed in range(DRAWS // 2)], torch.bfloat16)
        return
    no_worse([draw(seed) for seed in range(DRAWS)], torch.bfloat16)


@pytest.mark.parametrize(("name", "keep"), by_turns(ZOO, ["inputs", "all"]))
def test_dropout(name: str, keep: str) -> None:
    drops_as_its_own_layers_do(ZOO[name], keep)


def drops_as_its_own_layers_do(specimen: Specimen, keep: str) -> None:
    """Against the unconverted model (eager attention) with our masks."""
    model = build(specimen, 0.25, "eager")
    specimen.still(model)
    other = converted(model, specimen, keep)
    batch = specimen.batch()
    with RecordStates(replayed_states(specimen.layers(model), specimen.sites, keep)) as record:
        got = run(other, batch)
    with with_masks(specimen.layers(model), record.states, specimen.sites):
        want = run(model, batch)
    close(without_zero(got, specimen, 1e-5), without_zero(want, specimen, 1e-5), 1e-5)


def penalty(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    """The gradients of the squares of all gradients."""
    model.zero_grad()
    with sdpa_kernel(SDPBackend.MATH):  # SDPA's other kernels are differentiated once
        loss: Tensor = model(**batch).loss
        weights = [p for p in model.parameters() if p.requires_grad]
        first = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
        torch.stack([g.square().sum() for g in first if g is not None]).sum().backward()
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.once
@pytest.mark.parametrize(("name", "p"), by_turns(ZOO, [0.25, 0.0]))
def test_second_derivatives(name: str, p: float) -> None:
    """They carry the rounding of two backwards: twice the tolerance of one. With dropout, the same masks throughout."""
    specimen = ZOO[name]
    model = build(specimen, p, "eager")
    specimen.still(model)
    batch = specimen.batch()
    replayed = replayed_states(specimen.layers(model), specimen.sites, "inputs") if p else []
    with RecordStates(2 * replayed) as record:  # two backwards
        got = without_zero(penalty(converted(model, specimen), batch), specimen, 2e-5)
    # One draw a call: a backward draws none of its own.
    with with_masks(specimen.layers(model), record.states, specimen.sites) if p else contextlib.nullcontext():
        want = without_zero(penalty(model, batch), specimen, 2e-5)
    close(got, want, 2e-5)
