"""What of Triton is asked for without its import, 3.6, which PyTorch 2.11 brings, and later."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util


@functools.cache
def triton_version() -> str:
    """The installed Triton's version; empty without Triton. `importlib.metadata`."""
    if importlib.util.find_spec("triton") is None:
        return ""
    names = importlib.metadata.packages_distributions().get("triton", ["triton"])
    return importlib.metadata.version(names[0])
