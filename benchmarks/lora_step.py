"""Times a LoRA fine-tuning step of a Hugging Face Llama: PEFT, PEFT with gradient checkpointing, PEFT converted.

Gradients are checked first, the bytes alive between forward and backward and at the peak of a step are counted by the
allocator, and variants take turns within one run. With `--bits 4` the base is stored by bitsandbytes (QLoRA: nf4 with
nested scales). Writes benchmarks/results/lora-4x1024[-<label>].json and .md, or qlora-4x1024. Needs transformers, peft.

    python benchmarks/lora_step.py --budget 100
    python benchmarks/lora_step.py --budget 100 --bits 4
"""

from __future__ import annotations

import copy
import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

import ckptfused
from benchmarks import environment
from benchmarks.commands import command_line, interleaved, page, times, write
from benchmarks.memory import memory_of
from benchmarks.step_time import summary, take_turns

TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
BATCH, TOKENS = 4, 512
VOCABULARY = {16: 256, 4: 8192}
"""By the base's bits: what is saved is not logits, and what a QLoRA step holds at its peak is, where they are made."""
CHECKPOINTED, CONVERTED = "PEFT + gradient_checkpointing_enable()", "PEFT, ckptfused.convert"
CHUNKED = f'{CONVERTED}(loss="chunked")'
NAMES = {16: "LoRA", 4: "QLoRA"}
GOAL, PEAK_GOAL = 0.8, 0.35
"""Seconds and peak bytes of a step over checkpointing's, at most."""


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
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    base: Any = LlamaForCausalLM(config(bits))
    base.to(torch.bfloat16)
    if bits == 16:
        return base
    few = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    with tempfile.TemporaryDirectory() as folder:
        base.save_pretrained(folder)
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=few)


def adapted(base: nn.Module, dropout: float, seed: int) -> nn.Module:
    """A frozen base with rank-16 adapters in float32, as PEFT makes them."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    # B is 0 in a fresh adapter, and with it the gradient of A: random, there is something to check.
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=dropout, target_modules=TARGETS, init_lora_weights=False)
    return get_peft_model(base, lora).train()


def variants(bits: int, dropout: float, seed: int) -> dict[str, nn.Module]:
    """Models with the same weights."""
    plain = adapted(make_base(bits, seed), dropout, seed)
    checkpointed: Any = copy.deepcopy(plain)
    checkpointed.activation_checkpointing_enable()
    models = {"PEFT": plain, CHECKPOINTED: checkpointed}
    for name, loss in {CONVERTED: None, CHUNKED: "chunked"}.items():
        if name == CONVERTED or bits == 4:
            models[name] = copy.deepcopy(plain)
            report = ckptfused.convert(models[name], loss=loss)
            assert report.fused == len(report.layers) == 4, str(report)
    return models


def batch(bits: int, seed: int) -> Tensor:
    return torch.randint(0, VOCABULARY[bits], (BATCH, TOKENS), generator=torch.Generator().manual_seed(seed))


def loss(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def step(model: Any, ids: Tensor) -> None:
    """One forward and backward; gradients are freed, as zero_grad() does by default."""
    model.zero_grad(set_to_none=True)
    loss(model, ids).backward()


def gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    step(model, ids)
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def check(bits: int, seed: int) -> str:
    """Raises unless the converted models' gradients are right: without dropout, at most twice PEFT's own bfloat16
    error against float64, plus half an ulp of the tensor's scale. A base in 4 bits is dequantized for float64's.
    """
    models = variants(bits, 0.0, seed)
    ids = batch(bits, seed)[:1]
    base: Any = make_base(bits, seed)
    truth = gradients(adapted(base.dequantize() if bits == 4 else base, 0.0, seed).double(), ids)
    own = gradients(models["PEFT"], ids)
    worst = 0.0
    for variant in models.keys() - {"PEFT", CHECKPOINTED}:
        ours = gradients(models[variant], ids)
        if not ours.keys() == own.keys() == truth.keys():
            raise SystemExit(f"gradient check failed, no time reported: {variant}: other parameters have gradients")
        for name, exact in truth.items():
            allowed = 2 * (own[name] - exact).norm() + torch.finfo(torch.bfloat16).eps / 2 * exact.norm()
            ratio = float((ours[name] - exact).norm() / allowed)
            if not ratio <= 1:
                raise SystemExit(f"gradient check failed, no time reported: {name}: {ratio:.2f} of the allowed error")
            worst = max(worst, ratio)
    return f"{len(truth)} gradients, at most {worst:.2f} of the allowed error against float64"


def measure(bits: int, dropout: float, budget: float, seed: int) -> dict[str, Any]:
    """Checks, counts bytes, then times."""
    checked = check(bits, seed)
    models, ids = variants(bits, dropout, seed), batch(bits, seed)
    steps = {name: functools.partial(step, model, ids) for name, model in models.items()}
    seconds = {name: summary(found) for name, found in take_turns(steps, budget).items()}
    return {
        "case": f"{NAMES[bits].lower()}-4x1024",
        "bits": bits,
        "dtype": "bfloat16, adapters float32",
        "adapter_dropout": dropout,
        "check": checked,
        "live_bytes": {n: memory_of(functools.partial(loss, model, ids)).lasting for n, model in models.items()},
        "peak_bytes": {name: memory_of(call).peak for name, call in steps.items()},
        "seconds": seconds,
        "goals": {"seconds": GOAL} | ({"peak_bytes": PEAK_GOAL} if bits == 4 else {}),
        "environment": environment.describe(),
    }


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    bits, goals = result["bits"], result["goals"]
    stored = "" if bits == 16 else ", its projections in 4 bits (nf4, nested scales, bitsandbytes)"
    lines = [
        f"# {NAMES[bits]}, adapter dropout {result['adapter_dropout']}",
        "",
        f"Llama of 4 layers, C 1024, F 2752, 16 heads, {VOCABULARY[bits]:,} classes, bfloat16 and frozen{stored}; "
        f"rank 16 in float32 on q, v, o, gate, down; {BATCH} × {TOKENS} tokens; forward, loss and backward.",
        "",
        "| variant | median s | p20 | p80 | alive after forward MiB | peak of a step MiB | of checkpointing's |",
        "|---|---|---|---|---|---|---|",
    ]
    base, most = result["seconds"][CHECKPOINTED]["median"], result["peak_bytes"][CHECKPOINTED]
    for name, row in result["seconds"].items():
        alive, peak = result["live_bytes"][name], result["peak_bytes"][name]
        mib = f"{alive / 2**20:.1f} | {peak / 2**20:.1f}"
        lines.append(f"| {name} | {times(row)} | {mib} | {row['median'] / base:.2f}×, {peak / most:.2f}× |")
    goal = ", ".join(f"{what.split('_')[0]} at most {value:.2f}×" for what, value in goals.items())
    said = f"{interleaved(result)} Goal of the converted model: {goal}. Peaks are above weights and last gradients."
    return page(lines, result, f"{said} Checked first: {result['check']}.")


def main() -> None:
    parser = command_line(__doc__, 90.0)
    parser.add_argument("--dropout", type=float, default=0.0, help="of the adapters' inputs")
    parser.add_argument("--bits", type=int, choices=sorted(NAMES), default=16, help="of the base's projections")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result = measure(arguments.bits, arguments.dropout, arguments.budget, arguments.seed)
    write(result, markdown, arguments, result["case"], "dropout" if arguments.dropout else "")


if __name__ == "__main__":
    main()
