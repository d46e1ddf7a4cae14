"""What `ckptfused.doctor` costs beside a training step: time of its certificate and of its look, and memory.

A small Llama under PyTorch's checkpoint, under Hugging Face's and converted, all sound, and one whose dropout a wrapper
draws anew, where a third step is needed. Beside each: a step as configured, and one that saves everything. What is
timed takes turns within one run; the certificate is quoted in steps as configured. Writes
benchmarks/results/certificate-<layers>x<width>[-<label>].json and .md. Needs transformers.

    python benchmarks/certificate.py
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ckptfused
from benchmarks.commands import page
from benchmarks.llama import MIB, Sizes, batch_of, command, make, step_of
from benchmarks.memory import memory_of
from benchmarks.step_time import summary, take_turns
from ckptfused.doctor.certificate import certify
from ckptfused.doctor.look import Look
from ckptfused.doctor.saving import everything_saved
from ckptfused.profiler.step import TrainingStep

STEP, SAVING, CERTIFICATE, WHOLE = "step", "saving everything", "certificate", "doctor"


def wrapped(model: Any, **options: Any) -> None:
    """Each layer under `checkpoint_wrapper`."""
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer, **options)


def faulty(model: Any) -> None:
    """A fault: dropout whose random state nobody replays."""
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, nn.Dropout(0.1))
    wrapped(model, preserve_rng_state=False)


MODELS: dict[str, Callable[[Any], object]] = {
    "PyTorch": wrapped,
    "Hugging Face": lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}),
    "ckptfused": ckptfused.convert,
    "PyTorch, without random states": faulty,
}


def measure(sizes: Sizes, arguments: Namespace) -> dict[str, Any]:
    """Times and memory of each model's steps and certificates."""
    batch, rows = batch_of(sizes, arguments.seed), {}
    for name, checkpointed in MODELS.items():
        model = make(sizes, arguments.seed)
        checkpointed(model)
        sound = checkpointed is not faulty
        found = ckptfused.doctor(model, batch)
        if found.healthy != sound or found.certificate.startswith("Certificate") != sound:
            raise SystemExit(f"{name}: no time reported of a certificate that is wrong:\n{found}")
        calls = variants(model, batch)
        times = take_turns(calls, arguments.budget)
        rows[name] = {
            "seconds": {k: summary(taken) for k, taken in times.items()},
            "least": {k: min(taken) for k, taken in times.items()},
            "bytes": {k: peak(model, call) for k, call in calls.items()},
        }
    weights = sum(p.nbytes for p in model.parameters())
    return {"sizes": asdict(sizes), "rows": rows, "weights": weights}


def variants(model: nn.Module, batch: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """What is timed."""
    step, asked = step_of(model, batch), TrainingStep(batch, None, torch.device("cpu"))

    def saving() -> None:
        with everything_saved(model):
            step()

    return {
        STEP: step,
        SAVING: saving,
        CERTIFICATE: lambda: certify(model, asked, Look(model, asked).name),
        WHOLE: lambda: ckptfused.doctor(model, batch),
    }


def peak(model: nn.Module, call: Callable[[], object]) -> int:
    """Bytes at the peak, above weights."""
    model.zero_grad(set_to_none=True)
    return memory_of(call).peak


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    sizes = result["sizes"]
    lines = [
        f"# The certificate of a Llama with {sizes['layers']} layers, {sizes['width']} wide",
        "",
        f"Float32, {sizes['batch']} × {sizes['tokens']} tokens, forward and backward; seconds, the least of several, "
        f"and MiB at the peak beside {result['weights'] / MIB:,.1f} of weights.",
        "",
        "| checkpoints | step | saving everything | certificate | in steps | doctor | step, MiB | saving, MiB | "
        "certificate, MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        least, size = row["least"], row["bytes"]
        cells = [f"{least[k]:.3f}" for k in (STEP, SAVING, CERTIFICATE)]
        cells += [f"**{least[CERTIFICATE] / least[STEP]:.2f}**", f"{least[WHOLE]:.3f}"]
        cells += [f"{size[k] / MIB:,.0f}" for k in (STEP, SAVING, CERTIFICATE)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return page(lines, result)


def main() -> None:
    command(__doc__, 20, "certificate", measure, markdown)


if __name__ == "__main__":
    main()
