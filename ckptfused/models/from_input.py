"""Steps of a layer of which no more is kept than the input of the first: what the others save is made again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ckptfused.compat.torch_modules import is_compiled
from ckptfused.layer.sdpa import under_foreign_mode
from ckptfused.layer.shards import holds_fsdp1, is_fully_sharded
from ckptfused.offload import follow
from ckptfused.ops.enclosing_checkpoint import captured, within_a_checkpoint
from ckptfused.recompute.copy_on_write import is_plain_view
from ckptfused.recompute.made_again import MadeAgain
from ckptfused.recompute.per_thread_tensors import entered

_proved: WeakKeyDictionary[nn.Module, set[Any]] = WeakKeyDictionary()
"""By layer, the kinds of calls that were seen to make the same again."""


def run_from_input(layer: nn.Module, x: Tensor, steps: Sequence[Callable[[Tensor], Sequence[Any]]]) -> list[Any]:
    """The x that steps make one after the other, each with what it returned beside; and all that they returned beside.

    Backward makes again, operation by operation, what they saved of x and of one another, but what was made
    `not_recorded`, which is kept.
    """
    again, proved = MadeAgain(), _proved.setdefault(layer, set())
    rest: list[Any] = []
    with entered():
        for step in steps:
            if not again.makes(x):
                follow(x)
            with again.at_work():
                x, *more = step(x)
            again.settle(proved)
            rest += more
        again.end()
    return [x, *rest]


def may_keep_input_alone(layer: nn.Module, x: Tensor) -> bool:
    """Whether `run_from_input` may run a layer: not within a checkpoint, which keeps nothing but replays all, nor where
    operations run that the dispatcher does not see, nor where a weight is there only while its own module runs.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or under_foreign_mode():
        return False
    if within_a_checkpoint() or captured(x) or not is_plain_view(x):
        return False
    inside = [module for module in layer.modules() if module is not layer]
    return not (holds_fsdp1(layer) or any(map(is_compiled, layer.modules())) or any(map(is_fully_sharded, inside)))
