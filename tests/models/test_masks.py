"""Every form in which an attention implementation of Hugging Face takes its mask, and packed sequences."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")
from transformers import DataCollatorWithFlattening

import ckptfused
from ckptfused.models.family import family_of
from tests.models.compare import close, run
from tests.models.small import llama, twins, unfused
from tests.models.zoo import VOCABULARY, randomize, text_batch
from tests.models.zoo_llama import SIZES

LENGTHS = (5, 3, 9)


def prefix_mask(length: int, prefix: int) -> Tensor:
    """True where a token may look: everywhere into the prefix, back from the rest."""
    return (torch.ones(length, length).tril() + (torch.arange(length) < prefix) > 0)[None, None]


def additive(keep: Tensor) -> Tensor:
    return torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("kind", ["bool", "additive", "per head", "bias"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_masks_of_the_caller(implementation: str, kind: str) -> None:
    """A prefix-LM's mask is not causal; a bias for each head is no mask at all."""
    plain, model = twins(implementation)
    batch = text_batch()
    mask = prefix_mask(19, 7).expand(3, 1, 19, 19)
    if kind == "per head":
        mask = torch.stack([prefix_mask(19, prefix)[0, 0] for prefix in (1, 7, 9, 19)]).expand(3, 4, 19, 19)
    if kind == "bias":
        batch["attention_mask"] = additive(prefix_mask(19, 7)) + torch.randn(3, 4, 19, 19)
    else:
        batch["attention_mask"] = mask if kind == "bool" and implementation == "sdpa" else additive(mask)
    with unfused() as reasons:
        got = run(model, batch)
    assert not reasons
    close(got, run(plain, batch), 1e-5)
    assert abs(got["loss"] - run(plain, text_batch())["loss"]) > 1e-3


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_first_token_after_padding_is_a_label(implementation: str) -> None:
    """What predicts it sees nothing: zeros here and in SDPA, but the mean of all values in eager attention."""
    batch = text_batch(left=True)
    batch["labels"][1, 6] = batch["input_ids"][1, 6]
    plain, model = twins(implementation)
    got = run(model, batch)
    close(got, run(llama("sdpa"), batch), 1e-5)
    assert (abs(got["loss"] - run(plain, batch)["loss"]) > 1e-3) == (implementation == "eager")


@pytest.mark.parametrize("kind", ["gradient", "integers"])
def test_masks_that_are_not_fused(kind: str) -> None:
    plain, model = twins("eager")
    mask = torch.randn(3, 4, 19, 19) if kind == "gradient" else torch.randint(0, 2, (3, 1, 19, 19))
    results = []
    for one in (model, plain):
        leaf = mask.clone().requires_grad_(kind == "gradient")
        with unfused() as reasons:
            found = run(one, {**text_batch(), "attention_mask": leaf})
        results.append(found if leaf.grad is None else {**found, "mask": leaf.grad})
        assert len(reasons) == (2 if one is model else 0)
    close(*results, 1e-5)  # type: ignore[misc]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_layer_called_without_a_mask(implementation: str) -> None:
    """SDPA takes it for causal; eager attention hides nothing; neither knows a window."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**SIZES, sliding_window=4, head_dim=12, attn_implementation=implementation)
    plain = randomize(MistralForCausalLM(config))
    model = copy.deepcopy(plain)
    ckptfused.convert(model)
    x = torch.randn(2, 10, 48)
    tables = plain.model.rotary_emb(x, torch.arange(10)[None])
    with unfused() as reasons:
        got = model.model.layers[0](x, position_embeddings=tables)
    assert not reasons
    close({"y": got}, {"y": plain.model.layers[0](x, position_embeddings=tables)}, 1e-5)


def test_a_window_that_the_layers_do_not_read() -> None:
    """Llama's configuration takes any key, its attention knows no window."""
    model = llama(sliding_window=4)
    plain = copy.deepcopy(model)
    ckptfused.convert(model)
    for one in (model, plain):
        one.config._attn_implementation = "sdpa" if one is plain else "flash_attention_2"
    x, tables = layer_arguments(model, 1)
    got = model.model.layers[0](x, position_embeddings=tables)
    close({"y": got}, {"y": plain.model.layers[0](x, position_embeddings=tables)}, 1e-5)


def packed_batch(cu_seqlens: bool) -> dict[str, Any]:
    features = [{"input_ids": torch.randint(0, VOCABULARY, (n,)).tolist()} for n in LENGTHS]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=cu_seqlens, return_tensors="pt")
    return {**collator(features), "use_cache": False}


@pytest.mark.parametrize("cu_seqlens", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding_free_batches(implementation: str, cu_seqlens: bool) -> None:
    """Without flash attention the model makes a block-diagonal mask of the positions."""
    plain, model = twins(implementation)
    batch = packed_batch(cu_seqlens)
    with unfused() as reasons:
        close(run(model, batch), run(plain, batch), 1e-5)
    assert not reasons


def layer_arguments(model: Any, batch: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A hidden state of sum(LENGTHS) tokens a row, and tables of positions that start anew in each sequence."""
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    x = torch.randn(batch, positions.size(1), 48)
    return x, model.model.rotary_emb(x, positions)


def block_diagonal() -> Tensor:
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    return ((ids[:, None] == ids) & torch.ones(len(ids), len(ids)).tril().bool())[None, None]


def both(arguments: dict[str, Any], mask: Tensor, batch: int = 1, **options: Any) -> list[str]:
    """Compares a converted layer that believes in flash attention with SDPA given `mask`; why it was not fused."""
    plain, model = twins(**options)
    model.config._attn_implementation = "flash_attention_2"
    x, tables = layer_arguments(plain, batch)
    results = []
    weight = torch.rand_like(x) * mask.diagonal(dim1=-2, dim2=-1)[:, 0, :, None]  # padding does not count
    with unfused() as reasons:
        for one, kwargs in ((model, arguments), (plain, {"attention_mask": mask})):
            leaf = x.clone().requires_grad_()
            layer = one.model.layers[0]
            (layer(leaf, position_embeddings=tables, **kwargs) * weight).sum().backward()
            grads = {name: p.grad for name, p in layer.named_parameters()}
            results.append({"x": leaf.grad, **grads})
    close(*results, 1e-5)  # type: ignore[misc]
    return [reason.text for reason in reasons]


def test_flash_attention_with_cu_seqlens() -> None:
    bounds = torch.tensor([0, 5, 8, 17], dtype=torch.int32)
    arguments = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 9, "max_length_k": 9}
    assert not both(arguments, block_diagonal())


def test_flash_attention_finds_sequences_in_position_ids() -> None:
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    assert not both({"position_ids": positions}, block_diagonal())
    assert not both({"position_ids": positions + 2}, block_diagonal())  # RoBERTa starts at 2
    # Without its other arguments, flash attention leaves cu_seq_lens_q alone.
    assert not both({"position_ids": positions, "cu_seq_lens_q": torch.tensor([0, 17])}, block_diagonal())
    whole = torch.ones(1, 1, 17, 17).tril().bool()
    assert not both({"position_ids": torch.arange(17)[None]}, whole)
    assert not both({"position_ids": positions.expand(2, -1)}, whole.expand(2, 1, 17, 17), batch=2)


class Waits(TorchDispatchMode):
    """Counts operations whose result the host waits for on a GPU."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket in (
            torch.ops.aten.equal,
            torch.ops.aten.nonzero,
            torch.ops.aten._local_scalar_dense,
        )
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("starts_anew", [False, True])
def test_position_ids_are_looked_into_once_a_step(starts_anew: bool) -> None:
    plain, model = twins()
    model.config._attn_implementation = "flash_attention_2"
    x, tables = layer_arguments(plain, 1)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    batches = [positions if starts_anew else torch.arange(17)[None] for _ in range(2)]
    layers = model.model.layers
    for batch in [*batches, *batches]:
        batch = batch.clone()
        with Waits() as first, torch.no_grad():
            y = layers[0](x, position_embeddings=tables, position_ids=batch)
        with Waits() as second, torch.no_grad():
            for layer in [*layers[1:], layers[0]]:
                again = layer(x, position_embeddings=tables, position_ids=batch)
        assert first.count >= 1 and second.count == 0
        assert torch.equal(y, again)
    batch.copy_(torch.arange(17)[None] if starts_anew else positions)  # the next step's, in the same memory
    with torch.no_grad():
        other = layers[0](x, position_embeddings=tables, position_ids=batch)
    assert not torch.equal(other, y)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_flash_attention_with_padding(dtype: torch.dtype, left: bool) -> None:
    padding = torch.ones(3, 17, dtype=torch.int64)
    padding[1, :6] = 0
    padding = padding if left else padding.flip(-1)
    causal = torch.ones(17, 17).tril().bool()
    assert not both({"attention_mask": padding.to(dtype)}, causal & padding.bool()[:, None, None], batch=3)


def test_unsafe_flash_calls_are_not_fused() -> None:
    plain, model = twins()
    model.config._attn_implementation = "flash_attention_2"
    layer = model.model.layers[0]
    x, tables = layer_arguments(plain, 2)
    bounds = torch.tensor([0, 10, 34])
    inputs = family_of(layer).inputs
    varlen = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 24, "max_length_k": 24}
    assert "several rows" in inputs(layer, x, position_embeddings=tables, **varlen).text
    mask = torch.ones(2, 1, 17, 17).bool()
    assert "mask of shape" in inputs(layer, x, mask, position_embeddings=tables).text
    positions = torch.tensor([3, 4, 5, 0, 1, 2, *range(11)])[None]
    assert "position_ids" in inputs(layer, x[:1], position_ids=positions, position_embeddings=tables).text


def test_flex_attention_is_checkpointed() -> None:
    """It has no backward on a CPU, so the layer is only asked."""
    from torch.nn.attention.flex_attention import create_block_mask

    plain, model = twins()
    layer = model.model.layers[0]
    x, tables = layer_arguments(plain, 1)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 17, 17, device="cpu")
    for implementation in ("flex_attention", "sdpa"):
        model.config._attn_implementation = implementation
        reason = family_of(layer).inputs(layer, x, mask, position_embeddings=tables)
        assert "lex" in reason.text and not reason.original


def test_an_attention_function_of_the_users() -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def twice(*args: Any, **kwargs: Any) -> Any:
        out, weights = sdpa_attention_forward(*args, **kwargs)
        return out * 2, weights

    plain, model = twins()
    AttentionInterface.register("sdpa", twice)
    try:
        with unfused() as reasons:
            close(run(model, text_batch()), run(plain, text_batch()), 1e-5)
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)
    assert len(reasons) == 2
