"""What a Hugging Face model does beside a plain step: it stays as it was, and so does its result."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import ckptfused
from tests.accounting import CountOps, Events
from tests.models.compare import close, run
from tests.models.small import llama, transformers_log, twins, unfused
from tests.models.versions import since
from tests.models.zoo import VOCABULARY, text_batch
from tests.models.zoo_llama import SIZES


def test_parameters_and_state_dict_are_the_same_objects() -> None:
    model = llama()
    names, keys = dict(model.named_parameters()), list(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain = copy.deepcopy(model)
    others = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    modules = [(name, type(module)) for name, module in model.named_modules()]
    ckptfused.convert(model)
    assert all(p is names[name] for name, p in model.named_parameters())
    assert list(model.state_dict()) == keys
    assert [(name, type(module)) for name, module in model.named_modules()] == modules
    for _ in range(3):
        got, want = run(model, text_batch()), run(plain, text_batch())
        optimizer.step()
        others.step()
    close(got, want, 1e-5)


def test_nothing_is_concatenated() -> None:
    """Separate q, k, v and gate, up stay separate: no step joins them, in forward or backward."""
    plain, model = twins()
    x = torch.randn(2, 7, SIZES["hidden_size"], requires_grad=True)
    tables = (torch.ones(1, 7, 12), torch.zeros(1, 7, 12))
    counts = [
        Events(lambda m=m: m.model.layers[0](x, position_embeddings=tables).sum().backward()).count("aten::cat")
        for m in (plain, model)
    ]
    assert counts[0] > 0 and counts[1] == 0  # the original's are those of its RoPE


def test_revert_undoes() -> None:
    plain, model = twins()
    keys = [set(vars(module)) for module in plain.modules()]
    assert ckptfused.revert(model) == 2
    assert [set(vars(module)) for module in model.modules()] == keys
    got, want = run(model, text_batch()), run(plain, text_batch())
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert ckptfused.revert(model) == 0


def test_hooks_on_layers_fire_once() -> None:
    _, model = twins()
    seen: list[str] = []
    layer = model.model.layers[1]
    layer.register_forward_pre_hook(lambda *_: seen.append("pre"))
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    layer.register_full_backward_pre_hook(lambda *_: seen.append("backward pre"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    with unfused() as reasons:
        run(model, text_batch())
    assert seen == ["pre", "forward", "backward pre", "backward"]
    assert not reasons


def test_convert_calls_no_hooks() -> None:
    """It looks at layers without running what surrounds them: FSDP would gather their weights."""
    model = llama()
    seen: list[str] = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: seen.append("around"))
    model.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append("inside"))
    first, second = ckptfused.convert(model).layers
    assert not seen
    assert (first.path, second.path) == ("fused", "generic")
    assert first.before is not None and first.before > 10 * (first.after or 0)


@pytest.mark.parametrize("beams", [1, 3])
def test_generation(beams: int) -> None:
    plain, model = twins()
    ids = torch.randint(0, VOCABULARY, (2, 5))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    options: Any = {"max_new_tokens": 9, "do_sample": False, "num_beams": beams, "pad_token_id": 0, "eos_token_id": 1}
    for mode in (True, False):
        with unfused() as reasons:
            got = model.train(mode).generate(ids, attention_mask=mask, **options)
        assert {reason.text for reason in reasons} == {"a key/value cache is in use"}
        assert torch.equal(got, plain.train(mode).generate(ids, attention_mask=mask, **options))


@pytest.mark.parametrize("use_cache", [True, False])
def test_training_with_the_cache_switched_on(use_cache: bool) -> None:
    plain, model = twins()
    batch = {**text_batch(), "use_cache": use_cache}
    with unfused() as reasons:
        close(run(model, batch), run(plain, batch), 1e-5)
    assert not reasons


def test_filling_a_cache_by_hand_with_gradients_on() -> None:
    """Even where no adapter knows the layer, a replay must not fill it twice, and it must not be left out."""
    plain, fused = twins()
    generic = copy.deepcopy(plain)
    for layer in generic.model.layers:
        layer.forward = lambda *args, layer=layer, **kwargs: type(layer).forward(layer, *args, **kwargs)
    assert ckptfused.convert(generic).fused == 0
    ids = torch.randint(0, VOCABULARY, (2, 6))
    for model in (fused, generic):
        results = []
        for one in (plain, model):
            one.eval()
            first = one(input_ids=ids[:, :4], use_cache=True)
            second = one(input_ids=ids[:, 4:], past_key_values=first.past_key_values, use_cache=True)
            assert second.past_key_values.get_seq_length() == 6
            one.zero_grad()
            second.logits.square().mean().backward()
            results.append({name: p.grad for name, p in one.named_parameters()} | {"logits": second.logits.detach()})
        assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_prefix_in_training_takes_the_original_path() -> None:
    from transformers import DynamicCache

    plain, model = twins()
    batch = text_batch()
    prefix = [torch.randn(3, 2, 4, 12) for _ in range(4)]

    def step(one: Any) -> Any:
        cache = DynamicCache([(prefix[0], prefix[1]), (prefix[2], prefix[3])])
        mask = torch.cat((batch["attention_mask"].new_ones(3, 4), batch["attention_mask"]), 1)
        return run(one, {**batch, "attention_mask": mask, "past_key_values": cache})

    with unfused() as reasons:
        got = step(model)
    assert [reason.original for reason in reasons] == [True, True]
    want = step(plain)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("what", ["output_attentions", "output_hidden_states"])
def test_collected_outputs(what: str) -> None:
    plain, model = twins("eager")
    batch = text_batch()
    with unfused() as reasons:
        got, want = (one(**batch, **{what: True}) for one in (model, plain))
    assert len(reasons) == (2 if what == "output_attentions" else 0)
    key = what.removeprefix("output_")
    assert len(got[key]) == len(want[key])
    for i, (g, w) in enumerate(zip(got[key], want[key], strict=True)):
        close({str(i): g}, {str(i): w}, 1e-5)
    for one, out in ((model, got), (plain, want)):
        one.zero_grad()
        (out.loss + sum(x.square().mean() for x in out[key])).backward()
    grads = [{name: p.grad.clone() for name, p in one.named_parameters()} for one in (model, plain)]
    close(*grads, 1e-5)  # type: ignore[misc]
    with unfused() as reasons:
        close(run(model, batch), run(plain, batch), 1e-5)
    assert not reasons  # the hooks that Hugging Face leaves behind watch nothing now


def enable(model: Any) -> Any:
    """Its method that switches checkpointing on, by the name that came with transformers 5.23 if it has that."""
    return getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_.*deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("every", [1, pytest.param(2, marks=since((5, 16), "every n-th layer can be checkpointed"))])
@pytest.mark.parametrize("first", [True, False], ids=["enable-convert", "convert-enable"])
def test_its_own_checkpointing_is_not_done_twice(first: bool, every: int, reentrant: bool) -> None:
    plain, model = llama(), llama()
    want = run(plain, text_batch())
    kwargs = {"use_reentrant": reentrant}
    with transformers_log() as lines:
        for step in ("enable", "convert") if first else ("convert", "enable"):
            if step == "convert":
                assert ckptfused.convert(model).fused == 2
            elif every == 1:
                model.gradient_checkpointing_enable(kwargs)
            else:
                enable(model)(kwargs, every_n_layers=every)
        for _ in range(3):
            with CountOps() as ops:
                close(run(model, text_batch()), want, 1e-5)
            assert ops.blocks == (2, 2)
    assert len(lines) == len(set(lines)) <= 2  # each said once: that a name is deprecated, that the cache is off
    model.gradient_checkpointing_disable()
    close(run(model, text_batch()), want, 1e-5)
    ckptfused.revert(model)
    got = run(model, text_batch())
    assert all(torch.equal(got[name], want[name]) for name in want)


def forget_converted_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process starts with."""
    base = transformers.modeling_layers.GradientCheckpointingLayer
    if "__call__" in vars(base):
        monkeypatch.setattr(base, "__call__", inspect.unwrap(base.__call__))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_.*deprecated:FutureWarning")
@pytest.mark.parametrize("how", ["as it is", "deepcopy", "pickle"])
def test_its_own_checkpointing_of_an_inner_model(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switched on for the whole one, and of copies, also in another process."""
    plain, model = llama(), llama()
    want = run(plain, text_batch())
    ckptfused.convert(model.model)
    if how == "pickle":
        written = pickle.dumps(model)
        forget_converted_layers(monkeypatch)
        model = pickle.loads(written)
    model.gradient_checkpointing_enable()
    if how == "deepcopy":
        model = copy.deepcopy(model)
    for _ in range(2):
        with CountOps() as ops, unfused() as reasons:
            close(run(model, text_batch()), want, 1e-5)
        assert ops.blocks == (2, 2) and not reasons
    assert ckptfused.revert(model) == 2
    calls: list[int] = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    got = run(model, text_batch())
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert len(calls) == 2  # Hugging Face checkpoints again


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_.*deprecated:FutureWarning")
@pytest.mark.parametrize("why", ["asked", "attentions"])
def test_the_original_path_under_its_own_checkpointing(why: str) -> None:
    """There Hugging Face checkpoints, as in the unconverted model."""
    plain, model = twins("eager")
    batch = {**text_batch(), "output_attentions": why == "attentions"}
    calls: list[int] = []
    for one in (plain, model):
        one.gradient_checkpointing_enable()
        one.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    want = run(plain, batch)
    assert len(calls) == 2
    with unfused() as reasons, ckptfused.original(model) if why == "asked" else contextlib.nullcontext():
        got = run(model, batch)
    assert len(calls) == 4 and [reason.original for reason in reasons] == [True, True]
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_.*deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_generic_layer_that_checkpoints_itself(reentrant: bool) -> None:
    """A hook inside makes both layers generic; they are run once again in backward, not twice."""
    plain, model = twins()
    calls = []
    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda *_: calls.append(1))
    want = run(plain, text_batch())
    enable(model)({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    close(run(model, text_batch()), want, 1e-5)
    assert len(calls) == 4
    model.gradient_checkpointing_disable()
    calls.clear()
    close(run(model, text_batch()), want, 1e-5)
    assert len(calls) == 4


def test_copies_and_pickles(tmp_path: Any) -> None:
    plain, model = twins()
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(1.25)
        changed = copy.deepcopy(plain)
        with torch.no_grad():
            for p in changed.parameters():
                p.mul_(1.25)
        with unfused() as reasons:
            close(run(other, text_batch()), run(changed, text_batch()), 1e-5)
        assert not reasons
    close(run(model, text_batch()), run(plain, text_batch()), 1e-5)


def test_save_and_load_pretrained(tmp_path: Any) -> None:
    plain, model = twins()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).train()
    want = run(plain, text_batch())
    got = run(loaded, text_batch())
    assert all(torch.equal(got[name], want[name]) for name in want)
    ckptfused.convert(loaded)
    close(run(loaded, text_batch()), want, 1e-5)
