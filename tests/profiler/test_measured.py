"""A measured step leaves no trace and says what a predicted one does, converted models' too; the GPU's history.

benchmarks/tests/test_profile_error.py holds eight kinds of models to it.
"""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import ckptfused
from ckptfused import profile
from ckptfused.profiler.allocator import read_history

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]


@pytest.mark.parametrize("options", [{}, {"keep": "all"}, {"loss": "chunked"}])
def test_converted(options: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, use_cache=False)).train()
    ckptfused.convert(model, **options)
    ids = torch.randint(0, 512, (2, 100))
    batch = {"input_ids": ids, "labels": ids}
    predicted, measured = profile(model, batch, device="cpu"), profile(model, batch)
    assert predicted.saved == pytest.approx(measured.saved, rel=0.01)
    assert predicted.peak == pytest.approx(measured.peak, rel=0.03)
    for a, b in zip(predicted.layers, measured.layers, strict=True):
        assert a.saved == pytest.approx(b.saved, rel=0.01)


class Changing(nn.Module):
    """A model whose forward changes all that one can change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))
        self.generator = torch.Generator()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.calls = self.calls + 1  # another tensor
        noise = random.random() + numpy.random.rand() + torch.rand(4, generator=self.generator)
        return self.norm(nn.functional.dropout(self.linear(x) + noise, 0.5)).sum()


@pytest.mark.parametrize("stepped", [False, True])
def test_a_measured_step_leaves_no_trace(stepped: bool) -> None:
    model = Changing()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    x = torch.randn(8, 4, requires_grad=True)
    if stepped:
        model(x).backward()
        optimizer.step()
    before = seen(model, optimizer, x)
    tensors = held(model, x)
    found = profile(model, x, optimizer)
    assert same(before, seen(model, optimizer, x))
    assert all(
        a is b for a, b in zip(tensors, [model.calls, x.grad, *(p.grad for p in model.parameters())], strict=True)
    )
    assert found.optimizer == 2 * found.all_gradients + 4 * 4  # moments, and the number of the step


def held(model: Changing, x: Tensor) -> list[Any]:
    return [model.calls, x.grad, *(p.grad for p in model.parameters())]


def seen(model: Changing, optimizer: torch.optim.Optimizer, x: Tensor) -> list[Any]:
    generators = [torch.get_rng_state(), model.generator.get_state(), random.getstate(), numpy.random.get_state()[1]]
    grads = [None if t.grad is None else t.grad.clone() for t in (x, *model.parameters())]
    values = [t.clone() for t in (*model.parameters(), *model.buffers())]
    state = [t.clone() for held in optimizer.state.values() for t in held.values()]
    return [*generators, model.count, *grads, *values, len(state), *state]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, Tensor) else bool(numpy.all(x == y)) for x, y in zip(a, b, strict=True)
    )


def test_a_model_elsewhere_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="device: expected one of h200.*, got None and parameters on meta"):
        profile(model, torch.ones(2))


def test_the_history_of_a_gpu() -> None:
    """Events of before are left out, releases of what was there before too, and segments; a release counts as it is
    asked for. Marks are where so many events had been."""
    names = ("segment_alloc", "alloc", "free_requested", "free_completed")
    segment, alloc, free, done = ({"action": name} for name in names)
    history = [
        {**alloc, "addr": 1, "size": 512},
        {**segment, "addr": 2, "size": 1 << 21},
        {**alloc, "addr": 2, "size": 100},  # the first of the step
        {**free, "addr": 1, "size": 512},
        {**done, "addr": 1, "size": 512},
        {**alloc, "addr": 1, "size": 50},
        {**free, "addr": 2, "size": 100},
        {**alloc, "addr": 2, "size": 70},
        {**done, "addr": 2, "size": 100},
    ]
    trace = read_history(history, 5, [0, 1, 4, 5], [[], [2, 9], [2], [1, 2]])
    assert [change.size for change in trace.changes] == [100, 50, -100, 70]
    assert trace.marks == [0, 1, 3, 4]
    assert trace.numbers == [{}, {2: 0}, {}, {1: 1, 2: 2}]
    assert Counter(change.number for change in trace.changes) == {0: 2, 1: 1, 2: 1}


def test_threads_measure_one_after_the_other() -> None:
    """PyTorch's profiler is one of a process: two that overlap end it."""
    x = torch.randn(8, 4)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: profile(Changing(), x).peak, range(8)))
    assert len(set(found)) == 1
