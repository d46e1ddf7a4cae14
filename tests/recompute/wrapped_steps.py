"""What each of two ranks does with checkpointed layers that write buffers, under wrappers that move parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from ckptfused.checkpoint import checkpoint
from tests.models.ranks import RANKS
from tests.recompute.test_replay_state import Average, Recurrent, plain, same


class Layer(nn.Module):
    """Reads buffers and an attribute that its forward writes, in a module of its own and in one that has parameters."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call
        self.linear, self.mean, self.last = nn.Linear(4, 4), Average(False), Recurrent(True)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.call(self.inner, x)
        return y

    def inner(self, x: Tensor) -> Tensor:
        self.scale.mul_(1.5)
        return self.last(self.mean(self.linear(x) * self.scale.clone() + self.offset.sin())).tanh()


class Model(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Layer(call) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def _fsdp2(model: Model, hybrid: bool = False) -> nn.Module:
    names, shape = (("a", "b"), (1, RANKS)) if hybrid else (None, (RANKS,))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _fsdp1(model: Model, **options: Any) -> nn.Module:
    policy = ModuleWrapPolicy({Layer})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {
    "fsdp2": _fsdp2,
    "hsdp2": lambda model: _fsdp2(model, hybrid=True),
    "fsdp1": lambda model: _fsdp1(model, use_orig_params=False),
    "fsdp1-original": lambda model: _fsdp1(model, use_orig_params=True),
    "fsdp1-grad-op": lambda model: _fsdp1(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "ddp": DistributedDataParallel,
}


def once(rank: int, name: str) -> None:
    """Gradients and buffers of three steps are those without a checkpoint."""
    found = []
    for call in (plain, checkpoint):
        model = Model(call)
        wrapped, results = WRAPPERS[name](model), []
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step + 10 * rank)).requires_grad_()
            wrapped(x).sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append(x.grad)
        held = [(m.calls, m.history, m.state) for m in model.modules() if isinstance(m, Recurrent)]
        found.append([*results, *map(copy.deepcopy, model.buffers()), *held])
    assert same(*found)


def changed(rank: int, name: str) -> None:
    """A buffer that is changed between forward and backward."""
    model = Model(checkpoint)
    wrapped = WRAPPERS[name](model)
    loss = wrapped(torch.randn(6, 4).requires_grad_()).sum()
    model.layers[1].offset.add_(1)
    with pytest.raises(RuntimeError, match="buffer 'offset' of (FSDP)?Layer was changed in place between"):
        loss.backward()
