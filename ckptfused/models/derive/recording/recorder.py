"""What runs under a mode, written down: every call of PyTorch's with its inputs, results and line of source."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ckptfused.compat.pytree import tree_leaves
from ckptfused.compat.torch_dispatch import tensors_of
from ckptfused.compat.torch_modules import OPENED
from ckptfused.models.derive.recording.draws import DRAWS, drawn
from ckptfused.models.derive.recording.in_place import (
    RETURNING,
    function_without_writing,
    let_go,
    may_be_given,
    without_writing,
    writes,
)
from ckptfused.models.derive.recording.names import code_place, function_name, words_of
from ckptfused.ops.numerics import Modes

LOOKS = words_of(
    "size dim ndimension numel nelement stride is_contiguous is_floating_point is_complex __len__ get_device",
    "element_size is_nested is_same_size has_names is_inference storage_offset _is_view is_cuda shape dtype",
    "device ndim requires_grad is_meta layout is_cpu names is_quantized is_sparse is_xpu is_mps is_leaf grad_fn",
    "_version itemsize nbytes _set_grad_enabled",
)
"""Calls and attributes that say something about a tensor, no value of it, and what begins and ends `torch.no_grad`."""


_TORCH = os.path.dirname(torch.__file__)
_VALUES = words_of(
    "item tolist __bool__ __int__ __float__ __index__ __contains__ nonzero equal allclose numpy __array__ unique",
    "is_nonzero",
)
"""Calls whose results depend on values in a way that decides what runs."""
_NEW: dict[str, Any] = {
    "new_empty": torch.empty,
    "new_zeros": torch.zeros,
    "new_ones": torch.ones,
    "new_full": torch.full,
}
"""What makes a tensor of a type and a device alone, by the calls that take these from another tensor."""


CHANGES = "its forward changes the layer's own attributes or buffers"


class RefusedError(Exception):
    """Why no recording, no reading or no proof can be had of a layer."""

    def __init__(self, why: str, call: Recorded | None = None, within: str = "") -> None:
        super().__init__(why if call is None else f"{call.place}: {why}")
        self.call = call
        self.within = within or ("" if call is None else call.within)
        """The name of the module that the layer called in which this came to light; "": none."""
        self.calls: list[Recorded] = []
        """What was recorded, where a rule is at fault."""


class Value:
    """A tensor of a recording: a result of `call`, or what the layer had (`name`: `"arg:0"`, `"param:norm.weight"`)."""

    __slots__ = ("call", "data", "index", "name")

    def __init__(self, data: Tensor, call: Recorded | None = None, index: int = 0, name: str = "") -> None:
        self.data, self.call, self.index, self.name = data, call, index, name

    @property
    def op(self) -> str:
        """The name of the call that made it, "" of none."""
        return "" if self.call is None else self.call.op

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def is_param(self) -> bool:
        return self.name.startswith("param:")

    def __repr__(self) -> str:
        return self.name or f"{self.call}"


class Recorded:
    """One call: `args` and `kwargs` as they were, with a `Value` in the place of each tensor."""

    __slots__ = words_of("args func inputs kwargs mask modes module number numbers op place values within")

    def __init__(self, number: int, func: Any, op: str, args: Any, kwargs: Any, place: str) -> None:
        self.number, self.func, self.op, self.place = number, func, op, place
        self.args, self.kwargs = args, kwargs
        self.values: list[Value] = []
        leaves: list[Any] = []
        _mapped(leaves.append, (args, kwargs))
        self.inputs: list[Value] = [v for v in leaves if isinstance(v, Value)]
        self.numbers = [v for v in leaves if not isinstance(v, Value)]
        """Its arguments that are no tensors."""
        self.mask: Tensor | None = None
        """The keep mask of a dropout."""
        self.modes: Modes | None = None
        """Whether gradients and autocast were on, where that is another than when the layer was called."""
        self.within = ""
        """The name of the module that the layer called for it; "": it is in the layer's own code."""
        self.module = ""
        """The name of the innermost module that is at work: the one in whose forward it is."""

    def given(self, index: int, name: str, default: Any = None) -> Any:
        """An argument by place or name."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)

    def __repr__(self) -> str:
        return f"{self.op} of {', '.join(str(list(v.shape)) for v in self.inputs) or 'nothing'}"


class CallRecorder(TorchFunctionMode):
    """Writes down what runs under it. wide: float32 becomes float64, and dropout's masks are drawn here and kept."""

    def __init__(self, wide: bool, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.calls: list[Recorded] = []
        self.values: dict[int, Value] = {}
        self.roots: dict[str, Tensor] = {}
        self._first: list[Value] = []
        self.within: list[str] = []
        """The names of the modules that are at work, the outermost first."""
        self.returned: dict[Value, Recorded] = {}
        """The calls of modules by the layer's own code, by what they return. `func` is None, `op` has the name."""
        self._entered: Any = None
        self._wide, self._generator = wide, generator
        self.state = torch.get_rng_state() if wide else None
        """Where PyTorch's generator has to be afterwards: a number further for each of `DRAWS`."""
        self.modes, self._inference = Modes.now(), torch.is_inference_mode_enabled()

    @property
    def outermost(self) -> str:
        """The module that the layer's own code called, and that is at work, by name; "": none is."""
        return self.within[0] if self.within else ""

    def root(self, name: str, t: Tensor) -> Value:
        """Makes a tensor known that the layer has from the start."""
        self.roots[name] = t
        self._first.append(Value(t, name=name))
        return self.values.setdefault(id(t), self._first[-1])

    def value(self, t: Tensor) -> Value:
        """The value that a tensor is. **Raises** `RefusedError` where no call that was seen made it."""
        if id(t) not in self.values:
            raise RefusedError(f"a tensor of shape {list(t.shape)} comes from no call that was seen")
        return self.values[id(t)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, op = kwargs or {}, function_name(func)
        at = code_place()
        if torch.is_inference_mode_enabled() != self._inference:
            raise RefusedError(f"{at}: {op} in inference mode")
        if getattr(func, "__name__", "") in _VALUES:
            raise RefusedError(f"{at}: {op} of a tensor: what runs depends on values")
        if op == "requires_grad" and not sys._getframe(1).f_code.co_filename.startswith(_TORCH):
            raise RefusedError(f"{at}: asks whether a tensor needs a gradient: what runs may depend on it")
        if func in OPENED:
            with self:
                return OPENED[func](*args, **kwargs)
        if op in _NEW and isinstance(args[0], Tensor):
            kwargs = {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
            func, op, args = _NEW[op], op.removeprefix("new_"), args[1:]
        if kwargs.get("generator") is not None:
            raise RefusedError(f"{at}: {op} by a generator of its own")
        if func is F.dropout and args[1:]:  # an inplace by its place, too
            names = ("p", "training", "inplace")
            args, kwargs = args[:1], {**kwargs, **dict(zip(names, args[1:], strict=False))}
        if op.rstrip("_") in DRAWS and self.state is not None:
            torch.rand(())
            self.state = torch.get_rng_state()
        if self._wide:
            args, kwargs = _mapped(_widened, (args, kwargs))
            func, op = (Tensor.double, "double") if op == "float" else (func, op)
        given, options = self._noted(args, kwargs)
        noted = Recorded(len(self.calls), func, op, given, options, at)
        noted, written = self._written(noted, args, kwargs)
        noted.within, noted.module = self.outermost, self.within[-1] if self.within else ""
        noted.modes = self._other_modes()
        result = drawn(noted, func, args, kwargs, self._generator) if self._wide else None
        result = func(*args, **kwargs) if result is None else result
        if op == "setitem" and written is not None:  # of the part, its shape has to follow from that of x
            result = written, written[args[1]]  # type: ignore[assignment]
        tensors, taken = tensors_of(result), tensors_of(args, kwargs)
        if not tensors:
            if op not in LOOKS and not (op == "_assert" and not noted.inputs):
                raise RefusedError(f"{at}: {op} is not known")
            return result
        if op != "to" and op not in RETURNING and any(t is g and t is not written for t in tensors for g in taken):
            raise RefusedError(f"{at}: {op} writes in place")
        if written is None and all(any(t is g for g in taken) for t in tensors):
            return result  # a cast to the type that it has
        noted.values = [Value(t, noted, i) for i, t in enumerate(tensors)]
        self.values.update((id(value.data), value) for value in noted.values)
        self.calls.append(noted)
        return result

    def forget(self) -> None:
        """Leaves of all tensors their shapes and types, and no mask."""
        for call in self.calls:
            call.mask = None
        values = [*self._first, *self.values.values(), *self.returned]
        for value in (*values, *(v for call in self.calls for v in (*call.inputs, *call.values))):
            value.data = value.data.detach().to("meta")
        self.roots.clear()
        self.values.clear()
        self._entered = None

    @contextmanager
    def watching(self, layer: nn.Module, state_of: Callable[[nn.Module], Any]) -> Iterator[None]:
        """A context in which calls of a layer's modules are noted, and those that change what `state_of` says of them
        raise `RefusedError`.
        """

        def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.within:
                self._entered = args, kwargs, len(self.calls), state_of(module)
            self.within.append(name)

        def leave(module: nn.Module, args: Any, y: Any) -> None:
            name, (args, kwargs, count, state) = self.within.pop(), self._entered
            if not self.within and state_of(module) != state:
                raise RefusedError(CHANGES, within=name)
            every = [t for t in tree_leaves((args, y, kwargs)) if isinstance(t, Tensor)]
            if self.within or len(self.calls) == count or not all(id(t) in self.values for t in every):
                return
            given, options = self._noted(args, kwargs)
            call = Recorded(len(self.calls) - 1, None, f"module:{name}", given, options, self.calls[-1].place)
            call.modes = self._other_modes()
            call.values = [self.value(t) for t in tree_leaves(y) if isinstance(t, Tensor)]
            self.returned.update((v, call) for v in call.values if v not in call.inputs)

        with ExitStack() as hooks:
            for name, module in layer.named_modules():
                if module is not layer:
                    entering = module.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
                    hooks.callback(entering.remove)
                    hooks.callback(module.register_forward_hook(leave).remove)
            yield

    def _other_modes(self) -> Modes | None:
        return None if (now := Modes.now()) == self.modes else now

    def _noted(self, args: Any, kwargs: Any) -> Any:
        return _mapped(lambda v: self.value(v) if isinstance(v, Tensor) else v, (args, kwargs))

    def _written(self, noted: Recorded, args: Any, kwargs: Any) -> tuple[Recorded, Tensor | None]:
        """A call as one that writes nothing, and the tensor that it writes to: one that the layer made, whose value
        becomes another. None: it writes to none.
        """
        if not writes(noted.op, kwargs):
            return noted, None
        target = next(iter(tensors_of(args, kwargs)), None)
        if target is None or kwargs.get("out") is not None or (noted.op == "setitem" and target is not args[0]):
            raise RefusedError(f"{noted.place}: {noted.op} writes in place")
        if noted.op == "dropout" and not (noted.given(2, "training", True) and noted.given(1, "p", 0.5)):
            return noted, None
        every = itertools.chain(self._first, (v for call in self.calls for v in call.values))
        if may_be_given(self.value(target)) or not let_go(self.value(target), self.values, every):
            raise RefusedError(f"{noted.place}: {noted.op} writes in place to what others see")
        if noted.op == "bernoulli_" and len(noted.inputs) > 1:
            raise RefusedError(f"{noted.place}: bernoulli_ with a rate that is a tensor")
        op, options = without_writing(noted.op), {k: v for k, v in noted.kwargs.items() if k != "inplace"}
        function = function_without_writing(noted.func, op)
        return Recorded(noted.number, function, op, noted.args, options, noted.place), target


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """What a call of PyTorch's takes, each leaf replaced: a pytree of tuples, lists and dictionaries alone."""
    if isinstance(value, dict):
        return {name: _mapped(function, one) for name, one in value.items()}
    if not isinstance(value, tuple | list) or isinstance(value, torch.Size):
        return function(value)
    made = [_mapped(function, one) for one in value]
    return made if isinstance(value, list) else tuple(made)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
