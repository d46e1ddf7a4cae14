"""Loads the C++ extension, which registers the ops, and says how it was built."""

from __future__ import annotations

from types import ModuleType

import torch

_REBUILD = (
    "Rebuild it with: pip install --no-build-isolation --force-reinstall --no-deps ckptfused "
    "(or, in a checkout, pip install --no-build-isolation -e .)."
)


def _load() -> ModuleType:
    try:
        from ckptfused import _C
    except ImportError as error:
        if not str(error.name or "").endswith("_C") and "undefined symbol" not in str(error):
            raise
        raise ImportError(
            "ckptfused's extension cannot be loaded: it is not built, or it was built against another PyTorch than "
            f"{torch.__version__}, the one at hand. {_REBUILD} The loader said: {error}"
        ) from error
    built_against = _C.torch_version
    if built_against != torch.__version__:
        raise ImportError(
            f"ckptfused was built against PyTorch {built_against}, but {torch.__version__} is imported. {_REBUILD}"
        )
    return _C


_C = _load()
