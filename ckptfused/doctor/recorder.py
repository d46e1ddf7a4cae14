"""What each module computes in a step's forward, and again in the replays of its checkpoints.

Hooks would change what is watched (a fused layer with a hook inside is no longer fused), so the one `__call__` of all
modules is replaced for as long as a step lasts, and what `torch.utils.checkpoint` calls by a global name.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ckptfused.compat.patches import patched_attribute
from ckptfused.compat.torch_autograd import pop_saved_tensor_hooks, push_saved_tensor_hooks, saved_tensor_hooks
from ckptfused.compat.torch_memory import storage_id
from ckptfused.doctor.regions import Region, RegionEvent, keywords_of, owner_of
from ckptfused.doctor.saving import replaced_checkpoints
from ckptfused.state.fingerprints import Fingerprints, local, tensors
from ckptfused.state.generators import global_generators, is_generator, state_of

_PLAIN = (bool, int, float, str, type(None))
_LARGE = 1 << 18  # entries of a buffer that is not read at each call


class RegionRecorder:
    """A recorder that notes events within `recording`."""

    def __init__(
        self, model: nn.Module, watch_regions: bool, guard: Callable[[], None] | None = None, sizes: bool = False
    ) -> None:
        """sizes: note sums and norms, too, which tell how far results are apart."""
        self._guard = guard
        self._sizes = sizes
        self._modules = {id(module) for module in model.modules()}
        self._watch_regions = watch_regions
        self._prints = Fingerprints()
        self._threads = threading.local()
        self.regions: list[Region] = []
        self.calls: list[RegionEvent] = []
        """Events of the whole forward."""
        self.in_backward = False
        self.last_replayed: Region | None = None
        self.last_begun: list[nn.Module] = []
        """The modules that run, the outermost first; after an exception, those that it went through."""

    @property
    def _open(self) -> list[list[RegionEvent]]:
        """The lists into which this thread's events go."""
        if not hasattr(self._threads, "open"):
            self._threads.open = []
        return self._threads.open

    @contextlib.contextmanager
    def recording(self) -> Iterator[RegionRecorder]:
        """The replaced functions are put back whatever happens."""

        def calls(plain: Callable[..., Any]) -> Callable[..., Any]:
            called = lambda module, *args, **kwargs: self._call(plain, module, args, kwargs)  # noqa: E731
            return functools.wraps(plain)(called)

        with contextlib.ExitStack() as stack:
            stack.enter_context(patched_attribute(nn.Module, "__call__", calls))
            if self._watch_regions:
                replays_here = lambda: bool(self._open)  # noqa: E731  # in a thread of autograd's
                stack.enter_context(replaced_checkpoints(self._generator, self._reentrant, replays_here))
            yield self
        self._prints.settle()

    def _call(self, plain: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if id(module) not in self._modules:
            return plain(module, *args, **kwargs)
        if self.in_backward and not self._open:
            with self.running(self._foreign(module, args, kwargs), True):
                return self._call(plain, module, args, kwargs)
        lists = [*self._open, *([] if self.in_backward else [self.calls])]
        if self._guard is not None:
            self._guard()
        _append(lists, self._event(module, True, (args, kwargs), self._facts(module)))
        running = self.last_begun = [*self.last_begun, module]
        result = plain(module, *args, **kwargs)
        self.last_begun = running[:-1]
        _append(lists, self._event(module, False, result, {}))
        return result

    def _event(self, module: nn.Module | None, begins: bool, values: Any, facts: dict[str, Any]) -> RegionEvent:
        sizes = self._prints.sizes(values) if self._sizes else ()
        states = tuple(_number(state_of(g)) for g in global_generators())
        return RegionEvent(module, begins, self._prints.of(values), states, facts, sizes)

    def _note(self, values: Any) -> None:
        """What backward reads, in every list that is open; weights are compared as gradients are."""
        if self._open and not self._is_weight(values):
            _append(self._open, self._event(None, False, values, {}))

    def _is_weight(self, value: Any) -> bool:
        """Whether a tensor is a parameter, or a view of one; where that was detached, as the replays of ckptfused's
        checkpoint save it, of one of the module that runs, or of those around it.
        """
        if any(isinstance(w, nn.Parameter) for w in (value, getattr(value, "_base", None))):
            return True
        owner = None if self.last_replayed is None else self.last_replayed.owner
        if not self.in_backward or (address := _address(value)) is None:
            return False
        if not (running := [*([] if owner is None else [owner]), *self.last_begun]):
            return False
        *around, inner = running
        held = itertools.chain(inner.parameters(), *(module.parameters(recurse=False) for module in around))
        return any(_address(p) == address for p in held)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """A context in which each tensor that the hooks of a checkpoint take is noted.

        They are exchanged, not covered: a layer of ckptfused's takes the checkpoint's own from the top.
        """
        hooks = saved_tensor_hooks()
        if hooks is None:
            yield
            return

        @functools.wraps(hooks[0])
        def pack(t: torch.Tensor) -> Any:
            self._note(t)
            return hooks[0](t)

        pop_saved_tensor_hooks()
        push_saved_tensor_hooks(pack, hooks[1])
        try:
            yield
        finally:
            pop_saved_tensor_hooks()
            push_saved_tensor_hooks(*hooks)

    def _foreign(self, module: nn.Module, args: Any, kwargs: Any) -> Region:
        """The forward's call that a checkpoint replays which is neither PyTorch's nor ckptfused's.

        It is the last one with the same arguments; where there is none, the region's forward is empty.
        """
        values, found = self._prints.of((args, kwargs)), list[RegionEvent]()
        self._prints.settle()
        begins = [i for i, event in enumerate(self.calls) if event.module is module and event.begins]
        for begin in reversed(begins):
            if self.calls[begin].values == values:
                ends = (i for i, event in enumerate(self.calls) if i > begin and event.module is module)
                found = self.calls[begin : next(ends) + 1]
                break
        region = Region(module, None, False, True, True, [], found, foreign=True)
        self.regions.append(region)
        return region

    def _facts(self, module: nn.Module) -> dict[str, Any]:
        """What a module computes with beside its arguments, weights and random numbers."""
        held = vars(module)
        facts: dict[str, Any] = {"mode": "train" if module.training else "eval"}
        devices = ("cpu", *(["cuda"] if torch.cuda.is_available() else []))
        facts["autocast"] = tuple(
            str(torch.get_autocast_dtype(d))[6:] if torch.is_autocast_enabled(d) else "off" for d in devices
        )
        for name, value in held.items():
            kind: Any = type(value)
            if isinstance(value, _PLAIN) and name != "training":
                facts[f"attribute {name}"] = value
            elif is_generator(kind):
                facts[f"generator {name}"] = _number(state_of(value))
        for name, buffer in held.get("_buffers", {}).items():
            if buffer is not None and buffer.numel() <= _LARGE:
                facts[f"buffer {name}"] = self._prints.of(buffer)
        return facts

    def region(self, function: Any, reentrant: bool, preserves: bool, args: Any, kwargs: Any) -> Region:
        """A checkpoint that begins."""
        inside = self.last_begun[-1] if self.last_begun else None
        keywords = {**keywords_of(function), **kwargs}
        held = [(f"argument {i}", t) for i, arg in enumerate(args) for t in tensors(arg)]
        held += [(f"argument {name!r}", t) for name, arg in keywords.items() for t in tensors(arg)]
        found = Region(
            inside if (owner := owner_of(function)) is None else owner,
            inside,
            reentrant,
            preserves,
            any(t.requires_grad for _, t in held),
            [(name, weakref.ref(t), self._prints.of(t)) for name, t in held],
        )
        if not self.in_backward:
            self.regions.append(found)
        return found

    @contextlib.contextmanager
    def running(self, region: Region, replay: bool) -> Iterator[None]:
        """A context in which the calls of the region's function are noted, in its forward or a replay."""
        if replay:
            region.replays.append([])
            self.last_replayed = region
            self.look_again(region)
        events = region.replays[-1] if replay else region.forward
        self._open.append(events)
        begun = self.last_begun
        try:
            yield
        except BaseException as error:
            if type(error).__name__ == "_StopRecomputationError":
                self.last_begun = begun
            raise
        finally:
            self._open.pop()

    def look_again(self, region: Region) -> None:
        """Notes which of a region's arguments were changed in place."""
        for name, reference, before in region.arguments:
            t = reference()
            if t is not None and name not in region.changed:
                now = self._prints.of(t)
                self._prints.settle()
                if now != before:
                    region.changed.append(name)

    def _generator(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def generator(
            function: Any,
            preserve: bool,
            contexts: Any,
            check: str,
            debug: bool,
            early: bool,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            region = self.region(function, False, preserve, args, kwargs)

            def both() -> tuple[Any, Any]:
                forward, replay = contexts()
                return _Both(self, region, False, forward), _Both(self, region, True, replay)

            return plain(function, preserve, contexts if debug else both, check, debug, early, *args, **kwargs)

        return generator

    def _reentrant(self, plain: Any) -> Callable[..., Any]:
        def apply(function: Any, preserve: bool, *args: Any) -> Any:
            region = self.region(function, True, preserve, args, {})
            calls = itertools.count()

            def run(*given: Any) -> Any:
                with self.running(region, next(calls) > 0):
                    result = function(*given)
                    self._note(result)
                    return result

            return plain.apply(run, preserve, *args)

        return apply


class _Both:
    """The context of a checkpoint's forward or replay, with the recorder's around it; entered any number of times."""

    def __init__(self, recorder: RegionRecorder, region: Region, replay: bool, context: Any) -> None:
        self._make = functools.partial(recorder.running, region, replay)
        self._saving = recorder.saving
        self._context = context
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(self._make())
        stack.enter_context(self._saving())
        stack.enter_context(self._context)
        self._entered.append(stack)

    def __exit__(self, *exception: Any) -> Any:
        return self._entered.pop().__exit__(*exception)


def _append(lists: list[list[RegionEvent]], event: RegionEvent) -> None:
    for events in lists:
        events.append(event)


def _address(value: Any) -> int | None:
    """What tells a tensor's storage from another's; None where there is none here."""
    values = local(value) if isinstance(value, torch.Tensor) else None
    return None if values is None else storage_id(values)


def _number(state: Any) -> int:
    """A number for a generator's state."""
    if isinstance(state, dict):
        return hash(tuple(_number(value) for value in state.values()))
    if hasattr(state, "tobytes"):
        return hash(state.tobytes())
    return hash(state.numpy().tobytes() if isinstance(state, torch.Tensor) else state)
