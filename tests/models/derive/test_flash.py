"""Layers without an adapter whose configuration asks for FlashAttention: it is not installed, and nobody calls it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import ckptfused
from ckptfused.models import find
from ckptfused.models.derive.derive import derive
from tests.models.compare import close, run
from tests.models.derive.test_transformers import IN_ONE_HALF_OF_A_HEAD, model_of
from tests.models.small import unfused

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("Granite", {"residual_multiplier": 0.3, "attention_multiplier": 0.2}),
    ("Olmo2", {}),
    ("Olmo3", {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}),
    ("Olmo3", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),  # as long as a proof's x
    ("Starcoder2", {"sliding_window": 9, "residual_dropout": 0.0}),
    ("StableLm", IN_ONE_HALF_OF_A_HEAD),
    ("Cohere2", {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}),
    ("Phi", {}),
]
LENGTHS = (5, 3, 9)


def padded() -> dict[str, Tensor]:
    ids = torch.randint(1, 96, (2, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 11:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def whole() -> dict[str, Tensor]:
    return {name: t for name, t in padded().items() if name != "attention_mask"}


def packed() -> dict[str, Tensor]:
    batch = {name: t[:1] for name, t in whole().items()}
    return {**batch, "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}


def flash(name: str, options: dict[str, Any]) -> tuple[nn.Module, Any]:
    """A model, and a converted copy that believes in FlashAttention."""
    model: Any = model_of(name, "sdpa", **options).train()
    other = copy.deepcopy(model)
    ckptfused.convert(other)
    other.config._attn_implementation = "flash_attention_2"
    return model, other


@pytest.mark.parametrize("batch", [padded, whole, packed], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("name", "options"), MODELS, ids=lambda v: v if isinstance(v, str) else "")
def test_as_with_sdpa(name: str, options: dict[str, Any], batch: Any) -> None:
    """What it computes with padding, a window or packed sequences is what SDPA does with the model's own mask."""
    model, other = flash(name, options)
    given = {**batch(), "use_cache": False}
    with unfused() as reasons:
        got = run(other, given)
    close(got, run(model, given), 1e-5)
    assert not reasons, reasons


@pytest.mark.parametrize("window", [5, 9])
def test_a_window_to_both_sides(window: int) -> None:
    """Gemma 3's, as a model of embeddings."""
    both = {"use_bidirectional_attention": True, "sliding_window": 2 * (window - 1)}
    model: Any = model_of("Gemma3", "sdpa", **both).double()
    model.config._attn_implementation = "flash_attention_2"
    layer, x = model.model.layers[0], torch.randn(2, 17, 48, dtype=torch.float64)
    tables = model.model.rotary_emb(x, torch.arange(17)[None], "sliding_attention")
    found = derive(layer, (x,), {"position_embeddings": tables, "attention_mask": None})
    assert found.proof is not None, found.why
    assert (found.layout.window, found.layout.causal) == (window, False)


def test_sequences_that_positions_do_not_tell() -> None:
    """The layer's own call of FlashAttention says what it makes of them."""
    _, other = flash("Olmo2", {})
    given = {**packed(), "use_cache": False, "position_ids": torch.tensor([[3, 4, 5, 0, 1, 2, *range(11)]])}
    with unfused() as reasons, pytest.raises(ImportError):
        run(other, given)
    assert "position_ids" in reasons[0].text


def with_sinks(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.without(*args, s_aux=self.sinks, **kwargs)


def test_what_the_kernels_compute_otherwise() -> None:
    """Attention sinks are in no recording."""
    _, other = flash("Olmo2", {})
    _, layer, _ = next(iter(find.layers(other)))
    attention = layer.get_submodule("self_attn")
    attention.register_parameter("sinks", nn.Parameter(torch.zeros(4)))
    attention.__class__ = type(
        "WithSinks", (type(attention),), {"forward": with_sinks, "without": type(attention).forward}
    )
    tables = other.model.rotary_emb(torch.zeros(2, 6, 48), torch.arange(6)[None])
    found = derive(layer, (torch.randn(2, 6, 48),), {"position_embeddings": tables, "attention_mask": None})
    assert found.proof is None
    assert "s_aux" in found.why, found.why
