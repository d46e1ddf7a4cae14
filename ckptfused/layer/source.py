"""Whether a module still runs the code that an adapter was written from.

An adapter replaces a layer's `forward` by what it reads there. Another version of the library, a subclass or a
patch (Liger, hub kernels) may compute something else, so the source of each replaced `forward`, and of the functions
that it calls, is compared with the source that was read. `python -m ckptfused.models CLASS …` adds to known.json what
is installed; an entry stays there if the tests of its family pass with it.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import json
import sys
import textwrap
import tokenize
from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ckptfused.compat.torch_compile import constant_result

KNOWN_FILE = Path(__file__).with_name("known.json")
# What tokens are worth beside their text: layout nothing, except where a block begins and ends.
_LAYOUT = {tokenize.COMMENT: "", tokenize.NL: "", tokenize.NEWLINE: "", tokenize.INDENT: "{", tokenize.DEDENT: "}"}


@cache
def known_code() -> dict[str, Any]:
    """What was read: `{"classes": {name: {fingerprint: version}}, "functions": …}`, the kind of norm by its fingerprint
    (`"norms"`) and of activation by the name of its class (`"activations"`)."""
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


class Called(NamedTuple):
    """A function that a forward calls: where it looks it up, and by which name."""

    namespace: dict[str, Any]
    name: str

    @property
    def value(self) -> Any:
        return self.namespace.get(self.name)

    @property
    def full_name(self) -> str:
        return f"{self.namespace['__name__']}.{self.name}"


@cache
def called_functions(function: Callable[..., Any]) -> tuple[Called, ...]:
    """The functions that a function calls by their global names, and those that these call in the same module.

    PyTorch's own are its own affair: nobody patches them for one model.
    """
    found: dict[str, Called] = {}
    queue: list[Any] = [inspect.unwrap(function)]
    while queue:
        caller = queue.pop()
        if not inspect.isfunction(caller) or caller.__module__.partition(".")[0] == "torch":
            continue
        for name in caller.__code__.co_names:
            callee = Called(caller.__globals__, name)
            value = unwrapped_kernel(callee.value)
            if name not in found and (inspect.isfunction(value) or callee.full_name in known_code()["functions"]):
                found[name] = callee
                if getattr(value, "__module__", None) == caller.__module__:
                    queue.append(value)
    return tuple(found.values())


def unwrapped_kernel(value: Any) -> Any:
    """The function that `kernels` made a module of, so that a kernel can take its place, while none does."""
    if isinstance(value, nn.Module) and hasattr(type(value), "kernel_layer_name") and not is_patched(value):
        cells = getattr(type(value).forward, "__closure__", None) or ()
        return next((cell.cell_contents for cell in cells if inspect.isfunction(cell.cell_contents)), value)
    return value


# What was found out, so that a call of a layer looks it up only. torch.compile folds each answer and guards on what
# was asked about: a class or its forward that another library replaces is asked about anew.
_CLASS_NAMES: dict[type, str] = {}
_UNREAD: dict[Any, str] = {}
_NORMS: dict[Any, str | None] = {}
_REPLACED: dict[Any, bool] = {}


@constant_result
def class_name(cls: type) -> str:
    """`module.Class`, of the class that was written down: FSDP2 and others derive one of their own from it."""
    if cls not in _CLASS_NAMES:
        names = [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__]
        _CLASS_NAMES[cls] = next((name for name in names if name in known_code()["classes"]), names[0])
    return _CLASS_NAMES[cls]


@constant_result
def unread(cls: Any, forward: Callable[..., Any]) -> str:
    """What a class's forward runs that is not what was read: the class's name, or a function's; "" if it is all.

    A function that is replaced after torch.compile ran is not seen.
    """
    now = tuple(unwrapped_kernel(callee.value) for callee in called_functions(forward))
    key = (cls, forward, now)
    if key not in _UNREAD:
        read = fingerprint(forward) in known_code()["classes"].get(class_name(cls), ())
        others = (callee.name for callee in called_functions(forward) if not _function_as_read(callee))
        _UNREAD[key] = next((f"{name} in {cls.__name__}" for name in others), "") if read else cls.__name__
    return _UNREAD[key]


def class_as_read(cls: Any, forward: Callable[..., Any]) -> bool:
    """Whether a class's forward is the one that was read."""
    return not unread(cls, forward)


@constant_result
def function_as_read(function: Any) -> bool:
    """Whether a function that a model holds is one that was read, and so are those that it calls."""
    if not inspect.isfunction(function):
        return False
    name = f"{function.__module__}.{function.__qualname__}"
    return fingerprint(function) in known_code()["functions"].get(name, ()) and all(
        map(_function_as_read, called_functions(function))
    )


def _function_as_read(callee: Called) -> bool:
    """Whether a function is the one that was read; of others it is enough to be of the library that calls them."""
    value, module = unwrapped_kernel(callee.value), callee.namespace["__name__"]
    marks = known_code()["functions"].get(callee.full_name)
    if marks is None:
        return getattr(value, "__module__", "").partition(".")[0] == module.partition(".")[0]
    return inspect.isfunction(value) and fingerprint(value) in marks


def is_patched(module: nn.Module) -> bool:
    """Whether a module's forward is another than its class's. Libraries that take a patch back leave the latter; one
    that does what it does says so (`as_its_class`): ours on PEFT's wrappers of experts.
    """
    own = vars(module).get("forward")
    if own is None or getattr(own, "as_its_class", False) is True or isinstance(module, torch.jit.ScriptModule):
        return False  # a scripted module has its forward of no class
    return getattr(own, "__func__", None) is not type(module).forward


def is_replaced(cls: Any) -> bool:
    """Whether somebody put another function in the place of `forward` or `__call__` of a class of PyTorch's or ours:
    all modules of it run something else. Other libraries' classes are for `as_read`.
    """
    return _replaced(cls, getattr(cls, "forward", None), cls.__call__)


@constant_result
def _replaced(cls: Any, forward: Any, call: Any) -> bool:
    # The doctor's only looks on, and passes on to what stood there. No key may hold it, and with it what it noted.
    while call.__globals__["__name__"].startswith("ckptfused.doctor."):
        call = call.__wrapped__
    key = (cls, forward, call)
    if key not in _REPLACED:
        base = next(base for base in cls.__mro__ if "forward" in vars(base))
        # Lists of modules are not called: they have nn.Module's placeholder.
        called = base is not nn.Module or forward.__name__ != nn.Module.forward.__name__
        ours = called and base.__module__.partition(".")[0] in ("torch", "ckptfused")
        # PyTorch's tracers put a __call__ of their own in the place of nn.Module's for a while.
        _REPLACED[key] = ours and not (_defined_in(base, forward) and call.__globals__["__name__"].startswith("torch."))
    return _REPLACED[key]


def _defined_in(cls: type, method: Any) -> bool:
    """Whether a method was written in its class, as far as a function says it of itself."""
    if not inspect.isfunction(method) or method.__globals__ is not vars(sys.modules[cls.__module__]):
        return False
    return method.__qualname__ == f"{cls.__qualname__}.{method.__name__}"


def as_read(module: nn.Module) -> bool:
    """Whether this module's forward is its class's, and its class's is the one that was read."""
    return not is_patched(module) and class_as_read(type(module), type(module).forward)


@constant_result
def norm_of(cls: Any, forward: Callable[..., Any]) -> str | None:
    """The kind of norm that a class's forward computes, None if it is not known."""
    if (cls, forward) not in _NORMS:
        _NORMS[cls, forward] = known_code()["norms"].get(fingerprint(forward))
    return _NORMS[cls, forward]


@constant_result
def activation_of(cls: Any) -> str | None:
    """The activation that a class computes as long as its code is the one that was read, None if it is not known."""
    return known_code()["activations"].get(f"{cls.__module__}.{cls.__qualname__}")


def note_functions(found: dict[str, Any], function: Callable[..., Any], said: str) -> None:
    """Writes down the functions that a function calls as they are now."""
    called_functions.cache_clear()
    for callee in called_functions(function):
        written = fingerprint(unwrapped_kernel(callee.value))
        if written:
            found["functions"].setdefault(callee.full_name, {}).setdefault(written, said)


def vouch(classes: Iterable[type], norms: Mapping[type, str]) -> None:
    """Takes the code of these classes as it is now for the code that was read. **Raises** `ValueError` without it."""
    for cls in (*classes, *norms):
        written = fingerprint(cls.forward)  # type: ignore[attr-defined]
        if not written:
            raise ValueError(f"{cls.__qualname__}: expected a class whose source can be read, found none")
        if cls in norms:
            known_code()["norms"][written] = norms[cls]
        known_code()["classes"].setdefault(f"{cls.__module__}.{cls.__qualname__}", {})[written] = "vouched for"
        note_functions(known_code(), cls.forward, "vouched for")  # type: ignore[attr-defined]
    for found in (_CLASS_NAMES, _UNREAD, _NORMS):
        found.clear()  # type: ignore[attr-defined]
