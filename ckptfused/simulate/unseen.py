"""What a copy without data does not do as its model does: hooks on gradients, and what torch.compile made of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from ckptfused.compat.torch_autograd import gradient_hooks
from ckptfused.compat.torch_compile import told_of_calls
from ckptfused.compat.torch_modules import is_compiled
from ckptfused.state.fingerprints import batch_leaves

_UNSEEN = "_ckptfused_unseen"
_NOT_COMPILED = "a prediction runs without torch.compile, which keeps what it chooses"


def note_unseen(model: nn.Module, meta_copy: nn.Module) -> None:
    """Has a copy, and copies of it, know what of its model they lack."""
    vars(meta_copy)[_UNSEEN] = [*_noted(model), *_unseen(model)]


def compiled_calls_noted(meta_copy: nn.Module) -> AbstractContextManager[None]:
    """A context in which a step of a copy notes that its code calls compiled functions."""

    def note() -> None:
        if not any(why.startswith(_NOT_COMPILED) for why in _noted(meta_copy)):
            vars(meta_copy)[_UNSEEN] = [*_noted(meta_copy), f"{_NOT_COMPILED} (of functions that it calls)"]

    return told_of_calls(note)


def unseen(meta_copy: nn.Module, batch: Any) -> list[str]:
    """What a copy lacks, and a batch without data: why a step of them is no bound on a step of the model."""
    return [*_noted(meta_copy), *_hooked(("the batch", t) for t in batch_leaves(batch) if isinstance(t, Tensor))]


def _noted(model: nn.Module) -> list[str]:
    return vars(model).get(_UNSEEN, [])


def _unseen(model: nn.Module) -> Iterator[str]:
    yield from _hooked(_tensors(model))
    compiled = [name or type(module).__name__ for name, module in model.named_modules() if is_compiled(module)]
    if compiled:
        yield f"{_NOT_COMPILED} (of {compiled[0]})"


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers, and plain attributes, each by its name."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"{prefix}.{name}".lstrip("."), value


def _hooked(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    hooked = [name for name, t in tensors if any(map(_is_foreign, gradient_hooks(t)))]
    if hooked:
        yield f"hooks on gradients ({len(hooked)}, the first on that of {hooked[0]}) are not run in a prediction"


def _is_foreign(hook: Any) -> bool:
    function = getattr(hook, "func", hook)
    return not (getattr(function, "__module__", None) or "").startswith("ckptfused.")
