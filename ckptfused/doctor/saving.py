"""A model without any checkpointing: the step that all others are compared with."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

from ckptfused.compat.patches import patched_attribute
from ckptfused.compat.torch_autograd import CHECKPOINT_GENERATOR
from ckptfused.compat.torch_distributed import COMPOSABLE_CHECKPOINT
from ckptfused.models.forward import ConvertedForward
from ckptfused.modules import FusedCheckpointSequential
from ckptfused.modules.fused import FusedModule

REENTRANT = "CheckpointFunction"


@contextlib.contextmanager
def replaced_checkpoints(
    generator: Callable[[Any], Any],
    reentrant: Callable[[Any], Any],
    elsewhere: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """A context in which checkpoints of PyTorch's go through what these make of its two implementations: those of this
    thread, and of another while `elsewhere` says so there.
    """
    mine = threading.get_ident()

    def ours() -> bool:
        return threading.get_ident() == mine or elsewhere()

    def generated(plain: Any) -> Any:
        made = generator(plain)
        return lambda *args, **kwargs: (made if ours() else plain)(*args, **kwargs)

    def applied(plain: Any) -> Any:
        made = reentrant(plain)
        apply = staticmethod(lambda *args: (made if ours() else plain.apply)(*args))
        return type("Replaced", (), {"apply": apply})

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched_attribute(torch_checkpoint, CHECKPOINT_GENERATOR, generated))
        stack.enter_context(patched_attribute(torch_checkpoint, REENTRANT, applied))
        if COMPOSABLE_CHECKPOINT in sys.modules:
            stack.enter_context(patched_attribute(sys.modules[COMPOSABLE_CHECKPOINT], CHECKPOINT_GENERATOR, generated))
        yield


@dataclass(frozen=True)
class Share:
    """One of so many equal parts of what a model checkpoints, in the order of its forward: what saves everything."""

    number: int = 0
    parts: int = 1
    calls: int = 0
    """Checkpointed calls of a forward; those beyond are of replays, and stay as they are."""

    def has(self, place: int, count: int) -> bool:
        """Whether the item at a place among so many is in it."""
        return self.parts == 1 or (place < count and place * self.parts // count == self.number)


@contextlib.contextmanager
def everything_saved(model: nn.Module, share: Share | None = None) -> Iterator[None]:
    """A context without checkpoints: PyTorch's only call their function, and with them those of Hugging Face, of FSDP's
    wrapper and ckptfused's generic ones; ckptfused's blocks keep all that they can, which changes no bit.

    share: the part of these for which that is so, where all would not fit.
    """
    share = share or Share()
    places = itertools.count()
    found = _units(model)

    def saves() -> bool:
        return share.has(next(places), share.calls)

    with contextlib.ExitStack() as stack:
        generator, reentrant = (functools.partial(make, saves=saves) for make in (_no_replay, _called))
        stack.enter_context(replaced_checkpoints(generator, reentrant))
        for place, unit in enumerate(found):
            for module in unit if share.has(place, len(found)) else ():
                stack.enter_context(_keeping_all(module))
        yield


@contextlib.contextmanager
def _keeping_all(module: nn.Module) -> Iterator[None]:
    forward = vars(module).get("forward")
    with contextlib.ExitStack() as stack:
        if isinstance(forward, ConvertedForward):
            kept = forward.mode and forward.mode._replace(keep="all")
            stack.enter_context(patched_attribute(forward, "mode", lambda _: kept))
            stack.enter_context(patched_attribute(forward, "segment", lambda _: None))
        if isinstance(module, FusedModule):
            stack.enter_context(patched_attribute(module, "_mode", lambda mode: mode._replace(keep="all")))
        # Of a block that stands there twice, the gradients of segments are summed in another order.
        if isinstance(module, FusedCheckpointSequential) and 0 < len(module) == len(set(module)):
            stack.enter_context(patched_attribute(module, "segments", lambda _: len(module)))
        yield


def _units(model: nn.Module) -> list[list[nn.Module]]:
    """ckptfused's layers and modules, those together that save one input."""
    found: dict[Any, list[nn.Module]] = {}
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, ConvertedForward):
            found.setdefault(id(forward.segment or forward), []).append(module)
        elif isinstance(module, FusedModule | FusedCheckpointSequential):
            found.setdefault(id(module), []).append(module)
    return list(found.values())


def units(model: nn.Module) -> int:
    """How many of ckptfused's layers and modules save an input of their own."""
    return len(_units(model))


def fused(model: nn.Module) -> int:
    """How many layers keep more within `everything_saved`, beside those of PyTorch's checkpoints."""
    forwards = [vars(module).get("forward") for module in model.modules()]
    converted = [f for f in forwards if isinstance(f, ConvertedForward) and f.mode is not None and f.family is not None]
    return len(converted) + sum(isinstance(module, FusedModule) for module in model.modules())


def _no_replay(plain: Any, saves: Callable[[], bool]) -> Callable[..., Any]:
    def once(function: Any) -> Iterator[None]:
        # ckptfused's generic checkpoint puts hooks of its own around those of PyTorch's.
        ours = type(function).__module__.startswith("ckptfused.recompute")
        with saved_tensors_hooks(Tensor.detach, lambda t: t) if ours else contextlib.nullcontext():
            yield

    def generator(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        return once(function) if saves() else plain(function, *args, **kwargs)

    return generator


def _called(plain: Any, saves: Callable[[], bool]) -> Callable[..., Any]:
    def apply(function: Any, preserve: bool, *args: Any) -> Any:
        return function(*args) if saves() else plain.apply(function, preserve, *args)

    return apply
