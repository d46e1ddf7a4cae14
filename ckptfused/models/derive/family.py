"""Layers that were derived, as a family: each call by a proof for layers and calls of its kind, made at the first."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptfused.checks import autocast_enabled, is_dtensor
from ckptfused.compat.pytree import TreeSpec, tree_flatten, tree_unflatten
from ckptfused.layer.parts import Reason
from ckptfused.layer.sdpa import under_foreign_mode
from ckptfused.layer.shards import holds_fsdp1, is_flattened
from ckptfused.layer.spec_text import Mode
from ckptfused.models.caches import left_empty
from ckptfused.models.derive.derive import Derivation, derive, hold
from ckptfused.models.derive.normal_form import Layout
from ckptfused.models.derive.outside import recalled
from ckptfused.models.derive.recorder import Value
from ckptfused.models.derive.state import KNOWN, State
from ckptfused.models.describe.saved_bytes import IndexReadError
from ckptfused.models.family import FAMILIES, Family, Outcome, family_of, fused_call, register
from ckptfused.models.hugging_face import collecting
from ckptfused.offload import follow
from ckptfused.ops.call import Call
from ckptfused.spec import BlockSpec

IN_SHARDS = "its weights are in shards"
"""Why nothing is derived of a layer whose weights are not whole: FSDP may gather them for a call."""
MOST_CALLS = 256
"""Kinds of calls that are known of one kind of layer: lengths, mostly."""
MOST_TRIES = 4
"""Shapes of one form of call at which a layer is read before it is given up; and kinds that one layer may become."""
MOST_CHANGES = 64
"""States of one layer, beside those that it comes back to, after which it is given up."""
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))


class Ready(NamedTuple):
    """A proved call: what a layer's block is, and where among the leaves of its arguments the tensors are."""

    layout: Layout
    x: int
    outer: tuple[tuple[str, int], ...]
    """Names of what stands outside, as the layout knows them, and their places; -1: the layer holds it."""
    place: int
    leaves: tuple[Any, ...]
    """What the forward returns, its result at `place`; in the place of attention weights None."""
    tree: TreeSpec
    recipes: dict[str, Value]
    """How what has the name of a call is made of the call's leaves and of what the layer holds."""

    def result(self, y: Tensor) -> Any:
        """What the forward returns with this result."""
        if len(self.leaves) == 1 and self.tree.is_leaf():
            return y
        return tree_unflatten([*self.leaves[: self.place], y, *self.leaves[self.place + 1 :]], self.tree)


class _Kind:
    """Layers of one kind: what was proved of their calls."""

    def __init__(self, placed: bool = False) -> None:
        self.placed = placed
        """Whether they stand at one place in their model, for which their code asks."""
        self.by_place: dict[Hashable, _Kind] = {}
        self.forms: dict[Hashable, list[Derivation]] = {}
        self.calls: OrderedDict[Hashable, Ready | Reason] = OrderedDict()


class _Seen(NamedTuple):
    """A layer in one of its states."""

    state: State
    kind: _Kind
    modules: _Modules


class _Modules(dict[str, nn.Module]):
    """The modules of a layer by name."""

    get_submodule = dict.__getitem__


class _Known:
    """The states in which a layer was seen, which it holds itself; copies of it know nothing."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        self.layer = (lambda: None) if layer is None else weakref.ref(layer)
        self.seen: list[_Seen] = []
        self.changes = 0

    def __reduce__(self) -> Any:
        return _Known, ()

    def __deepcopy__(self, memo: Any) -> _Known:
        return _Known()


_KINDS: OrderedDict[Hashable, _Kind] = OrderedDict()
_LOCK = threading.RLock()


class Derived(Family):
    """Layers that nobody wrote an adapter for."""

    name = "derived"

    def as_read(self, layer: Any) -> bool:
        return True

    def run(self, layer: Any, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return Reason("torch.compile cannot look into how a derived layer is read")
        if collecting(layer):
            return Reason("attention weights or router logits are asked for", original=True)
        if under_foreign_mode():
            return Reason("a TorchFunctionMode may replace what the layer calls")
        given = left_empty(layer, type(layer).forward, args, kwargs)
        if given is None or (given[0] is not args and not torch.is_grad_enabled()):
            return Reason("a key/value cache is in use", original=True)
        found = self.call(layer, mode, *given)
        if isinstance(found, Reason):
            return found
        ready, call = found
        follow(call.x)
        return ready.result(call.run())

    def refuse_original(self, layer: Any, why: str) -> None:
        if (family := family_of(layer)) is not None:
            family.refuse_original(layer, why)

    def call(
        self, layer: nn.Module, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any], sharded: bool = False
    ) -> tuple[Ready, Call] | Reason:
        """The op call of a layer that is called so, and what it returns. sharded: as `layer.build_call`."""
        leaves, tree = tree_flatten((args, kwargs))
        where = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), None)
        if where is None or leaves[where].dim() != 3 or leaves[where].size(1) < 2:
            return Reason("the layer is not called with x [B, T, C] of two tokens or more")
        seen = _seen(layer)
        if isinstance(seen, Reason):
            return seen
        if (why := seen.state.watched()) is not None or seen.state.why:
            return why or Reason(seen.state.why)
        ready = _ready(seen, layer, (args, kwargs), leaves, tree, where)
        if isinstance(ready, Reason):
            return ready
        held: Any = seen.modules
        outer = {name: leaves[i] if i >= 0 else _outer(ready, held, leaves, name) for name, i in ready.outer}
        inputs = ready.layout.inputs(leaves[ready.x], outer)
        call = fused_call(ready.layout.parts(held), inputs, mode, sharded)
        return call if isinstance(call, Reason) else (ready, call)

    def outcome_of(self, layer: nn.Module, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What will become of calls like this one: an `Outcome` or a `Reason`. The layer remembers nothing of it."""
        found = self.call(layer, mode, args, kwargs, sharded=True)
        forget(layer)
        return found if isinstance(found, Reason) else Outcome((BlockSpec.parse(found[1].text),))


DERIVED = Derived()
if DERIVED.name not in FAMILIES:
    register(DERIVED)


def _seen(layer: nn.Module) -> _Seen | Reason:
    """A layer in its present state."""
    known = vars(layer).get(KNOWN)
    if known is not None and known.layer() is layer:
        for one in known.seen:
            if one.state.holds():
                return one  # type: ignore[no-any-return]
    else:
        known = _Known(layer)
    if is_flattened(layer) or holds_fsdp1(layer) or any(map(is_dtensor, layer.parameters())):
        return Reason(IN_SHARDS)
    if known.changes >= MOST_CHANGES:
        return Reason("what its code reads is another from call to call")
    known.changes += 1
    state = State(layer)
    with _LOCK:
        kind = _KINDS.setdefault(state.key, _Kind())
        _KINDS.move_to_end(state.key)
        if len(_KINDS) > MOST_CALLS:
            _KINDS.popitem(last=False)
        state.key = None  # it has copies of buffers
        one = _Seen(state, kind, _Modules(layer.named_modules()))
        known.seen = [one, *known.seen][:MOST_TRIES]
        vars(layer)[KNOWN] = known
    return one


def forget(layer: nn.Module) -> None:
    """Takes what is remembered of a layer out of it."""
    vars(layer).pop(KNOWN, None)


def _held(modules: Any, name: str) -> Tensor:
    """A buffer or tensor that a module holds."""
    path, _, last = name.removeprefix("buffer:").rpartition(".")
    return getattr(modules[path], last)  # type: ignore[no-any-return]


def _outer(ready: Ready, modules: Any, leaves: list[Any], name: str) -> Tensor:
    """What the layer holds, or computes of that and of arguments."""
    if name not in ready.recipes:
        return _held(modules, name)
    given = lambda root: leaves[_place(root)] if root.startswith("arg:") else _held(modules, root)  # noqa: E731
    return recalled(ready.recipes[name], given, leaves[ready.x].device)


def _ready(
    seen: _Seen, layer: nn.Module, call: tuple[Any, Any], leaves: list[Any], tree: TreeSpec, where: int
) -> Ready | Reason:
    """The proved call of this kind; read and proved now, where it is the first."""
    x, kind = leaves[where], seen.kind
    if kind.by_place:
        kind = kind.by_place.setdefault(seen.state.places, _Kind(placed=True))
    modes = torch.is_grad_enabled(), autocast_enabled(x)
    parts: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            parts.append((type(leaf), leaf.dtype, leaf.device.type, leaf.shape))
        elif type(leaf) in _PLAIN:
            parts.append((type(leaf), leaf))
        else:
            return Reason(f"an argument of type {type(leaf).__name__}")
    key = (tree, where, modes, *parts)
    found = kind.calls.get(key)
    if found is None:
        with _LOCK:
            try:
                found = _proved(kind, layer, call, (tree, modes, _form(parts, x)), leaves, where)
            except IndexReadError:
                kind.by_place[seen.state.places] = _Kind(placed=True)
                return _ready(seen, layer, call, leaves, tree, where)
            kind.calls[key] = found
            if len(kind.calls) > MOST_CALLS:
                kind.calls.popitem(last=False)
    return found


def _form(parts: list[Any], x: Tensor) -> Hashable:
    """The kind of a call but for its length: types, dimensions, and which of them are T or go with B."""
    rows, tokens = x.size(0), x.size(1)
    return tuple(
        (*part[:3], tuple((n in (1, rows), n == tokens) for n in part[3])) if len(part) == 4 else part for part in parts
    )


def _proved(kind: _Kind, layer: nn.Module, call: Any, form: Hashable, leaves: list[Any], where: int) -> Ready | Reason:
    """A call that is new: held to what was proved of its form, or else proved."""
    args, kwargs = call
    tried = kind.forms.setdefault(form, [])
    for made in tried:
        if made.proof is not None:
            found = hold(made.proof, layer, args, kwargs, placed=kind.placed)
            if isinstance(found, str):
                return Reason(found)
            return _to_be_called(made._replace(here=found), leaves, where)
    if len(tried) >= MOST_TRIES:
        return Reason(tried[-1].why)
    made = derive(layer, args, kwargs, placed=kind.placed)
    tried.append(made)
    return Reason(made.why) if made.proof is None else _to_be_called(made, leaves, where)


def _to_be_called(made: Derivation, leaves: list[Any], where: int) -> Ready | Reason:
    proof = made.proof
    assert proof is not None
    recording = proof.recordings[0]
    if any(type(leaf) not in _PLAIN for leaf in recording.leaves):
        return Reason("it returns what is no tensor beside its result")
    outer = tuple((t.name, _place(t.name)) for t in proof.layout.outer)
    for name, i in outer:
        t = leaves[i] if i >= 0 else None
        forms = {t.form for t in (proof.layout.cos, proof.layout.sin) if t is not None and t.name == name}
        if t is not None and any(form.endswith("half") for form in forms) and not _in_halves(t):
            return Reason("rotary tables whose halves differ")
    leaves_of = tuple(recording.leaves)
    return Ready(made.layout, where, outer, recording.place, leaves_of, recording.tree, made.here.recipes)


def _place(name: str) -> int:
    return int(name.removeprefix("arg:")) if name.startswith("arg:") else -1


def _in_halves(t: Tensor) -> bool:
    half = t.size(-1) // 2
    return t.is_meta or torch.equal(t[..., :half], t[..., half:])
