"""Exact: what is kept for backward changes no bit of any result, in any entry point and with any option of a block.

On a GPU under deterministic algorithms (tests.devices.repeatable says why).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ckptfused.spec import BlockSpec, keepable
from tests.cases import AXES, TILED, Case, all_pairs
from tests.devices import on_devices, repeatable
from tests.oracle import Function, Inputs, fused, make_inputs, run
from tests.properties.entries import FUSED, GENERIC, PLAIN, each, equal, made, source, step, wanted

CASES = all_pairs()
DECODER = Case(act="swiglu", norm="rmsnorm", rope="half", heads="4/2", mask="causal", drop="all", batch=2)


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    different = [name for name, t in expected.items() if not torch.equal(got[name], t)]
    assert not different, different


def _dtype(case: Case) -> torch.dtype:
    return (torch.float32, torch.bfloat16)[CASES.index(case) % 2]


@on_devices
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@each()
def test_gradients_are_those_with_everything_kept(name: str, dtype: torch.dtype, device: str) -> None:
    call, x = made(name, device=device, dtype=dtype), source(device, dtype)
    for autocast in (False, True) if dtype == torch.float32 else (False,):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            assert equal(step(call, call.run, x), step(call, call.kept, x))


@on_devices
@pytest.mark.parametrize("kept", [False, True], ids=["recomputed", "kept"])
@each()
def test_a_second_backward_gives_the_same_again(name: str, kept: bool, device: str) -> None:
    """Whatever became of the gradients of the first; without `retain_graph` there is none."""
    call, x = made(name, device=device), source(device)
    loss = (call.kept if kept else call.run)(x).sin().sum()
    first = torch.autograd.grad(loss, wanted(call, x), retain_graph=True)
    copies = [t.clone() for t in first]
    for t in first:
        t.mul_(7)
    for retain in (True, False):
        assert equal(list(torch.autograd.grad(loss, wanted(call, x), retain_graph=retain)), copies)
    with pytest.raises(RuntimeError, match="second time|already been freed"):
        torch.autograd.grad(loss, wanted(call, x))


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "eval": lambda module: module.eval(),
    "rate": lambda module: [setattr(m, "p", 0.8) for m in module.modules() if isinstance(m, nn.Dropout)],
}


@on_devices
@pytest.mark.parametrize("change", [*CHANGES, "autocast", "no autocast"])
@each()
def test_backward_computes_under_the_settings_of_its_forward(name: str, change: str, device: str) -> None:
    call, x = made(name, device=device), source(device)

    def gradients(function: Callable[[Tensor], Tensor], changed: bool) -> list[Tensor]:
        torch.manual_seed(7)
        with torch.autocast(device, torch.bfloat16, enabled=change == "no autocast"):
            loss = function(x).float().sin().sum()
        if changed and change in CHANGES:
            CHANGES[change](call.module)
        inside = changed and change == "autocast"
        with torch.autocast(device, torch.bfloat16) if inside else contextlib.nullcontext():
            return list(torch.autograd.grad(loss, wanted(call, x)))

    if change == "autocast" and name in PLAIN:  # an autocast around backward changes PyTorch's own gradients
        assert equal(gradients(call.run, True), gradients(call.kept, True))
    else:
        assert equal(gradients(call.run, False), gradients(call.run, True))


@on_devices
@each()
def test_gradients_of_some(name: str, device: str) -> None:
    """Whatever subset is asked for, its gradients are right and the others stay None; fused, they are the full
    backward's.
    """
    call, x = made(name, device=device), source(device)
    leaves = wanted(call, x)
    full = dict(zip(map(id, leaves), step(call, call.run, x)[1:], strict=True))
    for some in ([x], leaves[1:], leaves[::2], leaves[1::2], leaves[1:2], leaves[-1:]):
        for t in leaves:
            t.requires_grad_(any(t is one for one in some)).grad = None
        expected = full
        if name in GENERIC:  # PyTorch's kernels for some gradients round otherwise
            expected = dict(zip(map(id, wanted(call, x)), step(call, call.kept, x)[1:], strict=True))
        torch.manual_seed(7)
        call.run(x).sin().sum().backward()
        for t in leaves:
            assert (t.grad is not None) == t.requires_grad
            assert t.grad is None or t.grad.equal(expected[id(t)])


@on_devices
@each()
def test_only_gradients_decide_what_is_saved(name: str, device: str) -> None:
    """The same result without them; but in eval mode PyTorch's own layers have a faster way that rounds otherwise."""
    call = made(name, device=device)
    for x in (source(device), source(device).detach()):
        for train in (True, False):
            call.module.train(train)
            torch.manual_seed(7)
            expected = call.run(x)
            assert expected.requires_grad
            for context in (torch.no_grad, torch.inference_mode):
                torch.manual_seed(7)
                with context():
                    y = call.run(x)
                assert y.grad_fn is None and (y.equal(expected) or not train)
                torch.testing.assert_close(y, expected.detach())
    call.module.requires_grad_(False)
    assert not call.run(source(device).detach()).requires_grad


@on_devices
@each()
def test_inputs_outputs_and_weights_used_elsewhere_too(name: str, device: str) -> None:
    """Two calls on the same weights, and an x and a y that others read: autograd adds what each returns once."""
    call, x = made(name, 0.0, device, torch.float64), source(device, torch.float64)
    alone = step(call, call.run, x)
    first, second = call.run(x), call.run(x)
    side = torch.randn_like(first)
    loss = first.sin().sum() + second.sin().sum() + x.sin().sum() + (first * side - first * side).sum()
    dx, *rest = torch.autograd.grad(loss, wanted(call, x))
    torch.testing.assert_close(dx, 2 * alone[1] + x.detach().cos())
    torch.testing.assert_close(rest, [2 * g for g in alone[2:]])


@on_devices
@each({name: entry for name, entry in FUSED.items() if name != "functional"})
def test_one_sequence_without_a_batch(name: str, device: str) -> None:
    call, x = made(name, 0.0, device, torch.float64), source(device, torch.float64, batch=1)
    assert call.run(x[0]).equal(call.run(x)[0])


@on_devices
@each()
def test_strided_inputs_and_gradients(name: str, device: str) -> None:
    call, x = made(name, device=device, dtype=torch.float64), source(device, torch.float64)
    for other in (_spread(x.detach()), x.detach()[:1].expand_as(x)):
        found = []
        for t in (other.requires_grad_(), other.detach().contiguous().requires_grad_()):
            torch.manual_seed(7)
            y = call.run(t)
            dy = torch.ones((), dtype=y.dtype, device=device).expand_as(y) if t is other else torch.ones_like(y)
            found.append([y, *torch.autograd.grad(y, wanted(call, t), dy)])
        torch.testing.assert_close(*found)


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
