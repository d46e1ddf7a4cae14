"""Cases of tests/ops/attention_calls.py through the Triton launchers, on any device."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ckptfused.triton.launch import launch_backward, launch_forward
from ckptfused.triton.problem import Problem, make_problem, operand
from tests.ops.attention_calls import Call, Case, make_call, reference

NAMES = ("o", "lse", "dq", "dk", "dv")
# As in tests/ops/test_attention.py: both runs round at the same places in another order, and below the floor (a few
# roundings of the type) a ratio of errors says nothing. exp2 and log2 of the hardware are good to two units.
TIMES_EAGER = 2.0
FLOOR = {torch.float64: 1e-14, torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
P = 0.2


def problem(call: Call, device: str) -> Problem:
    def there(t: object) -> object:
        return t.to(device) if isinstance(t, Tensor) else t

    q, k, v = (there(t) for t in (call.q, call.k, call.v))
    return make_problem("attention_fwd", q, k, v, *(there(t) for t in call.rest))  # type: ignore[arg-type]


def run(call: Call, device: str = "cpu") -> tuple[Tensor, ...]:
    """(o, lse, dq, dk, dv), back on the CPU."""
    a = problem(call, device)
    o, lse = launch_forward(a)
    grads = launch_backward(a, operand(call.dout.to(device)), o, lse)
    return tuple(t.cpu() for t in (o, lse, *grads))


def error(x: Tensor, truth: Tensor) -> float:
    finite = torch.isfinite(truth)
    assert torch.equal(x[~finite].double(), truth[~finite])  # -inf where the row sees nothing
    if not finite.any():
        return 0.0
    return float((x.double() - truth)[finite].abs().max() / truth[finite].abs().max().clamp_min(1.0))


def failures(c: Case, got: tuple[Tensor, ...], call: Call) -> list[str]:
    """What is further from the float64 oracle than the eager run in the same type allows."""
    truth = reference(call, torch.float64)
    eager = truth if c.dtype == torch.float64 else reference(call, c.dtype)
    # The rounding of a sum grows with the root of its length. The interpreter's products are NumPy's, which add in
    # another order on each kind of processor; the floor is for sums of 128.
    floor = FLOOR[c.dtype] * max(1.0, c.head_dim / 128) ** 0.5
    found = []
    for name, x, y, e in zip(NAMES, got, truth, eager, strict=True):
        limit = max(floor, TIMES_EAGER * error(e, y))
        if not error(x, y) <= limit:
            found.append(f"{name}: error {error(x, y):.2e}, allowed {limit:.2e}")
    return found


def check(c: Case, device: str = "cpu") -> None:
    call = make_call(c)
    got = run(call, device)
    found = failures(c, got, call)
    assert not found, found
    for t, like in zip((got[0], *got[2:]), (call.q, call.q, call.k, call.v), strict=True):
        assert t.shape == like.shape and t.dtype == like.dtype


BASE = Case(batch=2, heads=4, kv_heads=2, tokens=67, head_dim=20, dtype=torch.float32)
OPTIONS: tuple[dict[str, object], ...] = (
    {"p": P},
    {"causal": True, "p": P},
    {"window": 9},
    {"window": 40, "causal": True, "softcap": 2.0, "p": P},
    {"softcap": 2.0},
)
MASK_CASES = [
    replace(BASE, mask=mask, **options)  # type: ignore[arg-type]
    for mask, options in (
        ("none", {}),
        *(("none", o) for o in OPTIONS),
        *(("keep", o) for o in OPTIONS),
        ("drop", OPTIONS[1]),
        ("add", OPTIONS[0]),
        *(("add-inf", o) for o in OPTIONS),
        ("shared", OPTIONS[3]),
        ("head", OPTIONS[4]),
        ("float64", OPTIONS[1]),
    )
]
PADDING_CASES = [
    replace(BASE, padding=pad, mask=mask, p=p, causal=causal)
    for pad, mask, p, causal in (
        ("keep", "none", P, True),
        ("drop", "keep", P, False),
        ("drop", "none", 0.0, False),
        ("add", "add", 0.0, True),
    )
]
SHAPE_CASES = [
    replace(BASE, batch=1, tokens=tokens, head_dim=dim, heads=h, kv_heads=g, p=p, causal=causal)
    for tokens, dim, h, g in (
        *((1, 8, 2, 2), (17, 256, 3, 1), (63, 100, 4, 2), (111, 64, 2, 2)),
        *((130, 16, 2, 1), (130, 192, 1, 1), (1, 7, 3, 3)),
    )
    for p, causal in ((0.0, False), (P, True))
]
PACKED_CASES = [
    replace(BASE, batch=1, heads=2, kv_heads=1, tokens=150, head_dim=16, packed=packed, causal=causal, p=p, window=w)
    for packed in ((0, 150), (0, 1, 70, 70, 149, 150), (3, 20, 140))
    for causal, p, w in ((False, 0.0, 0), (True, P, 0), (False, P, 17))
]
DTYPE_CASES = [
    replace(c, dtype=dtype, heads=2, kv_heads=1)
    for dtype in (torch.float64, torch.bfloat16, torch.float16)
    for c in (
        BASE,
        replace(BASE, causal=True, tokens=130, head_dim=64),
        replace(BASE, p=P, causal=True, mask="keep"),
        replace(BASE, softcap=2.0, window=9, mask="add", padding="drop", p=P),
        replace(BASE, batch=1, packed=(0, 30, 67), p=P),
    )
]
CASES = [*MASK_CASES, *PADDING_CASES, *SHAPE_CASES, *PACKED_CASES, *DTYPE_CASES]
