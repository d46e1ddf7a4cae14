"""Plans for training Llama-3-8B within the memory of one card, found without a GPU and without weights.

python examples/budget.py
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console

import ckptfused
from ckptfused.cli.configurations import MODELS
from ckptfused.cli.language_models import UNCONVERTED_MODEL, build_language_model
from ckptfused.profiler import adamw

# Less than the cards have, by the CUDA context and fragmentation.
CARDS = {"h200": ("one H200", "130GiB"), "h100": ("one card of 80 GB", "74GiB")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--card", choices=[*CARDS], help="one of them alone; default: both")
    arguments = parser.parse_args()
    console = Console()
    ids = torch.empty(arguments.batch, arguments.tokens, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    for trained, lora in (("all weights", None), ("LoRA", 16)):
        model = build_language_model(MODELS["llama-3-8b"], UNCONVERTED_MODEL, torch.bfloat16, lora)
        for device in [arguments.card] if arguments.card else CARDS:
            card, budget = CARDS[device]
            with console.status(f"{trained}, {card}: steps without data …") as status:
                plan = ckptfused.plan(model, batch, budget, adamw, device, said=status.update)
            print(f"{trained}, {card}\n{plan}\n")
            plan.plot(f"plan-{device}.png" if lora is None else f"plan-{device}-lora.png")


if __name__ == "__main__":
    main()
