"""The attention kernels against the materialised reference in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ckptfused.triton import attention_bwd, attention_fwd
from ckptfused.triton.problem import Problem
from tests.ops.attention_calls import Call, Case, make_call
from tests.triton.kernel_calls import BASE, CASES, P, check, failures, problem, run


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_matches_reference(case: Case) -> None:
    check(case)


def test_keys_and_queries_of_unequal_length() -> None:
    for tokens, keys in ((67, 20), (20, 67), (67, 0)):
        for causal in (False, True):
            case = replace(BASE, tokens=tokens, causal=causal, p=P)
            call = make_call(case)
            other = make_call(replace(case, tokens=keys))
            call.k, call.v = other.k, other.v
            o, lse, dq, dk, _ = run(call)
            square = make_call(replace(case, tokens=max(tokens, keys)))
            if keys == 0:
                assert not o.any() and not dq.any() and torch.isneginf(lse).all() and dk.shape == call.k.shape
                continue
            # The same by a square call in which what is missing is hidden or not looked at. (Its draws are others.)
            if causal and tokens <= keys:
                call = replace_p(call, 0.0)
                o, lse, *_ = run(call)
                square = replace_p(square, 0.0)
                square.q[:, :, :tokens], square.k, square.v = call.q, call.k, call.v
                assert torch.allclose(run(square)[0][:, :, :tokens], o, atol=1e-6)


def replace_p(call: Call, p: float) -> Call:
    return Call(replace(call.case, p=p), call.q, call.k, call.v, call.dout, (*call.rest[:-1], p))


@pytest.mark.parametrize(
    "case",
    [
        replace(BASE, p=P, causal=True, dtype=torch.bfloat16),
        replace(BASE, mask="add", softcap=2.0),
        replace(BASE, batch=1, packed=(0, 20, 67), p=P),
    ],
    ids=lambda c: c.id,
)
def test_runs_repeat_and_inputs_stay(case: Case) -> None:
    call = make_call(case)
    before = [t.clone() for t in (call.q, call.k, call.v, call.dout)]
    first, second = run(call), run(call)
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, (call.q, call.k, call.v, call.dout), before))


def test_dropping_everything() -> None:
    o, lse, *grads = run(make_call(replace(BASE, p=1.0)))
    assert torch.isfinite(lse).all()
    assert all(not t.any() for t in (o, *grads))


@pytest.mark.parametrize("mask", ["add-inf", "add-float32", "add-float16"])
@pytest.mark.parametrize("p", [0.0, P])
def test_masked_rows_are_zero(p: float, mask: str) -> None:
    o, lse, dq, dk, dv = run(make_call(replace(BASE, mask=mask, p=p, tokens=130)))
    assert torch.isneginf(lse[:, :, 65]).all()
    assert not o[:, :, 65].any()
    assert not dq[:, :, 65].any()
    assert all(t.isfinite().all() for t in (o, dq, dk, dv))


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_nan_reaches_its_rows_only(softcap: float) -> None:
    call = make_call(replace(BASE, p=P, softcap=softcap))
    call.q[0, 1, 3, 0] = torch.nan
    o, lse, *_ = run(call)
    assert o[0, 1, 3].isnan().all()
    assert lse[0, 1, 3].isnan()
    assert o.isnan().sum() == o.shape[-1]


def test_operands_of_any_strides() -> None:
    call = make_call(replace(BASE, p=P))
    strided = Call(call.case, *(t.mT.contiguous().mT for t in (call.q, call.k, call.v, call.dout)), call.rest)
    tensors = (call.q, call.k, call.v, call.dout)
    reordered = (t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for t in tensors)
    sequence_first = Call(call.case, *reordered, call.rest)
    expected = run(call)
    assert all(map(torch.equal, run(strided), expected))
    assert all(map(torch.equal, run(sequence_first), expected))
    wide = torch.stack([torch.full_like(call.q, torch.nan)] * 3, 3)  # [B, H, T, 3, D]
    joint = wide.transpose(1, 2).contiguous().transpose(1, 2)  # memory [B, T, H, 3, D], as a joint product has it
    interleaved = []
    for place, t in enumerate((call.q, call.k, call.v)):
        interleaved.append(joint[:, : t.shape[1], :, place].copy_(t))
    assert all(map(torch.equal, run(Call(call.case, *interleaved, call.dout, call.rest)), expected))
    expanded = Call(call.case, call.q, call.k[:, :, :1].expand_as(call.k), call.v, call.dout, call.rest)
    copied = Call(call.case, call.q, expanded.k.contiguous(), call.v, call.dout, call.rest)
    assert all(map(torch.equal, run(expanded), run(copied)))


def test_numbers_of_calls_in_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the same bits; they are taken where there may be more than 2^32."""
    call = make_call(replace(BASE, p=P, dtype=torch.bfloat16))
    narrow = run(call)
    assert not problem(call, "cpu").wide
    with monkeypatch.context() as patched:
        patched.setattr(Problem, "wide", True)
        assert all(map(torch.equal, run(call), narrow))
    assert problem(make_call(replace(BASE, p=P)), "cpu").wide  # float32

    def large(keys: int, packed: bool = False) -> Problem:
        q = torch.empty(1, 1, 1 << 15, 8, dtype=torch.bfloat16, device="meta")
        k = q[:, :, :1].expand(1, 1, keys, 8)
        return replace(problem(call, "cpu"), q=q, k=k, v=k, cu_seqlens=torch.tensor([0, 8]) if packed else None)

    assert not large(1 << 20).wide and large((1 << 20) + 1).wide and large(8, packed=True).wide
    assert not replace(large(1 << 21), threshold=0).wide


def test_negative_scale_and_layout() -> None:
    call = make_call(replace(BASE, scale=-0.3, causal=True))
    got = run(call)
    assert not failures(call.case, got, call)
    for t in (got[0], *got[2:]):
        assert t.transpose(1, 2).is_contiguous()


def test_a_wrong_mask_bit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the tests: one that drops by another threshold, backward alone, must fail."""
    call = make_call(replace(BASE, p=P))
    keep_tile = attention_bwd.keep_tile
    assert not failures(call.case, run(call), call)

    def one_bit_off(first_calls, start, k0, k1, c2, c3, threshold, BLOCK_N, ORDER, WIDE):  # type: ignore[no-untyped-def]
        keep = keep_tile(first_calls, start, k0, k1, c2, c3, threshold, BLOCK_N, ORDER, WIDE)
        keep.handle.data[0, 0] ^= True
        return keep

    for kernels, wrong in ((attention_bwd, ("dq", "dk", "dv")), (attention_fwd, ("o",))):
        with monkeypatch.context() as patched:
            patched.setattr(kernels, "keep_tile", one_bit_off)
            found = failures(call.case, run(call), call)
        assert all(any(line.startswith(name) for line in found) for name in wrong)
