"""FusedCheckpointSequential as the `nn.Sequential` that it is: its operations, and other modules between blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ckptfused
from ckptfused import FusedCheckpointBlock, FusedCheckpointFFN, FusedCheckpointSequential
from tests.accounting import CountOps, saved_bytes

B, T, C, H, HIDDEN = 2, 6, 16, 4, 24


def block(**options: Any) -> FusedCheckpointBlock:
    return FusedCheckpointBlock.llama(C, H, HIDDEN, **{"dropout": 0.2, **options})


def sequence(count: int = 4, segments: int = 2) -> FusedCheckpointSequential:
    return FusedCheckpointSequential(*(block() for _ in range(count)), segments=segments)


def source() -> Tensor:
    return torch.randn(B, T, C, requires_grad=True)


def results(function: Callable[..., Tensor], module: nn.Module, x: Tensor, *args: Any) -> list[Tensor]:
    torch.manual_seed(7)
    y = function(x, *args)
    return [y, torch.rand(3), *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


def check_one_by_one(sequential: FusedCheckpointSequential, x: Tensor) -> None:
    """Outputs, gradients and what the generator gives next are those of `nn.Sequential`."""
    expected, actual = (results(f, sequential, x) for f in (nn.Sequential(*sequential), sequential))
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


def counts(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[int, int]:
    with CountOps() as ops:
        function(x).sum().backward()
    return ops.blocks


def test_slices_have_their_share_of_the_segments() -> None:
    sequential = sequence(4, segments=2)
    for part, length, segments in (
        (sequential[:], 4, 2),
        (sequential[1:], 3, 2),
        (sequential[:2], 2, 1),
        (sequential[::3], 2, 1),
        (sequential[4:], 0, 1),
    ):
        assert type(part) is FusedCheckpointSequential
        assert (len(part), part.segments) == (length, segments)
    assert sequential[1:][0] is sequential[1] is sequential[-3]
    assert list(sequential[1:].state_dict()) == list(nn.Sequential(*sequential)[1:].state_dict())
    check_one_by_one(sequential[1:], source())


def test_names() -> None:
    named = FusedCheckpointSequential(OrderedDict(first=block(), second=block()), segments=2)
    assert [name for name, _ in named.named_children()] == ["first", "second"]
    assert named.first is named[0]
    check_one_by_one(named, source())


def test_insertion_among_names() -> None:
    """`nn.Sequential.insert` raises KeyError('1')."""
    named = FusedCheckpointSequential(OrderedDict(first=block(), second=block()))
    made = [block() for _ in range(4)]
    named.append(made[0]).insert(1, made[1]).insert(5 - 1, made[2]).insert(-1, made[3])
    assert [name for name, _ in named.named_children()] == ["first", "3", "second", "2", "5", "4"]
    assert [named[i] for i in (3, 1, 5, 4)] == made
    check_one_by_one(named, source())
    with pytest.raises(IndexError):
        named.insert(9, block())


def test_it_says_what_runs_by_itself_and_why() -> None:
    sequential = FusedCheckpointSequential(block(), block(), nn.Tanh(), FusedCheckpointFFN(C, HIDDEN), block())
    said = "not in a segment: 2 (Tanh is no fused module)"
    assert repr(sequential).splitlines()[1].strip() == f"segments=1, {said}"
    sequential[1].self_attn.register_forward_hook(lambda module, args, y: None)
    sequential[4].register_forward_hook(lambda module, args, y: None)
    sequential[3].activation = torch.tanh
    for why in ("1 (self_attn has a hook", "3 (activation tanh has no kernel)", "4 (it has a hook"):
        assert why in repr(sequential)
    with pytest.raises(ValueError, match="generator: leave it out, .*runs generically"):
        sequential(source(), generator=torch.Generator())
    assert "not in" not in repr(sequence())


def test_modules_that_come_and_go() -> None:
    sequential = sequence(2, segments=2)
    sequential.append(block()).insert(0, block()).extend([block()])
    assert (len(sequential), sequential.segments) == (5, 2)
    check_one_by_one(sequential, source())
    del sequential[1:]
    assert (len(sequential), sequential.segments) == (1, 2)
    check_one_by_one(sequential, source())
    sequential[0] = block()
    sequential += sequence(2)
    assert isinstance(sequential.pop(0), FusedCheckpointBlock)
    assert (len(sequential), sequential.segments) == (2, 2)
    check_one_by_one(sequential, source())
    # One segment replays its first block, two replay none.
    assert counts(sequential, source()) == (2, 2)
    sequential.segments = 1
    assert counts(sequential, source()) == (3, 2)


def test_sums_and_products() -> None:
    first, second = sequence(2, segments=1), sequence(3, segments=2)
    for made, length, segments in (
        (first + second, 5, 3),
        (first + nn.Sequential(block(), nn.Tanh()), 4, 2),
        (first * 2, 4, 2),
        (2 * second, 6, 4),
        (FusedCheckpointSequential() + nn.Sequential(), 0, 1),
    ):
        assert type(made) is FusedCheckpointSequential
        assert (len(made), made.segments) == (length, segments)
    assert (first + second)[4] is second[2]
    check_one_by_one(first + second, source())
    with pytest.raises(ValueError, match="supports only objects of Sequential class"):
        first + block()


class Running(nn.Module):
    """Writes its buffer in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(C))
        self.register_buffer("mean", torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)), 0.1)
        return x * self.weight + self.mean


def test_other_modules_between() -> None:
    running = Running()
    others = (nn.Linear(C, C), nn.ReLU(inplace=True), nn.Dropout(0.3), running)
    sequential = FusedCheckpointSequential(block(), block(), *others, block(), segments=2)
    x = source()
    expected = results(nn.Sequential(*sequential), sequential, x)
    mean, _ = running.mean.clone(), running.mean.zero_()
    actual = results(sequential, sequential, x)
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))
    assert torch.equal(running.mean, mean)
    assert counts(sequential, x) == (4, 3)  # the first run of two replays one


def test_what_other_modules_save() -> None:
    """Their inputs alone."""
    wide = nn.Sequential(nn.Linear(C, 50 * C), nn.GELU(), nn.Linear(50 * C, C))
    sequential = FusedCheckpointSequential(block(dropout=0.0), wide, block(dropout=0.0))
    x = source()
    assert saved_bytes(lambda: sequential(x), sequential) == 3 * x.nbytes


def test_masks_go_to_those_that_take_them() -> None:
    mask, padding = torch.rand(T, T) < 0.4, torch.zeros(B, T, dtype=torch.bool)
    mask.fill_diagonal_(False)
    padding[1, 4:] = True
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
    layer = nn.TransformerEncoderLayer(C, H, HIDDEN, **options)
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(C, H, HIDDEN, **options), 2, enable_nested_tensor=False)
    inner = FusedCheckpointSequential(block(dropout=0.0), FusedCheckpointFFN(C, HIDDEN, 0.0))
    sequential = FusedCheckpointSequential(block(dropout=0.0), layer, nn.LayerNorm(C), stack, inner)

    def one_by_one(x: Tensor, *masks: Any) -> Tensor:
        x = layer(sequential[0](x, *masks), *masks)
        x = stack(sequential[2](x), *masks)
        return inner[1](inner[0](x, *masks))

    x = source()
    expected, actual = (results(f, sequential, x, mask, padding) for f in (one_by_one, sequential))
    torch.testing.assert_close(actual, expected)
    assert not torch.allclose(actual[0], sequential(x))


def test_a_hooked_block_and_a_converted_layer_inside() -> None:
    seen: list[Any] = []
    layers = [nn.TransformerEncoderLayer(C, H, HIDDEN, dropout=0.2, batch_first=True) for _ in range(2)]
    sequential = FusedCheckpointSequential(block(), *layers, block())
    assert ckptfused.convert(sequential).fused == 2
    sequential[3].register_forward_hook(lambda module, args, y: seen.append(y.shape))
    x = source()
    check_one_by_one(sequential, x)
    assert len(seen) == 2
    # Converted layers checkpoint themselves: nothing is replayed around their ops.
    assert counts(sequential, x) == (4, 4)


def test_an_outer_checkpoint_that_restores_no_random_state() -> None:
    sequential = FusedCheckpointSequential(block(), nn.Tanh(), block(), block())
    for generator in (None, torch.Generator().manual_seed(3)):
        inner = sequential if generator is None else sequential[2:]

        def around(x: Tensor, inner: nn.Module = inner, generator: Any = generator) -> Tensor:
            return torch_checkpoint(inner, x, use_reentrant=False, preserve_rng_state=False, generator=generator)

        found = []
        for function in (lambda x, i=inner, g=generator: i(x, generator=g), around):
            if generator is not None:
                generator.manual_seed(3)
            found.append(results(function, inner, source_of(5)))
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def source_of(seed: int) -> Tensor:
    return torch.randn(B, T, C, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_a_checkpoint_around_one_segment_replays_nothing() -> None:
    sequential = sequence(3, segments=1)
    x = source()
    assert counts(lambda x: torch_checkpoint(sequential, x, use_reentrant=False), x) == counts(sequential, x) == (5, 3)


@pytest.mark.slow
def test_compiles_whole_with_other_modules() -> None:
    torch.compiler.reset()
    sequential = FusedCheckpointSequential(block(dropout=0.0), nn.Linear(C, C), block(dropout=0.0), block(dropout=0.0))
    compiled = torch.compile(sequential, fullgraph=True, backend="aot_eager")
    x = source()
    expected, actual = results(sequential, sequential, x), results(compiled, sequential, x)
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))
