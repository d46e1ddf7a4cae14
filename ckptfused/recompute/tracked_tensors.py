"""The tensors beside a function's arguments: which of them a forward wrote, and which were changed since."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused._extension import _C
from ckptfused.compat.pytree import tree_leaves
from ckptfused.compat.torch_autograd import unversioned
from ckptfused.compat.torch_dispatch import DispatchMode
from ckptfused.compat.torch_memory import is_view
from ckptfused.recompute.copy_on_write import is_plain_view, is_view_of_storage, storage_of, unseen_by_modes
from ckptfused.recompute.copy_on_write import write_count as version_of

# Up to this size a tensor is copied at each call: kernels may write it behind its version counter, as batch norm's do,
# and a later write may leave its values as they are. Larger ones are copied until a forward was seen that leaves them
# alone, and for good from the first that does not; the largest never.
STATISTICS, LARGE = 1 << 16, 1 << 26
_Noted = dict[int, weakref.ref[Tensor]]
"""By identity."""
_unwritten: _Noted = {}
_written: _Noted = {}
_left_alone: set[tuple[int, ...]] = set()
"""The tensors, by identity, of which `all_left_alone` knows as long as none of those noted dies or is written."""
_ORDINARY = (Tensor, nn.Parameter)
_NOW = object()

Place = tuple[nn.Module, str, str]


class TrackedTensor:
    """A tensor beside the arguments. `place`: the module, which of its dicts, and the name there; None elsewhere."""

    __slots__ = ("found", "place", "tensor", "version", "written")

    def __init__(
        self,
        tensor: Tensor,
        copy: bool,
        place: Place | None = None,
        version: int | object | None = _NOW,
        found: Tensor | None = None,
    ) -> None:
        self.tensor = tensor
        self.place = place
        self.version = version_of(tensor) if version is _NOW else version
        self.written = False
        always = place is not None and has_statistics(place[0])
        self.found = _clone(tensor) if copy and _can_be_copied(tensor, always) else found

    def look(self) -> None:
        """Sees in the forward, or after it, whether that has written it so far."""
        if version_of(self.tensor) != self.version or self._differs():
            self.is_written()

    def settle(self) -> None:
        """After the forward."""
        self.look()
        if not self.written and self.found is not None:
            _note(self.tensor, _unwritten)
            if self.place is None or self.found.nbytes > STATISTICS:
                self.found = None

    def is_written(self) -> TrackedTensor:
        """By the forward."""
        self.written, self.version = True, version_of(self.tensor)
        if byte_count(self.tensor) > STATISTICS or self.place is None:
            _note(self.tensor, _written)
        return self

    def is_copied_late(self) -> bool:
        """Whether a forward that writes it leaves nothing to replay from."""
        return self.found is None and not self.tensor.requires_grad and self.version is not None

    def _differs(self) -> bool:
        """Whether it has other values than before: batch norm's kernels write statistics behind the version counter."""
        if self.found is None or not is_plain_view(self.tensor):
            return False
        if not self.tensor.is_cpu:  # the host would have to wait for the answer
            return self.place is not None and (byte_count(self.tensor) <= STATISTICS or has_statistics(self.place[0]))
        return not _same_values(self.found, self.tensor, unknown=True)

    def changed(self) -> bool:
        """Whether somebody else wrote to it since the forward; a small one's own values (DDP's broadcast) are none."""
        if self.written or not is_view_of_storage(self.tensor):
            return False
        as_it_was = version_of(self.tensor) == self.version
        return not (as_it_was if self.found is None else _same_values(self.found, self.tensor, unknown=as_it_was))

    def replaced(self) -> bool:
        """Whether another parameter or buffer stands in its place now."""
        if self.place is None:
            return False
        module, place, name = self.place
        present = vars(module)[place].get(name)
        # Whoever shards weights replaces them all the time, and has its own at hand in the replay.
        ours = type(self.tensor) in _ORDINARY and (present is None or type(present) in _ORDINARY)
        return ours and present is not self.tensor


def shown_and_swapped(
    tracked: list[TrackedTensor],
) -> tuple[dict[tuple[nn.Module, str], dict[str, Any]], list[TrackedTensor]]:
    """What a replay is shown in the place of buffers and parameters, by module and dict; and the tensors that have
    their old values meanwhile: those outside modules, and those whose memory somebody else has, too.
    """
    written: dict[int, list[TrackedTensor]] = defaultdict(list)
    for w in tracked:
        if w.written:
            written[storage_of(w.tensor)].append(w)
    shown: dict[tuple[nn.Module, str], dict[str, Any]] = defaultdict(dict)
    swapped: list[TrackedTensor] = []
    placed: list[list[TrackedTensor]] = []
    for group in written.values():
        if len({id(w.tensor) for w in group}) > 1 or any(w.place is None for w in group):
            swapped += {id(w.tensor): w for w in group}.values()
        else:
            placed.append(group)
    copies = _clones(group[0].found for group in placed)  # type: ignore[misc]
    for group, one in zip(placed, copies, strict=True):
        for w in group:
            module, place, name = w.place  # type: ignore[misc]
            shown[module, place][name] = one
    for w in tracked:
        if not w.written and w.replaced():
            module, place, name = w.place  # type: ignore[misc]
            shown[module, place][name] = w.tensor
    return shown, swapped


@contextmanager
def with_old_values(swapped: list[TrackedTensor]) -> Iterator[None]:
    """A context in which the tensors have the values that the forward found, and no graph."""
    tensors = [w.tensor for w in swapped]
    now = _clones(tensors)
    with unversioned(*tensors):
        ends = [_end_of_graph(t) for t in tensors]
        for w in swapped:
            _fill(w.tensor, w.found)
        try:
            yield
        finally:
            for t, values, end in zip(tensors, now, ends, strict=True):
                _fill(t, values)
                if end is not None:
                    with torch.enable_grad(), unseen_by_modes():
                        _Rejoin.apply(t.detach_(), end)


def _end_of_graph(t: Tensor) -> Tensor | None:
    """The graph of a tensor into which the function accumulates, taken from it; None where it has none."""
    if t.grad_fn is None:
        return None
    if is_view(t):
        raise RuntimeError(
            f"ckptfused.checkpoint: the function itself changes a view of shape {list(t.shape)} in place, with a "
            "gradient: expected one that returns what it adds. Return it, and add it outside"
        )
    with torch.enable_grad(), unseen_by_modes():
        end = t.clone()  # a view would get the graph of the replay
    t.detach_()
    return end


class _Rejoin(torch.autograd.Function):
    """Gives a tensor its graph again."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, end: Tensor) -> Tensor:
        ctx.mark_dirty(t)
        return t

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, grads[0]


def has_statistics(module: nn.Module) -> bool:
    """Whether a module is a norm whose kernel writes its buffers, of any size, behind their version counters: in
    training, after any number of evaluations that leave them alone."""
    return "running_mean" in module._buffers


def byte_count(t: Tensor) -> int:
    """The bytes of a tensor; of a sparse one, which nobody copies, more than of any that is copied."""
    return LARGE + 1 if t.layout == torch.sparse_coo else t.nbytes


def _can_be_copied(t: Tensor, always: bool) -> bool:
    if t.requires_grad or t.is_inference() or not _C.is_readable(t):
        return False
    size = byte_count(t)
    return size <= STATISTICS or (size <= LARGE and (always or not is_left_alone(t)))


def is_left_alone(t: Tensor) -> bool:
    """Whether all forwards so far left it alone, and there was one."""
    left, written = _unwritten.get(id(t)), _written.get(id(t))
    return left is not None and left() is t and (written is None or written() is not t)


def all_left_alone(tensors: list[Tensor | None]) -> bool:
    """Whether each is a tensor of which `is_left_alone` holds."""
    places = tuple(map(id, tensors))
    if places in _left_alone:
        return True
    if not all(t is not None and is_left_alone(t) for t in tensors):
        return False
    _left_alone.add(places)
    return True


def _note(t: Tensor, noted: _Noted) -> None:
    place = id(t)
    if noted is _written:
        _left_alone.clear()
    if place not in noted:
        noted[place] = weakref.ref(t, lambda _: _forget(place, noted))


def _forget(place: int, noted: _Noted) -> None:
    noted.pop(place, None)
    _left_alone.clear()


def _clone(t: Tensor) -> Tensor | None:
    """A copy; None of what PyTorch cannot copy."""
    try:
        return _clones([t])[0]
    except (RuntimeError, NotImplementedError):
        return None


def _clones(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies without a graph."""
    with torch.no_grad(), unseen_by_modes():
        return [t.detach().clone() for t in tensors]


def _fill(t: Tensor, values: Tensor | None) -> None:
    if values is not None:
        with torch.no_grad(), unseen_by_modes(), unversioned(t):
            t.copy_(values)


def _same_values(a: Tensor, b: Tensor, unknown: bool) -> bool:
    """Whether all values are the same, NaN and NaN, too; `unknown` of types that PyTorch cannot compare."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    try:
        with torch.no_grad(), unseen_by_modes():
            return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
    except (RuntimeError, NotImplementedError):
        return unknown


class Reads(DispatchMode):
    """Raises where an operation takes a tensor in one of these storages."""

    def __init__(self, storages: dict[int, str]) -> None:
        super().__init__()
        self.storages = storages

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code within stays compiled; `check` sees what it saves."""
        return True

    def check(self, t: Tensor) -> None:
        """**Raises** `RuntimeError` for a tensor in one of the storages."""
        what = self.storages.get(storage_of(t)) if is_view_of_storage(t) else None
        if what is not None:
            raise RuntimeError(f"ckptfused.checkpoint: {what}. The replay needs it as it was: change it after backward")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor):
                self.check(t)
        return func(*args, **(kwargs or {}))
