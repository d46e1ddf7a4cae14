"""What a function reads and writes beside its arguments: in a replay as the forward found it, afterwards as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from ckptfused.compat.torch_distributed import fsdp1, is_managed
from ckptfused.recompute.attribute_scan import AttributeScan, is_shared
from ckptfused.recompute.copy_on_write import storage_of, write_count
from ckptfused.recompute.per_thread_tensors import shown
from ckptfused.recompute.tracked_tensors import (
    STATISTICS,
    Reads,
    TrackedTensor,
    is_left_alone,
    shown_and_swapped,
    with_old_values,
)
from ckptfused.recompute.uncopied_tensors import UncopiedTensors
from ckptfused.state.bindings import Bindings
from ckptfused.state.containers import CONTAINERS, Plain
from ckptfused.state.generators import RngStates, is_default, is_global
from ckptfused.state.reach import Reached, below, drawn_by, of_torch, reach

# Of more modules than these, each call looks at plain attributes alone, beside children, parameters and buffers.
MANY = 128
_NOTHING = Reached()
# So many tensors of closures are copied at each call; of more, those that no forward was seen to leave alone.
_FEW = 64


class ReplayState:
    """Taken before the forward; `settle` after it; each replay runs within `replayed`.

    - Attributes of modules, of objects among the arguments and of those that the function is bound to, and what its
      names stand for, are in the replay what the forward found, lists, dicts and sets in them too: modes and rates,
      counters, hooks, caches. Afterwards they are what they were before it.
    - Buffers that the forward wrote or replaced are, too: in the replay's thread the modules have others in their
      place, so that the module's own stay what they are, for other threads as well.
    - Other tensors that the forward wrote in place have their old values during the replay.
    - Generators draw the same again, and go on afterwards where they were.
    - A parameter, a buffer or another tensor that was changed in place since the forward raises where the replay reads
      it.

    Found: what `reach` finds.
    """

    def __init__(self, function: Callable[..., Any], arguments: list[Any], random_state: bool) -> None:
        found = reach([function, *arguments])
        given = reach(arguments) if arguments else _NOTHING
        scan = self._scan = AttributeScan()
        self._modules = _with_open_books(found.modules)
        if len(self._modules) > MANY:
            scan.holders.append(Plain(self._modules))
        else:
            self._modules = _with_hidden(self._modules, scan)
        for value in _objects(given, found) if given.objects or found.near else ():
            scan.instance(value)
        for kind in found.classes:
            scan.class_of(kind)
        for container in (*given.containers, *found.near):
            scan.look_at(container)
        scan.holders += map(Bindings, found.functions)
        self._uncopied = UncopiedTensors()
        self._tensors = scan.tensors
        generators = found.generators + scan.generators
        for module in self._modules:
            held = vars(module)
            parameters, buffers = held["_parameters"], held["_buffers"]
            if parameters and not is_managed(held):
                self._uncopied.add(module, parameters)
            for name, t in self._uncopied.take_buffers(module, buffers) if buffers else ():
                self._tensors.append(TrackedTensor(t, True, (module, "_buffers", name)))
        self._uncopied.begin()
        few = len(found.tensors) <= _FEW
        for t in found.tensors:
            self._tensors.append(TrackedTensor(t, (few and t.nbytes <= STATISTICS) or not is_left_alone(t)))
        for kind in set(map(type, self._modules)):
            generators += drawn_by(kind)
        generators = [g for g in generators if not is_default(g) and (random_state or not is_global(g))]
        self._rng_states = RngStates(generators) if generators else None
        self._settled = False

    def may_fail(self) -> bool:
        """Whether the forward may write something of which there is no copy."""
        return self._uncopied.may_be_written() or _any_copied_late(self._tensors)

    def settle(self) -> bool:
        """After the forward: sees what it wrote, and returns whether a replay can have that as it was."""
        self._settled = True
        for tracked in self._tensors:
            tracked.settle()
        self._tensors += self._uncopied.settle()
        if self._rng_states is not None:
            self._rng_states.settle()
        return not _any_copied_late([tracked for tracked in self._tensors if tracked.written])

    def replayed(self) -> AbstractContextManager[Callable[[Tensor], Tensor]]:
        """What saves a tensor in the replay has to ask what it gets. **Raises** `RuntimeError` within, where the replay
        reads what was changed since.
        """
        return _Replay(self)

    def rewind(self) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Has attributes and generators be as the forward found them, and returns what they were, for `_Replay`."""
        before = [(holder, holder.put(holder.found)) for holder in self._scan.changed_since()]
        return before, [] if self._rng_states is None else self._rng_states.rewind()

    def old_values(self) -> tuple[AbstractContextManager[None] | None, Callable[[Tensor], Tensor]]:
        """A context in which tensors have the values that the forward found, None where all have; and what is saved in
        it in the place of a tensor."""
        if not self._settled:  # a backward within the forward
            for tracked in self._tensors:
                tracked.look()
            self._tensors += self._uncopied.written()
        for tracked in self._tensors:
            if tracked.written and tracked.found is None:
                raise RuntimeError(
                    f"ckptfused.checkpoint: the function itself changes {self._name(tracked)} in place, and no copy "
                    "was made of it as it was: expected a function that writes its arguments, small buffers, or "
                    "nothing. Pass it as an argument, or change it outside"
                )
        tensors = self._tensors + self._uncopied.others()
        made = [(module, name) for module, name in self._uncopied.absent if module._buffers.get(name) is not None]
        if not tensors and not made:
            return None, itself
        instead, swapped = shown_and_swapped(tensors)
        for module, name in made:
            instead[module, "_buffers"][name] = None
        changed = {
            storage_of(tracked.tensor): f"{self._name(tracked)} was changed in place between forward and backward: "
            f"expected version {tracked.version}, got version {write_count(tracked.tensor)}"
            for tracked in tensors
            if tracked.changed()
        }
        if swapped or changed:
            reads = Reads(changed) if changed else None
            return _old_values(instead, swapped, reads), _saved(swapped, reads)
        return shown(instead) if instead else None, itself

    def _name(self, tracked: TrackedTensor) -> str:
        kind = "a tensor"
        if tracked.place is not None:
            kind = "parameter" if tracked.place[1] == "_parameters" else "buffer"
            for module in self._modules:  # the outermost first
                tensors = module.named_parameters() if kind == "parameter" else module.named_buffers()
                for name, t in tensors:
                    if t is tracked.tensor:
                        return f"{kind} {name!r} of {type(module).__name__}"
            kind = f"{kind} {tracked.place[2]!r} of {type(tracked.place[0]).__name__}"
        return f"{kind} of shape {list(tracked.tensor.shape)}"


class _Replay:
    """The context of a replay."""

    __slots__ = ("_before", "_drawn", "_state", "_values")

    def __init__(self, state: ReplayState) -> None:
        self._state = state
        self._before: list[tuple[Any, Any]] = []
        self._drawn: list[tuple[Any, Any]] = []

    def __enter__(self) -> Callable[[Tensor], Tensor]:
        self._values, saved = self._state.old_values()
        try:
            self._before, self._drawn = self._state.rewind()
            if self._values is not None:
                self._values.__enter__()
            return saved
        except BaseException:
            self._end()
            raise

    def __exit__(self, *exception: Any) -> None:
        try:
            if self._values is not None:
                self._values.__exit__(*exception)
        finally:
            self._end()

    def _end(self) -> None:
        for holder, content in reversed(self._before):
            holder.put(content)
        if self._drawn:
            RngStates.forward(self._drawn)


@contextmanager
def _old_values(
    instead: dict[tuple[nn.Module, str], dict[str, Any]], swapped: list[TrackedTensor], reads: Reads | None
) -> Iterator[None]:
    with with_old_values(swapped), shown(instead), nullcontext() if reads is None else reads:
        yield


def _saved(swapped: list[TrackedTensor], reads: Reads | None) -> Callable[[Tensor], Tensor]:
    filled = {storage_of(tracked.tensor) for tracked in swapped}

    def saved(t: Tensor) -> Tensor:
        if reads is not None:
            reads.check(t)
        return t.clone() if storage_of(t) in filled else t

    return saved


def itself(t: Tensor) -> Tensor:
    """What a replay saves in the place of a tensor where nothing was changed since the forward."""
    return t


def _objects(given: Reached, found: Reached) -> Iterable[Any]:
    """Objects among the arguments, and those that the function is, is bound to, or has in its closure or defaults."""
    near = (value for value in found.near if not (isinstance(value, CONTAINERS) or of_torch(type(value))))
    return {id(value): value for value in (*given.objects, *(v for v in near if not is_shared(v)))}.values()


def _any_copied_late(tensors: list[TrackedTensor]) -> bool:
    return bool(tensors) and any(tracked.is_copied_late() for tracked in tensors)


def _with_hidden(modules: list[nn.Module], scan: AttributeScan) -> list[nn.Module]:
    """The modules, and those in containers that they hold, which the scan sees."""
    for module in modules:
        scan.class_of(module)
        scan.attributes(vars(module))
    found = {id(module): module for module in modules} if scan.hidden else {}
    while scan.hidden:
        hidden, scan.hidden = scan.hidden, []
        for module in _with_open_books([module for root in hidden if id(root) not in found for module in below(root)]):
            if id(module) not in found:
                found[id(module)] = module
                scan.class_of(module)
                scan.attributes(vars(module))
    return [*found.values()] or modules


def _with_open_books(modules: list[nn.Module]) -> list[nn.Module]:
    """Without FSDP1's wrappers, scripted modules, and lazy ones before their first call."""
    always, while_lazy = _books(frozenset(map(type, modules)), fsdp1())
    if not (always or while_lazy):
        return modules

    def kept(module: Any) -> bool:
        return type(module) in always or (type(module) in while_lazy and module.has_uninitialized_params())

    return [module for module in modules if not kept(module)]


@functools.lru_cache(maxsize=4096)
def _books(kinds: frozenset[Any], wrapper: type | None) -> tuple[list[Any], list[Any]]:
    """The classes of modules that keep their own books: always, and before the first call."""
    theirs = (torch.jit.ScriptModule, *filter(None, [wrapper]))
    return [kind for kind in kinds if issubclass(kind, theirs)], [k for k in kinds if issubclass(k, LazyModuleMixin)]
