"""The memory of whole training steps of Llama-3-8B, Qwen3-8B and Gemma-2-9B, predicted on the meta device.

Peak by part at 8,192 tokens in bfloat16, all weights with AdamW and LoRA of rank 16; the longest sequence in 80 GiB.
Nothing is measured; tests/policy holds the same predictions to PyTorch's allocator on small models. Writes
benchmarks/results/predicted-steps-<tokens>.json and .md. Needs transformers and peft.

    python benchmarks/predicted_steps.py
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import environment
from benchmarks.commands import RESULTS, page
from ckptfused.cli.configurations import MODELS
from ckptfused.cli.language_models import VARIANTS, Trained
from ckptfused.cli.longest_context import longest

GIB = 2**30
LORA = 16
MEMORY = 80 * GIB
PARTS = ("weights", "optimizer", "gradients", "activations", "loss_head", "transients")


def predict(name: str, lora: int | None, variant: str, tokens: int) -> dict[str, Any]:
    """One row."""
    model = Trained(MODELS[name], variant, torch.bfloat16, lora)
    return model.step(tokens).sizes() | {"longest": longest(model.step, MEMORY).tokens}


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    lines = [
        f"# Predicted steps at {result['tokens']:,} tokens, bfloat16",
        "",
        "Batch 1, fused AdamW, on a GPU; GiB at the peak, by part. Longest: tokens that fit into 80 GiB, a multiple "
        "of 256. Without the CUDA context, workspaces of libraries and fragmentation. Hugging Face's Gemma 2 has eager "
        "attention.",
    ]
    for title, rows in result["models"].items():
        lines += [
            "",
            f"## {title}",
            "",
            "| variant | peak | weights | optimizer | gradients | activations | loss head | transients | at "
            "| longest |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for variant, row in rows.items():
            sizes = " | ".join(f"{row[part] / GIB:,.2f}" for part in ("peak", *PARTS))
            best = f"{row['longest']:,}" if row["longest"] else "none"
            lines.append(f"| `{variant}` | {sizes} | {row['moment']} | {best} |")
    return page(lines, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    models: dict[str, Any] = {}
    for name in MODELS:
        for lora in (None, LORA):
            title = f"{name}, {'all weights' if lora is None else f'LoRA of rank {lora}'}"
            print(title, flush=True)
            models[title] = {variant: predict(name, lora, variant, arguments.tokens) for variant in VARIANTS}
    result = {"tokens": arguments.tokens, "models": models, "environment": environment.describe()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = f"predicted-steps-{arguments.tokens}"
    (arguments.out / f"{stem}.json").write_text(json.dumps(result, indent=2) + "\n")
    (arguments.out / f"{stem}.md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
