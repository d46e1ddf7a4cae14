"""Dropout on PEFT's adapters of experts, which PEFT refuses and a converted model has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptfused
from ckptfused import rng
from ckptfused.eager.experts import eager_experts
from ckptfused.models.experts import install
from ckptfused.spec.experts import parse_experts
from tests.models.test_expert_adapters import adapted, alike, is_ours, wrappers
from tests.models.test_experts import assert_alike, step

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
# An attention half that is fused, experts of their own kind, and a layer that is replayed whole.
NAMES = ("qwen3-moe", "gpt-oss", "deepseek-v3")


def with_dropout(model: Any, p: float) -> Any:
    for wrapper in wrappers(model):
        for each in (wrapper, wrapper.base_layer):
            each.lora_dropout["default"] = nn.Dropout(p)
    return model


def converted(name: str, p: float, **options: Any) -> Any:
    model = with_dropout(adapted(name), p)
    ckptfused.convert(model, **options)
    assert all(map(is_ours, wrappers(model)))
    return model


def seeded(model: Any) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(3)
    output, gradients = step(model)
    return float(output.loss.detach()), gradients


def by_plain_pytorch(*call: Any, spec: str) -> Tensor:
    """The op's result by operations that autograd knows, with the masks of its definition."""
    x, ids, weights, up, down, up_bias, down_bias, adapters, stored = call
    parsed, state = parse_experts(spec), rng.state(x)
    masks = [
        rng.dropout_mask((ids.numel(), a.size(-1)), p, state, site)
        for a, p, site in ((adapters[0], parsed.up_p, 4), (adapters[2], parsed.down_p, 5))
    ]
    return eager_experts(x, ids, weights, up, up_bias, down, down_bias, adapters, stored, parsed, masks)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_plain_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which keeps what it makes: no layer is a checkpoint there, and nothing is drawn or made twice."""
    loss, gradients = seeded(converted(name, 0.4))
    assert sum("experts" in n and "lora" in n and bool(g.any()) for n, g in gradients.items()) >= 4
    plain = with_dropout(adapted(name), 0.4)
    install.convert_experts(dict(plain.named_modules()))
    monkeypatch.setattr(install, "experts", by_plain_pytorch)
    expected, wanted = seeded(plain)
    assert abs(loss - expected) < 1e-6 * expected
    assert_alike(gradients, wanted)
    torch.manual_seed(4)
    assert abs(float(step(plain)[0].loss.detach()) - expected) > 1e-4 * expected


@pytest.mark.parametrize("name", NAMES)
def test_all_dropped_is_the_model_without_these_adapters_and_evaluation_is_peft_s(name: str) -> None:
    model = converted(name, 1.0)
    loss, gradients = seeded(model)
    plain = adapted(name)
    with torch.no_grad():
        for n, p in plain.named_parameters():
            if "experts" in n and "lora_B" in n:
                p.zero_()
    torch.testing.assert_close(loss, float(step(plain)[0].loss.detach()))
    assert all(not g.any() for n, g in gradients.items() if "experts" in n and "lora" in n)
    alike(adapted(name).eval(), model.eval())


def test_bits_are_equal_for_every_keep() -> None:
    found = [seeded(converted("qwen3-moe", 0.3, keep=keep))[1] for keep in ("inputs", "all")]
    assert all(torch.equal(a, found[1][name]) for name, a in found[0].items())


def test_a_call_that_peft_runs_raises() -> None:
    model = converted("qwen3-moe", 0.3)
    wrappers(model)[0].base_layer.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="which PEFT's own forward leaves out.*an inner wrapper has"):
        step(model)
    step(model.eval())


def _all_dropouts(model: Any, make: Any) -> None:
    for wrapper in wrappers(model):
        for each in (wrapper, wrapper.base_layer):
            each.lora_dropout["default"] = make()


class _Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0


@pytest.mark.parametrize("make", [lambda: nn.AlphaDropout(0.3), _Own])
def test_dropout_of_another_kind_is_said_before_convert_and_raises_after_it(make: Any) -> None:
    model = adapted()
    _all_dropouts(model, make)
    merged = [note for note in ckptfused.convert(model).notes if "at each call, without their dropout" in note]
    assert merged and f"adapter dropout of type {type(make()).__name__}" in merged[0]
    model = converted("qwen3-moe", 0.3)
    _all_dropouts(model, make)
    with pytest.raises(RuntimeError, match=f"leaves out.*of type {type(make()).__name__}"):
        step(model)


def _hook(model: Any) -> None:
    wrappers(model)[0].base_layer.base_layer.register_forward_hook(lambda *_: None)


def test_adapters_that_stay_peft_s_are_named_if_they_have_dropout() -> None:
    model = with_dropout(adapted(), 0.3)
    _hook(model)
    notes = [note for note in ckptfused.convert(model).notes if "without their dropout" in note]
    assert len(notes) == 1 and "on no experts that run as one operation" in notes[0]
    model = adapted()
    _hook(model)
    assert not any("dropout" in note or "merges" in note for note in ckptfused.convert(model).notes)


def test_adapters_that_are_switched_off_or_inactive_have_none() -> None:
    """A reference model is computed so: adapters off, in training."""
    model, plain = converted("qwen3-moe", 0.3), adapted()
    ids = torch.arange(18).view(2, 9)
    with model.disable_adapter(), plain.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)
    model.merge_adapter()
    with torch.no_grad():
        model(ids)
    model.unmerge_adapter()
    model.add_adapter("other", model.peft_config["default"])
    model.base_model.set_adapter("other")
    wrappers(model)[0].base_layer.register_forward_hook(lambda *_: None)
    step(model)


def test_under_a_mode_of_somebody_s_it_raises() -> None:
    class Passing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Passing(), pytest.raises(RuntimeError, match="leaves out"):
        step(converted("qwen3-moe", 0.3))


def test_experts_may_be_called_by_keywords() -> None:
    model = converted("qwen3-moe", 0.3)
    x, ids, weights = torch.randn(5, 32), torch.tensor([[0, 1]] * 5), torch.rand(5, 2)
    found = []
    for call in (
        lambda run: run(x, ids, weights),
        lambda run: run(x, top_k_index=ids, top_k_weights=weights),
        lambda run: run(x, ids, top_k_weights=weights),
    ):
        torch.manual_seed(2)
        found.append(call(wrappers(model)[0]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_no_generator_of_a_gpu_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """`convert` tries code on small weights, and so does the first call of shared experts."""
    models = [with_dropout(adapted(name), 0.3) for name in ("qwen3-moe", "deepseek-v3")]
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    for model in models:
        state = torch.get_rng_state()
        ckptfused.convert(model)
        assert torch.equal(state, torch.get_rng_state())
        step(model)
    assert not seeds


def test_it_is_predicted_as_it_runs() -> None:
    """The state of each layer's call is saved beside what is saved without, and its scratch is in the peak."""
    ids = torch.zeros(4, 160, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    found = []
    for p in (0.0, 0.3):
        model = converted("qwen3-moe", p)
        found.append((ckptfused.profile(model, batch, device="cpu"), ckptfused.profile(model, batch)))
        predicted, measured = found[-1]
        assert measured.saved <= predicted.saved <= measured.saved + 8 * ids.numel() + 32
        assert measured.peak <= predicted.peak <= 1.2 * measured.peak
    (without, _), (with_dropout, _) = found
    assert with_dropout.saved - without.saved == 16 * 2


def test_copies_have_it() -> None:
    model = converted("qwen3-moe", 0.3)
    (loss, gradients), (again, others) = seeded(model), seeded(copy.deepcopy(model))
    assert loss == again and all(torch.equal(g, others[n]) for n, g in gradients.items())
