"""Key/value caches in training: a pass is the same with and without gradients, and fills the cache without."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers")

import transformers as hf

import ckptfused
from tests.accounting import CountOps
from tests.models import zoo_decoders, zoo_encoders, zoo_llama, zoo_moe, zoo_seq2seq  # noqa: F401
from tests.models.compare import close, gradients
from tests.models.small import llama, unfused
from tests.models.zoo import ZOO, Specimen, randomize, text_batch

# All whose models make a cache by themselves.
NAMES = [name for name in ZOO if not name.startswith(("torch", "vit", "roberta", "bert"))] + ["bert-decoder"]
# The families' ways to a cache: roped, q/k norms, joint, interleaved, biased, half by half, by the original's pieces.
KINDS = ("llama", "qwen3", "gemma3", "phi3-partial-window", "gpt2", "neox", "opt", "bert-decoder", "mixtral")
KINDS += ("t5", "whisper", "whisper-no-encoder")


@pytest.fixture(params=NAMES)
def specimen(request: pytest.FixtureRequest) -> Specimen:
    return ZOO[request.param]


def made(specimen: Specimen, p: float = 0.3) -> Any:
    return randomize(specimen.make(p, specimen.implementations[0])).train()


def converted(specimen: Specimen, p: float = 0.3) -> Any:
    model = made(specimen, p)
    ckptfused.convert(model)
    return model


def batch_of(specimen: Specimen) -> dict[str, Tensor]:
    """Without labels where the model makes no cache with them."""
    bert = specimen.name.startswith("bert")
    return {key: value for key, value in specimen.batch().items() if not (bert and key == "labels")}


def seeded_pass(model: Any, batch: dict[str, Any], seed: int = 3) -> tuple[Any, Tensor]:
    """What a pass gives, and the generator after it."""
    torch.manual_seed(seed)
    return model(**batch), torch.get_rng_state()


def test_a_pass_is_the_same_with_and_without_gradients(specimen: Specimen) -> None:
    model, batch = converted(specimen), batch_of(specimen)
    with unfused() as reasons:
        want, state = seeded_pass(model, batch)
        assert want.logits.requires_grad
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                got, after = seeded_pass(model, batch)
            assert got.logits.equal(want.logits)
            assert after.equal(state)
            assert got.past_key_values.get_seq_length() == got.logits.size(1)
        assert want.past_key_values.get_seq_length() == 0
    assert not reasons
    with torch.no_grad():
        assert not seeded_pass(model, batch, 4)[0].logits.equal(want.logits)


def cached(cache: Any) -> list[Tensor]:
    parts = [cache.self_attention_cache, cache.cross_attention_cache] if hasattr(cache, "is_updated") else [cache]
    return [t for part in parts for layer in part.layers for t in (layer.keys, layer.values) if t is not None]


@pytest.mark.parametrize("name", KINDS)
def test_what_is_in_the_cache(name: str) -> None:
    """Keys and values as the unconverted model caches them, and an entry for an entry of it."""
    plain = made(ZOO[name], 0.0)
    model = copy.deepcopy(plain)
    ckptfused.convert(model)
    batch = batch_of(ZOO[name])
    with torch.no_grad():
        got, want = (cached(m(**batch).past_key_values) for m in (model, plain))
    assert len(got) == len(want) > 0
    close(
        dict(zip(map(str, range(len(got))), got, strict=True)),
        dict(zip(map(str, range(len(want))), want, strict=True)),
        2e-6,
    )


@pytest.mark.parametrize("name", KINDS)
def test_generation_in_training(name: str) -> None:
    """The first call is fused and fills the cache, the others use it: the tokens of the unconverted model."""
    plain = made(ZOO[name], 0.0)
    model = copy.deepcopy(plain)
    ckptfused.convert(model)
    batch = {
        key: value[:, :7] if key in ("input_ids", "attention_mask") else value
        for key, value in ZOO[name].batch().items()
    }
    del batch["labels"]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with CountOps() as count:
        tokens = [m.generate(**batch, **options) for m in (model, plain)]
    assert tokens[0].equal(tokens[1])
    assert sum(n for op, n in count.calls.items() if op.startswith("ckptfused.") and op.endswith("_fwd")) > 0


def chunks(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{key: value[i : i + 1] for key, value in batch.items()} for i in range(len(batch["input_ids"]))]


def contrast(outputs: list[Tensor]) -> Tensor:
    """A loss that needs all of a batch."""
    means = torch.stack([y.float().mean(1).squeeze(0) for y in outputs])
    return torch.nn.functional.cross_entropy(means @ means.T, torch.arange(len(means)))


def test_gradients_by_way_of_cached_representations() -> None:
    """GradCache: all without gradients, the loss's gradient of that, and chunk by chunk with gradients."""
    model = llama(p=0.3)
    ckptfused.convert(model)
    parts = chunks({k: v for k, v in text_batch().items() if k == "input_ids"})
    torch.manual_seed(5)
    contrast([model(**part).logits for part in parts]).backward()
    want = gradients(model)
    model.zero_grad()
    torch.manual_seed(5)
    states, found = [], []
    with torch.no_grad():
        for part in parts:
            states.append(torch.get_rng_state())
            found.append(model(**part).logits)
    found = [y.requires_grad_() for y in found]
    contrast(found).backward()
    for part, state, y in zip(parts, states, found, strict=True):
        torch.set_rng_state(state)
        model(**part).logits.backward(y.grad)
    close(gradients(model), want, 1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_a_reentrant_checkpoint_around_a_model(name: str) -> None:
    model, batch = converted(ZOO[name]), ZOO[name].batch()
    torch.manual_seed(5)
    model(**batch).loss.backward()
    want = gradients(model)
    model.zero_grad()
    torch.manual_seed(5)
    place = torch.empty(0, requires_grad=True)
    checkpoint(lambda _: model(**batch).loss, place, use_reentrant=True).backward()
    got = gradients(model)
    assert got.keys() == want.keys()
    assert all(g.equal(want[key]) for key, g in got.items())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_dropout_in_adapters_alone() -> None:
    peft = pytest.importorskip("peft")
    model = llama()
    config = peft.LoraConfig(target_modules="all-linear", lora_dropout=0.4, init_lora_weights=False)
    model = peft.get_peft_model(model, config).train()
    ckptfused.convert(model)
    batch = text_batch()
    want, state = seeded_pass(model, batch)
    with torch.no_grad():
        got, after = seeded_pass(model, batch)
    assert got.logits.equal(want.logits)
    assert after.equal(state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """Keys and values are of the original's types, and as near as those of its products are."""
    plain = llama(p=0.0)
    model = copy.deepcopy(plain)
    ckptfused.convert(model)
    batch = text_batch()
    with torch.autocast("cpu", dtype):
        want = seeded_pass(model, batch)[0]
        with torch.no_grad():
            got, own = seeded_pass(model, batch)[0], plain(**batch)
    assert got.logits.equal(want.logits)
    for ours, theirs in zip(cached(got.past_key_values), cached(own.past_key_values), strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).float().norm() < 4 * torch.finfo(dtype).eps * theirs.float().norm()


@pytest.mark.parametrize("name", ["llama", "phi3", "mixtral"])
def test_a_static_cache_runs_the_original_both_times(name: str) -> None:
    """Its mask is as long as the cache; dropout's masks are PyTorch's, with gradients and without."""
    model, batch = converted(ZOO[name]), text_batch()
    found = []
    for mode in (True, False):
        cache = hf.StaticCache(model.config, max_cache_len=32)
        with torch.set_grad_enabled(mode):
            found.append(seeded_pass(model, {**batch, "past_key_values": cache}))
        assert cache.get_seq_length() == batch["input_ids"].size(1)
    assert found[0][0].logits.equal(found[1][0].logits)
    assert found[0][1].equal(found[1][1])


@pytest.mark.slow
@pytest.mark.each_torch
def test_compiled() -> None:
    model = llama(p=0.0)
    ckptfused.convert(model)
    batch = {"input_ids": text_batch()["input_ids"]}
    compiled: Any = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        want = model(**batch)
        got = compiled(**batch)
    close({"logits": got.logits}, {"logits": want.logits}, 1e-6)
    assert got.past_key_values.get_seq_length() == batch["input_ids"].size(1)
    for ours, theirs in zip(cached(got.past_key_values), cached(want.past_key_values), strict=True):
        close({"": ours}, {"": theirs}, 1e-6)


def test_tensors_lent_to_a_model_in_parts() -> None:
    """`functional_call`: the original layers run, with gradients and without."""
    model, batch = converted(ZOO["mixtral"]), ZOO["mixtral"].batch()
    lent = {name: p.detach() * 1.5 for name, p in model.named_parameters()}
    torch.manual_seed(3)
    want = torch.func.functional_call(model, lent, (), batch)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with torch.no_grad():
        got = torch.func.functional_call(model, lent, (), batch)
    assert got.logits.equal(want.logits)
    assert torch.get_rng_state().equal(state)
