"""Caches of other kinds than the fused families', by any name: found by value, left empty in training, or in use."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers as hf

import ckptfused
from tests.cases import by_turns
from tests.models.compare import close, gradients
from tests.models.zoo import VOCABULARY, text_batch

SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3}
MAMBA: dict[str, Any] = {**SIZES, "state_size": 4}
ATTENTION: dict[str, Any] = {"intermediate_size": 64, "num_attention_heads": 4, "lru_width": 32}
HEADS: dict[str, Any] = {"num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8}
XLM: dict[str, Any] = {"vocab_size": VOCABULARY, "emb_dim": 32, "n_layers": 2, "n_heads": 4}
# Caches of other kinds, by other names, and state in modules. Their layers have no adapter.
OTHERS: dict[str, Any] = {
    "mamba": lambda: hf.MambaForCausalLM(hf.MambaConfig(**MAMBA)),
    "mamba2": lambda: hf.Mamba2ForCausalLM(hf.Mamba2Config(**MAMBA, **HEADS)),
    "falcon-mamba": lambda: hf.FalconMambaForCausalLM(hf.FalconMambaConfig(**MAMBA)),
    "xlm": lambda: hf.XLMWithLMHeadModel(hf.XLMConfig(**XLM, dropout=0.0, attention_dropout=0.0)),
    "recurrent-gemma": lambda: hf.RecurrentGemmaForCausalLM(hf.RecurrentGemmaConfig(**SIZES, **ATTENTION)),
}


@pytest.mark.parametrize(("name", "use_cache"), by_turns(OTHERS, [None, True, False]))
def test_models_of_other_caches(name: str, use_cache: bool | None) -> None:
    """Two steps of training are the unconverted model's."""
    torch.manual_seed(0)
    plain = OTHERS[name]().train()
    model = copy.deepcopy(plain)
    # What has its own cache in a mixer is no block; an FFN after it, or the attention that others have, may be one.
    assert {"generic", "part"} & {layer.path for layer in ckptfused.convert(model).layers}
    batch = {key: value for key, value in text_batch().items() if key != "attention_mask"}
    batch["labels"] = batch["input_ids"]
    for _ in range(2):
        found = []
        for m in (model, plain):
            m.zero_grad()
            loss = m(**batch, **({} if use_cache is None or name == "xlm" else {"use_cache": use_cache})).loss
            loss.backward()
            # Keys' biases have no gradient, but rounding.
            kept = {key: g for key, g in gradients(m).items() if not key.endswith("k_lin.bias")}
            found.append({"loss": loss.detach(), **kept})
        close(*found, 1e-5)


class Sized:
    """A cache of somebody's."""

    def __init__(self, size: Any) -> None:
        self.size = size

    def get_seq_length(self) -> Any:
        if self.size is None:
            raise ValueError("no layer has a length")
        return self.size


class StateCache:
    """One that says nothing of its length."""


class Taking(nn.Module):
    """A layer that notes what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[Any] = []

    def forward(self, x: Tensor, memory: Any = None, use_cache: bool = True, *, state: Any = None) -> Tensor:
        self.seen.append((memory, use_cache, state))
        return x + self.linear(x)


@pytest.mark.parametrize("cache", [Sized(0), Sized(3), Sized(None), StateCache()], ids=["empty", "3", "mute", "kind"])
@pytest.mark.parametrize("place", ["position", "name", "all-positions"])
def test_caches_are_found_by_value(place: str, cache: Any) -> None:
    """An empty one is left out, and the layer told so; with any other the layer runs as it was."""
    model = nn.Sequential(Taking(), Taking()).train()
    ckptfused.convert(model)
    layer: Any = model[0]
    x = torch.randn(2, 4, requires_grad=True)
    if place == "position":
        y, want = layer(x, cache), (cache, True, None)
    elif place == "name":
        y, want = layer(x, state=cache), (None, True, cache)
    else:
        y, want = layer(x, cache, True), (cache, True, None)
    y.sum().backward()
    empty = isinstance(cache, Sized) and cache.size == 0
    assert layer.seen == [(None, False, None) if empty else want]  # a replay leaves it as the forward did
