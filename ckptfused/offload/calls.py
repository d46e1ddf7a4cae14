"""Which of the tensors that a layer's call saves go to the host, and when.

A call begins: the input that the call before it saved is copied to the host while this one computes. The call ends:
the device memory of that input is free. So what was called last keeps its input on the device, whichever it is. In
backward, when an input is asked for, the one that was saved before it begins its way back.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ckptfused.compat.torch_autograd import (
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks,
    saved_tensor_hooks_allowed,
)
from ckptfused.compat.torch_memory import storage_id
from ckptfused.cost.open_ledger import device_counted
from ckptfused.offload.copies import Copies, copies_of
from ckptfused.offload.saved import OffloadedInput
from ckptfused.ops.enclosing_checkpoint import captured
from ckptfused.recompute.copy_on_write import is_plain_view
from ckptfused.recompute.held import Held

_NOTHING = nullcontext()


class _Order(threading.local):
    """What the calls of one thread saved."""

    def __init__(self) -> None:
        self.last: weakref.ref[OffloadedInput] | None = None
        self.waiting: list[weakref.ref[OffloadedInput]] = []
        """Saved by the call before, which may have been the last."""
        self.leaving: list[weakref.ref[OffloadedInput]] = []

    def begin(self) -> None:
        """A call begins, so the one before it was not the last."""
        leaving = [saved for reference in self.waiting if (saved := reference()) is not None]
        if leaving:
            self.end()
            self.leaving = self.waiting
        self.waiting = []
        for saved in leaving:
            saved.leave()

    def end(self) -> None:
        """A call ends, during which others could leave."""
        for reference in self.leaving:
            if (saved := reference()) is not None:
                saved.release()
        self.leaving = []


class Offloader:
    """Takes the inputs that the layers of one model save to the host, and back.

    Copied and pickled with its layers, without what is on its way.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[torch.device, str], Copies | None] = {}
        self.order = _Order()
        self._lock = threading.RLock()
        self._ahead: weakref.ref[OffloadedInput] | None = None

    def __reduce__(self) -> tuple[type[Offloader], tuple[()]]:
        return Offloader, ()

    def copies(self, x: Any) -> Copies | None:
        """The copies between x's device and the host; None where x stays."""
        if not isinstance(x, Tensor) or not is_plain_view(x) or captured(x):
            return None
        place = x.device, device_counted(x)
        if place not in self._copies:
            self._copies[place] = copies_of(*place)
        return self._copies[place]

    def take(self, saved: OffloadedInput) -> Tensor:
        """An input that backward asks for, and the one that it will ask for next is on its way."""
        with self._lock:
            ahead = None if self._ahead is None else self._ahead()
            before = saved.before
            if ahead is not None and ahead is not saved and ahead is not before:
                ahead.drop()
            x = saved.take()
            self._ahead = None if before is None else weakref.ref(before)
            if before is not None:
                before.fetch()
            return x


class _Call(AbstractContextManager[None]):
    """One call of a layer."""

    def __init__(self, offloader: Offloader, copies: Copies, x: Tensor) -> None:
        self._offloader, self._copies, self._x = offloader, copies, x
        self._order = offloader.order

    def __enter__(self) -> None:
        self.follow(self._x)
        push_saved_tensor_hooks(self.pack, self.unpack)

    def __exit__(self, *exception: object) -> None:
        pop_saved_tensor_hooks()
        if self._order.waiting:
            self._order.end()
        del self._x, self._found  # a graph may hold its hooks

    def follow(self, x: Tensor) -> None:
        """Says what is saved next: a layer in several steps has an input for each."""
        self._x = x
        self._found: dict[Any, OffloadedInput] = {}
        self._home = self._copies.home()
        self._made = self._copies.point(self._home)
        self._order.begin()

    def pack(self, t: Tensor) -> Held | OffloadedInput:
        """What autograd holds for t."""
        x = self._x
        if not (is_plain_view(t) and storage_id(t) == storage_id(x) and _may_leave(t)):
            return Held(t)
        view = (t.shape, t.stride())
        if view not in self._found:
            order = self._order
            saved = self._found[view] = OffloadedInput(self._copies, t, self._home, self._made, order.last)
            order.last = weakref.ref(saved)
            order.waiting.append(order.last)
        return self._found[view]

    def unpack(self, packed: Held | OffloadedInput) -> Tensor:
        """What t was."""
        return self._offloader.take(packed) if isinstance(packed, OffloadedInput) else packed.take()


def _may_leave(t: Tensor) -> bool:
    """Whether t is an activation with memory to itself: computed by autograd, no parameter, no buffer, no view of one,
    and without gaps, so that a copy is laid out alike."""
    base = t._base
    if t.grad_fn is None or (base is not None and base.is_leaf) or t.untyped_storage().nbytes() != t.nbytes:
        return False
    return t.numel() > 0 and torch.empty_like(t, device="meta").stride() == t.stride()


def saving(offloader: Offloader | None, x: Any) -> AbstractContextManager[None]:
    """Around the call of a layer on x.

    Nothing is offloaded under torch.compile, in a CUDA graph, and where somebody has hooks for saved tensors at work
    already: a checkpoint around the layer, `save_on_cpu`.
    """
    if offloader is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return _NOTHING
    copies = offloader.copies(x)
    if copies is None or not saved_tensor_hooks_allowed():
        return _NOTHING
    if saved_tensor_hooks() is not None:
        follow(x)
        return _NOTHING
    return _Call(offloader, copies, x)


def follow(x: Tensor) -> None:
    """Says that the layer called just now, if its input is offloaded, goes on with x, which a further step saves."""
    if torch.compiler.is_compiling():
        return
    pack, _ = saved_tensor_hooks() or (None, None)
    call = getattr(pack, "__self__", None)
    if isinstance(call, _Call):
        call.follow(x)
