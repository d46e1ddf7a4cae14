"""The gate and up products with their epilogues, forward and replaying backward, against plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.triton import ffn_calls
from tests.triton.ffn_calls import Call

F8 = replace(Call(), n=3, c=24, f=8)


@pytest.mark.parametrize("call", ffn_calls.cases(), ids=lambda call: call.id)
def test_against_pytorch(call: Call) -> None:
    ffn_calls.check_all(call)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_mask_is_the_oracles(p: float) -> None:
    ffn_calls.check_mask(p)


def test_dropped_nan_is_zero() -> None:
    call = replace(F8, p=0.5)
    values = ffn_calls.make_inputs(call)
    values["x"][:] = torch.nan
    keep = ffn_calls.keep_mask(call, values)
    for got in (ffn_calls.run_forward(call, values)["h"], ffn_calls.run_backward(call, values)["h"]):
        assert (got[~keep] == 0).all() and got[keep].isnan().all()


def test_strided_operands_and_slices_of_outputs() -> None:
    """Weights with no unit stride, rows further apart than they are long, and neighbours left alone."""
    call = Call(n=20, c=40, f=33)
    values = ffn_calls.make_inputs(call)
    forward, backward = ffn_calls.run_forward(call, values), ffn_calls.run_backward(call, values)
    spread = {}
    for name in ("x", "ddown"):
        wide = torch.full((call.n, call.c + 5), torch.nan, dtype=call.dtype)
        spread[name] = wide[:, 2 : 2 + call.c].copy_(values[name])
    for name in ("gate_w", "up_w", "down_w"):
        rows, cols = values[name].shape
        wide = torch.full((2 * rows, 3 * cols), torch.nan, dtype=call.dtype)
        spread[name] = wide[::2, ::3].copy_(values[name])
    values |= spread
    out = torch.full((call.n, 5 * call.f + 4), 7.0, dtype=call.dtype)
    at = {name: 1 + i * (call.f + 1) for i, name in enumerate(("h", "g", "u"))}
    views = {name: out[:, start : start + call.f] for name, start in at.items()}
    ffn_calls.ffn_up_fwd(
        values["x"], values["gate_w"], values["up_w"], None, None, None, views["h"], views["g"], views["u"], call.act,
        False, *call.mask_args,
    )  # fmt: skip
    for name, view in views.items():
        assert torch.equal(view, forward[name]), name
    # dg and du over the kept g and u, as the block does.
    ffn_calls.ffn_up_bwd(
        None, None, None, None, None, views["g"], views["u"], values["ddown"], values["down_w"], None, views["h"],
        views["g"], views["u"], call.act, False, *call.mask_args,
    )  # fmt: skip
    for name, view in (("h", "h"), ("dg", "g"), ("du", "u")):
        assert torch.equal(views[view], backward[name]), name
    for start in at.values():
        assert (out[:, start - 1] == 7.0).all()


def test_twice_the_same() -> None:
    call = Call(p=0.2)
    values = ffn_calls.make_inputs(call)
    first, second = ffn_calls.run_backward(call, values), ffn_calls.run_backward(call, values)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("n", "f"), [(0, 8), (3, 0)])
def test_nothing_to_do(n: int, f: int) -> None:
    call = replace(F8, n=n, f=f)
    values = ffn_calls.make_inputs(call)
    assert ffn_calls.run_forward(call, values)["h"].shape == (n, f)
    assert ffn_calls.run_backward(call, values)["du"].shape == (n, f)


def test_no_features() -> None:
    call = replace(F8, c=0, bias=torch.bfloat16)
    values = ffn_calls.make_inputs(replace(call, c=1))
    values |= {name: values[name].new_empty((3, 0)) for name in ("x", "ddown")}
    values |= {name: values[name].new_empty((8, 0)) for name in ("gate_w", "up_w")}
    values["down_w"] = values["down_w"].new_empty((0, 8))
    forward = ffn_calls.run_forward(call, values)
    assert torch.equal(forward["g"], values["gate_b"].expand(3, 8))
    assert not ffn_calls.run_backward(call, values)["du"].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 24)}, "x: expected BFloat16 or Half"),
        ({"x": torch.zeros(3, 25).bfloat16()}, "gate_w: expected"),
        ({"up_w": torch.zeros(8, 24)}, "up_w: expected"),
        ({"gate_b": torch.zeros(9)}, "gate_b: expected a floating"),
        ({"rng_state": torch.zeros(2)}, "rng_state: expected Long"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, torch.Tensor], message: str) -> None:
    call = replace(F8, p=0.5)
    with pytest.raises(RuntimeError, match=message):
        ffn_calls.run_forward(call, ffn_calls.make_inputs(call) | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"act": "tanh"}, "act: expected"),
        ({"p": 1.5}, "p: expected"),
        ({"p": 0.5, "cols": 7}, "col0"),
        ({"rows": (1, 2)}, "rows: expected"),
    ],
)
def test_wrong_settings_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        ffn_calls.run_forward(replace(F8, **change), ffn_calls.make_inputs(F8))  # type: ignore[arg-type]


def test_as_dispatcher_ops() -> None:
    """The launchers fit the ops' schemas."""
    mask = "float p, int site, int cols, int row0, int col0, int[] rows"
    shared = f"str act, bool transposed, {mask}, str config='') -> ()"
    biases = "Tensor? gate_b, Tensor? up_b"
    schemas = {
        ffn_calls.ffn_up_fwd: f"(Tensor x, Tensor? gate_w, Tensor up_w, {biases}, Tensor? rng_state, "
        f"Tensor(a!) h, Tensor(b!)? g, Tensor(c!)? u, {shared}",
        ffn_calls.ffn_up_bwd: f"(Tensor? x, Tensor? gate_w, Tensor? up_w, {biases}, Tensor? g, Tensor? u, "
        "Tensor ddown, Tensor down_w, Tensor? rng_state, Tensor(a!)? h, Tensor(b!)? dg, Tensor(c!)? du, " + shared,
    }
    library = torch.library.Library("ckptfused_ffn_schemas", "DEF")
    for function, schema in schemas.items():
        library.define(function.__name__ + schema)
        library.impl(function.__name__, function, "CPU")
    call = replace(F8, p=0.5)
    v = ffn_calls.make_inputs(call)
    ops = torch.ops.ckptfused_ffn_schemas
    h, g, u, dg, du = torch.empty(5, 3, 8, dtype=call.dtype).unbind()
    ops.ffn_up_fwd(
        v["x"], v["gate_w"], v["up_w"], None, None, v["rng_state"], h, g, u, call.act, False, *call.mask_args
    )
    expected = ffn_calls.run_forward(call, v)
    assert torch.equal(h, expected["h"]) and torch.equal(g, expected["g"])
    ops.ffn_up_bwd(
        v["x"], v["gate_w"], v["up_w"], None, None, None, None, v["ddown"], v["down_w"], v["rng_state"], None, dg, du,
        call.act, False, *call.mask_args,
    )  # fmt: skip
    assert torch.equal(dg, ffn_calls.run_backward(call, v)["dg"])
