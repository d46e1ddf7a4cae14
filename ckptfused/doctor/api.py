"""`doctor`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from ckptfused.doctor.certificate import certify
from ckptfused.doctor.checks import CHECKS
from ckptfused.doctor.findings import Finding, Findings
from ckptfused.doctor.look import Look
from ckptfused.doctor.ranks import everyones
from ckptfused.profiler.step import TrainingStep, misspelt
from ckptfused.simulate.autocast import autocast_type
from ckptfused.simulate.devices import device_named


def doctor(
    model: nn.Module,
    batch: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    gradient_accumulation_steps: int = 1,
) -> Findings:
    """What is wrong with a model's activation checkpointing, whoever does it, and what could be better.

    By looking alone, settings that give wrong gradients, replay twice, or cost more than they save. With a batch, by
    proof: one step (forward and backward) as configured and one that saves everything, from the same weights, batch and
    random states, whose loss, gradients and buffers have to agree in every bit; where they do not, the layer in which a
    replay first computed something else, and why. At most three steps, more only where a step that saves everything
    does not fit in memory. docs/doctor.md lists all findings.

    batch: a dict for `model(**batch)`, a tuple for `model(*batch)`, or the one argument; the loss is the output's
    `loss`, or the output itself. optimizer: it takes no step, and is for the memory that its state needs.
    gradient_accumulation_steps: as in `ckptfused.profile`, for the memory that gradients need.
    Compiled modules run as they were written. Where processes are joined (torch.distributed) it is a collective.

    **Saves** a copy of the parameters and of one step's gradients in host memory, for as long as it runs. The model,
    its buffers, gradients and attributes, the optimizer, and all generators (PyTorch's, Python's, NumPy's) are
    afterwards what they were, to the bit, also where something raises.
    **Raises** `TypeError` if `model` is no module; what the model raises for this batch without any checkpointing.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    on_cpu = {p.device.type for p in model.parameters()} == {"cpu"}
    device = torch.device("cpu") if on_cpu else device_named("h200")  # the same memory on all GPUs
    lower = autocast_type(None, "cpu" if on_cpu else "cuda")
    look = Look(model, TrainingStep(batch, optimizer, device, lower, gradient_accumulation_steps))
    found: list[Finding] = [finding for check in CHECKS for finding in check(look)]
    why = next(filter(None, everyones(_why_no_proof(look))), None)
    if why is not None:
        return Findings(found, f"No certificate: {why}.")
    try:
        proved, text = certify(model, look.step, look.name)
    except Exception as error:
        if (said := misspelt(model, batch)) and hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(said.removeprefix(". "))
        raise
    certified = text.startswith("Certificate:")
    return Findings([*(one.refuted() if certified else one for one in found), *proved], text)


def _why_no_proof(look: Look) -> str | None:
    if look.step.batch is None:
        return "without a batch nothing runs"
    if any(p.is_meta for p in look.model.parameters()):
        return "the model is on the meta device, without values"
    if any(isinstance(m, LazyModuleMixin) and m.has_uninitialized_params() for m in look.model.modules()):
        return "the model has parameters that its first call will make"
    if not look.trained:
        return "no parameter requires a gradient"
    return None
