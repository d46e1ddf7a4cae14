"""Language models on the meta device, as the ways of training at hand make them: plain, checkpointed, converted."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptfused.convert.apply import apply
from ckptfused.convert.policy import CheckpointPolicy
from ckptfused.policy.extrapolate import extrapolated
from ckptfused.policy.result import Profile
from ckptfused.policy.search import language_step

LEAST_SCRATCH = "64MiB"
PLAIN, CHECKPOINTED = "Hugging Face", "its gradient checkpointing"
CONVERTED, CHUNKED = "convert(model)", 'convert(model, loss="chunked")'
LEAST = f'convert(model, loss="chunked", scratch="{LEAST_SCRATCH}")'
VARIANTS = (PLAIN, CHECKPOINTED, CONVERTED, CHUNKED, LEAST)

# As published in the models' config.json, as far as it decides what is allocated. What is left out is as in
# transformers.
_LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        **_LLAMA,
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "max_position_embeddings": 8192,
    },
    "qwen3-8b": {
        **_LLAMA,
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "max_position_embeddings": 40960,
    },
    "gemma-2-9b": {
        "model_type": "gemma2",
        "vocab_size": 256000,
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}


def read_config(name: str) -> dict[str, Any]:
    """The configuration of a model by its name in `MODELS`, or by the path of a Hugging Face config.json.

    **Raises** `ValueError` that says what was expected.
    """
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    try:
        found = json.loads(Path(name).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"expected {', '.join(MODELS)}, or the path of a config.json, got {name!r} ({error})"
        ) from None
    if not isinstance(found, dict) or "model_type" not in found:
        raise ValueError(f"expected a config.json of Hugging Face's, with a model_type, got {name!r} without one")
    return found


# Of whose layers all are alike, or repeat as the configuration's layer_types say.
_UNIFORM = ("gemma", "gemma2", "llama", "mistral", "phi3", "qwen2", "qwen3")


class Trained:
    """A language model as it trains, of which steps of any length are predicted.

    Where its layers repeat, models of a few of them are built and `extrapolated`: the same numbers, sooner.
    """

    def __init__(self, config: dict[str, Any], variant: str, dtype: torch.dtype, lora: int | None = None) -> None:
        self._depth, self._period = _depth(config)
        found = (self._depth,)
        if self._period is not None and self._depth > 3 * self._period:
            found = (2 * self._period, 3 * self._period)  # type: ignore[assignment]
        self._models = [(depth, build(_cut(config, depth), variant, dtype, lora)) for depth in found]

    def step(self, tokens: int, batch: int = 1, **options: Any) -> Profile:
        """`language_step`."""
        found = [(depth, language_step(model, tokens, batch, **options)) for depth, model in self._models]
        if len(found) == 1:
            return found[0][1]
        (less, few), (greater, more) = found
        return extrapolated(few, more, (less, greater, self._depth), self._period or 1)


def _depth(config: dict[str, Any]) -> tuple[int, int | None]:
    """How many layers there are, and after how many they repeat; None: not known."""
    own = _config(config)
    depth, kinds = own.num_hidden_layers, getattr(own, "layer_types", None)
    if config["model_type"] not in _UNIFORM:
        return depth, None
    periods = range(1, depth + 1)
    period = 1 if kinds is None else next(p for p in periods if kinds == (kinds[:p] * depth)[:depth])
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
        if type(config) in kind._model_mapping:
            return kind
    raise ValueError(
        f"expected a model of language, which learns tokens from tokens, got {config.model_type!r}; of others "
        "give module:factory, a function that returns a model and its batch"
    )


def build(config: dict[str, Any], variant: str, dtype: torch.dtype, lora: int | None = None) -> nn.Module:
    """The language model of a configuration without its weights, in training, as one of `VARIANTS`.

    lora: the rank of PEFT's adapters on all linear layers, which alone are trained then, in float32 as PEFT has them;
    None: all weights are. **Raises** `ImportError` without transformers, or PEFT where it is asked for; `ValueError`
    for a model that transformers does not know.
    """
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of gradient checkpointing's new name
        own = _config(config)
        model: Any = _kind(own).from_config(own).to(dtype)
        if lora is not None:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=lora, target_modules="all-linear"))
        if variant == CHECKPOINTED:
            if lora is not None:
                model.enable_input_require_grads()
            model.gradient_checkpointing_enable()
        elif variant != PLAIN:
            scratch = LEAST_SCRATCH if variant == LEAST else None
            head = {} if variant == CONVERTED else {"loss": "chunked", "loss_scratch": scratch}
            apply(model, CheckpointPolicy.uniform(scratch=scratch, **head))
    return model.train()
