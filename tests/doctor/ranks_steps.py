"""What each of two ranks does in the doctor's tests."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import ckptfused
from ckptfused.doctor import doctor
from tests.doctor import models
from tests.models.distributed_runs import batch, shard
from tests.models.small import llama


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


def fsdp1(model: Any, original_parameters: bool = True) -> Any:
    """Each layer in a unit of its own; parameters in the optimizer are the model's or flat ones."""
    wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=wrap, use_orig_params=original_parameters, device_id=torch.device("cpu")
    )


def under_fsdp1(rank: int, right: bool, original_parameters: bool) -> None:
    """Wrappers in FSDP1's units, as Trainer's `fsdp` with activation checkpointing sets them."""
    model = model_of()
    dropout_in(model.model.layers[1])
    whole = fsdp1(model, original_parameters)
    wrap = functools.partial(checkpoint_wrapper, preserve_rng_state=right)
    apply_activation_checkpointing(whole, wrap, lambda module: isinstance(module, LlamaDecoderLayer))
    torch.manual_seed(7 + rank)
    first = step(whole, rank)
    torch.manual_seed(7 + rank)
    found = doctor(whole, batch(rank))
    if right:
        assert not [f for f in found if f.severity != "advice"], found
        assert found.certificate.startswith("Certificate"), found
        assert all(map(torch.equal, first, step(whole, rank)))
    else:
        errors = found.of("error")
        assert {f.place for f in errors} == {"model.layers.1.mlp.act_fn.1"}, found
        assert any("gradients are off by" in f.text for f in errors)


def certified(rank: int, how: str, around: str) -> None:
    """A step of sharded and replicated models, after which training goes on as without the doctor."""
    model = model_of(0.25)
    if how == "converted":
        ckptfused.convert(model)
    else:
        model.gradient_checkpointing_enable()
    whole = {"fsdp2": shard, "ddp": DistributedDataParallel, "fsdp1": fsdp1}[around](model)
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
    grads = [p.grad for p in model.parameters() if p.grad is not None and p.grad.numel()]
    return [(g.to_local() if hasattr(g, "to_local") else g).clone() for g in grads]


def differing(rank: int) -> None:
    model = model_of()
    ckptfused.convert(model, keep="inputs" if rank == 0 else "all")
    found = doctor(model)
    assert [(f.severity, f.place) for f in found][:1] == [("error", "model.layers.0")], found
    assert "ranks differ: rank 0 has" in found[0].text and "rank 1 has" in found[0].text
    ckptfused.convert(model)
    assert doctor(model).healthy


def at_fault_on_one(rank: int, certain: bool) -> None:
    """A fault of rank 1, whose gradients rank 0 averages: both take as many steps, and name it."""
    torch.manual_seed(0)
    if certain:
        layer: Any = models.Layer(models.DropsOnRank(rank == 1))
    else:
        layer = models.Advances(map(float, itertools.count(1)) if rank == 1 else itertools.repeat(1.0))
    model = DistributedDataParallel(models.Stack([models.Layer(), layer], models.torch_checkpoint()))
    found = doctor(model, models.batch() + rank)
    words = "DropsOnRank drew its random numbers anew" if certain else "its own code computed other values for backward"
    place = "module.layers.1.piece" if certain else "module.layers.1"
    errors = [(f.place, f.text.startswith("on rank 1, "), words in f.text) for f in found.of("error")]
    assert errors == [(place, rank == 0, True)], found
    torch.distributed.barrier()
