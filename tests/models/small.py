"""Small Llama models, plain and converted, and what the converted ones do at each call."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import ckptfused
from ckptfused import CheckpointPolicy
from ckptfused.layer.parts import Reason
from ckptfused.models.forward import ConvertedForward
from tests.models.zoo import randomize
from tests.models.zoo_llama import SIZES


def llama(implementation: str = "sdpa", p: float = 0.0, seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """A plain model with two layers, in train mode."""
    config = LlamaConfig(**{**SIZES, **options}, attention_dropout=p, attn_implementation=implementation)
    return randomize(LlamaForCausalLM(config), seed).train()


def twins(implementation: str = "sdpa", p: float = 0.0, **options: Any) -> tuple[Any, Any]:
    """A plain model and its converted copy, all layers of which are fused."""
    plain = llama(implementation, p, **options)
    converted = copy.deepcopy(plain)
    report = ckptfused.convert(converted)
    assert report.fused == len(plain.model.layers), str(report)
    return plain, converted


def segmented(model: Any, policy: CheckpointPolicy | None = None) -> Any:
    """The model, converted: as one segment, if nothing else is said."""
    ckptfused.convert(model, policy=policy or CheckpointPolicy.whole_model())
    return model


@contextlib.contextmanager
def unfused() -> Iterator[list[Reason]]:
    """A context that lists why calls were not fused."""
    reasons: list[Reason] = []
    plain = ConvertedForward.unfused

    def record(self: ConvertedForward, reason: Reason, args: Any, kwargs: Any) -> Any:
        reasons.append(reason)
        return plain(self, reason, args, kwargs)

    with mock.patch.object(ConvertedForward, "unfused", record):
        yield reasons


@contextlib.contextmanager
def transformers_log() -> Iterator[list[str]]:
    """A context that lists what Hugging Face logs as a warning or worse."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}
