"""What of PEFT is not documented: 0.18 to 0.21."""

from __future__ import annotations

from typing import Any

LORA_LINEARS = (
    "peft.tuners.lora.layer.Linear",
    "peft.tuners.lora.bnb.Linear4bit",
    "peft.tuners.lora.bnb.Linear8bitLt",
    "peft.tuners.lora.hqq.HqqLoraLinear",
    "peft.tuners.lora.gptq.GPTQLoraLinear",
    "peft.tuners.lora.awq.AwqLoraLinear",
)
"""LoRA's wrappers of a linear layer: PyTorch's (whatever torchao made of its weight) and those of other libraries'."""
PARAM_WRAPPER = "peft.tuners.lora.layer.ParamWrapper"
"""LoRA's wrapper of a module, one of whose parameters it adapts (`target_parameters`)."""
MODULES_TO_SAVE = "peft.utils.other.ModulesToSaveWrapper"
"""The wrapper of a module that is trained as a whole."""


def adapter_names(wrapper: Any) -> Any:
    """The names for which a `ModulesToSaveWrapper` has a copy. `_adapters`."""
    return wrapper._adapters
