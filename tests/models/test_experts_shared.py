"""The MLP of all tokens beside a mixture's experts: the FFN op, where its class's forward is one, else a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

import ckptfused  # noqa: E402
from ckptfused.layer.parts import Reason  # noqa: E402
from ckptfused.models.experts import shared  # noqa: E402
from ckptfused.ops.call import Call  # noqa: E402
from tests.accounting import saved_bytes  # noqa: E402
from tests.models.test_experts import COUNTED, GROUPS, LATENT, SIZES, step  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),  # PEFT's own, of experts
]

OWN = {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-moe": ("Qwen2Moe", COUNTED | OWN),
    "qwen3-next": ("Qwen3Next", COUNTED | OWN | {"layer_types": ["full_attention"] * 2}),
    "deepseek-v3": ("DeepseekV3", GROUPS | LATENT),
    "glm4-moe": ("Glm4Moe", GROUPS | {"n_group": 1}),
    "dots1": ("Dots1", GROUPS),
    "hunyuan": ("HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2}),
}


def build(name: str, **options: Any) -> Any:
    stem, own = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{stem}ForCausalLM")(getattr(transformers, f"{stem}Config")(**SIZES | own | options))
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.2)
    return model.train()


def mlps(model: nn.Module) -> list[Any]:
    """The shared experts of a model."""
    return [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2].startswith("shared_") and hasattr(module, "down_proj")
    ]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What became of each call of a module beside experts."""
    seen: list[Any] = []
    own = shared._fused

    def noted(module: Any, x: Tensor) -> Any:
        seen.append(own(module, x))
        return seen[-1]

    monkeypatch.setattr(shared, "_fused", noted)
    return seen


def near(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert got.keys() == want.keys()
    assert all((got[key] - want[key]).norm() <= tolerance * want[key].norm() for key in want)


def ran(seen: list[Any]) -> int:
    return sum(isinstance(result, Tensor) for result in seen)


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str, fused: list[Any]) -> None:
    plain, model = build(name), build(name)
    ckptfused.convert(model)
    near(step(model)[1], step(plain)[1])
    assert ran(fused) == len(fused) == len(mlps(model)) > 0


@pytest.mark.parametrize("name", MODELS)
def test_nothing_more_is_saved_than_by_a_checkpoint(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(0, 50, (2, 9))
    model = build(name)
    ckptfused.convert(model)
    step(model)  # which proves that layers make the same again
    run = lambda: model(input_ids=ids, labels=ids, use_cache=False).loss  # noqa: E731
    found = saved_bytes(run, model, [ids])
    monkeypatch.setattr(shared, "_fused", lambda module, x: Reason("not now"))
    assert found <= saved_bytes(run, model, [ids])


@pytest.mark.parametrize("name", ["qwen2-moe", "glm4-moe"])
def test_bits_do_not_depend_on_what_is_kept(name: str) -> None:
    found = []
    for keep in ("all", "inputs", "attention"):
        model = build(name).bfloat16()
        ckptfused.convert(model, keep=keep)
        found.append(step(model)[1])
    assert all(torch.equal(other[key], found[0][key]) for other in found[1:] for key in found[0])


def test_under_autocast(fused: list[Any]) -> None:
    plain, model = build("qwen2-moe"), build("qwen2-moe")
    ckptfused.convert(model)
    found = []
    for each in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(step(each)[1])
    near(*found, tolerance=5e-2)  # other ids may be chosen, and a product has 8 bits
    assert ran(fused) == 2


@pytest.mark.parametrize("bits", [0, 4])
def test_with_adapters(bits: int, fused: list[Any]) -> None:
    peft = pytest.importorskip("peft")
    models = []
    for _ in range(2):
        model = build("glm4-moe", hidden_size=64, moe_intermediate_size=64)
        if bits:
            pytest.importorskip("bitsandbytes")
            from tests.quantized import Way, quantize_linears

            quantize_linears(model, Way("nf4"), torch.float32)
        config = peft.LoraConfig(r=2, target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False)
        torch.manual_seed(1)
        models.append(peft.get_peft_model(model, config).train())
    plain, model = models
    ckptfused.convert(model)
    near(step(model)[1], step(plain)[1])
    assert ran(fused) == 1


def _hooked(mlp: Any) -> None:
    mlp.up_proj.register_forward_hook(lambda module, args, y: y * 1.5)


def _patched(mlp: Any) -> None:
    mlp.act_fn = nn.Hardswish()


def _clamped(mlp: Any) -> None:
    kind = type(mlp)
    mlp.__class__ = type(kind.__name__, (kind,), {"forward": lambda self, x: kind.forward(self, x).clamp(max=1.0)})


def _dropped(mlp: Any) -> None:
    mlp.extra = nn.Linear(2, 2)


def _counting(mlp: Any) -> None:
    kind = type(mlp)

    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        return kind.forward(self, x)  # type: ignore[no-any-return]

    mlp.__class__, mlp.calls = type(kind.__name__, (kind,), {"forward": forward}), 0


def _noting(mlp: Any) -> None:
    kind = type(mlp)

    def forward(self: Any, x: Tensor) -> Tensor:
        self.seen.append(x.shape)
        return kind.forward(self, x)  # type: ignore[no-any-return]

    mlp.__class__, mlp.seen = type(kind.__name__, (kind,), {"forward": forward}), []


@pytest.mark.parametrize("change", [_hooked, _patched, _clamped, _dropped, _counting, _noting])
@pytest.mark.parametrize("when", ["before", "after a step"])
def test_what_is_no_mlp_runs_as_it_is(change: Callable[[Any], None], when: str, fused: list[Any]) -> None:
    plain, model = build("glm4-moe"), build("glm4-moe")
    ckptfused.convert(model)
    if when == "after a step":
        step(model), step(plain)
        fused.clear()
    for each in (plain, model):
        for mlp in mlps(each):
            change(mlp)
    near(step(model)[1], {k: v for k, v in step(plain)[1].items() if "extra" not in k})
    assert fused and ran(fused) == 0


def test_an_attribute_that_changes_is_tried_anew(fused: list[Any]) -> None:
    model = build("glm4-moe")
    (mlp,) = mlps(model)
    kind = type(mlp)
    forward: Any = lambda self, x: kind.forward(self, x) * self.factor  # noqa: E731
    mlp.__class__, mlp.factor = type(kind.__name__, (kind,), {"forward": forward}), 1.0
    ckptfused.convert(model)
    step(model)
    assert ran(fused) == 1
    mlp.factor = 2.0
    step(model)
    assert ran(fused) == 1 and isinstance(fused[-1], Reason)


def test_its_call_is_one_of_a_half_without_a_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    own = Call.run
    monkeypatch.setattr(Call, "run", lambda self: texts.append(self.text) or own(self))
    model = build("glm4-moe")
    ckptfused.convert(model)
    step(model)
    assert any("ffn.residual=0" in text for text in texts)
