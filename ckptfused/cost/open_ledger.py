"""A ledger that stays open while Python runs anything on meta tensors: ckptfused's ops and PyTorch's, a whole step.

While it is open, an op of ckptfused that is called on meta tensors runs its C++ code on them, so that what it holds
within itself is in the ledger in its place.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from ckptfused._extension import _C
from ckptfused.compat.torch_dispatch import below_autograd, cpu_keys
from ckptfused.cost.ledger import Ledger, attention_on_gpu, counted_device
from ckptfused.spec import parse


class _Open(threading.local):
    ledger: OpenLedger | None = None


_open = _Open()


def counting() -> OpenLedger | None:
    """The ledger that this thread has open."""
    return _open.ledger


def device_counted(x: Tensor) -> str:
    """The kind of device that a call on x is for: of meta tensors, where a ledger is open, the one that it is for."""
    return _open.ledger.device if x.is_meta and _open.ledger is not None else x.device.type


class HostMemory:
    """Bytes that a counted step holds on the host."""

    def __init__(self) -> None:
        self.held = 0
        self.most = 0

    def take(self, count: int) -> None:
        """Negative: gives back."""
        self.held += count
        self.most = max(self.most, self.held)


def host_memory() -> HostMemory | None:
    """What this thread's open ledger counts on the host."""
    return None if _open.ledger is None else _open.ledger.host


class OpenLedger:
    """Writes down what is allocated and released on the meta device by this thread, as on `device`.

    device: "cpu" or "cuda", as in `cost.forward_ledger`. threads: of a CPU; None, as many as PyTorch has now.
    **Raises** `RuntimeError` on entering where this thread has one open.
    """

    def __init__(self, device: str = "cpu", threads: int | None = None) -> None:
        self.device = device
        self._recorder = _C.OpenLedger(*counted_device(device, threads))
        self.host = HostMemory()

    def __enter__(self) -> OpenLedger:
        if _open.ledger is not None:
            raise RuntimeError("a ledger is open already: one step is counted at a time")
        self._recorder.__enter__()
        _open.ledger = self
        return self

    def __exit__(self, *exception: object) -> None:
        _open.ledger = None
        self._recorder.__exit__(*exception)

    def __len__(self) -> int:
        """How many events there have been."""
        return len(self._recorder)

    def op_ran(self, by_autograd: bool) -> None:
        """What is there now is no temporary of the operator that runs: its results, which it may yet throw away, as
        where a replay stops while they are saved, and casts of its operands. by_autograd: whether it may be autograd
        that adds a gradient to another, in place where it can."""
        self._recorder.op_ran(by_autograd)

    def number_of(self, t: Tensor) -> int | None:
        """By which the events name a tensor's storage; None: it began before, or holds nothing."""
        return self._recorder.number_of(t)

    @property
    def ledger(self) -> Ledger:
        """The events so far."""
        return self.since(0)

    def since(self, first: int) -> Ledger:
        """The events from this place on."""
        return Ledger(tuple(self._recorder.events(first)), ())

    def block(self, op: Any, x: Tensor, spec: str, *args: Any) -> Any:
        """Runs a block's op on meta tensors. `args`: all that it takes."""
        parsed = parse(spec)
        if self.device == "cuda" and parsed.attn is not None:
            batch, length = (x.size(1), x.size(0)) if parsed.seq_first else (x.size(0), x.size(1))
            self._recorder.set_attention(attention_on_gpu(parsed, x.dtype, batch, length, None))
        return self.run(op, *args)

    def run(self, op: Any, *args: Any) -> Any:
        """Runs the C++ code of an op, which is that of all devices, on meta tensors."""
        with below_autograd():
            return op.redispatch(cpu_keys(), *args)
