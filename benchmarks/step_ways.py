"""The ways to train a model that `step.py` compares: PyTorch's, Hugging Face's, and those of this library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy as Decision
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import ckptfused
from benchmarks.step_batches import Batch
from benchmarks.step_models import layers_of, loss_of
from ckptfused import CheckpointPolicy
from ckptfused.cli.models import TorchCheckpoint
from ckptfused.spec import KEEP_PRESETS

Loss = Callable[[Any, Batch], Tensor]
Way = Callable[[Any, Batch], Loss]
"""Changes a model, in place, to be trained this way on batches like this; returns what makes its loss."""

EAGER, CHECKPOINT, OURS = "eager", "checkpoint", "ckptfused"
BUDGETS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Shares of the activations that torch.compile may save."""
aten = torch.ops.aten
PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}
"""What selective checkpointing saves: what costs time to make again."""


def eager(model: Any, batch: Batch) -> Loss:
    return loss_of


def checkpointed(model: Any, batch: Batch, every: int = 1) -> Loss:
    """Each layer, or every so many; a model of Hugging Face's by its own means."""
    theirs = next((m for m in model.modules() if hasattr(m, "activation_checkpointing_enable")), None)
    if theirs is not None:
        theirs.activation_checkpointing_enable(every_n_layers=every)
    else:
        layers = layers_of(model)
        for i in range(0, len(layers), every):
            layers[i] = TorchCheckpoint(layers[i])
    return loss_of


def _decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Decision:
    return Decision.MUST_SAVE if operator in PRODUCTS else Decision.PREFER_RECOMPUTE


def selective(model: Any, batch: Batch) -> Loss:
    """Each layer, but for its products and attention, which are saved."""
    layers = layers_of(model)
    for i, layer in enumerate(layers):
        layers[i] = TorchCheckpoint(layer, context_fn=partial(create_selective_checkpoint_contexts, _decide))
    return loss_of


def compiled(model: Any, batch: Batch, before: Way = eager, budget: float = 1.0) -> Loss:
    """The whole model and its loss by torch.compile, trained as `before` says and within a budget of activations."""
    loss = before(model, batch)
    # Dynamo keeps its graphs with a function's code, and one model's may serve another: each has code of its own.
    found = torch.compile(FunctionType(loss.__code__.replace(), loss.__globals__), dynamic=False)

    def within(model: Any, batch: Batch) -> Tensor:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return found(model, batch)

    return within


def converted(model: Any, batch: Batch, **options: Any) -> Loss:
    """By this library."""
    report = ckptfused.convert(model, **options)
    if any(layer.path == "generic" for layer in report.layers):
        raise SystemExit(f"expected every layer to be fused, whole or in part:\n{report}")
    return loss_of


def in_segments(model: Any, batch: Batch, layers: int) -> Loss:
    """Joined by this library, so many layers to a checkpoint."""
    policy = CheckpointPolicy.segments(len(layers_of(model)) // layers)
    ckptfused.convert(model, policy=policy)
    return loss_of


def planned(model: Any, batch: Batch, share: float) -> Loss:
    """By this library's plan for a budget so far from the least that it can do to what the fastest plan needs."""
    front = ckptfused.plan(model, batch, budget=2**50).front
    least, most = front[0].peak, front[-1].peak
    found = ckptfused.plan(model, batch, budget=int(least + share * (most - least)))
    ckptfused.convert(model, policy=found.policy)
    return loss_of


def base_of(model: Any) -> Any:
    """A model without PEFT's wrapper around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def torch_chunked_loss(model: Any, batch: Batch) -> Tensor:
    """PyTorch's loss that makes logits in chunks: by hand, no model of Hugging Face's calls it."""
    base = base_of(model)
    x = base.base_model(input_ids=batch["input_ids"]).last_hidden_state[:, :-1].flatten(0, 1)
    options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
    chunked: Any = torch.nn.functional.linear_cross_entropy  # type: ignore[attr-defined]
    return chunked(x, base.lm_head.weight, batch["labels"][:, 1:].flatten(), options=options)


def torch_chunked(model: Any, batch: Batch) -> Loss:
    """Hugging Face's checkpointing, and PyTorch's chunked loss."""
    checkpointed(model, batch)
    return torch_chunked_loss


def trl_head(model: Any, batch: Batch) -> Loss:
    """Hugging Face's checkpointing, and TRL's head and loss in one, which its trainers use."""
    from trl.trainer.utils import add_fused_lm_head

    checkpointed(model, batch)
    add_fused_lm_head(base_of(model))
    return lambda model, batch: model(**batch, fused_lm_head=True).loss


def liger(model: Any, batch: Batch) -> Loss:
    """Hugging Face's checkpointing, and Liger's kernels as its Trainer applies them: to modules of the model, and to
    functions of transformers."""
    from transformers.integrations.liger import apply_liger_kernel

    checkpointed(model, batch)
    apply_liger_kernel(model, None)
    return loss_of


def ways(whole: bool, causal: bool, alone_on_a_gpu: bool = False) -> dict[str, Way]:
    """By the name in tables; of whole models with a loss over a vocabulary, ours make it in chunks too. alone_on_a_gpu:
    whether each has a process of its own there, in which it may change transformers."""
    return dict(_ways(whole, causal, alone_on_a_gpu))


def _ways(whole: bool, causal: bool, alone_on_a_gpu: bool) -> Iterator[tuple[str, Way]]:
    yield EAGER, eager
    yield CHECKPOINT, checkpointed
    yield f"{CHECKPOINT}, every 2", partial(checkpointed, every=2)
    yield f"{CHECKPOINT}, selective", selective
    if causal and hasattr(torch.nn, "LinearCrossEntropyOptions"):
        yield f"{CHECKPOINT}, torch's chunked loss", torch_chunked
    if causal and find_spec("trl") is not None:
        yield f"{CHECKPOINT}, TRL's loss", trl_head
    if causal and alone_on_a_gpu and find_spec("liger_kernel") is not None:
        yield f"{CHECKPOINT}, Liger", liger
    yield "compile", compiled
    yield f"compile + {CHECKPOINT}", partial(compiled, before=checkpointed)
    for budget in BUDGETS:
        yield f"compile, budget {budget}", partial(compiled, budget=budget)
    for keep in KEEP_PRESETS:
        yield f"{OURS} {keep}", partial(converted, keep=keep)
    yield f"{OURS} inputs, scratch 4 MiB", partial(converted, keep="inputs", scratch="4MiB")
    yield f"{OURS} segments of 2", partial(in_segments, layers=2)
    if whole:
        yield f"{OURS} inputs, chunked loss", partial(converted, keep="inputs", loss="chunked")
        yield f"{OURS} attention, chunked loss", partial(converted, keep="attention", loss="chunked")
    for share in (0.25, 0.5):
        yield f"{OURS} planned, {share:.0%} of the way", partial(planned, share=share)
