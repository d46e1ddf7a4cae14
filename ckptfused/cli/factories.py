"""A function of the user's own that makes a model, by the name of its module."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ckptfused.cli.errors import CommandError
from ckptfused.spec.checks import nearest


def is_factory(text: str) -> bool:
    """Whether it names a function, as module:factory."""
    module, colon, name = text.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


@contextlib.contextmanager
def working_folder() -> Iterator[None]:
    """Modules are looked for in the working folder, too, as `python -m` does."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def check_there(text: str) -> None:
    """**Raises** `CommandError` where there is no such module, or one that Python has at hand has no such function.
    Nothing is imported for it: a user's module imports PyTorch, and only running it says which names it has."""
    module = text.partition(":")[0]
    package = module.partition(".")[0]
    if module in sys.modules:
        find(text)
        return
    with working_folder():
        there = package in sys.modules or importlib.util.find_spec(package) is not None
    if not there:
        raise CommandError(f"--config: expected module:factory, got {text!r} (no module {package!r})")


def find(text: str) -> Callable[[], Any]:
    """The function, with its module imported. **Raises** `CommandError` where there is none."""
    module, _, name = text.partition(":")
    try:
        found: Callable[[], Any] = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        near = nearest(name, vars(sys.modules[module]) if module in sys.modules else ())
        raise CommandError(f"--config: expected module:factory, got {text!r} ({error}){near}") from error
    return found
