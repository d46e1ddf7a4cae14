"""explain() against what really runs and what autograd really saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import ckptfused
from ckptfused import FusedCheckpointAttention, FusedCheckpointBlock, FusedCheckpointFFN, FusedCheckpointSequential
from ckptfused.explain import _fused, explain
from tests.accounting import Events, saved_bytes
from tests.devices import on_devices

WIDTH = 64
FLASH = {
    "cpu": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "cuda": "aten::_scaled_dot_product_flash_attention",
}


def llama(**options: Any) -> FusedCheckpointBlock:
    return FusedCheckpointBlock.llama(WIDTH, 4, dim_feedforward=96, **options)


BLOCKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "llama": (lambda: llama(), (2, 128, WIDTH)),
    "short": (lambda: llama(), (2, 64, WIDTH)),
    "dropout": (lambda: llama(dropout=0.1), (2, 33, WIDTH)),
    "dropout elsewhere": (lambda: llama(residual_dropout=0.1, keep="attention+mid"), (1, 1030, WIDTH)),
    "window": (lambda: llama(window=5, keep="all"), (1, 33, WIDTH)),
    "a window that covers all": (lambda: llama(window=500), (1, 33, WIDTH)),
    "encoder": (lambda: FusedCheckpointBlock(WIDTH, 4, 128, batch_first=True).eval(), (2, 33, WIDTH)),
    "soft cap": (lambda: FusedCheckpointAttention(WIDTH, 4, 0.0, softcap=5.0), (33, 2, WIDTH)),
    "gated": (lambda: llama(output_gate="head"), (2, 33, WIDTH)),
    "half alone": (lambda: FusedCheckpointAttention(WIDTH, 4, 0.0, norm_first=True, qk_norm=True), (33, 2, WIDTH)),
}


def flash_ran(function: Any, device: str) -> bool:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        function()
    return any(event.name == FLASH[device] for event in recorded.events())


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_attention_kernel_is_the_one_that_runs(name: str, dtype: torch.dtype, device: str) -> None:
    make, shape = BLOCKS[name]
    block, x = make().to(device, dtype), torch.randn(shape).to(device, dtype)
    found = explain(block, x, show=False).step("attention")
    assert (found.kernel == "PyTorch's flash kernel") == flash_ran(lambda: block(x), device), found
    assert found.reason


@pytest.mark.parametrize("keep", ["inputs", "mid", "attention+mid", "all"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_is_saved_and_made_again(dropout: float, keep: str) -> None:
    block, x = llama(dropout=dropout, keep=keep), torch.randn(2, 33, WIDTH)
    found = explain(block, x, show=False)
    assert sum(found.saved.values()) == saved_bytes(lambda: block(x), block)
    y = block(x)
    backward = Events(lambda: y.backward(torch.ones_like(y)))
    assert backward.count("ckptfused::attention_fwd") == ("attention" in found.replayed)
    assert (found.step("attention").backward == "made again") == ("attention" in found.replayed)
    assert found.step("down product").backward == "not needed"


def test_nothing_is_saved_without_gradients() -> None:
    block, x = llama(dropout=0.1).requires_grad_(False), torch.randn(2, 33, WIDTH)
    for found in (explain(block, x, show=False), _without_grad(llama(), x)):
        assert not found.saved and not found.replayed
        assert "Nothing is saved" in str(found)
    assert explain(block, x.requires_grad_(), show=False).saved


def _without_grad(block: FusedCheckpointBlock, x: Tensor) -> Any:
    with torch.no_grad():
        return explain(block, x, show=False)


def test_adapters_are_named() -> None:
    """A text with adapters, as a converted model with LoRA has it: no module of the package's own makes one."""
    block, x = llama(), torch.randn(2, 33, WIDTH)
    call = block.prepare(x)
    slots = (*call.slots, *(torch.zeros(()) for _ in range(9)))
    text = f"{call.text} attn.lora=q:4:2.0:0.1+o:8:1.0:0.0 ffn.lora=down:4:1.0:0.0"
    found = _fused("title", call._replace(text=text, slots=slots))
    assert found.step("adapters of q").reason == "q: rank 4, dropout 0.1; in float32, rounded once"
    assert found.step("adapters of o").backward == found.step("output projection").backward == "made again"
    assert found.step("adapters of down").kernel == "blocks of rows"
    assert "random state" in found.saved


@pytest.mark.parametrize("gate", [None, "entry", "head"])
def test_a_gate_is_named(gate: str | None) -> None:
    found = explain(llama(output_gate=gate), torch.randn(2, 33, WIDTH), show=False)
    said = [step.reason for step in found.steps if step.name == "output gate"]
    assert said == ([] if gate is None else [f"o times sigmoids, one of each {gate}, in one pass"])


@pytest.mark.parametrize(("p", "said"), [(0.0, []), (0.1, ["dropout 0.1 in one pass"])])
def test_the_end_of_a_half_without_a_residual(p: float, said: list[str]) -> None:
    half = FusedCheckpointAttention(WIDTH, 4, p, norm_first=True, residual=False)
    found = explain(half, torch.randn(33, 2, WIDTH), show=False)
    assert [step.reason for step in found.steps if step.name == "end of attention"] == said
    assert not [step.name for step in found.steps if step.name.startswith("residual")]


def test_a_meta_tensor_stands_for_one_on_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    block = llama(keep="mid")
    real = explain(block, torch.randn(2, 33, WIDTH), show=False)
    assert capsys.readouterr().out == ""
    assert explain(block, torch.empty(2, 33, WIDTH, device="meta")) == real
    assert capsys.readouterr().out == f"{real}\n"
    for step in real.steps:
        assert step.name in str(real)
    assert explain(block.to("meta"), torch.empty(2, 33, WIDTH, device="meta"), show=False).steps == real.steps


def test_tiles_of_queries() -> None:
    """The attention step names our tiles, and the FFN's tiles are those of the rows of one."""
    block = FusedCheckpointBlock(512, 8, batch_first=True, dropout=0.0, device="meta", scratch="16MiB")
    found = explain(block, torch.empty(1, 16384, 512, device="meta"), show=False)
    step = found.step("attention")
    assert step.kernel == "our tiles" and step.reason.startswith("24 blocks of 704 queries")
    assert "11.0 MiB of hidden-wide scratch in one piece" in found.step("tiles of the FFN").reason
    short = explain(block, torch.empty(1, 512, 512, device="meta"), show=False)
    assert "queries" not in short.step("attention").reason


def test_tiles_and_autocast() -> None:
    ffn = FusedCheckpointFFN(8, 20_000, activation="swiglu", batch_first=True)
    assert "15 tiles of 1,344 columns" in explain(ffn, torch.empty(4, 4096, 8, device="meta"), show=False).step(
        "tiles of the FFN"
    ).reason  # fmt: skip
    x = torch.randn(2, 33, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        found = explain(llama(keep="all"), x, show=False)
    assert "products in bfloat16" in found.title
    assert found.saved["qkv"] == 2 * 33 * 3 * WIDTH * 2


def test_what_cannot_be_fused_says_so() -> None:
    block = FusedCheckpointBlock(WIDTH, 4, activation=lambda x: x.sin())
    (step,) = explain(block, torch.randn(5, 2, WIDTH), show=False).steps
    assert "torch.utils.checkpoint" in step.kernel
    learned = torch.zeros(5, 5).requires_grad_()
    (step,) = explain(FusedCheckpointBlock(WIDTH, 4), torch.randn(5, 2, WIDTH), learned, show=False).steps
    assert step.reason == "a mask needs a gradient"


def test_masks_given_at_the_call_count() -> None:
    block, x = FusedCheckpointBlock(WIDTH, 4, dropout=0.0), torch.randn(33, 2, WIDTH)
    assert explain(block, x, show=False).step("attention").kernel == "PyTorch's flash kernel"
    padding = torch.zeros(2, 33, dtype=torch.bool)
    found = explain(block, x, src_key_padding_mask=padding, show=False).step("attention")
    assert (found.kernel, found.reason) == ("our tiles", "PyTorch's kernel has no padding")


@pytest.mark.parametrize("other", [nn.Linear(2, 2), FusedCheckpointSequential(llama())])
def test_other_modules_are_refused(other: nn.Module) -> None:
    with pytest.raises(TypeError, match="expected a FusedCheckpointBlock, FusedCheckpointAttention or"):
        ckptfused.explain(other, torch.randn(2, 2))  # type: ignore[arg-type]
