"""Steps whose memory depends on values, on modes and on kernels that tensors without data do not take: what is
predicted is what one needs that runs, or a bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from ckptfused import convert, plan, profile

N, C = 512, 64
SELECTED = "what the model selects by values"


class Layer(nn.Module):
    """Two projections, and something done with their results."""

    def __init__(self, step: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.step = nn.Linear(C, C), nn.Linear(C, C), step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, x)


def _written(m: Layer, x: Tensor) -> Tensor:
    """Rows go through a projection of their own, as in mixtures of experts written by hand."""
    h = m.a(x)
    chosen, out = h.sum(-1) > 0, h.clone()
    out[chosen] = m.b(h[chosen])
    return out


def _gathered(m: Layer, x: Tensor) -> Tensor:
    h = m.a(x)
    (rows,) = torch.where(h[:, 0] > 0)
    return h.index_add(0, rows, m.b(h[rows]))


def _masked(m: Layer, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h) * torch.masked_select(h, x > 0).mean()


SELECT = {"written rows": _written, "gathered rows": _gathered, "masked entries": _masked}


@pytest.mark.parametrize("what", SELECT)
@pytest.mark.parametrize("value", [1.0, None], ids=["all", "some"])
def test_what_values_select_counts_as_all(what: str, value: float | None) -> None:
    torch.manual_seed(1)
    model, x = Layer(SELECT[what]), torch.randn(N, C)
    if value is not None:
        nn.init.constant_(model.a.bias, 99.0)
        x.fill_(value)
    predicted, measured = profile(model, x, device="cpu"), profile(model, x)
    assert SELECTED in " ".join(predicted.notes) and measured.notes == ()
    assert measured.peak <= predicted.peak and measured.saved <= predicted.saved
    if value is not None:  # no more than the places of the rows, twice at once, beside what there is
        assert predicted.peak <= 1.1 * measured.peak


def test_a_budget_of_layers_that_select() -> None:
    torch.manual_seed(1)
    stack, x = nn.Sequential(*(Layer(_written) for _ in range(4))), torch.randn(N, C)
    budget = int(0.9 * profile(stack, x, device="cpu").peak)
    report = convert(stack, budget=budget, batch=x)
    assert SELECTED in str(report) and profile(stack, x).peak <= budget


def _joined(m: Layer, x: Tensor) -> Tensor:
    """Two selections have as many rows together as before, which nobody knows without data."""
    h = m.a(x)
    chosen = h.sum(-1) > 0
    return x + torch.cat([m.b(h[chosen]), h[~chosen]])


@pytest.mark.parametrize("step", [lambda m, x: m.a(x) * m.b(x).sum().item(), _joined], ids=["a number", "joined"])
def test_no_plan_where_a_layer_does_not_run_without_data(step: Any) -> None:
    stack = nn.Sequential(nn.Linear(C, C), Layer(step), Layer(_masked))
    for refused in (plan, lambda model, x, budget: convert(model, budget=budget, batch=x)):
        with pytest.raises(
            ValueError, match=r"no plan keeps a budget where layer .* is opaque.*; profile\(model, batch\)"
        ):
            refused(stack, torch.randn(N, C), "1GiB")


def _attended(m: Layer, x: Tensor) -> Tensor:
    q, k, v = (t.view(4, -1, 4, C // 4).transpose(1, 2) for t in (m.a(x), m.b(x), x))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, None])
def test_the_kernel_of_attention_that_a_caller_chooses(kernel: SDPBackend | None) -> None:
    """By a context within forward, or for the process."""
    torch.manual_seed(1)

    def step(m: Layer, x: Tensor) -> Tensor:
        if kernel is None:
            return _attended(m, x)
        with sdpa_kernel(kernel):
            return _attended(m, x)

    model, x = Layer(step), torch.randn(N, C)
    torch.backends.cuda.enable_flash_sdp(kernel is not None)
    try:
        predicted, measured = profile(model, x, device="cpu"), profile(model, x)
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert (predicted.peak, predicted.saved) == (measured.peak, measured.saved)


@pytest.mark.parametrize("tokens", [24, 512])
def test_attention_whose_products_are_lowered(tokens: int) -> None:
    """What oneDNN packs within is measured, and all that the kernel holds with it."""
    model, x = Layer(_attended), torch.randn(tokens, C)
    torch.set_float32_matmul_precision("medium")
    try:
        predicted, measured = profile(model, x, device="cpu"), profile(model, x)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert predicted.saved == measured.saved and measured.peak <= predicted.peak <= 1.15 * measured.peak


def test_anomaly_detection_is_named() -> None:
    torch.autograd.set_detect_anomaly(True)
    try:
        with pytest.raises(ValueError, match="Anomaly detection looks at every gradient: predict without it"):
            profile(Layer(_attended), torch.randn(N, C), device="cpu")
    finally:
        torch.autograd.set_detect_anomaly(False)


class Frozen(nn.Module):
    """A projection of what a frozen module of PyTorch's makes."""

    def __init__(self, teacher: nn.Module, call: Callable[[Any, Tensor, Tensor | None], Tensor]) -> None:
        super().__init__()
        self.teacher, self.head, self.call = teacher.eval().requires_grad_(False), nn.Linear(C, C), call

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.call(self.teacher, x, padding))


def _encoder(depth: int = 2) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(C, 4, 2 * C, batch_first=True), depth)


FROZEN: dict[str, Callable[[], Frozen]] = {
    "encoder": lambda: Frozen(_encoder(), lambda m, x, padding: m(x, src_key_padding_mask=padding)),
    "encoder with a mask": lambda: Frozen(
        _encoder(),
        lambda m, x, padding: m(
            x, mask=nn.Transformer.generate_square_subsequent_mask(x.size(1)), src_key_padding_mask=padding
        ),
    ),
    "attention": lambda: Frozen(
        nn.MultiheadAttention(C, 4, batch_first=True),
        lambda m, x, padding: m(x, x, x, key_padding_mask=padding, need_weights=False)[0],
    ),
    "attention with its weights": lambda: Frozen(
        nn.MultiheadAttention(C, 4, batch_first=True), lambda m, x, padding: m(x, x, x, key_padding_mask=padding)[0]
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("what", FROZEN)
@pytest.mark.parametrize("padded", [False, True])
def test_the_fast_path_of_what_is_frozen(what: str, padded: bool) -> None:
    torch.manual_seed(1)
    x, padding = torch.randn(4, 50, C), torch.zeros(4, 50, dtype=torch.bool)
    padding[1:, 40:] = True
    padding = torch.zeros(4, 50).masked_fill(padding, float("-inf")) if "mask" in what else padding
    batch = (x, padding) if padded else x
    model = FROZEN[what]()
    predicted, measured = profile(model, batch, device="cpu"), profile(model, batch)
    assert predicted.saved == measured.saved and not predicted.notes
    if padded:  # of sequences as long as any
        assert measured.peak <= predicted.peak <= 1.1 * measured.peak
    else:
        assert predicted.peak == measured.peak
    assert not any("forward" in vars(m) for m in model.modules())


class Seen(TorchDispatchMode):
    """The ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def test_a_measured_step_takes_the_fast_path() -> None:
    """PyTorch leaves it where a layer has hooks, by which a profile sees what runs when."""
    model, x = FROZEN["encoder with a mask"](), torch.randn(4, 50, C)
    with Seen() as seen:
        found = profile(model, x)
    assert "aten._transformer_encoder_layer_fwd" in seen.ops and "aten.native_layer_norm" not in seen.ops
    assert [layer.name for layer in found.layers] == [f"teacher.layers.{i}" for i in range(2)]
    assert not any("forward" in vars(m) for m in model.modules())


def test_a_module_that_is_trained_takes_no_fast_path() -> None:
    model, x = FROZEN["encoder"](), torch.randn(4, 50, C)
    model.teacher.requires_grad_(True)
    predicted, measured = profile(model, x, device="cpu"), profile(model, x)
    assert (predicted.peak, predicted.saved) == (measured.peak, measured.saved)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM])
def test_recurrent_layers_with_and_without_dropout(kind: Any) -> None:
    """What one that draws holds is not what one does that does not, in whatever order they are met. (Backward and its
    gradients are measured as one: at most 1.6 % more than there is at once.)"""
    x = torch.randn(30, 4, C)
    for dropout in (0.0, 0.2, 0.0):
        model = nn.Sequential(nn.Linear(C, C), kind(C, C, 2, bidirectional=True, dropout=dropout))
        predicted, measured = profile(model, x, device="cpu"), profile(model, x)
        assert measured.peak <= predicted.peak <= 1.02 * measured.peak and measured.saved <= predicted.saved


KNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "unique": lambda x: torch.unique((x * 2).round()),
    "unique, and where": lambda x: torch.unique((x * 2).round(), return_inverse=True)[1],
    "entries": lambda x: x.masked_select(x > 0),
    "places": lambda x: x.nonzero(),
}


@pytest.mark.parametrize("what", KNOWN)
def test_what_an_op_holds_whose_values_are_known(what: str) -> None:
    """It is computed beside what is predicted, for its results."""
    torch.manual_seed(1)
    model, x = Layer(lambda m, x: m.a(x) + KNOWN[what](x).sum()), torch.randn(N, C)
    predicted, measured = profile(model, x, device="cpu"), profile(model, x)
    assert (predicted.peak, predicted.saved) == (measured.peak, measured.saved)


def _householder(m: Layer, x: Tensor) -> Tensor:
    h = m.a(x)
    return torch.linalg.householder_product(h, h[0, : C // 2].sigmoid())


LOOKED_AT: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    "a product without zeros": lambda m, x: m.a(x).prod(-1),
    "a product with zeros": lambda m, x: (m.a(x) * (torch.arange(C) > 0)).prod(-1),
    "a product of all": lambda m, x: (m.a(x) * (torch.arange(C) > 0)).prod(),
    "reflections": _householder,
    "a determinant": lambda m, x: torch.linalg.slogdet(m.a.weight @ m.a(x[:C]))[1],
}


@pytest.mark.parametrize("what", LOOKED_AT)
def test_a_backward_that_looks_at_values(what: str) -> None:
    torch.manual_seed(1)
    model, x = Layer(LOOKED_AT[what]), torch.randn(N, C)
    predicted, measured = profile(model, x, device="cpu"), profile(model, x)
    assert measured.peak <= predicted.peak


def _product(m: Layer, x: Tensor) -> Tensor:
    def energy(x: Tensor) -> Tensor:
        return m.b(m.a(x).tanh()).square().sum()

    return torch.autograd.functional.hvp(energy, x, torch.ones_like(x), create_graph=True)[1].square().sum()


def test_sums_of_gradients_of_which_a_graph_is_made() -> None:
    """Autograd adds to none of those in place."""
    model, x = Layer(_product), torch.randn(N, C)
    predicted, measured = profile(model, x, device="cpu"), profile(model, x)
    assert (predicted.peak, predicted.saved) == (measured.peak, measured.saved)
