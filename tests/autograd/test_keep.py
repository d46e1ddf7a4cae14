"""What is kept for backward never changes a bit of any result, and neither does anything else that it should not.

On a GPU under deterministic algorithms (tests.devices.repeatable says why).
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ckptfused.spec import BlockSpec, keepable
from tests.cases import AXES, TILED, Case, all_pairs
from tests.devices import on_devices, repeatable
from tests.oracle import Function, Inputs, fused, make_inputs, run

CASES = all_pairs()
DECODER = Case(act="swiglu", norm="rmsnorm", rope="half", heads="4/2", mask="causal", drop="all", batch=2)


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    different = [name for name, t in expected.items() if not torch.equal(got[name], t)]
    assert not different, different


def _dtype(case: Case) -> torch.dtype:
    return (torch.float32, torch.bfloat16)[CASES.index(case) % 2]


@on_devices
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_presets_are_equal(case: Case, device: str) -> None:
    repeatable(device)
    inputs, spec = make_inputs(case, _dtype(case), device=device), case.spec()
    expected = run(fused(spec.with_keep("inputs")), inputs)
    tried = {spec.with_keep("inputs").keep}
    for preset in AXES["keep"]:
        variant = spec.with_keep(str(preset))
        if variant.keep not in tried:
            tried.add(variant.keep)
            assert_same(run(fused(variant), inputs), expected)


def _subsets(spec: BlockSpec) -> list[tuple[str, ...]]:
    names = keepable(spec)
    return [s for n in range(len(names) + 1) for s in itertools.combinations(names, n)]


@on_devices
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "autocast"])
@pytest.mark.parametrize("layout", ["pre", "post", "sandwich", "parallel", "shared", "attn", "ffn"])
def test_every_set_of_names(layout: str, autocast: torch.dtype | None, device: str) -> None:
    repeatable(device)
    drop = {"attn": "res", "ffn": "hidden"}.get(layout, "all")
    case = replace(DECODER, layout=layout, drop=drop, mask="none", heads="2/2", rope="none", tokens=33)
    inputs, spec = make_inputs(case, torch.float32, device=device), case.spec()
    expected = run(fused(spec), inputs, autocast)
    for names in _subsets(spec):
        assert_same(run(fused(spec.with_keep(names)), inputs, autocast), expected)


@on_devices
@pytest.mark.parametrize(("case", "dtype"), TILED, ids=lambda v: v.id if isinstance(v, Case) else str(v)[6:])
def test_on_both_sides_of_the_ffn_tile_thresholds(case: Case, dtype: torch.dtype, device: str) -> None:
    repeatable(device)
    inputs, spec = make_inputs(case, dtype, device=device), case.spec()
    assert_same(run(fused(spec.with_keep("all")), inputs), run(fused(spec.with_keep("inputs")), inputs))


# Causal lengths around a tile of keys, and around those where the CPU's attention goes over to PyTorch's kernel and
# back: the latter takes up to 256 keys and more than 1024, in half precision where the CPU multiplies that.
@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("drop", ["res", "attn"])
@pytest.mark.parametrize("tokens", [127, 128, 129, 256, 257, 1024, 1025])
def test_on_both_sides_of_the_attention_thresholds(tokens: int, drop: str, dtype: torch.dtype, device: str) -> None:
    repeatable(device)
    case = replace(DECODER, layout="attn", act="swiglu", tokens=tokens, drop=drop, heads="4/2")
    inputs, spec = _leaves(make_inputs(case, dtype, device=device)), case.spec()
    expected = run(fused(spec.with_keep("inputs")), inputs)
    for keep in ("attention", "all"):
        assert_same(run(fused(spec.with_keep(keep)), inputs), expected)
    tensors = (inputs.x, *inputs.params.values())
    y = fused(spec.with_keep("inputs"))(inputs)
    first, second = (torch.autograd.grad(y, tensors, inputs.dy, retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.equal(b)


def _leaves(inputs: Inputs, frozen: tuple[str, ...] = ()) -> Inputs:
    def leaf(name: str, t: Tensor) -> Tensor:
        return t.detach().requires_grad_(name not in frozen)

    return replace(inputs, x=leaf("x", inputs.x), params={n: leaf(n, t) for n, t in inputs.params.items()})


@on_devices
@pytest.mark.parametrize("keep", AXES["keep"])
def test_second_backward_is_equal(keep: str, device: str) -> None:
    repeatable(device)
    inputs = _leaves(make_inputs(DECODER, torch.float32, device=device))
    y = fused(DECODER.spec().with_keep(keep))(inputs)
    tensors = (inputs.x, *inputs.params.values())
    first = torch.autograd.grad(y, tensors, inputs.dy, retain_graph=True)
    kept = [t.clone() for t in first]
    second = torch.autograd.grad(y, tensors, inputs.dy)
    for a, b, c in zip(first, kept, second, strict=True):
        assert a.equal(b)
        assert b.equal(c)


@on_devices
@pytest.mark.parametrize("keep", ["inputs", "attention+mid+qkv", "all"])
@pytest.mark.parametrize("layout", ["pre", "sandwich", "parallel", "shared", "attn", "ffn"])
def test_partial_requires_grad(layout: str, keep: str, device: str) -> None:
    """Whatever subset is asked for, its gradients are those of the full backward and the others stay None."""
    repeatable(device)
    case = replace(DECODER, drop="res", layout=layout, keep=keep, bias="all", tokens=33)
    if layout == "ffn":
        case = Case(layout="ffn", drop="res", keep=keep, bias="all", batch=2)
    inputs, function = make_inputs(case, torch.float32, device=device), fused(case.spec())
    full = run(function, inputs)
    names = ["x", *inputs.params]
    wanted: list[list[str]] = [[name] for name in names]
    wanted += [names[1:], names[::2], names[1::2], [n for n in names if n.endswith("_b")], ["x"]]
    for some in wanted:
        leaves = _leaves(inputs, tuple(set(names) - set(some)))
        function(leaves).backward(inputs.dy)
        for name, t in {"x": leaves.x, **leaves.params}.items():
            assert (t.grad is not None) == (name in some), (some, name)
            assert t.grad is None or t.grad.equal(full[f"d {name}"]), (some, name)


@on_devices
def test_nothing_requires_grad(device: str) -> None:
    repeatable(device)
    inputs, function = make_inputs(DECODER, torch.float32, device=device), fused(DECODER.spec())
    y = function(inputs)
    assert not y.requires_grad
    expected = run(function, inputs)["y"]
    assert y.equal(expected)
    leaves = _leaves(inputs)
    with torch.no_grad():
        assert function(leaves).equal(expected)
    with torch.inference_mode():
        assert function(inputs).equal(expected)


@on_devices
def test_input_and_output_used_elsewhere_too(device: str) -> None:
    inputs, function = make_inputs(DECODER, torch.float64, device=device), fused(DECODER.spec())
    alone = run(function, inputs)
    leaves = _leaves(inputs)
    y = function(leaves)
    y.retain_grad()
    side = torch.randn_like(inputs.dy)
    (y * inputs.dy + leaves.x.sin() + y * side - y * side).sum().backward()
    assert y.grad is not None
    torch.testing.assert_close(y.grad, inputs.dy)
    torch.testing.assert_close(leaves.x.grad, alone["d x"] + inputs.x.cos())
    for name, t in leaves.params.items():
        torch.testing.assert_close(t.grad, alone[f"d {name}"])


@on_devices
def test_shared_weights_collect_both_gradients(device: str) -> None:
    """Two calls on the same weights: each returns its gradient once and autograd adds them."""
    case = replace(DECODER, drop="0")
    inputs, function = make_inputs(case, torch.float64, device=device), fused(case.spec())
    once = run(function, inputs)
    leaves = _leaves(inputs)
    (function(leaves) * inputs.dy + function(leaves) * inputs.dy).sum().backward()
    for name, t in leaves.params.items():
        torch.testing.assert_close(t.grad, 2 * once[f"d {name}"])


def _spread(t: Tensor) -> Tensor:
    """The same values with gaps between rows and, with two dimensions or more, a column-major order."""
    if t.dim() == 1:
        return torch.stack((t, t), 1)[:, 0]
    wide = torch.full((*t.shape[:-2], t.shape[-1], 2 * t.shape[-2] + 1), torch.nan, dtype=t.dtype, device=t.device)
    wide[..., : t.shape[-2]] = t.mT
    return wide[..., : t.shape[-2]].mT


def _check_layout(function: Function, changed: Inputs, inputs: Inputs) -> None:
    got, expected = run(function, changed), run(function, inputs)
    for name, t in expected.items():
        torch.testing.assert_close(got[name], t, msg=lambda text, name=name: f"{name}: {text}")


@on_devices
@pytest.mark.parametrize("layout", ["pre", "post", "attn", "ffn"])
@pytest.mark.parametrize("what", ["x", "params", "aux", "dy"])
def test_non_contiguous_inputs(what: str, layout: str, device: str) -> None:
    if layout == "ffn":
        case = Case(layout="ffn", batch=2, bias="all", drop="res")
    else:
        case = replace(DECODER, layout=layout, mask="keep+pad", bias="all", drop="res", tokens=33)
    inputs, function = make_inputs(case, device=device), fused(case.spec())
    changed = {
        "x": replace(inputs, x=_spread(inputs.x)),
        "params": replace(inputs, params={n: _spread(t) for n, t in inputs.params.items()}),
        "aux": replace(inputs, aux={n: t if n == "mask" else _spread(t) for n, t in inputs.aux.items()}),
        "dy": replace(inputs, dy=_spread(inputs.dy)),
    }[what]
    if what == "aux" and "mask" in inputs.aux:
        changed.aux["mask"] = inputs.aux["mask"].mT.contiguous().mT
    _check_layout(function, changed, inputs)


@on_devices
@pytest.mark.parametrize("seq_first", [False, True])
def test_expanded_inputs(seq_first: bool, device: str) -> None:
    """Zero strides: one sample for the whole batch, a scalar's gradient, and a weight that is one row."""
    case = replace(DECODER, batch=3, tokens=33, seq_first=seq_first)
    inputs, function = make_inputs(case, device=device), fused(case.spec())
    one = inputs.x[:, :1] if seq_first else inputs.x[:1]
    params = {**inputs.params, "ffn.up_w": inputs.params["ffn.up_w"][:1].expand(case.hidden, -1)}
    dy = torch.ones((), dtype=torch.float64, device=device).expand_as(inputs.dy)
    expanded = replace(inputs, x=one.expand_as(inputs.x), params=params, dy=dy)
    plain = replace(
        inputs, x=expanded.x.contiguous(), params={n: t.contiguous() for n, t in params.items()}, dy=dy.contiguous()
    )
    _check_layout(function, expanded, plain)
