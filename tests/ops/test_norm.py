"""The op of a norm by itself: its gradients, what it saves, its bytes under a ledger, and its derivatives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ckptfused.cost.open_ledger import OpenLedger
from ckptfused.eager.norm import norm as eager_norm
from ckptfused.ops.norm import norm
from tests.devices import on_devices

KINDS = ("layernorm", "rmsnorm", "gemma", "layernorm1p")
kinds = pytest.mark.parametrize("kind", KINDS)
EPS = 1e-5


def inputs(kind: str, dtype: torch.dtype, device: str = "cpu", rows: tuple[int, ...] = (3, 5)) -> list[Tensor]:
    """x and the norm's tensors."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(*rows, 24), (24,), *([(24,)] if "layernorm" in kind else [])]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [t.to(device, dtype).requires_grad_() for t in made]


def with_bias(tensors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    x, weight, *bias = tensors
    return x, weight, bias[0] if bias else None


def gradients(function: object, tensors: list[Tensor], kind: str) -> list[Tensor]:
    y = function(*with_bias(tensors), kind, EPS)  # type: ignore[operator]
    dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y)
    return [y.detach(), *torch.autograd.grad(y, tensors, dy)]


@on_devices
@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients(kind: str, dtype: torch.dtype, device: str) -> None:
    """At most twice plain PyTorch's error against float64, and half a unit of the last place."""
    tensors = inputs(kind, dtype, device)
    exact = gradients(eager_norm, [t.detach().double().requires_grad_() for t in tensors], kind)
    found, plain = (gradients(function, tensors, kind) for function in (norm, eager_norm))
    for ours, theirs, truth in zip(found, plain, exact, strict=True):
        lost, usual = ((t.double() - truth).norm() for t in (ours, theirs))
        assert lost <= 2 * usual + torch.finfo(dtype).eps / 2 * truth.norm()


def test_it_saves_its_input_alone() -> None:
    tensors, saved = inputs("rmsnorm", torch.bfloat16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        norm(*with_bias(tensors), "rmsnorm", EPS)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in tensors}


@pytest.mark.parametrize("frozen", [False, True])
def test_bytes(frozen: bool) -> None:
    """Backward holds the gradient of x, and sums over chunks of rows for that of the weight."""
    x = torch.empty(4096, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(64, dtype=torch.bfloat16, device="meta", requires_grad=not frozen)
    with OpenLedger("cuda") as forward:
        y = norm(x, weight, None, "rmsnorm", EPS)
    dy = torch.empty_like(y)
    with OpenLedger("cuda") as backward:
        held = torch.autograd.grad(y, [x] if frozen else [x, weight], dy)
    assert forward.ledger.peak == forward.ledger.live == x.nbytes
    assert x.nbytes <= backward.ledger.peak < x.nbytes * (1.001 if frozen else 1.3)
    assert sum(t.nbytes for t in held) == backward.ledger.live
    assert backward.ledger.launches["norm_bwd"] == 1


@kinds
def test_first_and_second_derivatives(kind: str) -> None:
    tensors = inputs(kind, torch.float64)
    assert torch.autograd.gradcheck(lambda *own: norm(*with_bias(list(own)), kind, EPS), tensors)
    assert torch.autograd.gradgradcheck(lambda *own: norm(*with_bias(list(own)), kind, EPS), tensors)


@on_devices
@kinds
def test_opcheck(kind: str, device: str) -> None:
    tensors = inputs(kind, torch.float32, device)
    torch.library.opcheck(torch.ops.ckptfused.norm, (*with_bias(tensors), kind, EPS))
    plain = [t.detach() for t in tensors]
    call = (torch.ones_like(plain[0]), *with_bias(plain), kind, EPS, [True, True, len(plain) > 2])
    torch.library.opcheck(torch.ops.ckptfused.norm_grads, call)


def test_any_rows() -> None:
    """None, one without a batch, and rows that lie apart in memory."""
    empty = inputs("rmsnorm", torch.float32, rows=(0,))
    assert [tuple(t.shape) for t in gradients(norm, empty, "rmsnorm")] == [(0, 24), (0, 24), (24,)]
    one = inputs("layernorm", torch.float64, rows=())
    apart = inputs("layernorm", torch.float64, rows=(5, 3))
    for x, *rest in (one, [apart[0].transpose(0, 1), *apart[1:]]):
        call = with_bias([x, *rest])
        torch.testing.assert_close(norm(*call, "layernorm", EPS), eager_norm(*call, "layernorm", EPS))
