"""What a function reads and writes beside its arguments: in a replay as the forward found it, afterwards as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
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
        given = reach(arguments) if arguments else Reached()
        scan = self._scan = AttributeScan()
        self._modules = _with_open_books(found.modules)
        if len(self._modules) > MANY:
            scan.holders.append(Plain(self._modules))
        else:
            self._modules = list(_with_hidden(self._modules, scan))
        for value in _objects(given, found):
            scan.instance(value)
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
        self._uncopied.settle()
        few = len(found.tensors) <= _FEW
        self._tensors += [
            TrackedTensor(t, (few and t.nbytes <= STATISTICS) or not is_left_alone(t)) for t in found.tensors
        ]
        for kind in set(map(type, self._modules)):
            generators += drawn_by(kind)
        self._rng_states = RngStates(
            [g for g in generators if not is_default(g) and (random_state or not is_global(g))]
        )

    def may_fail(self) -> bool:
        """Whether the forward may write something of which there is no copy."""
        return self._uncopied.has_buffers() or any(tracked.is_copied_late() for tracked in self._tensors)

    def settle(self) -> bool:
        """After the forward: sees what it wrote, and returns whether a replay can have that as it was."""
        for tracked in self._tensors:
            tracked.settle()
        self._tensors += self._uncopied.settle()
        self._rng_states.settle()
        return not any(tracked.written and tracked.is_copied_late() for tracked in self._tensors)

    @contextmanager
    def replayed(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """What saves a tensor in the replay has to ask what it gets. **Raises** `RuntimeError` within, where the replay
        reads what was changed since.
        """
        for tracked in self._tensors:
            if tracked.written and tracked.found is None:
                raise RuntimeError(
                    f"ckptfused.checkpoint: the function itself changes {self._name(tracked)} in place, and no copy "
                    "was made of it as it was: expected a function that writes its arguments, small buffers, or "
                    "nothing. Pass it as an argument, or change it outside"
                )
        tensors = self._tensors + self._uncopied.others()
        instead, swapped = shown_and_swapped(tensors)
        changed = {
            storage_of(tracked.tensor): f"{self._name(tracked)} was changed in place between forward and backward: "
            f"expected version {tracked.version}, got version {write_count(tracked.tensor)}"
            for tracked in tensors
            if tracked.changed()
        }
        reads = Reads(changed) if changed else None
        filled = {storage_of(tracked.tensor) for tracked in swapped}

        def saved(t: Tensor) -> Tensor:
            if reads is not None:
                reads.check(t)
            return t.clone() if storage_of(t) in filled else t

        before: list[tuple[Any, Any]] = []
        drawn: list[tuple[Any, Any]] = []
        try:
            before = [(holder, holder.put(holder.found)) for holder in self._scan.changed_since()]
            drawn = self._rng_states.rewind()
            if not (instead or swapped or changed):
                yield itself
                return
            with with_old_values(swapped), shown(instead), nullcontext() if reads is None else reads:
                yield saved
        finally:
            for holder, content in reversed(before):
                holder.put(content)
            self._rng_states.forward(drawn)

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


def itself(t: Tensor) -> Tensor:
    """What a replay saves in the place of a tensor where nothing was changed since the forward."""
    return t


def _objects(given: Reached, found: Reached) -> Iterable[Any]:
    """Objects among the arguments, and those that the function is, is bound to, or has in its closure or defaults."""
    near = (value for value in found.near if not (isinstance(value, CONTAINERS) or of_torch(type(value))))
    return {id(value): value for value in (*given.objects, *(v for v in near if not is_shared(v)))}.values()


def _with_hidden(modules: list[nn.Module], scan: AttributeScan) -> Iterator[nn.Module]:
    """The modules, and those in containers that they hold, as the scan sees them."""
    seen: set[int] = set()
    while modules:
        for module in modules:
            if id(module) not in seen:
                seen.add(id(module))
                scan.class_of(module)
                scan.attributes(vars(module))
                yield module
        hidden, scan.hidden = scan.hidden, []
        modules = _with_open_books([module for root in hidden if id(root) not in seen for module in below(root)])


def _with_open_books(modules: list[nn.Module]) -> list[nn.Module]:
    """Without FSDP1's wrappers, scripted modules, and lazy ones before their first call."""
    wrapper = fsdp1()
    kinds: set[Any] = set(map(type, modules))
    books = {kind: found for kind in kinds if any(found := _books(kind, wrapper))}
    if not books:
        return modules

    def kept(module: Any) -> bool:
        always, while_lazy = books.get(type(module), (False, False))
        return always or (while_lazy and module.has_uninitialized_params())

    return [module for module in modules if not kept(module)]


@functools.lru_cache(maxsize=4096)
def _books(kind: Any, wrapper: type | None) -> tuple[bool, bool]:
    """Whether a class of modules keeps its own books: always, and before the first call."""
    theirs = issubclass(kind, (torch.jit.ScriptModule, *filter(None, [wrapper])))
    return theirs, issubclass(kind, LazyModuleMixin)
