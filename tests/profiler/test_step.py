"""The predicted peak of a training step against PyTorch's allocator on the CPU, and what it is made of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import ckptfused
from ckptfused.profiler import Profile, adamw, profile
from tests.accounting import Events

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # its new name, in peft's own code
]

WITHIN = 0.01
"""What is not counted: random states that checkpoints keep, tables of positions, numbers on the CPU."""
SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "use_cache": False,
}
VARIANTS = ("plain", "checkpointed", "converted", "chunked", "least")
ADAMW = torch.optim.AdamW


def llama(**sizes: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES | sizes))


def with_variant(model: Any, variant: str, lora: bool = False) -> Any:
    """The model as it trains."""
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
    if variant == "checkpointed":
        if lora:
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    elif variant != "plain":
        loss, scratch = None if variant == "converted" else "chunked", "512KiB" if variant == "least" else None
        report = ckptfused.convert(model, loss=loss, scratch=scratch)
        assert report.fused == 3, report
    return model.train()


def measured(model: Any, ids: Tensor, optimizer: torch.optim.Optimizer | None) -> Events:
    """A step in the midst of training."""

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        if optimizer is not None:
            optimizer.step()

    step()
    model.zero_grad(set_to_none=True)
    return Events(step)


def compare(make: Callable[[], Any], optimizer: Any = None, tokens: tuple[int, int] = (2, 90)) -> Profile:
    """The prediction, after it was found within what is said above, and the allocator's own peak with it."""
    torch.manual_seed(0)
    model = make()
    ids = torch.randint(0, 64, tokens)
    keeper = None if optimizer is None else optimizer([p for p in model.parameters() if p.requires_grad])
    events = measured(model, ids, keeper)
    found = profile(model, {"input_ids": ids, "labels": ids}, keeper, "cpu")
    # With what ops of PyTorch's allocate and free within themselves: oneDNN's reordered operands in half precision.
    assert found.above_state == pytest.approx(events.peak_bytes(internal=True), rel=WITHIN)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_llama(variant: str, dtype: torch.dtype) -> None:
    """A model with a loss head that sets the peak, all of it trained, or with one that does not, by LoRA: by turns."""
    lora = (VARIANTS.index(variant) + (dtype == torch.bfloat16)) % 2 == 1
    classes = 64 if lora else 2048
    found = compare(lambda: with_variant(llama(vocab_size=classes).to(dtype), variant, lora), None)
    assert found.gradients + found.activations + found.loss_head + found.transients == found.above_state
    assert found.optimizer == 0


@pytest.mark.parametrize("variant", ["plain", "chunked"])
def test_with_an_optimizer(variant: str) -> None:
    found = compare(lambda: with_variant(llama(), variant), ADAMW, (1, 16))
    with torch.device("meta"):
        parameters = list(llama().parameters())
    numbers = sum(p.numel() for p in parameters)
    assert found.optimizer == 8 * numbers + 4 * len(parameters)  # float32 moments, and the number of the step
    assert found.moment.startswith("optimizer") and found.gradients == 4 * numbers


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_an_optimizer_that_takes_all_parameters_at_once(optimizer: Any) -> None:
    """It holds what it makes of all of them, on the CPU too, where it is told."""
    found = {
        together: compare(llama, partial(optimizer, foreach=together), (1, 16)).above_state
        for together in (True, False)
    }
    assert found[True] > 1.1 * found[False]


def test_a_group_that_is_not_fused_beside_one_that_is() -> None:
    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        others = {"params": parameters[1:], "fused": False, "foreach": True}
        return torch.optim.AdamW([{"params": parameters[:1]}, others], fused=True)

    model, ids = llama(), torch.randint(0, 64, (1, 16))
    batch, keeper = {"input_ids": ids, "labels": ids}, optimizer(list(model.parameters()))
    assert profile(model, batch, keeper, "cpu").peak >= profile(model, batch, keeper).peak


def test_an_optimizer_that_looks_at_numbers() -> None:
    """Adafactor of transformers takes the larger of two tensors."""
    from transformers.optimization import Adafactor

    model, ids = llama(), torch.randint(0, 64, (1, 16))
    batch, keeper = {"input_ids": ids, "labels": ids}, Adafactor(model.parameters(), beta1=0.9)
    found = profile(model, batch, keeper, "cpu")
    assert found.notes[0].startswith("Adafactor looks at numbers")
    assert found.peak == pytest.approx(profile(model, batch, keeper).peak, rel=WITHIN)


MODELS: dict[str, Callable[[], Any]] = {
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=32)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
}
GPT2: dict[str, Any] = {"vocab_size": 2048, "n_embd": 128, "n_layer": 3, "n_head": 4, "use_cache": False}
GPT2 |= {"bos_token_id": None, "eos_token_id": None}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_other_models(name: str) -> None:
    """Models with eager attention, soft-caps, windows, dropout, tied embeddings."""
    for variant in ("plain", "checkpointed", "chunked"):
        compare(lambda: with_variant(MODELS[name](), variant))  # noqa: B023
    compare(lambda: with_variant(MODELS[name]().bfloat16(), "chunked"), None, (2, 40))


def test_the_moment_and_the_parts() -> None:
    """The layers are a Llama-3-8B's: nothing is allocated."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = llama(**sizes, vocab_size=128256, head_dim=128).bfloat16()
    ids = torch.empty(1, 8192, dtype=torch.int64, device="meta")
    plain = profile(with_variant(model, "plain"), {"input_ids": ids, "labels": ids}, device="h200")
    assert plain.moment == "backward of the loss head: aten::_log_softmax_backward_data"
    assert plain.weights == 2 * sum(p.numel() for p in model.parameters()) + 2 * 64 * 2 + 8 * 8192  # frequencies, ids
    assert plain.loss_head > 8192 * 128256 * (2 + 4 + 4)
    fused = profile(with_variant(model, "converted"), {"input_ids": ids, "labels": ids}, device="h200")
    assert fused.activations == pytest.approx(3 * 8192 * 4096 * 2, rel=0.03)  # x of each layer; cos and sin
    chunked = profile(with_variant(model, "chunked"), {"input_ids": ids, "labels": ids}, adamw, "h200")
    assert chunked.above_state < fused.above_state < plain.above_state
    assert chunked.optimizer == pytest.approx(2 * 2 * sum(p.numel() for p in model.parameters()), rel=1e-6)
