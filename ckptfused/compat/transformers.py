"""What of Hugging Face transformers is not documented, once it is imported: 5.0 to 5.23 unless said otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

CONV1D = "transformers.pytorch_utils.Conv1D"
"""GPT-2's linear layer, whose weight is transposed."""


def _module(name: str) -> Any:
    return sys.modules.get(f"transformers.{name}")


def checkpointing_layer() -> Any:
    """The base of layers that Hugging Face checkpoints. `modeling_layers.GradientCheckpointingLayer`."""
    return getattr(_module("modeling_layers"), "GradientCheckpointingLayer", None)


def is_checkpointing_layer(module: Any) -> bool:
    """Whether Hugging Face can checkpoint a module, be it switched on or not."""
    base = checkpointing_layer()
    return base is not None and isinstance(module, base)


def checkpoint_of(layer: nn.Module) -> Callable[..., Any] | None:
    """The function that replays a layer, with its options; None before checkpointing is switched on.
    `_gradient_checkpointing_func`."""
    found = getattr(layer, "_gradient_checkpointing_func", None)
    return found if callable(found) else None


def beneath_checkpoint(cls: Any) -> Callable[..., Any] | None:
    """The forward that a class was written with, below Hugging Face's checkpoint of it; None for any other forward.
    `forward_with_checkpointing`, by `functools.wraps`, from 5.23 on."""
    name = getattr(getattr(cls.forward, "__code__", None), "co_name", "")
    return cls.forward.__wrapped__ if name == "forward_with_checkpointing" else None  # type: ignore[no-any-return]


def checkpoints_with_cache(layer: nn.Module) -> bool:
    """Whether a checkpointed layer keeps its cache. `_can_checkpoint_with_cache`: not in 5.14, in 5.18 to 5.23."""
    return getattr(layer, "_can_checkpoint_with_cache", False)


def collects(hook: Any) -> bool:
    """Whether a hook is one by which outputs are collected. `output_capturing.output_capturing_hook`, from 5.2 on."""
    place = (getattr(hook, "__module__", ""), getattr(hook, "__name__", ""))
    return place == ("transformers.utils.output_capturing", "output_capturing_hook")


def output_collector() -> Any:
    """The variable with what is collected just now; None where nothing can be. `_active_collector`, from 5.2 on."""
    return getattr(_module("utils.output_capturing"), "_active_collector", None)


def attention_implementation(config: Any) -> Any:
    """ "eager", "sdpa" or another name; None for a config that knows of none. `_attn_implementation`."""
    return getattr(config, "_attn_implementation", None)


def attention_function(implementation: str) -> Any:
    """What is registered by this name; None for "eager". `modeling_utils.ALL_ATTENTION_FUNCTIONS`."""
    return _module("modeling_utils").ALL_ATTENTION_FUNCTIONS.get(implementation)


def pretrained_model() -> Any:
    """The base of all models; None while transformers is not imported. `modeling_utils.PreTrainedModel`."""
    return getattr(_module("modeling_utils"), "PreTrainedModel", None)


def output_class(name: str) -> Any:
    """A class of a model's outputs. `modeling_outputs`."""
    return getattr(_module("modeling_outputs"), name)


def packing_lookup() -> tuple[Any, str] | None:
    """The place of the function that looks for packed sequences in position_ids; None where there is none.
    `masking_utils.find_packed_sequence_indices`."""
    masking, name = _module("masking_utils"), "find_packed_sequence_indices"
    return (masking, name) if hasattr(masking, name) else None


def key_sharing() -> Any:
    """The class of the dictionary by which layers hand on keys and values; None where there is none.
    `cache_utils.KVSharingDict`, not in 5.0, in 5.23."""
    return getattr(_module("cache_utils"), "KVSharingDict", None)


def knows(auto_class: Any, config: Any) -> bool:
    """Whether an `AutoModelFor…` has a model for a config of this class. `_model_mapping`."""
    return type(config) in auto_class._model_mapping


FLASH_CALL, FLASH_TYPE = "_flash_attention_forward", "get_target_dtype"
"""The names by which `flash_module` calls FlashAttention's kernels, and asks for the type that they take."""


def flash_module() -> Any:
    """The module through which layers call FlashAttention; None before it is imported."""
    return _module("integrations.flash_attention")


def experts_functions() -> Any:
    """The functions that experts of mixtures run by the name in their config, `ALL_EXPERTS_FUNCTIONS`; None where there
    are none. `integrations.moe`, once a model with experts is imported."""
    return getattr(_module("integrations.moe"), "ALL_EXPERTS_FUNCTIONS", None)


def experts_implementation(config: Any) -> Any:
    """ "eager", "grouped_mm" or another name. `_experts_implementation`."""
    return getattr(config, "_experts_implementation", None)


def own_experts_forward(cls: Any) -> Any:
    """The forward that a class of experts was written with, below what looks its implementation up.
    `use_experts_implementation`, by `functools.wraps`."""
    return getattr(cls.forward, "__wrapped__", None)


def is_expert_parallel(experts: nn.Module) -> bool | None:
    """Whether a module of experts holds a rank's part of them; None for any other module. `_is_expert_parallel`."""
    return getattr(experts, "_is_expert_parallel", None)


def gate_of(experts: Any) -> Callable[..., Any]:
    """What a module of experts makes of gate and up side by side. `_apply_gate`."""
    return experts._apply_gate  # type: ignore[no-any-return]
