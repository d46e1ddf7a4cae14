"""Memory that no allocator is asked for where there is no data, and what PyTorch does otherwise there: a predicted step
needs what one needs that runs."""

from __future__ import annotations

import copy
import io
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ckptfused
from ckptfused import plan, profile

N, C = 512, 256
Step = Callable[["Layers", Tensor], Tensor]


class Layers(nn.Module):
    """Two projections and a number, all trained."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.a, self.b, self.token = nn.Linear(C, C), nn.Linear(C, C), nn.Parameter(torch.tensor(0.5))
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, x)


def _into_what_grows(m: Layers, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        grown = torch.sigmoid(h, out=h.new_empty(0))
    return m.b(h * grown)


def _resized(m: Layers, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h * h.detach().new_empty(N, 1).resize_(N, C).fill_(0.5))


def _solved(m: Layers, x: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(m.b.weight.tril() + 9 * torch.eye(C), m.a(x).mT, upper=False)


def _mask_by_name(m: Layers, x: Tensor) -> Tensor:
    return m.b(x) * torch.ones(N, N, dtype=torch.bool).tril().sum(-1)[:, None]


def _counted_by_name(m: Layers, x: Tensor) -> Tensor:
    return m.b(x) * (torch.ones(N, C) > 0).cumsum(0)


def _teacher(m: Layers, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = m.b(x)
    return m.b(m.a(x)) - target


def _attention(m: Layers, x: Tensor) -> Tensor:
    heads = m.a(x).view(1, N, 4, C // 4).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads)


STEPS: dict[str, Step] = {
    "out= that grows": _into_what_grows,
    "resize_": _resized,
    "a solution": _solved,
    "a mask made by name": _mask_by_name,
    "counts made by name": _counted_by_name,
    "attention": _attention,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_takes_what_is_predicted(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model, x = Layers(STEPS[name]).to(dtype), torch.randn(N, C, dtype=dtype)
    predicted, measured = profile(model, x, device="cpu"), profile(model, x)
    assert (predicted.peak, predicted.saved) == (measured.peak, measured.saved)


READS: dict[str, tuple[Callable[[Tensor], bool], tuple[bool, bool]]] = {
    "is_cpu": (lambda x: x.is_cpu, (True, False)),
    "is_cuda": (lambda x: x.is_cuda, (False, True)),
    "is_meta": (lambda x: x.is_meta, (False, False)),
    "type": (lambda x: x.device.type == "cuda" and x.is_cuda, (False, True)),
    "a device": (lambda x: x.device == torch.device("cpu"), (True, False)),
    "another device": (lambda x: torch.device("cuda", 0) == x.device != torch.device("cpu"), (False, True)),
    "a device's name": (lambda x: f"{x.device}" == str(x.device) == "cpu", (True, False)),
    "a device of it": (lambda x: torch.device(x.device) == x.device == copy.deepcopy(x.device), (True, True)),
    "loaded there": (lambda x: torch.load(_saved(), map_location=x.device).device == x.device, (True, True)),
    "a key": (lambda x: {torch.device("cpu"): True}.get(x.device, False), (True, False)),
    "isinstance": (lambda x: isinstance(x.device, torch.device), (True, True)),
    "index": (lambda x: x.device.index == 0 == x.get_device(), (False, True)),
    "made there": (lambda x: torch.zeros(9, device=x.device).device == x.to(x.device).device, (True, True)),
    "type()": (lambda x: x.type() == "torch.cuda.FloatTensor", (False, True)),
    "an address": (lambda x: x.data_ptr() == x.view(-1).data_ptr() != (x + 1).data_ptr(), (True, True)),
    "a line": (lambda x: x.data_ptr() % 64 == 0 and x[1].data_ptr() - x.data_ptr() == 4 * C, (True, True)),
    "a weight's": (lambda x: x.is_cpu, (True, False)),
    "capability": (lambda x: x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0), (False, True)),
}
"""What a forward asks a tensor, and the answers on a CPU and on a GPU."""


def _saved() -> io.BytesIO:
    file = io.BytesIO()
    torch.save(torch.ones(3), file)
    file.seek(0)
    return file


@pytest.mark.parametrize("name", READS)
def test_a_forward_is_told_the_planned_device(name: str) -> None:
    asks, answers = READS[name]

    def forward(m: Layers, x: Tensor) -> Tensor:
        y = m.a(x)
        more = asks(m.a.weight if name == "a weight's" else y)
        return y.exp().sin() * y if more else y

    def always(more: bool) -> Layers:
        return Layers(lambda m, x: (y := m.a(x)).exp().sin() * y if more else m.a(x))

    model, x = Layers(forward), torch.randn(N, C)
    predicted, measured = profile(model, x, device="cpu"), profile(model, x)
    assert (predicted.peak, predicted.saved) == (measured.peak, measured.saved)
    for device, answer in zip(("cpu", "h100"), answers, strict=True):
        assert profile(model, x, device=device).saved == profile(always(answer), x, device=device).saved


def test_counts_of_experts_as_a_cpu_makes_them() -> None:
    """transformers counts in floating point where the device is a CPU, which a GPU cannot deterministically."""

    def forward(m: Layers, x: Tensor) -> Tensor:
        y = m.a(x)
        device = y.device
        ids = torch.zeros(N, dtype=torch.int64, device=device)
        counts = torch.histc(ids.float() if device.type == "cpu" else ids.int(), bins=8, min=0, max=7)
        return y * counts.sum().to(y.dtype)

    model, x = Layers(forward), torch.randn(N, C)
    torch.use_deterministic_algorithms(True)
    try:
        predicted, measured = profile(model, x, device="cpu"), profile(model, x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert predicted.notes == ()
    assert (predicted.peak, predicted.saved) == (measured.peak, measured.saved)


@pytest.mark.parametrize("weighted", [None, torch.float32, torch.bfloat16], ids=str)
def test_counts_of_as_many_experts_as_there_are(weighted: torch.dtype | None) -> None:
    """Without data nobody knows the highest id, of which `bincount` makes its length."""

    def forward(m: Layers, x: Tensor) -> Tensor:
        y = m.a(x)
        ids = torch.zeros(N, dtype=torch.int64, device=y.device)
        weights = None if weighted is None else torch.ones(N, dtype=weighted, device=y.device)
        return y * torch.bincount(ids, weights, minlength=1000).sum().to(y.dtype)

    model, x = Layers(forward), torch.randn(N, C)
    predicted, measured = profile(model, x, device="cpu"), profile(model, x)
    assert predicted.notes == ()
    assert (predicted.peak, predicted.saved) == (measured.peak, measured.saved)


def test_predictions_in_two_threads() -> None:
    """Each is told of its own device."""
    wrong: list[str] = []

    def forward(kind: str) -> Step:
        def one(m: Layers, x: Tensor) -> Tensor:
            wrong.extend([x.device.type] * (x.device.type != kind))
            return m.a(x)

        return one

    def predict(kind: str, device: str) -> None:
        for _ in range(5):
            profile(Layers(forward(kind)), torch.randn(N, C), device=device)

    threads = [threading.Thread(target=predict, args=given) for given in (("cpu", "cpu"), ("cuda", "h100"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_is_made_on_a_planned_device_has_no_data() -> None:
    """A table as large as a terabyte, of which a model asks for a row."""
    model = Layers(lambda m, x: m.a(x) + torch.zeros(1 << 38, C, device=x.device)[0])
    assert profile(model, torch.randn(N, C), device="h100").peak > 1 << 38


def test_an_error_about_a_number_that_the_model_catches_is_said() -> None:
    def forward(m: Layers, x: Tensor) -> Tensor:
        y = m.a(x)
        try:
            return y * 2 if y.sum().item() == 0 else y.exp().sin() * y
        except RuntimeError:
            return y

    model, x = Layers(forward), torch.randn(N, C)
    why = "the model asks for a number .* that a prediction does not know, and catches the error"
    assert re.search(why, str(profile(model, x, device="cpu").notes))
    with pytest.raises(ValueError, match=f"no plan keeps a budget where {why}"):
        plan(model, x, "1GiB", device="cpu")


@pytest.mark.parametrize("lengths", [(30, 50, 70), (3, 1)])
@pytest.mark.parametrize("norm", [False, True])
def test_sequences_of_several_lengths(lengths: tuple[int, ...], norm: bool) -> None:
    """Nested tensors make other ops of each, which take more within themselves than they return."""
    layers: list[nn.Module] = [nn.LayerNorm(C)] * norm + [nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C)]
    body, model = nn.Sequential(*layers), Layers(lambda m, x: m.body(x).values())
    model.body = body
    x = torch.nested.nested_tensor([torch.randn(n, C) for n in lengths], layout=torch.jagged)
    predicted, measured = profile(model, x, device="cpu"), profile(model, x)
    assert (predicted.peak, predicted.saved) == (measured.peak, measured.saved)


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("mode", ["", "sum", "mean", "max"])
def test_bags_whose_gradients_lie_apart(mode: str, times: int) -> None:
    """The gradient of a sum of all is one number, which backward copies where it needs it laid out."""
    words: Any = nn.EmbeddingBag(50, C, mode=mode) if mode else nn.Embedding(50, C)
    model = Layers(lambda m, x: sum((m.words(x.flip(0)) for _ in range(times - 1)), m.a(m.words(x)).tanh()))
    model.words, ids = words, torch.randint(0, 50, (N, 9))
    predicted, measured = profile(model, ids, device="cpu"), profile(model, ids)
    assert measured.peak <= predicted.peak <= 1.1 * measured.peak


def test_weights_that_are_met_first_without_gradients() -> None:
    """Autocast keeps its cast of a weight, with a gradient where that is asked for later."""
    model, x = Layers(_teacher), torch.randn(N, C)
    predicted, measured = (profile(model, x, device=device, autocast="bfloat16") for device in ("cpu", None))
    assert predicted.all_gradients == measured.all_gradients and predicted.saved == measured.saved
    assert measured.peak <= predicted.peak + predicted.workspace


@pytest.mark.parametrize("threads", [1, 2])
def test_a_number_that_is_learnt_and_filled_in(threads: int) -> None:
    """The prediction takes it that all are: it has at most x more than there is."""
    model, x = Layers(lambda m, x: m.a(x).masked_fill(x > 0, m.token)), torch.randn(N, C)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        predicted, measured = profile(model, x, device="cpu"), profile(model, x)
    finally:
        torch.set_num_threads(before)
    assert measured.peak <= predicted.peak <= measured.peak + x.nbytes


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 0])
def test_bags(mode: str, padding: int | None) -> None:
    """PyTorch's keep fewer places where there is no data, but those of sums without padding: it finds them again."""
    model = nn.Sequential(nn.EmbeddingBag(50, C, mode=mode, padding_idx=padding), nn.Linear(C, C))
    ids = torch.randint(0, 50, (N, 9))
    predicted, measured = profile(model, ids, device="cpu"), profile(model, ids)
    assert measured.peak <= predicted.peak and measured.saved <= predicted.saved
    if mode != "sum" or padding is not None:
        assert (predicted.peak, predicted.saved) == (measured.peak, measured.saved)


class Twice(nn.Module):
    """An embedding whose rows are read at two places, or bags of them."""

    def __init__(self, words: nn.Module) -> None:
        super().__init__()
        self.words, self.a = words, nn.Linear(C, C)

    def forward(self, ids: Tensor) -> Tensor:
        return self.a(self.words(ids)).tanh() + self.words(ids.flip(0))


@pytest.mark.parametrize("mode", ["", "sum", "mean"])
@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD])
def test_sparse_gradients_that_add_up(mode: str, optimizer: Any) -> None:
    kind: Any = (lambda *sizes, **options: nn.EmbeddingBag(*sizes, mode=mode, **options)) if mode else nn.Embedding
    model, ids = Twice(kind(50, C, sparse=True)), torch.randint(0, 50, (N, 9))
    predicted, measured = (profile(model, ids, optimizer, device=device) for device in ("cpu", None))
    assert (predicted.all_gradients, predicted.optimizer) == (measured.all_gradients, measured.optimizer)
    assert measured.peak <= predicted.peak + 16 and measured.saved <= predicted.saved + 16  # a last number, of each bag


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.Adagrad])
def test_no_plan_for_what_an_optimizer_does_with_sparse_gradients(optimizer: Any) -> None:
    words, ids = nn.Embedding(50, C, sparse=True), torch.randint(0, 50, (N, 9))
    model = nn.Sequential(words, *(nn.Sequential(nn.Linear(C, C), nn.Tanh()) for _ in range(2)))
    with pytest.raises(ValueError, match="no plan keeps a budget where .* takes no step without data"):
        plan(model, ids, "1GiB", lambda ps: optimizer(list(words.parameters())), device="cpu")


@pytest.mark.parametrize(
    "last", [nn.Identity(), nn.ReLU(), nn.AdaptiveAvgPool2d(1)], ids=lambda last: type(last).__name__
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_group_norms_of_images_with_channels_last(last: nn.Module, dtype: torch.dtype) -> None:
    layers = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), last)
    model = layers.to(dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(4, 3, 48, 48, dtype=dtype).to(memory_format=torch.channels_last)
    predicted, measured = profile(model, x, device="cpu"), profile(model, x)
    assert predicted.saved == measured.saved
    assert 0.99 * measured.peak <= predicted.peak <= 1.01 * measured.peak


class Spoken(nn.Module):
    """A loss of speech whose lengths are on the CPU, wherever the model is."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 20)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, labels, torch.full((2,), 50), torch.full((2,), 7))


def test_lengths_on_the_cpu_beside_a_gpu() -> None:
    x, labels = torch.randn(2, 50, 16), torch.randint(1, 20, (2, 7))
    saved = {device: profile(Spoken(), (x, labels), device=device).saved for device in ("cpu", "h100", None)}
    assert saved["h100"] == saved["cpu"] == saved[None]


def test_statistics_that_count_their_batches() -> None:
    """Their rate is a number that a buffer holds."""
    model, x = nn.Sequential(nn.BatchNorm1d(C, momentum=None), nn.Linear(C, C)), torch.randn(N, C)
    predicted, measured = profile(model, x, device="cpu"), profile(model, x)
    assert (predicted.peak, predicted.saved) == (measured.peak, measured.saved)
    assert profile(model, x, device="h100").saved > 0


def test_a_plan_keeps_its_budget() -> None:
    torch.manual_seed(1)
    stack, x = nn.Sequential(*(Layers(_into_what_grows) for _ in range(4))), torch.randn(N, C)
    full: Any = profile(stack, x, device="cpu")
    for share in (0.75, 0.95):
        found = plan(stack, x, int(share * full.peak), device="cpu")
        found.apply(stack)
        assert profile(stack, x).peak <= found.budget


def test_what_a_replay_shares_is_there_until_its_backward_ends() -> None:
    """A replay within a replay works on copies of what the outer one made: the attention to the encoder's result, here,
    on its input, which no node of it saves."""
    torch.manual_seed(1)
    model: Any = nn.Transformer(64, 4, 1, 2, 128, 0.1, batch_first=True)
    ckptfused.convert(model, policy=ckptfused.CheckpointPolicy.segments((1, 2)))
    batch = torch.randn(4, 64, 64), torch.randn(4, 96, 64)
    predicted, measured = profile(model, batch, device="cpu"), profile(model, batch)
    assert (predicted.peak, predicted.saved) == (measured.peak, measured.saved)


class Sensitivity(nn.Module):
    """The gradient of its layers for each sample, by `torch.func`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(2)])

    def _sum(self, t: Tensor) -> Tensor:
        for layer in self.layers:
            t = t + layer(t)
        return t.square().sum()

    def forward(self, x: Tensor) -> Tensor:
        return self._sum(x) + torch.func.vmap(torch.func.grad(self._sum))(x).square().mean()


def test_gradients_of_samples() -> None:
    model, x = Sensitivity(), torch.randn(32, 16)
    assert profile(model, x, device="cpu").peak == profile(model, x).peak


class Recurrent(nn.Module):
    """A recurrent layer, trained or not, whose result is the last one, or is looked at by a projection."""

    def __init__(self, kind: Any, trained: bool, last: bool, **options: Any) -> None:
        super().__init__()
        self.inner = kind(32, 48, **options).requires_grad_(trained)
        self.head = nn.Identity() if last else nn.Linear(48, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.inner(x)[0])
        return y


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"batch_first": True}], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_that_are_last_or_frozen(kind: Any, options: dict[str, Any], trained: bool) -> None:
    """A gradient that is one number expanded is copied where oneDNN takes it; where gradients are on, oneDNN makes a
    workspace in forward, though nothing needs any."""
    model, x = Recurrent(kind, trained, trained, **options), torch.randn(8, 64, 32)
    predicted, measured = profile(model, x, device="cpu"), profile(model, x)
    assert measured.peak <= predicted.peak <= 1.1 * measured.peak


def _by_bias(h: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(h, h, h, torch.ones(N, N))


CONSTANTS: dict[str, Step] = {
    "a bias of attention": lambda m, x: _by_bias(m.a(x)[None, None]),
    "stacked": lambda m, x: torch.stack([m.a(x), torch.ones(N, C)]),
    "a product": lambda m, x: m.a(x) @ torch.ones(C, N),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_autocast_casts_what_is_made_by_name(name: str) -> None:
    model, x = Layers(CONSTANTS[name]), torch.randn(N, C)
    predicted, measured = (profile(model, x, device=device, autocast="bfloat16") for device in ("cpu", None))
    assert predicted.saved == measured.saved
    assert measured.peak <= predicted.peak + predicted.workspace
    if "attention" not in name:  # which holds something in half precision
        assert predicted.peak == measured.peak


def test_the_length_of_one_sequence_of_speech() -> None:
    def loss(m: Layers, x: Tensor) -> Tensor:
        labels = torch.arange(1, 8)
        return F.ctc_loss(m.a(x).log_softmax(-1), labels, torch.tensor(N), torch.tensor(7))

    model, x = Layers(loss), torch.randn(N, C)
    assert profile(model, x, device="cpu").peak >= profile(model, x).peak
