"""One training step without an optimizer's, and what it left: loss, gradients, buffers, attributes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.compat.pytree import tree_map
from ckptfused.compat.torch_compile import is_loaded
from ckptfused.doctor.recorder import RegionRecorder
from ckptfused.profiler.step import NoLossError, forward_and_backward
from ckptfused.state.fingerprints import Fingerprints, leaves, tensor_values
from ckptfused.state.reach import content_of_object
from ckptfused.state.snapshot import keeps_books

_PLAIN = (bool, int, float, str)
_FEW = 64  # values at most of a list that is compared
_DEEP = 3  # containers within one another at most: one may hold itself
_OF_MODULES = ("_parameters", "_buffers", "_modules")
LEAST_FREE = 0.04  # of the host's memory, below which a step ends that saves everything


@dataclass
class StepRun:
    """What a step computed and left behind."""

    recorder: RegionRecorder
    loss: Any = None
    gradients: dict[str, Any] = field(default_factory=dict)
    """Fingerprints, by parameter; those of arguments by `argument i`."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """The gradients themselves, on the host, of a step that others are compared with."""
    norms: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The squared norm of each gradient, and that of its difference to the step that this one is compared with."""
    buffers: dict[str, Any] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)
    """Fingerprints of parameters, and of tensors that attributes of modules are or hold, as the step left them."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """The attributes that the step changed."""
    error: Exception | None = None
    nothing_trained: bool = False

    def backward_begins(self, loss: Tensor) -> None:
        """Notes the loss."""
        prints = Fingerprints()
        self.loss = prints.of(loss)
        prints.settle()
        self.recorder.in_backward = True


def run_as_is(
    model: nn.Module, batch: Any, first: StepRun | None = None, guarded: bool = False, sizes: bool = False
) -> StepRun:
    """A step of the model as it is, whose gradients are gone afterwards. Errors are in the result.

    first: the step that it is compared with; without one, what checkpoints replay is noted, and gradients are kept.
    guarded: raise `MemoryError` before the host's memory is spent. sizes: note how large results are, too.
    """
    recorder = RegionRecorder(model, first is None, _refuse_to_fill_memory if guarded else None, sizes)
    step, given, before = StepRun(recorder), copied_batch(batch, one_device(model)), plain_attributes(model)
    try:
        with recorder.recording(), warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")  # training says them, too
            forward_and_backward(model, given, contextlib.nullcontext(), step.backward_begins, any_tensor=True)
    except NoLossError:
        step.nothing_trained = True
        return step
    except Exception as error:
        for region in recorder.regions:
            recorder.look_again(region)
        step.error = error.with_traceback(None)
        return step
    _read(model, given, step, before, first)
    return step


def _read(model: nn.Module, given: Any, step: StepRun, before: dict[str, Any], first: StepRun | None) -> None:
    prints = Fingerprints()
    named: list[tuple[str, Tensor]] = list(model.named_parameters())
    named += [(f"argument {i}", t) for i, t in enumerate(leaves(given)) if isinstance(t, Tensor) and t.is_leaf]
    for name, t in named:
        if t.grad is not None:
            step.gradients[name] = prints.of(t.grad)
    for name, buffer in model.named_buffers():
        step.buffers[name] = prints.of(buffer)
    for name, held in (*model.named_parameters(), *_tensors_held(model)):
        step.held[name] = prints.of(held)
    prints.settle()
    other = first is not None and first.gradients != step.gradients
    for name, t in named:
        grad, t.grad = t.grad, None  # one at a time, so that there are never two sets of all
        own = None if grad is None else tensor_values(grad)
        if own is not None and first is None:
            step.values[name] = own.to("cpu", copy=True)
        elif own is not None and other:
            assert first is not None
            step.norms[name] = _norms(own, first.values.get(name))
    now = plain_attributes(model)
    step.attributes = {name: now.get(name) for name in now | before if not alike(now.get(name), before.get(name))}


def _tensors_held(model: nn.Module) -> Iterator[tuple[str, list[Tensor]]]:
    """Tensors that modules hold as plain attributes, as averages and codebooks often are, and those in lists, tuples,
    dicts and objects of somebody's own there, by attribute.
    """
    for place, module in model.named_modules():
        if not keeps_books(module):
            for name, value in vars(module).items():
                if name not in _OF_MODULES and (held := _tensors_within(_content(name, value))):
                    yield f"{place}.{name}".lstrip("."), held


def _content(name: str, value: Any) -> Any:
    held = None if name.startswith("_") else content_of_object(value)
    return value if held is None else dict(held)


def _tensors_within(value: Any, depth: int = 0) -> list[Tensor]:
    if not isinstance(value, list | tuple | dict) or len(value) > _FEW or depth == _DEEP:
        return [value] if isinstance(value, Tensor) else []
    values = value.values() if isinstance(value, dict) else value
    return [t for one in values for t in _tensors_within(one, depth + 1)]


def _norms(t: Tensor, other: Tensor | None) -> tuple[float, float]:
    """The squared norms of a gradient, and of the difference of another one of it; infinite where there is none."""
    if other is None:
        return _squared(t), float("inf")
    return _squared(t), _squared(other.to(t.device).to(torch.promote_types(t.dtype, torch.float64)) - t)


def _squared(t: Tensor) -> float:
    return torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float64)).item() ** 2


def alike(a: Any, b: Any) -> bool:
    """Whether two attributes are equal, those that are no number at all included."""
    return a == b or repr(a) == repr(b)


def plain_attributes(model: nn.Module) -> dict[str, Any]:
    """Numbers, texts and truth values that modules hold, lists, tuples and dicts of such included."""
    return {
        f"{place}.{name}".lstrip("."): _copied_plain(value)
        for place, module in model.named_modules()
        if not keeps_books(module)
        for name, value in vars(module).items()
        if _is_plain(value) and name not in _OF_MODULES
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= _FEW and all(isinstance(v, _PLAIN) for v in value)
    if type(value) is dict:
        return len(value) <= _FEW and all(isinstance(v, _PLAIN) for v in (*value, *value.values()))
    return isinstance(value, _PLAIN)


def _copied_plain(value: Any) -> Any:
    return type(value)(value) if type(value) in (list, dict) else value


def one_device(model: nn.Module) -> torch.device | None:
    """The one device of all parameters and buffers; None if they are on several."""
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    return next(iter(devices)) if len(devices) == 1 else None


def copied_batch(batch: Any, device: torch.device | None) -> Any:
    """A batch of a step's own, on the device of the model."""

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        mine = value.detach().to(device or value.device, copy=True)
        return mine.requires_grad_(value.requires_grad)

    return tree_map(copy, dict(batch) if isinstance(batch, Mapping) else batch)


def _refuse_to_fill_memory() -> None:
    free, total = _host_memory()
    if free < LEAST_FREE * total:
        raise MemoryError(f"{free >> 20} MiB of the host's memory are left")


def _host_memory() -> tuple[int, int]:
    """Bytes that are free, and all; both 1 where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            found = dict(line.split(":", 1) for line in file)
        return tuple(int(found[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))  # type: ignore[return-value]
    except (OSError, KeyError):
        return 1, 1


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """A context in which compiled modules run as they were written: what is recorded is Python's."""
    if not is_loaded():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
