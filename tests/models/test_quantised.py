"""Quantised projections: layers run as they are, checkpointed; adapters beside them get their gradients."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers

import ckptfused
from ckptfused.layer import quantized
from ckptfused.layer.quantized import is_quantized, stored_weight
from ckptfused.models.describe.example import example
from ckptfused.models.forward import ConvertedForward
from ckptfused.simulate.meta_copy import copy_to_meta
from ckptfused.state.undone import without_trace
from tests.models.compare import close, equal, gradients, run
from tests.models.small import llama, unfused
from tests.models.zoo import text_batch
from tests.quantized import Way, quantize_linears

pytestmark = [
    pytest.mark.each_torch,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning", "ignore:MatMul8bitLt"),
]


def loaded(folder: Path, dtype: torch.dtype = torch.float32, bits: int = 4, **options: Any) -> Any:
    """A small Llama as `from_pretrained` loads it in few bits."""
    if bits == 4:
        options = {"load_in_4bit": True, "bnb_4bit_compute_dtype": dtype, "bnb_4bit_quant_type": "nf4", **options}
    else:
        options = {"load_in_8bit": True}
    config = transformers.BitsAndBytesConfig(**options)
    return transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)


def adapted(model: Any, **options: Any) -> Any:
    """The same with LoRA on two of its projections, whose numbers do not depend on what was drawn before."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    targets = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(r=4, **targets | options)).train()


@pytest.mark.parametrize("first", [True, False], ids=["convert-adapt", "adapt-convert"])
@pytest.mark.parametrize(
    ("bits", "options"),
    [
        (4, {}),
        (4, {"bnb_4bit_use_double_quant": True}),
        (4, {"bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": torch.bfloat16}),
        (8, {}),
    ],
    ids=["nf4", "nested", "fp4", "int8"],
)
def test_bitsandbytes(bits: int, options: dict[str, Any], first: bool, tmp_path: Path) -> None:
    """QLoRA: every layer is one operation, whose gradients are the model's own to rounding."""
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path)

    def make(convert: bool) -> Any:
        model = loaded(tmp_path, bits=bits, **options)
        model = model if first else adapted(model)
        if convert:
            report = ckptfused.convert(model)
            assert bits == 8 or {layer.path for layer in report.layers} == {"fused"}, str(report)
        return adapted(model) if first else model

    plain, model = make(False), make(True)
    with unfused() as reasons:
        got = run(model, text_batch())
    assert not reasons
    close(got, run(plain, text_batch()), 1e-5)
    assert sum("lora" in key for key in got) == 2 * 2 * 2


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
def test_kbit_training_under_autocast(storage: torch.dtype, tmp_path: Path) -> None:
    """Trainer's way with bf16=True: norms and the residual stream in float32, products in bfloat16."""
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    llama().save_pretrained(tmp_path)

    def make() -> Any:
        model = loaded(tmp_path, torch.bfloat16, bnb_4bit_quant_storage=storage)
        return adapted(peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False), lora_dropout=0.0)

    plain, model = make(), make()
    ckptfused.convert(model)
    with torch.autocast("cpu", torch.bfloat16), unfused() as reasons:
        got = run(model, text_batch())
    assert not reasons
    with torch.autocast("cpu", torch.bfloat16):
        want = run(plain, text_batch())
    truth = run(plain.float(), text_batch()) if storage is torch.uint8 else want
    for name, t in got.items():
        # Each is bfloat16's rounding away from the truth.
        scale = truth[name].float().norm()
        assert (t.float() - truth[name].float()).norm() <= 0.03 * scale, name


@pytest.mark.parametrize("nested", [False, True])
def test_kbit_training_is_predicted_and_planned(nested: bool, tmp_path: Path) -> None:
    """A number beside nested scales stays one in a model without data."""
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    llama().save_pretrained(tmp_path)
    model = loaded(tmp_path, torch.bfloat16, bnb_4bit_use_double_quant=nested)
    model = adapted(peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False))
    batch, autocast = text_batch(), torch.bfloat16
    budget = 2**21  # with what oneDNN may allocate within products
    report = ckptfused.convert(model, budget=budget, batch=batch, device="cpu", autocast=autocast)
    predicted, measured = (ckptfused.profile(model, batch, device=d, autocast=autocast) for d in ("cpu", None))
    assert measured.peak <= predicted.peak + predicted.workspace
    assert predicted.peak <= report.peak <= budget


def test_what_is_beside_codes_is_where_they_are() -> None:
    """In a model without data, too, where a number stays one for code that looks at it."""
    pytest.importorskip("bitsandbytes")
    model = llama()
    quantize_linears(model, Way("nf4", nested=True))
    meta, _ = copy_to_meta(model, None)
    found = [stored_weight(m, torch.float32, "") for m in meta.modules() if is_quantized(m)]
    assert found
    for codes, stored in found:  # type: ignore[misc]
        assert {t.device for t in stored.state} == {codes.device} == {torch.device("meta")}


def test_8_bits_are_predicted_as_they_run(tmp_path: Path) -> None:
    """On the CPU they are fused, without data, too."""
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path)
    model = adapted(loaded(tmp_path, bits=8))
    ckptfused.convert(model)
    predicted, measured = ckptfused.profile(model, text_batch(), device="cpu"), ckptfused.profile(model, text_batch())
    assert (predicted.peak, predicted.saved) == (measured.peak, measured.saved)


def test_8_bits_on_a_gpu_are_checkpointed_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes computes in int8 there, and on the CPU in numbers: what differs is the device that is told."""
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path)
    plain = adapted(loaded(tmp_path, bits=8))
    model = copy.deepcopy(plain)
    monkeypatch.setattr(quantized, "device_counted", lambda codes: "cuda")
    report = ckptfused.convert(model)
    why = "q: Linear8bitLt computes in int8 there, outliers apart: the layer is checkpointed as it is"
    assert [(layer.path, layer.reason) for layer in report.layers] == [("generic", why)] * 2
    assert why in str(report)
    with unfused() as reasons:
        found = run(model, text_batch())
    assert [reason.text for reason in reasons] == [why] * 2
    expected = run(plain, text_batch())
    assert found.keys() == expected.keys() and all(torch.equal(found[name], t) for name, t in expected.items())


def test_a_run_without_trace_leaves_codes_where_they_were() -> None:
    """The first call of an 8-bit layer moves them from the weight's attributes to its state."""
    nn8 = pytest.importorskip("bitsandbytes").nn
    layer = nn8.Linear8bitLt(32, 32, has_fp16_weights=False).to("cpu").train()
    codes = layer.weight.CB
    assert codes is not None
    with without_trace(layer):
        layer(torch.randn(4, 32))
        assert layer.state.CB is not None
    assert layer.weight.CB is codes
    assert layer.state.CB is None


@pytest.mark.parametrize("copied", [False, True], ids=["loaded", "copied"])
def test_a_step_is_predicted_and_planned(copied: bool, tmp_path: Path) -> None:
    """A copy's weights hold the modules of the model that it was made of."""
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path)
    model = adapted(loaded(tmp_path, bnb_4bit_use_double_quant=True))
    model = copy.deepcopy(model) if copied else model
    batch = text_batch()
    plain = ckptfused.profile(model, batch, device="cpu").peak
    report = ckptfused.convert(model, budget=plain - 1, batch=batch, device="cpu")
    found = [ckptfused.profile(model, batch, device=device).peak for device in ("cpu", None)]
    assert found[1] <= found[0] <= report.peak < plain


def test_what_is_kept_does_not_change_bits(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path)
    found = []
    for keep in ("all", "inputs", "attention"):
        model = adapted(loaded(tmp_path, torch.bfloat16, bnb_4bit_use_double_quant=True), lora_dropout=0.1)
        ckptfused.convert(model, keep=keep)
        torch.manual_seed(5)
        found.append(run(model, text_batch()))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.equal(t, found[0][name]) for name, t in other.items())


@pytest.mark.filterwarnings("ignore:Merge lora module to 4-bit", "ignore:Unmerge lora", "ignore:Already unmerged")
def test_adapters_come_and_go(tmp_path: Path) -> None:
    """A second adapter, both at once, none, merged and unmerged: as the model that is not converted."""
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    llama().save_pretrained(tmp_path)
    plain, model = (adapted(loaded(tmp_path)) for _ in range(2))
    ckptfused.convert(model)
    for each in (plain, model):
        torch.manual_seed(1)
        each.add_adapter("other", peft.LoraConfig(r=2, target_modules=["v_proj", "q_proj"], init_lora_weights=False))

    def same() -> None:
        with unfused() as reasons:
            found = run(model, text_batch())
        close(found, run(plain, text_batch()), 1e-5)
        assert not reasons

    same()
    for each in (plain, model):
        each.base_model.set_adapter(["default", "other"])
    same()
    for each in (plain, model):
        each.base_model.set_adapter("other")
        each.merge_adapter()
    with torch.no_grad():  # merged, nothing is trained
        torch.testing.assert_close(model(**text_batch()).loss, plain(**text_batch()).loss, rtol=1e-5, atol=1e-5)
    for each in (plain, model):
        each.unmerge_adapter()
    same()


def test_adapters_of_each_row_of_a_batch(tmp_path: Path) -> None:
    """PEFT takes `adapter_names` in evaluation alone: the layers run as they are."""
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path)
    plain = adapted(loaded(tmp_path, torch.float32))
    plain.add_adapter("other", plain.peft_config["default"])
    model = copy.deepcopy(plain)
    assert ckptfused.convert(model).fused == 2
    batch = text_batch()
    names = ["default", "other", "__base__"] * batch["input_ids"].size(0)
    batch["adapter_names"] = names[: batch["input_ids"].size(0)]
    with torch.no_grad():
        assert torch.equal(model.eval()(**batch).logits, plain.eval()(**batch).logits)
    with pytest.raises(ValueError, match="Cannot pass `adapter_names` when the model is in training mode"):
        model.train()(**batch)


def test_another_compute_type_is_left_to_the_layer(tmp_path: Path) -> None:
    """What transformers chooses where nothing is said: products in float32 beside a bfloat16 stream."""
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path)
    model = loaded(tmp_path, torch.bfloat16, bnb_4bit_compute_dtype=torch.float32)
    (layer, _) = ckptfused.convert(model).layers
    assert layer.path == "generic"
    assert layer.reason.endswith("load the model with bnb_4bit_compute_dtype=torch.bfloat16")


def test_a_weight_that_was_packed_for_inference_raises(tmp_path: Path) -> None:
    """bitsandbytes does so in an evaluation on a processor with AVX512-BF16; its layers then give no gradients."""
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.functional import _convert_weight_packed_for_cpu

    llama(intermediate_size=64, hidden_size=64).save_pretrained(tmp_path)
    model = adapted(loaded(tmp_path, torch.bfloat16))
    ckptfused.convert(model)
    weight = model.base_model.model.model.layers[1].mlp.up_proj.weight
    weight.data, weight.quant_state = _convert_weight_packed_for_cpu(weight.data, weight.quant_state)
    with pytest.raises(RuntimeError, match="packed its 4-bit weight anew.*trains without gradients"):
        model(**text_batch())
    with torch.no_grad():
        model.eval()(**text_batch())


@pytest.mark.parametrize("first", [True, False], ids=["convert-adapt", "adapt-convert"])
def test_the_report_of_another_compute_type_is_what_comes(tmp_path: Path, first: bool) -> None:
    """Adapters are float32 beside weights and norms of bfloat16: they tell nothing of x."""
    llama().to(torch.bfloat16).save_pretrained(tmp_path)
    model = loaded(tmp_path, torch.bfloat16, bnb_4bit_compute_dtype=torch.float32)
    report = ckptfused.convert(model) if first else None
    model = adapted(model, target_modules="all-linear")
    report = report or ckptfused.convert(model)
    with unfused() as reasons:
        run(model, text_batch())
    assert len(reasons) == len(report.layers)
    assert all("computes in torch.float32 beside torch.bfloat16" in layer.reason for layer in report.layers)


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
def test_biases_of_adapters_tell_nothing_of_x() -> None:
    """PEFT has them in float32, and they have one dimension as a norm's weight has."""
    peft = pytest.importorskip("peft")
    model = llama().to(torch.bfloat16)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], lora_bias=True)
    x, _ = example(model, "model.layers.0", peft.get_peft_model(model, config).base_model.model.model.layers[0])
    assert x[0].dtype == torch.bfloat16


def owner_in_state(layer: Any, path: str) -> tuple[Any, str]:
    """What holds a tensor of a layer's state, and its name there."""
    *owners, name = path.split(".")
    return functools.reduce(getattr, owners, layer.weight.quant_state), name


def doubled(path: str) -> Callable[[Any], None]:
    """Puts twice a tensor of a layer's state in its place."""

    def change(layer: Any) -> None:
        owner, name = owner_in_state(layer, path)
        setattr(owner, name, getattr(owner, name) * 2)

    return change


PLAIN, NESTED = ("absmax",), ("absmax", "offset", "state2.absmax", "state2.code")
OBJECTS: dict[str, Callable[[Any], None]] = {
    "state": lambda layer: setattr(layer.weight, "quant_state", copy.deepcopy(layer.weight.quant_state)),
    "weight": lambda layer: setattr(layer, "weight", copy.deepcopy(layer.weight)),
    "kind": lambda layer: setattr(layer, "__class__", nn.Linear),
}
REPLACED = {path: doubled(path) for path in NESTED} | OBJECTS


def by_state(plain: Iterable[str], nested: Iterable[str]) -> Any:
    """Each of these in a model whose scales are numbers, and in one whose scales are nested."""
    cases = [pytest.param(False, what, id=what) for what in plain]
    cases += [pytest.param(True, what, id=f"nested-{what}") for what in nested]
    return pytest.mark.parametrize(("nested", "what"), cases)


@by_state((*PLAIN, *OBJECTS), REPLACED)
def test_a_state_that_is_replaced_before_backward_raises(tmp_path: Path, nested: bool, what: str) -> None:
    """From the next call on it counts."""
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path)
    plain, model = (adapted(loaded(tmp_path, bnb_4bit_use_double_quant=nested)) for _ in range(2))
    ckptfused.convert(model)
    run(model, text_batch())
    out = model(**text_batch())
    for each in (plain, model):
        for layer in each.base_model.model.model.layers:
            REPLACED[what](layer.mlp.up_proj)
    with pytest.raises(RuntimeError, match="its quantized weight, or the state of it, was replaced between"):
        out.loss.backward()
    if what == "kind":
        return
    model.zero_grad()
    close(run(model, text_batch()), run(plain, text_batch()), 1e-5)


@by_state(PLAIN, NESTED)
def test_a_state_that_is_written_before_backward_raises(tmp_path: Path, nested: bool, what: str) -> None:
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path)
    model = adapted(loaded(tmp_path, bnb_4bit_use_double_quant=nested))
    ckptfused.convert(model)
    out = model(**text_batch())
    owner, name = owner_in_state(model.base_model.model.model.layers[0].mlp.up_proj, what)
    getattr(owner, name).add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()


@pytest.mark.parametrize("autocast", [False, True])
def test_a_backward_elsewhere_is_no_replacement(tmp_path: Path, autocast: bool) -> None:
    """In evaluation, under autocast or without, and once more: the weight is the same, and nothing raises."""
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path)
    model = adapted(loaded(tmp_path, bnb_4bit_compute_dtype=torch.bfloat16 if autocast else torch.float32))
    ckptfused.convert(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), unfused() as reasons:
        loss = model(**text_batch()).loss
    assert not reasons
    model.eval()
    up = model.base_model.model.model.layers[0].mlp.up_proj
    up.forward = functools.partial(type(up).forward, up)  # somebody's hook on the next calls
    loss.backward(retain_graph=True)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=not autocast):
        loss.backward()
    assert gradients(model)


def test_a_loss_keeps_no_weight_alive(tmp_path: Path) -> None:
    """Once its backward has run: what looks for replaced weights holds none."""
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path)
    model = adapted(loaded(tmp_path))
    ckptfused.convert(model)
    loss = model(**text_batch()).loss
    loss.backward()
    up = weakref.ref(model.base_model.model.model.layers[0].mlp.up_proj)
    del model
    gc.collect()
    assert up() is None
    assert loss.isfinite()


def test_a_certificate(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path)
    model = adapted(loaded(tmp_path), lora_dropout=0.1)
    ckptfused.convert(model)
    assert ckptfused.doctor(model, text_batch()).certificate.startswith("Certificate")


@pytest.mark.parametrize(("dtype", "nested"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
def test_a_plan_counts_codes_and_scratch(tmp_path: Path, dtype: torch.dtype, nested: bool) -> None:
    """What a plan predicts is what is measured, a weight at a time in its scratch; a layer holds its input alone."""
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path)
    model = adapted(loaded(tmp_path, dtype, bnb_4bit_use_double_quant=nested))
    report = ckptfused.convert(model)
    batch, token = text_batch(), 48 * dtype.itemsize
    predicted, measured = ckptfused.profile(model, batch, device="cpu"), ckptfused.profile(model, batch)
    assert predicted.peak == measured.peak
    assert [layer.after for layer in report.layers] == [token, token]
    for found in (predicted, measured):
        assert [layer.saved for layer in found.layers] == [batch["input_ids"].numel() * token] * 2


@pytest.mark.parametrize("nested", [False, True])
def test_saving(nested: bool, tmp_path: Path) -> None:
    """A state dict is the unconverted model's, and a saved adapter gives a fresh model the same step."""
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    llama().save_pretrained(tmp_path)
    options: dict[str, Any] = {"bnb_4bit_use_double_quant": nested}
    model = adapted(loaded(tmp_path, **options))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    ckptfused.convert(model)
    after = model.state_dict()
    assert list(after) == list(before)
    equal(after, before)
    want = run(model, text_batch())
    model.save_pretrained(tmp_path / "adapter")
    fresh = peft.PeftModel.from_pretrained(loaded(tmp_path, **options), tmp_path / "adapter", is_trainable=True)
    ckptfused.convert(fresh.train())
    equal(fresh.state_dict(), before)
    equal(run(fresh, text_batch()), want)


def test_dora_is_left_to_the_layer(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path)
    plain, model = (adapted(loaded(tmp_path), use_dora=True) for _ in range(2))
    for layer in ckptfused.convert(model).layers:
        assert layer.path == "generic" and "DoRA" in layer.reason
    got = run(model, text_batch())
    assert sum("magnitude" in key for key in got) == 2 * 2
    close(got, run(plain, text_batch()), 1e-5)


@pytest.mark.filterwarnings("ignore:Merge lora module to 4-bit")
def test_a_merged_model_trains(tmp_path: Path) -> None:
    """Its norms do, beside 4-bit weights that `merge_and_unload` has made anew."""
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path)
    plain, model = (adapted(loaded(tmp_path)) for _ in range(2))
    ckptfused.convert(model)
    run(model, text_batch())
    plain, model = (each.merge_and_unload() for each in (plain, model))
    for each in (plain, model):
        for name, p in each.named_parameters():
            p.requires_grad_("norm" in name)
    assert all(isinstance(layer.forward, ConvertedForward) for layer in model.model.layers)
    with unfused() as reasons:
        got = run(model, text_batch())
    assert not reasons
    close(got, run(plain, text_batch()), 1e-5)
    assert sum("norm" in key for key in got) == 5


def test_scales_in_half_precision_are_left_to_the_layer(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path)
    model = loaded(tmp_path)
    state = model.model.layers[0].mlp.up_proj.weight.quant_state
    state.absmax = state.absmax.half()
    first, second = ckptfused.convert(model).layers
    assert (first.path, second.path) == ("generic", "fused")
    assert first.reason.endswith("its scales are torch.float16, expected float32")


def test_codes_that_ask_for_a_gradient_are_left_to_the_layer(tmp_path: Path) -> None:
    """Codes that are stored in a floating type may do so."""
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path)
    model = loaded(tmp_path, bnb_4bit_quant_storage=torch.float32)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_()
    first, second = ckptfused.convert(model).layers
    assert (first.path, second.path) == ("generic", "fused")
    assert first.reason.endswith("its quantized weight asks for a gradient")


class Stored(nn.Module):
    """A projection of an unknown kind, kept in bytes, which takes what it finds in `weight` for its own."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features = linear.out_features
        self.scale = float(linear.weight.detach().abs().max()) / 127
        self.shape = linear.weight.shape
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8).view(-1, 1), False)
        self.taken: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.taken is None:
            self.taken = self.weight.detach()
        return nn.functional.linear(x, self.taken.view(self.shape) * self.scale)


def test_weights_in_bytes() -> None:
    """Neither their type nor their shape says how wide the layer is, and to count bytes their forward is not called."""
    plain: Any = llama()
    for name in ("q_proj", "o_proj"):
        setattr(plain.model.layers[0].self_attn, name, Stored(getattr(plain.model.layers[0].self_attn, name)))
    for name in ("gate_proj", "down_proj"):
        setattr(plain.model.layers[0].mlp, name, Stored(getattr(plain.model.layers[0].mlp, name)))
    model = copy.deepcopy(plain)
    report = ckptfused.convert(model)
    assert [layer.path for layer in report.layers] == ["generic", "fused"]
    assert report.layers[0].reason == (
        f"q: {Stored.__module__}.Stored is quantised and runs a kernel of its own: the layer is checkpointed as it is"
    )
    assert report.layers[0].after == 48 * 4
    assert model.model.layers[0].mlp.down_proj.taken is None
    close(run(model, text_batch()), run(plain, text_batch()), 1e-5)
