"""What a function reads and writes beside its arguments: in a replay as the forward found it, afterwards as it was."""

from __future__ import annotations

import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from ckptfused.generic.copies import storage_of, version
from ckptfused.generic.reach import CONTAINERS, reach
from ckptfused.generic.views import shown
from ckptfused.generic.watched import STATISTICS, Reads, Watched, known, shown_and_swapped, with_old_values

# Of more modules than these, each call looks at modes and rates alone, beside parameters and buffers.
MANY = 128
# So many tensors of closures are copied at each call; of more, those that no forward was seen to leave alone.
_FEW = 64
_SHOWN = ("_parameters", "_buffers")
# A module in which FSDP1 puts views of its flat parameters, as attributes, whenever these are whole.
_MANAGED = "_is_fsdp_managed_module"


class State:
    """Taken before the forward; `settle` after it; each replay runs within `replayed`.

    - Attributes of modules, and of objects among the arguments, are in the replay what the forward found, lists, dicts
      and sets in them too: modes and rates, counters, hooks, caches. Afterwards they are what they were before it.
    - Buffers that the forward wrote or replaced are, too: in the replay's thread the modules have others in their
      place, so that the module's own stay what they are, for other threads as well.
    - Other tensors that the forward wrote in place have their old values during the replay.
    - Generators draw the same again, and go on afterwards where they were.
    - A parameter, a buffer or another tensor that was changed in place since the forward raises where the replay reads
      it.

    Found: what `reach` finds.
    """

    def __init__(self, function: Callable[..., Any], arguments: list[Any]) -> None:
        found, given = reach([function, *arguments]), reach(arguments)
        self._modules = [module for module in found.modules if not _keeps_its_own_books(module)]
        self._holders: list[_Holder] = []
        self._tensors: list[Watched] = []
        generators = found.generators
        for module in self._modules:
            held, managed = vars(module), getattr(module, _MANAGED, False)
            if len(found.modules) > MANY:
                self._holders.append(_Holder(held, attributes=True, names=_rates(module)))
            else:
                self._holders.append(_Holder(held, attributes=True))
                for name, value in held.items():
                    if type(value) in CONTAINERS and name not in _SHOWN:
                        self._holders.append(_Holder(value))
                    elif isinstance(value, Tensor) and not managed and not _has_graph(value):
                        self._tensors.append(Watched(value, True))
                    elif isinstance(value, torch.Generator):
                        generators.append(value)
            for place in () if managed else _SHOWN:
                for name, t in held[place].items():
                    if t is not None:
                        self._tensors.append(Watched(t, place == "_buffers", (module, place, name)))
        self._holders += [_Holder(vars(value), attributes=True) for value in given.objects]
        self._holders += [_Holder(value) for value in given.containers]
        few = len(found.tensors) <= _FEW
        self._tensors += [Watched(t, (few and t.nbytes <= STATISTICS) or not known(t)) for t in found.tensors]
        self._generators = [(g, g.get_state()) for g in generators if not _is_default(g)]

    def settle(self) -> None:
        """After the forward: sees what it wrote."""
        for watched in self._tensors:
            watched.settle()

    @contextmanager
    def replayed(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """What saves a tensor in the replay has to ask what it gets. **Raises** `RuntimeError` within, where the replay
        reads what was changed since.
        """
        for watched in self._tensors:
            if watched.written and watched.found is None:
                raise RuntimeError(
                    f"ckptfused.checkpoint: the function itself changes {self._name(watched)} in place, and no copy "
                    "was made of it as it was: expected a function that writes its arguments, small buffers, or "
                    "nothing. Pass it as an argument, or change it outside"
                )
        instead, swapped = shown_and_swapped(self._tensors)
        reads = Reads(
            {
                storage_of(watched.tensor): f"{self._name(watched)} was changed in place between forward and backward: "
                f"expected version {watched.version}, got version {version(watched.tensor)}"
                for watched in self._tensors
                if watched.changed()
            }
        )
        filled = {storage_of(watched.tensor) for watched in swapped}

        def saved(t: Tensor) -> Tensor:
            reads.check(t)
            return t.clone() if filled and storage_of(t) in filled else t

        drawn = [(g, g.get_state()) for g, _ in self._generators]
        before: list[tuple[_Holder, Any]] = []
        try:
            before = [(holder, holder.put(holder.found)) for holder in self._holders]
            for g, found in self._generators:
                g.set_state(found)
            with with_old_values(swapped), shown(instead), reads if reads.storages else nullcontext():
                yield saved
        finally:
            for holder, content in before:
                holder.put(content)
            for g, now in drawn:
                g.set_state(now)

    def _name(self, watched: Watched) -> str:
        kind = "a tensor"
        if watched.place is not None:
            kind = "parameter" if watched.place[1] == "_parameters" else "buffer"
            for module in self._modules:  # the outermost first
                tensors = module.named_parameters() if kind == "parameter" else module.named_buffers()
                for name, t in tensors:
                    if t is watched.tensor:
                        return f"{kind} {name!r} of {type(module).__name__}"
            kind = f"{kind} {watched.place[2]!r} of {type(watched.place[0]).__name__}"
        return f"{kind} of shape {list(watched.tensor.shape)}"


class _Holder:
    """A dict, list, set or deque, or attributes of an object (all, or those named), with what the forward found."""

    __slots__ = ("attributes", "found", "held", "names")

    def __init__(self, held: Any, attributes: bool = False, names: tuple[str, ...] | None = None) -> None:
        self.held = held
        self.attributes = attributes
        self.names = names
        self.found = self.now() if held else _EMPTY
        # Values are all that a replay needs; a graph would hold the one of the call before, and that the next.
        values: Any = self.found.items() if isinstance(self.found, dict) else enumerate(self.found)
        graphs = [(key, value) for key, value in values if isinstance(value, Tensor) and _has_graph(value)]
        if not isinstance(self.found, set) and not (attributes and held.get(_MANAGED)):
            for key, value in graphs:
                self.found[key] = value.detach().requires_grad_()

    def now(self) -> Any:
        """What it holds, as one of its own kind."""
        if self.names is not None:
            return {name: self.held[name] for name in self.names if name in self.held}
        content = self.held.copy()
        if self.attributes:
            for name in _SHOWN:
                content.pop(name, None)
        return content

    def put(self, content: Any) -> Any:
        """Has it hold that, and returns what it held; touches nothing where these are the same."""
        held, before = self.held, self.now()
        if _same(before, content):
            return before
        if self.attributes:
            for name in before.keys() | content.keys():
                old, new = before.get(name, _EMPTY), content.get(name, _EMPTY)
                views = before.get(_MANAGED) and (isinstance(old, Tensor) or isinstance(new, Tensor))
                if old is new or views or name.startswith("ds_"):  # DeepSpeed keeps its books itself
                    continue
                if new is _EMPTY:
                    del held[name]
                else:
                    held[name] = new
            return before
        held.clear()
        if isinstance(held, (list, deque)):
            held.extend(content)
        else:
            held.update(content)
        return before


_EMPTY: dict[str, Any] = {}


def _has_graph(t: Tensor) -> bool:
    try:
        return not t.is_leaf
    except RuntimeError:  # a view of FSDP1's flat parameters that is out of date
        return False


def _same(a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return False
    if isinstance(a, set):
        return bool(a == b)
    return all(map(operator.is_, a, b)) and (not isinstance(a, dict) or all(map(operator.is_, a.values(), b.values())))


_names: dict[tuple[type, int], tuple[str, ...]] = {}


def _rates(module: nn.Module) -> tuple[str, ...]:
    """The names of its modes and rates."""
    key = (type(module), len(vars(module)))
    if key not in _names:
        _names[key] = tuple(name for name, value in vars(module).items() if type(value) in (bool, float))
    return _names[key]


def _keeps_its_own_books(module: nn.Module) -> bool:
    """Whether this is FSDP1's wrapper, a scripted module, or a lazy one before its first call."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        return True
    lazy = isinstance(module, LazyModuleMixin) and module.has_uninitialized_params()  # type: ignore[misc]
    return lazy or isinstance(module, torch.jit.ScriptModule)


def _is_default(g: torch.Generator) -> bool:
    """Whether PyTorch's own checkpoint replays this generator."""
    return g is torch.default_generator or any(g is other for other in torch.cuda.default_generators)
