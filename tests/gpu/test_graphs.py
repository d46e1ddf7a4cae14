"""CUDA graphs of forward and backward: each replay draws masks of its own, and its gradients are those of its masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ckptfused import FusedCheckpointBlock
from tests.devices import repeatable

pytestmark = pytest.mark.gpu

LLAMA: dict[str, Any] = {"num_kv_heads": 2}


def make_block(keep: str, dtype: torch.dtype) -> FusedCheckpointBlock:
    block = FusedCheckpointBlock.llama(256, 4, dim_feedforward=688, dropout=0.2, keep=keep, **LLAMA)
    return block.to("cuda", dtype)


class _States:
    """Keeps the random state that a call saves: in a graph, the memory that each replay writes it to."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def pack(self, t: Tensor) -> Tensor:
        if t.dtype == torch.int64 and t.shape == (2,):
            self.found.append(t)
        return t


def step(block: FusedCheckpointBlock, x: Tensor, dy: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    """Output, gradients, random state."""
    states = _States()
    with torch.autograd.graph.saved_tensors_hooks(states.pack, lambda t: t):
        y = block(x)
    (state,) = states.found
    return y, list(torch.autograd.grad(y, [x, *block.parameters()], dy)), state


def step_with(state: Tensor, block: FusedCheckpointBlock, x: Tensor, dy: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The same, with the given random state."""
    with torch.no_grad():
        call = block.prepare(x)
        aux = [call.cos, call.sin, call.masks.mask, call.masks.padding, call.cu_seqlens]
        y, *kept = torch.ops.ckptfused.block_fwd(call.x, call.slots, aux, state, call.text, True)
        needs = [True, *(slot is not None for slot in call.slots)]
        dx, *rest = torch.ops.ckptfused.block_bwd(dy, call.x, call.slots, aux, kept, state, call.text, needs)
    slots = [slot for slot in call.slots if slot is not None]
    by_parameter = {id(slot): grad for slot, grad in zip(slots, rest, strict=True)}
    return y, [dx, *(by_parameter[id(parameter)] for parameter in block.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("keep", ["inputs", "attention+mid", "all"])
def test_replays_draw_anew_and_agree_with_eager(keep: str, dtype: torch.dtype) -> None:
    repeatable("cuda")
    block = make_block(keep, dtype)
    x = torch.randn(2, 96, 256, device="cuda", dtype=dtype).requires_grad_()
    dy = torch.randn_like(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles and loads what the graph will hold
        for _ in range(3):
            step(block, x, dy)
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, grads, state = step(block, x, dy)

    drawn, outputs = [], []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        drawn.append(tuple(state.tolist()))
        outputs.append(y.clone())
        y_eager, grads_eager = step_with(state.clone(), block, x.detach(), dy)
        assert torch.equal(y, y_eager)
        for got, expected in zip(grads, grads_eager, strict=True):
            assert got.isfinite().all()
            assert torch.equal(got, expected)
    assert len(set(drawn)) == 3
    assert len({offset for _, offset in drawn}) == 3
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])


def test_two_blocks_of_a_graph_draw_two_masks_and_the_generator_moves_on() -> None:
    repeatable("cuda")
    block = make_block("inputs", torch.float32)
    x = torch.randn(1, 32, 256, device="cuda")
    with torch.no_grad():
        for _ in range(2):
            block(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            first, second = block(x), block(x)
        before = torch.cuda.get_rng_state()
        graph.replay()
        assert not torch.equal(first, second)
        assert not torch.equal(torch.cuda.get_rng_state(), before)
        again = first.clone(), second.clone()
        torch.cuda.set_rng_state(before)
        graph.replay()
        assert torch.equal(first, again[0])
        assert torch.equal(second, again[1])
