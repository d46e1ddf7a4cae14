"""Steps of models that are wrapped, quantised, or given a batch without data."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ckptfused
from ckptfused import plan, profile
from ckptfused.compat.torch_memory import allocations
from ckptfused.profiler.allocator import CPUAllocator
from ckptfused.simulate import values
from tests.profiler.test_predicted import llama, tokens

pytestmark = pytest.mark.once


@pytest.fixture
def _alone(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("converted", [False, True])
def test_distributed_data_parallel(converted: bool) -> None:
    """Its buckets, as large as the gradients, are there from step to step; all else is as without it."""
    inner, batch = llama(), tokens()
    if converted:
        ckptfused.convert(inner)
    alone = profile(inner, batch, torch.optim.SGD, device="cpu")
    model = DistributedDataParallel(inner)
    measured, found = (profile(model, batch, torch.optim.SGD, device=device) for device in (None, "cpu"))
    assert found.peak == alone.peak + alone.all_gradients and found.weights == alone.weights + alone.all_gradients
    assert measured.weights == found.weights and measured.saved == found.saved == alone.saved
    assert abs(found.peak / measured.peak - 1) < 0.03
    fits = plan(model, batch, found.peak, torch.optim.SGD, device="h200")
    assert fits.peak <= found.peak
    assert [layer.path for layer in fits.apply(model).layers] == ["fused"] * 3
    model(**batch).loss.backward()


class Quantised(nn.Parameter):
    """Whole numbers and their scales, copied as bitsandbytes' weights copy themselves."""

    scale: Any
    module: nn.Module

    def __deepcopy__(self, memo: dict[int, Any]) -> Quantised:
        made = type(self).__new__(type(self), torch.empty(0, dtype=torch.int8), False)
        made.scale = copy.deepcopy(self.scale)
        made.data = copy.deepcopy(self.data)
        return made


class Scale:
    def __init__(self, of: Tensor) -> None:
        self.rows = of.abs().amax(1) / 127


class Stored(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = Scale(linear.weight.detach())
        values = (linear.weight.detach() / scale.rows[:, None]).round().to(torch.int8)
        self.weight: Any = Quantised(values, requires_grad=False)
        self.weight.scale, self.weight.module = scale, self

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.weight.scale.rows[:, None])


def test_quantised_weights() -> None:
    model, batch = llama(), tokens()
    plain = profile(model, batch, device="cpu")
    rows = 0
    for layer in model.model.layers:
        rows += layer.mlp.down_proj.weight.size(0)
        layer.mlp.down_proj = Stored(layer.mlp.down_proj)
    measured, found = profile(model, batch), profile(model, batch, device="cpu")
    less = 3 * sum(layer.mlp.down_proj.weight.numel() for layer in model.model.layers)
    assert found.weights == measured.weights == plain.weights - less + 4 * rows
    assert abs(found.saved / measured.saved - 1) < 0.01 and abs(found.peak / measured.peak - 1) < 0.03
    assert type(model.model.layers[0].mlp.down_proj.weight) is Quantised


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_bitsandbytes(tmp_path: Path) -> None:
    """QLoRA, where it is installed."""
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    llama().save_pretrained(tmp_path)
    options = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=options, dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"])).train()
    measured, found = (profile(model, tokens(), torch.optim.SGD, device=device) for device in (None, "cpu"))
    assert found.weights == measured.weights and abs(found.saved / measured.saved - 1) < 0.01
    assert abs(found.peak / measured.peak - 1) < 0.03


@pytest.mark.parametrize("converted", [False, True])
def test_a_step_that_adds_to_gradients(converted: bool) -> None:
    """It needs more than one that makes them, by no more than all of them."""
    model, batch = llama(), tokens()
    if converted:
        ckptfused.convert(model)
    made = profile(model, batch)
    model(**batch).loss.backward()
    trace = CPUAllocator().record(lambda: model(**batch).loss.backward())
    most = max(accumulate(change.size for change in trace.changes))
    assert made.peak < made.weights + made.all_gradients + most <= made.peak + made.all_gradients


def without_data(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.to("meta") for name, t in batch.items()}


def test_a_mask_without_data() -> None:
    """The model may be without it, and what it does not look into: not what it does."""
    batch = tokens()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :5] = 0
    with torch.device("meta"):
        model = llama()
    known_mask = profile(model, {**without_data(batch), "attention_mask": mask}, device="h200")
    assert known_mask.notes == ()
    assert known_mask.peak > profile(model, without_data(batch), device="h200").peak
    for call in (profile, plan):
        with pytest.raises(ValueError, match="It looks at values: give attention_mask with data"):
            call(model, without_data({**batch, "attention_mask": mask}), device="h200")
    positions = torch.arange(41)[None].expand(3, -1)
    (note,) = profile(model, without_data({**batch, "position_ids": positions}), device="h200").notes
    assert note.startswith("position_ids without data, or above ")


def test_a_mask_of_more_entries_than_are_kept_of_other_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = tokens()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"]).index_fill_(1, torch.arange(3), 0)
    expected = profile(llama(), batch, device="h200").peak
    monkeypatch.setattr(values, "MOST_ENTRIES", 50)
    assert batch["attention_mask"].numel() > 50
    assert profile(llama(), batch, device="h200").peak == expected


@pytest.mark.parametrize("most", [values.MOST_ENTRIES, 50])
def test_a_mask_of_pytorchs_encoder(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which compares it with one that it makes, of zeros and -inf."""
    monkeypatch.setattr(values, "MOST_ENTRIES", most)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)
    batch = {"src": torch.randn(2, 24, 16), "mask": nn.Transformer.generate_square_subsequent_mask(24)}
    measured, found = (profile(model, batch, device=device) for device in (None, "cpu"))
    assert measured.saved == found.saved and abs(found.peak / measured.peak - 1) < 0.03


def test_a_mask_of_two_rows_of_positions_is_not_computed() -> None:
    """Positions of a long sequence are known; which of them sees which is the square of that many."""

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            positions = torch.arange(x.size(1), device=x.device)
            return self.linear(x) * (positions[:, None] >= positions).any()

    x = torch.empty(1, 1 << 14, 4, device="meta")
    _, changes = allocations(lambda: profile(Causal(), x, device="h200"))
    assert max(accumulate(changes)) < 1 << 26


def test_a_recurrent_layer_is_named() -> None:
    class Last(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)[0]

    (note,) = profile(nn.Sequential(nn.Linear(8, 8), Last(8, 8)), torch.randn(3, 2, 8), device="h200").notes
    assert note.startswith("1: what cuDNN keeps")


def test_an_absurd_batch_is_answered_by_its_shapes() -> None:
    """No tensor as large is copied or compared; where layers and loss would run in millions of pieces, one sentence."""
    model, ids = llama(), torch.zeros(1, dtype=torch.int64).expand(100_000, 8192)
    found, changes = allocations(lambda: profile(model, {"input_ids": ids, "labels": ids}, device="h200"))
    assert found.peak > 8 * ids.numel() and max(accumulate(changes)) < 1 << 26
    masked = {"input_ids": ids, "labels": ids, "attention_mask": ids}
    with pytest.raises(ValueError, match="not read of more than 16,777,216 entries: predict fewer"):
        profile(model, masked, device="h200")
    ckptfused.convert(model, scratch=1 << 20)
    with pytest.raises(ValueError, match="at most 7,000 pieces of 1.00 MiB, got 819,200,000 tokens: predict fewer"):
        profile(model, {"input_ids": ids, "labels": ids}, device="h200")


def test_gradients_that_are_sparse(capfd: pytest.CaptureFixture[str]) -> None:
    """An embedding's gradient has as many rows as tokens."""
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), 2)
    model = nn.Sequential(nn.Embedding(1000, 64, sparse=True), layers)
    ids = torch.randint(1000, (3, 17))
    measured, found = (profile(model, ids, torch.optim.SGD, device=device) for device in (None, "cpu"))
    assert measured.saved == found.saved and abs(found.peak / measured.peak - 1) < 0.03
    assert plan(model, ids, "1GiB", torch.optim.SGD, "h200").peak < 2**30
    assert "Exception" not in capfd.readouterr().err


def test_a_model_that_is_not_whole_yet() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(4))
    for call in (profile, plan):
        with pytest.raises(ValueError, match="got 1.weight of a lazy module: call it once"):
            call(model, torch.randn(2, 3), device="h200")
    with pytest.raises(ValueError, match="of a lazy module"):
        profile(model, torch.randn(2, 3))


def test_a_list_of_results() -> None:
    class Listed(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return [super().forward(x), x]

    peaks = [profile(kind(8, 8), torch.randn(2, 8), device="h200").peak for kind in (nn.Linear, Listed)]
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("converted", [False, True])
def test_a_forward_around_the_models_own(converted: bool) -> None:
    """Its closure holds the model's own forward, bound, as TRL's trainers have it: the copy's runs the copy."""
    model, batch = llama(), tokens()
    alone = profile(model, batch, device="cpu")
    if converted:
        ckptfused.convert(model)
    own = model.forward

    def around(self: Any, **given: Any) -> Any:
        return own(**given)

    model.forward = around.__get__(model)
    found = profile(model, batch, device="cpu")
    assert not found.notes and (found.peak < alone.peak if converted else found.peak == alone.peak)
    assert model.forward.__func__ is around and own.__self__ is model


def test_an_object_around_the_models_own_forward() -> None:
    """Accelerate's autocast is one, around a forward of TRL's that holds the model's own, bound."""

    class Around:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __call__(self, *args: Any, **given: Any) -> Any:
            return self.inner(*args, **given)

    model, batch = llama(), tokens()
    alone, own = profile(model, batch, device="cpu"), model.forward
    called = Around(lambda self, **given: own(**given))
    model.forward = (lambda self, **given: called(self, **given)).__get__(model)
    found = profile(model, batch, device="cpu")
    assert found.peak == alone.peak and not found.notes
    assert called.inner.__closure__[0].cell_contents is own and own.__self__ is model
