"""The loss head's ledger against PyTorch's allocator, to the byte: the peak of a forward, of a backward, what stays."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ckptfused.cost import loss_ledgers
from ckptfused.cost.loss import loss_saved_bytes
from ckptfused.spec import HEAD, Adapter, LossSpec
from tests.accounting import Events

TOKENS, WIDTH, CLASSES = (3, 43), 48, 517


@dataclass(frozen=True)
class Head:
    """A call, of which `frozen` names what is not trained."""

    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None
    bias: bool = False
    weighted: bool = False
    ranks: tuple[int, ...] = ()
    frozen: str = ""

    def tensors(self) -> list[Tensor | None]:
        """x, weight, bias, class_weight, and of each adapter a, b, bias."""
        generator = torch.Generator().manual_seed(0)

        def normal(name: str, *shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            values = 0.1 * torch.randn(shape, generator=generator)
            return values.to(dtype).requires_grad_(name not in self.frozen)

        made: list[Tensor | None] = [normal("x", *TOKENS, WIDTH)]
        made.append(normal("weight", CLASSES, WIDTH, dtype=self.weight_dtype or self.dtype))
        made.append(normal("bias", CLASSES) if self.bias else None)
        made.append(torch.linspace(0.5, 2, CLASSES) if self.weighted else None)
        for rank in self.ranks:
            made += [normal("lora", rank, WIDTH), normal("lora", CLASSES, rank), None]
        return made


HEADS = {
    "float32": Head(),
    "float64": Head(torch.float64),
    "bfloat16": Head(torch.bfloat16),
    "float16": Head(torch.float16),
    "autocast": Head(torch.float32),
    "bias, class weight": Head(bias=True, weighted=True),
    "frozen": Head(frozen="weight"),
    "frozen bfloat16": Head(torch.bfloat16, frozen="weight"),
    "x frozen": Head(torch.bfloat16, frozen="x"),
    "adapter": Head(torch.bfloat16, ranks=(4,), frozen="weight"),
    "adapters, bias": Head(ranks=(4, 2), bias=True),
}
PIECES = {"one piece": 1 << 30, "pieces": 40_000}


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("name", HEADS)
def test_peaks(name: str, pieces: str) -> None:
    head = HEADS[name]
    lora = tuple(Adapter(HEAD, rank, 0.5) for rank in head.ranks)
    compute = "bfloat16" if name == "autocast" else None
    target = torch.randint(CLASSES, TOKENS, generator=torch.Generator().manual_seed(1))
    for keep, reduction in itertools.product(("gradients", "inputs"), ("sum", "none")):
        spec = LossSpec(keep=keep, reduction=reduction, scratch=PIECES[pieces], compute=compute, lora=lora)
        x, weight, bias, class_weight, *adapters = tensors = head.tensors()
        assert x is not None and weight is not None
        expected = loss_ledgers(spec, x, weight, bias, class_weight, adapters)
        op, text = torch.ops.ckptfused.linear_cross_entropy, spec.to_string()
        forward = Events(lambda: op(x, weight, bias, target, class_weight, adapters, text))  # noqa: B023
        wanted = [t for t in tensors if t is not None and t.requires_grad]
        loss = forward.result[0]
        dloss = torch.full(loss.shape, 0.5, dtype=loss.dtype)
        backward = Events(lambda: torch.autograd.grad(loss, wanted, dloss))  # noqa: B023
        measured = [(events.peak_bytes(), events.live_bytes()) for events in (forward, backward)]
        assert measured == [(ledger.peak, ledger.live) for ledger in expected], spec


def test_saved_bytes() -> None:
    """What a forward leaves beside its results is what is saved for backward."""
    for name, head in HEADS.items():
        x, weight, bias, class_weight, *adapters = tensors = head.tensors()
        assert x is not None and weight is not None
        spec = LossSpec(lora=tuple(Adapter(HEAD, rank, 0.5) for rank in head.ranks))
        needs = [t is not None and t.requires_grad for t in (*tensors[:3], *adapters)]
        tokens = x[..., 0].numel()
        wide = 8 if head.dtype == torch.float64 else 4
        results = wide + tokens * (wide + 8)  # loss, token_loss and predicted; the log-sum-exp is saved
        saved = loss_saved_bytes(spec, x.shape, weight.shape, needs, x.dtype, weight.dtype)
        assert loss_ledgers(spec, x, weight, bias, class_weight, adapters)[0].live == results + saved, name


@pytest.mark.parametrize(("reduction", "more"), [("mean", 8), ("sum", 0), ("none", 0)])
def test_a_gpu_keeps_the_divisor_of_a_mean(reduction: str, more: int) -> None:
    call = LossSpec(reduction=reduction), (3, 5, 16), (19, 16), [True, True, False], torch.float32, torch.float32
    assert loss_saved_bytes(*call, device="cuda") - loss_saved_bytes(*call) == more


@pytest.mark.parametrize(
    ("width", "classes", "dtype", "device", "rows"),
    [
        (2048, 128256, torch.float32, "cpu", 512),  # 26 MB of weight traffic a row: the products hide 512
        (1024, 128256, torch.float32, "cpu", 512),
        (512, 128256, torch.float32, "cpu", 256),  # half the bytes of the weight
        (384, 32768, torch.float32, "cpu", 256),  # 32 MiB
        (4096, 128256, torch.bfloat16, "cuda", 1056),  # 256 MiB
        (3584, 256000, torch.bfloat16, "cuda", 1024),
        (256, 256000, torch.bfloat16, "cuda", 528),  # 256 MiB
    ],
)
def test_rows_of_a_piece_where_nothing_is_said(
    width: int, classes: int, dtype: torch.dtype, device: str, rows: int
) -> None:
    """65,536 rows go in pieces of one size: as many as there is room for, rounded up to 16."""
    x = torch.empty(65536, width, dtype=dtype, device="meta", requires_grad=True)
    weight = torch.empty(classes, width, dtype=dtype, device="meta")
    products = [e for e in loss_ledgers(LossSpec(), x, weight, device=device)[0].events if e[0] == "product"]
    assert max(e[3][0] for e in products) == rows


def test_pieces_lower_the_peak_on_a_gpu() -> None:
    """A Llama-3-8B head at 8,192 tokens: counted, not run."""
    x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(128256, 4096, dtype=torch.bfloat16, device="meta")
    whole, pieces = (
        loss_ledgers(LossSpec(scratch=scratch), x, weight, device="cuda")[0].peak for scratch in (1 << 40, 256 << 20)
    )
    rows = 8192 // 8 * 2 * 128256  # 2.1 GB of logits in eight pieces
    assert whole - pieces == 7 * rows


@pytest.mark.parametrize(("device", "stride"), [("cpu", 1001), ("cuda", 1008)])
def test_rows_of_logits_are_aligned_on_a_gpu(device: str, stride: int) -> None:
    """Sixteen bytes at a time, whatever the vocabulary."""
    x, weight = (torch.empty(n, 32, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in (64, 1001))
    for spec, again in ((LossSpec(), 0), (LossSpec(keep="inputs"), 1)):
        held = [
            [event[3][1] for event in ledger.events if event[:2] == ("allocation", "logits")]
            for ledger in loss_ledgers(spec, x, weight, device=device)
        ]
        assert held == [[2 * 64 * stride], [2 * 64 * stride] * again]
