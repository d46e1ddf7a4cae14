"""Ops of PyTorch's that run alone on the CPU at hand, on tensors like those that a prediction has without data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ckptfused.compat.pytree import tree_flatten, tree_unflatten
from ckptfused.compat.torch_memory import copy_on_write, is_cow


@dataclass(frozen=True)
class Like:
    """A tensor that is not there."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    conjugated: bool = False
    """A kernel may copy it to have its values."""

    @classmethod
    def of(cls, t: Tensor) -> Like:
        return cls(tuple(t.shape), tuple(t.stride()), t.dtype, t.is_conj())

    @classmethod
    def matrix(cls, rows: int, columns: int, dtype: torch.dtype) -> Like:
        return cls((rows, columns), (columns, 1), dtype)

    def t(self) -> Like:
        return Like(self.shape[::-1], self.strides[::-1], self.dtype)

    def made(self) -> Tensor:
        """One on the CPU. Integers are 0, which is an index of anything."""
        value = 1 if self.dtype.is_floating_point or self.dtype == torch.bool else 0
        one_each = [1 if stride == 0 else size for size, stride in zip(self.shape, self.strides, strict=True)]
        made = torch.empty_strided(one_each, self.strides, dtype=self.dtype).fill_(value)
        made = made.conj() if self.conjugated else made
        return made if made.shape == self.shape else made.expand(self.shape)


class OpCall:
    """A call of an op. Its kind are shapes, strides and types of tensors, and other arguments but fractions: whether a
    probability is 0, or a norm's order 2, may decide what is allocated."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any = None) -> None:
        self._function = function
        self._given = (args, kwargs or {})
        self.kind: Hashable = (function, _kind(self._given))

    def run(self, observe: Callable[[Callable[[], Any]], None]) -> bool:
        """Has the op observed, in a thread of its own, where no ledger, mode or autocast of the caller's is at work;
        whether it took its arguments."""
        return self._in_thread(lambda run, _: observe(run))

    def run_with_copies(self, copies: Sequence[bool], observe: Callable[[Callable[[], Any], int], None]) -> bool:
        """The same with these of its tensors as copies on write, of so many bytes, of others that are there."""
        held: list[tuple[Tensor, Tensor]] = []
        left = iter(copies)

        def given(t: Tensor) -> Tensor:
            if next(left):
                held.append((t, copy_on_write(t)))
                return held[-1][1]
            return t

        return self._in_thread(lambda run, _: observe(run, sum(t.untyped_storage().nbytes() for t, _ in held)), given)

    def copies_made(self) -> list[bool] | None:
        """Whether the op makes a copy-on-write argument get memory of its own, for each tensor among them: so does one
        that asks for memory to write, though it only reads. None: it does not take its arguments."""
        found: list[bool] = []

        def observed(run: Callable[[], Any], tensors: list[Tensor]) -> None:
            run()
            found.extend(not is_cow(t) for t in tensors)

        return found if self._in_thread(observed, copy_on_write) else None

    def _in_thread(
        self,
        observe: Callable[[Callable[[], Any], list[Tensor]], None],
        given: Callable[[Tensor], Tensor] | None = None,
    ) -> bool:
        done: list[bool] = []
        thread = threading.Thread(target=self._run, args=(observe, given, done, torch.get_num_threads()))
        thread.start()
        thread.join()
        return bool(done)

    def _run(self, observe: Any, given: Callable[[Tensor], Tensor] | None, done: list[bool], threads: int) -> None:
        if torch.get_num_threads() != threads:  # a new thread begins with as many as the environment says
            torch.set_num_threads(threads)
        leaves, structure = tree_flatten(self._given)
        likes = {
            id(leaf): Like.of(leaf) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
            if isinstance(leaf, Tensor | Like)
        }
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                made = {key: like.made() for key, like in likes.items()}
                if given is not None:
                    made = {key: given(t) for key, t in made.items()}
                args, kwargs = tree_unflatten([made.get(id(leaf), leaf) for leaf in leaves], structure)
                observe(lambda: self._function(*args, **kwargs), [*made.values()])
                done.append(True)
            except Exception:  # whatever an op has against such arguments; kept, its frames would hold the tensors
                return


def _kind(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            return value.layout
        return value.shape, value.stride(), value.dtype, value.is_conj()
    if isinstance(value, tuple | list):
        return tuple(map(_kind, value))
    if isinstance(value, dict):
        return tuple((name, _kind(given)) for name, given in value.items())
    if isinstance(value, float) and isfinite(value) and not value.is_integer():
        return float
    return value if isinstance(value, Like) else repr(value)
