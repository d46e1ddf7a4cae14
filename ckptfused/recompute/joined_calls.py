"""Calls that follow one another behind one saved input: what one returns, the next is called with.

PyTorch's non-reentrant checkpoint does the work. Its hooks for saved tensors are at work in each of the calls, and not
between them; the first saved tensor that backward asks for has all calls made again, each with what it was given beside
the result of the one before.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint as torch_checkpoint

from ckptfused.compat.pytree import tree_leaves
from ckptfused.compat.torch_autograd import (
    open_checkpoint,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks,
)
from ckptfused.compat.torch_memory import storage_id
from ckptfused.ops import numerics
from ckptfused.ops.enclosing_checkpoint import captured
from ckptfused.recompute.arguments import HeldArgs
from ckptfused.recompute.checkpoint import SavedArguments
from ckptfused.recompute.copy_on_write import is_plain_view
from ckptfused.recompute.per_thread_tensors import entered
from ckptfused.recompute.replay_state import ReplayState
from ckptfused.recompute.saved_tensor_versions import SavedTensorVersions

_OPTIONS: Any = (torch_checkpoint.noop_context_fn, "default", False, True)  # the check of metadata, and early stopping


class Segment:
    """Layers of a model whose calls are one chain, as far as each is called with what the one before returned."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.warned = False
        self.last: Callable[[], _Chain | None] = _none
        """The chain of the last call."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "last": _none}

    def warn(self, name: str) -> None:
        """Says that a chain ended before this layer, which saved something."""
        if name != self.names[0] and self.last() is not None:
            self.say(
                f"the segment of layers {self.names[0]} … {self.names[-1]} is divided before {name}, whose input is "
                "not what the layer before it returned, or which runs as it was: one more input is saved"
            )

    def say(self, text: str) -> None:
        """Warns of one thing, once."""
        if not self.warned:
            self.warned = True
            warnings.warn(f"ckptfused: {text}", stacklevel=2)


def _none() -> None:
    """No chain."""


class NotChainedError(Exception):
    """A call that is not to be made again: it is made outside the chain, which ends before it."""


class _Thread(threading.local):
    forward = False
    """Whether a chain's call is made for the first time."""


_thread = _Thread()
_chains: weakref.WeakValueDictionary[int, _Chain] = weakref.WeakValueDictionary()
"""The chain that made what lies in a storage, by what tells storages."""


def may_be_chained(args: tuple[Any, ...], kwargs: dict[str, Any], x: Any) -> bool:
    """Whether a call may be a part of a chain, its first argument being x."""
    if (
        torch.compiler.is_compiling()
        or not torch.is_grad_enabled()
        or not isinstance(x, Tensor)
        or not is_plain_view(x)
    ):
        return False
    if captured(x):  # the random state cannot be read
        return False
    return not any(isinstance(leaf, Tensor) and leaf.is_inference() for leaf in tree_leaves((args, kwargs)))


def not_made_again() -> None:
    """**Raises** `NotChainedError` in the first forward of a chain, for a call that a replay cannot make again."""
    if _thread.forward:
        raise NotChainedError


def goes_on(segment: Segment, x: Tensor) -> bool:
    """Whether a call on x would be a further one of a chain."""
    return _chain_of(segment, x) is not None


def chained(
    segment: Segment,
    function: Callable[..., Any],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    x: Tensor,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Any:
    """`function(*args, **kwargs)` as a further call of the chain of which x is a result, else as the first of one.

    module: whose state, and what it holds, is in the replay as the forward found it. around: a replay of this call runs
    within its result.

    **Saves** all tensors that are no results of calls before it. **Recomputes** the chain in backward, once.
    **Raises** `NotChainedError` as the function does; what `checkpoint` raises, for what was changed in place.
    """
    chain = _chain_of(segment, x)
    if chain is None:
        chain = _Chain(segment, x, [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)])
    return chain.call(function, module, args, kwargs, around)


def _chain_of(segment: Segment, x: Tensor) -> _Chain | None:
    chain = _chains.get(storage_id(x))
    if chain is None or chain.segment is not segment or not chain.is_open() or chain.place(x) is None:
        return None
    return chain


def _ambient(device: str) -> tuple[Any, ...]:
    """What holds around all calls of a chain alike."""
    found: list[Any] = [numerics.current(), torch.is_autocast_cache_enabled()]
    for kind in dict.fromkeys(("cpu", device)):
        if torch.amp.is_autocast_available(kind):
            found += [torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)]
    return tuple(found)


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.storage_offset(), t.shape, t.stride(), t.dtype, t._version


class _Chain:
    """It lives as long as a graph holds something that was saved in one of its calls."""

    def __init__(self, segment: Segment, x: Tensor, tensors: list[Tensor]) -> None:
        self.segment = segment
        self._device = x.device.type
        self._ambient = _ambient(self._device)
        self._settings = numerics.current()
        self._steps: list[_Step] = []
        self._ended = False
        self._made: dict[int, tuple[StorageWeakRef, dict[Any, tuple[int, int]]]] = {}
        """Which leaf of which call's result lies in a storage, by what tells storages and by layout. No other storage
        takes the number as long as the first is referred to."""
        self._needed: set[tuple[int, int]] = set()
        devices = dict.fromkeys(t.device for t in (x, *tensors) if t.device.type != "cpu")
        # A checkpoint whose forward is over at once: its hooks are put to work in each call.
        opened = open_checkpoint(self._replay, True, _OPTIONS, *(torch.empty(0, device=device) for device in devices))
        next(opened)
        pack, self._first = saved_tensor_hooks()
        next(opened, None)
        # What is saved holds `unpack`, which holds the chain; not the other way round, so that it ends with the graph.
        self._first._pack = pack
        self._unpack = weakref.ref(self._first)

    def is_open(self) -> bool:
        """Whether a call can follow here."""
        return not self._ended and self._unpack() is not None and self._ambient == _ambient(self._device)

    def place(self, t: Tensor) -> tuple[int, int] | None:
        """Which leaf of which call's result t is, if it has not been changed since."""
        if not is_plain_view(t) or t.is_inference():
            return None
        _, places = self._made.get(storage_id(t), (None, {}))
        return places.get(_layout(t))

    def call(
        self,
        function: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        around: Callable[[], AbstractContextManager[Any]],
    ) -> Any:
        """Makes a call, and is open for one that follows it. If it fails, the chain has ended."""
        unpack, self._first, self._ended = self._unpack(), None, True
        assert unpack is not None  # it was asked whether it is open
        with entered():
            step = _Step(self, function, module, args, kwargs, around)
            self._needed.update(place for place in step.places if place is not None)
            self._steps.append(step)
            try:
                held = step.state.may_fail()
                with _at_work(unpack._pack, unpack), step.saved_tensor_versions.of_forward(held), _first_time():
                    result = function(*args, **kwargs)
            except NotChainedError:
                self._steps.pop()
                raise
            can_be_replayed = step.state.settle()
            step.saved_tensor_versions.settle(can_be_replayed)
        if not can_be_replayed:  # backward gets what it saved, and the chain ends before it
            self._steps.pop()
            return result
        for i, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, Tensor) and is_plain_view(leaf) and not leaf.is_inference():
                storage = leaf.untyped_storage()
                _, places = self._made.setdefault(storage_id(storage), (StorageWeakRef(storage), {}))
                places[_layout(leaf)] = (len(self._steps) - 1, i)
                _chains[storage_id(storage)] = self
        self._ended, self.segment.last = False, weakref.ref(self)
        return result

    def _replay(self, *markers: Tensor) -> None:
        made: dict[tuple[int, int], Tensor] = {}
        with numerics.under(self._settings):
            for number, step in enumerate(self._steps):
                leaves = tree_leaves(step.replay(made))
                made.update({(n, i): leaves[i] for n, i in self._needed if n == number})
                del leaves


class _Step:
    """One call of a chain."""

    def __init__(
        self,
        chain: _Chain,
        function: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        around: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.function, self.around = function, around
        self.inputs = HeldArgs(args, kwargs)
        tensors = self.inputs.take_tensors()
        self.places = [chain.place(t) for t in tensors]
        self.needs_gradient = [t.requires_grad for t in tensors]
        given = [i for i, place in enumerate(self.places) if place is None]
        self.saved = SavedArguments(self.inputs, [tensors[i] for i in given], given)
        self.state = ReplayState(module, self.inputs.others(), True)
        self.saved_tensor_versions = SavedTensorVersions()
        self.random = torch.get_rng_state(), *torch_checkpoint.get_device_states(*tensors)

    def replay(self, made: dict[tuple[int, int], Tensor]) -> Any:
        """The result again, from those of the calls before it."""
        given = iter(self.saved.tensors())
        tensors = [
            next(given) if place is None else made[place].detach().requires_grad_(needed)
            for place, needed in zip(self.places, self.needs_gradient, strict=True)
        ]
        cpu, devices, states = self.random
        torch.set_rng_state(cpu)
        torch_checkpoint.set_device_states(devices, states)
        with self.around(), entered(), self.state.replayed() as saved, self.saved_tensor_versions.of_replay(saved):
            return self.inputs.call(self.function, tensors)


@contextmanager
def _at_work(pack: Any, unpack: Any) -> Iterator[None]:
    push_saved_tensor_hooks(pack, unpack)
    try:
        yield
    finally:
        pop_saved_tensor_hooks()


@contextmanager
def _first_time() -> Iterator[None]:
    before, _thread.forward = _thread.forward, True
    try:
        yield
    finally:
        _thread.forward = before
