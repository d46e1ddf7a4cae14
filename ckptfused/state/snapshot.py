"""Steps that leave no trace: what they change of a model, its batch, its optimizer and the generators is put back."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cudnn

from ckptfused.compat.torch_autograd import parameter_hooks, set_tensor_hooks, tensor_hooks
from ckptfused.compat.torch_distributed import is_managed
from ckptfused.state.containers import CONTAINERS, Attributes, content_of, put_back
from ckptfused.state.fingerprints import Fingerprints, batch_leaves, bits_equal, local, unrecorded
from ckptfused.state.generators import RngStates, global_generators, is_generator, restore, state_of, undrawn
from ckptfused.state.reach import content_of_object, generators_of, reach

# Modules of these keep their own books of what they sharded and reduced.
_THEIR_OWN = ("torch.distributed", "torch.nn.parallel", "deepspeed")
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    *((partial(getattr, cudnn, name), partial(setattr, cudnn, name)) for name in ("benchmark", "deterministic")),
)


class Unchanged:
    """A context in which steps may run; afterwards everything is to the bit what it was, and gradients are the same
    tensors.

    Put back are parameters (the objects, their values, storages, hooks, and whether they require a gradient), buffers,
    gradients, attributes of modules with lists, dicts and sets in them, hooks, tensors of the batch, the optimizer's
    state, other models that lists and hooks hold (a teacher, an average), the states of PyTorch's generators, Python's,
    NumPy's and those that modules and closures of their hooks hold or their code names, and settings such as the
    default type. `restore` puts them back in between, any number of times. Within it there are no gradients at first.

    hooks: whether those stay that run as soon as a parameter's gradient is there, as an optimizer's in backward.

    **Saves** a copy of parameters, buffers, tensors that modules hold, those of the other models, the batch and the
    optimizer's state on the host.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        hooks: bool = True,
    ) -> None:
        self._model, self._batch, self._optimizer = model, batch, optimizer
        self._stay = hooks
        self.written: set[int] = set()
        """The tensors, by `id`, that steps so far left with other values."""

    def __enter__(self) -> Unchanged:
        self._seen: set[int] = set()
        self._containers: list[tuple[Any, Any]] = []
        self._attributes: list[Attributes] = []
        self._values: list[_Value] = []
        self._hooks: list[tuple[Any, Any]] = []
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._flags: list[tuple[Any, bool, Any]] = []
        kinds = {type(module) for module in self._model.modules()}
        generators = [*global_generators(), *itertools.chain.from_iterable(map(generators_of, kinds))]
        self._seen.update(map(id, self._model.modules()))
        managed = {
            id(p)
            for module in self._model.modules()
            if is_managed(vars(module)) or keeps_books(module)
            for p in module.parameters(recurse=False)
        }
        for p in self._model.parameters():
            self._keep(p, own_storage=id(p) not in managed and type(p) is nn.Parameter)
            self._leaf(p)
            backward = tensor_hooks(p)
            self._flags.append((p, p.requires_grad, backward))
            if backward is not None:
                self._containers.append((backward, dict(backward)))
            hooks = parameter_hooks(p)
            if hooks and not self._stay:
                self._hooks.append((hooks, dict(hooks)))
        for module in self._model.modules():
            self._module(module, generators)
        for t in batch_leaves(self._batch):
            if isinstance(t, Tensor):
                self._keep(t)
                self._leaf(t)
        if self._optimizer is not None:
            self._look_at(vars(self._optimizer), generators)
        self._settings = [read() for read, _ in _SETTINGS]
        self._states = [(g, state_of(g)) for g in {id(g): g for g in generators}.values()]
        self._begin()
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()
        for t, grad in self._gradients:
            t.grad = grad
        for hooks, held in self._hooks:
            hooks.update(held)

    def _begin(self) -> None:
        for t, _ in self._gradients:
            t.grad = None
        for hooks, _ in self._hooks:
            hooks.clear()

    def restore(self) -> None:
        """Puts everything back, ready for another step."""
        self._begin()
        for attributes in self._attributes:
            attributes.put(attributes.found)
        for held, content in self._containers:
            put_back(held, content)
        for t, flag, backward in self._flags:
            if t.requires_grad is not flag:
                t.requires_grad_(flag)
            if tensor_hooks(t) is not backward:
                set_tensor_hooks(t, backward)
        for (read, put), value in zip(_SETTINGS, self._settings, strict=True):
            if read() != value:
                put(value)
        with unrecorded():
            self.written.update(id(value.of) for value in self._values if value.put_back())
        for g, state in self._states:
            restore(g, state)

    def _leaf(self, t: Tensor) -> None:
        if not t.is_leaf:
            return
        self._gradients.append((t, t.grad))
        if t.grad is not None and _shares(t.grad):  # a reducer's bucket, which it writes to
            self._keep(t.grad)

    def _module(self, module: nn.Module, generators: list[Any]) -> None:
        held = vars(module)
        theirs = keeps_books(module)
        if not theirs:
            self._attributes.append(Attributes(held, dict(held)))
        if not theirs and not is_managed(held):
            parameters = held.get("_parameters")
            if isinstance(parameters, dict):  # torch.jit has its own
                self._containers.append((parameters, dict(parameters)))
        for name, value in held.items():
            if name != "_parameters" and not (theirs and name != "_buffers"):
                self._look_at(value, generators)
                if not name.startswith("_") and (content := content_of_object(value)) is not None:
                    self._look_at_object(content, generators)

    def _look_at(self, value: Any, generators: list[Any], depth: int = 1) -> None:
        if id(value) in self._seen:
            return
        if isinstance(value, Tensor):
            self._keep(value)
        elif is_generator(_kind(value)):
            generators.append(value)
        elif isinstance(value, nn.Module):
            self._other(value.modules(), generators)
        elif isinstance(value, types.FunctionType | types.MethodType | partial):  # a forward or a hook
            found = reach([value])
            generators += found.generators
            for t in found.tensors if _kind(value) is not types.MethodType else ():  # of an object they may be data
                self._keep(t)
            self._other(found.modules, generators)
        elif isinstance(value, (*CONTAINERS, tuple)) and depth < 6:
            self._seen.add(id(value))
            if not isinstance(value, tuple):
                self._containers.append((value, content_of(value)))
            values: Any = value.values() if isinstance(value, dict) else value
            for inner in list(values):
                self._look_at(inner, generators, depth + 1)

    def _look_at_object(self, held: dict[str, Any], generators: list[Any]) -> None:
        if id(held) not in self._seen:
            self._seen.add(id(held))
            self._attributes.append(Attributes(held, dict(held)))
            for inner in held.values():
                self._look_at(inner, generators)

    def _other(self, modules: Iterable[nn.Module], generators: list[Any]) -> None:
        for module in modules:
            if id(module) not in self._seen:
                self._seen.add(id(module))
                managed = is_managed(vars(module)) or keeps_books(module)
                for p in module.parameters(recurse=False):
                    self._keep(p, own_storage=not managed and type(p) is nn.Parameter)
                    self._leaf(p)
                    self._flags.append((p, p.requires_grad, tensor_hooks(p)))
                self._module(module, generators)

    def _keep(self, t: Tensor, own_storage: bool = False) -> None:
        own = local(t)
        if id(t) in self._seen or own is None or own.is_meta:
            return
        self._seen.add(id(t))
        self._values.append(_Value(t, own if own_storage else None))


class _Value:
    """A tensor with its values, which are copied to the host.

    storage: what shares the tensor's storage, which it has again afterwards.
    """

    def __init__(self, of: Tensor, storage: Tensor | None = None) -> None:
        self.of, self._storage = of, storage
        own = local(of)
        assert own is not None
        with unrecorded():
            self._copy = own.to("cpu", copy=True)
            self._print = None if own.is_cpu else _printed(own)

    def put_back(self) -> bool:
        """Whether it had to be."""
        moved = False
        if self._storage is not None:
            now = local(self.of)
            moved = now is None or now.data_ptr() != self._storage.data_ptr() or now.shape != self._storage.shape
            if moved:
                self.of.data = self._storage
        now = local(self.of)
        if now is None or now.shape != self._copy.shape or now.dtype != self._copy.dtype:
            return moved
        same = bits_equal(now, self._copy) if self._print is None else _printed(now) == self._print
        if not same:
            now.copy_(self._copy)
        return moved or not same


def _printed(t: Tensor) -> Any:
    """A checksum that is made where the tensor is, instead of a copy of it."""
    prints = Fingerprints()
    found = prints.of(t)
    prints.settle()
    return found


def drawn_alike(model: nn.Module) -> AbstractContextManager[None]:
    """Afterwards all generators are as they were, so that what follows draws the same numbers."""
    return undrawn(_generators(model))


def rng_states(model: nn.Module) -> RngStates:
    """The states of all generators now."""
    return RngStates([*global_generators(), *_generators(model)])


def _generators(model: nn.Module) -> list[Any]:
    held: list[Any] = [value for module in model.modules() for value in vars(module).values()]
    return [value for value in held if is_generator(_kind(value))]


def _kind(value: Any) -> Any:
    return type(value)


def keeps_books(module: nn.Module) -> bool:
    """Whether a module's attributes are its library's own affair."""
    return type(module).__module__.startswith(_THEIR_OWN)


def _shares(t: Tensor) -> bool:
    own = local(t)
    return own is not None and own.untyped_storage().nbytes() != own.nbytes
