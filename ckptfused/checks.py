"""What only PyTorch can tell of an argument or of the moment; `ckptfused.spec.checks` has the plain checks."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.autograd import forward_ad


def check_generator(generator: object) -> None:
    """Raise unless dropout can draw from it."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: expected a torch.Generator or None, got {generator!r}")


def is_dtensor(value: object) -> bool:
    """Whether a tensor is distributed."""
    module: Any = sys.modules.get("torch.distributed.tensor")  # slow to import, and without it there is none
    return module is not None and isinstance(value, module.DTensor)


def transformed() -> bool:
    """Whether a transform of torch.func or a forward-mode derivative is taken, for which the ops have no rules."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
