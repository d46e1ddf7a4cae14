"""Experts whose stacks are in 4 bits: the bits of a call with numbers, of which one expert's are there at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("bitsandbytes")

from ckptfused.compat.torch_memory import allocations
from ckptfused.ops.experts import experts
from ckptfused.spec import Quantized
from ckptfused.spec.experts import ExpertsSpec, parse_experts
from tests.ops.test_experts import GATED, SPECS, Inputs, make
from tests.quantized import WAYS, Stacks, Way, stored, stored_stacks

TYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """bitsandbytes has a C++ compiler run for every shape, where it has no kernel: float64."""
    with torch.compiler.set_stance("force_eager"):
        yield


def run(inputs: Inputs, up: Tensor, down: Tensor, spec: ExpertsSpec, beside: Any = ()) -> Tensor:
    x, ids, weights, _, up_bias, _, down_bias, *adapters = inputs
    return experts(x, ids, weights, up, down, up_bias, down_bias, adapters, beside, spec=spec)


def frozen(inputs: Inputs, ways: tuple[Way, Way], spec: ExpertsSpec) -> tuple[Stacks, list[Tensor]]:
    """The stacks of a call in few bits, and what of it has gradients still."""
    stacks = stored_stacks(spec, inputs.up, inputs.down, ways)
    return stacks, [t for t in inputs.variables if t is not inputs.up and t is not inputs.down]


def results(inputs: Inputs, variables: list[Tensor], y: Tensor) -> list[Tensor]:
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, variables, dy)]


@pytest.mark.parametrize("sizes", [(64, 64), (128, 96), (8, 6)], ids=["whole", "rows within blocks", "small"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_the_bits_are_those_of_numbers(name: str, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    spec = SPECS[name]
    inputs = make(spec, width=sizes[0], hidden=sizes[1]).to(dtype)
    seed = [*SPECS].index(name) + TYPES.index(dtype)
    stacks, variables = frozen(inputs, (WAYS[seed % len(WAYS)], WAYS[(seed + 3) % len(WAYS)]), spec)
    assert parse_experts(stacks.spec.to_string()) == stacks.spec
    found = results(inputs, variables, run(inputs, stacks.up, stacks.down, stacks.spec, stacks.beside))
    expected = results(inputs, variables, run(inputs, *stacks.numbers, spec))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("target", ["up", "down"])
def test_one_stack_may_be_stored_alone(target: str) -> None:
    inputs = make(width=64, hidden=64).to(torch.float32)
    stacks, variables = frozen(inputs, (WAYS[0], WAYS[1]), GATED)
    up, down = stacks.numbers
    number = ["up", "down"].index(target)
    spec = ExpertsSpec(act="swiglu", up_scale=2.0, down_scale=0.75, quant=(stacks.spec.quant[number],))
    beside = [t if i // 4 == number else None for i, t in enumerate(stacks.beside)]
    given = (stacks.up, down) if target == "up" else (up, stacks.down)
    found = results(inputs, variables, run(inputs, *given, spec, beside))
    assert all(map(torch.equal, found, results(inputs, variables, run(inputs, up, down, GATED))))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("shape", [(3, 64, 2048), (5, 48, 96), (7, 33, 64), (2, 20, 8192)], ids=str)
def test_entries_of_a_stack(way: Way, shape: tuple[int, int, int]) -> None:
    """Wherever an expert begins, in a block or in one of nested scales."""
    tensors, nested, plain = stored(torch.randn(shape), way, torch.float32)
    state = [tensors.get(slot) for slot in ("scale", "offset", "nested_scale", "table")]
    form, size = Quantized("", way.kind, way.block, nested).form, shape[1] * shape[2]
    for expert in range(shape[0]):
        found = torch.ops.ckptfused.dequantize(tensors["w"], state, form, shape[1:], torch.float32, expert * size)
        assert torch.equal(found, plain[expert])


@pytest.mark.parametrize("nested", [False, True])
def test_one_expert_is_numbers_at_a_time(nested: bool) -> None:
    inputs = make(tokens=16, width=256, hidden=256, count=16, k=2, rank=0).to(torch.float32)
    stacks, variables = frozen(inputs, (Way("nf4", nested=nested), Way("nf4", nested=nested)), GATED)
    call = lambda: results(inputs, variables, run(inputs, stacks.up, stacks.down, stacks.spec, stacks.beside))  # noqa: E731
    call()
    peak = max(accumulate(allocations(call)[1]))
    one = 3 * 256 * 256 * 4  # gate, up and down
    assert one < peak < 2 * one < sum(t.nbytes for t in stacks.numbers) / 7


def test_opcheck() -> None:
    inputs, ops = make(width=64, hidden=64).to(torch.float32), torch.ops.ckptfused
    stacks, _ = frozen(inputs, (WAYS[0], WAYS[1]), GATED)
    x, ids, weights, _, up_bias, _, down_bias, *adapters = inputs
    call = (
        x,
        ids,
        weights,
        stacks.up,
        up_bias,
        stacks.down,
        down_bias,
        adapters,
        stacks.beside,
        None,
        stacks.spec.to_string(),
    )
    torch.library.opcheck(ops.experts.default, call)
    flat = [t.detach() if isinstance(t, Tensor) else t for t in call]
    flat[7] = [t.detach() for t in adapters if t is not None]
    torch.library.opcheck(ops.experts_fwd.default, tuple(flat))
    needs = [True, True, False, True, False, True, True, True, True, True]
    torch.library.opcheck(ops.experts_bwd.default, (torch.randn_like(x), *flat, needs))


def test_second_derivatives_and_transforms() -> None:
    inputs = make(width=64, hidden=64)
    stacks, _ = frozen(inputs, (WAYS[0], WAYS[1]), GATED)
    up, down = (t.double() for t in stacks.numbers)

    def twice(call: Any) -> Tensor:
        (dx,) = torch.autograd.grad(call(inputs.x).square().sum(), inputs.x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), inputs.x)[0]

    few = lambda x: run(inputs._replace(x=x), stacks.up, stacks.down, stacks.spec, stacks.beside)  # noqa: E731
    plain = lambda x: run(inputs._replace(x=x), up, down, GATED)  # noqa: E731
    torch.testing.assert_close(twice(few), twice(plain))
    of = lambda call: torch.func.grad(lambda x: call(x).square().sum())(inputs.x.detach())  # noqa: E731
    torch.testing.assert_close(of(few), of(plain))


def test_float_operations_are_those_of_numbers() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    inputs = make(width=64, hidden=64).to(torch.float32)
    stacks, variables = frozen(inputs, (WAYS[0], WAYS[1]), GATED)
    counts = []
    for up, down, spec, beside in (
        (stacks.up, stacks.down, stacks.spec, stacks.beside),
        (*stacks.numbers, GATED, ()),
    ):
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(run(inputs, up, down, spec, beside).sum(), variables)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_what_does_not_fit_raises() -> None:
    inputs = make(width=64, hidden=64).to(torch.float32)
    stacks, _ = frozen(inputs, (Way("nf4"), Way("nf4")), GATED)
    up, down, spec, beside = stacks.up, stacks.down, stacks.spec, stacks.beside
    for call, why in (
        ((up, down, spec, ()), "up: codes without scales"),
        ((up, down, spec, beside[:4]), "stored: expected 8 or none, got 4"),
        ((up[:, 1:], down, spec, beside), r"down: expected bytes|up: expected"),
        ((up, down[1:], spec, beside), r"down: expected bytes \[5, 2048\]"),
        ((up.view(torch.int8), down, spec, beside), "up: expected bytes"),
        ((up, down, GATED, ()), r"stacks of weights \[E, out, in\], or of codes \[E, bytes\]"),
    ):
        with pytest.raises(RuntimeError, match=why):
            run(inputs, *call)
    with pytest.raises(ValueError, match="quant.kind: expected one of nf4, fp4, got 'int8'"):
        ExpertsSpec(act="swiglu", quant=(Quantized("up", "int8", 64),))
    with pytest.raises(ValueError, match="target: expected one of"):
        ExpertsSpec(act="swiglu", quant=(Quantized("gate", "nf4", 64),))
