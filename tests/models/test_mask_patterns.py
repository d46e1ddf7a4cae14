"""Masks for each query and key that say no more than causality, a window and padding: kernels are told that instead."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import ckptfused
from ckptfused import FusedCheckpointBlock
from ckptfused.compat.torch_memory import StorageWeakRef
from ckptfused.eager.attention import position_mask
from ckptfused.layer import mask_patterns
from ckptfused.layer.call import build_call
from ckptfused.layer.mask_patterns import LEAST_TOKENS, by_place
from ckptfused.masks import Mask
from ckptfused.ops.call import Call
from tests.models.compare import close, run
from tests.models.derive.test_transformers import model_of
from tests.models.small import twins, unfused

B, T = 3, LEAST_TOKENS + 44
PADDING = ("none", "right", "left", "one key", "a whole row")


def real_keys(padding: str) -> Tensor:
    """bool [B, T]: the keys that are no padding."""
    real = torch.ones(B, T, dtype=torch.bool)
    match padding:
        case "right":
            real[0, 250:] = real[1, 200:] = False
        case "left":
            real[1, :100] = False
        case "one key":
            real[2, 50] = False
        case "a whole row":
            real[1] = False
    return real


def shown(masks: Mask) -> Tensor:
    """bool [B, T, T]: what masks by place and key show."""
    seen = position_mask(T, T, masks.causal, masks.window, torch.device("cpu")).expand(B, T, T)
    return seen if masks.padding is None else seen & masks.padding[:, None]


def as_kind(seen: Tensor, kind: str) -> Tensor:
    """A mask [B, 1, T, T] that shows so much."""
    if kind == "add":
        return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]
    return (seen if kind == "keep" else ~seen)[:, None]


@pytest.mark.parametrize("kind", ["keep", "drop", "add"])
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("window", [0, 1, 7, T - 1, T])
@pytest.mark.parametrize("causal", [True, False])
def test_what_a_mask_shows_is_what_is_told(causal: bool, window: int, padding: str, kind: str) -> None:
    seen = shown(Mask(padding=real_keys(padding), causal=causal, window=window))
    found = by_place(Mask(as_kind(seen, kind), kind), T, None)
    assert found.mask is None and (found.padding is None) == (padding == "none")
    assert torch.equal(shown(found), seen)


def _holed(seen: Tensor) -> Tensor:
    seen[1, 200, 100] = ~seen[1, 200, 100]
    return seen


OTHERS: dict[str, Any] = {
    "an entry more": lambda: as_kind(_holed(shown(Mask(causal=True))), "keep"),
    "an entry less": lambda: as_kind(_holed(shown(Mask())), "keep"),
    "packed": lambda: as_kind(torch.block_diag(*[torch.ones(100, 100).tril()] * 3).bool().expand(B, T, T), "keep"),
    "prefix": lambda: as_kind(shown(Mask(causal=True)) | (torch.arange(T) < 50), "keep"),
    "of each head": lambda: as_kind(shown(Mask(causal=True)), "keep").repeat(1, 2, 1, 1),
    "biased": lambda: as_kind(shown(Mask(causal=True)), "add") + 1e-3 * torch.eye(T),
    "no number where it hides": lambda: as_kind(shown(Mask(causal=True)), "add").index_put_(
        (*map(torch.tensor, (1, 0, 3, 9)),), torch.tensor(torch.nan)
    ),
    "no number in a key": lambda: as_kind(shown(Mask(causal=True)), "add").index_fill_(3, torch.tensor(7), torch.nan),
    "hides by less": lambda: as_kind(shown(Mask(causal=True)), "add").clamp(min=-1e4),
    "nothing": lambda: torch.zeros(B, 1, T, T, dtype=torch.bool),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_masks_stay_what_they_are(what: str) -> None:
    given = OTHERS[what]()
    masks = Mask(given, "add" if given.is_floating_point() else "keep")
    assert by_place(masks, T, None) is masks


def test_a_mask_is_looked_at_once_until_it_is_written() -> None:
    mask = as_kind(shown(Mask(causal=True)), "keep")
    masks = Mask(mask, "keep")
    with mock.patch.object(mask_patterns, "pattern", wraps=mask_patterns.pattern) as looked:
        assert by_place(masks, T, "first").causal and by_place(Mask(mask.view(mask.shape), "keep"), T, "second").causal
        assert looked.call_count == 1
        mask[0, 0, 9, 3] = False
        assert by_place(masks, T, "third") is masks and looked.call_count == 2
        by_place(Mask(as_kind(shown(Mask(causal=True)), "keep"), "keep"), T, "third")
        assert looked.call_count == 3


def test_a_write_that_is_not_counted_is_seen_a_step_later() -> None:
    mask = as_kind(shown(Mask(causal=True)), "add")
    masks = Mask(mask, "add")
    assert by_place(masks, T, "a layer").causal
    mask.data[0, 0, 9, 3] = -torch.inf
    assert by_place(masks, T, "a layer") is masks


@pytest.mark.parametrize("kind", ["keep", "drop", "add"])
def test_what_is_remembered_keeps_no_mask(kind: str) -> None:
    masks = Mask(as_kind(shown(Mask(padding=real_keys("right"), causal=True)), kind), kind)
    found = by_place(masks, T, None)
    assert masks.mask is not None and found.padding is not None
    storage = StorageWeakRef(masks.mask.untyped_storage())
    assert found.padding.untyped_storage().nbytes() == B * T
    del masks
    assert storage.expired()


def test_masks_whose_values_are_not_there_stay() -> None:
    seen = as_kind(shown(Mask(causal=True)), "keep")
    with torch.inference_mode():
        made = seen.clone()
    for given in (seen.to("meta"), made, as_kind(shown(Mask(causal=True)), "add").requires_grad_()):
        masks = Mask(given, "add" if given.is_floating_point() else "keep")
        assert by_place(masks, T, None) is masks
    shared = seen.clone().share_memory_()
    for given in (torch.from_numpy(seen.clone().numpy()), shared):  # others write there, and no version says so
        masks = Mask(given, "keep")
        assert by_place(masks, T, None) is masks
    short = Mask(seen[..., :200, :200], "keep")
    assert by_place(short, 200, None) is short


def test_what_was_found_in_inference_mode_is_trained_with() -> None:
    seen = shown(Mask(padding=real_keys("right"), causal=True))
    masks = Mask(as_kind(seen, "keep"), "keep")
    with torch.inference_mode():
        assert by_place(masks, T, None).mask is None
    padding = by_place(masks, T, None).padding
    assert padding is not None and not padding.is_inference()


def padded(vocabulary: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(1, vocabulary, (B, T), generator=draw)
    real = real_keys("right")
    return {"input_ids": ids, "attention_mask": real.long(), "labels": ids.masked_fill(~real, -100)}


def texts(model: nn.Module, batch: dict[str, Any]) -> list[str]:
    """The specs of the calls in a step of a converted model."""
    found: list[str] = []
    with mock.patch.object(Call, "run", autospec=True, side_effect=_run(found)):
        model(**batch)
    return found


def _run(found: list[str]) -> Any:
    run_call = Call.run

    def noted(call: Call, *args: Any) -> Tensor:
        if call.x.size(1) == T:  # not of a proof
            found.append(call.text)
        return run_call(call, *args)

    return noted


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_a_padded_batch(implementation: str, p: float) -> None:
    plain, model = twins(implementation, p, max_position_embeddings=512)
    batch = padded(plain.config.vocab_size)
    for text in texts(model, batch):
        assert {"attn.causal=1", "attn.padding=keep"} <= set(text.split()) and "attn.mask" not in text
    if p == 0:
        with unfused() as reasons:
            got = run(model, batch)
        close(got, run(plain, batch), 1e-5)
        assert not reasons


def test_windows_of_layers_in_turn() -> None:
    """gpt-oss: a window in every other layer, and sinks."""
    options = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 40, "max_position_embeddings": 512}
    plain: Any = model_of("GptOss", "eager", **options).train()
    model = copy.deepcopy(plain)
    ckptfused.convert(model)
    batch = {**padded(96), "use_cache": False}
    found = [text for text in texts(model, batch) if "attn." in text]
    assert ["attn.window=40" in text for text in found] == [True, False]
    assert all("attn.causal=1" in text and "attn.mask" not in text for text in found)
    close(run(model, batch), run(plain, batch), 1e-5)


def test_an_encoders_square_mask() -> None:
    torch.manual_seed(0)
    block = FusedCheckpointBlock(32, 4, 64, dropout=0.1, batch_first=True)
    x = torch.randn(2, T, 32)
    square = nn.Transformer.generate_square_subsequent_mask(T)
    made = []
    for given in ({"src_mask": square}, {"is_causal": True}):
        torch.manual_seed(1)
        made.append(block(x, **given))
    assert torch.equal(*made)
    call = build_call(block.parts(), block.inputs(x, square), block._mode)
    assert isinstance(call, Call) and "attn.causal=1" in call.text and call.masks.mask is None


def test_packed_sequences_take_no_mask_of_any_length() -> None:
    block = FusedCheckpointBlock(32, 4, 64, dropout=0.0, batch_first=True)
    x, square = torch.randn(1, T, 32), nn.Transformer.generate_square_subsequent_mask(T)
    with pytest.raises(ValueError, match="cu_seqlens"):
        block(x, square, cu_seqlens=torch.tensor([0, 100, T]))


def test_under_the_compiler_the_numbers_are_the_same() -> None:
    block = FusedCheckpointBlock(32, 4, 64, dropout=0.0, batch_first=True)
    x, square = torch.randn(2, T, 32), nn.Transformer.generate_square_subsequent_mask(T)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, square), block(x, square), rtol=1e-5, atol=1e-5)
