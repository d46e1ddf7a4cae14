"""What the FFN half adds up over tiles of its hidden width, and products that run on one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from ckptfused import cost
from ckptfused.functional import ffn_block
from ckptfused.spec import Adapter, BlockSpec, FFNSpec, param_shapes

OPS = torch.ops.ckptfused
ROWS, WIDTH, HIDDEN = 64, 8, 256


@pytest.mark.parametrize("act", ["relu", "swiglu"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_input_gradient_is_summed_in_float32(act: str, transposed: bool) -> None:
    """Two tiles of columns whose shares cancel: what bfloat16 would have rounded off the first, 2⁻⁹ of it, is left.

    The tiles are the same but for the sign of the down weight, so that their shares are equal but for the sign, bit for
    bit. Each is 64 times dy, and dx = dy + their sum: 64 · 2⁻⁹ dy off where the sum is rounded to bfloat16 on the way,
    dy (as near as bfloat16 has it, 2⁻⁹) where it is not.
    """
    gated = act == "swiglu"
    limit = (3 if gated else 2) * ROWS * HIDDEN * 2 // 2
    spec = BlockSpec(ffn=FFNSpec(act, HIDDEN, transposed=transposed), scratch=limit)
    assert cost.ffn_tiles(ROWS, WIDTH, HIDDEN, gated, 2, limit) == (ROWS, HIDDEN // 2)
    generator = torch.Generator().manual_seed(0)

    def twice(std: float, sign: int) -> Tensor:
        half = torch.randn(HIDDEN // 2, WIDTH, generator=generator) * std
        return torch.cat((half, sign * half)).bfloat16()

    params = {"ffn.up_w": twice(1.0, 1), "ffn.down_w": twice(32 / (HIDDEN // 2) ** 0.5, -1).t().contiguous()}
    if gated:
        params["ffn.gate_w"] = twice(1.0, 1)
    if transposed:
        params = {name: t.t().contiguous() for name, t in params.items()}
    x = torch.randn(1, ROWS, WIDTH, generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(1, ROWS, WIDTH, generator=generator).bfloat16()
    (dx,) = torch.autograd.grad(ffn_block(x, params, spec), x, dy)
    error = (dx.float() - dy.float()).abs().max() / dy.abs().max()
    assert error < 2**-7, error


@pytest.fixture
def _threads() -> Iterator[None]:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)


def _lone_attention() -> list[Tensor]:
    """One head, one tile of queries and of keys; a mask keeps PyTorch's own kernel away."""
    q, k, v, do = (torch.randn(1, 1, 128, 256) for _ in range(4))
    how = (torch.ones(128, 128, dtype=torch.bool), None, None, None, "keep", "none", 0.1, False, 0, 0.0, 0.0)
    o, lse = OPS.attention_fwd(q, k, v, *how)
    return [o, lse, *OPS.attention_bwd(do, q, k, v, o, lse, *how)]


def _lone_adapter() -> list[Tensor]:
    """One block of rows. The base products are of zeros, the same in any order of the sums."""
    spec = BlockSpec(ffn=FFNSpec("silu", 24, lora=(Adapter("up", 16), Adapter("down", 8))))
    width = 6000
    params = {
        name: torch.randn(shape).requires_grad_() if ".lora" in name else torch.zeros(shape)
        for name, (shape, _) in param_shapes(spec, width).items()
    }
    x = torch.randn(1, 100, width).requires_grad_()
    trained = [x, *(t for t in params.values() if t.requires_grad)]
    y = ffn_block(x, params, spec)
    return [y.detach(), *torch.autograd.grad(y, trained, torch.randn(1, 100, width))]


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("precision", ["highest", "medium"])
@pytest.mark.parametrize("work", [_lone_attention, _lone_adapter], ids=lambda work: work.__name__[1:])
def test_a_lone_task_runs_on_one_thread(work: Callable[[], list[Tensor]], precision: str) -> None:
    """A task that is alone runs outside of any parallel region, where a matrix library would take all threads."""
    torch.set_float32_matmul_precision(precision)
    results = []
    for threads in (1, 2, 3, 4):
        torch.manual_seed(0)
        torch.set_num_threads(threads)
        results.append(work())
    for other in results[1:]:
        for one, several in zip(results[0], other, strict=True):
            assert torch.equal(one, several)
