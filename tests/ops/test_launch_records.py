"""Launches repeated from C++ (csrc/ops/launch_records.h): which calls are, and with what. No Triton, and no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from ckptfused._extension import _C
from tests import forks
from tests.ops.launch_driver import FakeDriver, Launched

FUNCTION, GRID, THREADS, SHARED, NUMBER = 0x1234, 3, 128, 4096, 77
INPUTS = 7  # of attention_fwd: q, k, v, mask, padding, cu_seqlens, rng_state
NAMES = (
    "q", "k", "v", "mask", "padding", "cu_seqlens", "rng_state", "mask_kind", "padding_kind", "scale", "causal",
    "window", "softcap", "p",
)  # fmt: skip
Call = dict[str, Any]


class Launcher:
    """Stands for ckptfused/triton: makes o and lse, starts one kernel and hands its launch over."""

    def __init__(self) -> None:
        self.driver = FakeDriver({FUNCTION: (8, 8, 8, 4)})
        self.hooks: list[object] = []
        self.asked = 0

    def forward(self, q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        self.asked += 1
        if q.shape[1] == 13:
            raise ValueError("an unlucky number of heads")
        o, lse = torch.zeros_like(q, memory_format=torch.contiguous_format), q.new_full(q.shape[:3], -torch.inf)
        o = o.view(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)
        scratch = q.new_empty(5)
        if _C.launches_wanted():
            made: list[tuple[Tensor, float | None]] = [(o, 0.0), (lse, -torch.inf), (scratch, None)]
            tensors = [(0, 0), (1, INPUTS), (2, INPUTS + 2)]
            launch = (FUNCTION, GRID, THREADS, SHARED, [0, 0, 0, NUMBER], tensors)
            _C.keep_launches(self.driver.address, [self.hooks], made, 2, [launch])
        return o, lse

    def is_asked(self, call: Call) -> bool:
        """Whether a call comes to Python, rather than to the driver."""
        asked, launched = self.asked, len(self.driver.launched)
        attend(call)
        assert (self.asked - asked) + (len(self.driver.launched) - launched) == 1
        return self.asked > asked


def attend(call: Call) -> tuple[Tensor, Tensor]:
    o, lse = torch.ops.ckptfused.attention_fwd(*(call[name] for name in NAMES))
    return o, lse


@contextmanager
def launching() -> Iterator[Launcher]:
    """Attention of CPU tensors as on a GPU, its kernels started by a Launcher."""
    found = Launcher()
    as_on_gpu = _C.testing.AttentionAsOnGpu()
    library = torch.library.Library("ckptfused", "IMPL")
    library.impl("attention_triton_fwd", found.forward, "CPU")
    yield found
    library._destroy()
    del as_on_gpu


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    _C.testing.use_launch_records(True)
    with launching() as found:
        yield found
    _C.testing.use_launch_records(False)


def rows(heads: int = 2, tokens: int = 6, dtype: torch.dtype = torch.float32, offset: int = 0) -> Tensor:
    """[1, heads, tokens, 16] within [1, tokens, heads, 16], aligned to 16 bytes unless it begins at an offset."""
    memory = torch.zeros(heads * tokens * 16 + 16, dtype=dtype)
    return memory.as_strided((1, heads, tokens, 16), (1, 16, heads * 16, 1), offset)


def base() -> Call:
    call: Call = dict.fromkeys(NAMES)
    call |= {name: rows() for name in "qkv"} | {"rng_state": torch.tensor([1, 2])}
    call |= {"mask_kind": "none", "padding_kind": "none", "scale": 0.25, "causal": True, "window": 0}
    return call | {"softcap": 0.0, "p": 0.1}


def test_the_second_call_of_a_kind_is_launched_from_cpp(launcher: Launcher) -> None:
    assert launcher.is_asked(base())
    hits = _C.testing.launch_record_hits()
    call = base()
    o, lse = attend(call)
    assert launcher.asked == 1 and _C.testing.launch_record_hits() == hits + 1
    assert o.shape == (1, 2, 6, 16) and o.stride() == (192, 16, 32, 1) and o.eq(0).all()
    assert lse.shape == (1, 2, 6) and lse.is_contiguous() and lse.eq(-torch.inf).all()
    (launched,) = launcher.driver.launched
    pointers = [int.from_bytes(each, "little") for each in launched.parameters[:3]]
    assert pointers[:2] == [call["q"].data_ptr(), o.data_ptr()]
    assert pointers[2] not in (0, *pointers[:2], lse.data_ptr())
    number = NUMBER.to_bytes(4, "little")
    parameters = (*launched.parameters[:3], number)
    assert launched == Launched(FUNCTION, (GRID, 1, 1), (THREADS, 1, 1), SHARED, None, parameters)


def test_results_are_new_each_time(launcher: Launcher) -> None:
    attend(base())
    first, second = attend(base())[0], attend(base())[0]
    first.fill_(5.0)
    assert not second.any()


def with_mask(call: Call, dtype: torch.dtype = torch.bool, kind: str = "keep") -> None:
    call |= {"mask": torch.ones(6, 6).to(dtype), "mask_kind": kind}


# What a call of a kind of its own is changed in.
CHANGES: dict[str, Callable[[Call], object]] = {
    "heads": lambda c: c.update({name: rows(heads=4) for name in "qkv"}),
    "tokens": lambda c: c.update({name: rows(tokens=7) for name in "qkv"}),
    "dtype": lambda c: c.update({name: rows(dtype=torch.bfloat16) for name in "qkv"}),
    "strides": lambda c: c.update(k=c["k"].contiguous()),
    "a stride that is not read": lambda c: c.update(v=c["v"].as_strided(c["v"].shape, (999, *c["v"].stride()[1:]))),
    "alignment of q": lambda c: c.update(q=rows(offset=1)),
    "alignment of v": lambda c: c.update(v=rows(offset=2)),
    "mask": with_mask,
    "kind of mask": lambda c: with_mask(c, kind="drop"),
    "type of mask": lambda c: with_mask(c, torch.float32, "add"),
    "padding": lambda c: c.update(padding=torch.ones(1, 6, dtype=torch.bool), padding_kind="keep"),
    "packed": lambda c: c.update(cu_seqlens=torch.tensor([0, 6])),
    "packed in 32 bits": lambda c: c.update(cu_seqlens=torch.tensor([0, 6], dtype=torch.int32)),
    "two sequences": lambda c: c.update(cu_seqlens=torch.tensor([0, 2, 6])),
    "no random state": lambda c: c.update(rng_state=None),
    "scale": lambda c: c.update(scale=0.5),
    "causal": lambda c: c.update(causal=False),
    "window": lambda c: c.update(window=3),
    "softcap": lambda c: c.update(softcap=2.0),
    "p": lambda c: c.update(p=0.1 + 2**-50),
}


def test_every_kind_has_a_record_of_its_own(launcher: Launcher) -> None:
    calls = {"nothing": base()}
    for name, change in CHANGES.items():
        calls[name] = base()
        change(calls[name])
    assert {name for name, call in calls.items() if not launcher.is_asked(call)} == set()
    assert {name for name, call in calls.items() if launcher.is_asked(call)} == set()


def test_kinds_of_mask_and_of_padding_do_not_run_together(launcher: Launcher) -> None:
    """Where two texts meet, neither takes a letter of the other's."""
    assert launcher.is_asked(base() | {"mask_kind": "no", "padding_kind": "nenone"})
    assert launcher.is_asked(base())


def test_a_tensor_that_is_passed_twice_is_two_arguments(launcher: Launcher) -> None:
    q = rows()
    attend(base() | {"q": q, "k": q, "v": q})
    call = base()
    attend(call)
    assert int.from_bytes(launcher.driver.launched[0].parameters[0], "little") == call["q"].data_ptr()


def test_hooks_of_triton_are_for_python_to_call(launcher: Launcher) -> None:
    attend(base())
    launcher.hooks.append("a profiler")
    assert launcher.is_asked(base())
    launcher.hooks.clear()
    assert not launcher.is_asked(base())


def test_records_can_be_turned_off(launcher: Launcher) -> None:
    attend(base())
    _C.testing.use_launch_records(False)
    assert launcher.is_asked(base()) and launcher.is_asked(base())
    _C.testing.use_launch_records(True)  # and those of before are gone
    assert launcher.is_asked(base()) and not launcher.is_asked(base())


@pytest.mark.parametrize(("variable", "asked"), [({}, True), ({"CKPTFUSED_LAUNCH_RECORDS": "1"}, False)])
def test_the_environment_turns_them_on(variable: dict[str, str], asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "from tests.ops import test_launch_records as t\n"
        "with t.launching() as launcher: print([launcher.is_asked(t.base()) for _ in range(2)])"
    )
    monkeypatch.delenv("CKPTFUSED_LAUNCH_RECORDS", raising=False)
    run = forks.python(code, **variable)
    assert run.stdout.strip() == f"[True, {asked}]", run.stderr


def test_what_raises_leaves_no_record(launcher: Launcher) -> None:
    call = base() | {name: rows(heads=13) for name in "qkv"}
    for _ in range(2):
        with pytest.raises(ValueError, match="unlucky"):
            attend(call)
    assert launcher.asked == 2 and not _C.launches_wanted()


def test_an_error_of_the_driver_is_raised(launcher: Launcher) -> None:
    attend(base())
    launcher.driver.error = 700
    with pytest.raises(RuntimeError, match="cuLaunchKernel returned error 700"):
        attend(base())


def test_nothing_is_kept_outside_of_a_call() -> None:
    assert not _C.launches_wanted()
    with pytest.raises(RuntimeError, match="expected a call that wants its record"):
        _C.keep_launches(0, [], [], 0, [])


def test_the_table_is_bounded(launcher: Launcher) -> None:
    """When it is full it begins anew: lengths that never come back make room for those that do."""
    attend(base())
    for step in range(600):
        attend(base() | {"scale": 1.0 + step})
    assert launcher.asked == 601
    assert launcher.is_asked(base())
    assert not launcher.is_asked(base() | {"scale": 600.0})


def test_threads_launch_at_once(launcher: Launcher) -> None:
    def work(number: int) -> bool:
        call = base() | {"scale": float(number % 3)}
        o, lse = attend(call)
        return bool(o.eq(0).all() and lse.eq(-torch.inf).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(200)))
    assert 3 <= launcher.asked <= 12 and launcher.asked + len(launcher.driver.launched) == 200
