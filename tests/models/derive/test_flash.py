"""Layers without an adapter whose configuration asks for FlashAttention: it is not installed, and nobody calls it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import ckptfused
from ckptfused.models.derive.derive import derive
from ckptfused.models.hugging_face import FLASH_WITH_SINKS
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


SINKS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}
HUB = "kernels-community/vllm-flash-attn3"


@pytest.fixture
def _kernel_of_the_hub() -> Iterator[None]:
    """The entries that transformers makes when it loads such a kernel."""
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(HUB, partial(flash_attention_forward, implementation=HUB))
    ALL_MASK_ATTENTION_FUNCTIONS.register(HUB, flash_attention_mask)
    yield
    for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        type(functions)._global_mapping.pop(HUB)


@pytest.mark.usefixtures("_kernel_of_the_hub")
@pytest.mark.parametrize("implementation", FLASH_WITH_SINKS)
@pytest.mark.parametrize("batch", [padded, whole, packed], ids=lambda f: f.__name__)
def test_sinks_of_kernels_that_have_them(batch: Any, implementation: str) -> None:
    model: Any = model_of("GptOss", "eager", **SINKS).train()
    other = copy.deepcopy(model)
    ckptfused.convert(other)
    other.config._attn_implementation = implementation
    given = {**batch(), "use_cache": False}
    with unfused() as reasons:
        got = run(other, given)
    if batch is packed:  # of which the model's own eager masks know nothing
        sees = torch.block_diag(*(torch.ones(n, n).tril() for n in LENGTHS))[None, None]
        mask = torch.zeros_like(sees).masked_fill(sees == 0, torch.finfo(sees.dtype).min)
        given["attention_mask"] = dict.fromkeys(("full_attention", "sliding_attention"), mask)
    close(got, run(model, given), 1e-5)
    assert not reasons and got["model.layers.0.self_attn.sinks"].any(), reasons


def test_sinks_of_kernels_that_may_leave_them_out() -> None:
    model: Any = model_of("GptOss", "eager", **SINKS)
    model.config._attn_implementation = "flash_attention_2"
    tables = model.model.rotary_emb(torch.zeros(2, 6, 48), torch.arange(6)[None])
    given = {"position_embeddings": tables, "attention_mask": None}
    found = derive(model.model.layers[0], (torch.randn(2, 6, 48),), given)
    assert found.layout.attn is None if found.proof is not None else found.why
    assert "sinks (s_aux) by flash_attention_2" in found.why, found.why
