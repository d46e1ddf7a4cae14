"""PEFT's LoRA on converted models: fused, with the gradients of the unconverted model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft

import ckptfused
from ckptfused import rng
from ckptfused.layer.parts import Reason
from tests.accounting import Events
from tests.models import zoo_decoders, zoo_llama  # noqa: F401
from tests.models.compare import close, no_worse, result, run
from tests.models.dropout_oracle import RecordStates
from tests.models.test_families import DRAWS
from tests.models.zoo import ZOO, Batch, randomize

# What PEFT and transformers say to each other.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning"),
    pytest.mark.filterwarnings("ignore:.*(merge|adapter|lora_bias).*:UserWarning"),
]

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SOME = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


def make(targets: list[str] = SOME, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Any:
    """A small Llama with random adapters beside a frozen base."""
    base = randomize(ZOO["llama"].make(0.0, "sdpa"), seed).to(dtype)
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options)
    return peft.get_peft_model(base, config).train()


def layers(model: Any) -> list[Any]:
    return list(model.get_base_model().model.layers)


def batch() -> Batch:
    return ZOO["llama"].batch()


def converted(model: Any, keep: str = "inputs") -> Any:
    model = copy.deepcopy(model)
    ckptfused.convert(model, keep)
    return model


OPTIONS: dict[str, dict[str, Any]] = {
    "some": {},
    "all": {"targets": ALL},
    "alpha": {"targets": ["k_proj", "up_proj"], "lora_alpha": 3},
    "rank-stabilised": {"use_rslora": True},
    "bias": {"lora_bias": True},
    "base-biases": {"bias": "all"},
    "rank-pattern": {"rank_pattern": {"q_proj": 7, "down_proj": 1}, "alpha_pattern": {"q_proj": 5}},
    "norms-saved": {"modules_to_save": ["input_layernorm", "lm_head"]},
    "one-layer": {"layers_to_transform": [1]},
}


@pytest.mark.parametrize("keep", ["inputs", "all"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_gradients(options: dict[str, Any], keep: str, reasons: list[Reason]) -> None:
    model = make(**options)
    close(run(converted(model, keep), batch()), run(model, batch()), 1e-5)
    assert not reasons


@pytest.mark.parametrize(
    ("name", "targets"), [("phi3", ["qkv_proj", "gate_up_proj", "o_proj"]), ("gpt2", ["c_attn", "c_proj", "c_fc"])]
)
def test_joint_and_transposed_projections(name: str, targets: list[str], reasons: list[Reason]) -> None:
    """Phi-3's joint tensors and GPT-2's Conv1D."""
    base = randomize(ZOO[name].make(0.0, "sdpa"))
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, fan_in_fan_out=name == "gpt2")
    model = peft.get_peft_model(base, config).train()
    close(run(converted(model), ZOO[name].batch()), run(model, ZOO[name].batch()), 1e-5)
    assert not reasons


def test_bfloat16_base(reasons: list[Reason]) -> None:
    """Float32 adapters on a bfloat16 base: at most twice PEFT's own error against float32."""
    draws = []
    for seed in range(DRAWS):
        model = make(ALL, torch.bfloat16, seed)
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        truth = run(copy.deepcopy(model).float(), batch())
        draws.append((run(converted(model), batch()), run(model, batch()), truth))
    no_worse(draws, torch.bfloat16)
    assert not reasons


class Masked(nn.Module):
    """Adapter dropout with ckptfused's mask."""

    def __init__(self, p: float, site: int, state: list[Tensor]) -> None:
        super().__init__()
        self.p, self.site, self.state = p, site, state

    def forward(self, x: Tensor) -> Tensor:
        keep = rng.dropout_mask(tuple(x.shape), self.p, self.state[0], self.site)
        return x * keep * (65536 / (65536 - round(self.p * 65536)))


@pytest.mark.parametrize("keep", ["inputs", "all"])
def test_adapter_dropout(keep: str, reasons: list[Reason]) -> None:
    model = make(ALL, lora_dropout=0.25)
    ours = converted(model, keep)
    with RecordStates() as record:
        got = run(ours, batch())
    state: list[Tensor] = []
    for layer, drawn in zip(layers(model), record.states, strict=True):
        modules = (layer.self_attn, layer.mlp)
        projections = [getattr(m, name) for m in modules for name in ALL if hasattr(m, name)]
        for index, projection in enumerate(projections):
            projection.lora_dropout["default"] = Masked(0.25, 4 + index, [drawn])
        state.append(drawn)
    close(got, run(model, batch()), 1e-5)
    assert not reasons


def test_order_of_conversion(reasons: list[Reason]) -> None:
    """Convert before PEFT wraps the projections: they are looked up at each call."""
    base = randomize(ZOO["llama"].make(0.0, "sdpa"))
    ckptfused.convert(base)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=SOME, init_lora_weights=False)
    model = peft.get_peft_model(base, config).train()
    close(run(model, batch()), run(make(), batch()), 1e-5)
    assert not reasons


def with_two(model: Any) -> Any:
    torch.manual_seed(5)
    other = peft.LoraConfig(r=3, lora_alpha=9, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model.add_adapter("other", other)
    return model


def set_both(model: Any) -> None:
    model.base_model.set_adapter(["default", "other"])


CHANGES: dict[str, Callable[[Any], Any]] = {
    "switched": lambda model: model.set_adapter("other"),
    "both": set_both,
    "merged": lambda model: model.merge_adapter(),
    "merged-and-back": lambda model: (model.merge_adapter(), model.unmerge_adapter()),
    "scaled": lambda model: [m.scale_layer(0.5) for m in model.modules() if hasattr(m, "scale_layer")],
    "unloaded": lambda model: model.delete_adapter("default"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changes_after_conversion(change: Callable[[Any], Any], reasons: list[Reason]) -> None:
    model = with_two(make())
    ours = converted(model)
    for m in (model, ours):
        change(m)
        for name, p in m.named_parameters():
            p.requires_grad_("lora" in name or "embed_tokens" in name)
    close(run(ours, batch()), run(model, batch()), 1e-5)
    assert not reasons


def test_disable_adapter(reasons: list[Reason]) -> None:
    model = make()
    ours = converted(model)
    losses = []
    for m in (model, ours):
        with m.disable_adapter():
            losses.append(m(**batch()).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert not reasons
    for m in (model, ours):
        m.merge_adapter()
    with model.disable_adapter(), ours.disable_adapter():
        a, b = run_without_grad(ours), run_without_grad(model)
    assert a == pytest.approx(b, rel=1e-6)


def run_without_grad(model: Any) -> float:
    with torch.no_grad():
        return model(**batch()).loss.item()


def test_frozen_base_costs_no_product(reasons: list[Reason]) -> None:
    """No weight gradient is computed for the base, none at all where a layer trains nothing."""
    model = converted(make(["q_proj"], layers_to_transform=[0]))
    loss = model(**batch()).loss
    events = Events(lambda: loss.backward())
    B, T = batch()["input_ids"].shape
    C, F = 48, 88
    rows = events.products()
    base = {(o, i) for o, i in ((C, C), (C // 2, C), (F, C), (C, F))}
    for n, k, c in rows:
        assert not (c == B * T and (n, k) in base), "a weight gradient of the frozen base"
    assert not reasons


def test_inputs_need_no_gradient(reasons: list[Reason]) -> None:
    """Without `enable_input_require_grads()`: adapters get their gradients although the embeddings are frozen."""
    model = make()
    assert not model.get_input_embeddings().weight.requires_grad
    got = run(converted(model), batch())
    assert all(got[name].any() for name in got if "lora" in name)
    assert not reasons


def test_saved_bytes() -> None:
    """Adapters add nothing to what a layer saves."""
    model = make(ALL, lora_dropout=0.0)
    report = ckptfused.convert(model)
    assert {layer.after for layer in report.layers} == {48 * 4}


@pytest.mark.parametrize("kind", ["dora", "foreign"])
def test_what_is_not_fused(kind: str, reasons: list[Reason]) -> None:
    """DoRA, and adapters of other methods: checkpointed generically, with the reason in the report."""
    if kind == "dora":
        model = make(use_dora=True)
    else:
        base = randomize(ZOO["llama"].make(0.0, "sdpa"))
        config = peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
        model = peft.get_peft_model(base, config).train()
    ours = copy.deepcopy(model)
    report = ckptfused.convert(ours)
    assert {layer.path for layer in report.layers} == {"generic"}
    expected = "DoRA" if kind == "dora" else "unknown projection peft"
    assert all(expected in layer.reason for layer in report.layers)
    close(run(ours, batch()), run(model, batch()), 1e-5)
    assert reasons and expected in reasons[0].text


@pytest.mark.parametrize("how", ["hook", "patch", "disabled"])
def test_a_saved_module_is_looked_into(how: str, reasons: list[Reason]) -> None:
    """`modules_to_save` wraps the whole FFN: what somebody did to the copy that runs counts."""
    model = make(["q_proj"], modules_to_save=["mlp"])
    ours = converted(model)
    for one in (model, ours):
        wrapper = layers(one)[0].mlp
        runs = wrapper.original_module if how == "disabled" else wrapper.modules_to_save["default"]
        if how == "patch":
            forward = runs.forward
            runs.forward = lambda x, forward=forward: forward(x) * 1.25
        else:
            runs.register_forward_hook(lambda _, args, y: y * 1.25)
        if how == "disabled":
            one.base_model.disable_adapter_layers()
            one.requires_grad_(True)
    close(run(ours, batch()), run(model, batch()), 1e-5)
    assert len(reasons) == 1


def test_adapters_that_share_tensors_across_layers() -> None:
    """VeRA's are buffers of one module that every layer holds: the attention half is as it was."""
    specimen = ZOO["llama"]
    model = randomize(specimen.make(0.0, "sdpa"))
    model = peft.get_peft_model(model, peft.VeraConfig(target_modules=["q_proj", "v_proj"])).train()
    plain, batch = copy.deepcopy(model), specimen.batch()
    report = ckptfused.convert(model)
    assert {layer.path for layer in report.layers} == {"part"}
    close(run(model, batch), run(plain, batch), 1e-5)
    ckptfused.revert(model)
    close(run(model, batch), run(plain, batch), 1e-5)


def test_lora_on_torchs_multihead_attention() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True)
    config = peft.LoraConfig(r=4, target_modules=["self_attn", "linear1"], init_lora_weights=False)
    model = peft.get_peft_model(nn.Sequential(nn.TransformerEncoder(layer, 2)), config).train()
    plain, x = copy.deepcopy(model), torch.randn(2, 7, 32)
    names = [name for name, _ in model.named_parameters()]
    ckptfused.convert(model)
    assert [name for name, _ in model.named_parameters()] == names
    close(result(model, x), result(plain, x), 1e-5)


def test_adapters_whose_hooks_are_gone_before_backward() -> None:
    """Activated LoRA's tell each projection where its adapter starts, during forward alone."""
    specimen = ZOO["llama"]
    model, batch = randomize(specimen.make(0.0, "sdpa")), specimen.batch()
    start = batch["input_ids"][0, :2].tolist()
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, alora_invocation_tokens=start,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = peft.get_peft_model(model, config).train()
    plain = copy.deepcopy(model)
    ckptfused.convert(model)
    close(run(model, batch), run(plain, batch), 1e-5)
