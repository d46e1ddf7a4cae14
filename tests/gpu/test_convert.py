"""Converted models on a GPU: as the unconverted ones there, and in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from tests.devices import repeatable
from tests.models import test_families as families
from tests.models.compare import close, run
from tests.models.small import twins
from tests.models.zoo import ZOO

pytestmark = pytest.mark.gpu

Step = Callable[[], dict[str, Tensor]]


def to_cuda(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if isinstance(value, Tensor) else value for name, value in batch.items()}


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "bert", "mixtral", "whisper"])
def test_as_the_unconverted_model(name: str) -> None:
    specimen = ZOO[name]
    model = families.build(specimen, 0.0, "eager").cuda()
    batch = to_cuda(specimen.batch())
    found = [run(one, batch) for one in (families.converted(model, specimen), model)]
    got, want = (families.without_zero(one, specimen, 1e-5) for one in found)
    close(got, want, 1e-5)


def step_of(model: Any, x: Tensor, dy: Tensor) -> Step:
    """A forward and backward of all layers: outside of them Hugging Face reads masks and positions on the host."""
    tables = model.model.rotary_emb(x, torch.arange(x.size(1), device=x.device)[None])
    weights = dict(model.model.layers.named_parameters())

    def step() -> dict[str, Tensor]:
        y = x
        for layer in model.model.layers:
            y = layer(y, position_embeddings=tables)
        found = torch.autograd.grad(y, list(weights.values()), dy)
        return {"y": y.detach(), **dict(zip(weights, found, strict=True))}

    return step


def captured(step: Step) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]:
    """A graph of the step, and where its replays leave the results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles and loads what the graph will hold
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def update(model: nn.Module, results: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, weight in model.model.layers.named_parameters():  # type: ignore[union-attr]
            weight -= 1e-4 * results[name]


def test_training_in_a_graph() -> None:
    """Three steps of replays against three eager ones of the unconverted model."""
    plain, model = (one.cuda() for one in twins())
    x, dy = torch.randn(2, 2, 33, 48, device="cuda")
    step, eager = step_of(model, x, dy), step_of(plain, x, dy)
    graph, got = captured(step)  # it reads the step's tables, which have to stay
    for _ in range(3):
        graph.replay()
        want = eager()
        close(got, want, 1e-5)
        update(model, got)
        update(plain, want)


def test_replays_draw_anew() -> None:
    """Each replay has masks of its own, of which an eager step from the same state of the generator has the bits."""
    repeatable("cuda")
    _, model = twins(p=0.25)
    model.cuda()
    x, dy = torch.randn(2, 2, 33, 48, device="cuda")
    step = step_of(model, x, dy)
    graph, got = captured(step)
    outputs = []
    for _ in range(2):
        before = torch.cuda.get_rng_state()
        graph.replay()
        torch.cuda.synchronize()
        outputs.append({name: value.clone() for name, value in got.items()})
        after = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(before)
        again = step()
        assert all(torch.equal(value, again[name]) for name, value in outputs[-1].items())
        torch.cuda.set_rng_state(after)
    assert not torch.equal(outputs[0]["y"], outputs[1]["y"])
