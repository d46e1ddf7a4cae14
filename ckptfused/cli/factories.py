"""A function of the user's own that makes a model, by the name of its module: found, or missed at once."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from ckptfused.cli.errors import CommandError
from ckptfused.spec.checks import nearest

# A module whose source has one of these may have names that are not in its source.
_MAKES_NAMES = re.compile(r"import \*|__getattr__|globals|setattr|exec|__dict__|vars|sys\.modules")


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
    """**Raises** `CommandError` where the module or the function is surely not there. Nothing is imported for it, for a
    user's module imports PyTorch."""
    module, _, name = text.partition(":")
    if module in sys.modules:
        find(text)
        return
    with working_folder():
        spec = importlib.util.find_spec(module.partition(".")[0])
        for part in module.split(".")[1:]:
            spec = spec and _within(spec, part)
    if spec is None:
        raise CommandError(f"--config: expected module:factory, got {text!r} (no module {module!r})")
    if (source := _source(spec)) is not None and name not in re.findall(r"\w+", source):
        raise _missing(text, f"module {module!r} has no attribute {name!r}", _functions(source))


def find(text: str) -> Callable[[], Any]:
    """The function, with its module imported. **Raises** `CommandError` where there is none."""
    module, _, name = text.partition(":")
    try:
        found: Callable[[], Any] = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise _missing(text, str(error), vars(sys.modules[module]) if module in sys.modules else ()) from error
    return found


def _missing(text: str, why: str, names: Any) -> CommandError:
    near = nearest(text.partition(":")[2], names)
    return CommandError(f"--config: expected module:factory, got {text!r} ({why}){near}")


def _within(package: ModuleSpec, name: str) -> ModuleSpec | None:
    """The module of a package; the package itself where others than folders say what is in it."""
    if package.submodule_search_locations is None:
        return None
    try:
        places = [*package.submodule_search_locations]
        found = PathFinder.find_spec(f"{package.name}.{name}", places)
    except KeyError:  # a folder without __init__.py, which asks the package around it, and that is not imported
        return package
    return found if found is not None or all(map(os.path.isdir, places)) else package


def _source(spec: ModuleSpec) -> str | None:
    """A module's source, where all names that it has are in it."""
    try:
        source = Path(spec.origin or "").read_text()
        return None if _MAKES_NAMES.search(source) else source
    except (OSError, UnicodeDecodeError):
        return None


def _functions(source: str) -> list[str]:
    try:
        return [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    except SyntaxError:
        return []
