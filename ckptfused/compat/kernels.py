"""Other kernels for operations of PyTorch in one thread, for a while: nothing that another thread sees is replaced.

They are at the dispatch key that PyTorch leaves to other libraries' modes, which comes before autograd and autocast. A
thread's calls go by way of it within `replaced_kernels` alone.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ckptfused.compat.patches import LOCK
from ckptfused.compat.torch_compile import load_dynamo

Kernel = Callable[..., Any]
"""Called with the operation as it goes on without it, and with the operation's arguments."""
_KEY = "DeferredInit"
_PARSED: Any = torch._C._parse_dispatch_key(_KEY)


class _Here(threading.local):
    """The kernels of this thread, by the names of operations; those of the innermost context are last."""

    def __init__(self) -> None:
        self.kernels: list[Mapping[str, Kernel]] = []


_here = _Here()
_registered: dict[str, Any] = {}
_libraries: list[torch.library.Library] = []  # kernels last as long as their library


@contextlib.contextmanager
def replaced_kernels(kernels: Mapping[str, Kernel]) -> Iterator[None]:
    """A context in which this thread's calls of operations, by names such as "aten::mm.out", go to these kernels."""
    load_dynamo()
    _register(kernels)
    _here.kernels.append(kernels)
    try:
        with torch._C._IncludeDispatchKeyGuard(_PARSED):
            yield
    finally:
        _here.kernels.pop()


def without_replaced() -> contextlib.AbstractContextManager[Any]:
    """A context in which operations run as they are, for a kernel whose operation is made of others."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_PARSED))


def operation(name: str) -> Any:
    """An operation by its name."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def _register(names: Mapping[str, Kernel]) -> None:
    with LOCK:
        if not _libraries:
            everything = torch.library.Library("_", "IMPL")
            everything.fallback(torch.library.fallthrough_kernel, _KEY)
            _libraries.append(everything)
        new = [name for name in names if name not in _registered]
        for namespace in sorted({name.partition("::")[0] for name in new}):
            library = torch.library.Library(namespace, "IMPL")
            _libraries.append(library)
            for name in new:
                if name.startswith(f"{namespace}::"):
                    _registered[name] = _at_key(name)
                    library.impl(name.partition("::")[2], _registered[name], _KEY, with_keyset=True)


def _at_key(name: str) -> Callable[..., Any]:
    op, after = operation(name), torch._C._dispatch_keyset_full_after(_PARSED)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        below = functools.partial(op.redispatch, keys & after)
        own = _here.kernels[-1].get(name) if _here.kernels else None
        return below(*args, **kwargs) if own is None else own(below, *args, **kwargs)

    return kernel
