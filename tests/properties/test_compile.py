"""torch.compile: every entry point is one graph, with the bits, random numbers and bytes of eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ckptfused import FusedCheckpointBlock, FusedCheckpointSequential
from tests.accounting import saved_bytes
from tests.cases import by_turns
from tests.devices import generator_state, on_devices, repeatable
from tests.properties.entries import ENTRIES, equal, made, source, step

LENGTH, WIDTH = 33, 32


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def from_the_default_generator() -> AbstractContextManager[None]:
    """A compiled graph's random numbers as eager mode has them on a GPU, too, where a checkpoint draws them again."""
    return torch._functorch.config.patch(graphsafe_rng_functionalization=False)  # type: ignore[no-any-return]


def make_block(device: str, keep: str = "inputs", dropout: float = 0.1) -> FusedCheckpointBlock:
    repeatable(device)
    torch.manual_seed(1)
    block = FusedCheckpointBlock.llama(WIDTH, 4, dim_feedforward=48, num_kv_heads=2, dropout=dropout, keep=keep)
    return block.to(device)


def make_x(device: str, length: int = LENGTH) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(3)).to(device).requires_grad_()


def gradients(function: Callable[[Tensor], Tensor], block: torch.nn.Module, x: Tensor, seed: int = 7) -> list[Tensor]:
    torch.manual_seed(seed)
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])]


@on_devices
@pytest.mark.parametrize(("keep", "backend"), by_turns(["inputs", "attention+mid", "all"], ["aot_eager", "inductor"]))
def test_compiled_block_has_the_bits_of_eager(keep: str, backend: str, device: str) -> None:
    block, x = make_block(device, keep), make_x(device)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for want, got in zip(gradients(block, block, x), gradients(compiled, block, x), strict=True):
        # y.square().sum() is outside the graph, so that every kernel is the eager one.
        assert torch.equal(want, got)


@on_devices
def test_compiled_block_saves_only_its_inputs(device: str) -> None:
    block, x = make_block(device), make_x(device)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    eager = saved_bytes(lambda: block(x), block)
    assert saved_bytes(lambda: compiled(x), block) == eager
    assert eager == x.numel() * 4 + 16


@pytest.mark.slow
@on_devices
def test_dynamic_shapes(device: str) -> None:
    block = make_block(device)
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (LENGTH, 20, 47, 520):
        x = make_x(device, length)
        for want, got in zip(gradients(block, block, x), gradients(compiled, block, x), strict=True):
            assert torch.equal(want, got)
        # PyTorch 2.11 takes every graph for an exported one, which computes its own cos and sin and keeps them.
        tables = 0 if torch.__version__ >= (2, 12) else length * 4 * block.self_attn.rotary.dim
        assert saved_bytes(lambda x=x: compiled(x), block) == x.numel() * 4 + 16 + tables  # type: ignore[misc]


@on_devices
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.extended)])
def test_two_identical_calls_draw_two_masks(backend: str, device: str) -> None:
    block, x = make_block(device, dropout=0.5), make_x(device)

    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        return block(x), block(x)

    torch.manual_seed(5)
    want = twice(x)
    after_eager = generator_state(device)
    torch.manual_seed(5)
    got = torch.compile(twice, fullgraph=True, backend=backend)(x)
    assert not torch.equal(got[0], got[1])
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert torch.equal(generator_state(device), after_eager)


@on_devices
@pytest.mark.parametrize("compiled", [False, True])
def test_generator_advances_alike_for_every_preset(compiled: bool, device: str) -> None:
    states = []
    for keep in ("inputs", "all") if compiled else ("inputs", "mid", "attention", "all"):
        block, x = make_block(device, keep), make_x(device)
        function = torch.compile(block, fullgraph=True, backend="aot_eager") if compiled else block
        gradients(function, block, x)
        states.append(generator_state(device))
    block, x = make_block(device), make_x(device)
    with torch.no_grad():
        torch.manual_seed(7)
        block(x)
    states.append(generator_state(device))
    assert all(torch.equal(state, states[0]) for state in states)


@on_devices
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.extended)])
def test_compile_with_torch_checkpoint_around_a_block(backend: str, device: str) -> None:
    block, x = make_block(device), make_x(device)

    def segment(x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)

    want = gradients(block, block, x)
    for function in (segment, torch.compile(segment, fullgraph=True, backend=backend)):
        with from_the_default_generator():
            for a, b in zip(want, gradients(function, block, x), strict=True):
                assert torch.equal(a, b)


@pytest.mark.gpu
def test_the_generator_of_a_compiled_checkpoint() -> None:
    """On a GPU, PyTorch gives what its checkpoint draws again a generator of the graph's own, which the graph's first
    call seeds by the CPU's next number: other numbers than eager mode's, the same in both passes."""
    block, x = make_block("cuda"), make_x("cuda")
    compiled = torch.compile(lambda x: checkpoint(block, x, use_reentrant=False), fullgraph=True, backend="aot_eager")
    got = gradients(compiled, block, x)
    torch.manual_seed(7)
    seed = int(torch.randint(torch.iinfo(torch.int64).max, (1,)))
    assert all(map(torch.equal, got, gradients(block, block, x, seed)))


AS_ANOTHER = ("sequential", "one segment", "hooked attention", "generic ffn", "generic sequential", "converted generic")
"""Entry points of which another one, beside them, has whatever torch.compile traces."""


# Those that need no spec made in the call, which torch.compile does not trace.
@on_devices
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.extended if name in AS_ANOTHER else ())
        for name in ENTRIES
        if name != "functional"
    ],
)
def test_one_graph_with_the_bits_of_eager(name: str, device: str) -> None:
    """And the next random number."""
    call, x = made(name, device=device), source(device)
    expected, after = step(call, call.run, x), generator_state(device)
    with from_the_default_generator():
        assert equal(step(call, torch.compile(call.run, fullgraph=True, backend="aot_eager"), x), expected)
    assert generator_state(device).equal(after)


@on_devices
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.extended)])
def test_without_gradients(backend: str, device: str) -> None:
    block, x = make_block(device, dropout=0.0), make_x(device)
    want = block(x)
    with torch.no_grad():
        assert torch.equal(torch.compile(block, fullgraph=True, backend=backend)(x), want)


@on_devices
@pytest.mark.parametrize(("backend", "blocks"), by_turns(["aot_eager", "eager"], [1, 2]))
def test_second_order_is_right_or_refused(backend: str, blocks: int, device: str) -> None:
    sequential = FusedCheckpointSequential(*(make_block(device, dropout=0.0) for _ in range(blocks)))
    x = make_x(device)
    compiled = torch.compile(sequential, fullgraph=True, backend=backend)
    first, second = penalties(sequential, x)
    (kept,) = torch.autograd.grad(compiled(x).square().sum(), x, create_graph=True)
    assert torch.equal(first, kept)
    if backend == "eager":
        assert all(torch.equal(a, b) for a, b in zip((first, second), penalties(compiled, x), strict=True))
    else:
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            (x.sum() + kept.square().sum()).backward()


def penalties(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x, and that of its squares' sum beside another loss."""
    (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(x.sum() + first.square().sum(), x)
    return first.detach(), second
