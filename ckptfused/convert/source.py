"""Whether a module still runs the code that an adapter was written from.

An adapter replaces a layer's `forward` by what it reads there. Another version of the library, a subclass or a
patch (Liger, hub kernels) may compute something else, so the source of each replaced `forward` is compared with
the source that was read. `python -m ckptfused.convert CLASS …` adds to known.json what is installed; an entry stays
there if the tests of its family pass with it.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import json
import textwrap
import tokenize
from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

KNOWN_FILE = Path(__file__).with_name("known.json")
# What tokens are worth beside their text: layout nothing, except where a block begins and ends.
_LAYOUT = {tokenize.COMMENT: "", tokenize.NL: "", tokenize.NEWLINE: "", tokenize.INDENT: "{", tokenize.DEDENT: "}"}


@cache
def known() -> dict[str, Any]:
    """What was read: `{"classes": {name: {fingerprint: version}}, "norms": {fingerprint: kind}}`."""
    return json.loads(KNOWN_FILE.read_text())


@lru_cache(maxsize=4096)
def fingerprint(function: Callable[..., Any]) -> str:
    """A hash of a function's statements, annotations, comments and docstring aside; "" where there is no source."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
        definition = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError):
        return ""
    if not isinstance(definition, ast.FunctionDef):
        return ""
    body = definition.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) and len(body) > 1:
        body = body[1:]
    names = [argument.arg for argument in definition.args.posonlyargs + definition.args.args]
    lines = "\n".join(source.splitlines()[body[0].lineno - 1 :])
    tokens = tokenize.generate_tokens(io.StringIO(textwrap.dedent(lines)).readline)
    text = "".join(_LAYOUT.get(token.type, token.string) for token in tokens)
    return hashlib.sha256(f"{','.join(names)}:{''.join(text.split())}".encode()).hexdigest()[:16]


# What was found out, so that a call of a layer looks it up only. torch.compile folds each answer and guards on what
# was asked about: a class or its forward that another library replaces is asked about anew.
_CLASS_NAMES: dict[type, str] = {}
_READ: dict[Any, bool] = {}
_NORMS: dict[Any, str | None] = {}


@torch.compiler.assume_constant_result
def class_name(cls: type) -> str:
    """`module.Class`, of the class that was written down: FSDP2 and others derive one of their own from it."""
    if cls not in _CLASS_NAMES:
        names = [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__]
        _CLASS_NAMES[cls] = next((name for name in names if name in known()["classes"]), names[0])
    return _CLASS_NAMES[cls]


@torch.compiler.assume_constant_result
def class_as_read(cls: Any, forward: Callable[..., Any]) -> bool:
    """Whether a class's forward is the one that was read."""
    if (cls, forward) not in _READ:
        _READ[cls, forward] = fingerprint(forward) in known()["classes"].get(class_name(cls), ())
    return _READ[cls, forward]


def patched(module: nn.Module) -> bool:
    """Whether a module's forward is another than its class's. Libraries that take a patch back leave the latter."""
    own = vars(module).get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def as_read(module: nn.Module) -> bool:
    """Whether this module's forward is its class's, and its class's is the one that was read."""
    return not patched(module) and class_as_read(type(module), type(module).forward)


@torch.compiler.assume_constant_result
def norm_of(cls: Any, forward: Callable[..., Any]) -> str | None:
    """The kind of norm that a class's forward computes, None if it is not known."""
    if (cls, forward) not in _NORMS:
        _NORMS[cls, forward] = known()["norms"].get(fingerprint(forward))
    return _NORMS[cls, forward]


def vouch(classes: Iterable[type], norms: Mapping[type, str]) -> None:
    """Takes the code of these classes as it is now for the code that was read. **Raises** `ValueError` without it."""
    for cls in (*classes, *norms):
        written = fingerprint(cls.forward)  # type: ignore[attr-defined]
        if not written:
            raise ValueError(f"{cls.__qualname__}: expected a class whose source can be read, found none")
        if cls in norms:
            known()["norms"][written] = norms[cls]
        known()["classes"].setdefault(f"{cls.__module__}.{cls.__qualname__}", {})[written] = "vouched for"
    for found in (_CLASS_NAMES, _READ, _NORMS):
        found.clear()  # type: ignore[attr-defined]
