"""What the bits of a result depend on beside its arguments: threads, matmul precision, allowed libraries.

The C++ blocks note these in forward and compute their backward under them. Whoever replays in Python does it with the
functions here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple

import torch

from ckptfused._extension import _C

Settings = tuple[int, ...]


def current() -> Settings | None:
    """The settings of the calling thread and of the process; None in code that is being compiled.

    A compiled graph computes under whatever holds when it runs: nothing in it reads or sets them.
    """
    return None if torch.compiler.is_compiling() else tuple(_C.current_settings())


def under(settings: Settings | None) -> AbstractContextManager[None]:
    """A context in which these hold. What it changed it sets back in the end; None changes nothing."""
    return nullcontext() if settings is None else _C.UnderSettings(settings)


class Modes(NamedTuple):
    """Whether gradients, and on each kind of device autocast, are on, and to which type it casts."""

    grad: bool
    casts: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls) -> Modes:
        """The modes of this thread."""
        kinds = ("cpu", "cuda")
        casts = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        return cls(torch.is_grad_enabled(), casts)

    @contextmanager
    def on(self) -> Iterator[None]:
        """A context in which they are on."""
        with torch.set_grad_enabled(self.grad), ExitStack() as casts:
            for (kind, enabled, dtype), now in zip(self.casts, Modes.now().casts, strict=True):
                if (kind, enabled, dtype) != now:
                    casts.enter_context(torch.autocast(kind, dtype, enabled))
            yield
