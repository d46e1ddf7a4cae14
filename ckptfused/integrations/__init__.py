"""Callbacks for the libraries that people train with; each library is imported when its callback is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptfused.integrations.axolotl import CkptfusedPlugin
    from ckptfused.integrations.lightning import LightningCallback
    from ckptfused.integrations.transformers import CkptfusedCallback

__all__ = ["CkptfusedCallback", "CkptfusedPlugin", "LightningCallback"]
_LIBRARY = {"CkptfusedCallback": "transformers", "CkptfusedPlugin": "axolotl", "LightningCallback": "lightning"}


def __getattr__(name: str) -> Any:
    if name not in _LIBRARY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LIBRARY[name]}"), name)
