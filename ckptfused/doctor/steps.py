"""One training step without an optimizer's, and what it left: loss, gradients, buffers, attributes."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ckptfused.doctor.fingerprints import Fingerprints, leaves, local
from ckptfused.doctor.recorder import Recorder
from ckptfused.doctor.snapshot import keeps_books

_PLAIN = (bool, int, float, str)
LEAST_FREE = 0.04  # of the host's memory, below which a step ends that saves everything


@dataclass
class Step:
    """What a step computed and left behind."""

    recorder: Recorder
    loss: Any = None
    gradients: dict[str, Any] = field(default_factory=dict)
    """Fingerprints, by parameter; those of arguments by `argument i`."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """The gradients themselves, on the host."""
    buffers: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    """Those that it changed."""
    error: Exception | None = None
    nothing_trained: bool = False


def run(model: nn.Module, batch: Any, regions: bool, guarded: bool = False) -> Step:
    """A step of the model as it is. regions: note what checkpoints replay.

    guarded: raise `MemoryError` before the host's memory is spent. Errors are in the result.
    """
    recorder = Recorder(model, regions, _refuse_to_fill_memory if guarded else None)
    step, given, before = Step(recorder), copied(batch, device_of(model)), plain_attributes(model)
    try:
        with recorder.recording(), warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")  # training says them, too
            loss = loss_of(call(model, given))
            prints = Fingerprints()
            found = prints.of(loss)
            prints.settle()
            step.loss = found
            if loss is None or not loss.requires_grad:
                step.nothing_trained = True
                return step
            recorder.in_backward = True
            loss.backward()
    except Exception as error:
        for region in recorder.regions:
            recorder.look_again(region)
        step.error = error.with_traceback(None)
        return step
    _read(model, given, step, before)
    return step


def _read(model: nn.Module, given: Any, step: Step, before: dict[str, Any]) -> None:
    prints = Fingerprints()
    named: list[tuple[str, Tensor]] = list(model.named_parameters())
    named += [(f"argument {i}", t) for i, t in enumerate(leaves(given)) if isinstance(t, Tensor) and t.is_leaf]
    for name, t in named:
        if t.grad is not None:
            step.gradients[name] = prints.of(t.grad)
            own = local(t.grad)
            if own is not None:
                step.values[name] = own.to("cpu", copy=True)
    for name, buffer in model.named_buffers():
        step.buffers[name] = prints.of(buffer)
    prints.settle()
    now = plain_attributes(model)
    step.attributes = {name: now.get(name) for name in now | before if now.get(name) != before.get(name)}


def plain_attributes(model: nn.Module) -> dict[str, Any]:
    """Numbers, texts and truth values that modules hold."""
    return {
        f"{place}.{name}".lstrip("."): value
        for place, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) and not keeps_books(module)
    }


def call(model: nn.Module, batch: Any) -> Any:
    """A batch: a mapping of arguments by name, a tuple or list of arguments, or the one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def loss_of(output: Any) -> Tensor | None:
    """The output's loss, or the output itself; what is no scalar is summed with weights that differ."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss.sum()
    floats = [t for t in leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    t = next((t for t in floats if t.requires_grad), floats[0] if floats else None)
    if t is None or t.dim() == 0:
        return t
    weights = torch.linspace(0.5, 1.5, t.numel(), device=t.device, dtype=torch.float32).view(t.shape)
    return (t.float() * weights).sum() / t.numel()  # of a plain sum, a norm before it has no gradient


def device_of(model: nn.Module) -> torch.device | None:
    """The one device of all parameters and buffers; None if they are on several."""
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    return next(iter(devices)) if len(devices) == 1 else None


def copied(batch: Any, device: torch.device | None) -> Any:
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
    """Within, compiled modules run as they were written: what is recorded is Python's."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
