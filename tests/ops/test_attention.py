"""attention_fwd and attention_bwd against the materialised reference in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.devices import CUDA, on_devices
from tests.ops.attention_calls import Call, Case, make_call, reference

# The error of a kernel that accumulates in the same type as the eager one differs from its by rounding order only.
# The eager run materialises P in the compute type; ours keeps it in float32, or rounds it once where bfloat16 is
# multiplied as it is: twice its error is generous.
# Both of them, and the truth, are of the device under test.
TIMES_EAGER = 2.0
P = 0.2  # of dropout
# Below this share of the largest element both errors are a few roundings and their ratio says nothing.
FLOOR = {torch.float64: 1e-14, torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def error(x: Tensor, truth: Tensor) -> float:
    finite = torch.isfinite(truth)
    assert torch.equal(x[~finite].double(), truth[~finite])  # -inf where the row sees nothing
    if not finite.any():
        return 0.0
    # A gradient that vanishes (one key to see) is measured against the terms that cancel, of size 1.
    return float((x.double() - truth)[finite].abs().max() / truth[finite].abs().max().clamp_min(1.0))


def check(c: Case, device: str) -> None:
    call = make_call(c, device)
    got, truth = call.run(), reference(call, torch.float64)
    eager = truth if c.dtype == torch.float64 else reference(call, c.dtype)
    for name, x, y, e in zip(("o", "lse", "dq", "dk", "dv"), got, truth, eager, strict=True):
        limit = max(FLOOR[c.dtype], TIMES_EAGER * error(e, y))
        assert error(x, y) <= limit, name


MASKS = ("none", "keep", "drop", "add", "add-inf", "shared", "head", "float64")
OPTIONS = (
    {},
    {"p": P},
    {"causal": True, "p": P},
    {"window": 9},
    {"window": 9, "causal": True, "softcap": 2.0, "p": P},
    {"softcap": 2.0},
)
MASK_CASES = [Case(mask=m, **o) for m in MASKS for o in OPTIONS]
PADDING_CASES = [
    Case(padding=pad, mask=m, p=p, causal=causal)
    for pad in ("keep", "drop", "add")
    for m, p, causal in (("none", 0.0, False), ("none", P, True), ("keep", P, False), ("add", 0.0, True))
]
SHAPE_CASES = [
    Case(tokens=t, head_dim=d, heads=h, kv_heads=g, p=p, causal=causal)
    for (t, d), (h, g) in zip(
        ((1, 8), (5, 256), (67, 100), (130, 64), (300, 20), (300, 64), (1, 7), (5, 16), (14, 41), (20, 1)),
        ((2, 2), (3, 1), (4, 2), (2, 2), (4, 1), (2, 2), (3, 3), (4, 2), (2, 1), (2, 2)),
        strict=True,
    )
    for p, causal in ((0.0, False), (P, False), (P, True))
]
PACKED_CASES = [
    Case(batch=1, tokens=200, packed=packed, causal=causal, p=p, window=window)
    for packed in ((0, 200), (0, 1, 70, 70, 199, 200), (0, 20, 200))
    for causal, p, window in ((False, 0.0, 0), (True, P, 0), (False, P, 17))
]
LONG_CASES = [
    Case(tokens=300, head_dim=8, **o)  # several tiles of queries and of keys
    for o in (
        {"window": 40, "p": P},
        {"window": 140, "causal": True, "mask": "add-inf"},
        {"mask": "keep", "softcap": 1.5, "p": P},
        {"padding": "drop", "p": P},
    )
]
LOW_PRECISION_CASES = [
    replace(c, dtype=dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for c in (
        Case(),
        Case(causal=True, tokens=300, head_dim=64),
        Case(p=P, tokens=130, head_dim=64),
        Case(p=P, causal=True, mask="keep", kv_heads=1),
        Case(softcap=2.0, window=9, mask="add", padding="drop"),
        Case(batch=1, packed=(0, 30, 67), p=P),
        Case(batch=1, packed=(0, 1, 6, 19, 67), p=P, causal=True),  # products of ours and the library's
    )
]
# Several runs of queries and of keys, the last of them short; widths that fill no pair of rows.
RUN_CASES = [
    Case(batch=1, heads=2, kv_heads=kv_heads, tokens=1100, head_dim=head_dim, dtype=dtype, **o)
    for dtype in FLOOR
    for kv_heads, head_dim, o in (
        (2, 8, {"causal": True, "p": P}),
        (1, 8, {"p": P}),
        (1, 7, {"window": 300, "causal": True}),
        (2, 7, {"window": 50, "padding": "drop"}),
    )
]
# Scales at which PyTorch's kernels make hidden keys NaN or the best ones: below 0, 0, and what float32 flushes to 0.
SCALES = (-0.3, 0.0, 1e-42, 1e-60)
SCALE_CASES = [
    *(Case(scale=s, causal=True, dtype=dtype) for s in SCALES for dtype in FLOOR),
    *(Case(scale=-0.3, causal=causal, tokens=300, head_dim=64) for causal in (False, True)),
    *(Case(scale=-4.0, causal=causal, dtype=torch.bfloat16, head_dim=64) for causal in (False, True)),
    Case(scale=-0.3, causal=True, padding="drop"),
    Case(scale=-0.3, causal=True, window=9),
    Case(scale=-0.3, causal=True, p=P, softcap=2.0),
    Case(scale=-0.3, causal=True, batch=1, packed=(0, 30, 67)),
]


ALL = [*MASK_CASES, *PADDING_CASES, *SHAPE_CASES, *PACKED_CASES, *LONG_CASES, *LOW_PRECISION_CASES, *SCALE_CASES]
ALL += RUN_CASES
# On a GPU nearly every case is three kernels to compile: each mask, padding, shape and set of options once or twice.
ON_GPU = [*MASK_CASES[::5], *PADDING_CASES[::3], *SHAPE_CASES[::2], *PACKED_CASES, *LONG_CASES, *LOW_PRECISION_CASES]
ON_GPU += SCALE_CASES
RUNS = [pytest.param(c, "cpu", id=f"cpu-{c.id}") for c in ALL]
RUNS += [pytest.param(c, "cuda", id=f"cuda-{c.id}", marks=CUDA.marks) for c in ON_GPU]


@pytest.mark.parametrize(("case", "device"), RUNS)
def test_matches_reference(case: Case, device: str) -> None:
    check(case, device)


@on_devices
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_layout(dtype: torch.dtype, device: str) -> None:
    for p in (0.0, P):
        call = make_call(Case(p=p, dtype=dtype), device)
        o, lse, dq, dk, dv = call.run()
        for t, like in ((o, call.q), (dq, call.q), (dk, call.k), (dv, call.v)):
            assert t.shape == like.shape
            assert t.dtype == dtype
            assert t.transpose(1, 2).is_contiguous()
        assert lse.is_contiguous()
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


DETERMINISM_CASES = [
    Case(dtype=dtype, tokens=300, head_dim=64, **o)
    for dtype in (torch.float32, torch.bfloat16)
    for o in ({"p": P}, {"p": P, "causal": True, "batch": 1, "kv_heads": 1}, {"softcap": 2.0}, {"mask": "add"})
]  # of our own kernel: those of PyTorch's flash kernel, which takes the plain case, do change with the threads


@pytest.mark.parametrize("case", DETERMINISM_CASES, ids=lambda c: c.id)
def test_bits_do_not_depend_on_threads(case: Case) -> None:
    call = make_call(case)
    threads = torch.get_num_threads()
    runs = []
    try:
        for n in (threads, 1, 3, threads):
            torch.set_num_threads(n)
            runs.append(call.run())
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))


@on_devices
@pytest.mark.parametrize(
    "case",
    [Case(p=P, mask="add", dtype=torch.float32), Case(dtype=torch.float32)],
    ids=lambda c: c.id,
)
def test_runs_repeat_and_inputs_stay(case: Case, device: str) -> None:
    call = make_call(case, device)
    o, lse = call.forward()
    assert all(map(torch.equal, call.forward(), (o, lse)))
    tensors = (call.q, call.k, call.v, call.dout, o, lse)
    before = [t.clone() for t in tensors]
    first, second = call.backward(o, lse), call.backward(o, lse)
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, tensors, before))


@on_devices
def test_dropping_everything(device: str) -> None:
    call = make_call(Case(p=1.0), device)
    o, lse, *grads = call.run()
    assert torch.isfinite(lse).all()
    assert all(not t.any() for t in (o, *grads))


HIDING = ["add-inf", "add-float32", "add-bfloat16", "add-float16"]


@on_devices
@pytest.mark.parametrize("mask", HIDING)
@pytest.mark.parametrize("p", [0.0, P])
def test_masked_rows_are_zero(p: float, mask: str, device: str) -> None:
    call = make_call(Case(mask=mask, p=p, tokens=300, dtype=torch.float32), device)
    o, lse, dq, dk, dv = call.run()
    assert torch.isneginf(lse[:, :, 150]).all()
    assert not o[:, :, 150].any()
    assert not dq[:, :, 150].any()
    assert all(t.isfinite().all() for t in (o, dq, dk, dv))


@on_devices
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("p", [0.0, P])
def test_nan_reaches_its_rows_only(p: float, softcap: float, device: str) -> None:
    call = make_call(Case(p=p, softcap=softcap, dtype=torch.float32), device)
    call.q[0, 1, 3, 0] = torch.nan
    o, lse, *_ = call.run()
    assert o[0, 1, 3].isnan().all()
    assert lse[0, 1, 3].isnan()
    assert o.isnan().sum() == o.shape[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_of_any_size(dtype: torch.dtype) -> None:
    """A row's largest logit has probability 1 where no other is near, however large it is."""
    q, k, v = (torch.randn(1, 1, 300, 64).to(dtype) for _ in range(3))
    rest = None, None, None, None, "none", "none", 1e8, False, 0, 0.0, 0.0
    out, lse = torch.ops.ckptfused.attention_fwd(q, k, v, *rest)
    best = (q.double() @ k.double().mT).argmax(-1)
    assert torch.equal(out, v.gather(2, best[..., None].expand_as(v)))
    grads = torch.ops.ckptfused.attention_bwd(torch.randn_like(out), q, k, v, out, lse, *rest)
    assert lse.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("head_dim", [300, 512])
def test_short_sequences_of_wide_heads(head_dim: int) -> None:
    """A row of a gradient is wider than the tile of scores that it is turned round in."""
    check(Case(tokens=3, heads=2, head_dim=head_dim, softcap=2.0, dtype=torch.float32), "cpu")


@on_devices
def test_operands_of_any_strides(device: str) -> None:
    case = Case(p=P)
    call = make_call(case, device)
    strided = replace_operands(call, lambda t: t.transpose(2, 3).contiguous().transpose(2, 3))
    assert all(map(torch.equal, strided.run(), call.run()))
    same = make_call(case, device)
    same.k = call.k[:, :, :1].expand_as(call.k)
    again = make_call(case, device)
    again.k = same.k.contiguous()
    for t in ("q", "v", "dout"):
        setattr(same, t, getattr(call, t))
        setattr(again, t, getattr(call, t))
    assert all(map(torch.equal, same.run(), again.run()))


def replace_operands(call: Call, change) -> Call:
    return Call(call.case, *(change(t) for t in (call.q, call.k, call.v, call.dout)), call.rest)


@on_devices
def test_empty(device: str) -> None:
    for p in (0.0, P):
        o, lse, dq, dk, dv = make_call(Case(tokens=0, p=p), device).run()
        assert o.shape == dq.shape == (2, 4, 0, 20)
        assert lse.shape == (2, 4, 0)
        assert dk.shape == dv.shape == (2, 2, 0, 20)


@pytest.mark.parametrize("bounds", [(3, 67), (0, 20, 60), (0, 68), (-1, 67), (0, 40, 20, 67), (0,)])
@pytest.mark.parametrize("backward", [False, True])
def test_bounds_of_packed_sequences(bounds: tuple[int, ...], backward: bool) -> None:
    call = make_call(Case(batch=1, packed=(0, 67)))
    o, lse = call.forward()
    call.rest = (*call.rest[:2], torch.tensor(bounds), *call.rest[3:])
    with pytest.raises(RuntimeError, match="cu_seqlens: expected numbers that do not fall, from 0 to 67, got"):
        call.backward(o, lse) if backward else call.forward()


@on_devices
@pytest.mark.parametrize("case", [Case(batch=1, mask="keep"), Case(batch=1, padding="add")], ids=lambda c: c.id)
def test_packed_sequences_beside_a_mask(case: Case, device: str) -> None:
    call = make_call(case, device)
    call.rest = (*call.rest[:2], torch.tensor([0, 20, 67], device=device), *call.rest[3:])
    with pytest.raises(RuntimeError, match="mask, padding: expected none beside cu_seqlens"):
        call.forward()


@on_devices
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": -1}, "window: expected 0"),
        ({"p": 1.5}, r"p: expected a probability in \[0, 1\], got 1.5"),
        ({"mask_kind": "keep"}, "mask: expected a tensor for kind keep"),
        ({"padding": torch.ones(2, 66, dtype=torch.bool), "padding_kind": "keep"}, "padding: expected a shape"),
        ({"padding": torch.ones(2, 67), "padding_kind": "drop"}, "padding: expected Bool"),
        ({"cu_seqlens": torch.tensor([0, 67])}, "cu_seqlens: expected q, k and v of one packed batch"),
        ({"p": 0.5}, "rng_state: expected"),
    ],
)
def test_errors(change: dict[str, object], message: str, device: str) -> None:
    call = make_call(Case(), device)
    names = ("mask", "padding", "cu_seqlens", "rng_state", "mask_kind", "padding_kind")
    names += ("scale", "causal", "window", "softcap", "p")
    arguments = dict(zip(names, call.rest, strict=True)) | change
    arguments = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in arguments.items()}
    with pytest.raises(RuntimeError, match=message):
        torch.ops.ckptfused.attention_fwd(call.q, call.k, call.v, **arguments)
