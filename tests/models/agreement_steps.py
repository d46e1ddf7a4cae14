"""What each of two ranks does where all have to convert alike."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import ckptfused
from ckptfused import CheckpointPolicy
from tests.models import zoo_decoders, zoo_encoders, zoo_llama  # noqa: F401
from tests.models.distributed_runs import batch, shard
from tests.models.ranks import RANKS
from tests.models.small import llama


def agreement(rank: int, change: str) -> None:
    model = llama(num_hidden_layers=3 if change == "layers" and rank == 1 else 2)
    if change == "patch" and rank == 1:
        model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    policy = "mid" if change == "policy" and rank == 1 else "inputs"
    if change == "none":
        assert ckptfused.convert(model, policy, process_group=True).fused == 2
        assert ckptfused.convert(model, policy, process_group=torch.distributed.group.WORLD).fused == 2
        return
    layer = {"layers": "model.layers.2", "patch": "model.layers.1", "policy": "model.layers.0"}[change]
    with pytest.raises(ValueError, match=rf"{layer}.*rank 1 has"):
        ckptfused.convert(model, policy, process_group=True)
    assert not any("forward" in vars(module) for module in model.modules())


def agreement_on_the_loss(rank: int) -> None:
    model = llama()
    if rank == 1:
        model.lm_head.register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM: chunked, rank 1 has LlamaForCausalLM: original"):
        ckptfused.convert(model, loss="chunked", process_group=True)
    assert "forward" not in vars(model)


def agreement_with_a_failure(rank: int) -> None:
    model = llama()
    failing = mock.patch("ckptfused.models.install._outcome", side_effect=RuntimeError("no memory"))
    if rank == 1:
        with failing, pytest.raises(RuntimeError, match="no memory"):
            ckptfused.convert(model, process_group=True)
    else:
        with pytest.raises(ValueError, match="failed on rank 1: RuntimeError: no memory"):
            ckptfused.convert(model, process_group=True)
    assert not any("forward" in vars(module) for module in model.modules())


def agreement_on_the_policy(rank: int, what: str) -> None:
    """Ranks whose layers are alike and whose segments, or other modes, are not."""
    theirs = {"segments": CheckpointPolicy.segments(2), "modes": CheckpointPolicy.per_layer(["inputs", None])}[what]
    ours = {"segments": CheckpointPolicy.segments(1), "modes": CheckpointPolicy.per_layer(["inputs", "inputs"])}[what]
    model = llama()
    words = {"segments": "the policy: rank 0 has policy .*segment_count=1, rank 1 has .*=2", "modes": r"model.layers.1"}
    with pytest.raises(ValueError, match=f"ranks differ at.*{words[what]}"):
        ckptfused.convert(model, policy=theirs if rank else ours, process_group=True)
    assert not any("forward" in vars(module) for module in model.modules())


def one_plan_for_all(rank: int) -> None:
    """The first rank's, whatever the others' batches are; they plan nothing."""
    model = llama(num_hidden_layers=3)
    front = ckptfused.plan(model, batch(0), 1 << 40, device="h200").front
    asked: dict[str, Any] = {"budget": (front[0].peak + front[-1].peak) // 2, "device": "h200"}
    alone = ckptfused.plan(model, batch(0), **asked).policy
    mine = batch(0) if rank == 0 else {name: t[:1] for name, t in batch(1).items() if isinstance(t, torch.Tensor)}
    with mock.patch("ckptfused.convert.plan", side_effect=ckptfused.plan) as plan:
        report = ckptfused.convert(model, batch=mine, process_group=True, **asked)
    assert plan.call_count == (rank == 0)
    assert report.policy == alone != CheckpointPolicy.uniform()
    digests: list[Any] = [None] * RANKS
    torch.distributed.all_gather_object(digests, report.policy.digest)
    assert digests == [alone.digest] * RANKS


def no_plan_for_any(rank: int) -> None:
    """A budget that nothing fits is an error on every rank, with the least that would."""
    model = llama()
    with pytest.raises(ckptfused.BudgetError, match="the least that one was found to need") as error:
        ckptfused.convert(model, budget=1000, batch=batch(rank), device="h200", process_group=True)
    assert f"{error.value.least:,} bytes" in str(error.value)
    assert not any("forward" in vars(module) for module in model.modules())


def plans_of_their_own(rank: int) -> None:
    """Without a process group each rank plans for its own budget; the doctor names where they differ."""
    model = llama()
    model.config.use_cache = False
    front = ckptfused.plan(model, batch(0), 1 << 40, device="h200").front
    ckptfused.convert(model, batch=batch(0), budget=front[-rank].peak, device="h200")
    errors = ckptfused.doctor(model).of("error")
    assert [f.place for f in errors] == ["model.layers.0"] and "ranks differ: rank 0 has" in errors[0].text, errors


def tensors_in_shards(rank: int) -> None:
    """A prediction is of whole tensors, and says so."""
    model = shard(llama())
    with pytest.raises(ValueError, match="expected whole tensors, got .*, a DTensor: predict the model before it is"):
        ckptfused.profile(model, batch(rank), device="h200")
