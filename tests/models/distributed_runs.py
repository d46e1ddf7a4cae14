"""Steps of models on two ranks, and of one without any distribution that they are compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from tests.models import zoo_decoders, zoo_encoders, zoo_llama  # noqa: F401
from tests.models.compare import run, train
from tests.models.ranks import RANKS
from tests.models.small import unfused
from tests.models.zoo import VOCABULARY, text_batch


def batch(rank: int) -> dict[str, Any]:
    found = text_batch()
    found["labels"] = torch.where(found["labels"] < 0, found["labels"], (found["labels"] + 3 * rank) % VOCABULARY)
    return {**found, "input_ids": (found["input_ids"] + 7 * rank) % VOCABULARY, "use_cache": False}


def full(results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients put together, under the names of the plain model; the loss averaged over the ranks."""
    found = {
        name.removeprefix("module."): t.full_tensor() if isinstance(t, DTensor) else t for name, t in results.items()
    }
    torch.distributed.all_reduce(found["loss"])
    found["loss"] /= RANKS
    return {name: t.float() for name, t in found.items()}


def alone(model: Any, seed: int = 0) -> dict[str, Tensor]:
    """The mean over the ranks' batches, without any distribution; the model has it as its gradients."""
    results = []
    for rank in range(RANKS):
        torch.manual_seed(seed + rank)
        results.append(run(model, batch(rank)))
    found: Any = {name: sum(r[name] for r in results) / RANKS for name in results[0]}
    for name, parameter in model.named_parameters():
        parameter.grad = found.get(name)
    return found


def shard(model: Any, reshard: bool = True, policy: MixedPrecisionPolicy | None = None, offload: bool = False) -> Any:
    mesh = init_device_mesh("cpu", (RANKS,))
    options: Any = {
        "mesh": mesh,
        "reshard_after_forward": reshard,
        "mp_policy": policy or MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy(),
    }
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def fused_step(model: Any, rank: int, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed + rank)
    with unfused() as reasons:
        found = run(model, batch(rank))
    assert not reasons, reasons
    return full(found)


def fused_steps(model: Any, rank: int) -> list[dict[str, Tensor]]:
    """A few steps of training."""
    return train(model, lambda one: fused_step(one, rank))
