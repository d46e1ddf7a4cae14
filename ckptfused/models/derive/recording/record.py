"""A recording of one forward: its calls, what it was given, and what came out."""

from __future__ import annotations

import inspect
import random
import threading
import types
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptfused.compat.pytree import TreeSpec, tree_flatten, tree_unflatten
from ckptfused.models.derive.namespaces import slotted
from ckptfused.models.derive.recording.draws import DRAWS
from ckptfused.models.derive.recording.evaluate import NOTHING, Rest, calls_behind
from ckptfused.models.derive.recording.held import BOOKS, tensors_held
from ckptfused.models.derive.recording.in_place import writes
from ckptfused.models.derive.recording.names import function_name
from ckptfused.models.derive.recording.recorder import CHANGES, CallRecorder, Recorded, RefusedError, Value
from ckptfused.models.derive.recording.streams import Streams, both_streams
from ckptfused.models.describe.own_forward import IndexReadError

_ASKS = "output_attentions"
_ARGUMENTS = frozenset((int, float, bool, str, type(None), torch.dtype))
"""Types of what a module may be called with beside tensors, to be called so again."""
WHOLE = "called_whole"
"""The call of a module that is not followed."""
_OF_STAND_INS = ("_of", "_returns")
"""What the stand-ins of modules note in themselves."""
RAISED = "its forward raised"
"""How the reason begins where a call was not one that the layer takes."""


RETURNED = "the layer returns {} tensors, expected one"


class Returns(NamedTuple):
    """What a forward returns: leaves, in the place of tensors None, their tree, and where its result is among them."""

    place: int
    leaves: tuple[Any, ...]
    tree: TreeSpec
    streams: Streams


class Recording:
    """A forward that was recorded: its calls, x, the result and what is around it."""

    def __init__(
        self,
        recorder: CallRecorder,
        x: Value,
        y: Any,
        unasked: bool,
        apart: Collection[tuple[str, str]],
        streams: tuple[Value, ...] = (),
    ) -> None:
        """streams: what x is, side by side; () of an x that is one argument."""
        self.calls, self.x, self.roots, self.modes = recorder.calls, x, recorder.roots, recorder.modes
        leaves, self.tree = tree_flatten(y)
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        self.streams: Streams = ()
        if streams:
            self.x, whole, self.streams = both_streams(self.calls, streams, list(map(recorder.value, tensors)), leaves)
            tensors = [whole.data]
        if not tensors or (len(tensors) > 1 and not unasked):
            raise RefusedError(RETURNED.format(len(tensors)))
        self.y, *self.beside = map(recorder.value, tensors)
        self.end = self.y
        """What the forward returns; `y` is before it where only a half is to be fused."""
        """`beside`: attention weights for which nobody asked, as the reading has to find."""
        self.place = next((i for i, v in enumerate(leaves) if v is tensors[0]), -1)
        """The place of the result among the leaves of what the forward returns; -1 of what becomes of streams."""
        self.leaves = [None if isinstance(v, Tensor) else v for v in leaves]
        self.rest: Rest | None = None
        """How `end` is made of `y`, or `x` of what the layer was given, where these are other values."""
        self.returned = recorder.returned
        if opaque := [call for call in self.calls if call.op == WHOLE or (call.op, call.place) in apart]:
            self._cut(opaque)

    def before(self, *ends: Value, since: Value | None = None, whole: bool = False) -> list[Recorded]:
        """The calls on which values depend, in order; those by which `since` was made only where something else does.
        whole: a call of a module by the layer is one.
        """
        return calls_behind(ends, (since,), self.returned if whole else NOTHING)

    @property
    def returns(self) -> Returns:
        return Returns(self.place, tuple(self.leaves), self.tree, self.streams)

    def names_behind(self, v: Value) -> set[str]:
        """The names of what a value comes from."""
        names = {v.name} if v.call is None else set()
        return names.union(*({i.name for i in call.inputs if i.call is None} for call in self.before(v)))

    def drawn(self) -> dict[Value, Tensor]:
        """The random numbers beside dropout's, as they were drawn."""
        return {v: v.data for call in self.calls if call.op in DRAWS for v in call.values}

    def between(self, start: Value, end: Value) -> list[Recorded]:
        """The calls by which one value depends on another, in order."""
        known, found = {start}, []
        for call in self.before(end, since=start):
            if not known.isdisjoint(call.inputs):
                known.update(call.values)
                found.append(call)
        return found

    def _cut(self, opaque: list[Recorded]) -> None:
        """Has what is to be fused end at the last value before opaque calls, of modules or the layer's own, by which
        alone x reaches the result, or begin at the first that they or others after them make.
        """
        calls, x, first, last = self.before(self.end), self.x, opaque[0].number, opaque[-1].number
        before = (v for call in reversed(calls) if call.number < first for v in call.values)
        after = (v for call in calls if call.number >= last for v in call.values)
        if (v := next(filter(self._is_between, before), None)) is not None:
            self.y = v
            self.rest = self._rest({*opaque}, False, v, self.end)
        elif (v := next(filter(self._is_between, after), None)) is not None:
            self.x = v
            self.rest = self._rest({*opaque}, True, x, v)
        else:
            raise RefusedError("nothing is whole before or after what cannot be followed")

    def _is_between(self, v: Value) -> bool:
        """Whether it is by this value alone that x reaches the result."""
        if v.shape != self.x.shape:
            return False
        ways = [self.before(self.end, since=v, whole=whole) for whole in (False, True)]
        met = [{i for call in calls for i in call.inputs} for calls in ways]
        return all(v in inputs and self.x not in inputs for inputs in met)

    def _rest(self, opaque: set[Recorded], first: bool, start: Value, end: Value) -> Rest:
        calls = self.before(end, since=start, whole=True)
        inputs = dict.fromkeys(i for call in calls for i in call.inputs if i is not start)
        for call in calls:
            if call.op == WHOLE or (call.func is not None and (call.within or writes(function_name(call.func), {}))):
                raise RefusedError("what stands beside the half cannot be called again", call)
            refuse_objects(call)
        if opaque - {*self.before(end, since=start)}:
            raise RefusedError("what cannot be followed is no part of the result")
        for v in inputs:
            if v.call in opaque and not v.data.numel():
                raise RefusedError("a result is used of which the shape is not known", v.call)
            if v.call is None and v.is_param and "." in v.name:
                raise RefusedError(f"{v.name} is used past its module")
        names = frozenset(call.op for call in calls if call.func is None)
        fused = {f"module:{call.within}" for call in self.before(self.y, since=self.x)}
        given = tuple(v.name for v in inputs if v.call is None)
        scales = [call.op for call in calls] == ["mul"] and [name[:7] for name in given] == ["buffer:"]
        return Rest(first, start, end, given, self.returned, names - fused, scales)


def refuse_objects(call: Recorded) -> None:
    """**Raises** `RefusedError` of a module's call with anything but tensors and numbers: it would get the copy's."""
    if call.func is None and any(type(n) not in _ARGUMENTS for n in call.numbers):
        raise RefusedError(f"{call.op} is called with what is no number", call)


class _Made(threading.local):
    recorders: list[CallRecorder] | None = None


_made = _Made()


@contextmanager
def forgotten_afterwards() -> Iterator[None]:
    """A context after which the recordings that this thread made in it, as they are or given up, have the shapes and
    types of tensors alone: calls and values hold one another, until Python looks for such circles.
    """
    made: list[CallRecorder] = []
    _made.recorders = made
    try:
        yield
    finally:
        _made.recorders = None
        for recorder in made:
            recorder.forget()


def record(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wide: bool,
    generator: torch.Generator | None = None,
    opaque: Collection[tuple[str, str]] = (),
    seq_first: bool = False,
    streams: bool = False,
) -> Recording:
    """The recording of a copy's forward (see `copies`). x is its first argument, or the first tensor among them.
    opaque: calls of its own, by what and where, that are not to be read. seq_first: it is given x turned round,
    [T, B, C], and what it makes of that is turned back. streams: x is its first two tensors, side by side.

    **Raises** `RefusedError` where the forward does what no recording can follow.
    """
    recorder, state = CallRecorder(wide, generator), _state(layer)
    if _made.recorders is not None:
        _made.recorders.append(recorder)
    roots: list[Value] = []
    for i, leaf in enumerate(tree_flatten((args, kwargs))[0]):
        if isinstance(leaf, Tensor):
            roots.append(recorder.root(f"arg:{i}", leaf))
    if not roots:
        raise RefusedError("the layer is called without a tensor")
    for name, weight in layer.named_parameters():
        recorder.root(f"param:{name}", weight)
    for name, t in tensors_held(layer):
        recorder.root(f"buffer:{name}", t)
    given, tree = tree_flatten((args, kwargs))
    drawn, before = random.getstate(), torch.get_rng_state()
    try:
        with recorder.watching(layer, _state), roots[0].data.device, recorder:  # where a forward makes its own masks
            if seq_first:
                inner, options = turned_round((args, kwargs))
                y = turned_round(type(layer).forward(layer, *inner, **options))
            else:
                y = type(layer).forward(layer, *args, **kwargs)
    except RefusedError as error:
        error.within = error.within or recorder.outermost
        raise
    except IndexReadError:
        raise
    except Exception as error:  # any forward may raise anything on arguments that were guessed
        raise RefusedError(f"{RAISED} {type(error).__name__}: {error}", within=recorder.outermost) from error
    finally:
        after = torch.get_rng_state()
        if recorder.state is not None:
            torch.set_rng_state(before)
    if random.getstate() != drawn or (recorder.state is not None and not torch.equal(after, recorder.state)):
        raise RefusedError("it draws random numbers beside those of dropout, or sets the state of a generator")
    if _state(layer) != state:
        raise RefusedError(CHANGES)
    left, tree_left = tree_flatten((args, kwargs))
    if tree_left != tree or any(a is not b for a, b in zip(given, left, strict=True)):
        raise RefusedError("its forward writes to a list or dict that it is given")
    unasked = _weights_unasked(layer, args, kwargs)
    return Recording(recorder, roots[0], y, unasked, opaque, tuple(roots[:2]) if streams else ())


def turned_round(value: Any) -> Any:
    """A pytree, the first two dimensions of the first tensor in which are swapped."""
    leaves, tree = tree_flatten(value)
    first = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), -1)
    return tree_unflatten([leaf.transpose(0, 1) if i == first else leaf for i, leaf in enumerate(leaves)], tree)


def _weights_unasked(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a forward is told by an argument of its own that nobody asks for attention's weights."""
    bound = inspect.signature(type(layer).forward).bind(layer, *args, **kwargs)
    bound.apply_defaults()
    asked = bound.arguments.get(_ASKS, bound.arguments.get("kwargs", {}).get(_ASKS, True))
    return asked is False or (asked is None and _ASKS in bound.arguments)


def _state(layer: nn.Module) -> Any:
    """What a forward could change: attributes of modules and of what they hold, and tensors by identity and version."""
    seen: set[int] = set()
    return [
        (key, _held(v, seen))
        for module in layer.modules()
        if not _is_ours(module) or hasattr(module, WHOLE)
        for key, v in (*vars(module).items(), *module._buffers.items(), *module._parameters.items())
        if key not in BOOKS and not (hasattr(module, WHOLE) and key in _OF_STAND_INS)
    ]


_PLAIN: Any = (int, float, str, bool, type(None))


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith("ckptfused.")


def _held(value: Any, seen: set[int]) -> Any:
    """A value to compare: plain ones as they are, others by identity, each with what it holds, once."""
    if isinstance(value, _PLAIN):
        return value
    apart = isinstance(value, nn.Module | type | types.ModuleType | types.FunctionType) or _is_ours(value)
    if apart or id(value) in seen:
        return id(value)
    seen.add(id(value))
    named: dict[Any, Any] = {}
    inner: Any = ()
    if isinstance(value, Tensor):
        inner, named = (value._version,), vars(value)
    elif isinstance(value, dict):
        named = dict(dict.items(value))
    elif isinstance(value, list | tuple | set | frozenset | deque):
        inner = value
    elif not isinstance(value, torch.Generator):
        named = {**getattr(value, "__dict__", {}), **{name: getattr(value, name, None) for name in slotted(value)}}
    return id(value), [_held(one, seen) for one in (*inner, *named, *named.values())]
