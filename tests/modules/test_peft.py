"""PEFT's LoRA on blocks and their halves: one op, with the gradients that PEFT gives a plain layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("peft")

import peft
from peft.utils import hotswap

import ckptfused
from ckptfused import (
    FusedCheckpointAttention,
    FusedCheckpointBlock,
    FusedCheckpointFFN,
    FusedCheckpointSequential,
    cost,
)
from tests.accounting import CountOps, saved_bytes
from tests.models.compare import close, gradients, result
from tests.models.dropout_oracle import RecordStates
from tests.models.test_peft import Masked

pytestmark = [
    pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning"),
    pytest.mark.filterwarnings("ignore:.*(merge|adapter|lora_bias|nested).*:UserWarning"),
]

B, T, C, H, F = 2, 6, 16, 4, 24
ALL = ["linear1", "linear2", "out_proj"]
FFN = ["linear1", "linear2"]
X = torch.randn(B, T, C, generator=torch.Generator().manual_seed(3))
Change = Callable[[Any], Any]


class Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def plain_layer(**options: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(C, H, F, 0.0, batch_first=True, **options)


def lora(module: nn.Module, targets: list[str] = ALL, **options: Any) -> Any:
    """A model around the module, with random adapters, the same ones at each call."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False, **options)
    return peft.get_peft_model(Model(module), config).train()


def swapped(model: Any, keep: str = "inputs") -> Any:
    """The same model with blocks in the place of PyTorch's layers."""
    model = copy.deepcopy(model)
    inner = model.get_base_model()
    inner.layer = FusedCheckpointBlock.from_layer(inner.layer, keep)
    return model


def products(counted: CountOps) -> int:
    return sum(counted.calls[f"aten.{name}"] for name in ("mm", "addmm", "bmm"))


def fused_result(model: Any, x: Tensor = X) -> dict[str, Tensor]:
    """The same as `compare.result`, of one block op and nothing beside it."""
    with CountOps() as counted:
        found = result(model, x)
    assert counted.blocks == (1, 1) and products(counted) == 0
    return found


class Applied(nn.Module):
    """A plain layer in which the adapters of `out_proj` are applied: its weight is base + scale · B A."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.model.get_base_model().layer
        wrapper = layer.self_attn.out_proj
        base = wrapper.base_layer
        weight = base.weight
        for name in wrapper.active_adapters:
            if name in wrapper.lora_A:
                delta = wrapper.lora_B[name].weight @ wrapper.lora_A[name].weight
                weight = weight + wrapper.scaling[name] * delta
        return torch.func.functional_call(layer, {"self_attn.out_proj.base_layer.weight": weight}, (x,))


class FusedSequence(nn.Module):
    """The block of a model in a segment of its own."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.segment = [FusedCheckpointSequential(model.get_base_model().layer)]

    def forward(self, x: Tensor) -> Tensor:
        return self.segment[0](x)


def expected(model: Any) -> dict[str, Tensor]:
    found = result(Applied(model), X)
    return {name.removeprefix("model."): value for name, value in found.items()}


def with_two(model: Any) -> None:
    torch.manual_seed(5)
    other = peft.LoraConfig(r=2, lora_alpha=9, target_modules=["linear1", "out_proj"], init_lora_weights=False)
    model.add_adapter("other", other)
    model.base_model.set_adapter(["default", "other"])


CHANGES: dict[str, Change] = {
    "one": lambda model: None,
    "two": with_two,
    "scaled": lambda model: [m.scale_layer(0.5) for m in model.modules() if hasattr(m, "scale_layer")],
    "evaluated": lambda model: model.eval(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("norm_first", [False, True])
def test_gradients(norm_first: bool, change: Change) -> None:
    """Adapters everywhere, `out_proj` included, where a plain layer would leave them out."""
    model = lora(plain_layer(norm_first=norm_first))
    change(model)
    training = model.training
    ours, kept = swapped(model), swapped(model, "all")
    model.train()  # PyTorch's fast path in evaluation reads the weights past the adapters
    want, got = expected(model), fused_result(ours)
    assert ours.training == training
    close(got, want, 1e-5)
    every = fused_result(kept)
    assert all(torch.equal(value, every[name]) for name, value in got.items())


def test_evaluation_without_gradients() -> None:
    model = swapped(lora(plain_layer())).eval()
    y = model(X)
    with torch.no_grad():
        assert torch.equal(model(X), y)
    with torch.no_grad(), model.disable_adapter():
        assert not torch.allclose(model(X), y)


@pytest.mark.parametrize("options", [{"modules_to_save": ["norm1", "norm2"]}, {"lora_bias": True}, {"bias": "all"}])
def test_what_peft_gives_a_plain_layer(options: dict[str, Any]) -> None:
    model = lora(plain_layer(), FFN, **options)
    close(fused_result(swapped(model)), result(model, X), 1e-5)


@pytest.mark.parametrize("change", ["merged", "disabled", "merged, then disabled"])
def test_merged_and_disabled(change: str) -> None:
    plain = lora(plain_layer(), FFN)
    ours = swapped(plain)
    found = []
    for model in (ours, plain):
        if "merged" in change:
            model.merge_adapter()
        if "disabled" in change:
            model.base_model.disable_adapter_layers()
        model.get_base_model().layer.requires_grad_(True)
        found.append(result(model, X))
    close(*found, 1e-5)  # type: ignore[call-arg]


@pytest.mark.parametrize("keep", ["inputs", "all"])
def test_dropout_of_adapters(keep: str) -> None:
    """The masks are those that the op drew: two adapters, sites 4 and 5."""
    model = lora(plain_layer(), FFN, lora_dropout=0.25)
    ours = swapped(model, keep)
    with RecordStates() as record:
        got = fused_result(ours)
    (state,) = record.states
    for index, name in enumerate(FFN):
        model.get_base_model().layer.get_submodule(name).lora_dropout["default"] = Masked(0.25, 4 + index, [state])
    close(got, result(model, X), 1e-5)


@pytest.mark.parametrize("p", [0.0, 0.25])
def test_saved_bytes(p: float) -> None:
    """x, and 16 bytes where an adapter has dropout: what `cost` says."""
    model = swapped(lora(plain_layer(), lora_dropout=p))
    block = model.get_base_model().layer
    x = X.clone().requires_grad_()
    spec = block.spec()
    assert len(spec.adapters) == 3
    want = cost.saved_bytes(spec, B, T, C, x.dtype)
    assert saved_bytes(lambda: block(x), block) == want == x.nbytes + 16 * bool(p)


MODULES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "llama": (lambda: FusedCheckpointBlock.llama(C, H, F, num_kv_heads=2), ALL),
    "attention": (lambda: FusedCheckpointAttention(C, H, 0.0, batch_first=True, causal=True), ["out_proj"]),
    "ffn": (lambda: FusedCheckpointFFN(C, F, 0.0, "swiglu", batch_first=True), FFN),
    "sequential": (lambda: FusedCheckpointSequential(*(FusedCheckpointBlock.llama(C, H, F) for _ in range(2))), ALL),
}


@pytest.mark.parametrize("name", MODULES)
def test_generic_calls_agree(name: str) -> None:
    """Grouped attention and FFN alone call the wrapped layers themselves."""
    make, targets = MODULES[name]
    torch.manual_seed(2)
    ours = lora(make(), targets)
    generic = copy.deepcopy(ours)
    for module in generic.modules():
        if hasattr(module, "base_layer"):
            module.register_forward_hook(lambda *_: None)
    with CountOps() as counted:
        got = result(ours, X)
    assert products(counted) == 0
    close(got, result(generic, X), 1e-5)
    for module in generic.modules():
        if isinstance(module, FusedCheckpointBlock):
            assert "has a hook" in (module.generic_reason() or "")


def test_a_generic_call_that_would_leave_an_adapter_out() -> None:
    model = swapped(lora(plain_layer()))
    layer = model.get_base_model().layer
    layer.linear1.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"^self_attn.out_proj: disable PEFT.s adapter .* \(linear1 has a hook"):
        model(X)
    with model.disable_adapter():
        model(X)
    nested = swapped(lora(plain_layer())).eval()
    with torch.no_grad(), pytest.raises(ValueError, match=r"^self_attn.out_proj: .* \(src is a nested tensor"):
        nested(torch.nested.nested_tensor([X[0], X[1, :3]]))


def test_a_generic_call_without_an_adapter_of_out_proj() -> None:
    """Its wrapper adds nothing while no adapter of its own is active."""
    plain = lora(plain_layer(), ["out_proj"])
    plain.add_adapter("other", peft.LoraConfig(r=2, target_modules=["linear1"], use_dora=True, init_lora_weights=False))
    plain.set_adapter("other")
    ours, converted = swapped(plain), copy.deepcopy(plain)
    ckptfused.convert(converted)
    assert "LoRA variant" in ours.get_base_model().layer.generic_reason()
    for model in (ours, converted):
        close(result(model, X), result(plain, X), 1e-5)


@pytest.mark.parametrize("make", [swapped, lambda model: FusedSequence(swapped(model))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_adapters_of_another_dtype(dtype: torch.dtype, make: Change) -> None:
    """PEFT casts to and fro."""
    plain = lora(plain_layer(), FFN)
    for name, p in plain.named_parameters():
        p.data = p.data.to(dtype) if "lora" in name else p.data
    ours = make(plain)
    want, got = result(plain, X), result(ours, X)
    close({name.removeprefix("model."): value for name, value in got.items()}, want, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["swapped", "converted"])
def test_scales_that_are_tensors(how: str) -> None:
    """PEFT makes them so for adapters that are exchanged in compiled models."""
    plain = lora(plain_layer(), FFN)
    hotswap.prepare_model_for_compiled_hotswap(plain, target_rank=4)
    ours = swapped(plain) if how == "swapped" else copy.deepcopy(plain)
    if how == "converted":
        ckptfused.convert(ours)
    want = result(plain, X)
    close(fused_result(ours), want, 1e-5)
    step = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for scale in (1.0, 0.5):
        for model in (plain, ours):
            for name in FFN:
                model.get_base_model().layer.get_submodule(name).scaling["default"].mul_(scale)
        ours.zero_grad()
        (y := step(X)).pow(3).mean().backward()
        close({"y": y.detach(), **gradients(ours)}, result(plain, X), 1e-5)


def test_a_wrapper_that_holds_integers_is_not_quantised() -> None:
    block = FusedCheckpointBlock(C, H, F, 0.0, batch_first=True)
    peft.get_peft_model(Model(block), peft.OFTConfig(target_modules=FFN, r=2, oft_block_size=0))
    assert "linear1 is a peft.tuners.oft" in (block.generic_reason() or "")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_fast_path_reads_no_adapted_weight() -> None:
    block = FusedCheckpointBlock(C, H, F, 0.0, batch_first=True)
    assert block.activation_relu_or_gelu == 1
    lora(block, FFN)
    assert block.activation_relu_or_gelu == 0


def test_self_attention_as_a_target() -> None:
    """PEFT merges its adapters at each call: as it does in a plain layer."""
    plain = lora(plain_layer(), ["self_attn", "linear1"])
    ours = swapped(plain)
    assert "self_attn is a peft.tuners.lora.layer.MultiheadAttention" in repr(ours)
    close(result(ours, X), result(plain, X), 1e-5)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_converted_layer(mode: str) -> None:
    """The adapter of `out_proj` is applied in training and evaluation, and the report says so."""
    model = lora(plain_layer())
    want = expected(model)
    report = ckptfused.convert(model)
    assert report.layers[0].path == "fused"
    assert "self_attn.out_proj is applied, which nn.MultiheadAttention would leave out" in report.layers[0].reason
    model.train(mode == "train")
    close(result(model, X), want, 1e-5)
    with torch.no_grad():
        torch.testing.assert_close(model(X), want["y"])
    layer = model.get_base_model().layer
    layer.linear1.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="^self_attn.out_proj: disable PEFT.s adapter"):
        model(X)
