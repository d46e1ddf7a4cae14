"""Times a LoRA fine-tuning step of a Hugging Face Llama: PEFT, PEFT with gradient checkpointing, PEFT converted.

Gradients are checked first, the bytes alive between forward and backward are counted by the allocator, and variants
take turns within one run. Writes benchmarks/results/lora-4x1024[-<label>].json and .md. Needs transformers and peft.

    python benchmarks/lora_step.py --budget 100
"""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

import ckptfused
from benchmarks import environment
from benchmarks.commands import command_line, interleaved, page, write
from benchmarks.memory import memory_of
from benchmarks.step_time import summary, take_turns

TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
BATCH, TOKENS, VOCABULARY = 4, 512, 256
CHECKPOINTED, CONVERTED = "PEFT + gradient_checkpointing_enable()", "PEFT, ckptfused.convert"
GOAL = 0.8


def make(dropout: float, seed: int) -> nn.Module:
    """A bfloat16 Llama of four layers, frozen, with rank-16 adapters in float32 as PEFT makes them."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=2752,
        num_hidden_layers=4,
        num_attention_heads=16,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    base: Any = LlamaForCausalLM(config)
    base.to(torch.bfloat16)
    # B is 0 in a fresh adapter, and with it the gradient of A: random, there is something to check.
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=dropout, target_modules=TARGETS, init_lora_weights=False)
    return get_peft_model(base, lora).train()


def variants(dropout: float, seed: int) -> dict[str, nn.Module]:
    """Three models with the same weights."""
    plain = make(dropout, seed)
    checkpointed: Any = copy.deepcopy(plain)
    checkpointed.activation_checkpointing_enable()
    converted = copy.deepcopy(plain)
    report = ckptfused.convert(converted)
    assert report.fused == len(report.layers) == 4, str(report)
    return {"PEFT": plain, CHECKPOINTED: checkpointed, CONVERTED: converted}


def batch(seed: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(seed))


def loss(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def step(model: Any, ids: Tensor) -> None:
    """One forward and backward; gradients are freed, as zero_grad() does by default."""
    model.zero_grad(set_to_none=True)
    loss(model, ids).backward()


def gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    step(model, ids)
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def check(seed: int) -> str:
    """Raises unless the converted model's gradients are right: without dropout, at most twice PEFT's own bfloat16
    error against float64, plus half an ulp of the tensor's scale.
    """
    models = variants(0.0, seed)
    ids = batch(seed)[:1]
    truth = gradients(copy.deepcopy(models["PEFT"]).double(), ids)
    own, ours = gradients(models["PEFT"], ids), gradients(models[CONVERTED], ids)
    worst = 0.0
    for name, exact in truth.items():
        allowed = 2 * (own[name] - exact).norm() + torch.finfo(torch.bfloat16).eps / 2 * exact.norm()
        ratio = float((ours[name] - exact).norm() / allowed)
        if not ratio <= 1:
            raise SystemExit(f"gradient check failed, no time reported: {name}: {ratio:.2f} of the allowed error")
        worst = max(worst, ratio)
    if not ours.keys() == own.keys() == truth.keys():
        raise SystemExit("gradient check failed, no time reported: other parameters have gradients")
    return f"{len(truth)} gradients, at most {worst:.2f} of the allowed error against float64"


def measure(dropout: float, budget: float, seed: int) -> dict[str, Any]:
    """Checks, counts bytes, then times."""
    checked = check(seed)
    models, ids = variants(dropout, seed), batch(seed)
    saved = {name: memory_of(functools.partial(loss, model, ids)).lasting for name, model in models.items()}
    seconds = take_turns({name: functools.partial(step, model, ids) for name, model in models.items()}, budget)
    times = {name: summary(found) for name, found in seconds.items()}
    return {
        "case": "lora-4x1024",
        "dtype": "bfloat16, adapters float32",
        "adapter_dropout": dropout,
        "check": checked,
        "live_bytes": saved,
        "seconds": times,
        "converted_over": {n: times[CONVERTED]["median"] / t["median"] for n, t in times.items() if n != CONVERTED},
        "goal": GOAL,
        "environment": environment.describe(),
    }


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    lines = [
        f"# LoRA, adapter dropout {result['adapter_dropout']}",
        "",
        "Llama of 4 layers, C 1024, F 2752, 16 heads, bfloat16 and frozen; rank 16 in float32 on q, v, o, gate, down; "
        f"{BATCH} × {TOKENS} tokens; forward, loss and backward.",
        "",
        "| variant | median s | p20 | p80 | alive after forward MiB | converted takes |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in result["seconds"].items():
        ratio = result["converted_over"].get(name)
        goal = f" (goal ≤ {GOAL:.2f}×)" if name == CHECKPOINTED else ""
        lines.append(
            f"| {name} | {row['median']:.3f} | {row['p20']:.3f} | {row['p80']:.3f} | "
            f"{result['live_bytes'][name] / 2**20:.1f} | {f'{ratio:.2f}×{goal}' if ratio else ''} |"
        )
    return page(lines, result, f"{interleaved(result)} Checked first: {result['check']}.")


def main() -> None:
    parser = command_line(__doc__, 90.0)
    parser.add_argument("--dropout", type=float, default=0.0, help="of the adapters' inputs")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result = measure(arguments.dropout, arguments.budget, arguments.seed)
    write(result, markdown, arguments, "lora-4x1024", "dropout" if arguments.dropout else "")


if __name__ == "__main__":
    main()
