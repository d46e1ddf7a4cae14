"""What `ckptfused.doctor` costs beside a training step: time of its certificate and of its look, and memory.

A small Llama under PyTorch's checkpoint, under Hugging Face's and converted, all sound, and one whose dropout a wrapper
draws anew, where a third step is needed. Beside each: a step as configured, and one that saves everything. Needs
transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ckptfused
from benchmarks.benchmark import Benchmark, Column, Rows, Steps, mib, number, option
from benchmarks.llama import LlamaSizes, LlamaStep, batch_of, described, make
from benchmarks.memory import memory_of
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


@dataclass(frozen=True, kw_only=True)
class CertificateSizes(LlamaSizes):
    """The model, its batch, and who checkpoints it."""

    by: str = option(*MODELS)


def variants(sizes: CertificateSizes) -> Steps:
    """What is timed of one model."""
    batch, model = batch_of(sizes), make(sizes)
    MODELS[sizes.by](model)
    step, asked = LlamaStep(model, batch), TrainingStep(batch, None, torch.device("cpu"))

    def saving() -> None:
        with everything_saved(model):
            step()

    return {
        STEP: step,
        SAVING: saving,
        CERTIFICATE: lambda: certify(model, asked, Look(model, asked).name),
        WHOLE: lambda: ckptfused.doctor(model, batch),
    }


def check(sizes: CertificateSizes, steps: Any) -> str:
    """Raises unless the doctor finds what is there."""
    sound, found = MODELS[sizes.by] is not faulty, ckptfused.doctor(steps[STEP].model, steps[STEP].batch)
    if found.healthy != sound or found.certificate.startswith("Certificate") != sound:
        raise SystemExit(f"{sizes.by}: no time reported of a certificate that is wrong:\n{found}")
    return f"the certificate is {'given' if sound else 'refused'}"


def figures(sizes: CertificateSizes, steps: Any) -> Rows:
    """Bytes at the peak of each, above weights."""
    step: LlamaStep = steps[STEP]
    found: Rows = {}
    for name, call in steps.items():
        step.model.zero_grad(set_to_none=True)
        found[name] = {"peak": memory_of(call).peak, "weights": step.weights()}
    return found


BENCHMARK = Benchmark(
    name="certificate",
    doc=__doc__,
    sizes=CertificateSizes(),
    variants=variants,
    check=check,
    figures=figures,
    columns=(
        number("least, s", "least", ".3f"),
        Column("in steps", lambda row, rows: f"{row['least'] / rows[STEP]['least']:.2f}"),
        mib("peak beside weights", "peak", ",.0f"),
        mib("weights", "weights"),
    ),
    case=lambda sizes: sizes.by,
    stem=lambda sizes: f"certificate-{sizes.layers}x{sizes.width}",
    shape=lambda sizes, rows: described(sizes, "forward and backward, by who checkpoints"),
    budget=20.0,
)
