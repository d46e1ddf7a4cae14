"""What C++ launches is what Triton's own launcher launches: function, grid, threads, shared memory, and each
parameter's bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from ckptfused import FusedCheckpointBlock
from ckptfused._extension import _C
from ckptfused.triton import records
from tests.ops.attention_calls import Call, Case, make_call
from tests.ops.launch_driver import Launched
from tests.triton.launched.conftest import Gpu

BASE = Case(tokens=37, head_dim=16, dtype=torch.bfloat16, p=0.2, causal=True)
CASES = [
    BASE,
    replace(BASE, mask="keep", padding="drop", window=9, softcap=2.0),
    replace(BASE, batch=1, packed=(0, 5, 37)),
    replace(BASE, mask="add", dtype=torch.float32, scale=1.0, p=0.0),
    replace(BASE, mask="float64", softcap=1.0, dtype=torch.float64),
]


def tensors(call: Call) -> dict[int, str]:
    """Names of a call's tensors by address."""
    given = zip(("mask", "padding", "cu_seqlens", "rng_state"), call.rest, strict=False)
    named = [("q", call.q), ("k", call.k), ("v", call.v), ("do", call.dout), *given]
    return {t.data_ptr(): name for name, t in named if isinstance(t, Tensor)}


def named(launched: list[Launched], call: Call, results: tuple[Tensor, ...]) -> list[Launched]:
    """Launches with names in place of addresses: of what is neither argument nor result, in the order of use."""
    names = tensors(call) | {t.data_ptr(): f"result {i}" for i, t in enumerate(results)}
    found = []
    for one in launched:
        parameters: list[bytes] = []
        for value in one.parameters:
            number = int.from_bytes(value, "little")
            if len(value) == 8 and number >= 1 << 40:  # where a process has its memory
                value = names.setdefault(number, f"scratch {len(names)}").encode()
            parameters.append(value)
        found.append(one._replace(parameters=tuple(parameters)))
    return found


def launches(gpu: Gpu, call: Call, run: Callable[[Call], tuple[Tensor, ...]] = Call.run) -> list[Launched]:
    gpu.launched.clear()
    results = run(call)
    return named(gpu.launched, call, results)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_cpp_launches_what_triton_launches(gpu: Gpu, case: Case) -> None:
    torch.manual_seed(0)
    call = make_call(case)
    hits = _C.testing.launch_record_hits()
    by_triton = launches(gpu, call)
    assert _C.testing.launch_record_hits() == hits and len(by_triton) == 4
    other = make_call(case)
    assert launches(gpu, other) == by_triton
    assert _C.testing.launch_record_hits() == hits + 2
    _C.testing.use_launch_records(False)
    assert launches(gpu, other) == by_triton
    assert _C.testing.launch_record_hits() == hits + 2


def test_results_are_made_alike(gpu: Gpu) -> None:
    """Fills too: tokens that belong to no sequence are the launcher's to fill."""
    call = make_call(replace(BASE, batch=1, packed=(3, 5, 30)))
    first, second = call.run(), call.run()
    for a, b in zip(first, second, strict=True):
        assert a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    o, lse, *grads = second
    assert lse.eq(-torch.inf).all() and all(t.eq(0).all() for t in (o, *grads))


def test_a_stride_of_64_bits(gpu: Gpu) -> None:
    """An argument that does not fit 32 bits has eight bytes, in a kernel of its own."""
    call = make_call(replace(BASE, batch=1))
    call.q = call.q.as_strided(call.q.shape, (1 << 33, *call.q.stride()[1:]))
    by_triton = launches(gpu, call, Call.forward)
    assert (1 << 33).to_bytes(8, "little") in by_triton[0].parameters
    assert launches(gpu, call, Call.forward) == by_triton


def test_a_stride_of_one_is_no_parameter(gpu: Gpu) -> None:
    """Triton makes a constant of it: one parameter fewer, of another kernel."""
    plain, one = make_call(replace(BASE, batch=1, mask="shared")), make_call(replace(BASE, batch=1, mask="shared"))
    one.q = one.q.as_strided(one.q.shape, (1, *one.q.stride()[1:]))
    counts = [len(launches(gpu, call, Call.forward)[0].parameters) for call in (plain, one)]
    assert counts[0] - counts[1] == 1
    assert [len(launches(gpu, call, Call.forward)[0].parameters) for call in (plain, one)] == counts


def test_a_block_with_dropout_needs_python_once(gpu: Gpu) -> None:
    """For attention's forward and for its gradients; the replay is the forward's call again."""
    block = FusedCheckpointBlock.llama(32, 2, dim_feedforward=64, dropout=0.1).bfloat16()
    x = torch.zeros(1, 37, 32, dtype=torch.bfloat16, requires_grad=True)
    for repeated in (1, 3, 3):
        hits = _C.testing.launch_record_hits()
        gpu.launched.clear()
        block(x).sum().backward()
        assert _C.testing.launch_record_hits() - hits == repeated
        assert len(gpu.launched) == 5


def copied(call: Call) -> None:
    call.q = call.q.transpose(2, 3).contiguous().transpose(2, 3)


def wide(call: Call) -> None:
    call.rest = (torch.ones(37, 37, dtype=torch.bool), *call.rest[1:4], "keep", *call.rest[5:])


@pytest.mark.parametrize(("change", "dtype"), [(copied, torch.bfloat16), (wide, torch.float64)])
def test_what_python_copies_stays_there(gpu: Gpu, change: Callable[[Call], None], dtype: torch.dtype) -> None:
    call = make_call(replace(BASE, dtype=dtype, batch=1))
    change(call)
    hits = _C.testing.launch_record_hits()
    call.forward()
    call.forward()
    assert _C.testing.launch_record_hits() == hits


def is_recorded(call: Call) -> bool:
    hits = _C.testing.launch_record_hits()
    call.forward()
    call.forward()
    return _C.testing.launch_record_hits() > hits


def test_hooks(gpu: Gpu) -> None:
    call = make_call(BASE)
    seen: list[object] = []
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(seen.append)
    try:
        assert not is_recorded(call) and len(seen) == 2
        hook.remove(seen.append)
        assert is_recorded(call)
        hook.add(seen.append)
        call.forward()
        assert len(seen) == 3
    finally:
        hook.remove(seen.append)
    call.forward()
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("change", "recorded"),
    [
        (lambda table: table, True),
        (lambda table: [*table[:3], *table[4:]], False),
        (lambda table: [*table, (table[-1][0] + 8, 8)], False),
        (lambda table: [(offset, 4 if i == 2 else size) for i, (offset, size) in enumerate(table)], False),
        (lambda table: [(offset + 8 * (i > 2), size) for i, (offset, size) in enumerate(table)], False),
    ],
    ids=["as they are", "one fewer", "one more", "narrower", "elsewhere"],
)
def test_the_driver_says_which_parameters_a_kernel_has(gpu: Gpu, change: Callable[[Any], Any], recorded: bool) -> None:
    """Nothing is recorded of a Triton that passes something else."""
    gpu.change = change
    assert is_recorded(make_call(BASE)) == recorded


def test_the_driver_is_asked_once_a_kernel(gpu: Gpu) -> None:
    """Lengths that never come back are described anew each, which is to be quick."""
    make_call(BASE).forward()
    asked = gpu.asked
    assert asked > 0
    assert is_recorded(make_call(replace(BASE, tokens=38)))
    assert gpu.asked == asked


METADATA: dict[str, Any] = {"num_warps": 4, "shared": 0, **records._PLAIN}


@pytest.mark.parametrize(
    "fault",
    [*({name: 2 if name == "num_ctas" else 1} for name in records._PLAIN), None],
    ids=lambda fault: next(iter(fault)) if fault else "unknown",
)
def test_other_launches_are_left_to_triton(fault: dict[str, int] | None) -> None:
    """None: metadata of a Triton that no longer says."""
    signature = {"q": "*bf16", "n": "i32", "C": "constexpr"}
    table = records.layout(signature)

    def parameter(function: Any, index: Any, offset: Any, size: Any) -> int:
        if index.value >= len(table):
            return 1
        offset._obj.value, size._obj.value = table[index.value]
        return 0

    q = torch.zeros(4)
    launches = records.Launches({"q": q})
    cuda = records.Driver(1, parameter)

    def made(metadata: dict[str, Any]) -> Any:
        compiled = SimpleNamespace(
            metadata=SimpleNamespace(**metadata), src=SimpleNamespace(signature=signature), function=3
        )
        return launches._launch(cuda, compiled, 5, (q, 7))

    assert made(METADATA) == (3, 5, 128, 0, [0, 7, 0, 0], [(0, 0)])
    if fault is None:
        with pytest.raises(AttributeError):
            made({"num_warps": 4, "shared": 0})
    else:
        assert made(METADATA | fault) is None


def test_numbers_have_the_bytes_that_triton_gives_them() -> None:
    for kind, value, expected in (
        ("i32", -1, b"\xff\xff\xff\xff"),
        ("i64", -2, (2**64 - 2).to_bytes(8, "little")),
        ("fp32", 0.1, b"\xcd\xcc\xcc\x3d"),
        ("fp32", 1e39, b"\x00\x00\x80\x7f"),
        ("fp64", 0.5, b"\0\0\0\0\0\0\xe0\x3f"),
    ):
        size, number = records._NUMBERS[kind]
        assert (size, number(value)) == (len(expected), int.from_bytes(expected, "little"))
