"""Mixtures whose experts run as one op: gradients, routers that are called once, and what is left alone."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import ckptfused
from ckptfused.models.experts.install import NAME, is_converted
from ckptfused.models.experts.read import is_experts
from tests.models.versions import since

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64, "head_dim": 8,
}  # fmt: skip
LOCAL: dict[str, Any] = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1
}  # fmt: skip
COUNTED: dict[str, Any] = {"num_experts": 4, **{k: v for k, v in LOCAL.items() if k != "num_local_experts"}}
GROUPS: dict[str, Any] = {
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "num_key_value_heads": 4, "head_dim": 4,
}  # fmt: skip
# Soft-max before or after top-k, with and without renormalisation, sigmoid with groups; biases, clamps, shared experts.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", LOCAL),
    "qwen3-moe": ("Qwen3Moe", {"moe_intermediate_size": 12, "norm_topk_prob": True, **COUNTED}),
    "olmoe": ("Olmoe", COUNTED),
    "gpt-oss": ("GptOss", {"swiglu_limit": 0.5, **LOCAL}),
    "deepseek-v3": ("DeepseekV3", {**GROUPS, **LATENT}),
    "glm4-moe": ("Glm4Moe", {**GROUPS, "n_group": 1}),
    "granite-moe": ("GraniteMoe", LOCAL),
}
HAVE_AUX_LOSS = ("mixtral", "qwen3-moe", "olmoe", "gpt-oss", "granite-moe")
runs_experts = since((5, 18), "experts say how they compute")
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


def build(name: str, implementation: str = "eager", **options: Any) -> Any:
    stem, own = MODELS[name]
    config = getattr(transformers, f"{stem}Config")(**{**SIZES, **own, **options})
    torch.manual_seed(0)
    model = getattr(transformers, f"{stem}ForCausalLM")(config)
    model.set_experts_implementation(implementation)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.2)
    return model.train()


def step(model: Any, batch: int = 2, tokens: int = 9) -> tuple[Any, dict[str, Tensor]]:
    ids = torch.randint(0, 50, (batch, tokens), generator=torch.Generator().manual_seed(1))
    output = model(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return output, gradients


def routers(model: nn.Module) -> Iterator[nn.Module]:
    return (m for m in model.modules() if type(m).__name__.lower().endswith("router"))


def assert_alike(found: dict[Any, Tensor], expected: dict[Any, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        # float32 through two layers: the parts of a sum come in another order.
        tolerance = 2e-5 * float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=2e-5, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_model_unconverted(name: str, implementation: str) -> None:
    plain = build(name, implementation)
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    modules = [m for m in converted.modules() if is_experts(m)]
    assert modules and all(map(is_converted, modules))
    calls = _called(converted)
    expected, gradients = step(plain)
    output, found = step(converted)
    assert calls["ours"] == len(modules)
    torch.testing.assert_close(output.loss, expected.loss)
    assert (getattr(expected, "aux_loss", None) is not None) == (name in HAVE_AUX_LOSS)
    if name in HAVE_AUX_LOSS:
        torch.testing.assert_close(output.aux_loss, expected.aux_loss)
        for logits, plainly in zip(output.router_logits, expected.router_logits, strict=True):
            torch.testing.assert_close(logits, plainly, rtol=1e-4, atol=1e-5)
    assert_alike(found, gradients)


@pytest.mark.parametrize("name", HAVE_AUX_LOSS)
def test_gradients_of_the_auxiliary_loss_alone(name: str) -> None:
    plain = build(name)
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    ids, found = torch.arange(18).view(2, 9) % 7, []
    for model in (converted, plain):
        model(input_ids=ids, use_cache=False, output_router_logits=True).aux_loss.backward()
        found.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None and p.grad.any()})
    assert sum("router" in key or "gate." in key for key in found[1]) >= 2
    assert_alike(*found)


def _called(model: nn.Module) -> Counter[str]:
    """How often the op of this model's experts runs, in forward and in any replay."""
    from ckptfused.models.experts import install

    counts: Counter[str] = Counter()
    own: Callable[..., Tensor] = install.experts

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        counts["ours"] += 1
        return own(*args, **kwargs)

    _PATCH.setattr(install, "experts", counted)
    return counts


_PATCH = pytest.MonkeyPatch()


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    yield
    _PATCH.undo()


@runs_experts
@pytest.mark.parametrize("name", MODELS)
def test_a_router_is_called_once_a_step(name: str) -> None:
    model = build(name)
    ckptfused.convert(model)
    calls = _router_calls(model)
    step(model)
    assert list(calls.values()) == [1 for _ in routers(model)] and calls


def _router_calls(model: nn.Module) -> Counter[nn.Module]:
    """How often each router of a model is called from now on."""
    calls: Counter[nn.Module] = Counter()
    for router in routers(model):
        router.register_forward_hook(lambda module, *_: calls.update([module]))
    return calls


@runs_experts
@pytest.mark.filterwarnings("ignore:`(gradient_checkpointing_enable|is_gradient_checkpointing)` is:FutureWarning")
@pytest.mark.parametrize("first", [True, False], ids=["enable-convert", "convert-enable"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("name", MODELS)
def test_a_router_under_hugging_faces_checkpointing(name: str, reentrant: bool, first: bool) -> None:
    """It is called once, be something of its layer fused or not, as in DeepSeek-V3."""
    plain = build(name)
    model = copy.deepcopy(plain)
    changes = [lambda m: m.gradient_checkpointing_enable({"use_reentrant": reentrant}), ckptfused.convert]
    for change in changes if first else reversed(changes):
        change(model)
    calls = _router_calls(model)
    found = step(model)[1]
    assert list(calls.values()) == [1 for _ in routers(model)] and calls
    assert_alike(found, step(plain)[1])


@runs_experts
@pytest.mark.parametrize(("lengths", "again"), [(2, [0, 1]), ([1, 1], []), (None, [])])
def test_a_report_says_whose_replays_ask_routers_again(lengths: int | list[int] | None, again: list[int]) -> None:
    model = build("mixtral")
    make = ckptfused.CheckpointPolicy
    report = ckptfused.convert(model, policy=make.uniform() if lengths is None else make.segments(lengths))
    assert ("ask the routers of experts again" in str(report)) == bool(again)
    calls = _router_calls(model)
    step(model)
    assert list(calls.values()) == [2 if place in again else 1 for place in range(2)]


@runs_experts
def test_bytes_of_a_layer_of_qwen3_30b_a3b() -> None:
    """Its input of 4,096 bytes a token, and beside it at most 64."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=1000, hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=1, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = transformers.Qwen3MoeForCausalLM(config).bfloat16().train()
    model.set_experts_implementation("grouped_mm")
    (layer,) = ckptfused.convert(model).layers
    assert layer.path == "part" and layer.before > 102_000  # type: ignore[operator]
    assert 2 * 2048 < layer.after <= 2 * 2048 + 64  # type: ignore[operator]


@pytest.mark.parametrize("name", MODELS)
def test_noise_that_a_replay_would_draw_anew_changes_no_gradient(name: str) -> None:
    """A hook adds noise from a generator that no checkpoint knows, to a router whose logits are all but tied."""
    noise: list[torch.Generator] = []

    def jitter(module: nn.Module, args: Any) -> Any:
        return (args[0] + 1e-3 * torch.randn(args[0].shape, generator=noise[0]),)

    plain = build(name)
    for router in routers(plain):
        nn.init.normal_(router.weight, std=1e-6)
        router.register_forward_pre_hook(jitter)
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    found = []
    for model in (plain, converted, converted):
        noise[:] = [torch.Generator().manual_seed(7)]
        found.append(step(model)[1])
    assert_alike(found[1], found[0])
    _assert_equal(found[2], found[1])
    ckptfused.convert(converted, keep="all")
    noise[:] = [torch.Generator().manual_seed(7)]
    _assert_equal(step(converted)[1], found[1])


KEEPS = ("inputs", "mid", "attention+mid", "all")
ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "first_k_dense_replace": 0}


@pytest.mark.parametrize("name", MODELS)
def test_all_logits_tied(name: str) -> None:
    """Which experts are chosen is a matter of order alone: in backward as in forward, and in every call."""
    plain = build(name, **ONE_LAYER)
    for router in routers(plain):
        for p in router.parameters():
            nn.init.zeros_(p)
    model = copy.deepcopy(plain)
    ckptfused.convert(model)
    found = step(model)[1]
    assert_alike(found, step(plain)[1])
    _assert_equal(step(model)[1], found)
    ckptfused.convert(model, keep="all")
    _assert_equal(step(model)[1], found)


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, gradient in expected.items() if not torch.equal(found[name], gradient)] == []


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_a_correction_that_a_hook_updates(name: str) -> None:
    """DeepSeek's balance of loads: the bias that a choice was made with is another one when backward runs."""

    def balance(router: Any, args: Any, output: Any) -> None:
        loads = output[2].flatten().bincount(minlength=router.num_experts).float()
        router.e_score_correction_bias += 0.5 * (loads.mean() - loads).sign()

    plain = build(name)
    for router in routers(plain):
        correction: Any = router.e_score_correction_bias
        correction.copy_(torch.linspace(-0.5, 0.5, 8)[torch.randperm(8)])
        router.register_forward_hook(balance)
    unbalanced, model = copy.deepcopy(plain), copy.deepcopy(plain)
    ckptfused.convert(model)
    before, after = (dict(m.named_buffers()) for m in (unbalanced, model))
    found, expected = step(model)[1], step(plain)[1]
    assert_alike(found, expected)
    corrections = [name for name in before if name.endswith("e_score_correction_bias")]
    assert corrections
    for path, updated in plain.named_buffers():
        torch.testing.assert_close(after[path], updated, rtol=0, atol=0)
        assert path not in corrections or not torch.equal(updated, before[path])
    # The updated bias is one that other experts are chosen with: a choice made in backward would be seen.
    output = step(plain)[0]
    assert not torch.equal(output.logits, step(unbalanced)[0].logits)


@pytest.mark.parametrize("name", MODELS)
def test_nan_in_a_row_of_a_routers_input(name: str) -> None:
    """Logits and gradients are NaN where those of Hugging Face's step are, and nowhere else."""

    def spoilt(module: nn.Module, args: Any) -> Any:
        rows = args[0].clone()
        rows.view(-1, rows.size(-1))[3] = torch.nan
        return (rows, *args[1:])

    plain = build(name)
    for router in routers(plain):
        router.register_forward_pre_hook(spoilt)
    model = copy.deepcopy(plain)
    ckptfused.convert(model)
    (expected, gradients), (output, found) = step(plain), step(model)
    assert torch.equal(output.logits.isnan(), expected.logits.isnan())
    assert {True, False} <= {bool(n) for g in gradients.values() for n in g.isnan().flatten()}
    _assert_equal({key: g.isnan() for key, g in found.items()}, {key: g.isnan() for key, g in gradients.items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name",  # GraniteMoe's own forward fails with labels in older versions
    [pytest.param(name, marks=runs_experts) if name == "granite-moe" else name for name in MODELS],
)
def test_bits_are_equal_for_every_keep(name: str, dtype: torch.dtype) -> None:
    model = build(name, **ONE_LAYER).to(dtype)
    found = []
    for keep in KEEPS:
        ckptfused.convert(model, keep=keep)
        found.append(step(model)[1])
    for other in found[1:]:
        _assert_equal(other, found[0])


def test_models_that_were_not_converted_stay_as_they_are_and_revert_puts_back() -> None:
    plain = build("mixtral", "grouped_mm")
    other = build("mixtral", "grouped_mm")
    config = plain.config
    ckptfused.convert(plain)
    assert config._experts_implementation == "grouped_mm"
    assert plain.model.layers[0].mlp.experts.config._experts_implementation == NAME
    assert plain.model.layers[0].mlp.experts.config.hidden_size == 32
    assert not any(map(is_converted, other.modules()))
    ckptfused.revert(plain)
    assert all(m.config is config for m in plain.modules() if is_experts(m))


def test_a_converted_model_is_copied_and_pickled() -> None:
    model = build("mixtral")
    ckptfused.convert(model)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    expected = step(model)[1]
    for other in copies:
        assert sum(map(is_converted, other.modules())) == 2
        found = step(other)[1]
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_layers_that_the_policy_leaves_as_they_were_keep_their_experts() -> None:
    model = build("mixtral")
    ckptfused.convert(model, policy=ckptfused.CheckpointPolicy.every(2))
    kept = [is_converted(layer.mlp.experts) for layer in model.model.layers]
    assert sorted(kept) == [False, True]


def _parallel(experts: Any) -> None:
    experts._is_expert_parallel = True


def _another_activation(experts: Any) -> None:
    experts.act_fn = nn.Mish()


def _in_bytes(experts: Any) -> None:
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)


def _patched(experts: Any) -> None:
    experts.register_forward_hook(lambda *_: None)
    experts.forward = lambda *args: type(experts).forward(experts, *args)


def _elsewhere(implementation: str) -> Callable[[Any], None]:
    def change(experts: Any) -> None:
        experts.config._experts_implementation_internal = implementation

    return change


def _normed(experts: Any) -> None:
    experts.has_post_expert_norm = True


def _parametrized(experts: Any) -> None:
    torch.nn.utils.parametrize.register_parametrization(experts, "down_proj", nn.Identity())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_parametrized, "torch.nn.utils.parametrize makes its down_proj"),
        (_parallel, "it is expert parallel"),
        (_another_activation, "its activation is none of ckptfused's"),
        (_in_bytes, "a weight is stored as Parameter of torch.float8_e4m3fn"),
        (_patched, "it has a hook or a forward of its own"),
        (_elsewhere("sonicmoe"), "its implementation is 'sonicmoe'"),
        (_elsewhere("deepgemm"), "its implementation is 'deepgemm'"),
        (_normed, "a norm follows each expert"),
    ],
)
def test_what_is_left_alone_is_named(change: Callable[[Any], None], why: str) -> None:
    model = build("mixtral", num_hidden_layers=1)
    experts = model.model.layers[0].mlp.experts
    change(experts)
    report = ckptfused.convert(model)
    assert f"model.layers.0.mlp.experts: experts run as they did, their router again in backward: {why}" in str(report)
    assert not is_converted(experts)


def test_experts_that_become_parallel_after_convert_run_as_they_would() -> None:
    model = build("mixtral")
    ckptfused.convert(model)
    calls = _called(model)
    for module in filter(is_experts, model.modules()):
        module._is_expert_parallel = True
    model(torch.ones(1, 3, dtype=torch.long))
    assert not calls


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", MODELS)
def test_a_mixture_is_predicted_as_it_runs(name: str) -> None:
    """At its peak as much as its router can make it take; what it keeps to 8 bytes a token (weights that a router hands
    on as they were), and 32 of a router's bias."""
    model = build(name, "grouped_mm")
    ckptfused.convert(model)
    ids = torch.randint(0, 50, (4, 160), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    predicted, measured = ckptfused.profile(model, batch, device="cpu"), ckptfused.profile(model, batch)
    assert measured.saved <= predicted.saved <= measured.saved + 8 * ids.numel() + 32
    assert measured.peak <= predicted.peak <= 1.2 * measured.peak


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("share", [0.5, 0.7])
@pytest.mark.parametrize(
    ("name", "target", "path"), [("gpt-oss", "q_proj", "part"), ("deepseek-v3", "q_b_proj", "generic")]
)
def test_a_budget_holds_for_layers_that_are_not_fused(name: str, target: str, path: str, share: float) -> None:
    """DeepSeek's keep inputs of attention, norms and experts, and what the router keeps; gpt-oss's x of attention."""
    peft = pytest.importorskip("peft")
    ids = torch.randint(0, 50, (2, 64))
    batch = {"input_ids": ids, "labels": ids}

    def made() -> Any:
        config = peft.LoraConfig(r=4, target_modules=[target])
        model = build(name, "grouped_mm", num_hidden_layers=6, hidden_size=64, intermediate_size=96)
        return peft.get_peft_model(model, config).train()

    plain = made()
    budget = int(share * ckptfused.profile(plain, batch, torch.optim.AdamW, device="cpu").peak)
    model = made()
    report = ckptfused.convert(model, budget=budget, batch=batch, optimizer=torch.optim.AdamW, device="cpu")
    assert {layer.path for layer in report.layers} >= {path}
    assert ckptfused.profile(model, batch, torch.optim.AdamW).peak <= report.peak <= budget


def test_without_gradients_nothing_is_saved() -> None:
    model = build("gpt-oss")
    ckptfused.convert(model)
    with torch.no_grad():
        expected = model(torch.arange(9)[None]).logits
    torch.testing.assert_close(model(torch.arange(9)[None]).logits, expected)
