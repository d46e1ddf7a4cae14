"""Bases that GPTQModel stores in few bits, GPTQ's and AWQ's: fused, with the gradients of the model as it is."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import ckptfused  # noqa: E402
from ckptfused.compat.quantizers import AWQ_LINEAR, GPTQ_LINEARS  # noqa: E402
from ckptfused.eager import dequantize  # noqa: E402
from ckptfused.layer.parts import Reason  # noqa: E402
from ckptfused.layer.quantized import stored_weight  # noqa: E402
from ckptfused.spec import Quantized  # noqa: E402
from tests.gptqmodel_layers import (  # noqa: E402
    AWQ_STAND_IN,
    GPTQ_STAND_IN,
    Way,
    integers,
    own_layer,
    stand_in,
)
from tests.models.compare import close, equal, no_worse, result, run  # noqa: E402
from tests.models.derive.test_quantised import Block  # noqa: E402
from tests.models.small import llama, unfused  # noqa: E402
from tests.models.test_other_quantised import twice  # noqa: E402
from tests.models.zoo import text_batch  # noqa: E402

pytestmark = [
    pytest.mark.each_torch,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type .*Linear:UserWarning"),
]

Make = Callable[[nn.Linear, Way], nn.Module]
GPTQ = Way("gptq4")
AWQ = Way("awq4", block=8, awq=True)
ACT_ORDER = Way("act-order", act_order=True, scales=torch.bfloat16)
WAYS = (GPTQ, ACT_ORDER, Way("gptq8", 8), Way("gptq2", 2, 8))
INSTALLED = importlib.util.find_spec("gptqmodel") is not None


def by_id(ways: tuple[Way, ...]) -> Any:
    return pytest.mark.parametrize("way", ways, ids=[way.id for way in ways])


def by_source(way: Way) -> list[Any]:
    """The stand-in, and the layers of the library."""
    own = [AWQ_LINEAR] if way.awq else [name for name in GPTQ_LINEARS if "triton" not in name]
    mark = pytest.mark.skipif(not INSTALLED, reason="GPTQModel asks for a newer torch than is tested here")
    made = [pytest.param(partial(own_layer, name=name), id=name.rpartition(".")[2], marks=mark) for name in own]
    return [pytest.param(stand_in, id="stand-in"), *made]


def stored(
    way: Way, dtype: torch.dtype = torch.float32, lora: float = 0.0, make: Make = stand_in, biased: bool = False
) -> Any:
    """A small Llama whose weights are in few bits, with LoRA on all of them, whose numbers are always the same."""
    torch.manual_seed(0)
    model = llama(attention_bias=biased, mlp_bias=biased).to(dtype)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name != "lm_head":
                setattr(module, name, make(child, way))
    torch.manual_seed(0)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False, lora_dropout=lora)
    from peft.tuners.lora.awq import AwqLoraLinear
    from peft.tuners.lora.gptq import GPTQLoraLinear

    config._register_custom_module({GPTQ_STAND_IN: GPTQLoraLinear, AWQ_STAND_IN: AwqLoraLinear})
    return peft.get_peft_model(model, config).train()


def converted(model: Any, **options: Any) -> Any:
    report = ckptfused.convert(model, **options)
    assert {layer.path for layer in report.layers} == {"fused"}, str(report)
    return model


@by_id((*WAYS, AWQ))
@pytest.mark.parametrize("shape", [(48, 32), (16, 80), (160, 48)], ids=str)
@pytest.mark.parametrize("part", [1 << 20, 100], ids=["at-once", "in-parts"])
def test_numbers(way: Way, shape: tuple[int, int], part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The integers' own, rounded as the library's are: to the type of the scales, and then to that of the products."""
    monkeypatch.setattr(dequantize, "_PART", part)
    torch.manual_seed(1)
    out, into = shape
    layer = nn.Linear(into, out)
    found = stored_weight(stand_in(layer, way), way.scales, "it")
    assert not isinstance(found, Reason), found
    codes, how = found
    spec, want = Quantized("q", *how.form), integers(layer.weight, way).weight().t()
    assert (want.double() - layer.weight).abs().max() < 2 * layer.weight.abs().max() / (2**way.bits - 1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        got = torch.ops.ckptfused.dequantize(codes, how.state, spec.form, shape, dtype)
        assert torch.equal(got, want.to(dtype))
    tensors = {"w": codes, "scale": how.state[0], "offset": how.state[1], "table": how.state[3]}
    assert spec.sizes(*shape) == {slot: t.nbytes for slot, t in tensors.items() if t is not None}


def in_numbers(model: Any) -> nn.Module:
    """The model in float64, with the numbers of its weights in the place of their words, and a loss of that type."""
    for module in model.modules():
        if isinstance(module, (GPTQ_STAND_IN, AWQ_STAND_IN)):
            weight, bias = module.numbers().t().double(), module.bias
            bias = None if bias is None else bias.double()
            module.forward = lambda x, w=weight, b=bias: nn.functional.linear(x, w, b)
    model.get_base_model().loss_function = loss_in_its_type
    return model.double()  # type: ignore[no-any-return]


def loss_in_its_type(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **options: Any) -> torch.Tensor:
    """transformers' own casts logits to float32: its loss of a model in float64 is the truth to half an ulp of that."""
    assert logits.dtype == torch.float64
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def alike(way: Way, dtype: torch.dtype, make: Make, biased: bool) -> None:
    """Checks gradients of four batches against float64: as near to them as the library's."""
    plain, model = stored(way, dtype, make=make, biased=biased), converted(stored(way, dtype, make=make, biased=biased))
    truth, draws = in_numbers(stored(way, dtype, biased=biased)), []
    for shift in range(4):
        batch = {key: t.roll(shift, -1) for key, t in text_batch().items()}
        with unfused() as reasons:
            got = run(model, batch)
        assert not reasons
        assert sum("lora" in key for key in got) == 2 * 2 * 7
        draws.append((got, run(plain, batch), run(truth, batch)))
        for each in (plain, model, truth):
            each.zero_grad()
    no_worse(draws, dtype)


def linear(layer: nn.Linear, way: Way) -> nn.Module:
    """The same numbers as PyTorch's layer has them."""
    held: Any = stand_in(layer, way)
    weight, bias = held.numbers().t().to(layer.weight.dtype).contiguous(), held.bias
    state = {"weight": weight} | ({} if bias is None else {"bias": bias.to(weight.dtype)})
    layer.load_state_dict(state)
    return layer


@by_id(WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_are_those_of_plain_weights(way: Way, dtype: torch.dtype) -> None:
    model, plain = stored(way, dtype, biased=True), stored(way, dtype, make=linear, biased=True)
    adapters = {name: t for name, t in model.state_dict().items() if "lora" in name}
    plain.load_state_dict(adapters, strict=False)  # PEFT rounds them to the type of the weights beside them
    equal(run(converted(model), text_batch()), run(converted(plain), text_batch()))


@pytest.mark.parametrize(
    ("way", "make"),
    [pytest.param(way, *p.values, id=f"{way.id}-{p.id}", marks=p.marks) for way in WAYS[:3] for p in by_source(way)
     if way.bits == 4 or "Aten" not in str(p.id)],
)  # fmt: skip
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
def test_gradients(way: Way, make: Make, biased: bool) -> None:
    """Two bits' errors vary too much from batch to batch to be compared."""
    alike(way._replace(block=32) if "Aten" in str(make) else way, torch.float32, make, biased)


@pytest.mark.parametrize(
    ("way", "make"),
    [pytest.param(way, *p.values, id=f"{way.id}-{p.id}", marks=p.marks) for way in (GPTQ, AWQ) for p in by_source(way)
     if "Aten" not in str(p.id)],
)  # fmt: skip
def test_half_precision(way: Way, make: Make) -> None:
    alike(way._replace(scales=torch.bfloat16), torch.bfloat16, make, biased=True)


def test_autocast() -> None:
    """bf16=True beside a model in float32, whose scales are float16."""
    plain, model, own = stored(GPTQ), converted(stored(GPTQ)), run(stored(GPTQ), text_batch())
    with torch.autocast("cpu", torch.bfloat16):
        with unfused() as reasons:
            got = run(model, text_batch())
        want = run(plain, text_batch())
    assert not reasons
    no_worse([(got, want, own)], torch.bfloat16)


@by_id((GPTQ, AWQ))
def test_what_is_kept_does_not_change_bits(way: Way) -> None:
    found = []
    for keep in ("all", "inputs", "attention"):
        model = converted(stored(way._replace(scales=torch.bfloat16), torch.bfloat16, lora=0.1), keep=keep)
        torch.manual_seed(5)
        found.append(run(model, text_batch()))
    for other in found[1:]:
        equal(other, found[0])


@by_id((*WAYS, AWQ))
@pytest.mark.parametrize("part", [1 << 20, 1000], ids=["at-once", "in-parts"])
def test_a_plan_counts_words_and_scratch(way: Way, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantize, "_PART", part)
    dtype = torch.float16 if way.awq else torch.float32
    model = converted(stored(way, dtype))
    predicted, measured = ckptfused.profile(model, text_batch(), device="cpu"), ckptfused.profile(model, text_batch())
    assert predicted.peak == measured.peak
    assert predicted.weights == measured.weights < sum(p.nbytes for p in llama().to(dtype).parameters())
    assert ckptfused.doctor(model, text_batch()).certificate.startswith("Certificate")


def test_own_block() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        made = nn.Sequential(Block(), Block())
        for block in made:
            for p in block.parameters():
                p.requires_grad_(p.dim() == 1)
            for name, child in list(block.named_children()):
                if type(child) is nn.Linear:
                    setattr(block, name, stand_in(child, GPTQ))
        return made

    plain, model = make(), converted(make())
    x = torch.randn(2, 16, 64)
    with unfused() as reasons:
        close(result(model.eval(), x.requires_grad_()), result(plain.eval(), x), 1e-5)
    assert not reasons


@pytest.mark.parametrize("buffer", ["qweight", "qzeros", "scales", "g_idx"])
def test_what_is_written_before_backward_raises(buffer: str) -> None:
    model = converted(stored(GPTQ))
    out = model(**text_batch())
    layer = model.base_model.model.model.layers[0].mlp.down_proj.base_layer
    getattr(layer, buffer).add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()


def test_blocks_that_are_counted_from_the_last() -> None:
    """Indices below 0, as the library takes them."""
    plain, model = stored(ACT_ORDER), stored(ACT_ORDER)
    for module in model.modules():
        if isinstance(module, GPTQ_STAND_IN):
            module.g_idx = module.g_idx - module.scales.size(0)
    equal(run(converted(model), text_batch()), run(converted(plain), text_batch()))


def test_a_head_whose_loss_is_chunked() -> None:
    def make() -> Any:
        model = llama(vocab_size=128)
        model.lm_head = stand_in(model.lm_head, GPTQ)
        model.model.requires_grad_(False).layers[0].requires_grad_()
        return model.train()

    plain, model = make(), make()
    ckptfused.convert(model, loss="chunked")
    assert model(**text_batch()).logits is None
    close(run(model, text_batch()), run(plain, text_batch()), 1e-5)


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("adapter", object(), "has an adapter of GPTQModel's"),
        ("online_full_had", True, "rotates its input"),
        ("planar", True, "of another layout"),
        ("bits", 3, "3 bits"),
        ("group_size", 32, "are not one for each 32 inputs"),
    ],
)
def test_others_are_left_to_the_library(attribute: str, value: object, reason: str) -> None:
    model = stored(GPTQ)
    for module in model.modules():
        if isinstance(module, GPTQ_STAND_IN):
            setattr(module, attribute, value)
    (layer, _) = ckptfused.convert(model).layers
    assert layer.path == "generic"
    assert reason in layer.reason


def test_awq_beside_another_type_is_left_to_the_library() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        (layer, _) = ckptfused.convert(stored(AWQ, dtype)).layers
        assert layer.path == "generic"
        assert layer.reason.endswith(f"has scales of float16 beside {dtype}: move the model to one")


@pytest.mark.parametrize("how", ["a subclass", "a module"])
def test_a_method_that_is_another_is_left_to_the_library(how: str) -> None:
    plain, model = stored(GPTQ), stored(GPTQ)
    for each in (plain, model):
        twice([m for m in each.modules() if isinstance(m, GPTQ_STAND_IN)], f"{how} forward")
    ckptfused.convert(model)
    with unfused() as reasons:
        got = run(model, text_batch())
    assert reasons
    close(got, run(plain, text_batch()), 1e-5)


def test_words_that_an_evaluation_has_packed_anew() -> None:
    """`TorchAtenLinear` says so in `linear_mode`; it gives no gradients then."""
    model = converted(stored(GPTQ))
    layer: Any = model.base_model.model.model.layers[0].mlp.down_proj.base_layer
    layer.linear_mode = None
    run(model, text_batch())
    assert layer.linear_mode == "train"  # as its own first call: no evaluation packs it from now on
    layer.linear_mode = "inference"
    with pytest.raises(RuntimeError, match="load the model again"):
        model(**text_batch())
    with unfused() as reasons:
        model.eval()(**text_batch(), use_cache=False)
    assert "was packed for inference" in str(reasons)


@pytest.mark.skipif(not INSTALLED, reason="GPTQModel asks for a newer torch than is tested here")
def test_training_after_an_evaluation() -> None:
    """An evaluation between steps, with a cache, in which layers of GPTQModel's run as they are."""
    make, way = partial(own_layer, name=GPTQ_LINEARS[2]), GPTQ._replace(block=32)
    plain, model = stored(way, torch.bfloat16, make=make), converted(stored(way, torch.bfloat16, make=make))
    found = []
    for each in (plain, model):
        run(each, text_batch())
        each.zero_grad()
        with torch.no_grad():
            each.eval().generate(text_batch()["input_ids"], max_new_tokens=2, do_sample=False)
        found.append(run(each.train(), text_batch()))
    assert all(layer.linear_mode == "train" for layer in model.modules() if hasattr(layer, "linear_mode"))
    assert found[0].keys() == found[1].keys()
    assert any("lora" in key for key in found[0])
