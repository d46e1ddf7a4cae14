"""`checkpoint` and `checkpoint_sequential`: for everything that is not a transformer block."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import _disable_current_modes

from ckptfused import statistics
from ckptfused.arguments import Arguments


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = False,
    context_fn: Callable[[], tuple[Any, Any]] = torch_checkpoint.noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """Calls `function(*args, **kwargs)`, keeps its arguments only, and calls it again in backward.

    `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)` does the work, and its options mean what they mean
    there. Beyond it:

    - The function works on copies of its arguments: tensors, also those in lists, tuples, dicts, dataclasses and other
      pytrees, are copied when first written (copy-on-write), containers at once. In-place operations on them, such as a
      leading `nn.ReLU(inplace=True)`, give right gradients; the caller's tensors and containers stay as they were, with
      grad mode off too. Results have to be returned. Tensors that cannot be copied on write (subclasses, sparse, nested,
      pinned or shared memory) are copied at once, for as long as the function uses them.
    - Every tensor argument is guarded: changed in place before backward, it raises. Lists and dicts are replayed as they
      were.
    - The random state of the devices of all tensor arguments is replayed, not of positional ones alone.
    - The running statistics of batch and instance norms are updated once, where the modules can be found from the
      function: it is one, is a method of one, or has them in its closure, defaults, globals, attributes or arguments.

    **Saves** the tensors in `args` and `kwargs`, nothing else.

    **Recomputes** `function`, up to the last tensor that backward needs (`early_stop`).

    **Raises** `ValueError` for `use_reentrant=True`; `RuntimeError` in backward for a changed argument, with its name;
    `RuntimeError` in forward if the function writes to an argument that shares memory with another.

    **Source** `torch.utils.checkpoint`; `torch._lazy_clone` for the copies.
    """
    if use_reentrant:
        raise ValueError(
            "ckptfused.checkpoint: expected use_reentrant=False, got True; for reentrant checkpointing "
            "use torch.utils.checkpoint.checkpoint"
        )
    inputs = Arguments(args, kwargs)
    options: dict[str, Any] = {
        "use_reentrant": False,
        "determinism_check": determinism_check,
        "debug": debug,
        "early_stop": early_stop,
        "preserve_rng_state": preserve_rng_state,
    }
    if context_fn is not torch_checkpoint.noop_context_fn:  # Dynamo wants the default left out
        options["context_fn"] = context_fn
    tensors = inputs.take_tensors()
    if torch.compiler.is_compiling():
        # Functionalisation resolves writes, Inductor drops the copies that nobody writes to.
        return torch_checkpoint.checkpoint(
            lambda *given: inputs.call(function, [t.clone() for t in given]), *tensors, **options
        )
    saved = _Saved(inputs, tensors) if torch.is_grad_enabled() else None
    shared = _Shared(tensors)
    copies = shared.copy(tensors)
    aliases = _Aliases(inputs, tensors, copies) if _share_memory(tensors) else None
    if saved is not None:
        places = {t.device: t for t in tensors if t.device.type != "cpu"}
        # torch.utils.checkpoint reads from positional tensors which devices' random states to replay.
        markers = [torch.empty(0, device=device) for device in places]
        result = torch_checkpoint.checkpoint(_Segment(function, inputs, saved, copies), *markers, **options)
    else:
        result = inputs.call(function, copies)
    if aliases is not None:
        aliases.check()
    shared.end()
    return result


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[[Any], Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
) -> Any:
    """Calls the functions one after the other, in `segments` of equal length, each but the last under `checkpoint`.

    **Saves** the input of each segment but the last, and all that the last one saves.

    **Recomputes** the segments but the last.

    **Raises** `ValueError` unless 1 ≤ `segments` ≤ the number of functions; what `checkpoint` raises.

    **Source** `torch.utils.checkpoint.checkpoint_sequential`.
    """
    steps = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    if not 1 <= segments <= len(steps):
        raise ValueError(f"checkpoint_sequential: expected 1 to {len(steps)} segments, one function each, got {segments}")
    size = len(steps) // segments
    for i in range(segments - 1):
        part = _Chain(steps[i * size : (i + 1) * size])
        input = checkpoint(part, input, use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state)
    last = Arguments((input,), {})
    return last.call(_Chain(steps[(segments - 1) * size :]), [_copy_on_write(t) for t in last.take_tensors()])


@dataclass
class _Chain:
    steps: list[Callable[[Any], Any]]

    def __call__(self, value: Any) -> Any:
        for step in self.steps:
            value = step(value)
        return value


def _is_plain(t: Tensor) -> bool:
    return type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided and not t.is_nested


class _Segment:
    """The function with its arguments: called once in forward, then in every replay."""

    def __init__(self, function: Callable[..., Any], inputs: Arguments, saved: _Saved, copies: list[Tensor]) -> None:
        self.function, self.inputs, self.saved = function, inputs, saved
        self.first: list[Tensor] | None = copies

    def __call__(self, *markers: Tensor) -> Any:
        if self.first is not None:
            copies, self.first = self.first, None
            return self.inputs.call(self.function, copies)
        with _disable_current_modes():  # not the user's operations: selective checkpointing does not see them
            copies = [_copy_on_write(t) for t in self.saved.tensors()]
        with statistics.kept(statistics.modules_of((self.function, self.inputs.leaves)), _copy_on_write):
            return self.inputs.call(self.function, copies)


class _Saved:
    """The tensors among the arguments, held by autograd like any saved tensor: an enclosing checkpoint drops and
    remakes them, the user's hooks see them."""

    def __init__(self, inputs: Arguments, tensors: list[Tensor]) -> None:
        self.inputs = inputs
        self.holder = _Save.apply(torch.empty(0, requires_grad=True), *tensors)
        self.counters = [_version_counter(t) for t in tensors]
        self.versions = [None if counter is None else counter._version for counter in self.counters]

    def tensors(self) -> tuple[Tensor, ...]:
        for i, (counter, expected) in enumerate(zip(self.counters, self.versions)):
            if counter is not None and counter._version != expected:
                raise RuntimeError(
                    f"ckptfused.checkpoint: {self.inputs.name(i)} was changed in place between forward and backward: "
                    f"expected version {expected}, got version {counter._version}. The replay needs it as it was: "
                    "change a clone, or change it after backward"
                )
        return self.holder.grad_fn.saved_tensors


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, place: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("the result of _Save is never differentiated")


def _version_counter(t: Tensor) -> Tensor | None:
    """An empty tensor with the version counter of t; None where there is none to have."""
    try:
        counter = t.detach()
        counter.data = t.detach().new_empty(0)
        return counter if counter._version == t._version else None
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def _copy_on_write(t: Tensor) -> Tensor:
    """A tensor with the values and the gradient of t, which shares its memory until one of the two is written."""
    if _is_plain(t):
        try:
            return torch._lazy_clone(t)
        except (RuntimeError, NotImplementedError):  # memory that PyTorch did not allocate
            pass
    return t.clone()


class _Shared:
    """The caller's tensors that come to share memory with copies.

    In that state `Tensor.record_stream` does nothing, and `Tensor.data_ptr` makes the copy. It ends, without one, by
    asking for the pointer when no copy is left.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.own = [t if _is_plain(t) and not torch._C._is_cow_tensor(t) else None for t in tensors]
        self.copies: list[StorageWeakRef] = []

    def copy(self, tensors: list[Tensor]) -> list[Tensor]:
        copies = [_copy_on_write(t) for t in tensors]
        self.own = [t if t is not None and torch._C._is_cow_tensor(t) else None for t in self.own]
        self.copies = [StorageWeakRef(copy.untyped_storage()) for t, copy in zip(self.own, copies) if t is not None]
        return copies

    def end(self) -> None:
        for t, copy in zip((t for t in self.own if t is not None), self.copies):
            if copy.expired():
                t.data_ptr()


def _share_memory(tensors: list[Tensor]) -> bool:
    storages = [t.untyped_storage()._cdata for t in tensors if _is_plain(t)]
    return len(set(storages)) < len(storages)


class _Aliases:
    """Refuses a write to an argument that another one would have seen, had the function worked on the caller's own."""

    def __init__(self, inputs: Arguments, tensors: list[Tensor], copies: list[Tensor]) -> None:
        self.inputs = inputs
        self.tensors, self.copies = list(tensors), list(copies)
        self.versions = [_version(t) for t in copies]

    def check(self) -> None:
        written = [_version(t) != version for t, version in zip(self.copies, self.versions)]
        for i, j in itertools.permutations(range(len(self.tensors)), 2):
            if written[i] and _overlap(self.tensors[i], self.tensors[j]):
                raise RuntimeError(
                    f"ckptfused.checkpoint: the function changes {self.inputs.name(i)} in place, which shares memory with "
                    f"{self.inputs.name(j)}; each is a copy of its own there. Give the function one of the two, and take "
                    "the other from it inside"
                )


def _version(t: Tensor) -> int | None:
    return None if t.is_inference() else t._version


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have a byte in common."""
    if not (_is_plain(a) and _is_plain(b) and a.untyped_storage()._cdata == b.untyped_storage()._cdata):
        return False
    spans = [_span(t) for t in (a, b)]
    if max(start for start, _ in spans) >= min(stop for _, stop in spans):
        return False
    if a.element_size() != b.element_size():
        return True
    first = a.storage_offset() if spans[0][0] < spans[1][0] else b.storage_offset()
    used = torch.zeros(max(stop for _, stop in spans) // a.element_size() - first, dtype=torch.bool)
    used.as_strided(a.shape, a.stride(), a.storage_offset() - first).fill_(True)
    return bool(used.as_strided(b.shape, b.stride(), b.storage_offset() - first).any())


def _span(t: Tensor) -> tuple[int, int]:
    """The bytes of the storage between the first and the last element."""
    extent = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride())) + 1 if t.numel() else 0
    return t.storage_offset() * t.element_size(), (t.storage_offset() + extent) * t.element_size()
