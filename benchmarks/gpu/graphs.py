"""A step of a Hugging Face decoder's layers as a CUDA graph: outside of them it reads masks on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WARM = 3  # steps: they compile and load what the graph will hold


def step_of(model: Any, ids: Tensor) -> Callable[[], object]:
    """Forward and backward of all layers on the embeddings of a batch."""
    inner = model.get_base_model().model if hasattr(model, "get_base_model") else model.model
    with torch.no_grad():
        x = inner.embed_tokens(ids)
        tables = inner.rotary_emb(x, torch.arange(x.size(1), device=x.device)[None])
    dy = torch.randn_like(x)
    weights = [weight for weight in inner.layers.parameters() if weight.requires_grad]

    def step() -> tuple[Tensor, ...]:
        y = x
        for layer in inner.layers:
            y = layer(y, position_embeddings=tables)
        return torch.autograd.grad(y, weights, dy)

    return step


def captured(step: Callable[[], object], device: str) -> Callable[[], object]:
    """Replays of the step's graph; on a CPU, the step itself."""
    if device != "cuda":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay() -> object:
        graph.replay()
        return results

    return replay
