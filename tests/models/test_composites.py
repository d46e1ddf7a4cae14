"""Layers that are fused in part, and the calls of the encoder families that are not fused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers
from transformers.models.bert.modeling_bert import BertLayer

import ckptfused
from ckptfused.layer.parts import Reason
from tests.accounting import CountOps
from tests.models import zoo_decoders, zoo_encoders, zoo_moe, zoo_seq2seq, zoo_torch  # noqa: F401
from tests.models.compare import close, run
from tests.models.small import unfused
from tests.models.versions import since
from tests.models.versions import transformers as version
from tests.models.zoo import ZOO, randomize, text_batch


def twins(name: str, p: float = 0.0, **changes: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    """A plain model of the zoo, its converted copy, and a batch."""
    specimen = ZOO[name]
    plain: Any = randomize(specimen.make(p, "sdpa")).train()
    for key, value in changes.items():
        setattr(plain.config, key, value)
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    return plain, converted, specimen.batch()


def texts(reasons: list[Reason]) -> set[str]:
    return {reason.text for reason in reasons}


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_router_logits_are_collected_from_fused_layers(name: str) -> None:
    plain, converted, batch = twins(name)
    with unfused() as reasons, CountOps() as count:
        out = converted(**batch)
        out.loss.backward()
    with CountOps() as plainly:
        want = plain(**batch)
    assert not reasons
    assert count.calls["ckptfused.attention_block_fwd"] == 2 * 2  # in backward each half is made again, by its op alone
    assert count.calls["aten.topk"] == plainly.calls["aten.topk"] > 0
    assert len(out.router_logits) == len(want.router_logits) == 2  # the replay in backward collects nothing
    for got, router in zip(out.router_logits, want.router_logits, strict=True):
        torch.testing.assert_close(got, router)
    torch.testing.assert_close(out.aux_loss, want.aux_loss)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_few_experts(name: str) -> None:
    """Experts that no token chose have no gradient, or zeros, as before."""
    plain, converted, batch = twins(name)
    for model in (plain, converted):
        for layer in model.model.layers:
            layer.mlp.gate.top_k = 2
    close(run(converted, batch), run(plain, batch), 1e-5)


def test_jitter_of_a_router_is_replayed() -> None:
    """It multiplies in place, by numbers of PyTorch's generator."""
    plain, converted, batch = twins("mixtral")
    for model in (plain, converted):
        for layer in model.model.layers:
            layer.mlp.jitter_noise = 0.3
    torch.manual_seed(5)
    got = run(converted, batch)
    torch.manual_seed(5)
    close(got, run(plain, batch), 1e-5)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "t5", "whisper", "bert", "vit"])
def test_attention_weights_take_the_original_path(name: str) -> None:
    plain, converted, batch = twins(name)
    for model in (plain, converted):
        model.set_attn_implementation("eager")
    with unfused() as reasons:
        got = converted(**batch, output_attentions=True)
    want = plain(**batch, output_attentions=True)
    # Until transformers 5.1 some models collect what patched modules put out: layers with a patch are checkpointed.
    assert reasons and all(reason.original or version() < (5, 2) for reason in reasons)
    for key in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        if key in want:
            torch.testing.assert_close(got[key], want[key])


@pytest.mark.parametrize(("name", "why"), [("t5", 4), ("whisper", 2)])
def test_float16_is_clamped_by_the_original(name: str, why: int) -> None:
    """What a layer clamps in float16 is not fused; Whisper's decoder clamps nothing."""
    model: Any = randomize(ZOO[name].make(0.0, "sdpa")).half()
    report = ckptfused.convert(model)
    assert sum(x.path == "generic" for x in report.layers) == why
    assert {x.reason for x in report.layers if x.path == "generic"} == {"values are clamped in float16"}


@since((5, 4), "Whisper's layers are fused")
def test_whisper_without_an_encoder_is_one_op() -> None:
    _, converted, batch = twins("whisper-no-encoder")
    with CountOps() as count:
        converted(**batch).loss.backward()
    assert count.blocks == (2, 2)


def test_cross_attention_in_bert_is_checkpointed() -> None:
    config = transformers.BertConfig(
        **zoo_encoders.SIZES,
        **zoo_encoders.TEXT,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        is_decoder=True,
        add_cross_attention=True,
    )
    plain: Any = randomize(transformers.BertLMHeadModel(config)).train()
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    batch = {**text_batch(), "encoder_hidden_states": torch.randn(3, 7, 48)}
    with unfused() as reasons:
        got = run(converted, batch)
    assert texts(reasons) == {"cross attention"}
    want = run(plain, batch)
    for name in [name for name in want if name.endswith("key.bias")]:  # 0 but for rounding
        del want[name], got[name]
    close(got, want, 1e-5)


def test_a_subclass_with_another_ffn_is_not_taken_for_bert() -> None:
    class Doubled(BertLayer):  # type: ignore[misc]
        def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
            return 2 * super().feed_forward_chunk(attention_output)

    plain, _, batch = twins("bert")
    for layer in plain.bert.encoder.layer:
        layer.__class__ = Doubled
    converted = copy.deepcopy(plain)
    report = ckptfused.convert(converted)
    assert {x.path for x in report.layers} == {"generic"}
    assert "is not the one that was read" in report.layers[0].reason
    torch.testing.assert_close(run(converted, batch)["loss"], run(plain, batch)["loss"])


def test_a_method_patched_on_the_layer() -> None:
    _, converted, batch = twins("bert")
    layer = converted.bert.encoder.layer[0]
    calls = []
    own = layer.feed_forward_chunk
    layer.feed_forward_chunk = lambda x: calls.append(1) or own(x)
    with unfused() as reasons:
        converted(**batch)
    assert len(reasons) == 1 and calls


@pytest.mark.parametrize("name", ["mixtral", "t5", "whisper"])
def test_eval_without_gradients(name: str) -> None:
    plain, converted, batch = twins(name)
    with torch.no_grad(), unfused():
        got, want = (model.eval()(**batch, use_cache=False).logits for model in (converted, plain))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["mixtral", "t5", "whisper"])
def test_training_with_the_cache_switched_on(name: str) -> None:
    """The empty cache stays empty, as with Hugging Face's own checkpointing, and nothing falls back."""
    plain, converted, batch = twins(name)
    with unfused() as reasons:
        out = converted(**batch, use_cache=True)
        out.loss.backward()
    assert not reasons
    assert out.past_key_values is None or out.past_key_values.get_seq_length() == 0
    torch.testing.assert_close(out.loss, plain(**batch, use_cache=False).loss)


@pytest.mark.parametrize("name", ["mixtral", "t5", "whisper"])
def test_generation(name: str) -> None:
    # Until transformers 5.15 a Mixtral that puts out router logits fails to generate.
    changes = {"output_router_logits": False} if version() < (5, 16) else {}
    plain, converted, batch = twins(name, **changes)
    key = "input_features" if name == "whisper" else "input_ids"
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    if name == "whisper":
        options["decoder_input_ids"] = torch.tensor([[3]] * 3)
    got, want = (model.eval().generate(batch[key], **options) for model in (converted, plain))
    assert torch.equal(got, want)


def test_hooks_on_inner_modules_of_a_checkpointed_piece_fire() -> None:
    """Hooks on a fused half make the layer fall back."""
    _, converted, batch = twins("mixtral")
    seen: list[str] = []
    layer = converted.model.layers[0]
    layer.mlp.register_forward_hook(lambda *_: seen.append("mlp"))
    with unfused() as reasons:
        converted(**batch)
    assert seen == ["mlp"] and not reasons
    layer.self_attn.register_forward_hook(lambda *_: seen.append("attention"))
    with unfused() as reasons:
        converted(**batch)
    assert seen == ["mlp", "mlp", "attention"] or seen == ["mlp", "attention", "mlp"]
    assert len(reasons) == 1


@pytest.mark.parametrize("keep", ["all", "attention+mid", ("attn",), ("gu", "mid")])
def test_policies_name_what_whole_layers_have(keep: Any) -> None:
    plain, _, batch = twins("whisper")
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted, keep)
    torch.testing.assert_close(run(converted, batch)["loss"], run(plain, batch)["loss"])


@pytest.mark.parametrize("name", ["mixtral", "t5", "whisper", "bert"])
def test_autocast(name: str) -> None:
    """Gradients of a mixture of experts and of an encoder-decoder under autocast, in the types of the original."""
    plain, converted, batch = twins(name)
    with torch.autocast("cpu", torch.bfloat16), unfused() as reasons:
        got, want = run(converted, batch), run(plain, batch)
    assert not reasons
    torch.testing.assert_close(got["loss"], want["loss"], rtol=2e-2, atol=0)
    assert {k: v.dtype for k, v in got.items()} == {k: v.dtype for k, v in want.items()}


@since((5, 4), "T5's layers are fused in part")
def test_the_encoder_gets_its_gradient() -> None:
    """Cross attention is checkpointed with the encoder's output as an argument."""
    _, converted, batch = twins("t5")
    memory = torch.randn(3, 9, 48, requires_grad=True)
    converted.decoder(input_ids=batch["input_ids"], encoder_hidden_states=memory).last_hidden_state.sum().backward()
    assert memory.grad is not None and memory.grad.abs().sum() > 0


def test_layer_called_twice() -> None:
    """Shared weights: gradients add up."""
    plain, converted, batch = twins("mixtral", use_cache=False)
    for model in (plain, converted):
        layers = model.model.layers
        model.model.layers = nn.ModuleList([layers[0], layers[0]])
    close(run(converted, batch), run(plain, batch), 1e-5)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_.*deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "t5", "whisper", "bert", "phi3", "gemma3"])
def test_its_own_checkpointing_is_not_done_twice(name: str, reentrant: bool) -> None:
    plain, converted, batch = twins(name)
    converted.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:  # it may come before as well
        assert [x.path for x in ckptfused.convert(converted).layers] == [*ZOO[name].paths(converted)]
    with unfused() as reasons:
        got = run(converted, batch)
    assert not reasons
    want = run(plain, batch)
    for key in [key for key in want if name == "bert" and key.endswith("key.bias")]:  # 0 but for rounding
        del want[key], got[key]
    close(got, want, 1e-5)


@pytest.mark.parametrize("name", ["mixtral", "t5", "whisper", "torch-decoder-post"])
def test_dropout_is_replayed(name: str) -> None:
    """Fused halves and checkpointed pieces: the same bits whatever is kept, and the generator moves on alike."""
    specimen = ZOO[name]
    found = []
    for keep in ("inputs", "all", "inputs"):
        model = randomize(specimen.make(0.3, specimen.implementations[0])).train()
        ckptfused.convert(model, keep)
        torch.manual_seed(11)
        found.append({**run(model, specimen.batch()), "state": torch.get_rng_state()})
    for other in found[1:]:
        assert all(torch.equal(other[key], value) for key, value in found[0].items())


TARGETS: dict[str, list[str]] = {
    "mixtral": ["q_proj", "v_proj", "o_proj"],
    "t5": ["q", "wi", "wo"],
    "whisper": ["q_proj", "k_proj", "fc1", "fc2"],
    "bert": ["query", "dense"],
    "vit": ["q_proj", "fc2", "query", "output.dense"],  # the latter until transformers 5.8
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", TARGETS)
def test_lora(name: str) -> None:
    """Adapters in fused halves and in checkpointed pieces, base frozen."""
    peft = pytest.importorskip("peft")
    plain: Any = randomize(ZOO[name].make(0.0, "sdpa"))
    plain = randomize(
        peft.get_peft_model(plain, peft.LoraConfig(r=3, lora_alpha=1, target_modules=TARGETS[name]))
    ).train()
    converted = copy.deepcopy(plain)
    report = ckptfused.convert(converted)
    assert {x.path for x in report.layers} <= {"fused", "part"}, str(report)
    batch = ZOO[name].batch()
    with unfused() as reasons:
        got = run(converted, batch)
    assert not reasons
    want = run(plain, batch)
    assert all("lora" in key for key in want if key != "loss")
    close(got, want, 1e-5)


@pytest.mark.each_torch
@pytest.mark.slow
@since((5, 23), "these models compile without a graph break, converted or not")
@pytest.mark.parametrize("name", ["mixtral", "whisper"])
def test_compile(name: str) -> None:
    """No graph break. Hugging Face installs hooks that collect in a way that no compiler traces."""
    plain, converted, batch = twins(name, use_cache=False, output_router_logits=False)
    compiled = torch.compile(converted, fullgraph=True, backend="aot_eager")
    compiled(**batch).loss.backward()
    got = {key: p.grad for key, p in converted.named_parameters() if p.grad is not None}
    want = run(plain, batch)
    del want["loss"]
    close(got, want, 1e-5)
