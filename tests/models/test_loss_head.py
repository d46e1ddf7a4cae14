"""`convert(model, loss="chunked")`: losses, gradients and outputs of the unconverted model, without its logits."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import ckptfused
from ckptfused.models.heads.loss_forward import HeadForward
from tests.accounting import Events
from tests.models import zoo_decoders, zoo_encoders, zoo_llama, zoo_moe, zoo_seq2seq  # noqa: F401
from tests.models.compare import close, gradients, no_worse, run
from tests.models.small import llama
from tests.models.test_families import DRAWS, in_type, without_zero
from tests.models.test_trainer import assert_curves_agree, fine_tune, trainer_warnings
from tests.models.versions import transformers
from tests.models.zoo import VOCABULARY, ZOO, randomize, text_batch

NAMES = [
    "llama", "llama-bias", "mistral-window", "qwen2", "qwen3", "gemma2", "gemma2-uncapped-bias", "gemma3", "phi3",
    "gpt2", "neox", "opt", "mixtral", "qwen3-moe", "bert", "roberta",
]  # fmt: skip
SINCE = {"gpt2": (5, 3)}
peft_warnings = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def make(name: str, seed: int = 0) -> Any:
    """A plain model in train mode, without dropout."""
    if transformers() < SINCE.get(name, (0, 0)):
        pytest.skip("an older forward, of which nothing is known")
    specimen = ZOO[name]
    return randomize(specimen.make(0.0, specimen.implementations[0]), seed).train()


def chunked(plain: Any, **options: Any) -> Any:
    """A copy with its layers and its loss converted."""
    model = copy.deepcopy(plain)
    report = ckptfused.convert(model, loss="chunked", **options)
    assert [head.path for head in report.heads] == ["chunked"], str(report)
    return model


def is_chunked(model: Any, **changes: Any) -> bool:
    """Whether a call makes its loss without logits."""
    out = model(**text_batch() | changes)
    return out.loss is not None and out.logits is None


@pytest.mark.parametrize("name", NAMES)
def test_float32(name: str) -> None:
    plain, batch, specimen = make(name), ZOO[name].batch(), ZOO[name]
    model = chunked(plain)
    got, want = (without_zero(run(m, batch), specimen, 1e-5) for m in (model, plain))
    close(got, want, 1e-5)
    out = model(**batch)
    assert out.logits is None and type(out) is type(plain(**batch))


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16(name: str) -> None:
    """At most twice the model's own error against float32. Masked models give a loss in float32, not in bfloat16."""
    draws, specimen = [], ZOO[name]
    for seed in range(DRAWS):
        plain = make(name, seed).bfloat16()
        batch = in_type(specimen.batch(), torch.bfloat16)
        truth = run(copy.deepcopy(plain).float(), in_type(batch, torch.float32))
        eps = torch.finfo(torch.bfloat16).eps
        own, ours = (without_zero(run(m, batch), specimen, eps) for m in (plain, chunked(plain)))
        assert ours["loss"].dtype == torch.float32
        ours["loss"] = ours["loss"].to(own["loss"].dtype)
        draws.append((ours, own, without_zero(truth, specimen, 1e-5)))
    no_worse(draws, torch.bfloat16)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "qwen3-moe", "bert"])
def test_what_else_the_outputs_hold(name: str) -> None:
    plain = make(name)
    model, batch = chunked(plain), {**ZOO[name].batch(), "output_hidden_states": True}
    if name in ("mixtral", "qwen3-moe"):
        batch["output_router_logits"] = True
    got, want = model(**batch), plain(**batch)
    assert set(want) - set(got) == {"logits"}
    torch.testing.assert_close(got.hidden_states, want.hidden_states, rtol=1e-4, atol=1e-5)
    if "aux_loss" in want:
        torch.testing.assert_close(got.aux_loss, want.aux_loss)
        torch.testing.assert_close(got.router_logits, want.router_logits, rtol=1e-4, atol=1e-5)
    close({"loss": got.loss.detach()}, {"loss": want.loss.detach()}, 1e-5)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(7)},
        {"shift_labels": torch.arange(57).view(3, 19) % VOCABULARY},
        {"ignore_index": 3, "labels": torch.arange(57).view(3, 19) % 5},
        {"labels": torch.full((3, 19), -100)},
        {"labels": torch.arange(57) % VOCABULARY},
        {"shift_labels": torch.arange(57) % VOCABULARY},
    ],
    ids=["number", "tensor", "shift_labels", "ignore_index", "all ignored", "flat", "flat shift_labels"],
)
def test_arguments_of_the_loss(arguments: dict[str, Any]) -> None:
    plain = llama()
    batch = text_batch() | arguments
    got, want = chunked(plain)(**batch), plain(**batch)
    torch.testing.assert_close(got.loss, want.loss, equal_nan=True)
    assert got.logits is None


@pytest.mark.parametrize("items", [{}, {"num_items_in_batch": 0}], ids=["mean", "no items"])
def test_a_micro_batch_without_targets_spoils_nothing(items: dict[str, int]) -> None:
    plain, found = llama(), []
    for model in (chunked(plain), plain):
        model(**text_batch()).loss.backward()
        loss = model(**text_batch() | {"labels": torch.full((3, 19), -100)}, **items).loss
        assert loss.isnan()
        loss.backward()
        found.append(gradients(model))
    close(*found, 1e-5)


def test_generation_between_forward_and_backward() -> None:
    plain, found = llama(), []
    for model in (chunked(plain), plain):
        loss = model(**text_batch()).loss
        model.generate(text_batch()["input_ids"][:1], max_new_tokens=3, do_sample=False)
        loss.backward()
        found.append(gradients(model))
    close(*found, 1e-5)


def test_arguments_by_position() -> None:
    plain, batch = llama(), text_batch()
    ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
    got, want = (m(ids, mask, None, None, None, labels) for m in (chunked(plain), plain))
    torch.testing.assert_close(got.loss, want.loss)
    assert got.logits is None


def test_calls_that_may_want_logits_run_as_they_were() -> None:
    model = chunked(llama())
    assert is_chunked(model)
    for changes in ({"labels": None}, {"logits_to_keep": 19}, {"logits_to_keep": torch.arange(19)}):
        assert model(**text_batch() | changes).logits is not None, changes
    loss, logits, *_ = model(**text_batch(), return_dict=False)
    assert loss.dim() == 0 and logits.size(-1) == VOCABULARY
    with torch.no_grad():
        assert not is_chunked(model)
    assert not is_chunked(model.eval())
    assert model.generate(text_batch()["input_ids"][:1], max_new_tokens=3, do_sample=False).size(1) == 22


def test_changes_after_convert_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chunked(llama())
    model.loss_function = lambda logits, labels, **kwargs: logits.square().mean()
    assert not is_chunked(model)
    del model._loss_function
    hook = model.lm_head.register_forward_hook(lambda module, inputs, logits: 2 * logits)
    assert not is_chunked(model)
    hook.remove()
    everywhere = nn.modules.module.register_module_forward_hook(lambda module, *_: None)
    assert not is_chunked(model)
    everywhere.remove()
    assert is_chunked(model)
    cls = type(model)
    monkeypatch.setattr(cls, "forward", lambda self, input_ids, labels=None, **kwargs: "somebody else's")
    assert model(**text_batch()) == "somebody else's"


def test_custom_heads_are_left_and_named() -> None:
    model = llama()
    model.lm_head = nn.Sequential(model.lm_head)  # type: ignore[assignment]
    report = ckptfused.convert(model, loss="chunked")
    assert report.heads[0].path == "original" and "Sequential" in report.heads[0].reason
    assert "its own loss, with all logits" in str(report)
    assert "forward" not in vars(model)
    other: Any = ZOO["t5"].make(0.0, "eager")
    assert ckptfused.convert(other, loss="chunked").heads[0].reason == "no adapter for this class"


def test_report_and_what_convert_is_told() -> None:
    model = llama()
    assert ckptfused.convert(model).heads == ()
    report = ckptfused.convert(model, loss="chunked")
    assert "LlamaForCausalLM: chunked loss; in training with labels, outputs.logits is None" in str(report)
    with pytest.raises(ValueError, match="loss: expected one of chunked, got 'fused'"):
        ckptfused.convert(model, loss="fused")
    with pytest.raises(ValueError, match='scratch: expected a number of bytes such as 268435456 or "256MiB" .*, got'):
        ckptfused.convert(model, loss="chunked", scratch="much")
    assert is_chunked(model)
    ckptfused.convert(model)
    assert "forward" not in vars(model) and not is_chunked(model)


def test_the_note_on_the_logits_goes_with_them() -> None:
    model = llama(vocab_size=4096)
    assert any("loss head sets the peak" in note for note in ckptfused.convert(model).notes)
    assert not ckptfused.convert(model, loss="chunked").notes


def test_revert_and_original() -> None:
    plain = llama()
    model = chunked(plain)
    with ckptfused.original(model):
        assert not is_chunked(model)
    assert is_chunked(model)
    assert ckptfused.revert(model) == 2
    assert "forward" not in vars(model)
    close(run(model, text_batch()), run(plain, text_batch()), 0.0)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_models_of_their_own(how: str) -> None:
    model = chunked(llama())
    other: Any = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert other.forward.model is other
    nn.init.zeros_(model.lm_head.weight)
    assert is_chunked(other) and other(**text_batch()).loss != model(**text_batch()).loss
    assert list(other.state_dict()) == list(llama().state_dict())


def test_the_signature_is_the_models() -> None:
    """Trainer and `generate` look at it."""
    model = chunked(llama())
    assert list(inspect.signature(model.forward).parameters) == list(inspect.signature(llama().forward).parameters)


def test_no_logits_as_a_whole() -> None:
    """The peak of a step, in a model that is nearly all head."""
    tokens, vocabulary, width = 4 * 64, 8192, 48
    batch = {"input_ids": torch.arange(tokens).view(4, 64)}
    batch["labels"] = batch["input_ids"]
    peaks = {}
    for name, convert in {"plain": False, "chunked": True}.items():
        model = llama(vocab_size=vocabulary)
        assert model.lm_head.in_features == width
        if convert:
            ckptfused.convert(model, loss="chunked", scratch="512KiB")
        run(model, batch)  # gradients are there
        peaks[name] = Events(lambda model=model: model(**batch).loss.backward()).peak_bytes()
    logits = 4 * tokens * vocabulary
    assert peaks["plain"] > 2 * logits
    # Gradients of head and embedding before they are added, and everything else.
    assert peaks["chunked"] < 2 * 4 * vocabulary * width + logits / 4, peaks


@peft_warnings
@pytest.mark.parametrize("where", ["lm_head", "all-linear and lm_head", "modules_to_save"])
def test_peft(where: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    options: dict[str, Any] = {"target_modules": ["lm_head"]}
    if where != "lm_head":
        options = {"target_modules": ["q_proj", "down_proj"] + ["lm_head"] * (where != "modules_to_save")}
    if where == "modules_to_save":
        options["modules_to_save"] = ["lm_head"]
    plain = peft.get_peft_model(llama(), peft.LoraConfig(r=4, init_lora_weights=False, **options)).train()
    model = chunked(plain)
    close(run(model, text_batch()), run(plain, text_batch()), 1e-5)
    assert is_chunked(model)
    with model.disable_adapter(), plain.disable_adapter():
        torch.testing.assert_close(model(**text_batch()).loss, plain(**text_batch()).loss)
        assert is_chunked(model)


@peft_warnings
def test_dropout_of_an_adapter_of_the_head() -> None:
    """Drawn anew at each call, and again the same from the same state."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["lm_head"], lora_dropout=0.5)
    model = chunked(peft.get_peft_model(llama(), config).train())
    losses = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        losses.append(run(model, text_batch())["loss"].item())
    assert losses[0] == losses[2] != losses[1]


def test_tied_embeddings_train_both_ways() -> None:
    plain = llama(tie_word_embeddings=True)
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    close(run(chunked(plain), text_batch()), run(plain, text_batch()), 1e-5)


def test_frozen_head() -> None:
    plain = llama()
    plain.lm_head.requires_grad_(False)
    got = run(chunked(plain), text_batch())
    close(got, run(plain, text_batch()), 1e-5)
    assert "lm_head.weight" not in got


def test_autocast() -> None:
    draws = []
    for seed in range(DRAWS):
        plain = llama(seed=seed)
        truth = run(copy.deepcopy(plain).double(), text_batch())
        with torch.autocast("cpu", torch.bfloat16):
            draws.append((run(chunked(plain), text_batch()), run(plain, text_batch()), truth))
    no_worse(draws, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.each_torch
@pytest.mark.parametrize(
    "name", ["llama", "bert", *(pytest.param(name, marks=pytest.mark.extended) for name in ("gemma2", "neox"))]
)
def test_compiled_whole(name: str) -> None:
    torch._dynamo.reset()
    plain = make(name)
    batch = {**ZOO[name].batch()}
    if name != "bert":
        batch["use_cache"] = False
    model = chunked(plain)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    out = compiled(**batch)
    out.loss.backward()
    assert out.logits is None
    got = {"loss": out.loss.detach(), **gradients(model)}
    close(got, run(chunked(plain), batch), 1e-6)


@trainer_warnings
@pytest.mark.parametrize("name", ["plain", "accumulation", "label smoothing", "bf16"])
def test_trainer(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "plain": {},
        "accumulation": {"gradient_accumulation_steps": 2},
        "label smoothing": {"label_smoothing_factor": 0.1},
        "bf16": {"bf16": True},
    }[name]
    plain = llama()
    model = chunked(plain)
    trainer, got = fine_tune(model, tmp_path / "a", **options)
    _, want = fine_tune(plain, tmp_path / "b", **options)
    if name == "bf16":
        assert got == pytest.approx(want, rel=2**-8)  # one rounding of the logits, which ours are spared
    else:
        assert_curves_agree(got, want)
    found = trainer.predict(trainer.train_dataset)
    assert found.predictions.shape[-1] == VOCABULARY


def test_accelerate_wraps_it() -> None:
    accelerate = pytest.importorskip("accelerate")
    plain = llama()
    model = chunked(plain)
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(model)
    try:
        assert is_chunked(prepared)
        assert not isinstance(vars(prepared)["forward"], HeadForward)
        ckptfused.revert(prepared)
        assert not is_chunked(prepared)
        assert ckptfused.convert(prepared, loss="chunked").heads[0].path == "chunked"
        assert is_chunked(prepared)
        accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        assert is_chunked(model)
        other = accelerator.prepare(llama())
        assert "convert before accelerate" in ckptfused.convert(other, loss="chunked").heads[0].reason
    finally:
        accelerator.free_memory()
        accelerate.state.AcceleratorState._reset_state(True)


def test_second_derivatives() -> None:
    plain = llama("eager")
    found: list[dict[str, Tensor]] = []
    for model in (chunked(plain), plain):
        model.zero_grad()
        loss = model(**text_batch()).loss
        weights = list(model.parameters())
        first = torch.autograd.grad(loss, weights, create_graph=True)
        torch.stack([g.square().sum() for g in first]).sum().backward()
        found.append({"loss": loss.detach(), **gradients(model)})
    close(*found, 2e-5)
