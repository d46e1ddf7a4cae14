"""The kinds of layers that are derived, and of their calls: each by a proof that is made at the first."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptfused.compat.pytree import TreeSpec, tree_map, tree_unflatten
from ckptfused.compat.transformers import key_sharing
from ckptfused.layer.parts import Reason
from ckptfused.layer.shards import holds_fsdp1, is_flattened
from ckptfused.models.derive.derive import Derivation, Here, derive, refuted_by
from ckptfused.models.derive.flash import runs_flash
from ckptfused.models.derive.layer_state import KNOWN, LayerState
from ckptfused.models.derive.normal_form import DerivedLayer
from ckptfused.models.derive.recording.evaluate import Rest, evaluated, recalled
from ckptfused.models.derive.recording.held import held_value
from ckptfused.models.derive.recording.recorder import Recorded, Value
from ckptfused.models.derive.rules.rotations import says_twice
from ckptfused.models.derive.untouched import untouched
from ckptfused.models.describe.own_forward import IndexReadError
from ckptfused.offload.calls import follow
from ckptfused.ops.numerics import Modes

IN_SHARDS = "its weights are in shards"
"""Why nothing is derived of a layer whose weights FSDP1 holds in flat shards: it may gather them for a call."""
HALVES_DIFFER = "rotary tables whose halves differ"
MOST_CALLS = 256
"""Kinds of calls that are known of one kind of layer: lengths, mostly."""
MOST_FORMS = 64
"""Kinds of calls but for their lengths: those of a layer that is given another number at each step have no end."""
MOST_TRIES = 4
"""Shapes of one form of call at which a layer is read before it is given up; and kinds that one layer may become."""
MOST_CHANGES = 64
"""States of one layer, beside those that it comes back to, after which it is given up."""
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))


class Ready(NamedTuple):
    """A proved call: what a layer's block is, and where among the leaves of its arguments the tensors are."""

    layout: DerivedLayer
    x: int
    outer: tuple[tuple[str, int], ...]
    """Names of what stands outside, as the layout knows them, and their places; -1: the layer holds it."""
    place: int
    leaves: tuple[Any, ...]
    """What the forward returns, its result at `place`; in the place of attention weights None."""
    tree: TreeSpec
    recipes: dict[str, Value]
    """How what has the name of a call is made of the call's leaves and of what the layer holds."""
    returned: Mapping[Value, Recorded]
    """The calls of modules that recipes may stand on."""
    rest: Rest | None = None
    """What stands beside the op."""
    beside: tuple[tuple[str, int], ...] = ()
    """Names and places, as `outer`, of what the rest takes beside what it starts from."""
    why: str = ""
    """Why there is a rest."""
    tables: tuple[tuple[str, tuple[str, str, int]], ...] = ()
    """The names of rotary tables, and how they are read: form, kind and width."""
    streams: tuple[tuple[int, int, int], ...] = ()
    """The places of two streams, which are x side by side, among what is given and what is returned; their tokens."""

    def called(self, modules: _Modules) -> list[nn.Module]:
        """The modules of a layer that are called as such."""
        return [] if self.rest is None else [modules[name.removeprefix("module:")] for name in self.rest.modules]

    def given(self, leaves: list[Any]) -> Tensor:
        """The x that the op takes."""
        if not self.streams:
            return leaves[self.x]  # type: ignore[no-any-return]
        x = torch.cat([leaves[place] for place, _, _ in self.streams], 1)
        follow(x)
        return x

    def result(self, y: Tensor) -> Any:
        """What the forward returns with this result."""
        if self.streams:
            leaves, at = list(self.leaves), 0
            for _, place, tokens in self.streams:
                leaves[place], at = y.narrow(1, at, tokens), at + tokens
            return tree_unflatten(leaves, self.tree)
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


class Seen(NamedTuple):
    """A layer in one of its states."""

    state: LayerState
    kind: _Kind
    modules: _Modules
    flash: bool
    """Whether it asks for FlashAttention, which looks for packed sequences itself."""


class _Modules(dict[str, nn.Module]):
    """The modules of a layer by name."""

    get_submodule = dict.__getitem__


class _Known:
    """The states in which a layer was seen, which it holds itself; copies of it know nothing."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        self.layer = (lambda: None) if layer is None else weakref.ref(layer)
        self.seen: list[Seen] = []
        self.changes = 0

    def __reduce__(self) -> Any:
        return _Known, ()

    def __deepcopy__(self, memo: Any) -> _Known:
        return _Known()


_KINDS: OrderedDict[Hashable, _Kind] = OrderedDict()
_LOCK = threading.RLock()


def seen(layer: nn.Module) -> Seen | Reason:
    """A layer in its present state."""
    known = vars(layer).get(KNOWN)
    if known is not None and known.layer() is layer:
        for one in known.seen:
            if one.state.holds():
                return one  # type: ignore[no-any-return]
    else:
        known = _Known(layer)
    if is_flattened(layer) or holds_fsdp1(layer):
        return Reason(IN_SHARDS)
    if known.changes >= MOST_CHANGES and known.changes % MOST_CHANGES:  # now and then it may have come to rest
        known.changes += 1
        return Reason("what its code reads is another from call to call")
    try:
        state = LayerState(layer)
    except Exception as error:  # of objects that raise when they are looked at, or are nested too deep
        return Reason(f"what it holds cannot be looked at ({type(error).__name__}: {error})")
    with _LOCK:
        kind = _KINDS.setdefault(state.key, _Kind())
        known.changes += all(old.kind is not kind for old in known.seen)  # the same values written anew are no change
        _KINDS.move_to_end(state.key)
        if len(_KINDS) > MOST_CALLS:
            _KINDS.popitem(last=False)
        state.key = None  # it has copies of buffers
        one = Seen(state, kind, _Modules(layer.named_modules()), runs_flash(layer))
        known.seen = [one, *(old for old in known.seen if not old.state.is_over())][:MOST_TRIES]
        vars(layer)[KNOWN] = known
    return one


def forget(layer: nn.Module) -> None:
    """Takes what is remembered of a layer out of it."""
    vars(layer).pop(KNOWN, None)


def held_tensor(modules: _Modules | nn.Module, name: str) -> Tensor:
    """A buffer or tensor that a module holds."""
    path, _, last = name.partition(":")[2].rpartition(".")
    return held_value(modules.get_submodule(path), last)  # type: ignore[no-any-return]


def outer_tensor(made: Ready, modules: Any, leaves: list[Any], name: str, known: dict[Value, Tensor]) -> Tensor:
    """What the layer holds, or computes of that and of arguments; vectors and coefficients anew at each call, for
    they have gradients. known: what was computed so in this call.
    """
    if torch.compiler.is_compiling() or name not in made.recipes:  # there are none while it compiles
        return held_tensor(modules, name)

    def given(root: str) -> Any:
        if root.startswith("module:"):
            return modules.get_submodule(root.removeprefix("module:"))
        return leaves[_place(root)] if root.startswith("arg:") else held_tensor(modules, root)

    recipe, device = made.recipes[name], leaves[made.x].device
    if any(t is not None and t.name == name for one in made.layout.vectors for t in one.made_of):
        return evaluated(recipe, given, device, known, made.returned)
    return recalled(recipe, given, device)


def ready(
    one: Seen, layer: nn.Module, call: tuple[Any, Any], leaves: list[Any], tree: TreeSpec, where: int
) -> Ready | Reason:
    """The proved call of this kind; read and proved now, where it is the first."""
    x, kind = leaves[where], one.kind
    if kind.by_place:
        kind = kind.by_place.setdefault(one.state.places, _Kind(placed=True))
    modes = Modes.now()
    parts: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if vars(leaf) and not one.state.names.isdisjoint(vars(leaf)):
                return Reason("an argument with attributes that its code may read")
            trained = modes.grad and leaf is not x and leaf.requires_grad
            parts.append((type(leaf), leaf.dtype, (leaf.device.type, trained), leaf.shape))
        elif type(leaf) in _PLAIN:
            parts.append((type(leaf), leaf))
        elif type(leaf) is key_sharing():
            parts.append((type(leaf),))
        else:
            return Reason(f"an argument of type {type(leaf).__name__}")
    modes_and_type = modes, torch.get_default_dtype()
    key = (tree, where, modes_and_type, *parts)
    found = kind.calls.get(key)
    if found is None:
        with _LOCK:
            try:
                found = _proved(kind, layer, call, (tree, modes_and_type, _form(parts, x)), leaves, where)
            except IndexReadError:
                kind.by_place[one.state.places] = _Kind(placed=True)
                return ready(one, layer, call, leaves, tree, where)
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
    args, kwargs = tree_map(lambda v: untouched(v) if type(v) is key_sharing() else v, call)
    if form not in kind.forms and len(kind.forms) >= MOST_FORMS:
        return Reason("it is called in more ways than are looked into")
    tried, why = kind.forms.setdefault(form, []), ""
    for made in tried:
        why = made.why
        if made.proof is not None:
            found = refuted_by(made.proof, layer, args, kwargs, placed=kind.placed)
            if isinstance(found, Here):
                return _to_be_called(made._replace(here=found), layer, leaves, where)
            why = found
    if len(tried) >= MOST_TRIES:
        return Reason(why)
    made = derive(layer, args, kwargs, placed=kind.placed)
    tried.append(made)
    return Reason(made.why) if made.proof is None else _to_be_called(made, layer, leaves, where)


def _to_be_called(made: Derivation, layer: nn.Module, leaves: list[Any], where: int) -> Ready | Reason:
    proof = made.proof
    assert proof is not None
    returns = made.here.returns
    assert returns is not None
    if any(type(leaf) not in _PLAIN for leaf in returns.leaves):
        return Reason("it returns what is no tensor beside its result")
    outer = tuple((t.name, _place(t.name)) for t in proof.layout.outer)
    attn = proof.layout.attn
    tables = () if attn is None else (proof.layout.cos, proof.layout.sin)
    read = tuple((t.name, (t.form, *attn.numbers[3:5])) for t in tables if t is not None and attn is not None)
    rest = made.here.rest
    beside = () if rest is None else tuple((name, _place(name)) for name in rest.given)
    here = made.here
    streams = tuple((_place(name), back, leaves[_place(name)].size(1)) for name, back in returns.streams)
    of_call = (made.layout, where, outer, returns.place, returns.leaves, returns.tree, here.recipes, here.returned)
    found = Ready(*of_call, rest, beside, made.why, read, streams)
    for name, how in read:
        i = _place(name)
        if leaves[where].is_meta and name in here.recipes:
            continue  # it is made of what has no data; torch.compile does without such layers
        if not says_twice(leaves[i] if i >= 0 else outer_tensor(found, layer, leaves, name, {}), *how):
            return Reason(HALVES_DIFFER)
    return found


def _place(name: str) -> int:
    return int(name.removeprefix("arg:")) if name.startswith("arg:") else -1
