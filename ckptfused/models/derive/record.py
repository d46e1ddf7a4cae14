"""A recording of one forward: its calls, what it was given, and what came out."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ckptfused.compat.pytree import tree_flatten
from ckptfused.models.derive.recorder import CallRecorder, Recorded, RefusedError, Value
from ckptfused.models.describe.saved_bytes import IndexReadError

_ASKS = "output_attentions"
RAISED = "its forward raised"
"""How the reason begins where a call was not one that the layer takes."""


class Recording:
    """A forward that was recorded: its calls, x, the result and what is around it."""

    def __init__(self, recorder: CallRecorder, x: Value, y: Any, unasked: bool) -> None:
        self.calls, self.x, self.roots = recorder.calls, x, recorder.roots
        leaves, self.tree = tree_flatten(y)
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        if not tensors or (len(tensors) > 1 and not unasked):
            raise RefusedError(f"the layer returns {len(tensors)} tensors, expected one")
        self.y, *self.beside = map(recorder.value, tensors)
        """`beside`: attention weights for which nobody asked, as the reading has to find."""
        self.place = [v is tensors[0] for v in leaves].index(True)
        """The place of the result among the leaves of what the forward returns."""
        self.leaves = [None if isinstance(v, Tensor) else v for v in leaves]

    def before(self, *ends: Value) -> list[Recorded]:
        """The calls on which values depend, in order."""
        found: dict[Recorded, None] = {}
        queue = [v.call for v in ends if v.call is not None]
        while queue:
            call = queue.pop()
            if call not in found:
                found[call] = None
                queue += [v.call for v in call.inputs if v.call is not None]
        return sorted(found, key=lambda call: call.number)


def forget_values(calls: Iterable[Recorded], *others: Value) -> None:
    """Leaves of the tensors of recorded calls their shapes and types alone, and no mask."""
    values = [*others]
    for call in calls:
        call.mask = None
        values += (*call.inputs, *call.values)
    for value in values:
        value.data = value.data.detach().to("meta")


def record(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wide: bool,
    generator: torch.Generator | None = None,
) -> Recording:
    """The recording of a copy's forward (see `copies`). x is its first argument, or the first tensor among them.

    **Raises** `RefusedError` where the forward does what no recording can follow.
    """
    recorder, state = CallRecorder(wide, generator), _state(layer)
    roots: list[Value] = []
    for i, leaf in enumerate(tree_flatten((args, kwargs))[0]):
        if isinstance(leaf, Tensor):
            roots.append(recorder.root(f"arg:{i}", leaf))
    if not roots:
        raise RefusedError("the layer is called without a tensor")
    for name, weight in layer.named_parameters():
        recorder.root(f"param:{name}", weight)
    for name, t in tensors_held(layer):
        recorder.root(f"buffer:{name}", t)
    drawn = random.getstate(), torch.get_rng_state() if wide else None
    try:
        with recorder:
            y = type(layer).forward(layer, *args, **kwargs)
    except (RefusedError, IndexReadError):
        raise
    except Exception as error:  # any forward may raise anything on arguments that were guessed
        raise RefusedError(f"{RAISED} {type(error).__name__}: {error}") from error
    if random.getstate() != drawn[0] or (drawn[1] is not None and not torch.equal(torch.get_rng_state(), drawn[1])):
        raise RefusedError("it draws random numbers beside those of dropout")
    if _state(layer) != state:
        raise RefusedError("its forward changes the layer's own attributes or buffers")
    return Recording(recorder, roots[0], y, _weights_unasked(layer, args, kwargs))


def _weights_unasked(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a forward is told by an argument of its own that nobody asks for attention's weights."""
    bound = inspect.signature(type(layer).forward).bind(layer, *args, **kwargs)
    bound.apply_defaults()
    asked = bound.arguments.get(_ASKS, bound.arguments.get("kwargs", {}).get(_ASKS, True))
    return asked is False or (asked is None and _ASKS in bound.arguments)


def tensors_held(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that modules hold beside parameters, by name: buffers and plain attributes."""
    for name, module in layer.named_modules():
        for key, t in (*module._buffers.items(), *vars(module).items()):
            if isinstance(t, Tensor):
                yield f"{name}.{key}".lstrip("."), t


def _state(layer: nn.Module) -> Any:
    """What a forward could change: attributes of modules by value, tensors by identity and version."""
    return [
        (key, (id(v), v._version) if isinstance(v, Tensor) else v if isinstance(v, _PLAIN) else _size(v))
        for module in layer.modules()
        for key, v in (*vars(module).items(), *module._buffers.items(), *module._parameters.items())
        if not key.startswith("_") or key in ("_buffers", "_parameters")
    ]


_PLAIN: Any = (int, float, str, bool, type(None))


def _size(value: Any) -> Any:
    return (id(value), len(value)) if isinstance(value, list | dict | set) else id(value)
