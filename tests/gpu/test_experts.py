"""Experts on a GPU: in grouped products where these fit, else one at a time, and from 4 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.test_experts import SPECS, Inputs, assert_near
from tests.ops.test_experts_grouped import inputs, products, results

pytestmark = pytest.mark.gpu


def on_gpu(given: Inputs) -> Inputs:
    return Inputs(*(t if t is None else t.detach().cuda().requires_grad_(t.requires_grad) for t in given))


def near_float64(given: Inputs, name: str, tolerance: float) -> None:
    """Asserts what the CPU's plain PyTorch makes in float64; of activations with kinks, which rounding may pass, the
    result alone."""
    wide = [t if t is None or t is given.ids else t.detach().double().requires_grad_(t.requires_grad) for t in given]
    variables = [t for t in wide if t is not None and t.requires_grad]
    y = Inputs(*wide).run_eager(SPECS[name])
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(given.x.dtype).double()
    expected = [y.detach(), *torch.autograd.grad(y, variables, dy)]
    found: list[Tensor] = [t.cpu() for t in results(on_gpu(given), name)]
    whole = tolerance < 1e-3 or SPECS[name].act in ("swiglu", "geglu_tanh")
    assert_near(found if whole else found[:1], expected if whole else expected[:1], tolerance)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("rank", [0, 8], ids=["base", "adapters"])
@pytest.mark.parametrize("name", SPECS)
def test_bfloat16_goes_in_grouped_products(name: str, rank: int, bias: bool) -> None:
    given = inputs(name, torch.bfloat16, bias, rank, tokens=300, width=64, hidden=48, count=16, k=4)
    given = given._replace(ids=torch.where(given.ids == 3, 15, given.ids))  # one expert without rows
    ran = products(lambda: near_float64(given, name, 6e-2))
    assert "aten::_grouped_mm" in ran


@pytest.mark.parametrize("name", ["swiglu", "gpt-oss"])
def test_float32_goes_an_expert_at_a_time(name: str) -> None:
    assert "aten::_grouped_mm" not in products(lambda: near_float64(inputs(name, torch.float32, True), name, 1e-4))


def test_runs_of_one_call_have_the_same_bits() -> None:
    given = on_gpu(inputs("swiglu", torch.bfloat16, tokens=2000, width=64, hidden=48, count=16, k=4))
    assert all(map(torch.equal, results(given, "swiglu"), results(given, "swiglu")))


def test_from_four_bits() -> None:
    pytest.importorskip("bitsandbytes")
    from tests.ops.test_experts_few_bits import frozen, run
    from tests.quantized import Way

    given = inputs("swiglu", torch.bfloat16, tokens=300, width=64, hidden=64, count=16, k=4)
    stacks, _ = frozen(given, (Way("nf4", nested=True), Way("nf4", nested=True)), SPECS["swiglu"])
    there = on_gpu(given)
    beside = [None if t is None else t.cuda() for t in stacks.beside]
    few = run(there, stacks.up.cuda(), stacks.down.cuda(), stacks.spec, beside)
    up, down = (t.cuda().bfloat16() for t in stacks.numbers)
    torch.testing.assert_close(few, run(there, up, down, SPECS["swiglu"]), rtol=2e-2, atol=2e-2)
