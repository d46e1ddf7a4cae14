"""A predicted step against a measured one on this CPU, for eight kinds of models: bytes saved, peak, time.

Each model is predicted on meta tensors and runs here, at two widths, in float32, with AdamW; then whether the order of
ways of training one by their predicted time is that of the measured. Bytes do not depend on the machine's load, times
do: run it on quiet cores. Writes benchmarks/results/profile-error.json and .md. Needs transformers and peft.

    python benchmarks/profile_error.py --label sapphirerapids
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from benchmarks import environment
from benchmarks.commands import command_line, write
from benchmarks.profiled_models import Made, models
from ckptfused import convert, profile
from ckptfused.policy import Profile

WIDTHS = (256, 512)
WAYS = ("plain", "checkpointed", "inputs", "mid", "attention", "all")


def compared(model: nn.Module, batch: Any) -> tuple[Profile, Profile]:
    """Predicted and measured, with AdamW."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    return profile(model, batch, optimizer, "cpu"), profile(model, batch, optimizer)


def row(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Both, and how far the first is off."""
    predicted, measured = compared(model, batch)
    found: dict[str, Any] = {"moment": measured.moment}
    for name in ("saved", "peak", "above_state", "forward_seconds", "backward_seconds", "seconds"):
        ours, theirs = getattr(predicted, name), getattr(measured, name)
        found[name] = {"predicted": ours, "measured": theirs, "error": ours / theirs - 1}
    return found


def way(name: str, make: Any) -> Made:
    """A model as one of `WAYS` trains it."""
    model, batch = make()
    if name == "checkpointed":
        model.gradient_checkpointing_enable()
    elif name != "plain":
        convert(model, name)
    return model, batch


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    lines = [
        "# Predicted steps against measured ones",
        "",
        "Float32, AdamW, batches of 2 × 128 tokens or 4 × 3 × 64 × 64 pixels (ResNet-18: 8); error of the prediction. "
        "Measured: the median of three steps, the allocator's events of another.",
        "",
        "| model | width | saved, MiB | error | peak, MiB | error | step, ms | error | forward | backward |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for width, rows in result["models"].items():
        for name, found in rows.items():
            sizes = " | ".join(
                f"{found[part]['measured'] / 2**20:,.2f} | {found[part]['error']:+.2%}" for part in ("saved", "peak")
            )
            times = [f"{found[f'{part}seconds']['error']:+.0%}" for part in ("", "forward_", "backward_")]
            step = f"{found['seconds']['measured'] * 1e3:,.1f}"
            lines.append(f"| {name} | {width} | {sizes} | {step} | {' | '.join(times)} |")
    lines += ["", "| Llama-style, 512 wide | step, ms | predicted |", "|---|---|---|"]
    for name, found in result["ways"].items():
        seconds = found["seconds"]
        lines.append(f"| {name} | {seconds['measured'] * 1e3:,.1f} | {seconds['predicted'] * 1e3:,.1f} |")
    orders = [
        sorted(WAYS, key=lambda name: result["ways"][name]["seconds"][kind]) for kind in ("predicted", "measured")
    ]
    said = "that of the measured" if orders[0] == orders[1] else f"not that of the measured, {', '.join(orders[1])}"
    lines += ["", f"Their order by predicted time, {', '.join(orders[0])}, is {said}."]
    return "\n".join([*lines, "", environment.footer(result["environment"]), ""])


def main() -> None:
    parser = command_line(__doc__, budget=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found: dict[str, Any] = {}
    for width in WIDTHS:
        found[str(width)] = {}
        for name, make in models(width // 64).items():
            print(name, width, flush=True)
            torch.manual_seed(arguments.seed)
            found[str(width)][name] = row(*make())
    llama = models(8)["llama"]
    ways = {name: row(*way(name, llama)) for name in WAYS}
    result = {"models": found, "ways": ways, "environment": environment.describe()}
    write(result, markdown, arguments, "profile-error")


if __name__ == "__main__":
    main()
