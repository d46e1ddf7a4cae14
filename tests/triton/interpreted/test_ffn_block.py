"""The C++ block over the Triton FFN kernels: registered for the CPU here, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ckptfused._extension import _C
from ckptfused.spec import keepable
from ckptfused.triton.ffn.launch import ffn_up_bwd, ffn_up_fwd
from tests.cases import Case
from tests.oracle import expect, fused, make_inputs, rng_state, run

CASES = [
    Case(layout="ffn", act="swiglu", norm="rmsnorm", drop="hidden", tokens=37),
    Case(layout="ffn", act="geglu", norm="layernorm", drop="hidden", tokens=37, weights="joint", transposed=True),
    Case(layout="ffn", act="relu2", norm="rmsnorm", drop="hidden", tokens=37, bias="all", batch=2, seq_first=True),
    Case(layout="pre", act="swiglu", norm="rmsnorm", rope="half", mask="causal", drop="all", tokens=33),
]
calls: list[str] = []
arguments: list[tuple[object, ...]] = []  # of the calls


@pytest.fixture(scope="module", autouse=True)
def kernels_on_the_cpu() -> Iterator[None]:
    _C.forget_ffn_choices()
    library = torch.library.Library("ckptfused", "IMPL")
    library.impl("ffn_choice", lambda *_: "interpreted", "CPU")
    for name, kernel in (("ffn_up_fwd", ffn_up_fwd), ("ffn_up_bwd", ffn_up_bwd)):

        def count(*args: object, name: str = name, kernel: object = kernel) -> None:
            calls.append(name)
            arguments.append(args)
            kernel(*args)  # type: ignore[operator]

        library.impl(name, count, "CPU")
    yield
    library._destroy()
    _C.forget_ffn_choices()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_against_the_oracle(case: Case) -> None:
    inputs, spec = make_inputs(case, torch.bfloat16), case.spec()
    calls.clear()
    got = run(fused(spec), inputs)
    assert calls == ["ffn_up_fwd", "ffn_up_bwd"]
    expect(spec, inputs, rng_state(inputs.x)).check(got)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_opcheck(case: Case) -> None:
    calls.clear()
    arguments.clear()
    run(fused(case.spec()), make_inputs(case, torch.bfloat16))
    assert calls == ["ffn_up_fwd", "ffn_up_bwd"]
    for name, args in zip(list(calls), list(arguments), strict=True):
        operator = getattr(torch.ops.ckptfused, name)
        torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))
    like = torch.ones(1)
    torch.library.opcheck(
        torch.ops.ckptfused.ffn_choice, (like, torch.bfloat16, 4, 8, 16, "swiglu"), test_utils="test_schema"
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_what_is_kept_changes_no_bit(case: Case) -> None:
    inputs, spec = make_inputs(case, torch.bfloat16), case.spec()
    expected = run(fused(spec.with_keep(())), inputs)
    for names in [*((name,) for name in keepable(spec)), keepable(spec)]:
        got = run(fused(spec.with_keep(names)), inputs)
        assert not [name for name, t in expected.items() if not torch.equal(got[name], t)], names


@pytest.mark.parametrize("layout", ["post", "sandwich"])
def test_a_norm_behind_the_ffn_keeps_the_pointwise_kernel(layout: str) -> None:
    case = Case(layout=layout, act="swiglu", norm="rmsnorm", tokens=9)
    calls.clear()
    run(fused(case.spec()), make_inputs(case, torch.bfloat16))
    assert not calls


def test_float32_keeps_the_pointwise_kernel() -> None:
    calls.clear()
    run(fused(CASES[0].spec()), make_inputs(CASES[0], torch.float32))
    assert not calls
