"""What each of two ranks does with a model whose weights are updated in backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ckptfused
from tests.models.distributed_runs import batch, shard
from tests.models.small import llama


def fsdp2(rank: int) -> None:
    """The bits of the usual step, and no gradient after backward."""

    def trained(release: bool) -> list[Tensor]:
        model = shard(llama())
        optimizer = torch.optim.AdamW(model.parameters())
        ckptfused.convert(model, release=optimizer if release else None)
        for _ in range(3):
            model(**batch(rank)).loss.backward()
            assert release == all(p.grad is None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        assert all(isinstance(p, DTensor) for p in model.parameters())
        return [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]

    assert all(map(torch.equal, trained(False), trained(True)))


def ddp(rank: int) -> None:
    """Refused before a weight is updated by the gradient of one rank."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ckptfused.convert(model, release=optimizer)
    wrapped = DistributedDataParallel(model)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="other ranks have yet to add theirs to"):
        wrapped(**batch(rank)).loss.backward()
    assert all(map(torch.equal, before, model.parameters()))
