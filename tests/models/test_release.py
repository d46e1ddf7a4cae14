"""Updates in backward have the bits of the usual step; gradients go; what is no step of one batch raises."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.utils import clip_grad, clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import ckptfused
from ckptfused import convert, original, revert
from ckptfused.models.release import releases_of
from tests.models import release_steps
from tests.models.ranks import Ranks

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": partial(Adam, lr=0.01, amsgrad=True),
    "AdamW": partial(AdamW, lr=0.01),
    "AdamW, foreach": partial(AdamW, lr=0.01, foreach=True),
    "AdamW, fused": partial(AdamW, lr=0.01, fused=True),
}


class Words(nn.Module):
    """A small language model with a tied head, a weight that is frozen and one that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.frozen = nn.Parameter(torch.ones(16), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, ids: Tensor) -> Tensor:
        logits = (self.layers(self.words(ids)) * self.frozen) @ self.words.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


@pytest.fixture
def model() -> Iterator[Words]:
    torch.manual_seed(0)
    found = Words()
    yield found
    revert(found)


def batches(count: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randint(0, 40, (2, 9)) for _ in range(count)]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two, with rates of their own, over all weights."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices}, {"params": others, "lr": 0.003}]


def held(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """All values that training changes."""
    state = optimizer.state_dict()["state"]
    return [*model.state_dict().values(), *(t for p in sorted(state) for t in state[p].values() if t is not None)]


def trained(make: Callable[..., Optimizer], release: bool, steps: int = 4) -> tuple[list[Tensor], list[float]]:
    """What there is after some steps under a schedule, the optimizer's state loaded anew amid them; and the rates."""
    torch.manual_seed(0)
    model = Words()
    optimizer = make(groups(model))
    schedule = StepLR(optimizer, 1, gamma=0.5)
    convert(model, release=optimizer if release else None)
    for step, ids in enumerate(batches(steps)):
        model(ids).backward()
        grads = [p.grad for p in model.parameters()]
        assert all(grad is None for grad in grads) if release else any(grad is not None for grad in grads)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
    return held(model, optimizer), schedule.get_last_lr()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_are_those_of_the_usual_step(name: str) -> None:
    (usual, rates), (early, same_rates) = (trained(OPTIMIZERS[name], release) for release in (False, True))
    assert len(usual) == len(early) and all(map(torch.equal, usual, early))
    assert rates == same_rates


def test_one_gradient_at_a_time() -> None:
    """In an update no other layer's gradients are there."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    optimizer = AdamW(model.parameters())
    found = []
    optimizer.register_step_pre_hook(lambda *_: found.append(sum(p.grad is not None for p in model.parameters())))
    convert(model, release=optimizer)
    model(torch.randn(3, 8)).sum().backward()
    assert found == [1] * 5
    optimizer.step()
    assert found == [1] * 5 + [0]


def test_revert_ends_it(model: Words) -> None:
    optimizer = SGD(model.parameters(), 0.1)
    report = convert(model, release=optimizer)
    assert "SGD updates 26 weights in backward" in report.notes
    assert releases_of(model) and not releases_of(Words())
    revert(model)
    (ids,) = batches(1)
    for _ in range(2):  # which adds up
        model(ids).backward()
    assert not releases_of(model) and model.words.weight.grad is not None


def test_another_conversion_ends_it(model: Words) -> None:
    first, second = SGD(model.parameters(), 0.1), SGD(model.parameters(), 0.2)
    convert(model, release=first)
    convert(model, release=second)
    assert [release.optimizer for release in releases_of(model)] == [second]
    convert(model)
    assert releases_of(model) == []


def test_weights_of_others_have_their_usual_step(model: Words) -> None:
    """What is thawed or added later, or is in another model."""
    other = nn.Parameter(torch.ones(16))
    optimizer = SGD([*model.parameters(), other], 0.1)
    convert(model, release=optimizer)
    late = nn.Parameter(torch.ones(16))
    optimizer.add_param_group({"params": [late]})
    model.frozen.requires_grad_()
    (ids,) = batches(1)
    (model(ids) + (other * 2).sum() + (late * 3).sum()).backward()
    usual = [p for p in (*model.parameters(), other, late) if p.grad is not None]
    assert [id(p) for p in usual] == [id(model.frozen), id(other), id(late)]
    optimizer.step()
    assert other[0].item() == pytest.approx(0.8) and late[0].item() == pytest.approx(0.7)


def test_a_second_backward_raises_and_updates_nothing(model: Words) -> None:
    optimizer = SGD(model.parameters(), 0.1)
    convert(model, release=optimizer)
    first, second = batches(2)
    model(first).backward()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"expected optimizer.step\(\) after each backward"):
        model(second).backward()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.step()
    model.zero_grad()
    model(second).backward()
    assert not torch.equal(before[0], model.words.weight)


def test_a_closure_is_refused(model: Words) -> None:
    optimizer = SGD(model.parameters(), 0.1)
    convert(model, release=optimizer)
    (ids,) = batches(1)
    for step in (optimizer.step, lambda closure: optimizer.step(closure=closure)):
        with pytest.raises(ValueError, match="without a closure"):
            step(lambda: model(ids))


def test_clipping_by_norm_is_refused(model: Words) -> None:
    """Where others' weights are meant it is as it was, and so is all after `revert`."""
    optimizer = SGD(model.parameters(), 0.1)
    convert(model, release=optimizer)
    (ids,) = batches(1)
    model(ids).backward()
    for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        with pytest.raises(RuntimeError, match="got clip_grad_norm_ of weights that backward has updated"):
            clip(model.parameters(), 1.0)
    other = Words()
    other(ids).backward()
    assert clip_grad_norm_(other.parameters(), 0.01) > 0.01
    assert other.words.weight.grad is not None and other.words.weight.grad.norm() <= 0.01
    revert(model)
    model(ids).backward()
    assert clip_grad_norm_(model.parameters(), 0.01) > 0.01


def test_a_model_that_is_gone_leaves_nothing() -> None:
    gc.collect()  # models of other tests
    clip = vars(clip_grad)["_clip_grads_with_norm_"]
    model = Words()
    convert(model, release=SGD(model.parameters(), 0.1))
    gone, shown = weakref.ref(model), vars(clip_grad)["_clip_grads_with_norm_"]
    del model
    gc.collect()
    assert gone() is None and shown is not clip and vars(clip_grad)["_clip_grads_with_norm_"] is clip


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_is_refused(model: Words, fused: bool, unscaled: bool) -> None:
    optimizer = AdamW(model.parameters(), fused=fused)
    convert(model, release=optimizer)
    scaler = torch.amp.GradScaler("cpu")
    (ids,) = batches(1)
    scaler.scale(model(ids)).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="expected unscaled gradients, got those of a GradScaler"):
        scaler.step(optimizer)


def test_a_grad_scaler_goes_on_after_revert(model: Words) -> None:
    optimizer = SGD(model.parameters(), 0.1)
    convert(model, release=optimizer)
    revert(model)
    scaler = torch.amp.GradScaler("cpu")
    before = model.words.weight.clone()
    scaler.scale(model(*batches(1))).backward()
    scaler.step(optimizer)
    assert not torch.equal(before, model.words.weight)


class OfGroups(SGD):
    """An optimizer with state of a whole group."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


def test_what_cannot_be(model: Words) -> None:
    with pytest.raises(TypeError, match="itself and no wrapper of it"):
        convert(model, release=AdamW)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LBFGS"):
        convert(model, release=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="got one of none of them"):
        convert(model, release=SGD(Words().parameters(), 0.1))
    with pytest.raises(ValueError, match="not both: a release decides"):
        convert(model, budget="1GiB", batch=batches(1)[0], optimizer=AdamW, release=SGD(model.parameters(), 0.1))
    assert not any("forward" in vars(layer) for layer in model.layers.layers) and not releases_of(model)
    convert(model, release=OfGroups(model.parameters(), 0.1))
    with pytest.raises(RuntimeError, match="keeps its state by weight, got OfGroups, whose step writes count"):
        model(*batches(1)).backward()


def test_fsdp1_is_refused(model: Words, tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        options: Any = {"sharding_strategy": ShardingStrategy.NO_SHARD, "device_id": torch.device("cpu")}
        sharded = FullyShardedDataParallel(model, use_orig_params=True, **options)
        with pytest.raises(ValueError, match="got FSDP1"):
            convert(sharded, release=SGD(sharded.parameters(), 0.1))
    finally:
        torch.distributed.destroy_process_group()


def test_under_fsdp2(ranks: Ranks) -> None:
    ranks.run(release_steps.fsdp2)


def test_ddp_is_refused(ranks: Ranks) -> None:
    ranks.run(release_steps.ddp)


@pytest.mark.slow
def test_with_a_budget(model: Words) -> None:
    """The plan is for updates in backward; the model may be run as it was between."""
    optimizer = AdamW(model.parameters())
    ids = batches(1)[0][:1, :2]  # beside whose activations gradients count
    report = convert(model, budget="64MiB", batch=ids, device="cpu", release=optimizer)
    usual = ckptfused.plan(model, ids, "64MiB", optimizer, "cpu")
    assert report.peak is not None and report.peak < usual.peak
    assert [release.optimizer for release in releases_of(model)] == [optimizer]
    with original(model):
        model(ids).backward()
    assert all(p.grad is None for p in model.parameters())
