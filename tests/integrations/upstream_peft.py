"""A pytest plugin with which PEFT's own tests run without a network, on converted models.

In a checkout of PEFT, with this folder on PYTHONPATH, as they are and converted:

    HF_HUB_OFFLINE=1 python -m pytest -p upstream_peft tests/test_quantization.py
    HF_HUB_OFFLINE=1 python -m pytest -p upstream_peft --convert tests/test_quantization.py

A small random OPT stands in for facebook/opt-125m.
"""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import peft
import pytest
import torch
import transformers

import ckptfused

_folder = tempfile.TemporaryDirectory()
_own_model, _own_adapters = transformers.AutoModelForCausalLM.from_pretrained, peft.get_peft_model
_converted: list[ckptfused.Report] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--convert`."""
    parser.addoption("--convert", action="store_true", help="convert each model that PEFT has put adapters into")


def _stand_in() -> None:
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=512, hidden_size=64, word_embed_proj_dim=64, ffn_dim=128, num_hidden_layers=12,
        num_attention_heads=4, max_position_embeddings=256,
    )  # fmt: skip
    transformers.OPTForCausalLM(config).save_pretrained(_folder.name)


def _from_pretrained(name: Any, *args: Any, **options: Any) -> Any:
    return _own_model(_folder.name if "opt-125m" in str(name) else name, *args, **options)


def _get_peft_model(*args: Any, **options: Any) -> Any:
    model = _own_adapters(*args, **options)
    _converted.append(ckptfused.convert(model))
    return model


def pytest_configure(config: pytest.Config) -> None:
    """Puts what stands in for the hub, and the conversion, in place before tests are collected."""
    import tests.testing_utils as theirs

    _stand_in()
    theirs.hub_online_once = lambda *args, **options: contextlib.nullcontext()
    transformers.AutoModelForCausalLM.from_pretrained = _from_pretrained
    if config.getoption("--convert"):
        peft.get_peft_model = _get_peft_model


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many models were converted in this process."""
    fused = sum(layer.path in ("fused", "part") for report in _converted for layer in report.layers)
    terminalreporter.write_line(f"converted: {len(_converted)} models, {fused} layers of theirs fused or in part")
