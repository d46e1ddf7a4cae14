"""Blocks whose weights are in few bits: the bits of the same block with the weights as numbers, never all at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("bitsandbytes")

from ckptfused import cost, functional
from ckptfused.compat.torch_memory import allocations
from ckptfused.spec import (
    AUX_NAMES,
    KEEP_PRESETS,
    QUANT_SLOTS,
    AttentionSpec,
    BlockSpec,
    FFNSpec,
    Quantized,
    param_names,
    param_shapes,
    parse,
)
from tests.cases import TILED, Case, all_pairs, by_turns
from tests.oracle import Inputs, make_inputs
from tests.quantized import EVERY_WAY, quantized, stored


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """bitsandbytes has a C++ compiler run for every shape, where it has no kernel: float64."""
    with torch.compiler.set_stance("force_eager"):
        yield


CASES = [case for case in all_pairs() if not case.transposed][::4]


def run(spec: BlockSpec, inputs: Inputs, frozen: dict[str, Tensor]) -> dict[str, Tensor]:
    """y and the gradients of x and of all parameters that are not frozen."""
    x = inputs.x.detach().requires_grad_()
    params = {name: t.detach().requires_grad_() for name, t in inputs.params.items() if name not in frozen}
    halves = {2: "block", 1: "attention_block" if spec.attn else "ffn_block"}
    call = getattr(functional, halves[len(spec.halves)])
    y = call(x, params | frozen, spec, **inputs.aux, generator=torch.Generator().manual_seed(3))
    gradients = torch.autograd.grad(y, [x, *params.values()], inputs.dy)
    return {"y": y.detach(), **dict(zip(("x", *params), gradients, strict=True))}


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, t in got.items():
        assert torch.equal(t, expected[name]), name


@pytest.mark.parametrize(
    ("case", "dtype"),
    by_turns(CASES, [torch.float32, torch.bfloat16, torch.float64]),
    ids=lambda value: value.id if isinstance(value, Case) else str(value),
)
def test_the_bits_are_those_of_plain_weights(case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    spec, frozen, weights = quantized(case.spec(), inputs)
    assert parse(spec.to_string()) == spec
    same(run(spec, inputs, frozen), run(case.spec(), inputs, weights))


@pytest.mark.parametrize(
    "case", [case for case, dtype in TILED if dtype == torch.float32 and not case.transposed], ids=lambda case: case.id
)
def test_tiles(case: Case) -> None:
    inputs = make_inputs(case, torch.float32)
    spec, frozen, weights = quantized(case.spec(), inputs)
    same(run(spec, inputs, frozen), run(case.spec(), inputs, weights))


@pytest.mark.parametrize(
    "case", [Case(drop="all", lora="drop"), Case(layout="post", lora="all", act="gelu")], ids=lambda c: c.id
)
def test_the_bits_are_those_of_every_keep(case: Case) -> None:
    inputs = make_inputs(case, torch.bfloat16)
    spec, frozen, _ = quantized(case.spec(), inputs)
    expected = run(spec.with_keep("all"), inputs, frozen)
    for keep in KEEP_PRESETS:
        same(run(spec.with_keep(keep), inputs, frozen), expected)


def dequantizations(spec: BlockSpec, inputs: Inputs, frozen: dict[str, Tensor]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(spec, inputs, frozen)
    return sum(event.count for event in profile.key_averages() if event.key == "ckptfused::dequantize")


TILES = 5
"""What 300 tokens are at the least scratch."""
PIECES = [
    (0, 7 + 6 + 7),
    (65536, 7 + 7),
    (1, TILES * (7 + 7 + 7)),
]


@pytest.mark.parametrize(("scratch", "expected"), PIECES, ids=["whole", "tiles", "least"])
def test_each_weight_is_dequantized_at_most_three_times(scratch: int, expected: int) -> None:
    """Once a pass: in forward, where it is replayed (all but down), and for the gradient of what it takes. Tiles share
    the weights, forward and backward, where these are within the scratch that is allowed; else each has its own."""
    case = Case(lora="all", tokens=300, scratch=scratch)
    inputs = make_inputs(case, torch.float32)
    spec, frozen, _ = quantized(case.spec(), inputs)
    assert dequantizations(spec, inputs, frozen) == expected


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "case",
    [
        Case(lora="all", tokens=300, width=96, hidden=130),
        Case(tokens=300, hidden=256, width=128, scratch=700_000),
        Case(tokens=300, hidden=256, width=128, scratch=1),
    ],
    ids=lambda c: c.id,
)
def test_the_ledger_is_the_allocators(case: Case, backward: bool) -> None:
    """Its peak has each weight's scratch in it, one weight at a time where tiles do not share them."""
    inputs = make_inputs(case, torch.float32)
    spec, frozen, _ = quantized(case.spec(), inputs)
    x = inputs.x.detach().requires_grad_()
    params = {n: t.detach().requires_grad_(".lora" in n) for n, t in inputs.params.items() if n not in frozen}
    needs = ("x", *(name for name, t in params.items() if t.requires_grad)) if backward else None
    types = {name: t.dtype for name, t in (params | frozen).items()}
    ledger = cost.count(spec, case.batch, case.tokens, case.width, torch.float32, params=types, needs=needs)
    y = functional.block(x, params | frozen, spec, **inputs.aux)
    leaves = [t for t in (x, *params.values()) if t.requires_grad]
    if backward:
        _, events = allocations(lambda: torch.autograd.grad(y, leaves, inputs.dy))
    else:
        _, events = allocations(lambda: functional.block(x, params | frozen, spec, **inputs.aux))
    level = peak = 0
    for size in events:
        level += size
        peak = max(peak, level)
    assert peak == ledger.peak


def numbers_at_once(ledger: cost.Ledger) -> tuple[int, int]:
    """The most bytes of dequantized weights that there are at a time, and those of gate and up that a tile of columns
    has in one buffer."""
    alive: dict[int, int] = {}
    most = joined = 0
    for kind, name, _, sizes, _ in ledger.events:
        if kind == "allocation" and name in ("weight of", "weights of a tile"):
            alive[sizes[0]] = sizes[1]
            joined = max(joined, sizes[1] if name == "weights of a tile" else 0)
        elif kind == "release":
            alive.pop(sizes[0], None)
        most = max(most, sum(alive.values()))
    return most, joined


@pytest.mark.parametrize("weights", ["separate", "joint"])
@pytest.mark.parametrize("scratch", [0, 1, 600_000, 700_000])
def test_a_weight_is_freed_before_the_next_one(scratch: int, weights: str) -> None:
    """In one piece and in tiles; those share weights of up to 655,360 bytes where `scratch` allows for all of them."""
    case = Case(tokens=300, hidden=256, width=128, head_dim=64, lora="all", scratch=scratch, weights=weights)
    inputs = make_inputs(case, torch.float32)
    spec, frozen, numbers = quantized(case.spec(), inputs)
    sizes = [t.nbytes for t in numbers.values()]
    assert sum(sizes) == 655_360
    types = {name: t.dtype for name, t in (inputs.params | frozen).items()}
    ledger = cost.count(spec, case.batch, case.tokens, case.width, torch.float32, params=types, needs=("x",))
    most, joined = numbers_at_once(ledger)
    beside = max(sizes) // 4 // 16 * 4 + joined  # nested scales: a float32 for 16 numbers at least
    assert sum(sizes) - max(sizes) < most if scratch == 700_000 else max(sizes) <= most <= max(sizes) + beside
    assert joined == (2 * 64 * case.width * 4 if scratch == 1 else 0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tiles_of_the_ffn_share_its_weights_alone(device: str) -> None:
    """Not those of the attention that backward makes again on the way. A layer of Llama-3-8B, 32,768 tokens."""
    half = lambda names: tuple(Quantized(name, "nf4", 64) for name in names.split())  # noqa: E731
    attn = AttentionSpec(32, 8, 128, pre="rmsnorm", causal=True, rope="half", quant=half("q k v o"))
    ffn = FFNSpec("swiglu", 14336, pre="rmsnorm", quant=half("gate up down"))
    spec = BlockSpec(attn=attn, ffn=ffn).with_keep("inputs")
    names = [name for name in param_shapes(spec, 4096) if not name.endswith("_b")]
    types = {name: torch.float32 if ".quant" in name else torch.bfloat16 for name in names}
    ledger = cost.count(spec, 1, 32768, 4096, torch.bfloat16, params=types, needs=("x",), device=device)
    most, _ = numbers_at_once(ledger)
    one = 2 * 4096 * 14336
    assert most == 3 * one if device == "cuda" else one <= most < 2 * one  # 336 MiB are above the limit of a CPU


def test_second_derivatives() -> None:
    """By plain PyTorch, on the same weights."""
    case = Case(lora="all", tokens=5)
    inputs = make_inputs(case, torch.float64)
    spec, frozen, weights = quantized(case.spec(), inputs)

    def second(spec: BlockSpec, given: dict[str, Tensor]) -> Tensor:
        x = inputs.x.detach().requires_grad_()
        params = {name: t for name, t in inputs.params.items() if name not in given} | given
        (dx,) = torch.autograd.grad(functional.block(x, params, spec, **inputs.aux), x, inputs.dy, create_graph=True)
        (ddx,) = torch.autograd.grad(dx.square().sum(), x)
        return ddx

    torch.testing.assert_close(second(spec, frozen), second(case.spec(), weights), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", EVERY_WAY, ids=lambda way: f"{way.kind}-{way.block}-{way.nested}-{way.storage}")
def test_it_is_what_bitsandbytes_dequantizes(way) -> None:
    """Odd lengths of rows, blocks over rows' ends, and the last one short."""
    for shape in ((24, 56), (7, 10), (3, 34), (96, 130)):
        if shape[0] * shape[1] // 2 % way.storage.itemsize:
            continue  # bitsandbytes cannot store it so
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        tensors, nested, _ = stored(weight, way, torch.float32)
        state = [tensors.get(name) for name in QUANT_SLOTS]
        codes = tensors["w"]
        spec = Quantized("q", way.kind, way.block, nested)
        assert {name: t.nbytes for name, t in tensors.items()} == spec.sizes(*shape)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            got = torch.ops.ckptfused.dequantize(codes, state, spec.form, shape, dtype)
            assert got.dtype == dtype and torch.equal(got, stored(weight, way, dtype)[2])


def test_what_is_wrong_is_said() -> None:
    case = Case()
    inputs = make_inputs(case, torch.float32)
    spec, frozen, _ = quantized(case.spec(), inputs)

    def call(**changed: Tensor | None) -> None:
        params = {n: t for n, t in inputs.params.items() if n not in frozen} | frozen
        functional.block(inputs.x, params | {n.replace("__", "."): t for n, t in changed.items()}, spec)

    with pytest.raises(ValueError, match=r"params\['attn.quant0.scale'\]: expected a tensor of shape .*, got None"):
        call(attn__quant0__scale=None)
    with pytest.raises(ValueError, match=r"params\['ffn.down_w'\]: expected \d+ bytes in a row, got"):
        call(ffn__down_w=inputs.params["ffn.down_w"])
    with pytest.raises(ValueError, match=r"attn.quant: expected weights stored \[out, in\]"):
        replace(spec.attn, transposed=True)
    with pytest.raises(ValueError, match=r"attn.quant\[0\].kind: expected .* got 'int4'"):
        replace(case.spec().attn, quant=(Quantized("q", "int4", 64),))
    assert "q:nf4:64:256" in spec.to_string()
    trained = frozen["attn.o_w"].detach().requires_grad_()
    with pytest.raises(ValueError, match=r"params\['attn.o_w'\]: expected a frozen weight .* got one that is trained"):
        call(attn__o_w=trained)
    given = inputs.params | frozen | {"attn.o_w": trained}
    slots = [given.get(name) for name in param_names(spec)]
    with pytest.raises(RuntimeError, match="the quantized weight of o cannot be trained"):
        torch.ops.ckptfused.block(inputs.x, slots, [None] * len(AUX_NAMES), spec.to_string())


def test_a_changed_scale_raises_in_backward() -> None:
    """Codes and all that is beside them are saved tensors."""
    case = Case()
    inputs = make_inputs(case, torch.float32)
    spec, frozen, _ = quantized(case.spec(), inputs)
    params = {n: t for n, t in inputs.params.items() if n not in frozen} | frozen
    assert {f"attn.quant0.{slot}" for slot in QUANT_SLOTS} < frozen.keys()  # q's scales are nested
    for name in frozen:
        y = functional.block(inputs.x.detach().requires_grad_(), params, spec)
        params[name].add_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
