"""What the bits of a result depend on beside its arguments: threads, matmul precision, allowed libraries.

The C++ blocks note these in forward and compute their backward under them. Whoever replays in Python does it with the
functions here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

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
