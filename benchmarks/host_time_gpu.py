"""A training step of one tiny block along a GPU's path: how much of it is host time, and the calls into Python.

x is [1, 8, 32] on the CPU, on one thread; float32 takes oneDNN's half-precision products out of the figure. The FFN's
choice is asked of Python as on a GPU. Attention without dropout is PyTorch's, called from C++; with dropout Triton's
kernels are launched, once through the launchers in Python and then from their records, or always through Python. The
launches do nothing here: what Triton's own launch, or the driver's, takes is not in the figure. Calls into
Python are those of a step that is not the first.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # before what may stand for Triton

try:
    import triton  # noqa: F401
except ImportError:  # nothing of it runs here
    stand_in = mock.MagicMock()
    stand_in.jit = lambda function=None, **_: function or (lambda decorated: decorated)
    sys.modules.update({"triton": stand_in, "triton.language": stand_in.language})

from benchmarks.benchmark import PROCESSOR, Benchmark, Column, Rows, Sizes, number, option
from benchmarks.runner import summary, take_turns
from ckptfused import FusedCheckpointBlock
from ckptfused._extension import _C
from ckptfused.triton import attention, launch, records, tuning

H200 = tuning.DeviceKey("NVIDIA H200", (9, 0))
PLAIN: dict[str, dict[str, Any]] = {"no dropout": {}, "no dropout, attention kept": {"keep": "attention"}}
DROPPED: dict[str, dict[str, Any]] = {
    "dropout in attention": {"attention_dropout": 0.1},
    "dropout everywhere": {"dropout": 0.1},
}
calls: list[str] = []  # from C++ into Python


class Idle:
    """A Triton kernel that does nothing, and says of its launch what a compiled one does."""

    def __init__(self, kernel: Any) -> None:
        self.names = list(inspect.signature(getattr(kernel, "fn", kernel)).parameters)
        self.compiled: dict[object, Any] = {}

    def __getitem__(self, grid: object) -> Callable[..., Any]:
        return self.launch

    def launch(self, *args: Any, **options: Any) -> Any:
        if not _C.launches_wanted():
            return None
        signature = dict(zip(self.names, map(kind, args), strict=False)) | dict.fromkeys(options, "constexpr")
        if (found := self.compiled.get(key := tuple(signature.items()))) is None:
            metadata = SimpleNamespace(num_warps=4, shared=0, **records._PLAIN)
            found = SimpleNamespace(function=1, metadata=metadata, src=SimpleNamespace(signature=signature))
            self.compiled[key] = found
        return found


def kind(arg: object) -> str:
    """The kind of an argument in the words of Triton's signatures."""
    if isinstance(arg, torch.Tensor):
        return "*"
    return "constexpr" if arg is None or arg == 1 else {int: "i32", float: "fp32"}[type(arg)]


def idle_driver() -> records.Driver:
    """A C function that returns 0 for the functions above, whatever else it is given, in place of cuLaunchKernel."""
    return records.Driver(ctypes.cast(ctypes.CDLL(None).isdigit, ctypes.c_void_p).value or 0, lambda *_: 1)


def noted(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        calls.append(function.__name__)
        return function(*args)

    return call


def ffn_choice(like: torch.Tensor, dtype: torch.dtype, n: int, c: int, f: int, act: str) -> str:
    return tuning.ffn_choice(n, c, f, act, dtype, H200)[0]


@dataclass(frozen=True, kw_only=True)
class HostSizes(Sizes):
    """The block's type, and how many steps are timed."""

    dtype: str = option("bfloat16", "float32", every=False)
    rounds: int = 2000


def measure(options: dict[str, Any], sizes: HostSizes) -> dict[str, Any]:
    """Times of a block's steps, and its calls into Python."""
    dtype = getattr(torch, sizes.dtype)
    block = FusedCheckpointBlock.llama(32, 4, dim_feedforward=64, **options).to(dtype)
    x, dy = torch.randn(2, 1, 8, 32).to(dtype)
    x.requires_grad_()

    def step() -> None:
        x.grad = None
        calls.clear()
        block(x).backward(dy)

    (times,) = take_turns({"": step}, 0, PROCESSOR, sizes.rounds).values()
    return summary(times, times) | {"calls": len(calls), "called": " ".join(calls)}


def figures(sizes: HostSizes, steps: Any) -> Rows:
    """Each kind of block by itself: what stands for Triton's kernels differs."""
    rows: Rows = {}
    warnings.simplefilter("ignore")  # a library that replaces a kernel says so
    library = torch.library.Library("ckptfused", "IMPL")
    library.impl("ffn_choice", noted(ffn_choice), "CPU")
    names = ("attention_fwd_kernel", "attention_delta_kernel", "attention_dkdv_kernel", "attention_dq_kernel")
    kernels: dict[str, Any] = {name: Idle(getattr(launch, name)) for name in names}
    with (
        mock.patch.multiple(launch, **kernels),
        mock.patch.object(launch, "_config", lambda stage, a: launch._tile(stage, a, H200.capability)),
        mock.patch.object(launch, "_number", lambda name, value, a, launches: value),
        mock.patch.object(records, "driver", idle_driver),
        mock.patch.object(records, "_hooks", list),
        mock.patch.object(records, "_fits", return_value=True),
        mock.patch.object(attention, "has_triton", return_value=True),
        mock.patch.object(tuning, "_has_triton", return_value=True),
        mock.patch.object(tuning, "triton_version", str),
    ):
        for name in PLAIN:
            rows[name] = measure(PLAIN[name], sizes)
        library.impl("attention_triton_fwd", noted(attention.attention_fwd), "CPU")
        library.impl("attention_triton_bwd", noted(attention.attention_bwd), "CPU")
        as_on_gpu = _C.testing.AttentionAsOnGpu()
        for name in DROPPED:
            for used in (True, False):
                _C.testing.use_launch_records(used)
                rows[f"{name}{'' if used else ', no records'}"] = measure(DROPPED[name], sizes)
        del as_on_gpu
    return rows


BENCHMARK = Benchmark(
    name="host-time-gpu",
    doc=__doc__,
    sizes=HostSizes(),
    figures=figures,
    columns=(
        number("least", "least", ".0f"),
        number("calls into Python", "calls", ".0f"),
        Column("which", lambda row, rows: row["called"]),
    ),
    stem=lambda sizes: f"host-time-gpu-{sizes.dtype}",
    clock=PROCESSOR,
    threads=1,
)
