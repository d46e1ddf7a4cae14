"""The op of a mixture's experts against plain PyTorch in float64: routing of every kind, gradients, what is saved."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ckptfused import profile
from ckptfused.eager.experts import eager_experts, experts_activation
from ckptfused.ops.experts import experts
from ckptfused.spec.experts import CLAMPED, ExpertsSpec, parse_experts
from tests.accounting import saved_bytes

SPECS = {
    "swiglu": ExpertsSpec(act="swiglu", up_scale=2.0, down_scale=0.75),
    "geglu_tanh transposed": ExpertsSpec(act="geglu_tanh", transposed=True, up_scale=0.5),
    "reglu interleaved": ExpertsSpec(act="reglu", interleaved=True),
    "relu2 without a gate": ExpertsSpec(act="relu2"),
    "gpt-oss": ExpertsSpec(act="clamped", limit=1.0, alpha=1.702, offset=1.0, interleaved=True, transposed=True),
    "clamped silu": ExpertsSpec(act="clamped", limit=0.7),
}
GATED = SPECS["swiglu"]


class Inputs(NamedTuple):
    """A call's tensors, in the order of the op's arguments."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    up_a: Tensor | None = None
    up_b: Tensor | None = None
    down_a: Tensor | None = None
    down_b: Tensor | None = None

    @property
    def variables(self) -> list[Tensor]:
        return [t for t in self if t is not None and t.is_floating_point()]

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(*(t if t is None or t is self.ids else t.detach().to(dtype).requires_grad_() for t in self))

    def run(self, spec: ExpertsSpec) -> Tensor:
        x, ids, weights, up, up_bias, down, down_bias, *adapters = self
        return experts(x, ids, weights, up, down, up_bias, down_bias, adapters, spec=spec)

    def run_eager(self, spec: ExpertsSpec) -> Tensor:
        return eager_experts(*self[:7], self[7:], (), spec)


def make(
    spec: ExpertsSpec = GATED, tokens: int = 17, width: int = 8, hidden: int = 6, count: int = 5, k: int = 3,
    bias: bool = True, rank: int = 2, dtype: torch.dtype = torch.float64,
) -> Inputs:  # fmt: skip
    """rank: of adapters on both products, whose B lies as PEFT has it, an expert's numbers apart."""
    generator = torch.Generator().manual_seed(3)
    wide = hidden * (2 if spec.gated else 1)
    shaped = lambda out, into: (count, into, out) if spec.transposed else (count, out, into)  # noqa: E731
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    ids = torch.rand(tokens, count, generator=generator).topk(min(k, count)).indices
    made = Inputs(
        randn(tokens, width), ids, randn(tokens, ids.size(1)),
        randn(*shaped(wide, width)) / width**0.5, randn(count, wide) if bias else None,
        randn(*shaped(width, hidden)) / hidden**0.5, randn(count, width) if bias else None,
    )  # fmt: skip
    if rank:
        # Small beside the weights, as adapters are: the roundings that tests allow are those of the whole.
        a = lambda into: randn(count, rank, into) / (4 * into**0.5)  # noqa: E731
        b = lambda out: (randn(out, rank, count) / rank**0.5).permute(2, 0, 1)  # noqa: E731
        made = made._replace(up_a=a(width), up_b=b(wide), down_a=a(hidden), down_b=b(width))
    return made.to(dtype)


def both(inputs: Inputs, spec: ExpertsSpec) -> tuple[list[Tensor], list[Tensor]]:
    """Result and gradients of the op, and in float64 of plain PyTorch."""
    dy = torch.randn(inputs.x.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found = []
    for given, run in ((inputs, Inputs.run), (inputs.to(torch.float64), Inputs.run_eager)):
        y = run(given, spec)
        grads = torch.autograd.grad(y, given.variables, dy.to(y.dtype))
        found.append([y, *grads])
    return found[0], found[1]


def assert_near(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * float(b.detach().abs().max()))


@pytest.mark.parametrize("rank", [0, 2], ids=["base", "adapters"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("name", SPECS)
def test_result_and_gradients_are_those_of_plain_pytorch(name: str, bias: bool, rank: int) -> None:
    spec = SPECS[name]
    given = partial(make, spec, bias=bias, rank=rank)
    assert parse_experts(spec.to_string()) == spec
    # The roundings of sums of 17 products, of which each value of float64's is exact to 1.1e-16.
    assert_near(*both(given(), spec), 1e-14)
    assert_near(*both(given(dtype=torch.float32), spec), 5e-6)
    # Gate, up, hidden values and results are rounded to 8 bits. A clamped one whose rounding is beyond the limit has
    # another gradient altogether, as one of these adapted ones has: their results alone.
    only = slice(1) if rank and spec.act == CLAMPED else slice(None)
    for dtype, tolerance in ((torch.bfloat16, 4e-2), (torch.float16, 5e-3)):
        found, expected = both(given(dtype=dtype), spec)
        assert_near(found[only], expected[only], tolerance)


@pytest.mark.parametrize("name", SPECS)
def test_first_and_second_derivatives_are_those_of_differences(name: str) -> None:
    inputs, spec = make(SPECS[name], tokens=4, width=3, hidden=2, count=3, k=2, rank=1), SPECS[name]
    run = lambda *given: Inputs(given[0], inputs.ids, *given[1:]).run(spec)  # noqa: E731
    assert torch.autograd.gradcheck(run, inputs.variables)
    assert torch.autograd.gradgradcheck(run, inputs.variables)


@pytest.mark.parametrize("name", ["reglu interleaved", "relu2 without a gate"])
def test_the_weight_comes_before_the_last_product(name: str) -> None:
    """In bfloat16, of small integers: all sums are exact, and what is rounded are weighted hidden values and results.
    With the weight after the product, as Hugging Face has it, the bits are others."""
    spec, exact = SPECS[name], torch.float64
    given = make(spec, bias=False, rank=0, k=2, dtype=torch.bfloat16)
    with torch.no_grad():
        for t in (given.x, given.up, given.down):
            t.copy_(torch.randint(-2, 3, t.shape))
    up, down = given.up.to(exact)[given.ids], given.down.to(exact)[given.ids]
    h = experts_activation(torch.einsum("nkic,nc->nki", up, given.x.to(exact)), spec)
    assert torch.equal(h.bfloat16().to(exact), h)
    score = given.weights.to(exact)[..., None]
    product = lambda rows: torch.einsum("nkci,nki->nkc", down, rows.to(exact)).bfloat16()  # noqa: E731
    first, after = product((h * score).bfloat16()), (product(h).to(exact) * score).bfloat16()
    combined = lambda results: results.float().sum(1).bfloat16()  # noqa: E731
    for run in (Inputs.run, Inputs.run_eager):
        assert torch.equal(run(given, spec), combined(first))
    assert not torch.equal(combined(after), combined(first))


ROUTES = {
    "one choice": {"k": 1},
    "all experts": {"k": 5},
    "one expert": {"count": 1, "k": 1},
    "one token": {"tokens": 1},
    "no tokens": {"tokens": 0},
    "two bytes an id": {"count": 300, "k": 4},
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_number_of_choices(route: str) -> None:
    found, expected = both(make(**ROUTES[route]), GATED)
    if route == "no tokens":
        assert all(map(torch.equal, found, expected))
    else:
        assert_near(found, expected, 1e-14)


def crowded(dtype: torch.dtype, **sizes: Any) -> Inputs:
    """300 tokens, each with the one expert that they all have, whose rows are in parts, and one of six."""
    given = make(tokens=300, count=6, k=2, **sizes)
    others = torch.randint(0, 6, (300,), generator=torch.Generator().manual_seed(7))
    return given._replace(ids=torch.stack([torch.full((300,), 4), others], 1)).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2**-6)]
)
@pytest.mark.parametrize("name", SPECS)
def test_the_rows_of_an_expert_may_be_in_parts(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """Their gradients of weights are summed in float32 and rounded once: 2^-6 is what two roundings of hidden values
    to bfloat16 do to the largest of them, in one part, too."""
    found, expected = both(crowded(dtype, spec=SPECS[name]), SPECS[name])
    # Rounded beyond its limit, a clamped value has another gradient altogether.
    only = slice(1) if SPECS[name].act == CLAMPED and dtype.itemsize == 2 else slice(None)
    assert_near(found[only], expected[only], tolerance)


@pytest.mark.parametrize("rank", [0, 2], ids=["base", "adapters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_router_makes_a_call_take_more_than_was_counted(dtype: torch.dtype, rank: int) -> None:
    """Half as many rows again go through at once, at most, as an expert has where all are alike: here 768."""
    given = make(tokens=2048, width=64, hidden=96, count=8, k=2, rank=rank)
    even = torch.arange(2048 * 2).view(2048, 2) % 8
    all_on_one = torch.stack([torch.zeros(2048).long(), 1 + torch.arange(2048) % 7], 1)
    two_more = torch.where(torch.arange(2048)[:, None] < 1024, torch.tensor([[0, 1]]), even)
    full = torch.cat([torch.full((1536,), 0), torch.full((2560,), 1)]).view(2048, 2)  # two parts, and four of 640

    class Layer(torch.nn.Module):
        def __init__(self, ids: Tensor) -> None:
            super().__init__()
            self.ids = ids
            self.weights = torch.nn.ParameterList(t.to(dtype) for t in given[3:] if t is not None)

        def forward(self, x: Tensor) -> Tensor:
            up, up_bias, down, down_bias, *adapters = self.weights
            scores = x[:, :2].sigmoid()
            return experts(x, self.ids, scores, up, down, up_bias, down_bias, adapters, spec=GATED)

    x = given.x.detach().to(dtype)
    peaks = []
    for ids in (full, even, all_on_one, two_more, given.ids):
        layer = Layer(ids)
        predicted, measured = profile(layer, x, device="cpu"), profile(layer, x)
        assert measured.peak <= predicted.peak + predicted.workspace and measured.saved == predicted.saved
        peaks.append((measured.peak, predicted.peak))
    assert len({predicted for _, predicted in peaks}) == 1
    assert dtype != torch.float32 or peaks[0][0] == peaks[0][1]  # where products take nothing but their results


@pytest.mark.parametrize(
    "lie",
    [
        lambda ids: torch.stack([ids, ids], 2)[..., 0],
        lambda ids: torch.cat([ids, ids], 1)[:, : ids.size(1)],
        lambda ids: ids.t().contiguous().t(),
        lambda ids: ids[:1, :1].expand(17, 1),
        lambda ids: ids[:1].expand(17, 3),
    ],
    ids=["every second", "beside others", "transposed", "one number", "one row"],
)
def test_ids_may_lie_anyhow(lie: Callable[[Tensor], Tensor]) -> None:
    given = make()
    ids = lie(given.ids)
    given = given._replace(ids=ids, weights=given.weights[:, : ids.size(1)].detach().requires_grad_())
    assert_near(*both(given, GATED), 1e-14)
    one = make(tokens=1)
    apart = one._replace(ids=torch.stack([one.ids, one.ids + 9], 2)[..., 0])
    assert torch.equal(apart.run(GATED), one.run(GATED))


def test_experts_without_tokens_and_one_that_is_chosen_twice() -> None:
    inputs = make()
    for ids in (torch.full_like(inputs.ids, 4), torch.tensor([[1, 1, 3]]).expand(17, 3)):
        given = inputs._replace(ids=ids)
        found, expected = both(given, GATED)
        assert_near(found, expected, 1e-14)
        assert not found[3][0].any()  # of an expert that nobody chose


def test_the_last_of_256_and_of_257_experts_is_kept() -> None:
    """An id that were cut to its byte would be another expert's in backward alone."""
    for count in (256, 257):
        inputs = make(count=count, k=2)
        inputs = inputs._replace(ids=torch.tensor([[count - 1, 0]]).repeat(17, 1))
        assert_near(*both(inputs, GATED), 1e-14)


@pytest.mark.parametrize("outside", [-1, 5, 256 + 2, 2**40])
def test_an_id_that_is_no_expert_is_an_error(outside: int) -> None:
    inputs = make()
    inputs.ids[7, 1] = outside
    with pytest.raises(IndexError, match=f"ids: expected experts 0 to 4, got {outside}"):
        inputs.run(GATED)


def test_other_shapes_are_an_error() -> None:
    inputs = make()
    for changed, word in (
        ({"weights": inputs.weights[:, :2]}, "weights"),
        ({"ids": inputs.ids[:5]}, "ids"),
        ({"ids": inputs.ids.double()}, "ids"),
        ({"down": inputs.down[:, :, :3]}, "down"),
        ({"up_bias": inputs.up}, "up_bias"),
        ({"up_a": inputs.down_a}, "up_a"),
        ({"down_b": inputs.up_b}, "down_b"),
    ):
        with pytest.raises(RuntimeError, match=f"experts: {word}: expected"):
            inputs._replace(**changed).run(GATED)
    with pytest.raises(RuntimeError, match="expected up_a and up_b, or neither of them"):
        inputs._replace(up_b=None).run(GATED)
    with pytest.raises(RuntimeError, match="adapters: expected 4 or none, got 2"):
        experts(*inputs[:4], inputs.down, None, None, [inputs.up_a, inputs.up_b], spec=GATED)


def test_an_adapter_on_one_product_alone() -> None:
    for gone in ({"up_a": None, "up_b": None}, {"down_a": None, "down_b": None}):
        assert_near(*both(make()._replace(**gone), GATED), 1e-14)


def test_nan_weights_are_in_their_tokens_alone() -> None:
    inputs = make()
    with torch.no_grad():
        inputs.weights[3] = torch.nan
    y = inputs.run(GATED)
    assert y[3].isnan().all() and y[torch.arange(17) != 3].isfinite().all()


def test_it_saves_x_weights_and_a_byte_a_choice() -> None:
    inputs = make(dtype=torch.bfloat16)
    own = inputs[3:]
    assert saved_bytes(lambda: inputs.run(GATED), own=own) == 17 * (8 * 2 + 3 * 2 + 3)
    many = make(count=300, dtype=torch.bfloat16)
    assert saved_bytes(lambda: many.run(GATED), own=many[3:]) == 17 * (8 * 2 + 3 * 2 + 3 * 2)


def test_a_second_backward_gives_the_same_bits() -> None:
    inputs = make(tokens=301, dtype=torch.bfloat16)
    y = inputs.run(GATED)
    dy = torch.randn_like(y)
    first = torch.autograd.grad(y, inputs.variables, dy, retain_graph=True)
    second = torch.autograd.grad(y, inputs.variables, dy, retain_graph=True)
    again = torch.autograd.grad(inputs.run(GATED), inputs.variables, dy)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, second, again, strict=True))


def test_each_gradient_alone_has_the_same_bits() -> None:
    inputs = make(SPECS["gpt-oss"], dtype=torch.float32)
    y = inputs.run(SPECS["gpt-oss"])
    dy = torch.ones(()).expand_as(y)
    whole = torch.autograd.grad(y, inputs.variables, dy, retain_graph=True)
    for i, variable in enumerate(inputs.variables):
        frozen = inputs.to(torch.float32)
        for other in frozen.variables:
            other.requires_grad_(other is frozen.variables[i])
        (alone,) = torch.autograd.grad(frozen.run(SPECS["gpt-oss"]), frozen.variables[i], dy)
        assert torch.equal(alone, whole[i]), variable.shape


@pytest.mark.parametrize("place", ["x", "weights", "up", "down", "up_bias", "down_bias", "up_a", "down_b"])
def test_changed_in_place_before_backward_it_raises(place: str) -> None:
    inputs = make()
    y = inputs.run(GATED)
    with torch.no_grad():
        getattr(inputs, place).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_ids_may_be_changed_after_the_call(dtype: torch.dtype) -> None:
    inputs = make()
    inputs = inputs._replace(ids=inputs.ids.to(dtype))
    expected = torch.autograd.grad(inputs.run(GATED).sum(), inputs.variables)
    y = inputs.run(GATED)
    inputs.ids.zero_()
    found: Sequence[Tensor] = ()
    with contextlib.suppress(RuntimeError):  # as autograd says of what was changed
        found = torch.autograd.grad(y.sum(), inputs.variables)
    assert len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_under_autocast_the_products_are_in_its_type() -> None:
    inputs = make(dtype=torch.float32)
    compute = replace(GATED, compute="bfloat16")
    dy = torch.randn_like(inputs.x)
    with torch.autocast("cpu", torch.bfloat16):
        y = inputs.run(GATED)
    assert y.dtype == torch.float32
    expected = inputs.run(compute)
    assert torch.equal(y, expected)
    found = torch.autograd.grad(y, inputs.variables, dy)
    assert all(map(torch.equal, found, torch.autograd.grad(expected, inputs.variables, dy)))
    assert_near([y, *found], both(inputs, GATED)[1][:1] + list(_truth(inputs, dy)), 4e-2)


def _truth(inputs: Inputs, dy: Tensor) -> tuple[Tensor, ...]:
    wide = inputs.to(torch.float64)
    return torch.autograd.grad(wide.run_eager(GATED), wide.variables, dy.double())


@pytest.mark.parametrize("rank", [0, 2])
def test_opcheck(rank: int) -> None:
    inputs, ops, text = make(rank=rank), torch.ops.ckptfused, GATED.to_string()
    call = lambda *given: (*given[:7], list(given[7:]) if rank else [], [], None, text)  # noqa: E731
    torch.library.opcheck(ops.experts.default, call(*inputs))
    plain = call(*(None if t is None else t.detach() for t in inputs))
    torch.library.opcheck(ops.experts_fwd.default, plain)
    needs = [True] * 6 + [rank > 0] * 4
    torch.library.opcheck(ops.experts_bwd.default, (torch.randn_like(inputs.x), *plain, needs))


def test_compiled_it_is_one_graph_with_the_same_bits() -> None:
    inputs = make(dtype=torch.float32)
    run: Any = torch.compile(lambda *given: Inputs(*given).run(GATED), fullgraph=True, backend="aot_eager")
    dy = torch.randn_like(inputs.x)
    y, expected = run(*inputs), inputs.run(GATED)
    assert torch.equal(y, expected)
    found = torch.autograd.grad(y, inputs.variables, dy)
    assert all(map(torch.equal, found, torch.autograd.grad(expected, inputs.variables, dy)))


def test_under_transforms_plain_pytorch_computes_it() -> None:
    inputs = make()

    def loss(x: Tensor) -> Tensor:
        return inputs._replace(x=x).run(GATED).square().sum()

    expected = torch.autograd.grad(loss(inputs.x), inputs.x)[0]
    torch.testing.assert_close(torch.func.grad(loss)(inputs.x), expected)


def test_float_operations_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def counted(inputs: Inputs) -> int:
        with FlopCounterMode(display=False) as counter:
            inputs.run(GATED).sum().backward()
        return counter.get_total_flops()

    up, down = 2 * 17 * 3 * 12 * 8, 2 * 17 * 3 * 6 * 8
    assert counted(make(bias=False, rank=0)) == (up + down) + (3 * up + 2 * down)
    a, b = 2 * 17 * 3 * 2 * (8 + 6), 2 * 17 * 3 * 2 * (12 + 8)
    inputs = make(bias=False)
    for weight in (inputs.up, inputs.down):
        weight.requires_grad_(False)
    # Forward both; backward the first product's again, x Aᵀ of both for B, and two products for each of A, B and x.
    replayed = 2 * 17 * 3 * 2 * (8 + 12)
    assert counted(inputs) == (up + down + a + b) + (2 * up + down) + replayed + a + b + (b + a + a)


def test_numbers_are_read_alike_where_the_locale_has_decimal_commas(tmp_path: Path) -> None:
    made = subprocess.run(["localedef", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "de_DE.UTF-8")], check=False)
    if made.returncode:
        pytest.skip("no locale can be made here")
    code = """
import locale
from tests.ops.test_experts import SPECS, both, make
spec = SPECS["gpt-oss"]
inputs = make(spec)
before = both(inputs, spec)[0]
assert locale.setlocale(locale.LC_NUMERIC, "de_DE.UTF-8") and locale.localeconv()["decimal_point"] == ","
after = both(inputs, spec)[0]
assert all(a.equal(b) for a, b in zip(before, after))
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"LOCPATH": str(tmp_path)})
