"""No family of models has an error, converted and as its library has it; and what Hugging Face's checkpointing gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import ckptfused
from ckptfused.doctor import doctor
from tests.cases import by_turns
from tests.models import (  # noqa: F401
    zoo_decoders,
    zoo_encoders,
    zoo_llama,
    zoo_moe,
    zoo_seq2seq,
    zoo_torch,
)
from tests.models.small import llama
from tests.models.zoo import ZOO, randomize, text_batch

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]
# One of each kind; the rest differ in options of theirs.
FEW = (
    *("llama", "gemma2", "phi3", "gpt2", "neox", "opt", "bert", "vit", "mixtral", "t5", "whisper"),
    *("torch-encoder-post", "torch-decoder-pre"),
)
WAYS = ("lora", "chunked", "bfloat16", "autocast", "sequential", "tied", "in a checkpoint", "segments", "as they were")
RUNS = [
    pytest.param(name, mode, marks=() if mode == always else pytest.mark.extended)
    for number, name in enumerate((*FEW, *(name for name in ZOO if name not in FEW)))
    for always in [("train", "eval")[number % 2] if name in FEW else ""]
    for mode in ("train", "eval")
]


def small(name: str, mode: str) -> Any:
    specimen = ZOO[name]
    model = randomize(specimen.make(0.2, specimen.implementations[0])).train(mode == "train")
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_converted_models_are_certified(name: str, mode: str) -> None:
    """Models with dropout get nothing but advice."""
    model = small(name, mode)
    ckptfused.convert(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = doctor(model, ZOO[name].batch())
    assert not [f for f in found if f.severity != "advice"], found
    assert found.certificate.startswith("Certificate: loss, "), found
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("what", WAYS)
def test_what_is_trained_in_other_ways_is_certified(what: str) -> None:
    model: Any = llama(p=0.2, tie_word_embeddings=what == "tied")
    model.config.use_cache = False
    batch: Any = text_batch()
    if what == "lora":
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.2, init_lora_weights=False)
        model = peft.get_peft_model(model, config)
    if what == "sequential":
        blocks = [ckptfused.FusedCheckpointBlock(8, 2, 16, batch_first=True) for _ in range(4)]
        model, batch = ckptfused.FusedCheckpointSequential(*blocks, segments=2), torch.randn(2, 5, 8)
    if what == "bfloat16":
        model = model.bfloat16()
    segments, every = ckptfused.CheckpointPolicy.segments(1), ckptfused.CheckpointPolicy.every(2)
    policy = {"segments": segments, "as they were": every}.get(what)
    if what != "sequential":
        options = {"loss": "chunked" if what == "chunked" else None} if policy is None else {"policy": policy}
        ckptfused.convert(model, **options)
    if what == "in a checkpoint":
        model.gradient_checkpointing_enable()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=what == "autocast"):
        found = doctor(model, batch)
    assert not [f for f in found if f.severity != "advice"], found
    assert found.certificate.startswith("Certificate: loss, "), found


@pytest.mark.parametrize("place", [0, 1])
def test_a_wrong_replay_of_a_fused_layer_is_named(place: int) -> None:
    """Weights that somebody changes before backward, past the version counter: what was kept differs from a replay."""
    model = small("llama", "train")
    ckptfused.convert(model)
    gate = model.model.layers[place].mlp.gate_proj.weight
    model.register_forward_hook(lambda *_: changed(gate))
    found = doctor(model, ZOO["llama"].batch())
    assert [(f.severity, f.place) for f in found if f.severity != "advice"] == [("error", f"model.layers.{place}")], (
        found
    )


def changed(t: torch.Tensor) -> None:
    t.data.mul_(1.5)


@pytest.mark.parametrize(("name", "reentrant"), by_turns(["llama", "mixtral", "bert"], [False, True]))
def test_hugging_face_checkpointing_is_certified(name: str, reentrant: bool) -> None:
    model = small(name, "train")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = doctor(model, ZOO[name].batch())
    assert not [f for f in found if f.severity != "advice"], found
    assert found.certificate.startswith("Certificate: loss, ") and "(2 checkpointed calls with " in found.certificate, (
        found
    )
    # A reentrant checkpoint sums the gradients of what several experts share in another order.
    assert ("order of sums" in found.certificate) == (reentrant and name == "mixtral")


class Forgetful(nn.Dropout):
    """Dropout with a generator of its own, which Hugging Face's checkpointing does not replay."""

    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(x.shape, generator=self.generator).gt(self.p) / (1 - self.p)


@pytest.mark.parametrize("fault", ["dropout", "router", "frozen", "random states"])
def test_faults_under_hugging_face_checkpointing_are_named(fault: str) -> None:
    model = small("mixtral" if fault == "router" else "llama", "train")
    options = {"use_reentrant": fault == "frozen", "preserve_rng_state": fault != "random states"}
    model.gradient_checkpointing_enable(options)
    second: Any = model.model.layers[1]
    place, words = "", "it drew its random numbers anew in its replay, from a generator of its own"
    if fault == "dropout":
        second.mlp.act_fn = nn.Sequential(second.mlp.act_fn, Forgetful(0.5))
        place = "model.layers.1.mlp.act_fn.1"
    if fault == "router":
        place, words = jittered(second.mlp), "a router chose otherwise in its replay"
    if fault == "frozen":
        for p in model.parameters():
            p.requires_grad_(False)
        second.mlp.requires_grad_(True)
        model.disable_input_require_grads()
        place, words = "model.layers.0, model.layers.1", "its inputs are frozen and the checkpoint is reentrant"
    if fault == "random states":
        second.mlp.act_fn = nn.Sequential(second.mlp.act_fn, nn.Dropout(0.5))
        model.model.layers[0].self_attn.attention_dropout = second.self_attn.attention_dropout = 0.0
        place, words = "model.layers.1.mlp.act_fn.1", "Dropout drew its random numbers anew in its replay"
    found = doctor(model, ZOO["mixtral" if fault == "router" else "llama"].batch())
    assert [f for f in found if (f.severity, f.place) == ("error", place) and words in f.text], found


def jittered(mlp: Any) -> str:
    """Noise on what a router sees, from a generator that no checkpoint replays."""
    generator, plain = torch.Generator().manual_seed(0), mlp.gate.forward
    mlp.gate.forward = lambda x: plain(x * (1 + torch.rand(x.shape, generator=generator)))
    return "model.layers.1.mlp.gate"
