"""Loads the C++ extension, which registers the ops, and says how it was built."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType

import torch

from ckptfused.compat.versions import unsupported

_BUILD = "in the folder of ckptfused's source: pip install --no-build-isolation ."


def _load() -> ModuleType:
    name, versions = f"{__package__}._C", unsupported(torch.__version__)
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if error.name not in (name, "_C"):  # the loader of shared libraries leaves the package out
            raise
        if versions:
            raise ImportError(versions, name=name, path=error.path) from error
        if isinstance(error, ModuleNotFoundError):
            folder = Path(__file__).parent
            what = (
                f"is not built: expected _C for {sys.implementation.cache_tag} in {folder}, from where ckptfused is "
                "imported. If it is installed, this is its source, in whose folder Python does not see the installed "
                "copy: start in another folder, or run `make build` here. If not, build it"
            )
        else:
            what = (
                f"cannot be loaded. It was probably built against another PyTorch than {torch.__version__}, the one "
                f"at hand (the loader says: {error}). Build it again"
            )
        raise ImportError(f"ckptfused's extension {what}, {_BUILD}", name=name, path=error.path) from error
    if module.torch_version != torch.__version__:
        raise ImportError(
            versions
            or f"ckptfused was built against PyTorch {module.torch_version}, but {torch.__version__} is imported. "
            f"Build it again, {_BUILD}"
        )
    if versions:  # built all the same
        warnings.warn(versions, stacklevel=2)
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        # Loading the extension turns the lock on, unless that was forbidden.
        raise ImportError(
            "ckptfused needs Python's global interpreter lock: expected it on, got a free-threaded Python where "
            "PYTHON_GIL=0 or -X gil=0 keeps it off. Leave that setting out: Python then turns the lock on by itself, "
            "and says so in a RuntimeWarning"
        )
    return module


_C = _load()
