"""PyTorch's `checkpoint_wrapper`, a module around a layer, whose checkpoint a converted layer needs no more."""

from __future__ import annotations

from typing import Any

from torch import nn

from ckptfused.compat.torch_distributed import WRAPPED, checkpoint_wrappers
from ckptfused.layer.spec_text import Mode


def unwrapped(module: nn.Module, name: str = "") -> tuple[str, nn.Module]:
    """What wrappers of activations (`checkpoint_wrapper`, `offload_wrapper`) are around, and its name in the model."""
    wrappers = checkpoint_wrappers()
    while wrappers is not None and isinstance(module, wrappers.ActivationWrapper):
        name, module = f"{name}.{WRAPPED}".lstrip("."), getattr(module, WRAPPED)
    return name, module


def wrapper_note(model: nn.Module, name: str, mode: Mode) -> str:
    """What the report says of a `checkpoint_wrapper` around the layer of this name; nothing where there is none."""
    wrappers, (place, _, last) = checkpoint_wrappers(), name.rpartition(".")
    outer: Any = model.get_submodule(place) if last == WRAPPED else None
    if wrappers is None or not isinstance(outer, wrappers.CheckpointWrapper):
        return ""
    kind, options = type(outer).__name__, getattr(outer.checkpoint_fn, "keywords", {})
    if options.get("use_reentrant"):
        other = "" if options.get("preserve_rng_state", True) else ", with other dropout masks (preserve_rng_state)"
        return f"the reentrant {kind} around it replays it once more{other}"
    if mode.inputs_alone:
        return f"the {kind} around it has nothing to replay"
    return f"the {kind} around it saves the input alone, and replays what keep names"
