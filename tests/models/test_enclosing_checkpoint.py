"""Converted layers that somebody checkpoints from outside: the same masks in every replay, and no second checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers")

import ckptfused
from tests.accounting import CountOps
from tests.models import zoo_decoders, zoo_encoders, zoo_llama, zoo_moe, zoo_seq2seq, zoo_torch  # noqa: F401
from tests.models.compare import gradients
from tests.models.small import llama
from tests.models.zoo import ZOO, Specimen, randomize, text_batch
from tests.models.zoo_torch import WIDTH, values

pytestmark = pytest.mark.each_torch

unrestored = partial(checkpoint_wrapper, preserve_rng_state=False)
# One of each path, and of each place of a cache or mask.
NAMES = ("llama", "mixtral", "t5", "whisper", "bert", "torch-decoder-pre")


def step(model: Any, batch: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Loss and gradients, and the default generator afterwards."""
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(**batch).loss
    after = torch.get_rng_state()
    loss.backward()
    # The names as in the model without wrappers.
    named = {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in gradients(model).items()}
    return {"loss": loss.detach(), **named}, after


def equal(got: tuple[dict[str, Tensor], Tensor], want: tuple[dict[str, Tensor], Tensor]) -> None:
    assert got[0].keys() == want[0].keys()
    for name, w in want[0].items():
        assert got[0][name].equal(w), name
    assert got[1].equal(want[1])


def wrap(model: nn.Module, layers: list[nn.Module], wrapper: Callable[..., Any]) -> None:
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: module in layers)


def made(specimen: Specimen, p: float = 0.3) -> tuple[Any, list[nn.Module]]:
    model: Any = randomize(specimen.make(p, specimen.implementations[0])).train()
    return model, specimen.layers(model)


@pytest.mark.parametrize("first", ["convert", "wrap"])
@pytest.mark.parametrize("name", NAMES)
def test_a_wrapper_that_restores_no_random_state(name: str, first: str) -> None:
    """FSDP2's plugin in accelerate puts it around every layer, before convert or after it."""
    specimen = ZOO[name]
    plain, layers = made(specimen)
    wrapped = copy.deepcopy(plain)
    want_report = ckptfused.convert(plain)
    if first == "convert":
        ckptfused.convert(wrapped)
        wrap(wrapped, specimen.layers(wrapped), unrestored)
    else:
        wrap(wrapped, specimen.layers(wrapped), unrestored)
        report = ckptfused.convert(wrapped)
        assert [layer.path for layer in report.layers] == [layer.path for layer in want_report.layers]
        assert len(report.layers) == len(layers)
        assert all("the CheckpointWrapper around it has nothing to replay" in layer.reason for layer in report.layers)
    batch = specimen.batch()
    with CountOps() as plain_count:
        want = step(plain, batch)
    with CountOps() as count:
        got = step(wrapped, batch)
    assert {n: c for n, c in count.calls.items() if n.startswith("ckptfused.")} == {
        n: c for n, c in plain_count.calls.items() if n.startswith("ckptfused.")
    }
    equal(got, want)


class Mix(nn.Module):
    """A layer that no adapter reads."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.drop(self.first(x).tanh()))


@pytest.mark.parametrize("first", ["convert", "wrap"])
def test_a_wrapper_around_a_generic_layer(first: str) -> None:
    """It is checkpointed once, by ckptfused, which restores the random state."""
    model = nn.Sequential(*(Mix(0.3) for _ in range(3)))
    wrapped = copy.deepcopy(model)
    layers: list[nn.Module] = list(wrapped)
    calls: list[Any] = []
    for layer in layers:
        layer.first.register_forward_pre_hook(lambda *given: calls.append(given))
    if first == "convert":
        ckptfused.convert(wrapped)
    wrap(wrapped, layers, unrestored)
    if first == "wrap":
        assert [layer.path for layer in ckptfused.convert(wrapped).layers] == ["generic"] * 3
    found = []
    for m in (model, wrapped):
        torch.manual_seed(3)
        x = values(9).requires_grad_()
        m(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in m.parameters())])
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    assert len(calls) == 6  # forward, and one replay


@pytest.mark.parametrize("options", [{}, {"preserve_rng_state": False}], ids=["restored", "unrestored"])
def test_a_checkpoint_around_several_layers(options: dict[str, Any]) -> None:
    """It replays them as before, with the masks of the forward; the last one's result is nobody's."""
    model, _ = made(ZOO["torch-encoder-pre-batch-first"])
    batch = ZOO["torch-encoder-pre-batch-first"].batch()
    ckptfused.convert(model)
    want = step(model, batch)
    plain = model.encoder.forward
    model.encoder.forward = lambda *a, **k: checkpoint(plain, *a, use_reentrant=False, **options, **k)
    with CountOps() as count:
        equal(step(model, batch), want)
    assert count.blocks == (3, 2)


def test_what_the_report_says() -> None:
    model = llama(p=0.3)
    wrap(model, list(model.model.layers), unrestored)
    assert "keep" not in ckptfused.convert(model).layers[0].reason
    assert "replays what keep names" in ckptfused.convert(model, "all").layers[0].reason
    for options, said in (({}, "once more"), ({"preserve_rng_state": False}, "other dropout masks")):
        model = llama(p=0.3)
        wrapper = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT, **options)
        wrap(model, list(model.model.layers), wrapper)
        assert said in ckptfused.convert(model).layers[0].reason
    model = llama(p=0.3)
    wrap(model, list(model.model.layers), lambda layer: offload_wrapper(checkpoint_wrapper(layer)))
    report = ckptfused.convert(model)
    assert [layer.path for layer in report.layers] == ["fused", "fused"]
    assert "nothing to replay" in report.layers[0].reason
    assert ckptfused.revert(model) == 2


def test_inputs_go_to_the_host_where_both_wrappers_are_around() -> None:
    """accelerate's `activation_checkpointing_offload`: what a layer saves goes to the host, since its checkpoint does
    not hold it any more."""
    model = llama(p=0.3)
    batch = text_batch()
    ckptfused.convert(model)
    want = step(model, batch)
    packed: list[Tensor] = []
    wrap(model, list(model.model.layers), unrestored)
    for wrapper in model.model.layers:
        wrapper.forward = within_hooks(wrapper.forward, packed)
    equal(step(model, batch), want)
    assert sum(t.dim() == 3 and t.size(-1) == model.config.hidden_size for t in packed) >= len(model.model.layers)


def within_hooks(forward: Callable[..., Any], packed: list[Tensor]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            return forward(*args, **kwargs)

    return call


def test_original_layers_keep_the_checkpoint_around_them() -> None:
    model = llama(p=0.0)
    wrap(model, list(model.model.layers), unrestored)
    batch = {**text_batch(), "use_cache": False}  # a replay would fill it twice
    want = step(model, batch)
    ckptfused.convert(model)
    calls: list[Any] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *given: calls.append(given))
    with ckptfused.original(model):
        equal(step(model, batch), want)
    assert len(calls) == 2
