"""Planted faults that the doctor sees without a step: each is named, with its place, and a sound twin is not."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

import ckptfused
from ckptfused.doctor import Finding, Findings, doctor, training
from tests.doctor import models
from tests.doctor.models import WIDTH, Layer, stack, wrapped

pytest.importorskip("transformers")

from tests.models.small import llama
from tests.models.zoo import text_batch

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]
LAYERS = ("model.layers.0", "model.layers.1")


class Fault(NamedTuple):
    make: Callable[[], Any]
    """A model, or a model and a batch."""
    severity: str
    place: str
    words: str
    sound: Callable[[], Any] | None = None
    """The same without the fault."""


def hugging_face(reentrant: bool = False, frozen: bool = False, cache: bool = False, **options: Any) -> Any:
    model = llama(**options)
    model.config.use_cache = cache
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if frozen:
        model.get_input_embeddings().requires_grad_(False)
        model.disable_input_require_grads()  # of reentrant ones Hugging Face switches that on itself
    return model


def plain(**options: Any) -> Any:
    model = llama(**options)
    model.config.use_cache = False
    return model


def cached() -> Any:
    model = plain()
    model.config.use_cache = True
    return model


def converted(**options: Any) -> Any:
    model = plain(**options)
    ckptfused.convert(model)
    return model


def around_layers(model: Any, **options: Any) -> Any:
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer, **options)
    return model


def compiled_layers(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


def long_batch(length: int = 256, batch: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.arange(length).remainder(90).expand(batch, length)
    return {"input_ids": ids, "labels": ids}


def meta(model: nn.Module) -> nn.Module:
    return model.to("meta")


FAULTS = {
    "use_cache under a wrapper": Fault(
        lambda: around_layers(cached()),
        "error",
        "model.layers.0.self_attn, model.layers.1.self_attn",
        "its replay adds keys and values to the cache once more",
        lambda: (around_layers(cached()), {**text_batch(), "use_cache": False}),
    ),
    "use_cache without checkpoints": Fault(
        lambda: cached(),
        "advice",
        "the model",
        "use_cache=True in training",
        lambda: hugging_face(cache=True),
    ),
    "use_cache without checkpoints, asked for": Fault(
        lambda: (plain(), {**text_batch(), "use_cache": True}),
        "advice",
        "the model",
        "use_cache=True in training",
        lambda: (converted(), {**text_batch(), "use_cache": True}),
    ),
    "reentrant with frozen inputs": Fault(
        lambda: hugging_face(reentrant=True, frozen=True),
        "error",
        "model.layers.0",
        "whose inputs are frozen: no gradient reaches",
        lambda: hugging_face(reentrant=True),
    ),
    "without random states": Fault(
        lambda: wrapped(lambda: nn.Dropout(0.5), preserve_rng_state=False),
        "error",
        "layers.1.piece",
        "dropout under a checkpoint with preserve_rng_state=False",
        lambda: wrapped(lambda: nn.Dropout(0.0), preserve_rng_state=False),
    ),
    "without random states, of attention": Fault(
        lambda: around_layers(plain(p=0.2), preserve_rng_state=False),
        "error",
        "model.layers.0.self_attn, model.layers.1.self_attn",
        "dropout under a checkpoint with preserve_rng_state=False",
        lambda: around_layers(converted(p=0.2), preserve_rng_state=False),
    ),
    "an in-place module": Fault(
        lambda: nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)))),
        "warning",
        "0.0",
        "an in-place module is the first in a checkpoint",
        lambda: nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)))),
    ),
    "batch norm": Fault(
        lambda: wrapped(lambda: nn.BatchNorm1d(WIDTH)),
        "warning",
        "layers.1.piece",
        "BatchNorm under a checkpoint",
        lambda: wrapped(lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False)),
    ),
    "eval": Fault(
        lambda: hugging_face().eval(),
        "advice",
        "the model",
        "the model is in eval mode: it is not at work",
        hugging_face,
    ),
    "eval, with a wrapper": Fault(
        lambda: wrapped(nn.Identity).eval(), "advice", "the model", "with gradients each layer runs twice"
    ),
    "nothing trained": Fault(
        lambda: hugging_face().requires_grad_(False), "warning", "the model", "no parameter requires a gradient"
    ),
    "short sequences": Fault(
        lambda: (meta(hugging_face(hidden_size=256)), long_batch(4)),
        "advice",
        "the model",
        "with sequences of 4 tokens checkpointing only costs time",
        lambda: (meta(hugging_face(vocab_size=91)), long_batch(4096)),
    ),
    "the optimizer fills the memory": Fault(
        lambda: (meta(plain(hidden_size=256)), long_batch(8)),
        "advice",
        "the model",
        "most of the rest is weights, gradients and optimizer",
        lambda: (meta(plain(vocab_size=91)), long_batch(2048, 4)),
    ),
    "the logits fill the memory": Fault(
        lambda: (meta(converted(vocab_size=60_000)), long_batch(2048)),
        "advice",
        "the model",
        "most of the rest is loss head",
        lambda: (meta(converted(vocab_size=91)), long_batch(2048)),
    ),
    "eager attention": Fault(
        lambda: (meta(plain(implementation="eager")), long_batch(256)),
        "warning",
        "model.layers.0.self_attn, model.layers.1.self_attn",
        "eager attention with 256 tokens",
        lambda: (meta(converted(implementation="eager")), long_batch(256)),
    ),
    "Hugging Face's checkpointing within a wrapper": Fault(
        lambda: around_layers(hugging_face()),
        "warning",
        ", ".join(LAYERS),
        "checkpointed twice (Hugging Face's gradient checkpointing within checkpoint_wrapper)",
        lambda: around_layers(plain()),
    ),
    "a wrapper within a wrapper": Fault(
        lambda: checkpoint_wrapper(wrapped(nn.Identity)),
        "warning",
        "layers.0, layers.1, layers.2",
        "checkpointed twice (checkpoint_wrapper within checkpoint_wrapper)",
        lambda: wrapped(nn.Identity),
    ),
    "a reentrant wrapper around a converted layer": Fault(
        lambda: around_layers(converted(), checkpoint_impl=CheckpointImpl.REENTRANT),
        "warning",
        ", ".join(LAYERS),
        "checkpointed twice (ckptfused within checkpoint_wrapper)",
        lambda: around_layers(converted()),
    ),
    "compiled around checkpoints": Fault(
        lambda: torch.compile(hugging_face(), backend="eager"),
        "advice",
        "the model",
        "compiled around checkpoints",
        lambda: compiled_layers(hugging_face()),
    ),
    "layers that nobody checkpoints": Fault(
        lambda: some_layers(),
        "advice",
        "1",
        "1 layer without a checkpoint, while others have one",
        lambda: nn.Sequential(*(checkpoint_wrapper(Layer()) for _ in range(3))),
    ),
}


def some_layers() -> nn.Module:
    return nn.Sequential(checkpoint_wrapper(Layer()), Layer(), checkpoint_wrapper(Layer()))


def looked(made: Any) -> Findings:
    model, batch = made if isinstance(made, tuple) else (made, None)
    if batch is not None and not any(p.is_meta for p in model.parameters()):
        model.to("meta")
    return doctor(model, batch)


@pytest.mark.parametrize("fault", [pytest.param(fault, id=name) for name, fault in FAULTS.items()])
def test_a_fault_is_named(fault: Fault) -> None:
    found = looked(fault.make())
    assert [f for f in found if (f.severity, f.place) == fault[1:3] and fault.words in f.text and f.mend], found
    if fault.sound is not None:
        found = looked(fault.sound())
        assert not [f for f in found if fault.words in f.text], found


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_cache_whose_second_half_nobody_reads_is_a_warning(reentrant: bool) -> None:
    """Causal attention from the first key on hides what a replay adds, whose gradients a reentrant one needs."""
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    ids = text_batch()["input_ids"]
    found = doctor(around_layers(cached(), checkpoint_impl=kind), {"input_ids": ids, "labels": ids})
    words = "its replay adds keys and values to the cache once more"
    assert [f.severity for f in found if words in f.text] == ["error" if reentrant else "warning"], found
    assert found.certificate.startswith("Certificate:") != reentrant and found.healthy != reentrant
    assert "refutable" not in found.to_json()


def test_float32_on_a_device_that_knows_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    for knows, dtype, expected in (
        (True, torch.float32, True),
        (True, torch.bfloat16, False),
        (False, torch.float32, False),
    ):
        monkeypatch.setattr(training, "knows_bfloat16", lambda device, knows=knows: knows)
        found = doctor(plain().to(dtype))
        assert any("float32" in f.text for f in found) == expected, found
    monkeypatch.setattr(training, "knows_bfloat16", lambda device: True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not len(doctor(plain()))


def test_a_partitioner_that_may_undo_a_checkpoint() -> None:
    from torch._functorch import config

    model = compiled_layers(converted())
    with config.patch(activation_memory_budget=0.5):
        found = doctor(model)
    assert [(f.severity, f.place) for f in found] == [("warning", ", ".join(LAYERS))], found
    assert "activation_memory_budget=0.5" in found[0].text
    assert not len(doctor(model))


def test_the_optimizer_that_is_given_counts() -> None:
    """AdamW has twice the state of SGD with momentum."""
    model, batch = plain(hidden_size=256), {k: v.to("meta") for k, v in long_batch(8).items()}
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9)
    texts = [" ".join(f.text for f in doctor(model.to("meta"), batch, o)) for o in (None, sgd)]
    assert all("of the predicted peak of" in text for text in texts) and texts[0] != texts[1]


def test_memory_of_a_model_that_is_partly_unknown_is_not_judged() -> None:
    """Layers that do not run without data save nothing in a prediction."""

    class Opaque(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1.0 if x.sum().item() > 0 else 2.0)

    class Model(nn.Module):
        def __init__(self, layer: type[nn.Linear]) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.layers = nn.ModuleList(nn.Sequential(layer(64, 64), nn.Tanh()) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = x + layer(x)
            return x

    batch = {"x": torch.randn(2, 64)}
    assert "activations" in str(doctor(Model(nn.Linear), batch))
    assert "activations" not in str(doctor(Model(Opaque), batch))


def test_what_was_measured_is_said() -> None:
    """A prediction's notes are in the advice that rests on it: what convolutions hold is not counted."""

    class Convolutional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = (nn.Conv2d(n, 8, 3, padding=1) for n in (3, 8))
            self.out = nn.Linear(8 * 8 * 8, 2000)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return self.out(self.layer(self.first(pixels)).flatten(1)).square().mean()

    batch = {"pixels": torch.randn(1, 3, 8, 8)}
    found = [f for f in doctor(Convolutional(), batch) if "of the predicted peak of" in f.text]
    assert len(found) == 1 and "; convolutions hold up to " in found[0].text, found
    assert found[0].text.endswith("within one, as measured on this CPU")


def test_all_that_is_large_has_a_mend() -> None:
    """State and logits of like size get both; one that outweighs the other, one."""
    for size, mends in (({"hidden_size": 512}, (True, False)), ({"vocab_size": 60_000}, (True, True))):
        found = looked((meta(plain(**size)), long_batch(100)))
        mend = next(f.mend for f in found if "of the predicted peak of" in f.text)
        assert ("sharding" in mend, "chunked" in mend) == mends, found


def test_looking_changes_nothing() -> None:
    """Neither attributes of modules, nor the generator."""
    model = around_layers(hugging_face())
    before = {name: sorted(vars(m)) for name, m in model.named_modules()}
    state = torch.get_rng_state()
    looked((copy.deepcopy(model), long_batch()))
    doctor(model)
    assert before == {name: sorted(vars(m)) for name, m in model.named_modules()}
    assert torch.equal(state, torch.get_rng_state())


def test_findings_are_a_sequence_and_print() -> None:
    found = doctor(wrapped(lambda: nn.Dropout(0.5), preserve_rng_state=False).eval().train())
    assert isinstance(found[0], Finding) and len(found) == len(list(found)) and found[:1] == [found[0]]
    assert not found.healthy and found.of("error") == [found[0]]
    assert json.loads(found.to_json())["findings"][0] == {
        "severity": "error",
        "place": "layers.1.piece",
        "text": found[0].text,
        "mend": found[0].mend,
    }
    text = " ".join(str(found).split())
    assert "severity place what what to do" in text and "layers.1.piece" in text and "1 error" in text
    assert "No certificate: without a batch nothing runs." in text
    assert "nothing found" in str(Findings([]))
    mixed = Findings([Finding("advice", "b", "t", "m"), Finding("error", "a", "t", "m")])
    assert [f.severity for f in mixed] == ["error", "advice"]


def test_many_places_are_shortened() -> None:
    model = nn.Sequential(*(checkpoint_wrapper(nn.Dropout(0.5), preserve_rng_state=False) for _ in range(20)))
    assert doctor(model)[0].place == "0, 1, 2, … (14 more), 17, 18, 19"


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model: expected an nn\.Module, got str"):
        doctor("model")  # type: ignore[arg-type]


def test_models_without_values_are_looked_at() -> None:
    lazy = nn.Sequential(nn.LazyLinear(3))
    assert "its first call will make" in doctor(lazy, torch.ones(2, 4)).certificate
    assert "on the meta device" in doctor(llama().to("meta"), long_batch()).certificate
    assert "no parameter requires" in doctor(stack(nn.Identity).requires_grad_(False), models.batch()).certificate


def test_use_cache_of_an_inner_configuration_does_not_count() -> None:
    """T5's decoder has a copy of the configuration, and is told what the model's says."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).train()
    for cache in (True, False):
        model.config.use_cache = cache
        assert any("use_cache" in f.text for f in doctor(model)) == cache and model.decoder.config.use_cache


@pytest.mark.parametrize("how", ["Hugging Face", "convert", "wrapper"])
def test_the_advice_about_caches_is_true_of_a_step(how: str) -> None:
    """Caches are left out by those whose models get no finding, and fail where the finding is an error."""
    model = cached()
    if how == "Hugging Face":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif how == "convert":
        ckptfused.convert(model)
    else:
        around_layers(model)
    batch = {k: v for k, v in text_batch().items() if k != "use_cache"}
    found, output = doctor(model, batch), model(**batch)
    assert found.healthy != (how == "wrapper"), found
    assert any("use_cache" in f.text for f in found) == (how == "wrapper")
    if how == "wrapper":
        with pytest.raises(RuntimeError, match="must match the size"):
            output.loss.backward()
    else:
        assert all(layer.keys is None for layer in getattr(output.past_key_values, "layers", ()))


class Swallows(nn.Module):
    """A model whose forward takes any name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, labels: Any = None, encoder_hidden_states: Any = None, **masks: Any) -> Any:
        return self.linear(x).sum()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("lables", True), ("labels", False), ("tgt_mask", False), ("output_hidden_states", False), ("mask", False)],
)
def test_a_misspelt_name_is_told_from_one_that_is_meant(name: str, wrong: bool) -> None:
    """By nearly all letters: the others may be read from `**masks`."""
    model, batch = Swallows(), {"x": torch.randn(2, WIDTH), name: None}
    for module in (model, nn.DataParallel(model)):  # a wrapper takes any name, too
        found = [f for f in doctor(module, batch) if "has no argument" in f.text]
        assert len(found) == (wrong and module is model)
        assert not wrong or module is not model or "did you mean labels?" in found[0].text
