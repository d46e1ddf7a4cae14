"""Several layers behind one saved input, in models whose own forward loops over them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers")
import transformers

import ckptfused
from ckptfused import CheckpointPolicy
from tests.accounting import saved_bytes
from tests.models import zoo_decoders, zoo_encoders, zoo_moe, zoo_seq2seq, zoo_torch  # noqa: F401
from tests.models.compare import equal, gradients, run
from tests.models.small import llama, segmented
from tests.models.zoo import ZOO, text_batch

WHOLE = CheckpointPolicy.whole_model()
TOKENS, WIDTH = 3 * 19, 48


def step(model: Any, batch: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return run(model, text_batch() if batch is None else batch)


def saved(model: Any, batch: dict[str, Tensor]) -> int:
    torch.manual_seed(3)
    positions = torch.arange(19).unsqueeze(0)  # else the model makes them, and each layer is handed them
    batch = {**batch, "position_ids": positions}
    return saved_bytes(lambda: model(**batch).loss, model, batch.values())


FAMILIES = (
    "gpt2",
    "gemma3",
    "opt",
    "bert",
    "vit",
    "mixtral",
    "t5",
    "whisper",
    "torch-encoder-post",
    "torch-decoder-pre",
)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore:ckptfused. the segment of layers")
def test_gradients_are_those_without_segments(name: str) -> None:
    """Gradients agree with dropout at every site, fused or not, to the bit; as the layers were, those of the plain
    model.
    """
    specimen = ZOO[name]
    model, batch = specimen.make(0.1, specimen.implementations[0]).train(), specimen.batch()
    plain = step(model, batch)
    equal(step(segmented(model, CheckpointPolicy.segments(2, None)), batch), plain)
    report = ckptfused.convert(model)
    wanted = step(model, batch)
    assert not torch.equal(wanted["loss"], plain["loss"])
    uneven = CheckpointPolicy.segments((1, len(report.layers) - 1))
    for policy in (WHOLE, CheckpointPolicy.segments(2, "all"), uneven):
        equal(step(segmented(model, policy), batch), wanted)
    ckptfused.revert(model)
    equal(step(model, batch), plain)


def test_one_alone_is_no_segment() -> None:
    """It runs in its own mode; the others save one input together."""
    model, batch = llama(num_hidden_layers=4), text_batch()
    each = CheckpointPolicy.per_layer(["all", "inputs", None, "inputs"])
    alone, joined = (replace(each, segment_lengths=lengths) for lengths in ((1, 1, 1, 1), (1, 2, 1)))
    wanted = step(segmented(model, each), batch)
    held = [saved(segmented(model, policy), batch) for policy in (each, alone)]
    assert held[0] == held[1]
    own = saved(segmented(model, CheckpointPolicy.per_layer(["all", "inputs", "inputs", "inputs"])), batch)
    x = 4 * batch["input_ids"].numel() * model.config.hidden_size
    equal(step(segmented(model, joined), batch), wanted)
    assert saved(model, batch) == own - x


@pytest.mark.parametrize("keep", ["inputs", "all", None])
def test_a_segment_saves_its_input_alone(keep: str | None) -> None:
    """Floor: segments · N · C · itemsize. What the layers keep is not saved."""
    model, batch = llama(num_hidden_layers=5), text_batch()
    ckptfused.convert(model)
    outside = saved(model, batch) - 5 * TOKENS * WIDTH * 4
    for count in (1, 2, 5):
        report = ckptfused.convert(model, policy=CheckpointPolicy.segments(count, keep))
        assert saved(model, batch) - outside == count * TOKENS * WIDTH * 4
        assert sum(layer.after for layer in report.layers) == count * WIDTH * 4  # type: ignore[misc]
    assert "begin at model.layers.0, model.layers.1" in str(report)


def test_random_states_are_not_saved() -> None:
    model, batch = llama(p=0.1, num_hidden_layers=4), text_batch()
    ckptfused.convert(model)
    alone = saved(model, batch)
    assert alone - saved(segmented(model), batch) == 3 * TOKENS * WIDTH * 4 + 4 * 16


@pytest.mark.parametrize("count", [1, 2])
def test_products(count: int) -> None:
    """A replay makes one forward of every layer but its last, which saves its input; the kept values of the others are
    made once."""

    def flops(policy: CheckpointPolicy) -> int:
        segmented(model, policy)
        with FlopCounterMode(display=False) as counter:
            step(model)
        return counter.get_total_flops()

    model = llama(num_hidden_layers=4)
    kept, rebuilt = flops(CheckpointPolicy.uniform("all")), flops(CheckpointPolicy())
    ckptfused.convert(model)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.model(text_batch()["input_ids"])
    forward = counter.get_total_flops()
    others = 4 - count
    assert flops(CheckpointPolicy.segments(count)) == rebuilt + forward * others // 4
    assert flops(CheckpointPolicy.segments(count, "all")) == (kept * others + rebuilt * count + forward * others) // 4


def test_a_replay_holds_one_segment() -> None:
    """The input of a segment that was replayed is gone when the one before it is."""
    model = segmented(llama(num_hidden_layers=4), CheckpointPolicy.segments(2))
    inputs: list[weakref.ref[Any]] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda layer, args, y: inputs.append(weakref.ref(y.untyped_storage())))
    out = model(**text_batch())
    gc.disable()  # nothing waits for the garbage collector
    try:
        alive = [ref() is not None for ref in inputs]
        out.loss.backward()
        del out
        after = [ref() is not None for ref in inputs]
    finally:
        gc.enable()
    assert alive == [False, True, False, True] and after == [False] * 4


def test_backward_twice() -> None:
    model = segmented(llama(p=0.1, num_hidden_layers=3))
    loss = model(**text_batch()).loss
    loss.backward(retain_graph=True)
    once = gradients(model)
    model.zero_grad()
    loss.backward()
    equal(gradients(model), once)


def test_two_forwards_before_backward() -> None:
    model = llama(p=0.1, num_hidden_layers=3)

    def both() -> dict[str, Tensor]:
        torch.manual_seed(5)
        model.zero_grad()
        first, second = model(**text_batch()).loss, model(**text_batch(length=11)).loss
        (first * second).backward()
        return gradients(model)

    ckptfused.convert(model)
    wanted = both()
    segmented(model)
    equal(both(), wanted)


@pytest.mark.parametrize(
    "options", [{"output_hidden_states": True}, {"use_cache": True}, {"use_cache": False}, {"output_attentions": True}]
)
@pytest.mark.filterwarnings("ignore:ckptfused. the segment of layers")
def test_options_of_the_call(options: dict[str, Any]) -> None:
    model = llama("eager", p=0.1, num_hidden_layers=3)
    ckptfused.convert(model)
    batch = {**text_batch(), **options}
    wanted = step(model, batch)
    equal(step(segmented(model), batch), wanted)


def test_without_gradients_nothing_is_saved() -> None:
    model = segmented(llama(num_hidden_layers=3).eval())
    with torch.no_grad():
        y = model(**text_batch()).logits
    assert y.grad_fn is None
    equal({"y": y}, {"y": model(**text_batch()).logits})
    with torch.inference_mode():
        model(**text_batch())
    ids = model.generate(text_batch()["input_ids"][:1, :5], max_new_tokens=3, do_sample=False, pad_token_id=0)
    ckptfused.revert(model)
    assert torch.equal(
        ids, model.generate(text_batch()["input_ids"][:1, :5], max_new_tokens=3, do_sample=False, pad_token_id=0)
    )


def test_frozen_below() -> None:
    """Where nothing below a layer needs a gradient nothing is saved; from there on it is."""
    model = llama(p=0.1, num_hidden_layers=4)
    for part in (model.model.embed_tokens, model.model.layers[0]):
        part.requires_grad_(False)
    ckptfused.convert(model)
    wanted = step(model)
    equal(step(segmented(model)), wanted)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters() -> None:
    peft = pytest.importorskip("peft")
    model = llama(p=0.1, num_hidden_layers=3)
    config = peft.LoraConfig(
        r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False
    )
    tuned = peft.get_peft_model(model, config)
    ckptfused.convert(tuned)
    wanted = step(tuned)
    for need in (False, True):
        if need:
            tuned.enable_input_require_grads()
            wanted = step(tuned)
        equal(step(segmented(tuned, CheckpointPolicy.segments(2))), wanted)


def test_autocast_and_settings() -> None:
    """A chain goes on under the same settings alone, and is replayed under them."""
    model = llama(p=0.1, num_hidden_layers=4)
    ckptfused.convert(model)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = step(model)
    segmented(model)
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(3)
        model.zero_grad()
        loss = model(**text_batch()).loss
    loss.backward()
    equal({"loss": loss.detach(), **gradients(model)}, wanted)


def test_copies_and_pickles() -> None:
    model = segmented(llama(num_hidden_layers=3), CheckpointPolicy.segments(2))
    wanted = step(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        segments = [layer.forward.segment for layer in other.model.layers]
        assert (
            segments[0] is not segments[1] is segments[2] and segments[0] is not model.model.layers[0].forward.segment
        )
        equal(step(other), wanted)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_beside_hugging_face_checkpointing(reentrant: bool) -> None:
    """A fused layer takes no notice of it."""
    model = llama(p=0.1, num_hidden_layers=4)
    ckptfused.convert(model)
    wanted = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    segmented(model)
    equal(step(model), wanted)
    assert saved(model, text_batch()) < 97 * 3 * 19 * 4 * 5  # logits and one input, not four


def test_as_many_as_there_are_layers_at_most() -> None:
    with pytest.raises(ValueError, match="expected no more segments than layers, of which the model has 2, got 3"):
        ckptfused.convert(llama(), policy=CheckpointPolicy.segments(3))


def test_albert() -> None:
    config = transformers.AlbertConfig(
        vocab_size=97,
        embedding_size=16,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=64,
        num_hidden_layers=4,
    )
    torch.manual_seed(0)
    model = transformers.AlbertForMaskedLM(config).train()
    ckptfused.convert(model)
    wanted = step(model)
    equal(step(segmented(model)), wanted)
