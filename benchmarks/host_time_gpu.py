"""Times a training step of one tiny block along a GPU's path: how much of it is host time, and the calls into Python.

x is [1, 8, 32] on the CPU, on one thread; float32 takes oneDNN's half-precision products out of the figure. The FFN's
choice is asked of Python as on a GPU. Attention without dropout is PyTorch's, called from C++; with dropout Triton's
kernels are launched, once through the launchers in Python and then from their records, or always through Python. The
launches do nothing here: what Triton's own launch, or the driver's, takes is not in the figure. Prints the least and
the median processor time, and the calls into Python of a step that is not the first.

    python benchmarks/host_time_gpu.py
"""

from __future__ import annotations

import argparse
import ctypes
import inspect
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch._dynamo  # before what may stand for Triton

try:
    import triton  # noqa: F401
except ImportError:  # nothing of it runs here
    stand_in = mock.MagicMock()
    stand_in.jit = lambda function=None, **_: function or (lambda decorated: decorated)
    sys.modules.update({"triton": stand_in, "triton.language": stand_in.language})

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


def measure(name: str, options: dict[str, Any], dtype: torch.dtype, rounds: int) -> str:
    block = FusedCheckpointBlock.llama(32, 4, dim_feedforward=64, **options).to(dtype)
    x, dy = torch.randn(2, 1, 8, 32).to(dtype)
    x.requires_grad_()
    times = []
    for turn in range(rounds + rounds // 10):
        x.grad = None
        calls.clear()
        before = time.process_time_ns()
        block(x).backward(dy)
        if turn >= rounds // 10:
            times.append((time.process_time_ns() - before) / 1e3)
    said = f"least {min(times):5.0f} µs, median {statistics.median(times):5.0f} µs"
    return f"{name:28} {said}, {len(calls)} calls into Python: {' '.join(calls) or '-'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    arguments = parser.parse_args()
    call = getattr(torch, arguments.dtype), arguments.rounds
    warnings.simplefilter("ignore")  # a library that replaces a kernel says so
    torch.set_num_threads(1)
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
    ):
        for name in PLAIN:
            print(measure(name, PLAIN[name], *call), flush=True)
        library.impl("attention_triton_fwd", noted(attention.attention_fwd), "CPU")
        library.impl("attention_triton_bwd", noted(attention.attention_bwd), "CPU")
        as_on_gpu = _C.testing.AttentionAsOnGpu()
        for name in DROPPED:
            for used in (True, False):
                _C.testing.use_launch_records(used)
                print(measure(f"{name}{'' if used else ', no records'}", DROPPED[name], *call), flush=True)
        del as_on_gpu


if __name__ == "__main__":
    main()
