"""Autograd's hooks for saved tensors, version counters and the task at work, and what others do with gradients. PyTorch
2.11 to 2.13 have every name."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph
from torch.nn.utils import clip_grad
from torch.utils import checkpoint as torch_checkpoint

from ckptfused.compat import patches
from ckptfused.compat.torch_compile import dynamo_at_work

SavedTensorHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""Pack and unpack, as `torch.autograd.graph.saved_tensors_hooks` takes them."""
_hooks: Any = torch._C._autograd

_TAKES_HOOKS_ALONG = tuple(int(number) for number in torch.__version__.split(".")[:2]) >= (2, 13)

_ACCEPTS = "_step_supports_amp_scaling"
CHECKPOINT_GENERATOR = "_checkpoint_without_reentrant_generator"
"""By this name `torch.utils.checkpoint` calls what `open_checkpoint` calls."""


def saved_tensor_hooks() -> Any:
    """This thread's innermost `SavedTensorHooks`; None without any. `_top_saved_tensors_default_hooks`."""
    return _hooks._top_saved_tensors_default_hooks(False)


def push_saved_tensor_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    """Puts hooks on top of this thread's. `_push_saved_tensors_default_hooks`."""
    _hooks._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensor_hooks() -> None:
    """Takes the innermost hooks away. `_pop_saved_tensors_default_hooks`."""
    _hooks._pop_saved_tensors_default_hooks()


def saved_tensor_hooks_allowed() -> bool:
    """Whether hooks may be pushed: transforms of torch.func forbid it. `_saved_tensors_hooks_is_enabled`."""
    return _hooks._saved_tensors_hooks_is_enabled()


def vmap_saves_inputs() -> bool:
    """Whether a checkpoint has no place for a replay within `torch.vmap`. `_NoopSaveInputs`: 2.11 alone."""
    return hasattr(torch_checkpoint, "_NoopSaveInputs")


def open_checkpoint(
    function: Callable[..., Any], preserve_rng_state: bool, options: Sequence[Any], *args: Any
) -> Generator[None, None, None]:
    """A non-reentrant checkpoint: from its hooks to the end of its forward. `CHECKPOINT_GENERATOR`."""
    generator: Any = getattr(torch_checkpoint, CHECKPOINT_GENERATOR)
    return generator(function, preserve_rng_state, *options, *args)


def checkpoint_of_torch(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`. Before PyTorch 2.13 its hooks stay behind when the function raises, for as
    long as the error lives. What keeps Dynamo out of it costs as much as all of its checks: it is for Dynamo alone."""
    if _TAKES_HOOKS_ALONG and dynamo_at_work() is not None:
        return torch_checkpoint.checkpoint(function, *args, **options)
    context_fn = options.get("context_fn", torch_checkpoint.noop_context_fn)
    rest = (context_fn, options["determinism_check"], options["debug"], options["early_stop"])
    opened = open_checkpoint(function, options["preserve_rng_state"], rest, *args)
    next(opened)
    try:
        result = function(*args)
    except BaseException as error:
        opened.throw(error)
        raise
    next(opened, None)
    return result


def graph_task() -> int:
    """The number of the backward at work in this thread; -1 for none. `_current_graph_task_id`."""
    return torch._C._current_graph_task_id()


def working_node() -> str:
    """The name of the node of autograd's graph that this thread runs, "" for none. `_current_autograd_node`."""
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name()


def unversioned(*tensors: Tensor) -> AbstractContextManager[None]:
    """A context whose writes autograd does not count. `_unsafe_preserve_version_counter`."""
    return torch.autograd._unsafe_preserve_version_counter(tensors)


def is_profiled() -> bool:
    """Whether a profiler records. `torch.autograd._profiler_enabled`."""
    return torch.autograd._profiler_enabled()


def parameter_hooks(p: Tensor) -> dict[int, Any] | None:
    """The hooks that run once a gradient is there. `_post_accumulate_grad_hooks`."""
    return getattr(p, "_post_accumulate_grad_hooks", None)


def gradient_hooks(t: Tensor) -> list[Any]:
    """The hooks on a leaf's gradient, before it is there and after, and those on its node of the graph."""
    held = {id(hooks): hooks for hooks in (tensor_hooks(t), parameter_hooks(t), *_node_hooks(t)) if hooks}
    return [hook for hooks in held.values() for hook in hooks.values()]


def _node_hooks(leaf: Tensor) -> list[dict[int, Any]]:
    """The dicts of Python's hooks on the node that adds to a leaf's gradient. The node, and they, live as long as
    somebody holds it; only Python's collector can list them. C++'s, as `DistributedDataParallel` has, are in none."""
    if not leaf.requires_grad or not leaf.is_leaf:
        return []
    with torch.inference_mode(False):
        node = graph.get_gradient_edge(leaf).node
    return [held for held in gc.get_referents(node) if isinstance(held, dict)]


def accept_scales(optimizer: torch.optim.Optimizer, accepts: bool) -> bool:
    """Has a GradScaler call an optimizer's step with `found_inf` set, whatever gradients there are, as it calls fused
    ones, or look at gradients itself; what it did before. `_step_supports_amp_scaling`."""
    before = bool(getattr(optimizer, _ACCEPTS, False))
    setattr(optimizer, _ACCEPTS, accepts)
    return before


def clipped_by(make: patches.Make) -> AbstractContextManager[None]:
    """A context in which `torch.nn.utils.clip_grad_norm_`, whoever imported it by what name, has another function that
    scales the gradients of a list of parameters. `_clip_grads_with_norm_`."""
    return patches.patched_attribute(clip_grad, "_clip_grads_with_norm_", make)


def tensor_hooks(t: Tensor) -> dict[int, Any] | None:
    """The hooks on a tensor's gradient; None before the first. `_backward_hooks`."""
    return t._backward_hooks  # type: ignore[attr-defined]


def set_tensor_hooks(t: Tensor, hooks: dict[int, Any] | None) -> None:
    """Exchanges the dict of hooks on a tensor's gradient. `_backward_hooks`."""
    t._backward_hooks = hooks  # type: ignore[attr-defined]
