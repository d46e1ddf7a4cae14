"""Language models on the meta device, as the ways of training at hand make them: plain, checkpointed, converted."""

from __future__ import annotations

import logging
import warnings
from math import lcm
from typing import Any

import torch
from torch import nn

from ckptfused.cli.extrapolate import extrapolated
from ckptfused.cli.longest_context import language_step
from ckptfused.compat.quantizers import load_in_4bit
from ckptfused.compat.transformers import knows
from ckptfused.models.install import install
from ckptfused.models.policy import CheckpointPolicy
from ckptfused.profiler.result import Profile
from ckptfused.simulate.meta_copy import copy_to_meta

UNCONVERTED_MODEL, CHECKPOINTED = "Hugging Face", "its gradient checkpointing"


def _call(**options: Any) -> str:
    """How a user writes it."""
    said = [f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}" for name, value in options.items()]
    return f"convert({', '.join(['model', *said])})"


_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"loss": "chunked"},
    {"loss": "chunked", "scratch": "256MiB"},
    {"loss": "chunked", "scratch": "1GiB", "offload": True},
)
"""Options of `convert` that are tried. Beside offload a gigabyte of scratch is little, and tiles of it cost no time."""
_CONVERSIONS = {_call(**options): options for options in _OPTIONS}
CONVERTED, CHUNKED, LEAST, OFFLOADED = _CONVERSIONS
PAIRED = f"{OFFLOADED}, in segments of two"
"""`CheckpointPolicy.segments((layers + 1) // 2, …)`: half of the inputs on the host, each second layer made again."""
VARIANTS = (UNCONVERTED_MODEL, CHECKPOINTED, CONVERTED, CHUNKED, LEAST, OFFLOADED, PAIRED)

# Of whose layers all are alike, or repeat as the configuration's layer_types say.
_UNIFORM = ("gemma", "gemma2", "llama", "mistral", "phi3", "qwen2", "qwen3")


class Trained:
    """A language model as it trains, of which steps of any length are predicted.

    Where its layers repeat, models of a few of them are built and `extrapolated`: the same numbers, sooner.
    """

    def __init__(
        self, config: dict[str, Any], variant: str, dtype: torch.dtype, lora: int | None = None, four_bit: bool = False
    ) -> None:
        self._depth, self._period = _depth(config, 2 if variant == PAIRED else 1)
        # Inputs come back while the layer above runs; not the last layer's, and with frozen embeddings not the first's.
        self._ends = 3 if variant in (OFFLOADED, PAIRED) else 1
        found, periods = (self._depth,), 2 * self._ends
        if self._period is not None and self._depth > (periods + 1) * self._period:
            found = (periods * self._period, (periods + 1) * self._period)  # type: ignore[assignment]
        how = (variant, dtype, lora, four_bit)
        self._models = [(depth, build_language_model(_cut(config, depth), *how)) for depth in found]
        self._stream = _config(config).hidden_size * dtype.itemsize

    def step(self, tokens: int, sequences: int = 1, **options: Any) -> Profile:
        """`language_step`."""
        found = [(depth, language_step(model, tokens, sequences, **options)) for depth, model in self._models]
        if len(found) == 1:
            return found[0][1]
        (less, few), (greater, more) = found
        return extrapolated(few, more, (less, greater, self._depth), self._period or 1, self._ends)

    def least(self, tokens: int, sequences: int = 1) -> int:
        """Bytes that such a step takes at least, known without predicting it: those of one layer's result."""
        return tokens * sequences * self._stream


def _depth(config: dict[str, Any], segment: int) -> tuple[int, int | None]:
    """How many layers there are, and after how many they repeat, in segments of so many; None: not known."""
    own = _config(config)
    depth, kinds = own.num_hidden_layers, getattr(own, "layer_types", None)
    if config["model_type"] not in _UNIFORM:
        return depth, None
    periods = range(1, depth + 1)
    period = 1 if kinds is None else next(p for p in periods if kinds == (kinds[:p] * depth)[:depth])
    period = lcm(period, segment)
    return depth, None if depth % period else period


def _cut(config: dict[str, Any], layers: int) -> dict[str, Any]:
    kinds = {"layer_types": config["layer_types"][:layers]} if config.get("layer_types") else {}
    return config | {"num_hidden_layers": layers} | kinds


def _config(config: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    options = {name: value for name, value in config.items() if name not in ("model_type", "dtype", "torch_dtype")}
    return AutoConfig.for_model(config["model_type"], **options | {"use_cache": False})


def _kind(config: Any) -> Any:
    """The class that learns tokens from tokens: a decoder's, else an encoder and decoder's, else an encoder's."""
    import transformers as hf

    kinds: list[Any] = [hf.AutoModelForCausalLM, hf.AutoModelForSeq2SeqLM, hf.AutoModelForMaskedLM]
    if "bert" in str(config.model_type):
        kinds.reverse()
    if config.is_encoder_decoder:
        kinds.remove(hf.AutoModelForCausalLM)
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 0
    for kind in kinds:
        if knows(kind, config):
            return kind
    raise ValueError(
        f"expected a model of language, which learns tokens from tokens, got {config.model_type!r}; of others "
        "give module:factory, a function that returns a model and its batch"
    )


def build_language_model(
    config: dict[str, Any], variant: str, dtype: torch.dtype, lora: int | None = None, four_bit: bool = False
) -> nn.Module:
    """The language model of a configuration without its weights, in training, as one of `VARIANTS`.

    lora: the rank of PEFT's adapters on all linear layers, which alone are trained then, in float32 as PEFT has them;
    None: all weights are. four_bit: the weights of linear layers but the head are bitsandbytes' NF4. **Raises**
    `ImportError` without transformers, PEFT or bitsandbytes where it is asked for; `ValueError` for a model that
    transformers does not know, and for 4-bit weights without adapters.
    """
    if four_bit and lora is None:
        raise ValueError("4-bit weights are not trained: give the rank of adapters, --lora, with --load-in-4bit")
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of gradient checkpointing's new name
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # which kernels it lacks: none of them runs here
        own = _config(config)
        model: Any = _kind(own).from_config(own).to(dtype)
        if four_bit:
            load_in_4bit(model, dtype)
        if lora is not None:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=lora, target_modules="all-linear"))
        _vary(model, variant, lora is not None)
    return model.train()


def _vary(model: Any, variant: str, adapted: bool) -> bool:
    """Makes one of `VARIANTS` of a model; False where there is no such of this one."""
    if variant == CHECKPOINTED:
        if not hasattr(model, "gradient_checkpointing_enable"):
            return False
        if adapted:
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    elif variant != UNCONVERTED_MODEL:
        options = _CONVERSIONS[OFFLOADED if variant == PAIRED else variant]
        limits = {"loss_scratch": options["scratch"]} if "scratch" in options else {}
        installed = install(model, CheckpointPolicy.uniform(**options, **limits))
        if variant == PAIRED:
            pairs = (len(installed.layers) + 1) // 2
            if not pairs:
                return False
            installed = install(model, CheckpointPolicy.segments(pairs, **options, **limits))
        return bool(installed.heads) or variant == CONVERTED
    return True


def varied(model: nn.Module, variant: str) -> nn.Module | None:
    """A copy of a model without its data, in training, as one of `VARIANTS`; None where there is no such of it."""
    twin, _ = copy_to_meta(model, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return twin.train() if _vary(twin, variant, adapted=hasattr(model, "peft_config")) else None
