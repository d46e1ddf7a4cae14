"""What ops allocate within themselves on this CPU: steps of models in which that is much, predicted and measured."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptfused import checkpoint, convert, plan, profile, revert
from ckptfused.compat.torch_memory import allocations, copy_on_write
from ckptfused.simulate import scratch
from ckptfused.simulate.scratch import OpMemory, Scratch
from tests.cases import by_turns

pytestmark = pytest.mark.once
aten: Any = torch.ops.aten


def doubled(into: int, out: int) -> nn.Sequential:
    layers = [(nn.Conv2d(a, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()) for a in (into, out)]
    return nn.Sequential(*layers[0], *layers[1])


class UNet(nn.Module):
    """Two scales, and the way back by a transposed convolution."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down, self.deep, self.up = doubled(3, width), doubled(width, 2 * width), doubled(2 * width, width)
        self.pool, self.grow = nn.MaxPool2d(2), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        y: Tensor = self.out(self.up(torch.cat([self.grow(self.deep(self.pool(x))), x], 1)))
        return y


class ConvNeXtLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


class Residual(nn.Module):
    """ResNet's block, which halves the picture."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(into, out, 3, 2, 1, bias=False), nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm1, self.norm2, self.relu = nn.BatchNorm2d(out), nn.BatchNorm2d(out), nn.ReLU(inplace=True)
        self.down = nn.Conv2d(into, out, 1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x))))) + self.down(x))
        return y


class Functional(nn.Module):
    """No module that is a convolution; one in one dimension, one with holes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(24, 3, 5, 5) / 9), nn.Parameter(torch.randn(8, 6, 3) / 9)

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv2d(x, self.a, padding=2, dilation=1).relu()
        return F.conv1d(y.flatten(2), self.b, padding=2, dilation=2, groups=4)


class Products(nn.Module):
    """Einstein sums and batches of products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 48, 48) / 9)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("btc,hcd->bhtd", x, self.weight)
        scores = torch.einsum("bhtd,bhsd->bhts", y, y).softmax(-1)
        return torch.einsum("bhts,bhsd->btd", scores, y)


class Called(nn.Module):
    """A function of the results of a linear map, beside a residual; under a checkpoint, if so asked."""

    def __init__(self, function: Callable[[Tensor], Tensor], checkpointed: bool = False) -> None:
        super().__init__()
        self.function, self.checkpointed = function, checkpointed
        # Under a dispatch mode PyTorch adds a bias to strewn rows out of place.
        self.inner = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.apart, x) if self.checkpointed else self.apart(x)

    def apart(self, x: Tensor) -> Tensor:
        return x + self.inner(self.function(x))


class Columns(nn.Module):
    """A function of [B, T, C] along T: kernels get an operand that is not contiguous."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x.mT).mT


def patches(x: Tensor) -> Tensor:
    """Sums over patches of 3 x 3, whose gradients PyTorch adds up in the memory of all patches."""
    picture = x.mT.unflatten(-1, (8, -1))
    return F.unfold(picture, 3, padding=1).unflatten(1, (-1, 9)).mean(2).mT


def conjugates(x: Tensor) -> Tensor:
    """Products with what is conjugated, which kernels copy."""
    c = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(c @ c.mH @ c).flatten(2)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(50, 32), kind(32, 48, 2, **options)
        self.head = nn.Linear(48 * (1 + self.inner.bidirectional), 50)

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.inner(self.embed(ids))[0]).flatten(0, 1), ids.flatten())


def images(count: int, side: int) -> Tensor:
    return torch.randn(count, 3, side, side)


def stack(function: Callable[[], Callable[[Tensor], Tensor]], checkpointed: bool = False) -> Callable[[], Any]:
    """Three layers of `Called`, with tokens [4, 64, 32]."""
    return lambda: (
        nn.Sequential(*(Called(function(), checkpointed) for _ in range(3))),
        torch.randn(4, 64, 32, requires_grad=True),
    )


EXACT: dict[str, Callable[[], Any]] = {
    "softmax": stack(lambda: lambda x: (x @ x.mT).mT.softmax(-1) @ x),
    "log-sigmoid": stack(lambda: Columns(F.logsigmoid)),
    "patches": stack(lambda: patches),
    "patches, checkpointed": stack(lambda: patches, True),
    "products of conjugates": stack(lambda: conjugates),
    "norm": stack(lambda: Columns(nn.BatchNorm1d(32))),
    "norm, checkpointed": stack(lambda: Columns(nn.BatchNorm1d(32)), True),
}
"""Layers of which kernels copy operands, save what they hold a copy beside, or lay results out in their own way."""
MODELS = {
    "unet": lambda: (UNet(), images(2, 64)),
    "unet, channels last": lambda: (
        UNet().to(memory_format=torch.channels_last),
        images(2, 64).to(memory_format=torch.channels_last),
    ),
    "convnext": lambda: (
        nn.Sequential(nn.Conv2d(3, 32, 4, 4), *(ConvNeXtLayer(32) for _ in range(3))),
        images(4, 64),
    ),
    "resnet": lambda: (nn.Sequential(Residual(3, 32), Residual(32, 48), Residual(48, 64)), images(4, 64)),
    "functional": lambda: (Functional(), images(3, 40)),
    "products": lambda: (Products(), torch.randn(4, 64, 48)),
    "lstm": lambda: (Recurrent(nn.LSTM, batch_first=True), torch.randint(50, (6, 40))),
    "lstm, projected": lambda: (
        nn.Sequential(nn.LSTM(32, 48, proj_size=16), First()),
        torch.randn(20, 4, 32, requires_grad=True),
    ),
    "lstm, both ways": lambda: (Recurrent(nn.LSTM, bidirectional=True, dropout=0.1), torch.randint(50, (6, 40))),
    "gru": lambda: (Recurrent(nn.GRU), torch.randint(50, (6, 40))),
    "rnn": lambda: (Recurrent(nn.RNN, batch_first=True), torch.randint(50, (6, 40))),
    "rnn, relu": lambda: (Recurrent(nn.RNN, nonlinearity="relu", bidirectional=True), torch.randint(50, (6, 40))),
}


class First(nn.Module):
    def forward(self, results: tuple[Tensor, Any]) -> Tensor:
        return results[0]


OVER = {
    # A layer alone keeps two results and the last states more than in a step. Where products in bfloat16 hold memory of
    # their own, as on AMX, the peak is in backward, in which that shows.
    "gru": (2 * 40 + 2) * 6 * 48 * 2,
    # Made of single ops, it keeps its input, which a step has beside it, and both ways some results twice.
    "rnn": 34 << 10,
    "rnn, relu": 84 << 10,
}
"""Bytes that a prediction may be above a step under autocast (`nn.RNN` without, too), where that is more than 5%: as it
was measured with ONEDNN_MAX_CPU_ISA from AVX2 to AVX512_CORE_AMX, and no more."""
if "avx512_bf16" not in Path("/proc/cpuinfo").read_text():  # on a Xeon without, in backward
    OVER["lstm, projected"] = 18_436


@pytest.mark.parametrize(("name", "autocast"), by_turns(MODELS, [None, "bfloat16"]))
def test_no_step_needs_more_than_was_predicted(name: str, autocast: str | None) -> None:
    """Convolutions and products agree to a byte; recurrent layers keep what oneDNN keeps."""
    model, batch = MODELS[name]()
    predicted, measured = (profile(model, batch, torch.optim.AdamW, way, autocast) for way in ("cpu", None))
    if autocast is None and name not in ("lstm", "lstm, projected", "lstm, both ways", "gru", "rnn", "rnn, relu"):
        assert predicted.peak == measured.peak
    most = max(0.05 * measured.above_state, OVER.get(name, 0) if autocast or name.startswith("rnn") else 0)
    assert measured.above_state <= predicted.above_state <= measured.above_state + most


@pytest.mark.parametrize("name", EXACT)
def test_what_kernels_copy_is_predicted_to_the_byte(name: str) -> None:
    model, batch = EXACT[name]()
    predicted, measured = (profile(model, batch, None, way) for way in ("cpu", None))
    assert predicted.peak == measured.peak
    predicted_most, measured_most = (max(layer.forward_transient for layer in p.layers) for p in (predicted, measured))
    assert predicted_most == measured_most


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnext", "unet", "resnet", "products", "lstm", "gru"])
def test_a_step_stays_within_its_budget(name: str) -> None:
    model, batch = MODELS[name]()
    if name not in ("convnext", "resnet"):
        model = nn.Sequential(model)
    most = plan(model, batch, "8GiB", torch.optim.SGD, "cpu").front
    for point in (most[0], most[-1]):
        found = plan(model, batch, point.peak + (1 << 14), torch.optim.SGD, "cpu")
        convert(model, policy=found.policy)
        assert profile(model, batch, torch.optim.SGD).peak <= found.peak <= found.budget
        revert(model)


def test_what_convolutions_hold_is_said() -> None:
    model, x = MODELS["functional"]()
    for found in (profile(model, x, device="cpu"), plan(model, x, "1GiB", torch.optim.SGD, "cpu")):
        assert [note for note in found.notes if note.startswith("convolutions hold up to") and "measured" in note]
    assert profile(model, x, device="h200").notes == ()


CONVOLUTION: Any = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def test_of_a_large_convolution_a_part_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part counts as often as the batch has it; what cannot be divided, and is too large, is not run and is named."""
    x, weight = torch.ones(8, 16, 20, 20), torch.ones(24, 16, 3, 3)
    args, out = (x, weight, *CONVOLUTION), aten.convolution(x, weight, *CONVOLUTION)
    whole = Scratch().of(aten.convolution.default, args, {}, out)
    assert whole is not None and whole.within > 0 == whole.after
    ran: list[Any] = []
    plain = scratch.scratch_of
    monkeypatch.setattr(scratch, "scratch_of", lambda call, *own: ran.append(call.kind) or plain(call, *own))
    monkeypatch.setattr(scratch, "LARGEST", 200_000)
    found = Scratch().of(aten.convolution.default, args, {}, out)
    assert found is not None and whole.within <= found.within < 3 * whole.within
    assert len(ran) == 1 and "[3, 16, 20, 20]" in str(ran[0])
    large = torch.ones(400, 400)
    assert Scratch().of(aten.sum.default, (large,), {}, large.sum()) is None and len(ran) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_copy_is_counted_when_its_op_asks_for_it(dtype: torch.dtype) -> None:
    """A batch norm reads what copies on write, lets go of its scratch, and asks for memory of its own last."""
    x = torch.ones(2, 16, 16, dtype=dtype)
    copy, rest = copy_on_write(x).transpose(1, 2), (None, None, None, None, True, 0.1, 1e-5)
    results, changes = allocations(lambda: aten.native_batch_norm(copy, *rest))
    most = max(itertools.accumulate(changes))
    other = x.transpose(1, 2)
    found = Scratch().of(aten.native_batch_norm.default, (other, *rest), {}, results, [other])
    assert found is not None and found.after == 0
    assert most == found.within + x.nbytes + sum(t.nbytes for t in results)


def test_an_op_runs_once_for_all_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    plain = scratch.allocations
    monkeypatch.setattr(scratch, "allocations", lambda function: ran.append(1) or plain(function))
    known, x = Scratch(), torch.ones(64, 300, dtype=torch.bfloat16)
    first = known.of(aten.cumsum.default, (x, 1), {}, x)
    assert known.of(aten.cumsum.default, (torch.zeros_like(x), 1), {}, x) == first and len(ran) == 1


def test_another_thread_may_profile() -> None:
    """Which ends the process if both use PyTorch's newer profiler."""
    x, weight = torch.ones(2, 4, 9, 9), torch.ones(4, 4, 3, 3)
    call = (aten.convolution.default, (x, weight, *CONVOLUTION), {}, aten.convolution(x, weight, *CONVOLUTION))
    found: list[OpMemory | None] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True):
        found.append(Scratch().of(*call))
        thread = threading.Thread(target=lambda: found.append(Scratch().of(*call)))
        thread.start()
        thread.join()
    assert found[0] == found[1] == Scratch().of(*call)


def test_an_op_too_large_to_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "LARGEST", 1000)
    monkeypatch.setattr("ckptfused.simulate.roofline.LARGEST", 1000)
    model = nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40))
    (note,) = profile(model, torch.randn(30, 40), device="cpu").notes
    assert "native_layer_norm" in note and "too large to run alone" in note


def test_no_large_op_runs_to_see_what_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    x, rows = torch.ones(64, 400, 4).mT, [torch.ones(4) for _ in range(4)]
    call: Any = (aten.native_batch_norm.default, (x, *rows, True, 0.1, 1e-5), {})
    assert any(t is x for t in Scratch().copied(*call))
    monkeypatch.setattr(scratch, "LARGEST", x.nbytes)
    assert Scratch().copied(*call) == []
