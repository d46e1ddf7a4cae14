"""What a function reads and writes beside its arguments: in a replay as the forward found it, afterwards as it was."""

from __future__ import annotations

import operator
import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ckptfused.generic.copies import is_plain, unseen, version
from ckptfused.generic.reach import CONTAINERS, reach
from ckptfused.generic.views import shown

# Above this a tensor is copied only until a forward was seen that leaves it alone.
_SMALL = 1 << 20
_STATISTICS = 1 << 16
_unwritten: dict[int, weakref.ref[Tensor]] = {}  # by identity
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
        found, given = reach((function, *arguments)), reach(tuple(arguments))
        generators = found.generators
        self._modules = found.modules
        self._holders: list[_Holder] = []
        self._tensors: list[_Watched] = []
        for module in found.modules:
            if _shards(module):
                continue
            held, managed = vars(module), getattr(module, _MANAGED, False)
            for name, value in held.items():
                if type(value) in CONTAINERS and name not in _SHOWN:
                    self._holders.append(_Holder(value))
                elif isinstance(value, Tensor) and not managed:
                    self._tensors.append(_Watched(value, _copied(value)))
                elif isinstance(value, torch.Generator):
                    generators.append(value)
            self._holders.append(_Holder(held, attributes=True))
            for place in () if managed else _SHOWN:
                for name, t in held[place].items():
                    if t is not None:
                        copy = place == "_buffers" and _copied(t)
                        self._tensors.append(_Watched(t, copy, (module, place, name)))
        self._holders += [_Holder(vars(value), attributes=True) for value in given.objects]
        self._holders += [_Holder(value) for value in given.containers]
        self._tensors += [_Watched(t, not _known(t) and _copied(t)) for t in found.tensors]
        self._generators = [(g, g.get_state()) for g in generators if not _is_default(g)]

    def settle(self) -> None:
        """After the forward: sees what it wrote."""
        for watched in self._tensors:
            watched.settle()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """**Raises** `RuntimeError` within, where the replay reads what was changed since."""
        instead: dict[tuple[nn.Module, str], dict[str, Any]] = defaultdict(dict)
        swapped: list[_Watched] = []
        changed: dict[int, str] = {}
        for watched in self._tensors:
            if watched.written and watched.found is None:
                raise RuntimeError(
                    f"ckptfused.checkpoint: the function itself changes {self._name(watched)} in place, and no copy "
                    "was made of it as it was: expected a function that writes its arguments, small buffers, or "
                    "nothing. Pass it as an argument, or change it outside"
                )
            if watched.written and watched.place is None:
                swapped.append(watched)
            elif (other := watched.instead()) is not None:
                module, place, name = watched.place  # type: ignore[misc]
                instead[module, place][name] = other
            if watched.changed():
                changed[watched.tensor.untyped_storage()._cdata] = (
                    f"{self._name(watched)} was changed in place between forward and backward: expected version "
                    f"{watched.version}, got version {version(watched.tensor)}"
                )
        drawn = [(g, g.get_state()) for g, _ in self._generators]
        before: list[tuple[_Holder, Any]] = []
        try:
            before = [(holder, holder.put(holder.found)) for holder in self._holders]
            for g, found in self._generators:
                g.set_state(found)
            with ExitStack() as stack:
                for watched in swapped:
                    stack.enter_context(watched.swapped())
                stack.enter_context(shown(instead))
                stack.enter_context(_Reads(changed) if changed else nullcontext())
                yield
        finally:
            for holder, content in before:
                holder.put(content)
            for g, now in drawn:
                g.set_state(now)

    def _name(self, watched: _Watched) -> str:
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
    """A dict, list, set or deque, or the attributes of an object, with what it held."""

    __slots__ = ("attributes", "found", "held")

    def __init__(self, held: Any, attributes: bool = False) -> None:
        self.held = held
        self.attributes = attributes
        self.found = held.copy() if held else _EMPTY

    def put(self, content: Any) -> Any:
        """Has it hold that, and returns what it held; touches nothing where these are the same."""
        held = self.held
        if _same(held, content):
            return content
        before = held.copy()
        if self.attributes:
            for name in before.keys() | content.keys():
                # Parameters and buffers are not exchanged here, and DeepSpeed keeps its books itself.
                old, new = before.get(name, _EMPTY), content.get(name, _EMPTY)
                if name in _SHOWN or name.startswith("ds_") or old is new:
                    continue
                if before.get(_MANAGED) and (isinstance(old, Tensor) or isinstance(new, Tensor)):
                    continue
                if name in content:
                    held[name] = content[name]
                else:
                    del held[name]
            return before
        held.clear()
        if isinstance(held, (list, deque)):
            held.extend(content)
        else:
            held.update(content)
        return before


_EMPTY: dict[str, Any] = {}


def _same(a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return False
    if isinstance(a, set):
        return bool(a == b)
    return all(map(operator.is_, a, b)) and (not isinstance(a, dict) or all(map(operator.is_, a.values(), b.values())))


class _Watched:
    """A tensor beside the arguments. `place`: the module, which of its dicts, and the name there; None elsewhere."""

    __slots__ = ("found", "place", "tensor", "version", "written")

    def __init__(self, tensor: Tensor, copy: bool, place: tuple[nn.Module, str, str] | None = None) -> None:
        self.tensor = tensor
        self.place = place
        self.version = version(tensor)
        self.written = False
        self.found: Tensor | None = None
        if copy:
            self.found = _clone(tensor)

    def settle(self) -> None:
        now = version(self.tensor)
        self.written, self.version = now != self.version or self._differs(), now
        if self.found is not None and not self.written:
            _note(self.tensor)
            if self.found.nbytes > _STATISTICS:
                self.found = None

    def _differs(self) -> bool:
        """Whether it has other values than before: batch norm's kernels write statistics behind the version counter."""
        if self.found is None:
            return False
        if not self.tensor.is_cpu:  # the host would have to wait for the answer
            return self.tensor.nbytes <= _STATISTICS
        with unseen():
            return not torch.equal(self.found, self.tensor)

    def changed(self) -> bool:
        """Whether somebody else wrote to it since the forward; a small one's own values (DDP's broadcast) are none."""
        if self.written or version(self.tensor) == self.version or not is_plain(self.tensor):
            return False
        with unseen():
            return self.found is None or not torch.equal(self.found, self.tensor)

    def instead(self) -> Tensor | None:
        """What has to be shown in its place; None: nothing else than what is there."""
        if self.place is None:
            return None
        module, place, name = self.place
        if self.written:
            return None if self.found is None else _clone(self.found)
        present = vars(module)[place].get(name)
        # Whoever shards weights replaces them all the time, and has its own at hand in the replay.
        ours = type(self.tensor) in _ORDINARY and (present is None or type(present) in _ORDINARY)
        return self.tensor if ours and present is not self.tensor else None

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Within, it has the values that the forward found."""
        assert self.found is not None
        now = _clone(self.tensor)
        _fill(self.tensor, self.found)
        try:
            yield
        finally:
            _fill(self.tensor, now)


_ORDINARY = (Tensor, nn.Parameter)


def _clone(t: Tensor) -> Tensor:
    with torch.no_grad(), unseen():
        return t.detach().clone()


def _fill(t: Tensor, values: Tensor) -> None:
    with torch.no_grad(), unseen(), torch.autograd._unsafe_preserve_version_counter(t):
        t.copy_(values)


def _copied(t: Tensor) -> bool:
    """Whether a tensor is copied before the forward, in case that this writes it."""
    return is_plain(t) and not t.requires_grad and not t.is_inference() and (t.nbytes <= _SMALL or not _known(t))


def _known(t: Tensor) -> bool:
    """Whether a forward was seen that left it alone."""
    found = _unwritten.get(id(t))
    return found is not None and found() is t


def _note(t: Tensor) -> None:
    """A forward left it alone."""
    place = id(t)
    if place not in _unwritten:
        _unwritten[place] = weakref.ref(t, lambda _: _unwritten.pop(place, None))


def _shards(module: nn.Module) -> bool:
    """Whether this is FSDP1's wrapper, which keeps its books itself."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def _is_default(g: torch.Generator) -> bool:
    """Whether PyTorch's own checkpoint replays this generator."""
    return g is torch.default_generator or any(g is other for other in torch.cuda.default_generators)


class _Reads(TorchDispatchMode):
    """Raises where an operation takes a tensor in one of these storages."""

    def __init__(self, storages: dict[int, str]) -> None:
        super().__init__()
        self.storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor) and is_plain(t):
                what = self.storages.get(t.untyped_storage()._cdata)
                if what is not None:
                    raise RuntimeError(
                        f"ckptfused.checkpoint: {what}. The replay needs it as it was: change it after backward"
                    )
        return func(*args, **(kwargs or {}))
