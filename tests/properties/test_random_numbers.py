"""Random numbers: one draw a call, alike whatever is kept or replayed, and a seed reproduces a run."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ckptfused import functional, rng
from ckptfused.spec import BlockSpec
from tests.cases import Case
from tests.devices import generator_state, on_devices, repeatable
from tests.oracle import Inputs, make_inputs
from tests.properties.entries import FUSED, each, equal, made, source, step

DECODER = Case(norm="rmsnorm", rope="half", heads="4/2", mask="causal", drop="all", batch=2, tokens=33)


def _step(inputs: Inputs, spec: BlockSpec, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    x = inputs.x.detach().requires_grad_()
    y = functional.block(x, inputs.params, spec, **inputs.aux, generator=generator)
    return y.detach(), torch.autograd.grad(y, x, inputs.dy)[0]


@on_devices
@each()
def test_the_generator_advances_alike(name: str, device: str) -> None:
    """In forward alone, with everything kept or replayed, and with no gradient at all."""
    call, states = made(name, device=device), []
    for function in (call.run, call.kept):
        x = source(device)
        torch.manual_seed(7)
        loss = function(x).sin().sum()
        states.append(generator_state(device))
        loss.backward()
        states.append(generator_state(device))
        torch.manual_seed(7)
        with torch.no_grad():
            function(x)
        states.append(generator_state(device))
    assert all(map(states[0].equal, states))
    if name in FUSED:
        torch.manual_seed(7)
        for _ in itertools.chain(*call.segments):
            rng.state(x)
        assert generator_state(device).equal(states[0])


@on_devices
@each()
def test_calls_differ_and_a_seed_reproduces_them(name: str, device: str) -> None:
    call, x = made(name, device=device), source(device)
    runs = []
    for _ in range(2):
        first = step(call, call.run, x)
        y = call.run(x)
        runs.append([*first, y.detach(), *torch.autograd.grad(y.sin().sum(), x)])
        assert not first[0].equal(y) and not first[1].equal(runs[-1][-1])
    assert equal(*runs)


@on_devices
@each()
def test_without_dropout_nothing_is_drawn(name: str, device: str) -> None:
    for p in (0.0, 0.25):
        call, x = made(name, p, device), source(device)
        call.module.train(p == 0)
        before = generator_state(device)
        call.run(x).sin().sum().backward()
        assert generator_state(device).equal(before)


@on_devices
def test_state_is_one_draw_of_the_generator(device: str) -> None:
    """On the CPU a seed of its own; on a GPU the generator's seed and an offset of its own."""
    like = torch.empty(3, device=device)
    torch.manual_seed(5)
    first, second, after = rng.state(like), rng.state(like), generator_state(device)
    assert (first.dtype, first.shape, first.device) == (torch.int64, (2,), like.device)
    assert first.tolist()[1] == 0
    if device == "cuda":
        assert first.tolist() == [5, 0]
        assert second.tolist() == [5, 4]
    else:
        assert first[0] != second[0]
    torch.manual_seed(5)
    assert rng.state(like).equal(first)
    assert rng.state(like).equal(second)
    assert generator_state(device).equal(after)
    assert rng.state(like, torch.Generator(device).manual_seed(5)).equal(first)
    assert generator_state(device).equal(after)


@on_devices
def test_a_run_is_resumed_from_pytorchs_random_state(device: str) -> None:
    """The generator's state is all that there is to save, of PyTorch's own or of one that calls are given."""
    repeatable(device)
    inputs, spec = make_inputs(DECODER, torch.float32, device=device), DECODER.spec()
    own = torch.Generator(device).manual_seed(3)
    for generator in (None, own):
        _step(inputs, spec, generator)
        saved = generator_state(device) if generator is None else generator.get_state()
        expected = [_step(inputs, spec, generator) for _ in range(2)]
        torch.manual_seed(8)
        if generator is not None:
            generator = torch.Generator(device)
            generator.set_state(saved)
        elif device == "cuda":
            torch.cuda.set_rng_state(saved)
        else:
            torch.set_rng_state(saved)
        for y, dx in expected:
            again = _step(inputs, spec, generator)
            assert again[0].equal(y) and again[1].equal(dx)
    assert not expected[0][0].equal(expected[1][0])


@on_devices
def test_an_explicit_generator_leaves_the_global_one_alone(device: str) -> None:
    repeatable(device)
    inputs, before = make_inputs(DECODER, torch.float32, device=device), generator_state(device)
    first, second = (_step(inputs, DECODER.spec(), torch.Generator(device).manual_seed(1)) for _ in range(2))
    assert generator_state(device).equal(before)
    assert first[0].equal(second[0])
    assert first[1].equal(second[1])


def _with(spec: BlockSpec, **p: float) -> BlockSpec:
    assert spec.attn is not None
    assert spec.ffn is not None
    attn = replace(spec.attn, **{name: value for name, value in p.items() if hasattr(spec.attn, name)})
    return replace(spec, attn=attn, ffn=replace(spec.ffn, **{n: v for n, v in p.items() if hasattr(spec.ffn, n)}))


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("p", [{"p_res": 1.0}, {"p_attn": 1.0, "p_hidden": 1.0}], ids=["residual", "inner"])
def test_p_of_one_drops_all(p: dict[str, float], dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(replace(DECODER, drop="0"), dtype, device=device)
    spec = _with(DECODER.spec().without_dropout(), **p)
    params = {name: t.detach().requires_grad_() for name, t in inputs.params.items()}
    x = inputs.x.detach().requires_grad_()
    y = functional.block(x, params, spec, **inputs.aux)
    assert y.equal(inputs.x)
    y.backward(inputs.dy)
    assert x.grad is not None
    assert x.grad.equal(inputs.dy)
    for name, t in params.items():
        assert t.grad is not None, name
        assert (t.grad == 0).all(), name
