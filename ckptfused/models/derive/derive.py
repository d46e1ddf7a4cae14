"""From a layer and one of its calls to what it computes: proved at small shapes, then held to the shape at hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ckptfused.compat.pytree import tree_map
from ckptfused.models.derive.copies import PLAIN_READING, Reading, layer_without_data
from ckptfused.models.derive.flash import spelled_out
from ckptfused.models.derive.normal_form import DerivedLayer
from ckptfused.models.derive.opaque import CAST_CALLS, Opaque
from ckptfused.models.derive.prove import Proof, prove
from ckptfused.models.derive.recording.draws import DRAWS
from ckptfused.models.derive.recording.evaluate import NOTHING, Rest, evaluated
from ckptfused.models.derive.recording.held import tensors_held
from ckptfused.models.derive.recording.record import (
    RAISED,
    RETURNED,
    Recording,
    Returns,
    forgotten_afterwards,
    record,
    refuse_objects,
    turned_round,
)
from ckptfused.models.derive.recording.recorder import Recorded, RefusedError, Value
from ckptfused.models.derive.resized import Sizes, are_streams
from ckptfused.models.derive.rules.mask_forms import seen_by_place
from ckptfused.models.derive.structure import attends_first, same_shapes, same_window
from ckptfused.models.derive.walk import CASTS
from ckptfused.models.describe.own_forward import IndexReadError
from ckptfused.ops.numerics import Modes
from ckptfused.simulate.meta_copy import data_behind
from ckptfused.state.undone import without_trace

MOST_OPAQUE = 3
"""Modules of one layer, and calls of its own, that are not followed."""
T = TypeVar("T")


class Here(NamedTuple):
    """What a proof leaves open until the length of a call is known."""

    recipes: dict[str, Value]
    """How the layer computes what the layout takes from outside by the name of a call."""
    window: int
    """How far back a query sees by the layer's own mask; 0: all the way."""
    rest: Rest | None = None
    """What stands beside what is fused."""
    returned: Mapping[Value, Recorded] = NOTHING
    """What the layer's modules return, by their calls: they are called as such, with adapters and all."""
    returns: Returns | None = None
    """What the layer returns in this very call; None before there is one."""


class Derivation(NamedTuple):
    """What was found out about a layer as it is called: a proof, or why there is none."""

    proof: Proof | None
    why: str = ""
    """Why there is none, or why it is of a half."""
    call: Recorded | None = None
    """The first call that does not fit, where it is one call's fault."""
    calls: tuple[Recorded, ...] = ()
    """What was recorded at the first shape of the proof, as far as the result depends on it."""
    here: Here = Here({}, 0)
    """What is so in calls of this size."""

    @property
    def layout(self) -> DerivedLayer:
        """The proved layout, as it is in calls of this size."""
        assert self.proof is not None
        return self.proof.layout._replace(window=self.here.window, seq_first=self.proof.reading.seq_first)


def derive(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], placed: bool = True) -> Derivation:
    """What a layer computes in this call, in its present mode and type. The layer itself does not run, nor change.

    placed: its forward may ask where in the model the layer stands; if not, and it does, **raises** `IndexReadError`.
    **Raises** nothing else: whatever cannot be read, proved, or followed from the proof to this shape is the reason.
    """
    return _alone(lambda: _derived(layer, args, kwargs, placed))


def _derived(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], placed: bool) -> Derivation:
    found, seq_first = _derived_by(PLAIN_READING, layer, args, kwargs, placed)
    if found.why and seq_first:
        args, kwargs = turned_round((args, kwargs))
        turned, _ = _derived_by(Reading(seq_first=True), layer, args, kwargs, placed)
        return found if turned.proof is None else turned
    if found.why == RETURNED.format(2) and are_streams(args, kwargs):
        return _derived_by(Reading(streams=True), layer, args, kwargs, placed)[0]
    return found


def _derived_by(
    reading: Reading, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], placed: bool
) -> tuple[Derivation, bool]:
    """What a layer computes that is read so, or with more of it left as it is, and whether it attends over the first
    dimension of x.
    """
    whole: RefusedError | None = None
    seq_first = False
    while True:
        here = None
        try:
            with _unseen(layer):
                here = _recorded_here(layer, args, kwargs, placed, reading)
                seq_first = seq_first or attends_first(here)
                proof = prove(layer, args, kwargs, placed=placed, reading=reading)
                found = _hold(proof, layer, here)
            break
        except RefusedError as error:
            # The frames where it and its cause were raised hold this one, and so it: a circle with all their tensors.
            error.__traceback__ = error.__cause__ = error.__context__ = None
            whole = whole or error
            taken = here is not None or not str(error).startswith(RAISED)
            more = _also_opaque(layer, reading, error) if taken else None
            if more is None:
                return Derivation(None, str(whole), whole.call, tuple(whole.calls)), seq_first
            reading = more
        except IndexReadError:
            raise
        except Exception as error:  # rules meet what nobody thought of: the layer then runs as it is
            why = f"it cannot be read ({type(error).__name__}: {error})"
            return Derivation(None, str(whole or why)), seq_first
    first = proof.recordings[0]
    calls = tuple(first.before(first.end))
    return Derivation(proof, "" if whole is None else str(whole), calls=calls, here=found), seq_first


def _also_opaque(layer: nn.Module, reading: Reading, error: RefusedError) -> Reading | None:
    """What is not read, with the module in which an error came to light, or the call of the layer's own code; None if
    it is among them, or they are too many.
    """
    modules, calls = reading[:2]
    if error.within:
        modules = {error.within: Opaque(layer.get_submodule(error.within)), **modules}
    elif error.call is not None:
        calls |= {(error.call.op, error.call.place)}
    grown = len(modules) + len(calls)
    more = len(reading.modules) + len(reading.calls) < grown <= MOST_OPAQUE
    return Reading(modules, calls) if more and not (reading.seq_first or reading.streams) else None


@contextmanager
def _unseen(layer: nn.Module) -> Iterator[None]:
    """A context in which copies of a layer run. **Raises** `RefusedError` afterwards where these did something beside
    what they return, which is undone.
    """
    with without_trace(layer) as left:
        yield
    if left:
        raise RefusedError(f"its forward changes {left[0]}, beside what it returns")


def _alone(function: Callable[[], T]) -> T:
    """The result of a function in a thread of its own, where no mode or hook of the caller's is at work. Whether
    gradients and autocast are on is as it is there: a forward may ask.
    """
    made: list[T] = []
    raised: list[BaseException] = []
    modes = Modes.now()

    def run() -> None:
        try:
            with modes.on(), spelled_out(), forgotten_afterwards():
                made.append(function())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="ckptfused-derive")
    thread.start()
    thread.join()
    if raised:
        raise raised.pop()
    return made[0]


def _recorded_here(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], placed: bool, reading: Reading
) -> Recording:
    """The recording of this very call on tensors without data."""
    args, kwargs = tree_map(lambda v: _without_data(v) if isinstance(v, Tensor) else v, (args, kwargs))
    return record(layer_without_data(layer, placed, reading), args, kwargs, wide=False, **reading.of_record)


def refuted_by(
    proof: Proof, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], placed: bool = True
) -> str | Here:
    """Why a proof does not hold of a call of another size, or what is so there where it does: the same calls, sizes
    that follow from those of the proof, and a mask of the layer's own that is causal here too.
    """

    if proof.reading.seq_first:
        args, kwargs = turned_round((args, kwargs))

    def held_to() -> Here:
        with _unseen(layer):
            return _hold(proof, layer, _recorded_here(layer, args, kwargs, placed, proof.reading))

    try:
        return _alone(held_to)
    except RefusedError as error:
        return str(error)
    except IndexReadError:
        raise
    except Exception as error:  # as in `derive`
        return f"it cannot be read ({type(error).__name__}: {error})"


def _hold(proof: Proof, layer: nn.Module, here: Recording) -> Here:
    start = here.x if here.rest is None else here.rest.start
    if proof.tokens not in (0, start.shape[1]):
        raise RefusedError(
            f"it was read at {proof.tokens} tokens, for its forward raises or changes something at others"
        )
    if proof.reading.seq_first and any(half and half.modulated for half in (proof.layout.attn, proof.layout.ffn)):
        raise RefusedError("vectors of each batch element beside an x that is [T, B, C]")
    for v in (here.x, here.y):
        if v.data.dtype != start.data.dtype:
            raise RefusedError(f"it makes {v.data.dtype} of {start.data.dtype}", v.call)
    same_shapes(proof.recordings, here, Sizes(*here.x.shape[:2]))
    types = {torch.float32, torch.float64, start.data.dtype, *(p.dtype for p in layer.parameters())}
    for call in here.between(here.x, here.y):
        if call.op in CASTS and any(v.data.is_floating_point() and v.data.dtype not in types for v in call.values):
            raise RefusedError(f"{call.op} rounds to {call.values[0].data.dtype}", call)
        if call.op in CAST_CALLS and call.modes is not None and call.modes.casts != here.modes.casts:
            raise RefusedError(f"{call.op} under another autocast than the layer's", call)
    (number, index, kind), window = proof.layout.own_mask, 0
    kept = [call.number for call in proof.recordings[0].before(proof.recordings[0].y)]
    tokens = here.x.shape[1]
    if number >= 0 and tokens > 1:  # of one token it hides nothing, or all
        mask = _matching(proof.recordings[0], here, kept.index(number))
        held = {f"buffer:{name}": t for name, t in tensors_held(layer)}
        if any(held[name].requires_grad for name in here.names_behind(mask.values[index]) & held.keys()):
            raise RefusedError("a mask needs a gradient", mask)
        buffers = {name: data_behind(t).cpu() for name, t in held.items()}
        made = evaluated(mask.values[index], buffers.__getitem__, torch.device("cpu"))
        seen = seen_by_place(made, kind, tokens, tokens)
        if seen is None or seen[0] != proof.layout.causal or not same_window(proof.layout.window, seen[1], tokens):
            raise RefusedError(f"its own mask is another one at {tokens} tokens", mask)
        window = seen[1]
    recipes: dict[str, Value] = {}
    for name in (outer.name for outer in proof.layout.outer if outer.name.startswith("call:")):
        place, index = map(int, name.removeprefix("call:").split("."))
        recipes[name] = value = _matching(proof.recordings[0], here, kept.index(place)).values[index]
        for call in here.before(value, whole=True):
            refuse_objects(call)
            if proof.reading.seq_first and here.x in call.inputs:
                raise RefusedError("what stands outside depends on an x that is [T, B, C]", call)
    if here.rest is not None:
        drawn = {call for value in recipes.values() for call in here.before(value) if call.op in DRAWS}
        if drawn & {*here.before(here.rest.end, since=here.rest.start)}:
            raise RefusedError("what is drawn once goes to the op and to what stands beside it")
    return Here(recipes, window, here.rest, here.returned, here.returns)


def _without_data(t: Tensor) -> Tensor:
    return torch.empty_like(t, device="meta").requires_grad_(t.requires_grad)


def _matching(proved: Recording, here: Recording, index: int) -> Recorded:
    """The call of one recording that is that of the other; both have the same calls on which the result depends."""
    from_proof = proved.before(proved.y)
    same = [call for call in from_proof[: index + 1] if call.op == from_proof[index].op]
    place = from_proof[index].place
    nth = sum(call.place == place for call in same)
    matches = [call for call in here.before(here.y) if call.op == from_proof[index].op and call.place == place]
    return matches[nth - 1]
