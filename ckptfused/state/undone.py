"""A forward that runs to be looked at: what it draws and writes beside its own module is undone."""

from __future__ import annotations

import functools
import operator
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.compat.torch_dispatch import DispatchMode, written_arguments
from ckptfused.compat.torch_memory import storage_id
from ckptfused.compat.torch_modules import BatchNorm
from ckptfused.state.bindings import Bindings
from ckptfused.state.containers import content_of, put_back, same_content
from ckptfused.state.fingerprints import bits_equal, local, unrecorded
from ckptfused.state.generators import RngStates, global_generators
from ckptfused.state.reach import of_torch, reach

_OWN = ("_parameters", "_buffers", "_modules")
_ABSENT = object()
_LruCache: Any = type(functools.lru_cache(len))
_OF_OTHERS = ("asyncio", "concurrent", "logging", "multiprocessing", "queue", "threading", "torch.distributed")
_WEAK = ("weakref", "_weakrefset")


@contextmanager
def without_trace(module: nn.Module, refuse: bool = False) -> Iterator[list[str]]:
    """A context in which the forward of a module runs whose own attributes and containers nobody else holds; afterwards
    what its code reaches is as it was: generators, global ones too; containers and objects, by way of globals that the
    code names, of closures, defaults and attributes; values of tensors and of other models' parameters and buffers;
    attributes of classes; what those names stand for; and caches of `functools.lru_cache`, which are cleared if they
    got anything. It gives a list, in which is afterwards what else was not as it had been.

    refuse: **raises** `RuntimeError` before anything runs, where the code reaches iterators or queues, which nobody can
    put back.
    """
    left: list[str] = []
    kinds = _classes(module.modules())
    roots = [getattr(value, "__func__", value) for kind in kinds for value in vars(kind).values()]
    found = reach([*roots, *_shared(module.modules())])
    own = {*map(id, module.modules())}
    other = [inner for inner in found.modules if id(inner) not in own]  # such as the model that a copy's hooks know
    if other:
        found = reach([*roots, *_shared(module.modules()), *_shared(other)])
    if refuse and found.streams:
        raise RuntimeError(f"a forward that reaches a {type(found.streams[0]).__name__} leaves a trace")
    others = {id(value) for one in found.objects if _is_of_others(one) for value in vars(one).values()}
    objects = [one for one in found.objects if not _is_of_others(one)]
    held = [one for one in (*found.containers, *found.long) if id(one) not in others]
    held += map(vars, [*objects, *found.functions, *other])
    held += (vars(p) for p in module.parameters() if type(p) is not nn.Parameter)  # bitsandbytes' take codes from there
    held += (one for inner in other for one in vars(inner).values() if type(one) in (dict, list, set, deque))
    held += (vars(p) for inner in other for p in inner._parameters.values() if p is not None)
    caches = [(one, one.cache_info().misses) for one in objects if type(one) is _LruCache]
    contents = [(one, content_of(one)) for one in held]
    classes = [(kind, dict(vars(kind))) for kind in kinds | _classes(objects) | {*found.classes}]
    bindings = [(binding, binding.found) for binding in map(Bindings, found.functions)]
    draws = RngStates([*global_generators(), *found.generators])
    theirs = [_OfAnother(p) for inner in other for p in inner._parameters.values() if p is not None]
    held_by_others = (t for inner in other for t in (*inner._buffers.values(), *vars(inner).values()))
    beside = [t for t in held_by_others if isinstance(t, Tensor)]
    watched = _Written([*found.tensors, *beside, *(t for p in theirs for t in p.tensors())])
    for inner in (inner for inner in other if isinstance(inner, BatchNorm)):  # in inference mode no op says so
        for t in map(local, inner.buffers(recurse=False)):
            if t is not None:
                watched.keep(t)
    try:
        with watched if watched.of else nullcontext():
            yield left
    finally:
        for p in theirs:
            p.put_back()
        for one, content in contents:
            before = put_back(one, content)
            if not same_content(before, content):
                left.append(f"a {type(one).__name__}")
        for kind, attributes in classes:
            for name in vars(kind).keys() - attributes.keys() - {"__slotnames__"}:  # which `copy` looks up once
                left.append(f"{kind.__name__}.{name}")
                delattr(kind, name)
            for name, value in attributes.items():
                if vars(kind).get(name, _ABSENT) is not value:
                    left.append(f"{kind.__name__}.{name}")
                    setattr(kind, name, value)
        for cache, misses in caches:
            if cache.cache_info().misses != misses:  # what it has got since cannot be told from the rest
                cache.cache_clear()
        for binding, names in bindings:
            if not all(map(operator.is_, binding.put(names), names)):
                left.append("a global name")
        draws.settle()
        left += ["a random generator"] * bool(draws.rewind())
        left += watched.put_back()


class _OfAnother:
    """A parameter of another model: its memory, its gradient, and whether it asks for one."""

    def __init__(self, p: Tensor) -> None:
        self._p, self._grad, self._flag = p, p.grad, p.requires_grad
        self._memory = local(p) if type(p) is nn.Parameter else None

    def tensors(self) -> list[Tensor]:
        """What ops may write."""
        return [self._p] if self._grad is None else [self._p, self._grad]

    def put_back(self) -> None:
        """What is not done by ops; values are for `_Written`."""
        p, memory, now = self._p, self._memory, local(self._p)
        if memory is not None and (now is None or storage_id(now) != storage_id(memory)):
            p.data = memory
        p.grad = self._grad
        if p.requires_grad is not self._flag:
            p.requires_grad_(self._flag)


class _Written(DispatchMode):
    """Keeps what some tensors held before an op first writes them."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        found = (local(t) for t in tensors)
        self.of = {storage_id(t): t.detach() for t in found if t is not None and t.device.type != "meta"}
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in map(local, written_arguments(func, args, kwargs or {})):
            if t is not None:
                self.keep(t)
        return func(*args, **(kwargs or {}))

    def keep(self, t: Tensor) -> None:
        """Before it is written."""
        if (place := storage_id(t)) in self.of and place not in self._held:
            with torch.inference_mode(False):
                whole = self.of[place].new_empty(0).set_(t.untyped_storage())
                self._held[place] = whole, whole.clone()

    def put_back(self) -> list[str]:
        """What had to be."""
        with unrecorded():
            changed = [(whole, content) for whole, content in self._held.values() if not bits_equal(whole, content)]
            for whole, content in changed:
                whole.copy_(content)
        return ["a tensor"] * bool(changed)


def _is_of_others(value: Any) -> bool:
    """Whether threads or ranks tell one another something by an object, or it holds what is alive: it may change
    meanwhile, whatever a forward does (a placement of tensors keeps its hash when it is first asked for).
    """
    return f"{type(value).__module__}.".startswith(tuple(f"{name}." for name in (*_OF_OTHERS, *_WEAK)))


def _classes(objects: Iterable[Any]) -> set[Any]:
    """Classes of objects that are neither Python's nor PyTorch's."""
    kinds = {kind for one in objects for kind in type(one).__mro__}
    return {kind for kind in kinds if not of_torch(kind) and kind.__module__ not in sys.stdlib_module_names}


def _shared(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """What modules hold that others may hold, too."""
    return (value for inner in modules for name, value in vars(inner).items() if _is_shared(name, value))


def _is_shared(name: str, value: Any) -> bool:
    """Whether a module's attribute leads to what others hold, too. A forward of ours that does what its class's does
    leads to nothing else."""
    if name in _OWN or isinstance(value, Tensor | nn.Module) or (isinstance(value, dict) and not value):
        return False
    return not (name == "forward" and getattr(value, "as_its_class", False) is True)
