"""`profile`: what a training step of a model needs."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from ckptfused.models.release import releases_of
from ckptfused.profiler.measure import measured
from ckptfused.profiler.predict import predicted, simulated
from ckptfused.profiler.result import Profile
from ckptfused.profiler.step import Batch, MakeOptimizer, TrainingStep, check_model
from ckptfused.simulate.autocast import Autocast, autocast_type, outside
from ckptfused.simulate.devices import NAMES, device_named
from ckptfused.spec.checks import check_integer


def profile(
    model: nn.Module,
    batch: Batch,
    optimizer: Optimizer | MakeOptimizer | None = None,
    device: str | torch.device | None = None,
    autocast: Autocast = None,
    gradient_accumulation_steps: int = 1,
    release: bool = False,
) -> Profile:
    """The memory and time of one training step, by layer: forward, loss, backward and the optimizer's step.

    model: as it trains: converted, checkpointed or plain, with adapters or without; on any device, for a prediction on
    the meta device too. batch: a dict for `model(**batch)`, with labels; a tuple or list for `model(*batch)`; or the
    one tensor that the model takes. Of a prediction its shapes and types count, and what small tensors hold. The loss
    is the output's `loss`, or the output itself, or its sum.
    optimizer: the one that trains the model; or what makes one of a list of parameters, such as `torch.optim.AdamW`;
    None: there is none. It is a step in the midst of training: the optimizer has its state, gradients are made anew.
    device: `"h200"`, `"h100"`, `"a100-80"`, `"l40s"`, `"rtx4090"` or `"cpu"`: the step is predicted for it on meta
    tensors. None: it is measured, where the model's parameters are, a CPU or a CUDA GPU, in five steps.
    autocast: the type of `torch.autocast` around the forward pass, `torch.bfloat16` or `torch.float16`, or its name, as
    the Trainer's `bf16=True` has it; None: that of an autocast that is on around the call, else only what the model
    itself turns on. (`torch.autocast("cuda")` around the call turns itself off where there is no CUDA.)
    gradient_accumulation_steps: batches, each like `batch`, whose gradients add up before the optimizer's step, as the
    Trainer has it. From the second on all gradients are there when forward begins: that batch is profiled, and with any
    number above 1 needs the same memory. So does each step after `optimizer.zero_grad(set_to_none=False)`.
    release: whether the optimizer updates each weight in backward, as after `convert(model, release=optimizer)`; of a
    model that was converted so it does. Gradients are then among what a layer's backward holds for itself.

    Memory is predicted exactly to what the allocator is asked for, but for what an op of PyTorch's allocates and frees
    within itself, and for workspaces and fragmentation. Attention by `F.scaled_dot_product_attention` is a flash
    kernel's. Time is a roofline's (`simulate.devices`), for the "cpu" what ops take that run alone
    (`simulate.cpu_timings`). Model and optimizer are left as they were.

    **Raises** `TypeError` for what is no module, `ValueError` for a batch without labels or a model of which nothing is
    trained, and of a prediction for a model that cannot be copied, or that
    does not run without data outside of its layers. A layer that does not is named in `notes`.
    """
    check_model(model)
    check_integer("gradient_accumulation_steps", gradient_accumulation_steps, 1)
    where = _device_of(model) if device is None else device_named(device)
    lower = autocast_type(autocast, where.type if isinstance(where, torch.device) else where.kind)
    if found := releases_of(model):
        optimizer, release = found[0].optimizer, True
    return profiled(model, TrainingStep(batch, optimizer, where, lower, gradient_accumulation_steps, release=release))


def profiled(model: nn.Module, step: TrainingStep) -> Profile:
    """The profile of a step: measured on one of PyTorch's devices, predicted for another."""
    if isinstance(step.device, torch.device):
        with outside(step.kind):
            return measured(model, step, step.device)
    with simulated(model, step) as (meta_copy, on_meta):
        return predicted(meta_copy, on_meta)


def _device_of(model: nn.Module) -> torch.device:
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    if len(devices) != 1 or torch.device("meta") in devices:
        places = ", ".join(sorted(map(str, devices))) or "none"
        raise ValueError(
            f"device: expected one of {', '.join(NAMES)}, or a model on one device, got None and parameters on {places}"
        )
    return devices.pop()
