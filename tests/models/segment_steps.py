"""What each rank does in the tests of segments and policies: see `test_distributed`."""

from __future__ import annotations

import copy
from typing import Any

import torch

import ckptfused
from ckptfused import CheckpointPolicy
from tests.models.compare import close, run
from tests.models.distributed_runs import alone, batch, full, shard
from tests.models.small import llama


def fsdp2_segments(rank: int, first: bool, reshard: bool, keep: str | None) -> None:
    """Weights in shards between forward and backward are gathered for a replay, and given back."""
    model = llama(p=0.1, num_hidden_layers=4)
    plain = copy.deepcopy(model)
    policy = CheckpointPolicy.segments(2, keep)
    for what in ("convert", "shard") if first else ("shard", "convert"):
        if what == "convert":
            ckptfused.convert(model, policy=policy, process_group=True)
        else:
            shard(model, reshard)
    ckptfused.convert(plain, policy=CheckpointPolicy.none() if keep is None else CheckpointPolicy.uniform(keep))
    for seed in range(2):
        torch.manual_seed(seed + rank)
        found = full(run(model, batch(rank)))
        close(found, alone(plain, seed), 1e-5)
    assert not any(layer.forward.segment.warned for layer in model.model.layers)  # none is divided


def ddp_segments(rank: int) -> None:
    model = llama(p=0.1, num_hidden_layers=4)
    plain: Any = copy.deepcopy(model)
    ckptfused.convert(plain)
    ckptfused.convert(model, policy=CheckpointPolicy.segments(2))
    both = torch.nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(rank)
    close(full(run(both, batch(rank))), alone(plain), 1e-5)
