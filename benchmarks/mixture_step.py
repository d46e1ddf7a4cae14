"""A training step of Hugging Face's mixtures of experts: as they are, with gradient checkpointing, converted.

Bytes alive between forward and backward and at the peak of a step are counted by the allocator. With `--rank 16` the
weights of the experts are frozen and have PEFT's adapters (`target_parameters`). With `--bits 4` bitsandbytes stores
them, and attention has the adapters. Needs transformers, peft and bitsandbytes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import remove_parametrizations

import ckptfused
from benchmarks.benchmark import Benchmark, Goal, Rows, Sizes, Steps, mib, option, ratio
from benchmarks.checks import worst_error
from benchmarks.memory import memory_of
from benchmarks.model_step import figures, gradients, step

VOCABULARY = 256
PLAIN, CHECKPOINTED, CONVERTED = "Hugging Face", "Hugging Face + gradient_checkpointing_enable()", "ckptfused.convert"
SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "use_cache": False,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1024},
    # Without biases of attention: the gradient of keys' is what the sinks leave of a sum that cancels.
    "gpt-oss": {
        **{"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 384},
        **{"attention_bias": False, "swiglu_limit": 7.0},
    },
}
CLASSES = {"qwen3-moe": "Qwen3Moe", "mixtral": "Mixtral", "gpt-oss": "GptOss"}


@dataclass(frozen=True, kw_only=True)
class MixtureSizes(Sizes):
    """The model, the rank of adapters on its experts (0: all weights are trained), the bits of these (0: bfloat16), its
    layers, and the tokens of each of two sequences."""

    model: str = option("qwen3-moe", "mixtral", "gpt-oss")
    rank: int = option(0, 16, every=False)
    bits: int = option(0, 4, every=False)
    layers: int = 4
    tokens: int = 4096


def make(sizes: MixtureSizes, dtype: torch.dtype) -> Any:
    """A model in training, the same for every type but for rounding."""
    import transformers

    torch.manual_seed(sizes.seed)
    options = SHARED | EXPERTS[sizes.model] | {"num_hidden_layers": sizes.layers}
    config = getattr(transformers, f"{CLASSES[sizes.model]}Config")(**options)
    made: Any = getattr(transformers, f"{CLASSES[sizes.model]}ForCausalLM")(config).to(dtype).train()
    if not (sizes.rank or sizes.bits):
        return made
    from peft import LoraConfig, get_peft_model

    # B is 0 in a fresh adapter, and with it the gradient of A: random, there is something to check.
    adapted = [] if sizes.bits else ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    modules = [f"{name}_proj" for name in "qkvo"] if sizes.bits else []
    lora = LoraConfig(r=sizes.rank or 16, init_lora_weights=False, target_modules=modules, target_parameters=adapted)
    made = get_peft_model(made, lora).train()
    if sizes.bits:
        from bitsandbytes.nn.parametrize import replace_parameter_4bit

        for experts in stacks(made):
            for weight in ("gate_up_proj", "down_proj"):
                replace_parameter_4bit(experts, weight, compress_statistics=True)
    return made


def stacks(model: Any) -> list[Any]:
    """The modules that hold experts."""
    return [module for name, module in model.named_modules() if name.endswith("mlp.experts")]


def exact_model(sizes: MixtureSizes) -> Any:
    """One in float64 of the numbers of the one in float32."""
    model = make(sizes, torch.float32)  # copies of a parametrized one would lose their parameters with it
    for experts in stacks(model):
        for weight in list(getattr(experts, "parametrizations", ())):
            numbers = getattr(experts, weight).detach()
            remove_parametrizations(experts, weight, leave_parametrized=False)
            setattr(experts, weight, nn.Parameter(numbers, requires_grad=False))
    return model.double()


def converted(plain: Any) -> Any:
    """A copy whose attention halves are fused and whose experts are one operation each."""
    model = copy.deepcopy(plain)
    report = ckptfused.convert(model)
    assert {layer.path for layer in report.layers} == {"part"}, str(report)
    return model


def batch(sizes: MixtureSizes, rows: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(sizes.seed)
    return torch.randint(0, VOCABULARY, (rows, sizes.tokens), generator=generator)


def check(sizes: MixtureSizes, steps: Any = None) -> str:
    """Raises unless the converted model's gradients are right, in float32, within `checks.worst_error`'s limits: in
    bfloat16 a router's rounded logits choose other experts than float64's.
    """
    plain, ids = make(sizes, torch.float32), batch(sizes, 1)
    exact = exact_model(sizes)
    exact.set_experts_implementation("eager")  # grouped products have no float64
    truth = gradients(exact, ids)
    own, ours = gradients(plain, ids), gradients(converted(plain), ids)
    worst = worst_error(truth, own, ours, torch.float32)
    return f"{len(truth)} gradients in float32, at most {worst:.2f} of the allowed error against float64"


def variants(sizes: MixtureSizes) -> Steps:
    plain, ids = make(sizes, torch.bfloat16), batch(sizes)
    checkpointed = copy.deepcopy(plain)
    checkpointed.activation_checkpointing_enable()
    models = {PLAIN: plain, CHECKPOINTED: checkpointed, CONVERTED: converted(plain)}
    return {name: partial(step, model, ids) for name, model in models.items()}


def peaks(sizes: MixtureSizes, steps: Steps) -> dict[str, dict[str, int]]:
    """What `model_step.figures` says of each variant, and its peak without what a step leaves, gradients."""
    return {name: figures(step) | {"transient": memory_of(step).transient_peak} for name, step in steps.items()}


def shape(sizes: MixtureSizes, rows: Rows) -> str:
    experts = EXPERTS[sizes.model]
    count, chosen, width = list(experts.values())[:3]
    trained = "all is trained"
    if sizes.rank:
        trained = f"adapters of rank {sizes.rank} on the experts alone are trained"
    if sizes.bits:
        trained = f"experts in 4 bits (nested nf4), adapters of rank {sizes.rank or 16} on attention alone are trained"
    return (
        f"{sizes.model} of {sizes.layers} layers, C 512, 8 heads, {count} experts of {width}, of which a token has "
        f"{chosen}, bfloat16; {trained}; 2 × {sizes.tokens:,} tokens; forward, loss and backward. Peaks are above "
        "the weights; a step's gradients are in the first."
    )


BENCHMARK = Benchmark(
    name="mixture-step",
    doc=__doc__,
    sizes=MixtureSizes(),
    variants=variants,
    check=check,
    figures=peaks,
    columns=(
        mib("alive after forward", "alive"),
        mib("peak of a step", "peak"),
        ratio("time of checkpointing's", CHECKPOINTED),
        ratio("peak of checkpointing's", CHECKPOINTED, "peak"),
        mib("peak without gradients", "transient"),
        ratio("that of checkpointing's", CHECKPOINTED, "transient"),
    ),
    goals=lambda sizes: [
        Goal(CONVERTED, CHECKPOINTED, 0.85),
        Goal(CONVERTED, CHECKPOINTED, 0.6, "peak", "peak of a step"),
    ],
    case=lambda sizes: sizes.model,
    stem=lambda sizes: (
        f"mixture-{sizes.layers}x512"
        + (f"-lora{sizes.rank}" if sizes.rank else "")
        + (f"-{sizes.bits}bit" if sizes.bits else "")
    ),
    shape=shape,
    budget=90.0,
)
