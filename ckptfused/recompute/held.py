"""Saved tensors that stay where they are: held by autograd by way of hooks, and checked when they are asked for."""

from __future__ import annotations

from torch import Tensor, nn

from ckptfused.compat.torch_distributed import is_partitioned
from ckptfused.compat.torch_memory import storage_id
from ckptfused.recompute.copy_on_write import write_count


class Held:
    """A tensor that stays where it is. PyTorch checks none that a hook took, so `take` does."""

    def __init__(self, t: Tensor) -> None:
        self._t = t if t.is_leaf else t.detach()  # with its graph, a node that saves its own result would hold itself
        self._version = write_count(t)
        self._memory = storage_id(t) if type(t) is nn.Parameter else 0

    def take(self) -> Tensor:
        """The tensor. **Raises** `RuntimeError` if it was changed in place, or got other memory."""
        check_unchanged(described(self._t), write_count(self._t), self._version)
        if self._memory and storage_id(self._t) != self._memory and not is_partitioned(self._t):
            raise RuntimeError(
                f"ckptfused: {described(self._t)} got other memory since forward (`t.data = …`, a move of the model): "
                "run backward first"
            )
        return self._t


def described(t: Tensor) -> str:
    """What an error calls a saved tensor."""
    return f"[{t.type()} {list(t.shape)}]"


def check_unchanged(name: str, found: int | None, expected: int | None) -> None:
    """**Raises** as PyTorch does for a saved tensor that no hook took."""
    if found != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{name} is at version {found}; expected version {expected} instead. Change a clone, or change it after "
            "backward"
        )
