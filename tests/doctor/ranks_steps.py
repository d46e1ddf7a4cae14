"""What each of two ranks does in the doctor's tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import ckptfused
from ckptfused.doctor import doctor
from tests.convert.distributed_steps import batch, shard
from tests.convert.small import llama


def model_of(p: float = 0.0) -> Any:
    model = llama(p=p)
    model.config.use_cache = False
    return model


def dropout_in(layer: Any) -> None:
    layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, nn.Dropout(0.5))


def as_accelerate(rank: int, right: bool) -> None:
    """FSDP2 with the wrapper as accelerate's path sets it, and with random states."""
    model = model_of()
    dropout_in(model.model.layers[1])
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer, preserve_rng_state=right)
    shard(model)
    found = doctor(model, batch(rank))
    if right:
        assert found.healthy and found.certificate.startswith("Certificate"), found
        return
    errors = [(f.place, f.text) for f in found.of("error")]
    assert {place for place, _ in errors} == {"model.layers.1.mlp.act_fn.1"}, found
    assert any("Dropout drew its random numbers anew" in text and "gradients are off by" in text for _, text in errors)


def certified(rank: int, how: str, around: str) -> None:
    """A step of sharded and replicated models, after which training goes on as without the doctor."""
    model = model_of(0.25)
    if how == "converted":
        ckptfused.convert(model)
    else:
        model.gradient_checkpointing_enable()
    whole = shard(model) if around == "fsdp2" else DistributedDataParallel(model)
    torch.manual_seed(7 + rank)
    first = step(whole, rank)
    torch.manual_seed(7 + rank)
    found = doctor(whole, batch(rank))
    assert not [f for f in found if f.severity != "advice"], found
    assert found.certificate.startswith("Certificate"), found
    second = step(whole, rank)
    assert all(map(torch.equal, first, second)) and len(first) > 10


def step(model: Any, rank: int) -> list[torch.Tensor]:
    model.zero_grad()
    model(**batch(rank)).loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [(g.to_local() if hasattr(g, "to_local") else g).clone() for g in grads]


def differing(rank: int) -> None:
    model = model_of()
    ckptfused.convert(model, keep="inputs" if rank == 0 else "all")
    found = doctor(model)
    assert [(f.severity, f.place) for f in found][:1] == [("error", "model.layers.0")], found
    assert "ranks differ: rank 0 has" in found[0].text and "rank 1 has" in found[0].text
    ckptfused.convert(model)
    assert doctor(model).healthy
