"""Experts in grouped products, as on a GPU: the same numbers as an expert at a time, but for the order of sums."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ckptfused import _C
from tests.ops.test_experts import GATED, SPECS, Inputs, assert_near, make
from tests.ops.test_experts_counted import BACKWARD, FORWARD, counted_peak, measured_peak

SLOTS = Inputs._fields
TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def grouped() -> Iterator[None]:
    _C.testing.group_products_on_cpu(True)
    try:
        yield
    finally:
        _C.testing.group_products_on_cpu(False)


def products(run: object) -> list[str]:
    """The products of PyTorch's that a call runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()  # type: ignore[operator]
    return [e.name for e in profiler.events() if e.name in ("aten::_grouped_mm", "aten::mm", "aten::addmm")]


def inputs(name: str, dtype: torch.dtype, bias: bool = False, rank: int = 8, **sizes: int) -> Inputs:
    options = {"tokens": 40, "width": 32, "hidden": 24, "count": 6, "k": 2, **sizes}
    made = make(SPECS[name], bias=bias, rank=rank, **options).to(dtype)
    return made._replace(**{  # a gradient of theirs is a sum for each expert
        key: t.detach() for key in ("up_bias", "down_bias") if (t := getattr(made, key)) is not None
    })  # fmt: skip


def results(given: Inputs, name: str) -> list[Tensor]:
    variables = [t for t in given if t is not None and t.requires_grad]
    y = given.run(SPECS[name])
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, variables, dy)]


def near_float64(given: Inputs, name: str) -> None:
    """In float32 within rounding. In half precision at most twice as far away as one expert at a time is: what an
    adapter adds is rounded before; of activations with kinks, which rounding may pass, the result alone is compared.
    """
    wide = [t if t is None or t is given.ids else t.detach().double().requires_grad_(t.requires_grad) for t in given]
    variables = [t for t in wide if t is not None and t.requires_grad]
    y = Inputs(*wide).run_eager(SPECS[name])
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(given.x.dtype).double()
    expected, found = [y.detach(), *torch.autograd.grad(y, variables, dy)], results(given, name)
    if given.x.dtype == torch.float32:
        assert_near(found, expected, 1e-4)  # sums of up to 12,000
        return
    _C.testing.group_products_on_cpu(False)
    compared = len(found) if SPECS[name].act in ("swiglu", "geglu_tanh") else 1
    for ours, one_by_one, exact in [*zip(found, results(given, name), expected, strict=True)][:compared]:
        assert (ours - exact).norm() <= 2 * (one_by_one - exact).norm()


@pytest.mark.usefixtures("grouped")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("rank", [0, 8], ids=["base", "adapters"])
@pytest.mark.parametrize("name", SPECS)
def test_result_and_gradients(name: str, rank: int, bias: bool, dtype: torch.dtype) -> None:
    given = inputs(name, dtype, bias, rank)
    ran = products(lambda: near_float64(given, name))
    assert ran.count("aten::_grouped_mm") >= (9 if rank == 0 else 20) - 4


@pytest.mark.usefixtures("grouped")
def test_experts_without_rows_have_no_gradient() -> None:
    given = inputs("swiglu", torch.float32)
    given = given._replace(ids=torch.where(given.ids == 3, 4, given.ids).clamp(min=1))
    near_float64(given, "swiglu")
    up = torch.autograd.grad(given.run(GATED).sum(), given.up)[0]
    assert not up[0].any() and not up[3].any() and up[1].any()


@pytest.mark.usefixtures("grouped")
@pytest.mark.parametrize("crowded", [0, 3, 5])
def test_an_expert_with_more_rows_than_go_at_once_goes_alone(crowded: int) -> None:
    given = inputs("swiglu", torch.float32, rank=0, tokens=12000, width=8, hidden=8)
    ids = given.ids.clone()
    ids[:, 0] = crowded
    given = given._replace(ids=ids)
    ran = products(lambda: near_float64(given, "swiglu"))
    assert {"aten::_grouped_mm", "aten::mm"} <= {*ran}


@pytest.mark.usefixtures("grouped")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"width": 12}, "rows that are no multiple of 16 bytes"),
        ({"rank": 2}, "adapters of such a rank"),
        ({"count": 3}, "few experts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_others_go_an_expert_at_a_time(change: dict[str, int], why: str) -> None:
    given = inputs("swiglu", torch.float32, **change)
    assert "aten::_grouped_mm" not in products(lambda: near_float64(given, "swiglu")), why


@pytest.mark.usefixtures("grouped")
def test_weights_that_begin_elsewhere_go_an_expert_at_a_time() -> None:
    given = inputs("swiglu", torch.float32)
    memory = torch.empty(given.up.numel() + 1)
    up = memory[1:].view_as(given.up).copy_(given.up.detach()).requires_grad_()
    given = given._replace(up=up)
    assert "aten::_grouped_mm" not in products(lambda: near_float64(given, "swiglu"))


@pytest.mark.usefixtures("grouped")
@pytest.mark.parametrize("seed", range(32))
def test_a_call_takes_no_more_than_was_counted(seed: int) -> None:
    torch.manual_seed(seed)
    choose = random.Random(seed)
    name, rank = choose.choice([*SPECS]), choose.choice([0, 8])
    sizes = {"tokens": choose.choice([7, 300, 6000]), "count": choose.choice([4, 7]), "k": choose.choice([1, 3])}
    given = [t if t is None else t.detach() for t in inputs(name, torch.float32, choose.random() < 0.5, rank, **sizes)]
    call = [*given[:7], given[7:] if rank else [], [], None, SPECS[name].to_string()]
    needs = [t is not None and "bias" not in of and choose.random() < 0.5 for of, t in zip(SLOTS, given, strict=True)]
    wanted = [need for need, of in zip(needs, SLOTS, strict=True) if of != "ids"]
    dy = torch.randn_like(call[0])
    for op, args in ((FORWARD, call), (BACKWARD, [dy, *call, [True, *wanted[1:]]])):
        assert measured_peak(lambda op=op, args=args: op(*args)) <= counted_peak(op, args)


@pytest.mark.usefixtures("grouped")
@pytest.mark.parametrize("name", ["swiglu", "gpt-oss"])
def test_from_four_bits_they_have_the_bits_of_numbers(name: str) -> None:
    pytest.importorskip("bitsandbytes")
    from tests.ops.test_experts_few_bits import frozen, run
    from tests.quantized import Way

    given = inputs(name, torch.float32, width=64, hidden=64)
    stacks, variables = frozen(given, (Way("nf4", nested=True), Way("fp4")), SPECS[name])
    calls = ((stacks.up, stacks.down, stacks.spec, stacks.beside), (*stacks.numbers, SPECS[name]))
    found = [torch.autograd.grad(run(given, *call).square().sum(), variables) for call in calls]
    assert all(map(torch.equal, *found))
