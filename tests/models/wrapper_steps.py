"""What each of two ranks does with FSDP1's and DDP's wrappers, and with tensor parallelism."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    fully_shard,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ckptfused
from tests.models import zoo_decoders, zoo_encoders, zoo_llama  # noqa: F401
from tests.models.compare import all_close, close, run, train
from tests.models.distributed_runs import alone, batch, fused_steps
from tests.models.ranks import RANKS
from tests.models.small import llama, unfused
from tests.models.zoo import ZOO, randomize


def fsdp1(
    rank: int, first: bool, original_parameters: bool, p: float = 0.0, policy: Any = None, name: str = "llama"
) -> None:
    model: Any = randomize(ZOO[name].make(p, "sdpa")).train()
    plain = copy.deepcopy(model)
    kinds = {type(layer) for layer in ZOO[name].layers(model)}
    if first:
        assert ckptfused.convert(model, policy=policy).fused == 2
    wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=kinds)
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=wrap, use_orig_params=original_parameters, device_id=torch.device("cpu")
    )
    if not first:
        ckptfused.convert(wrapped, policy=policy)
    if p > 0:
        ckptfused.convert(plain)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (wrapped, plain)]
    for _ in range(2):
        torch.manual_seed(rank)
        with unfused() as reasons:
            run(wrapped, batch(rank))
        assert not reasons, reasons
        optimizers[0].step()
        alone(plain)
        optimizers[1].step()
    with FullyShardedDataParallel.summon_full_params(wrapped):
        got = {name.replace("_fsdp_wrapped_module.", ""): t.detach() for name, t in wrapped.named_parameters()}
        close(got, {name: t.detach() for name, t in plain.named_parameters()}, 1e-5)


def ddp(rank: int, first: bool, p: float = 0.0, **options: Any) -> None:
    model = llama(p=p)
    plain = copy.deepcopy(model)
    if first:
        ckptfused.convert(model)
    wrapped = DistributedDataParallel(model, **options)
    if not first:
        ckptfused.convert(wrapped)
    if p > 0:
        ckptfused.convert(plain)
    all_close(fused_steps(wrapped, rank), train(plain, alone), 1e-5)


def ddp_chunked_loss(rank: int) -> None:
    """Micro-batches added up without a reduction, the last with one; of one of them no target counts."""
    model = llama()
    plain = copy.deepcopy(model)
    ckptfused.convert(model, loss="chunked")
    wrapped = DistributedDataParallel(model)
    none = batch(rank) | {"labels": torch.full((3, 19), -100)}
    with wrapped.no_sync():
        wrapped(**none).loss.backward()
        wrapped(**batch(rank)).loss.backward()
    out = wrapped(**batch(rank))
    assert out.logits is None
    out.loss.backward()
    want = alone(plain)
    got = {name: p.grad / 2 for name, p in model.named_parameters() if p.grad is not None}
    close(got, {name: want[name] for name in got}, 1e-5)
    assert len(got) == len(want) - 1  # the loss


def tensor_parallel(rank: int, first: bool, sharded: bool) -> None:
    model = llama()
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "tp"))
    plan: Any = {name: ColwiseParallel() for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
    plan["self_attn.o_proj"] = RowwiseParallel()

    def parallelize() -> None:
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tp"], plan)
            if sharded:
                fully_shard(layer, mesh=mesh["dp"])
        if sharded:
            fully_shard(model, mesh=mesh["dp"])

    if first:
        ckptfused.convert(model)
    parallelize()
    with pytest.raises(ValueError, match=r"q_proj.*ckptfused runs no tensor-parallel layers"):
        run(model, batch(rank)) if first else ckptfused.convert(model)
    assert first or not any("forward" in vars(module) for module in model.modules())
