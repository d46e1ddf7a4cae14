"""What a copy without data does not do as its model does: hooks on gradients, and what torch.compile made of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ckptfused.compat.torch_autograd import gradient_hooks
from ckptfused.compat.torch_modules import is_compiled

_UNSEEN = "_ckptfused_unseen"


def note_unseen(model: nn.Module, meta_copy: nn.Module) -> None:
    """Has a copy, and copies of it, know what of its model they lack."""
    vars(meta_copy)[_UNSEEN] = [*vars(model).get(_UNSEEN, ()), *_unseen(model)]


def unseen(meta_copy: nn.Module) -> list[str]:
    """What a copy lacks: why a step of it is no bound on a step of its model."""
    return list(vars(meta_copy).get(_UNSEEN, ()))


def _unseen(model: nn.Module) -> Iterator[str]:
    hooked = [name for name, p in model.named_parameters() if any(map(_is_foreign, gradient_hooks(p)))]
    if hooked:
        yield f"hooks on gradients ({len(hooked)}, the first on that of {hooked[0]}) are not run in a prediction"
    compiled = [name or type(module).__name__ for name, module in model.named_modules() if is_compiled(module)]
    if compiled:
        yield f"a prediction runs without torch.compile, which keeps what it chooses (of {compiled[0]})"


def _is_foreign(hook: Any) -> bool:
    function = getattr(hook, "func", hook)
    return not (getattr(function, "__module__", None) or "").startswith("ckptfused.")
