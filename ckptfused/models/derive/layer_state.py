"""What a layer's code may read beside its tensors: a key by value, and a quick look at whether it is as it was."""

from __future__ import annotations

import builtins
import functools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from torch import Tensor, nn

from ckptfused.checks import is_dtensor
from ckptfused.compat.torch_distributed import composable_names
from ckptfused.compat.torch_modules import BatchNorm
from ckptfused.compat.transformers import attention_function, attention_implementation
from ckptfused.layer.hooks import watched
from ckptfused.layer.parts import Reason
from ckptfused.layer.quantized import is_quantized
from ckptfused.layer.source import is_replaced
from ckptfused.models.derive.namespaces import (
    BUILTINS,
    SPECIAL,
    Same,
    hashable,
    is_flat,
    is_followed,
    is_steady,
    looked_up,
    opened,
    slotted,
    why_untold,
)
from ckptfused.models.describe.own_forward import INDICES
from ckptfused.models.experts.adapters import adds_adapters
from ckptfused.models.hf_checkpointing import REPLICATE
from ckptfused.simulate.meta_copy import data_behind
from ckptfused.state.compared import (
    Apart,
    Cell,
    ClassAttributes,
    SlotValues,
    TensorAttributes,
    copy_to_compare,
    is_same,
    to_compare,
)
from ckptfused.state.fingerprints import ContentHash
from ckptfused.state.reach import attributes_of, imports_of, names_of, of_torch

_PLAIN = frozenset((int, float, bool, str, bytes, complex, type(None)))
_ABSENT: Any = object()
_HOOKS = tuple(name for name in vars(nn.Module()) if "hook" in name)
KNOWN = "_ckptfused_derived"
"""The attribute of a layer under which is remembered what was found out about it."""
_APART = frozenset(("forward", "_compiled_call_impl", KNOWN, REPLICATE, "_parameters", "_buffers", "_modules", *_HOOKS))
_CACHED = type(functools.lru_cache(int))
_FUNCTIONS = (types.FunctionType, types.MethodType, staticmethod, classmethod, property, _CACHED)


class LayerState:
    """Attributes of a layer's modules and of what these hold, their classes' code, and what this finds by name."""

    def __init__(self, layer: nn.Module) -> None:
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._lists: list[tuple[Any, Any]] = []
        self._own: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._names: list[tuple[Any, str, Any]] = []
        self._looked: set[tuple[int, str]] = set()
        self._objects: dict[int, Any] = {}
        self._globals: list[Any] = []
        self._tensors: list[tuple[Callable[[], Tensor | None], int]] = []
        self._hooks: list[dict[Any, Any]] = []
        self._parameters: list[dict[str, Any]] = []
        self._modules: list[nn.Module] = []
        self._attention: dict[str, Any] = {}
        self._classes: dict[Any, None] = {}
        self._functions: dict[Any, None] = {}
        self._seen: dict[int, int] = {}
        self._found: list[Hashable] = []
        self.why = ""
        """Why nothing can be told of what its code does, where it holds what changes by being read."""
        self._places: list[int] = []
        self._layer = layer
        self._within = {id(module) for module in layer.modules()}
        self._kinds = [(weakref.ref(module), type(module)) for module in layer.modules()]
        tree = self._module(layer)
        self._objects_of_names()
        code = tuple(map(Same, (*self._functions, *self._globals, *self._attention.values())))
        self.key: Any = (tree, code, tuple(self._found))
        self.places: Hashable = tuple(self._places)
        """The numbers by which modules say where in the model they stand; no part of `key`."""
        self._given = self._present()
        self._patched = any("forward" in vars(module) for module in self._modules)
        self.names = frozenset(name for function in self._functions for name in attributes_of(function.__code__))
        """Names of attributes in the code."""
        tagged = TensorAttributes((*layer.parameters(), *layer.buffers()), self.names)
        self._lists.append((tagged, tagged.held()))
        self.why = self.why or tagged.why()
        del self._seen, self._layer, self._functions, self._found, self._globals, self._objects, self._looked

    def holds(self) -> bool:
        """Whether all is as it was."""
        try:
            return (
                all(was == now for now, was in self._dicts)
                and all(was == now for now, was in self._lists)
                and all(is_same(was, named.get(name, _ABSENT)) for named, name, was in self._names)
                and all((t := ref()) is not None and t._version == version for ref, version in self._tensors)
                and self._present() == self._given
                and all(type(ref()) is kind for ref, kind in self._kinds)
                and all(attention_function(name) is was for name, was in self._attention.items())
            )
        except Exception:  # a tensor or array in another's place, or an object that raises when it is compared
            return False

    def is_over(self) -> bool:
        """Whether a list, dict, set or tuple was replaced, which this state holds, and nobody else may."""
        return any(
            type(value) in BUILTINS and now.get(name) is not value
            for now, was in (*self._dicts, *self._own)
            for name, value in was.items()
        )

    def watched(self, called: Iterable[nn.Module] = ()) -> Reason | None:
        """Why modules within have to be called: somebody watches or patches them. called: those that are."""
        if self._patched or any(self._hooks) or any(map(is_replaced, self._classes)):
            apart = {id(within) for module in called for within in module.modules()}
            return next(filter(None, (watched(m) for m in self._modules if id(m) not in apart)), None)
        return None

    def _present(self) -> list[bool]:
        return [p is None for held in self._parameters for p in held.values()]

    def _value(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if isinstance(value, nn.Module | Tensor) or kind in (*BUILTINS, frozenset) or opened(value):
            if id(value) in self._seen:
                return "again", self._seen[id(value)]
            self._seen[id(value)] = len(self._seen)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, Tensor):
            if isinstance(value, nn.Parameter):
                kind = nn.Parameter if is_dtensor(value) else kind  # in FSDP2's shards: it is whole at a call
                return kind, tuple(value.shape), value.dtype
            freed = not value.is_meta and value.numel() > 0 and value.untyped_storage().nbytes() == 0  # FSDP1's views
            if kind is not Tensor or value.is_inference() or freed:
                self.why = f"it holds a {kind.__name__} whose changes leave no trace"
                return Same(value)
            self._tensors.append((weakref.ref(value), value._version))
            return ContentHash(data_behind(value))
        if isinstance(value, dict):
            held = dict(dict.items(value))  # what it holds, not what a subclass makes of that (transformers' ACT2FN)
            self._dicts.append((value, copy_to_compare(held)))
            return kind, tuple((hashable(k), self._value(v)) for k, v in held.items())
        if kind in (list, tuple, deque):
            if kind is not tuple:
                self._lists.append((value, kind(map(to_compare, value))))
            return kind, tuple(map(self._value, value))
        if kind in (set, frozenset):
            self._lists.append((value, set(value)))
            return kind, frozenset(map(self._value, value))
        if kind is functools.partial:
            return kind, self._value(value.func), self._value(value.args), self._value(value.keywords)
        if kind is types.MethodType:
            return kind, self._value(value.__func__), self._value(value.__self__)
        if isinstance(value, types.FunctionType):
            self._follow(value)
        elif opened(value):
            self._objects[id(kind)] = kind
            return kind, self._value(vars(value))
        elif names := slotted(value):
            self._objects[id(kind)] = kind
            slots = SlotValues(value, names)
            self._lists.append((slots, copy_to_compare(slots.held())))
            return kind, tuple((name, self._value(held)) for name, held in slots.held().items())
        elif isinstance(value, weakref.ref):
            self._objects[id(value)] = value
        self.why = self.why or why_untold(value)
        return Same(value)

    def _module(self, module: nn.Module) -> Hashable:
        if adds_adapters(module):
            return self._value(module.base_layer)  # adapters are read anew at each call
        if is_quantized(module):  # so are codes and scales
            bias: Any = module.bias
            return type(module), module.in_features, module.out_features, None if bias is None else self._value(bias)
        if module is not self._layer and id(module) in self._within:  # what is merely held, as a parent, is not called
            self._modules.append(module)
            self._hooks += [held for name in _HOOKS if isinstance(held := vars(module).get(name), dict)]
        self._parameters.append(module._parameters)
        own = vars(module)
        beside = {k: v for k, v in own.items() if k not in _APART}
        if module is self._layer:
            was = copy_to_compare(beside)
            self._lists.append((Apart(own, _APART), was))
            self._own.append((own, was))
        else:
            self._dicts.append((own, copy_to_compare(own)))
        self._dicts += [(held, copy_to_compare(held)) for held in (module._buffers, module._modules)]
        self._code(type(module))
        places = {k: v for k, v in beside.items() if k in INDICES and type(v) is int}
        self._places += places.values()
        if (name := attention_implementation(beside.get("config"))) is not None:
            self._attention[name] = attention_function(name)
            self._follow(self._attention[name])
        apart = {*places, *composable_names()}
        # What a batch norm sums up of batches changes at every step, and nothing reads it in training.
        buffers = {} if isinstance(module, BatchNorm) and module.training else module._buffers
        held = ((k, v) for k, v in (*beside.items(), *buffers.items()) if k not in apart)
        parameters = tuple((k, None if p is None else self._value(p)) for k, p in module._parameters.items())
        children = tuple((k, self._value(child)) for k, child in module._modules.items())
        return type(module), tuple((k, self._value(v)) for k, v in held), parameters, children

    def _code(self, cls: Any) -> None:
        """The functions of a class and of those that it is made of, and what they find by name."""
        if cls in self._classes:
            return
        self._classes[cls] = None
        for base in cls.__mro__:
            if base is object or of_torch(base):
                continue
            held = {k: v for k, v in vars(base).items() if not k.startswith("__") or k == "__call__"}
            self._lists.append((ClassAttributes(base, tuple(held)), (len(vars(base)), *held.values())))
            for value in held.values():
                if isinstance(value, _FUNCTIONS):
                    self._follow(value)
                else:
                    self._found.append(self._value(value))

    def _follow(self, function: Any) -> None:
        queue = [function]
        while queue:
            found: Any = queue.pop()
            found = getattr(found, "fget", getattr(found, "__func__", found))
            found = found.__wrapped__ if isinstance(found, _CACHED) and not is_steady(found) else found
            if not isinstance(found, types.FunctionType) or found in self._functions:
                continue
            if not is_followed(found.__module__):
                continue
            self._functions[found] = None
            code, names = found.__code__, attributes_of(found.__code__)
            spaces: list[tuple[Any, str]] = [(Cell(cell), "") for cell in found.__closure__ or ()]
            for space, name in [*spaces, *((found.__globals__, name) for name in names_of(code))]:
                value = space.get(name, _ABSENT)
                if value is _ABSENT:
                    if name and not hasattr(builtins, name):
                        self._names.append((space, name, _ABSENT))
                    continue
                if isinstance(value, types.ModuleType | type | nn.Module | types.FunctionType):
                    queue += self._attributes(value, names)
                if not isinstance(value, types.ModuleType | type):
                    self._names.append((space, name, to_compare(value)))
                    queue += self._read(value, own=isinstance(space, Cell))
            for value in (*(found.__defaults__ or ()), *(found.__kwdefaults__ or {}).values()):
                queue += self._read(value, own=True)
            for name in imports_of(code):
                queue += self._attributes(sys.modules.get(name), names)

    def _read(self, value: Any, own: bool = False) -> list[Any]:
        """Takes a value that code finds by name. Returns functions. own: other layers' code has others."""
        if not own and not isinstance(value, nn.Module) and type(value) not in _PLAIN:
            self._globals.append(value)
        if isinstance(value, _FUNCTIONS):
            return [value]
        if not isinstance(value, nn.Module):
            self._found.append(self._value(value))
        return []

    def _attributes(self, value: Any, names: frozenset[str]) -> list[Any]:
        """Takes the attributes of these names of a module, class or object. Returns the functions among them."""
        functions = []
        for space, name, one in looked_up(value, names, self._looked):
            if isinstance(one, types.ModuleType | type):
                continue
            self._names.append((space, name, to_compare(one)))
            if isinstance(one, _FUNCTIONS):
                functions += self._read(one)
            elif is_flat(one):
                self._read(one)
            else:  # an object: those of its attributes that have such names come by themselves
                self.why = self.why or why_untold(one, held=False)
        more = names.union(*(attributes_of(f.__func__.__code__) for f in functions if isinstance(f, classmethod)))
        return functions + (self._attributes(value, more) if more != names else [])  # by its `cls.`

    def _objects_of_names(self) -> None:
        """Takes what all code together may read of the classes of configurations, and of what is held weakly."""
        count = -1
        while count != len(self._functions) + len(self._objects):
            count = len(self._functions) + len(self._objects)
            names = SPECIAL.union(*(attributes_of(function.__code__) for function in self._functions))
            for value in [*self._objects.values()]:
                for function in self._attributes(value, names):
                    self._follow(function)
