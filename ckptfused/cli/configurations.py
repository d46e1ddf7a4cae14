"""Configurations of language models: some by name, others where Hugging Face's libraries keep them. No PyTorch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ckptfused.spec.checks import nearest

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
    """The configuration of a model: its name in `MODELS`, a Hugging Face config.json or the folder that has one, or the
    model's name on the Hugging Face Hub where that was downloaded before.

    **Raises** `ValueError` that says what was expected.
    """
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    path = Path(name, "config.json") if Path(name).is_dir() else Path(name)
    try:
        found = json.loads((path if path.exists() else _downloaded(name) or path).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"expected {', '.join(MODELS)}, the path of a config.json or of its folder, or the Hub's name of a model "
            f"that was downloaded before, got {name!r} ({error}){nearest(name, [*MODELS, *_all_downloaded()])}"
        ) from None
    if not isinstance(found, dict) or "model_type" not in found:
        raise ValueError(f"expected a config.json of Hugging Face's, with a model_type, got {name!r} without one")
    return found


def _all_downloaded() -> list[str]:
    """The Hub's names of the models in the cache of this machine."""
    try:
        from huggingface_hub import constants
    except ModuleNotFoundError:
        return []
    folders = Path(constants.HF_HUB_CACHE).glob("models--*")
    return [folder.name.removeprefix("models--").replace("--", "/") for folder in folders]


def _downloaded(name: str) -> Path | None:
    """The config.json of a model of the Hub's in the cache of this machine; nothing is downloaded."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except (ModuleNotFoundError, ValueError):  # not a name that the Hub has
        return None
    return Path(found) if isinstance(found, str) else None
