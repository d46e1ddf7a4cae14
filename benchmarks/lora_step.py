"""A LoRA fine-tuning step of a Hugging Face Llama: PEFT, PEFT with gradient checkpointing, PEFT converted.

Bytes alive between forward and backward and at the peak of a step are counted by the allocator. With `--bits 4` the
base is stored by bitsandbytes (QLoRA: nf4 with nested scales); with `--dropout 0.05` the converted ones run without it,
too. Needs transformers and peft.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import ckptfused
from benchmarks.benchmark import Benchmark, Goal, Rows, Sizes, Steps, mib, option, ratio
from benchmarks.checks import worst_error
from benchmarks.llama import in_4_bits
from benchmarks.model_step import figures, gradients, step

TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
BATCH, TOKENS = 4, 512
VOCABULARY = {16: 256, 4: 8192}
"""By the base's bits: what is saved is not logits, and what a QLoRA step holds at its peak is, where they are made."""
PLAIN, CHECKPOINTED = "PEFT", "PEFT + gradient_checkpointing_enable()"
CONVERTED = "PEFT, ckptfused.convert"
CHUNKED = f'{CONVERTED}(loss="chunked")'
LEAST = f'{CONVERTED}(loss="chunked", scratch="24MiB")'
"""q, k and v made again after the FFN."""
TILED = f'{CONVERTED}(loss="chunked", scratch="8MiB")'
"""The FFN by tiles of columns, which share no weights: these are 16 MiB."""
UNDROPPED = "{}, dropout 0"
"""The same model without its adapters' dropout."""


@dataclass(frozen=True, kw_only=True)
class AdapterSizes(Sizes):
    """Bits of the base's projections, and dropout of the adapters' inputs."""

    bits: int = option(16, 4, every=False)
    dropout: float = 0.0


def config(bits: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY[bits],
        hidden_size=1024,
        intermediate_size=2752,
        num_hidden_layers=4,
        num_attention_heads=16,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )


def make_base(bits: int, seed: int) -> nn.Module:
    """A bfloat16 Llama of four layers, its projections in 4 bits if so asked."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    base: Any = LlamaForCausalLM(config(bits))
    return in_4_bits(base, torch.bfloat16) if bits == 4 else base.to(torch.bfloat16)


def adapted(base: nn.Module, dropout: float, seed: int) -> nn.Module:
    """A frozen base with rank-16 adapters in float32, as PEFT makes them."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    # B is 0 in a fresh adapter, and with it the gradient of A: random, there is something to check.
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=dropout, target_modules=TARGETS, init_lora_weights=False)
    return get_peft_model(base, lora).train()


def models(sizes: AdapterSizes) -> dict[str, nn.Module]:
    """Models with the same weights."""
    plain = adapted(make_base(sizes.bits, sizes.seed), sizes.dropout, sizes.seed)
    checkpointed: Any = copy.deepcopy(plain)
    checkpointed.activation_checkpointing_enable()
    found = {PLAIN: plain, CHECKPOINTED: checkpointed}
    unconverted = {"{}": plain}
    if sizes.dropout:
        unconverted[UNDROPPED] = adapted(make_base(sizes.bits, sizes.seed), 0.0, sizes.seed)
    ways: dict[str, dict[str, Any]] = {CONVERTED: {}}
    if sizes.bits == 4:
        ways |= {CHUNKED: {"loss": "chunked"}, LEAST: {"loss": "chunked", "scratch": "24MiB"}}
        ways[TILED] = {"loss": "chunked", "scratch": "8MiB"}
    for (way, options), (called, model) in product(ways.items(), unconverted.items()):
        found[called.format(way)] = made = copy.deepcopy(model)
        report = ckptfused.convert(made, **options)
        assert report.fused == len(report.layers) == 4, str(report)
    return found


def batch(sizes: AdapterSizes) -> Tensor:
    generator = torch.Generator().manual_seed(sizes.seed)
    return torch.randint(0, VOCABULARY[sizes.bits], (BATCH, TOKENS), generator=generator)


def check(sizes: AdapterSizes, steps: Any = None) -> str:
    """Raises unless the converted models' gradients are right: without dropout, within `checks.worst_error`'s limits.
    A base in 4 bits is dequantized for float64's.
    """
    found, ids = models(replace(sizes, dropout=0.0)), batch(sizes)[:1]
    base: Any = make_base(sizes.bits, sizes.seed)
    truth = gradients(adapted(base.dequantize() if sizes.bits == 4 else base, 0.0, sizes.seed).double(), ids)
    own = gradients(found[PLAIN], ids)
    worst = 0.0
    for variant in found.keys() - {PLAIN, CHECKPOINTED}:
        ours = gradients(found[variant], ids)
        if not ours.keys() == own.keys() == truth.keys():
            raise SystemExit(f"gradient check failed, no time reported: {variant}: other parameters have gradients")
        worst = max(worst, worst_error(truth, own, ours, torch.bfloat16))
    return f"{len(truth)} gradients, at most {worst:.2f} of the allowed error against float64"


def variants(sizes: AdapterSizes) -> Steps:
    ids = batch(sizes)
    return {name: partial(step, model, ids) for name, model in models(sizes).items()}


def goals(sizes: AdapterSizes) -> list[Goal]:
    ways = (CONVERTED,) if sizes.bits == 16 else (CONVERTED, CHUNKED, LEAST, TILED)
    times = [Goal(way, CHECKPOINTED, 0.8) for way in ways]
    least = () if sizes.bits == 16 else (LEAST, TILED)
    peaks = [Goal(way, CHECKPOINTED, 0.35, "peak", "peak") for way in least]
    return [*times, *peaks, *(Goal(way, UNDROPPED.format(way), 1.03) for way in ways if sizes.dropout)]


def shape(sizes: AdapterSizes, rows: Rows) -> str:
    stored = "" if sizes.bits == 16 else ", its projections in 4 bits (nf4, nested scales, bitsandbytes)"
    return (
        f"Llama of 4 layers, C 1024, F 2752, 16 heads, {VOCABULARY[sizes.bits]:,} classes, bfloat16 and "
        f"frozen{stored}; rank 16 in float32 on q, v, o, gate, down, adapter dropout {sizes.dropout}; {BATCH} × "
        f"{TOKENS} tokens; forward, loss and backward. Peaks are above weights and last gradients."
    )


BENCHMARK = Benchmark(
    name="lora-step",
    doc=__doc__,
    sizes=AdapterSizes(),
    variants=variants,
    check=check,
    figures=lambda sizes, steps: {name: figures(step) for name, step in steps.items()},
    columns=(
        mib("alive after forward", "alive"),
        mib("peak of a step", "peak"),
        ratio("time of PEFT's", PLAIN),
        ratio("time of checkpointing's", CHECKPOINTED),
        ratio("peak of checkpointing's", CHECKPOINTED, "peak"),
    ),
    goals=goals,
    stem=lambda sizes: f"{'lora' if sizes.bits == 16 else 'qlora'}-4x1024{'-dropout' if sizes.dropout else ''}",
    shape=shape,
    budget=90.0,
)
