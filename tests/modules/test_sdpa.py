"""A function in the place of `F.scaled_dot_product_attention` is called, or refused; it is never overlooked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ckptfused import FusedCheckpointAttention, FusedCheckpointBlock, FusedCheckpointSequential, explain
from ckptfused.layer.sdpa import sdpa_replaced

B, T, C, H = 2, 6, 16, 4
OWN = F.scaled_dot_product_attention
Replaced = Callable[[], AbstractContextManager[None]]


@contextmanager
def another_function() -> Iterator[None]:
    F.scaled_dot_product_attention = lambda *args, **kwargs: -3 * OWN(*args, **kwargs)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = OWN


class _Mode(TorchFunctionMode):
    """Replaces attention where a mode meets it: what is called within a function that it meets is out of its reach."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.multi_head_attention_forward:
            with another_function():
                return function(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


@contextmanager
def a_mode() -> Iterator[None]:
    with _Mode():
        yield


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    y = module(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


replaced = pytest.mark.parametrize("there", [another_function, a_mode], ids=["function", "mode"])


@replaced
def test_a_block_calls_it(there: Replaced) -> None:
    plain = nn.TransformerEncoderLayer(C, H, 32, dropout=0.0, batch_first=True)
    block, x = FusedCheckpointBlock.from_layer(plain), torch.randn(B, T, C, requires_grad=True)
    assert block.generic_reason() is None
    with there():
        assert block.generic_reason() is not None
        assert "scaled_dot_product_attention is not PyTorch's own" in str(explain(block, x, show=False))
        expected, found = gradients(plain, x), gradients(block, x)
        in_a_row = gradients(FusedCheckpointSequential(block), x)
    for a, b, c in zip(found, expected, in_a_row, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(c, b)
    assert not torch.allclose(found[0], block(x))


@replaced
def test_an_attention_half_calls_it(there: Replaced) -> None:
    half, x = FusedCheckpointAttention(C, H, 0.0, batch_first=True, norm="none"), torch.randn(B, T, C)
    attention = half(x) - x
    with there():
        found = half(x) - x
    bias = half.self_attn.out_proj.bias
    torch.testing.assert_close(found - bias, -3 * (attention - bias))


@replaced
@pytest.mark.parametrize("make", [FusedCheckpointBlock.llama, FusedCheckpointAttention])
def test_attention_that_cannot_call_it_refuses(make: Any, there: Replaced) -> None:
    options = {} if make is FusedCheckpointBlock.llama else {"causal": True, "batch_first": True}
    module, x = make(C, H, **options), torch.randn(B, T, C)
    with there(), pytest.raises(RuntimeError, match=r"self_attn: expected PyTorch's own scaled_dot_product_attention"):
        module(x)
    module(x)


def test_backward_with_another_function_is_refused() -> None:
    block, x = FusedCheckpointBlock(C, H, 32), torch.randn(B, T, C)
    with another_function():
        y = block(x)
    with pytest.raises(RuntimeError, match="scaled_dot_product_attention: expected in backward"):
        y.sum().backward()


@pytest.mark.slow
def test_compiled() -> None:
    torch._dynamo.reset()
    block, x = FusedCheckpointBlock(C, H, 32, dropout=0.0), torch.randn(B, T, C)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    own = compiled(x)
    with another_function():
        torch.testing.assert_close(compiled(x), block(x))
        assert not torch.allclose(compiled(x), own)
    assert torch.equal(compiled(x), own)


def test_compiled_under_a_mode() -> None:
    torch._dynamo.reset()
    ask = torch.compile(sdpa_replaced, backend="eager", fullgraph=True)
    assert not ask()
    with _Mode():
        assert ask()
    assert not ask()


def test_context_parallel_is_seen(tmp_path: Any) -> None:
    from torch.distributed.tensor.experimental import context_parallel

    dist.init_process_group("gloo", store=dist.FileStore(os.fspath(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        with context_parallel(mesh, buffers=[torch.zeros(B, T)], buffer_seq_dims=[1]):
            assert sdpa_replaced()
        assert not sdpa_replaced()
    finally:
        dist.destroy_process_group()


def test_modes_of_devices_replace_nothing() -> None:
    with torch.device("cpu"):
        assert not sdpa_replaced()
    torch.set_default_device("cpu")
    try:
        assert not sdpa_replaced()
    finally:
        torch.set_default_device(None)


def test_export_stays_fused() -> None:
    block, x = FusedCheckpointBlock(C, H, 32, dropout=0.0).eval(), torch.randn(T, B, C)
    program = torch.export.export(block, (x,), strict=False)
    assert any("ckptfused" in str(node.target) for node in program.graph.nodes)
