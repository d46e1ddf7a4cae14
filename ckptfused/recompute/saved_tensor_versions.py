"""What backward gets: what a replay saves, as it was saved, or what the forward itself did where no replay can."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from ckptfused.compat.torch_autograd import saved_tensor_hooks
from ckptfused.compat.torch_compile import dynamo_at_work, not_disabled
from ckptfused.ops.enclosing_checkpoint import forget_past_replays
from ckptfused.recompute.copy_on_write import write_count

_hooks = torch.autograd.graph.saved_tensors_hooks
_NOTHING = (0, None)


class _Packed:
    """What autograd holds in the place of a tensor that the forward saved and that waits for `settle`: then that
    tensor, or what PyTorch's checkpoint gave for it."""

    __slots__ = ("expected", "holder", "place", "tensor")

    def __init__(self, place: int, tensor: Tensor) -> None:
        self.place = place
        self.tensor: Tensor | None = tensor
        self.expected = write_count(tensor)
        self.holder: Any = None


class SavedTensorVersions:
    """Sees an operation in place between the moment a replay saves a tensor and the one in which backward gets it.

    PyTorch asks no version of a tensor that a hook has saved, so `torch.utils.checkpoint` hands out the changed one.
    """

    def __init__(self) -> None:
        self._saved: dict[int, tuple[int, int | None]] = {}  # by place: identity and version of what a replay saved
        self._waiting: list[tuple[_Packed, Callable[[Tensor], Any]]] = []
        self._replayed = False

    def of_forward(self, held: bool = False) -> AbstractContextManager[Any]:
        """Around the forward, within the hooks that start its replay. held: these get what it saves from `settle`."""
        pack, unpack = saved_tensor_hooks()
        places = itertools.count()

        def replayed(place: int, holder: Any) -> Tensor:
            t: Tensor = unpack(holder)
            identity, expected = self._saved.pop(place, _NOTHING)
            if identity == id(t):
                _check(t, expected)
            return t

        if not held:
            return _hooks(lambda t: (next(places), pack(t)), lambda packed: replayed(*packed))

        def get(packed: _Packed) -> Tensor:
            if packed.tensor is None:
                return replayed(packed.place, packed.holder)
            _check(packed.tensor, packed.expected)
            return packed.tensor

        def put(t: Tensor) -> _Packed:
            packed = _Packed(next(places), t)
            self._waiting.append((packed, pack))
            return packed

        return self._cleared_by_failure(_hooks(put, get))

    @contextmanager
    def _cleared_by_failure(self, hooks: AbstractContextManager[Any]) -> Iterator[None]:
        try:
            with hooks:
                yield
        except BaseException:
            for packed, _ in self._waiting:
                packed.tensor = None
            self._waiting.clear()
            raise

    def settle(self, can_be_replayed: bool) -> None:
        """After the forward: lets go of what it saved, or has backward get that, in the place of a replay."""
        waiting, self._waiting = self._waiting, []
        for packed, pack in waiting:
            if can_be_replayed:
                packed.holder, packed.tensor = pack(packed.tensor), None  # type: ignore[arg-type]
            else:  # without its graph: PyTorch puts that back, and it would hold what holds this
                packed.tensor = packed.tensor.detach()  # type: ignore[union-attr]

    def of_replay(self, saved: Callable[[Tensor], Tensor]) -> AbstractContextManager[Any]:
        """Around a replay; `saved` says what is saved in the place of a tensor."""
        pack, unpack = saved_tensor_hooks()
        if self._replayed:
            forget_past_replays((pack, unpack))
        self._replayed = True
        places = itertools.count()
        directly = not_disabled(pack)

        def put(given: Tensor) -> tuple[Any, Tensor, int | None]:
            t = saved(given)
            t = t.detach() if t.requires_grad else t  # as PyTorch's hook would; it then keeps this very object
            self._saved[next(places)] = id(t), (now := write_count(t))
            # What keeps Dynamo out of PyTorch's hook takes longer than the hook.
            return (directly if dynamo_at_work() is None else pack)(t), t, now

        def get(packed: tuple[Any, Tensor, int | None]) -> Any:
            """For a backward within the function."""
            value, t, expected = packed
            _check(t, expected)
            return unpack(value)

        put.hands_on_to = pack  # type: ignore[attr-defined]  # outer_checkpoint asks how much more the replay waits for
        return _hooks(put, get)


def _check(t: Tensor, expected: int | None) -> None:
    if (now := write_count(t)) != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{t.type()} {list(t.shape)}], saved within ckptfused.checkpoint, is at version {now}; expected "
            f"version {expected} instead. Hint: without a checkpoint, torch.autograd.set_detect_anomaly(True) finds "
            "the operation that failed to compute its gradient"
        )
