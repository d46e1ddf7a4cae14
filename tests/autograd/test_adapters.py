"""Adapters (LoRA) beside the projections: PEFT's own layer, threads, other devices' way, and what they cost.

What they compute is an axis of the all-pairs cases (test_block_oracle, test_keep), their accounting of test_cost.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ckptfused import cost, rng
from ckptfused.compat.torch_memory import allocations
from ckptfused.functional import attention_block, block, ffn_block
from ckptfused.spec import AUX_NAMES, Adapter, AttentionSpec, BlockSpec, FFNSpec, param_names, param_shapes
from tests import forks
from tests.cases import Case
from tests.devices import on_devices, repeatable
from tests.oracle import fused, make_inputs, run

N, C, F = 1100, 24, 40  # several ranges of rows and a rest
SPEC = BlockSpec(ffn=FFNSpec("relu", F, lora=(Adapter("up", 5, 2.0), Adapter("down", 3, 0.5))))


def _params(spec: BlockSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """Base weights of -1, 0 and 1: their products of whole numbers are exact in any order."""
    generator = torch.Generator().manual_seed(0)

    def make(name: str, shape: tuple[int, ...]) -> Tensor:
        if ".lora" in name:
            return torch.randn(shape, generator=generator).requires_grad_()
        return torch.randint(-1, 2, shape, generator=generator).to(dtype)

    return {name: make(name, shape) for name, (shape, _) in param_shapes(spec, C).items()}


def _results(spec: BlockSpec, x: Tensor, params: dict[str, Tensor]) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    wanted = {"x": x, **{name: t for name, t in params.items() if t.requires_grad}}
    y = ffn_block(x, params, spec, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(y, tuple(wanted.values()), torch.ones_like(y))
    return {"y": y.detach(), **dict(zip(wanted, grads, strict=True))}


@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize(("target", "behind"), [("up", "y"), ("down", "x")])
def test_threads_change_no_bit(target: str, behind: str, p: float) -> None:
    """The sums over rows are made in ranges that depend on the number of rows alone.

    behind: what comes after a base product of the adapter's own numbers, whose bits are the library's.
    """
    assert SPEC.ffn is not None
    lora = tuple(replace(adapter, p=p) for adapter in SPEC.ffn.lora if adapter.target == target)
    spec = BlockSpec(ffn=replace(SPEC.ffn, lora=lora))
    x, params = torch.randint(-2, 3, (1, N, C)).float(), _params(spec, torch.float32)
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(_results(spec, x, params))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert [name for name, t in results[0].items() if not t.equal(other[name])] in ([], [behind])


def test_gradients_have_their_parameters_types() -> None:
    results = _results(SPEC, torch.randint(-2, 3, (1, N, C)).bfloat16(), _params(SPEC, torch.bfloat16))
    assert {name for name, t in results.items() if t.dtype == torch.bfloat16} == {"x", "y"}
    assert len(results) == 2 + 6


@on_devices
@pytest.mark.parametrize("keep", ["inputs", "all"])
@pytest.mark.parametrize("lora", ["drop", "twice"])
def test_frozen_base(lora: str, keep: str, device: str) -> None:
    """PEFT trains so: gradients of the adapters alone, the same as among all others, float32 beside bfloat16."""
    repeatable(device)
    case = Case(mask="causal", rope="half", norm="rmsnorm", drop="res", lora=lora, batch=2, bias="all")
    inputs, function = make_inputs(case, torch.bfloat16, device=device), fused(case.spec().with_keep(keep))
    full = run(function, inputs)
    params = {n: t.detach().requires_grad_(".lora" in n) for n, t in inputs.params.items()}
    function(replace(inputs, params=params)).backward(inputs.dy)
    for name, t in params.items():
        assert (t.grad is not None) == (".lora" in name), name
        assert t.grad is None or t.grad.equal(full[f"d {name}"]), name


class _FFN(torch.nn.Module):
    """Layers that PEFT can wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(C, F), torch.nn.Linear(F, C)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def _gradients(y: Tensor, dy: Tensor, adapters: dict[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(y, list(adapters.values()), dy.to(y.dtype))
    return {"y": y.detach(), **dict(zip(adapters, found, strict=True))}


def _errors_against_peft(dtype: torch.dtype, seed: int) -> dict[str, tuple[float, float, float]]:
    """Squared errors of ours and of PEFT's own layers against float64, and of half an ulp of the tensor's scale."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    model = _FFN().to(dtype)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["up", "down"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    params: dict[str, Tensor] = {}
    adapters: dict[str, Tensor] = {}
    for index, name in enumerate(("up", "down")):
        layer = getattr(model, name)
        params |= {f"ffn.{name}_w": layer.weight, f"ffn.{name}_b": layer.bias}
        for slot, linear in (("a", layer.lora_A["default"].float()), ("b", layer.lora_B["default"].float())):
            adapters[f"ffn.lora{index}.{slot}"] = linear.weight
    spec = BlockSpec(ffn=FFNSpec("silu", F, lora=(Adapter("up", 4, 1.5), Adapter("down", 4, 1.5))))
    x, dy = torch.randn(2, 9, C).to(dtype), torch.randn(2, 9, C).to(dtype)
    ours = _gradients(ffn_block(x, params | adapters, spec), dy, adapters)
    own = _gradients(model(x), dy, adapters)
    model.double()  # in place: the adapters are the same parameters
    truth = _gradients(model(x.double()), dy, adapters)
    half_ulp = torch.finfo(dtype).eps / 2
    return {
        name: (
            *((found[name].double() - t).square().sum().item() for found in (ours, own)),
            (half_ulp * t.abs().max().item()) ** 2 * t.numel(),
        )
        for name, t in truth.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_against_peft(dtype: torch.dtype) -> None:
    """Output and every adapter's gradient: at most twice PEFT's own error, root mean square over eight draws."""
    draws = [_errors_against_peft(dtype, seed) for seed in range(8)]
    for name in draws[0]:
        ours, own, ulp = (sum(parts) ** 0.5 for parts in zip(*(draw[name] for draw in draws), strict=True))
        assert ours <= 2 * own + ulp, name


def test_work_by_hand() -> None:
    """The adapters' products beside the base's: up's two again, and of each t again, d b, d t (of down twice), d a and
    d in.
    """
    base = BlockSpec(ffn=FFNSpec("relu", F))
    dims, rank = (1, N, C), 5
    assert base.ffn is not None
    up = BlockSpec(ffn=replace(base.ffn, lora=(Adapter("up", rank),)))
    down = BlockSpec(ffn=replace(base.ffn, lora=(Adapter("down", rank),)))

    def more(spec: BlockSpec, of: object) -> float:
        return (of(spec, *dims) - of(base, *dims)) / (2 * N * rank)

    assert more(up, cost.forward_flops) == more(down, cost.forward_flops) == C + F
    replay, sides = C + F, 3 * C + 2 * F
    assert more(up, cost.backward_flops) == replay + sides
    assert more(down, cost.backward_flops) == 3 * F + 2 * C + C


AS_ELSEWHERE = """
import torch
from tests.cases import Case
from tests.oracle import expect, fused, make_inputs, rng_state, run
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for case in (
        Case(lora="twice", batch=2, seq_first=True, bias="all", weights="joint", transposed=True, tokens=33),
        Case(lora="drop", layout="sandwich", act="gelu", drop="all", tokens=33),
    ):
        inputs, spec = make_inputs(case, dtype), case.spec()
        found = run(fused(spec), inputs)
        failures = expect(spec, inputs, rng_state(inputs.x)).failures(found)
        assert all("lora" not in failure and "y:" not in failure for failure in failures), failures
        leaves = [t.requires_grad_() for t in (inputs.x, *inputs.params.values())]
        y = fused(spec)(inputs)
        with torch.autocast("cpu", torch.bfloat16):  # no matter to the backward
            grads = torch.autograd.grad(y, leaves, inputs.dy)
        for name, grad in zip(("x", *inputs.params), grads):
            assert grad.equal(found[f"d {name}"]), name
"""


@pytest.mark.slow
def test_as_other_devices_do_it() -> None:
    """Through PyTorch's products, as on a GPU: the same masks and values."""
    done = forks.python(AS_ELSEWHERE, CKPTFUSED_ADAPTERS="aten")
    assert done.returncode == 0, done.stdout + done.stderr


def _drawing_as_the_cpu(device: torch.device) -> torch.Generator:
    """A generator of which a first block has the masks that the CPU has."""
    source = torch.Generator().manual_seed(0)
    if device.type == "cpu":
        return source
    seed, _ = rng.state(torch.empty(0), source).tolist()
    return torch.Generator(device).manual_seed(seed)


def _block_results(
    spec: BlockSpec, x: Tensor, params: dict[str, Tensor], dy: Tensor, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """What a block and its backward make of these, in another type if one is given."""
    used = {n: t.detach().to(dtype or t.dtype).requires_grad_(t.requires_grad) for n, t in params.items()}
    inputs = {"x": x.to(dtype or x.dtype).requires_grad_(), **{n: t for n, t in used.items() if ".lora" in n}}
    y = block(inputs["x"], used, spec, generator=_drawing_as_the_cpu(x.device))
    grads = torch.autograd.grad(y, tuple(inputs.values()), dy.to(y.dtype))
    return {"y": y.detach(), **dict(zip(inputs, grads, strict=True))}


HALVES = (torch.bfloat16, torch.float16)
OTHER_SCALE = {torch.bfloat16: 8.0, torch.float16: 0.25}  # with 8 the block's own output is beyond float16
ALONE = [*product((True, False), (False, True), (0.0, 0.25), (False,))]
WITH_MORE = [*product((True, False), (False,), (0.0, 0.25), (True,))]


def half_precision_errors(device: str, half: torch.dtype) -> dict[str, float]:
    """Relative errors of a half-precision block with an adapter beside each projection, in float32 and in its own type,
    and with a second beside some and biases, against float64; whatever is kept, the bits are the same."""
    squares: dict[str, list[float]] = {}
    for is_wide, is_other, p, more in (*ALONE, *WITH_MORE):
        wide, scale = torch.float32 if is_wide else half, OTHER_SCALE[half] if is_other else 0.5
        adapter = partial(Adapter, rank=8, scale=scale, p=p)
        second = partial(Adapter, rank=3, scale=2 * scale)
        attn = AttentionSpec(
            4, 2, 16, causal=True, lora=(*map(adapter, "qkvo"), *((second("q"), second("o", p=0.5)) * more))
        )
        ffn = FFNSpec("swiglu", 96, lora=(*map(adapter, ("gate", "up", "down")), *((second("down"),) * more)))
        spec, generator = BlockSpec(attn, ffn), torch.Generator().manual_seed(0)
        shapes = {
            n: s
            for n, (s, _) in param_shapes(spec, 64).items()
            if not n.endswith(("_b", ".bias")) or (more and ".lora" in n)
        }
        params = {
            n: (torch.randn(s, generator=generator) / s[-1] ** 0.5 if len(s) > 1 or ".lora" in n else torch.ones(s))
            .to(device, wide if ".lora" in n else half)
            .requires_grad_(".lora" in n)
            for n, s in shapes.items()
        }
        x, dy = torch.randn(2, 1, 150, 64, generator=generator).to(device, half)

        found, truth = _block_results(spec, x, params, dy), _block_results(spec, x, params, dy, torch.float64)
        kept = _block_results(spec.with_keep("all"), x, params, dy)
        assert all(t.equal(found[name]) for name, t in kept.items())
        for name, t in truth.items():
            pair = ((found[name].double() - t).square().sum().item(), t.square().sum().item())
            squares.setdefault(f"{name.rpartition('.')[2]} {wide} {scale} {p} {more}", []).append(pair[0] / pair[1])
    return {name: (sum(of) / len(of)) ** 0.5 for name, of in squares.items()}


def half_precision_gradients(device: str, half: torch.dtype, exponent: int) -> dict[str, list[float]]:
    """Gradients of one float32 adapter whose input and whose output's gradient have the same bits however it is
    multiplied; b and the gradient are times 2^exponent.
    """
    spec = BlockSpec(ffn=FFNSpec("relu", F, lora=(Adapter("down", 3, 0.5),)))
    params = {n: t.detach() * 2.0 ** (exponent * n.endswith(".b")) for n, t in _params(spec, half).items()}
    params = {n: t.to(device).requires_grad_(".lora" in n) for n, t in params.items()}
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(1, 300, C, generator=generator).to(device, half) for _ in range(2))
    names = [name for name in params if name.endswith((".a", ".b"))]
    y = ffn_block(x, params, spec)
    grads = torch.autograd.grad(y, [params[name] for name in names], dy * 2.0**exponent)
    return {name: grad.flatten().tolist() for name, grad in zip(names, grads, strict=True)}


def rows_of_two_blocks(device: str) -> dict[str, list[float]]:
    """Results of the last rows, and all gradients, of an input whose dropped copy is made in two parts."""
    width, rows = 8192, 8200
    spec = BlockSpec(ffn=FFNSpec("relu", 8, lora=(Adapter("up", 2, 4.0, p=0.5), Adapter("down", 2, 4.0, p=0.5))))
    generator = torch.Generator().manual_seed(2)
    params = {
        n: (torch.randn(s, generator=generator) / s[-1] ** 0.5).to(device, torch.bfloat16).requires_grad_()
        for n, (s, _) in param_shapes(spec, width).items()
        if not n.endswith(("_b", ".bias"))
    }
    x = torch.randn(1, rows, width, generator=generator).to(device, torch.bfloat16).requires_grad_()
    torch.manual_seed(3)
    y = ffn_block(x, params, spec)
    grads = torch.autograd.grad(y, (x, *params.values()), y.detach())
    found = {"y": y[0, -4:, :64], "d x": grads[0][0, -4:, :64]}
    found |= {name: grad for name, grad in zip(params, grads[1:], strict=True) if ".lora" in name}
    return {name: t.detach().float().flatten().tolist() for name, t in found.items()}


def half_precision_results(device: str) -> list[tuple[dict[str, float], list[dict[str, list[float]]]]]:
    """For each half-precision type the errors of a block, and one adapter's gradients of usual and of small numbers."""
    return [
        (half_precision_errors(device, half), [half_precision_gradients(device, half, e) for e in (0, -8)])
        for half in HALVES
    ]


def check_half_precision(results: list[tuple[dict[str, float], list[dict[str, list[float]]]]]) -> None:
    """Against the CPU's float32: the error is that of the values around it, and two roundings to 16 bits differ by
    2^-17 at most, where one to half precision would by 2^-9 (bfloat16) or 2^-12, and the rest of a small float16
    number, did it not have the number's own exponent, by 2^-11.
    """
    for (errors, gradients), (own_errors, own_gradients) in zip(results, half_precision_results("cpu"), strict=True):
        assert {
            name: (error, own_errors[name]) for name, error in errors.items() if error > 1.5 * own_errors[name]
        } == {}
        for found, wanted in zip(gradients, own_gradients, strict=True):
            for name, numbers in wanted.items():
                a, b = torch.tensor([found[name], numbers], dtype=torch.float64)
                assert 0 < (a - b).norm() <= 2**-16 * b.norm(), name


def test_half_precision_products_are_as_exact() -> None:
    """A GPU's products: what is `rank` wide and multiplied again is two numbers of half precision."""
    done = forks.python(
        """
        import json
        from tests.autograd.test_adapters import half_precision_results
        print(json.dumps(half_precision_results("cpu")))
        """,
        CKPTFUSED_ADAPTERS="aten",
    )
    assert done.returncode == 0, done.stderr
    check_half_precision(json.loads(done.stdout))


def of_large_scales(device: str) -> list[float]:
    """Outputs of one and two adapters in float16 with large numbers, scales or biases, and small ones beside them."""
    found = []
    for count, scale, a, b, bias in (
        (1, 16.0, 1.0, 2**-10, None),
        (2, 16.0, 1.0, 2**-10, None),
        (1, 16.0, 1.0, 2**-10, 0.0),
        (1, 2**-8, 16.0, 1.0, None),
        (2, 2**-8, 16.0, 1.0, None),
        (1, 2**-6, 1.0, 0.0, 1e5),
        (1, 2.0**17, 1.0, 0.0, 2**-20),
        (2, 0.0, 1.0, 1.0, 1.0),
    ):
        spec = BlockSpec(ffn=FFNSpec("relu", 8, lora=(Adapter("down", 1, scale),) * count))
        params = {"ffn.up_w": torch.eye(8).half(), "ffn.down_w": torch.zeros(8, 8).half()}
        for i in range(count):
            params |= {f"ffn.lora{i}.a": torch.full((1, 8), a), f"ffn.lora{i}.b": torch.full((8, 1), b)}
            params |= {} if bias is None else {f"ffn.lora{i}.bias": torch.full((8,), bias)}
        params = {name: t.to(device) for name, t in params.items()}
        found.append(ffn_block(torch.full((1, 2, 8), 1000.0).half().to(device), params, spec)[0, 0, 0].item())
    return found


def test_scales_are_not_beyond_float16() -> None:
    """A number is within float16 where it is in the output: what its scale makes of it on the way is, too."""
    done = forks.python(
        """
        import json
        from tests.autograd.test_adapters import of_large_scales
        print(json.dumps(of_large_scales("cpu")))
        """,
        CKPTFUSED_ADAPTERS="aten",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == of_large_scales("cpu")


@pytest.mark.slow
def test_dropped_rows_are_copied_in_parts() -> None:
    """A bounded copy takes as many rows as fit, with the masks of their places among all."""
    done = forks.python(
        """
        import json
        from tests.autograd.test_adapters import rows_of_two_blocks
        print(json.dumps(rows_of_two_blocks("cpu")))
        """,
        CKPTFUSED_ADAPTERS="aten",
    )
    assert done.returncode == 0, done.stderr
    own = rows_of_two_blocks("cpu")
    for name, numbers in json.loads(done.stdout).items():
        found, wanted = (torch.tensor(values, dtype=torch.float64) for values in (numbers, own[name]))
        assert (found - wanted).norm() <= 2**-7 * wanted.norm(), name


def test_no_rows() -> None:
    results = _results(SPEC, torch.zeros(1, 0, C), _params(SPEC, torch.float32))
    assert results["y"].shape == (1, 0, C)
    assert all(not t.any() for name, t in results.items() if ".lora" in name)


def _large_allocations(lora: str, p: float) -> dict[str, Counter[int]]:
    """Allocations as large as a float32 copy of x, or larger, in a step of a bfloat16 block, counted by size: by the
    allocator, and by the ledger of each device."""
    case = Case(tokens=4096, width=256, hidden=256, head_dim=64, lora=lora)
    inputs, spec = make_inputs(case, torch.bfloat16), case.spec()
    halves: dict[str, Any] = {
        half: replace(of, lora=tuple(replace(adapter, p=p) for adapter in of.lora)) for half, of in spec.halves.items()
    }
    spec = replace(spec, **halves)
    x = inputs.x.detach().requires_grad_()
    params = {n: t.float().requires_grad_() if ".lora" in n else t for n, t in inputs.params.items()}
    wanted = {"x": x, **{name: t for name, t in params.items() if t.requires_grad}}
    types = {name: t.dtype for name, t in params.items()}

    def step() -> None:
        y = block(x, params, spec, generator=torch.Generator().manual_seed(1))
        torch.autograd.grad(y, tuple(wanted.values()), inputs.dy)

    found = {"allocator": allocations(step)[1]}
    for device in ("cpu", "cuda"):
        passes = [
            cost.count(spec, 1, case.tokens, case.width, x.dtype, params=types, needs=needs, device=device)
            for needs in (None, wanted)
        ]
        found[device] = [sizes[1] for one in passes for kind, _, _, sizes, _ in one.events if kind == "allocation"]
    return {by: Counter(size for size in sizes if size >= x.numel() * 4) for by, sizes in found.items()}


@pytest.mark.parametrize("p", [0.0, 0.05])
def test_no_input_is_copied_in_float32(p: float) -> None:
    """Adapters in float32 read a bfloat16 input in rows: nothing as large is allocated that is not without them."""
    assert _large_allocations("all", p) == _large_allocations("none", 0.0)


@on_devices
@pytest.mark.parametrize("layout", ["pre", "attn", "ffn"])
def test_no_columns(layout: str, device: str) -> None:
    """Width 0: the gradients of the adapters' other sides are zeros."""
    targets = {"pre": ("q", "o"), "attn": ("v", "o"), "ffn": ()}[layout]
    attn = AttentionSpec(heads=2, kv_heads=2, head_dim=4, lora=tuple(Adapter(t, 3) for t in targets))
    ffn = FFNSpec("swiglu", F, lora=(Adapter("gate", 3), Adapter("down", 2, p=0.5)))
    spec = BlockSpec(None if layout == "ffn" else attn, None if layout == "attn" else ffn)
    shapes = param_shapes(spec, 0)
    params = {name: torch.ones(shape, device=device, requires_grad=True) for name, (shape, _) in shapes.items()}
    call = {"pre": block, "attn": attention_block, "ffn": ffn_block}[layout]
    y = call(torch.ones(2, 5, 0, device=device, requires_grad=True), params, spec)
    y.sum().backward()
    for name, t in params.items():
        assert t.grad is not None and t.grad.shape == t.shape and not t.grad.any(), name


def test_more_adapters_than_sites() -> None:
    """Each has a site of its own, which is eight bits, after the four of the block."""
    fits = BlockSpec(ffn=FFNSpec("relu", F, lora=(Adapter("up", 1, p=0.5),) * 252))
    assert _results(fits, torch.ones(1, 2, C), _params(fits, torch.float32))["y"].isfinite().all()
    with pytest.raises(ValueError, match="expected at most 252 adapters in a block, got 253"):
        BlockSpec(ffn=FFNSpec("relu", F, lora=(Adapter("up", 1),) * 253))
    one = BlockSpec(ffn=FFNSpec("relu", F, lora=(Adapter("up", 1),))).to_string()
    word = next(word for word in one.split() if word.startswith("ffn.lora="))
    text = one.replace(word, "+".join([word] + [word.removeprefix("ffn.lora=")] * 252))
    params = _params(fits, torch.float32)
    given = [*(params.get(name) for name in param_names(fits)), None, None, None]
    with pytest.raises(RuntimeError, match="expected at most 252 adapters in a block, got more"):
        torch.ops.ckptfused.ffn_block(torch.ones(1, 2, C), given, [None] * len(AUX_NAMES), text)


def test_shapes_are_checked_below_python() -> None:
    params = {**_params(SPEC, torch.float32), "ffn.lora0.a": torch.zeros(5, C + 1)}
    given = [params.get(name) for name in param_names(SPEC)]
    with pytest.raises(RuntimeError, match=r"expected a \[5, 24\] and b \[40, 5\] of the adapter of u"):
        torch.ops.ckptfused.ffn_block(torch.zeros(1, 3, C), given, [None] * len(AUX_NAMES), SPEC.to_string())


def test_compiled_is_eager() -> None:
    """One op in one graph, the same masks."""
    case = Case(mask="causal", norm="rmsnorm", drop="res", lora="drop", batch=2, tokens=33)
    inputs, function = make_inputs(case, torch.float32), fused_by_default_generator(case.spec())
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for call in (function, compiled):
        torch.manual_seed(3)
        results.append(run(lambda i, call=call: call(i.x, i.params), inputs))
    torch._dynamo.reset()
    assert all(results[1][name].equal(t) for name, t in results[0].items())


def fused_by_default_generator(spec: BlockSpec) -> Callable[[Tensor, dict[str, Tensor]], Tensor]:
    return lambda x, params: block(x, params, spec)
