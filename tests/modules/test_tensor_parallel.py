"""Weights and inputs in shards: tensor parallelism is refused, FSDP2 goes on working."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckptfused import (
    FusedCheckpointAttention,
    FusedCheckpointBlock,
    FusedCheckpointFFN,
    FusedCheckpointSequential,
    functional,
)
from ckptfused.spec import BlockSpec, FFNSpec, param_shapes

B, T, C, H = 2, 5, 16, 4
REFUSED = r"expected a weight that is whole or sharded by FSDP, got a DTensor .* ckptfused runs no tensor-parallel"
X = torch.randn(B, T, C)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """A mesh of one process: a shard of a tensor is then all of it, and its placement says the same."""
    store = os.fspath(tmp_path_factory.mktemp("group") / "store")
    dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def llama() -> FusedCheckpointBlock:
    return FusedCheckpointBlock.llama(C, H, 32)


@pytest.mark.parametrize("sequential", [False, True], ids=["block", "sequential"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_parallel_block(gated: bool, sequential: bool, mesh: DeviceMesh) -> None:
    block = llama() if gated else FusedCheckpointBlock(C, H, 32, dropout=0.0)
    parallelize_module(block, mesh, {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()})
    with pytest.raises(ValueError, match=rf"FusedCheckpointBlock.linear1.weight: {REFUSED}"):
        (FusedCheckpointSequential(block) if sequential else block)(X)


def test_parallel_halves(mesh: DeviceMesh) -> None:
    ffn = FusedCheckpointFFN(C, 32, activation="swiglu")
    parallelize_module(ffn, mesh, {"linear1": ColwiseParallel()})
    with pytest.raises(ValueError, match=rf"FusedCheckpointFFN.linear1.weight: {REFUSED}"):
        ffn(X)
    attention = FusedCheckpointAttention(C, H)
    parallelize_module(attention, mesh, {"self_attn.out_proj": RowwiseParallel()})
    with pytest.raises(ValueError, match=rf"FusedCheckpointAttention.self_attn.out_proj.weight: {REFUSED}"):
        attention(X)


def test_a_weight_distributed_by_hand(mesh: DeviceMesh) -> None:
    block = llama()
    weight = distribute_tensor(block.self_attn.in_proj_weight.detach(), mesh, [Shard(0)])
    block.self_attn.in_proj_weight = torch.nn.Parameter(weight)
    with pytest.raises(TypeError, match=r"self_attn.in_proj_weight: expected a whole tensor .*, got a DTensor"):
        block(X)


@pytest.mark.parametrize("make", [llama, lambda: FusedCheckpointAttention(C, H), lambda: FusedCheckpointFFN(C, 32)])
def test_a_distributed_input(make: Any, mesh: DeviceMesh) -> None:
    module = make()
    for run in (module, FusedCheckpointSequential(module)):
        with pytest.raises(TypeError, match=r"src: expected a whole tensor .*, got a DTensor with placements"):
            run(DTensor.from_local(X, mesh, [Replicate()]))


def test_distributed_tensors_of_the_functions(mesh: DeviceMesh) -> None:
    spec = BlockSpec(ffn=FFNSpec("relu", 32))
    params: dict[str, Tensor | None] = {n: torch.randn(shape) for n, (shape, _) in param_shapes(spec, C).items()}
    sharded = {**params, "ffn.up_w": DTensor.from_local(torch.randn(32, C), mesh, [Shard(0)])}
    with pytest.raises(TypeError, match=r"x: expected a whole tensor .*, got a DTensor"):
        functional.ffn_block(DTensor.from_local(X, mesh, [Replicate()]), params, spec)
    with pytest.raises(TypeError, match=r"params\['ffn.up_w'\]: expected a whole tensor .*, got a DTensor"):
        functional.ffn_block(X, sharded, spec)


@pytest.mark.parametrize("inner", [False, True], ids=["block", "linear1"])
def test_fsdp2_gathers(inner: bool, mesh: DeviceMesh) -> None:
    """Around the block it runs fused, around one of its layers generically."""
    block, x = llama(), X.clone().requires_grad_()
    expected = torch.autograd.grad(block(x).sum(), x)
    sharded: Any = copy.deepcopy(block)
    fully_shard(sharded.linear1 if inner else sharded, mesh=mesh)
    assert isinstance(sharded.linear1.weight, DTensor)
    y = sharded(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), expected)
