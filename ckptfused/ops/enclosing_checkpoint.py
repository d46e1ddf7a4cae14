"""What a fused call does inside a `torch.utils.checkpoint`: a replay draws the masks that the forward drew, and ends
before a call whose inputs are all that it waits for; where the checkpoint is around nothing but a layer that
checkpoints itself, that layer is not checkpointed twice.

PyTorch says nothing of a checkpoint to what runs inside. But a non-reentrant one is, while it runs, among the hooks for
saved tensors of this thread, and those hooks' closures hold its frame, of which forward and replays share one. A hook
that looks otherwise is nobody's checkpoint here; nor is a reentrant one, which has no hooks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ckptfused.compat.torch_autograd import (
    SavedTensorHooks,
    graph_task,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks,
)
from ckptfused.compat.torch_dispatch import without_dispatch_modes


class _Around(NamedTuple):
    """A checkpoint that runs around this call."""

    frame: Any
    replay: Callable[..., Any] | None
    """Its hook, one for each replay; None in the forward."""


class _Passed(threading.local):
    def __init__(self) -> None:
        self.hooks: list[tuple[int, SavedTensorHooks]] = []
        """The hooks that `passed` took away, each with the number of those below it."""


_passed = _Passed()
# By frame, the generators of its forward's draws, each as it was before; by replay, those that it has not made yet.
_drawn: WeakKeyDictionary[Any, list[torch.Generator]] = WeakKeyDictionary()
_left: WeakKeyDictionary[Callable[..., Any], Iterator[torch.Generator]] = WeakKeyDictionary()


def source(x: Tensor, generator: torch.Generator | None) -> torch.Generator | None:
    """What a call on x draws from that was given this generator; None: the default one.

    In a replay it is a copy of what the forward drew from, unless this generator is in that state: there the checkpoint
    itself restored it, and what draws after this call has to find it moved on. **Saves** in a checkpoint's forward a
    copy of the generator, for as long as the checkpoint is held.
    """
    if torch.compiler.is_compiling() or not (_passed.hooks or saved_tensor_hooks()) or captured(x):
        return generator
    forwards, replay = _checkpoints()
    current = default_generator(x) if generator is None else generator
    if replay is not None:
        if replay.replay not in _left:
            _left[replay.replay] = iter(_drawn.get(replay.frame, ()))  # type: ignore[index]
        # A replay in the midst of its forward may run past what that has drawn: for nobody, so the caller's stays.
        before = next(_left[replay.replay], None)  # type: ignore[index]
        if before is None or not _same_state(before, current):
            generator = current = (before or current).clone_state()
    for frame in forwards:
        _drawn.setdefault(frame, []).append(current.clone_state())
    return generator


def _same_state(a: torch.Generator, b: torch.Generator) -> bool:
    with without_dispatch_modes():  # selective checkpointing counts operations, and fake tensors are no states
        return a.get_state().equal(b.get_state())


def ends_with(count: int) -> Callable[[Tensor], Any] | None:
    """What takes the saved tensors of a replay that waits for so many more; None: this is no such replay.

    It ends, by an exception, once it has the last of them. A call that saves so many of its inputs, and nothing else,
    need not compute what it would return.
    """
    hooks = None if torch.compiler.is_compiling() else saved_tensor_hooks()
    if hooks is None:
        return None
    around = _checkpoint((getattr(hooks[0], "hands_on_to", hooks[0]), hooks[1]))
    if around is None or around.replay is None or not around.frame.early_stop:
        return None
    taken = around.frame.recomp_counter[_held(inspect.unwrap(around.replay), "gid")]
    return hooks[0] if len(around.frame.weak_holders) - taken == count else None


def default_generator(x: Tensor) -> torch.Generator:
    """The default generator of x's device: the one that an op draws from."""
    return torch.cuda.default_generators[x.get_device()] if x.is_cuda else torch.default_generator


def captured(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured, where a generator's state cannot be read."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def hidden_from_it(module: nn.Module, saves_inputs_alone: bool = True) -> AbstractContextManager[None]:
    """A context that hides what is saved from a checkpoint around `module` alone, which so has nothing to replay.

    Not where the module saves more than its inputs, which are all that such a checkpoint holds.
    """
    hooks = saved_tensor_hooks() if saves_inputs_alone and not torch.compiler.is_compiling() else None
    around = None if hooks is None else _checkpoint(hooks)
    if hooks is None or around is None or not _is_around(around.frame, module):
        return _NOTHING
    return _without(hooks)


_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def _without(hooks: SavedTensorHooks) -> Iterator[None]:
    pop_saved_tensor_hooks()
    _passed.hooks.append((len(_hooks()), hooks))
    try:
        yield
    finally:
        _passed.hooks.pop()
        push_saved_tensor_hooks(*hooks)


def _hooks() -> list[SavedTensorHooks]:
    """The hooks for saved tensors of this thread, the last one first."""
    found: list[SavedTensorHooks] = []
    try:
        while (top := saved_tensor_hooks()) is not None:
            pop_saved_tensor_hooks()
            found.append(top)
    finally:
        for hooks in reversed(found):
            push_saved_tensor_hooks(*hooks)
    return found


def within_a_checkpoint() -> bool:
    """Whether what autograd saves here is for a checkpoint, or for a replay of one."""
    return saved_tensor_hooks() is not None and any(map(_checkpoint, _hooks()))


def _checkpoints() -> tuple[list[Any], _Around | None]:
    """The frames whose forward this is, and the replay in which all of it runs, if there is one."""
    hooks = _hooks()[::-1]
    for below, taken in reversed(_passed.hooks):
        hooks.insert(below, taken)
    forwards: list[Any] = []
    for around in filter(None, map(_checkpoint, reversed(hooks))):
        if around.replay is not None:
            return forwards, around
        forwards.append(around.frame)
    return forwards, None


def _checkpoint(hooks: SavedTensorHooks) -> _Around | None:
    """The checkpoint to which hooks belong."""
    pack = inspect.unwrap(hooks[0])
    if getattr(pack, "__module__", None) != "torch.utils.checkpoint":
        return None
    frame = _held(pack, "frame")
    if frame is not None:
        return _Around(frame, None)
    reference = _held(pack, "target_frame_ref")
    frame = None if reference is None else reference()
    return None if frame is None else _Around(frame, hooks[0])


def forget_past_replays(hooks: SavedTensorHooks) -> None:
    """Lets go, within a replay with these hooks, of what PyTorch notes of earlier ones through a graph that is
    retained, once backward has had all that they saved."""
    around = _checkpoint(hooks)
    if around is None or around.replay is None or len(around.frame.recomputed) < 2:
        return
    frame, now = around.frame, graph_task()
    past = [task for task, saved in frame.recomputed.items() if not saved and task != now]
    for noted in (frame.recomputed, frame.recomp_counter, frame.is_recomputed):
        for task in past:
            noted.pop(task, None)
    for holder in filter(None, (reference() for reference in frame.weak_holders)):
        for task in past:
            holder.handles.pop(task, None)


def _held(function: Any, name: str) -> Any:
    """What a function's closure holds by this name, None if nothing."""
    names = function.__code__.co_freevars if inspect.isfunction(function) else ()
    return function.__closure__[names.index(name)].cell_contents if name in names else None


def _is_around(frame: Any, module: nn.Module) -> bool:
    """Whether a checkpoint runs this module, and nothing else."""
    function = _held(frame.recompute_fn, "fn")
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__self__", function) is module or (
        function is not None and function is vars(module).get("forward")
    )
