"""Weights that torchao and HQQ store in few bits: fused, with the gradients of the model as it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import ckptfused  # noqa: E402
from ckptfused.eager import dequantize  # noqa: E402
from ckptfused.layer.parts import Reason  # noqa: E402
from ckptfused.layer.quantized import stored_weight  # noqa: E402
from ckptfused.spec import Quantized  # noqa: E402
from tests.models.compare import close, equal, no_worse, result, run  # noqa: E402
from tests.models.derive.test_quantised import Block  # noqa: E402
from tests.models.small import llama, unfused  # noqa: E402
from tests.models.zoo import text_batch  # noqa: E402

pytestmark = [
    pytest.mark.each_torch,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without"),
]

Quantize = Callable[[nn.Module, torch.dtype], None]


class Way(NamedTuple):
    """A library's way to store the weights of a model's linear layers, all but the head's."""

    id: str
    of: Quantize


def _replaced(make: Callable[[nn.Linear, torch.dtype], nn.Module]) -> Quantize:
    def quantize(model: nn.Module, dtype: torch.dtype) -> None:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear and name != "lm_head":
                    setattr(module, name, make(child, dtype))

    return quantize


def _hqq(bits: int, axis: int, **options: Any) -> Way:
    def make(layer: nn.Linear, dtype: torch.dtype) -> nn.Module:
        core = pytest.importorskip("hqq.core.quantize")
        config = core.BaseQuantizeConfig(nbits=bits, group_size=options.get("group_size", 16), axis=axis)
        config["weight_quant_params"]["view_as_float"] = options.get("view_as_float", False)
        return core.HQQLinear(layer, config, compute_dtype=dtype, device="cpu")  # type: ignore[no-any-return]

    return Way(f"hqq{bits}-{axis}{''.join(options)}", _replaced(make))


def _torchao(id: str, config: Callable[[Any], Any]) -> Way:
    def make(layer: nn.Linear, dtype: torch.dtype) -> nn.Module:
        api: Any = pytest.importorskip("torchao.quantization")
        held = nn.ModuleList([layer.to(dtype)])
        api.quantize_(held, config(api))
        return held[0]

    return Way(id, _replaced(make))


def _nf4(api: Any) -> Any:
    from torchao.prototype._nf4tensor_api import NF4WeightOnlyConfig

    config: Any = NF4WeightOnlyConfig()
    config.block_size, config.scaler_block_size = 16, 4
    return config


INT8 = _torchao("int8-row", lambda api: api.Int8WeightOnlyConfig())
NF4 = _torchao("nf4", _nf4)
HQQ4 = _hqq(4, 1)
WAYS = (
    *(INT8, NF4, HQQ4, _hqq(4, 0), _hqq(8, 1), _hqq(3, 0), _hqq(3, 1), _hqq(2, 1), _hqq(1, 0)),
    *(_hqq(2, 0, view_as_float=True), _hqq(4, 1, group_size=None)),
    _torchao("int8-tensor", lambda api: api.Int8WeightOnlyConfig(granularity=api.PerTensor())),
    _torchao("int8-group", lambda api: api.Int8WeightOnlyConfig(granularity=api.PerGroup(8))),
)
FEW = (INT8, NF4, HQQ4)


def by_id(ways: tuple[Way, ...]) -> Any:
    return pytest.mark.parametrize("way", ways, ids=[way.id for way in ways])


def stored(way: Way, dtype: torch.dtype = torch.float32, lora: float | None = 0.0) -> Any:
    """A small Llama whose weights are in few bits, with LoRA on all of them, whose numbers are always the same."""
    model = llama().to(dtype)
    way.of(model, dtype)
    if lora is None:
        return model
    torch.manual_seed(0)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False, lora_dropout=lora)
    return peft.get_peft_model(model, config).train()


def converted(model: Any, **options: Any) -> Any:
    report = ckptfused.convert(model, **options)
    assert {layer.path for layer in report.layers} == {"fused"}, str(report)
    return model


def library_weight(module: Any) -> Tensor:
    """What the library itself makes of a weight."""
    if hasattr(module, "W_q"):
        return module.dequantize()  # type: ignore[no-any-return]
    weight = module.weight
    return weight.get_original_weight() if hasattr(weight, "nf4") else weight.dequantize()  # type: ignore[no-any-return]


@by_id(WAYS)
@pytest.mark.parametrize("shape", [(48, 32), (16, 80), (160, 48)], ids=str)
@pytest.mark.parametrize("part", [1 << 20, 100], ids=["at-once", "in-parts"])
def test_numbers(way: Way, shape: tuple[int, int], part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's, and in bfloat16 the nearest to what it computes in float32 from the same scales."""
    monkeypatch.setattr(dequantize, "_PART", part)
    out, into = shape
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(into, out, dtype=dtype))
        way.of(model, dtype)
        found = stored_weight(model[0], dtype, "it")
        assert not isinstance(found, Reason), found
        codes, how = found
        got = torch.ops.ckptfused.dequantize(codes, how.state, Quantized("q", *how.form).form, shape, dtype)
        want = library_weight(model[0])
        assert got.shape == want.shape == shape
        assert got.dtype == want.dtype == dtype
        # Theirs rounds scales, differences or products to the type itself; ours does so once.
        bound = 3 * torch.finfo(dtype).eps * (want.abs().amax() if way.id.startswith("hqq") else want.abs())
        assert ((got.double() - want.double()).abs() <= bound).all()


@by_id(WAYS)
def test_gradients(way: Way) -> None:
    plain, model = stored(way), converted(stored(way))
    with unfused() as reasons:
        got = run(model, text_batch())
    assert not reasons
    close(got, run(plain, text_batch()), 1e-5)
    assert sum("lora" in key for key in got) == 2 * 2 * 7


@by_id(FEW)
def test_adapters_come_later(way: Way) -> None:
    """Convert first, get_peft_model then."""
    model = converted(stored(way, lora=None))
    torch.manual_seed(0)
    names = ["q_proj", "down_proj"]
    config = peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False)
    model = peft.get_peft_model(model, config).train()
    plain = stored(way, lora=None)
    torch.manual_seed(0)
    plain = peft.get_peft_model(plain, config).train()
    with unfused() as reasons:
        got = run(model, text_batch())
    assert not reasons
    close(got, run(plain, text_batch()), 1e-5)


@by_id(FEW)
def test_half_precision(way: Way) -> None:
    plain, model = stored(way, torch.bfloat16), converted(stored(way, torch.bfloat16))
    with unfused() as reasons:
        got = run(model, text_batch())
    assert not reasons
    truth = run(in_numbers(stored(way, torch.bfloat16)), text_batch())
    no_worse([(got, run(plain, text_batch()), truth)], torch.bfloat16)


def in_numbers(model: nn.Module) -> nn.Module:
    """The model in float32, with the numbers of its weights in the place of their codes."""
    for module in model.modules():
        if hasattr(module, "W_q"):
            weight = module.dequantize().float()
            module.forward = lambda x, weight=weight: nn.functional.linear(x, weight)
        elif type(module) is nn.Linear and type(module.weight) is not nn.Parameter:
            module.weight = nn.Parameter(library_weight(module).float(), requires_grad=False)
    return model.float()


@by_id(FEW)
def test_autocast(way: Way) -> None:
    """bf16=True beside a model in float32."""
    plain, model = stored(way), converted(stored(way))
    own = run(stored(way), text_batch())
    with torch.autocast("cpu", torch.bfloat16), unfused() as reasons:
        got = run(model, text_batch())
    if way is HQQ4:
        assert "computes in torch.float32 beside torch.bfloat16" in str(reasons)
        return
    assert not reasons
    with torch.autocast("cpu", torch.bfloat16):
        want = run(plain, text_batch())
    no_worse([(got, want, own)], torch.bfloat16)


@by_id(FEW)
def test_what_is_kept_does_not_change_bits(way: Way) -> None:
    found = []
    for keep in ("all", "inputs", "attention"):
        model = converted(stored(way, torch.bfloat16, lora=0.1), keep=keep)
        torch.manual_seed(5)
        found.append(run(model, text_batch()))
    for other in found[1:]:
        equal(other, found[0])


@by_id(WAYS)
@pytest.mark.parametrize("part", [1 << 20, 1000], ids=["at-once", "in-parts"])
def test_a_plan_counts_codes_and_scratch(way: Way, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantize, "_PART", part)
    model = converted(stored(way))
    predicted, measured = ckptfused.profile(model, text_batch(), device="cpu"), ckptfused.profile(model, text_batch())
    assert predicted.peak == measured.peak
    assert predicted.weights == measured.weights < sum(p.nbytes for p in llama().parameters())
    assert ckptfused.doctor(model, text_batch()).certificate.startswith("Certificate")


@by_id(FEW)
def test_own_block(way: Way) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        made = nn.Sequential(Block(), Block())
        for p in made.parameters():
            p.requires_grad_(p.dim() == 1)
        way.of(made, torch.float32)
        return made

    plain, model = make(), converted(make())
    x = torch.randn(2, 16, 64)
    with unfused() as reasons:
        close(result(model.eval(), x.requires_grad_()), result(plain.eval(), x), 1e-5)
    assert not reasons


@by_id((HQQ4, NF4))
def test_codes_that_are_written_before_backward_raise(way: Way) -> None:
    model = converted(stored(way, lora=0.0))
    out = model(**text_batch())
    layer = model.base_model.model.model.layers[0].mlp.down_proj.base_layer
    codes = layer.W_q if way is HQQ4 else layer.weight.quantized_data
    with torch.no_grad():
        codes.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()


def test_a_scale_that_is_replaced_counts_from_the_next_call() -> None:
    plain, model = stored(HQQ4), converted(stored(HQQ4))
    for each in (plain, model):
        run(each, text_batch())
        each.zero_grad()
        for layer in each.base_model.model.model.layers:
            meta = layer.mlp.up_proj.base_layer.meta
            meta["scale"] = meta["scale"] * 2
    close(run(model, text_batch()), run(plain, text_batch()), 1e-5)


def _bitsandbytes(layer: nn.Linear, dtype: torch.dtype) -> nn.Module:
    nn4 = pytest.importorskip("bitsandbytes").nn
    made = nn4.Linear4bit(layer.in_features, layer.out_features, False, compute_dtype=dtype, quant_type="nf4")
    made.load_state_dict(layer.state_dict())
    return made.to("cpu")  # type: ignore[no-any-return]


def _with_head(way: Way, dtype: torch.dtype, lora: bool) -> Any:
    """A Llama whose head is in few bits, with LoRA on it or not."""
    model = llama(vocab_size=128).to(dtype)
    head: Any = nn.ModuleDict({"only": model.lm_head})
    if way.id == "nf4-bitsandbytes":
        head["only"] = _bitsandbytes(model.lm_head, dtype)
    else:
        way.of(head, dtype)
    model.lm_head = head["only"]
    if not lora:
        model.model.requires_grad_(False).layers[0].requires_grad_()
        return model.train()
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    return peft.get_peft_model(model, config).train()


@by_id((*FEW, Way("nf4-bitsandbytes", lambda model, dtype: None)))
@pytest.mark.parametrize("lora", [False, True], ids=["frozen", "lora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_head_whose_loss_is_chunked(way: Way, lora: bool, dtype: torch.dtype) -> None:
    if way.id not in {known.id for known in FEW} and dtype != torch.float32:
        pytest.skip("the numbers of bitsandbytes' weights are compared in float32")
    batch = text_batch()
    plain, model = _with_head(way, dtype, lora), _with_head(way, dtype, lora)
    ckptfused.convert(model, loss="chunked")
    out = model(**batch)
    assert out.logits is None
    got = run(model, batch)
    if dtype != torch.float32:
        truth = run(in_numbers(_with_head(way, dtype, lora)), batch)
        no_worse([(got, run(plain, batch), truth)], dtype)
        return
    close(got, run(plain, batch), 1e-5)
    predicted, measured = ckptfused.profile(model, batch, device="cpu"), ckptfused.profile(model, batch)
    assert predicted.peak == measured.peak


def test_inputs_that_are_quantized_too_are_left_to_the_library() -> None:
    way = _torchao("dynamic", lambda api: api.Int8DynamicActivationInt8WeightConfig())
    (layer, _) = ckptfused.convert(stored(way, lora=None)).layers
    assert layer.path == "generic"
    assert "quantizes its input" in layer.reason


def test_inputs_that_are_scaled_are_left_to_torchao() -> None:
    """SmoothQuant divides them by a tensor that stands beside the weight."""
    model = stored(INT8, lora=None)
    linear = model.model.layers[0].mlp.up_proj
    linear.weight.act_pre_scale = torch.full((linear.in_features,), 0.5)
    first, second = ckptfused.convert(model).layers
    assert (first.path, second.path) == ("generic", "fused")
    assert "quantizes its input" in first.reason


def _by_inputs(api: Any) -> Any:
    return api.Int8WeightOnlyConfig(granularity=api.PerRow(dim=0))


def twice(layers: list[Any], change: str) -> None:
    """Has layers of one class give twice what a method of theirs does, by "a subclass" or "a module" of its own."""
    cls: Any = type(layers[0])
    name = change.split()[-1]
    doubled = {name: lambda self, *args, **kwargs: 2 * getattr(cls, name)(self, *args, **kwargs)}
    derived = type("Derived", (cls,), doubled)
    for layer in layers:
        if change.startswith("a subclass"):
            layer.__class__ = derived
        else:
            setattr(layer, name, partial(doubled[name], layer))


@pytest.mark.parametrize(
    "change", [f"{who} {what}" for who in ("a subclass", "a module") for what in ("dequantize", "matmul")]
)
def test_layers_of_hqq_that_compute_something_else_are_generic(change: str) -> None:
    plain, model = stored(HQQ4), stored(HQQ4)
    for each in (plain, model):
        twice([m for m in each.modules() if hasattr(m, "W_q")], change)
    ckptfused.convert(model)
    with unfused() as reasons:
        got = run(model, text_batch())
    assert reasons
    close(got, run(plain, text_batch()), 1e-5)


def test_scales_by_inputs_are_left_to_torchao() -> None:
    way = _torchao("inputs", _by_inputs)
    (layer, _) = ckptfused.convert(stored(way, lora=None)).layers
    assert layer.path == "generic"
    assert "expected float32 for rows" in layer.reason


def test_a_subclass_of_torchaos_tensor_is_generic() -> None:
    api: Any = pytest.importorskip("torchao.quantization")

    class Derived(api.Int8Tensor):
        pass

    model = stored(INT8, lora=None)
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            w: Any = module.weight
            module.weight = nn.Parameter(Derived(w.qdata, w.scale, w.block_size, w.dtype), requires_grad=False)
    (layer, _) = ckptfused.convert(model).layers
    assert layer.path == "generic"


def test_another_compute_type_is_left_to_the_layer() -> None:
    model = llama().to(torch.bfloat16)
    HQQ4.of(model, torch.float32)
    (layer, _) = ckptfused.convert(model).layers
    assert layer.path == "generic"
    assert layer.reason.endswith("quantize the model with compute_dtype=torch.bfloat16")
