"""The step of an optimizer whose tensors have no data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode


def take_step(optimizer: Optimizer, kind: str, sparse: bool) -> tuple[list[str], bool, bool]:
    """Has an optimizer take a step, so that it has its state; a note where it cannot without data, or looks at numbers.
    Whether its step holds nothing that is counted: it is one kernel, or cannot be taken; and whether all of it counts.

    Fused ones know no meta tensors, but keep what others of their class do. Those that can take all parameters at once
    do so where they are told, and on a GPU where they are not told otherwise.

    sparse: whether some gradients are sparse.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    name, numbers = type(optimizer).__name__, _Ones()
    fused = all(group.get("fused") for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        together = group.get("foreach", False)
        if together is None:
            together = kind == "cuda" and not group.get("fused")
        group.update({name: False for name in ("fused", "foreach") if name in group})
        if together:
            group["foreach"] = True
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    try:
        with numbers:
            optimizer.step()
    except (RuntimeError, TypeError, AssertionError) as error:  # a closure is wanted, too
        counts = (
            "its state does not count, nor does" if len(optimizer.state) < len(trained) else "its state counts, not"
        )
        return [f"{name} takes no step without data ({first_line(error)}): {counts} what its step holds"], True, False
    finally:
        for parameter in trained:
            parameter.grad = None
    if sparse and optimizer.state:
        why = f"{name} takes no step without data of sparse gradients: its state counts as that of dense ones"
        return [why], True, False
    asked = f"{name} looks at numbers, such as norms, for which 1 is taken: what it holds is that of such a step"
    return [asked] * numbers.asked, fused, True


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """What an optimizer keeps between steps: its state, and what else its attributes hold (a base optimizer, weights in
    full precision), but the weights that it updates.
    """
    own = (p for group in optimizer.param_groups for p in group["params"])
    seen = {*map(id, own), id(optimizer.param_groups), id(optimizer.defaults)}
    found: list[Tensor] = []
    near: list[Any] = [vars(optimizer)]
    while near:
        value = near.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found += [value] if value.grad is None else [value, value.grad]
        elif isinstance(value, dict):
            near += value.values()
        elif isinstance(value, list | tuple | set):
            near += value
        elif isinstance(value, Optimizer):
            near.append(vars(value))
    return found


class _Ones(TorchFunctionMode):
    """The numbers that an optimizer asks of tensors without data, such as a norm, are 1: most change values alone."""

    asked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.item, Tensor.__float__, Tensor.__bool__) and args[0].is_meta:
            self.asked = True
            return True if func is Tensor.__bool__ else 1.0
        return func(*args, **(kwargs or {}))


def step_of(optimizer: Optimizer) -> Callable[[], None]:
    """The step of an optimizer whose tensors have no data."""

    def step() -> None:
        with _Ones():
            optimizer.step()

    return step


def first_line(error: Exception) -> str:
    """The first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
