"""Dropout on adapters of experts: one mask for each choice of each token, the same in backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ckptfused import rng
from ckptfused.eager.dropout import scale_of_kept
from ckptfused.eager.experts import eager_experts
from ckptfused.ops.experts import experts
from ckptfused.spec.experts import ExpertsSpec, parse_experts
from tests.accounting import saved_bytes
from tests.ops.test_experts import GATED, SPECS, Inputs, assert_near, make

P = (0.3, 0.6)
RATES = {"both": P, "up": (0.3, 0.0), "down": (0.0, 0.6), "all": (1.0, 1.0)}


def dropped(spec: ExpertsSpec = GATED, rates: tuple[float, float] = P) -> ExpertsSpec:
    return replace(spec, up_p=rates[0], down_p=rates[1])


def call(inputs: Inputs, spec: ExpertsSpec, seed: int = 11) -> Tensor:
    x, ids, weights, up, up_bias, down, down_bias, *adapters = inputs
    generator = torch.Generator().manual_seed(seed)
    return experts(x, ids, weights, up, down, up_bias, down_bias, adapters, spec=spec, generator=generator)


def masks(inputs: Inputs, spec: ExpertsSpec, seed: int = 11) -> list[Tensor]:
    """The masks of a call, by the definition of them: rows sorted by expert, sites after those of a block."""
    state = rng.state(inputs.x, torch.Generator().manual_seed(seed))
    assert inputs.up_a is not None and inputs.down_a is not None
    shapes = ((inputs.ids.numel(), a.size(-1)) for a in (inputs.up_a, inputs.down_a))
    rates = (spec.up_p, spec.down_p)
    return [rng.dropout_mask(shape, p, state, site) for site, shape, p in zip((4, 5), shapes, rates, strict=True)]


def plainly(inputs: Inputs, spec: ExpertsSpec, seed: int = 11) -> Tensor:
    return eager_experts(*inputs[:7], inputs[7:], (), spec, masks(inputs, spec, seed))


def gradients(run: Callable[..., Tensor], inputs: Inputs, *args: Any) -> list[Tensor]:
    dy = torch.randn(inputs.x.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    y = run(inputs, *args)
    return [y, *torch.autograd.grad(y, inputs.variables, dy.to(y.dtype))]


def crowded(inputs: Inputs) -> Inputs:
    """So many rows of one expert that they go in parts."""
    return inputs._replace(ids=torch.tensor([2, 0, 4]).expand(inputs.x.size(0), 3).contiguous())


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("name", SPECS)
def test_result_and_gradients(name: str, rates: str) -> None:
    spec = dropped(SPECS[name], RATES[rates])
    inputs = make(spec)
    assert_near(gradients(call, inputs, spec), gradients(plainly, inputs, spec), 1e-11)


@pytest.mark.parametrize("arrange", [crowded, lambda inputs: inputs], ids=["crowded", "even"])
def test_rows_in_parts(arrange: Callable[[Inputs], Inputs]) -> None:
    inputs, spec = arrange(make(tokens=600)), dropped()
    assert_near(gradients(call, inputs, spec), gradients(plainly, inputs, spec), 1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_other_types(dtype: torch.dtype) -> None:
    """Bounds as without dropout (tests/ops/test_experts.py), where what is kept is 1 / (1 - p) times as large."""
    inputs, spec = make(dtype=dtype), dropped(rates=(0.3, 0.3))
    wide = inputs.to(torch.float64)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 6e-3}[dtype]
    assert_near(gradients(call, inputs, spec), gradients(plainly, wide, spec), tolerance)


def test_each_choice_of_a_token_has_a_mask_of_its_own_and_the_mean_is_kept() -> None:
    """Both choices of each token are one expert, with A the identity and nothing but the first adapter: the results of
    the choices would be one, were their masks."""
    n, width, spec = 400, 8, ExpertsSpec(act="reglu", up_p=0.25)
    zeros = torch.zeros(1, 2 * width, width)
    up = zeros.clone()
    up[0, :width] = 1.0  # the gate is open: it is the sum of x, 1
    x, ids = torch.full((n, width), 1 / width), torch.zeros(n, 2, dtype=torch.long)
    b = torch.cat((torch.zeros(width, width), torch.eye(width)))[None]
    adapters = [torch.eye(width)[None], b, None, None]

    def of(weights: list[float]) -> Tensor:
        torch.manual_seed(0)
        scores = torch.tensor([weights]).expand(n, 2)
        return experts(x, ids, scores, up, torch.eye(width)[None], None, None, adapters, spec=spec)

    first, second = of([1.0, 0.0]), of([0.0, 1.0])
    values = torch.cat((first, second)).flatten().unique()
    torch.testing.assert_close(values, torch.tensor([0.0, scale_of_kept(0.25) / width]))
    kept = [t > 0 for t in (first, second)]
    assert abs(float(torch.cat(kept).float().mean()) - 0.75) < 5 * (0.75 * 0.25 / (2 * n * width)) ** 0.5
    both = float((kept[0] & kept[1]).float().mean())
    assert abs(both - 0.75**2) < 5 * (0.5625 * 0.4375 / (n * width)) ** 0.5


def test_draws_are_those_of_the_generator() -> None:
    inputs, spec = make(), dropped()
    assert torch.equal(call(inputs, spec, 3), call(inputs, spec, 3))
    assert not torch.equal(call(inputs, spec, 3), call(inputs, spec, 4))
    torch.manual_seed(3)
    assert torch.equal(inputs.run(spec), call(inputs, spec, 3))
    before = torch.get_rng_state()
    inputs.run(GATED)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("preserve", [True, False])
def test_an_enclosing_checkpoint_replays_the_masks(preserve: bool) -> None:
    inputs, spec = make(), dropped()

    def run(*given: Any) -> Tensor:
        return Inputs(*given).run(spec).sin()

    found = []
    for wrapped in (False, True):
        torch.manual_seed(1)
        y = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=preserve) if wrapped else run(*inputs)
        found.append(torch.autograd.grad(y.sum(), inputs.variables))
    assert all(map(torch.equal, *found))


def test_what_is_saved() -> None:
    inputs = make()
    plain, with_dropout = (saved_bytes(lambda s=s: inputs.run(s)) for s in (GATED, dropped()))
    assert with_dropout == plain + 16


def test_second_derivatives() -> None:
    inputs, spec = make(tokens=4), dropped()

    def twice(run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(run(inputs, spec).square().sum(), inputs.variables, create_graph=True)
        return torch.autograd.grad(sum((g.sin().sum() for g in first), torch.zeros(())), inputs.variables)

    assert_near(list(twice(call)), list(twice(plainly)), 1e-11)


def test_opcheck() -> None:
    inputs, ops, text = make(), torch.ops.ckptfused, dropped().to_string()
    state = torch.tensor([7, 0])
    plain = [None if t is None else t.detach() for t in inputs]
    args = (*plain[:7], plain[7:], [], state, text)
    torch.library.opcheck(ops.experts_fwd.default, args)
    torch.library.opcheck(ops.experts_bwd.default, (torch.randn_like(inputs.x), *args, [True] * 10))


def test_compiled_it_is_one_graph_with_the_same_bits() -> None:
    inputs, spec = make(dtype=torch.float32), dropped()
    run: Any = torch.compile(lambda *given: Inputs(*given).run(spec), fullgraph=True, backend="aot_eager")
    dy = torch.randn_like(inputs.x)
    found = []
    for function in (run, lambda *given: Inputs(*given).run(spec)):
        torch.manual_seed(2)
        y = function(*inputs)
        found.append([y, *torch.autograd.grad(y, inputs.variables, dy)])
    assert all(map(torch.equal, *found))


def test_under_transforms_it_is_plain_pytorch_with_masks_of_its_own() -> None:
    inputs, spec = make(), dropped(rates=(1.0, 1.0))
    loss = lambda x: inputs._replace(x=x).run(spec).square().sum()  # noqa: E731
    expected = torch.autograd.grad(loss(inputs.x), inputs.x)[0]
    torch.testing.assert_close(torch.func.grad(loss)(inputs.x), expected)
    half = dropped(rates=(0.5, 0.5))
    grads = [torch.func.grad(lambda x: inputs._replace(x=x).run(half).sum())(inputs.x) for _ in range(2)]
    assert not torch.equal(*grads)


def test_it_needs_a_random_state_and_the_text_is_read_back() -> None:
    inputs, spec = make(), dropped()
    assert parse_experts(spec.to_string()) == spec
    plain = [None if t is None else t.detach() for t in inputs]
    with pytest.raises(RuntimeError, match="rng_state"):
        torch.ops.ckptfused.experts_fwd.default(*plain[:7], plain[7:], [], None, spec.to_string())
    with pytest.raises(ValueError, match="up_p"):
        dropped(rates=(1.5, 0.0))
