"""What a profile says of layers, twins, batches and opaque layers; its forms as table, JSON and picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import ckptfused
from ckptfused import FusedCheckpointBlock, profile
from ckptfused.cli import main
from ckptfused.profiler import Profile
from ckptfused.profiler.predict import predicted
from ckptfused.profiler.step import TrainingStep
from ckptfused.simulate.devices import DEVICES, Device, device_named

pytestmark = pytest.mark.once
C, ROWS = 64, 128


class Layer(nn.Module):
    """Saves its input and the hidden rows before and after their activation."""

    def __init__(self) -> None:
        super().__init__()
        self.opaque = False
        self.up, self.down = nn.Linear(C, 4 * C, bias=False), nn.Linear(4 * C, C, bias=False)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if self.opaque and x.sum().item() > 1e9:
            return x
        h = self.down(torch.tanh(self.up(x)))
        return h if scale is None else h * scale


class Looking(Layer):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x) if self.up.weight.sum().item() < 1e9 else x


class Stack(nn.Module):
    def __init__(self, how: str = "plain", layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(C, C, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(C, 8, bias=False)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        scale = x.detach().exp()
        if self.how == "segments":
            return self.head(checkpoint_sequential(nn.Sequential(*self.layers), 2, x, use_reentrant=False)).mean()
        for layer in self.layers:
            if self.how == "reentrant":
                x = checkpoint(layer, x, use_reentrant=True)
            elif self.how == "checkpointed":
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x, scale) if self.how == "shared" else layer(x)
        return self.head(x).mean()


ROW = 4 * ROWS
X, HIDDEN = C * ROW, 4 * C * ROW
"""Bytes of a layer's input and of its hidden rows."""


def of(how: str, **options: Any) -> Profile:
    return profile(Stack(how), torch.empty(ROWS, C), device="cpu", **options)


def test_what_a_layer_saves() -> None:
    """x and tanh's result; a checkpoint x alone, whichever it is; a segment of two its first layer's."""
    assert [layer.name for layer in of("plain").layers] == [f"layers.{i}" for i in range(4)]
    for how, saved in (
        ("plain", [X + HIDDEN] * 4),
        ("checkpointed", [X] * 4),
        ("reentrant", [X] * 4),
        # Only the first segment is checkpointed; the last is as it was.
        ("segments", [X, 0, X + HIDDEN, X + HIDDEN]),
    ):
        found = of(how)
        # A checkpoint keeps the state of the generator beside.
        states = [layer.saved - size for layer, size in zip(found.layers, saved, strict=True)]
        assert set(states) <= ({0} if how == "plain" else {0, 5056, 5056 + 16}), (how, states)
        assert all(layer.gradients == 2 * 4 * 4 * C * C for layer in found.layers)
        assert found.all_gradients == sum(part.gradients for part in found.parts)


def test_what_layers_share_is_no_layers() -> None:
    """Each saves its own result before the product beside; the factor counts once, between them."""
    plain, shared = of("plain"), of("shared")
    assert [layer.saved for layer in shared.layers] == [layer.saved for layer in plain.layers]
    assert (plain.between.saved, shared.between.saved) == (0, X)


@pytest.mark.parametrize("how", ["plain", "shared", "checkpointed", "reentrant", "segments"])
def test_the_peak_follows_from_the_layers(how: str) -> None:
    """A planner adds up so: what is kept so far and the layer's own transients. Gradients of parameters are aside,
    so that of each phase what they leave is the sum, exactly."""
    found = of(how)
    kept, before = 0, found.between.saved + found.embeddings.saved
    for index, layer in enumerate(found.layers):
        kept += layer.saved
        forward, backward, replay = (
            max((sum(p.parts[1:]) for p in found.phases if p.phase == (name, index)), default=0)
            for name in ("forward", "backward", "replay in backward")
        )
        assert forward <= before + kept + layer.forward_transient
        assert max(backward, replay) <= LOSS + before + kept + layer.backward_transient + _later_segment(how, index)
        if how in ("plain", "shared"):
            assert forward == before + kept + layer.forward_transient


LOSS = 4
"""The loss itself is there until the end of backward."""


def _later_segment(how: str, index: int) -> int:
    """What layers of the same segment hold, which ran again in the same replay."""
    return 2 * (X + HIDDEN) if how == "segments" and index < 2 else 0


def test_a_replay_belongs_to_the_layer_that_runs_again() -> None:
    """Its hidden rows and their gradient are transient in backward, of each layer alike. Where products alone take
    time, a backward is four, a replay that stops early one, and one of a segment's first layer two."""
    products = dict.fromkeys((torch.float32, torch.bfloat16), 1e12)
    rates = Device("counted", "cpu", 0, products, 1e12, math.inf, multiprocessors=1, launch=0.0, link=1e9)
    plain, replayed, segments = (
        predicted(Stack(how).to("meta"), TrainingStep(torch.empty(ROWS, C, device="meta"), None, rates))
        for how in ("plain", "checkpointed", "segments")
    )
    product = 2 * ROWS * C * 4 * C / 1e12
    for a, b in zip(plain.layers, replayed.layers, strict=True):
        assert b.backward_transient >= a.backward_transient + HIDDEN
        assert a.forward_seconds == b.forward_seconds == pytest.approx(2 * product)
        assert (a.backward_seconds, b.backward_seconds) == pytest.approx((4 * product, 5 * product))
    assert segments.layers[0].backward_seconds == pytest.approx(6 * product)


def test_the_model_is_left_alone() -> None:
    model = Stack()
    keeper = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    keeper.step()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    moments = {p: {key: t.clone() for key, t in values.items()} for p, values in keeper.state.items()}
    found = profile(model, torch.ones(ROWS, C), keeper, "cpu")
    numbers = sum(p.numel() for p in model.parameters())
    assert found.optimizer == 8 * numbers + 4 * len(moments) and found.weights == 4 * numbers + X
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)
    assert all(torch.equal(t, moments[p][key]) for p, values in keeper.state.items() for key, t in values.items())
    assert not any(p.is_meta or p.grad is None for p in model.parameters())


def test_tied_weights_count_once() -> None:
    """Parameters that are one, and two that are views of one storage."""
    model = nn.Sequential(nn.Linear(C, C, bias=False), nn.Linear(C, C, bias=False))
    model[1].weight = model[0].weight
    assert profile(model, torch.ones(1, C), device="cpu").weights == 4 * C * C + 4 * C
    model[1].weight = nn.Parameter(model[0].weight.detach())
    assert profile(model, torch.ones(1, C), device="cpu").weights == 4 * C * C + 4 * C


@pytest.mark.parametrize("model", [nn.Linear(C, 4 * C), nn.Embedding(50, C)], ids=["linear", "embedding"])
def test_a_gradient_that_is_expanded(model: nn.Module) -> None:
    """A sum has such a gradient: what reads it has a copy for as long as it runs."""
    batch = torch.ones(ROWS, C, requires_grad=True) if isinstance(model, nn.Linear) else torch.arange(50).repeat(9)
    measured, found = (profile(model, batch, device=device) for device in (None, "cpu"))
    assert abs(found.peak / measured.peak - 1) < 0.01


class Across(nn.Module):
    """Normalises each column."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(ROWS), nn.Linear(C, 4)

    def forward(self, x: Tensor) -> Tensor:
        columns: Tensor = self.norm((2 * x).transpose(-1, -2))
        return self.head(columns.transpose(-1, -2))  # type: ignore[no-any-return]


def test_a_norm_of_what_is_not_contiguous() -> None:
    """It copies its input, and in backward the gradient, for as long as it runs."""
    batch = torch.ones(7, ROWS, C, requires_grad=True)
    measured, found = (profile(Across(), batch, device=device) for device in (None, "cpu"))
    assert abs(found.peak / measured.peak - 1) < 0.01


def test_an_opaque_layer_is_named() -> None:
    model = Stack()
    model.layers[2].opaque = True
    found = profile(model, torch.ones(ROWS, C), device="cpu")
    assert [layer.name for layer in found.layers][2] == "layers.2" and len(found.notes) == 1
    assert found.notes[0].startswith("layer layers.2 (Layer) is opaque: it does not run without data")
    assert found.layers[1].saved == X + HIDDEN
    assert profile(model, torch.ones(ROWS, C), device="cpu") == found  # what is put in its place is the meta_copy's
    model.head = model.layers[2]
    del model.layers[2]
    with pytest.raises(ValueError, match="expected one that runs on the meta device, got RuntimeError"):
        profile(model, torch.ones(ROWS, C), device="cpu")
    alone = Stack()
    alone.embed, alone.head = nn.Identity(), nn.Flatten()  # type: ignore[assignment]
    alone.layers = nn.ModuleList(Looking() for _ in range(2))
    with pytest.raises(ValueError, match="expected one that runs on the meta device, got layer layers.0 .* is opaque"):
        profile(alone, torch.ones(ROWS, C), device="cpu")
    # What it would have left behind is missed later: a mixture's loss, of what its routers were seen to give.
    seen: list[Tensor] = []
    alone.layers[0].up.register_forward_hook(lambda module, args, y: seen.append(y))
    alone.head.register_forward_pre_hook(lambda module, args: seen.pop())
    with pytest.raises(ValueError, match="got IndexError: pop from empty list; layer layers.0 .* is opaque"):
        profile(alone, torch.ones(ROWS, C), device="cpu")


def test_batches_and_losses() -> None:
    layer = Layer()
    one = profile(layer, torch.ones(ROWS, C), device="cpu")
    assert profile(layer, {"x": torch.ones(ROWS, C)}, device="cpu") == one
    assert profile(layer, [torch.ones(ROWS, C)], device="cpu") == one
    two = profile(layer, (torch.ones(ROWS, C), torch.ones(ROWS, C)), device="cpu")
    assert two.weights == one.weights + X
    model = nn.Module()
    model.forward = lambda x: {"logits": x}  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="^batch: expected one with labels.*got dict without a loss"):
        profile(model, torch.ones(2), device="cpu")
    assert profile(layer, torch.ones(ROWS, C), device=torch.device("cpu")) == one
    assert profile(layer, torch.ones(ROWS, C), device="H200").device == "h200"
    with pytest.raises(TypeError, match="optimizer: expected a torch.optim.Optimizer, or what makes one.*got 'adamw'"):
        profile(layer, torch.ones(ROWS, C), "adamw", device="cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device: expected one of h200, h100, .*cpu, got 'tpu'"):
        profile(layer, torch.ones(ROWS, C), device="tpu")


@pytest.mark.parametrize("device", ["cpu", None])
def test_what_cannot_be_trained(device: str | None) -> None:
    with pytest.raises(TypeError, match="model: expected an nn.Module, got function"):
        profile(lambda x: x, torch.ones(2), device=device)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected one whose loss requires a gradient, got one that trains no param"):
        profile(Stack().requires_grad_(False), torch.ones(ROWS, C), device=device)
    with torch.no_grad(), pytest.raises(ValueError, match="requires a gradient, .* or under no_grad"):
        profile(Stack(), torch.ones(ROWS, C), device=device)


def test_optimizers() -> None:
    """On a GPU all parameters at once: what the step holds is as large as they are; fused it holds nothing. Adafactor
    looks at numbers, which change no size."""
    model, x = nn.Sequential(nn.Linear(C, C), nn.Linear(C, C)), torch.ones(2, C)
    size = sum(p.nbytes for p in model.parameters())
    alone = profile(model, x, torch.optim.AdamW, "cpu").optimizer_transient
    together = profile(model, x, torch.optim.AdamW, "h200").optimizer_transient
    assert 2 * 4 * C * C <= alone < together and size <= together < 3 * size
    fused = profile(model, x, lambda p: torch.optim.AdamW(p, fused=True), "h200")
    assert fused.optimizer_transient == 0 and fused.optimizer == 2 * size + 4 * 4 and fused.optimizer_seconds > 0
    found, measured = (profile(model, x, torch.optim.Adafactor, device) for device in ("cpu", None))
    assert found.optimizer == measured.optimizer > 0 and found.notes[0].startswith("Adafactor looks at numbers")
    assert found.optimizer_transient == measured.optimizer_transient > 0
    # Its numbers, on the CPU, are multiplied while square roots of all parameters are there.
    half, narrow = Stack(layers=3).bfloat16(), x.bfloat16()
    optimizer = torch.optim.NAdam(half.parameters(), foreach=True)
    found, measured = (profile(half, narrow, optimizer, device) for device in ("cpu", None))
    assert found.optimizer_transient == measured.optimizer_transient
    unclosed = profile(model, x, torch.optim.LBFGS, "cpu")
    assert unclosed.notes[0].startswith("LBFGS takes no step without data")


def test_own_blocks_are_layers() -> None:
    """Blocks of ckptfused itself, which `convert` leaves as they are; they share rotary tables."""
    model = nn.Sequential(*(FusedCheckpointBlock.llama(C, 4, dim_feedforward=96) for _ in range(3)))
    found = profile(model, torch.ones(2, 16, C), device="cpu")
    assert [layer.name for layer in found.layers] == ["0", "1", "2"]
    assert [layer.saved for layer in found.layers[1:]] == [4 * 2 * 16 * C] * 2


def test_time_by_the_roofline() -> None:
    """A product of whole waves at its rate, one tile more takes a wave more; a copy at the copy rate."""
    card = DEVICES["h200"]
    rows, rate = 128 * 132, card.product_rate(torch.bfloat16)
    whole = card.product_seconds(rows, 256, 4096, torch.bfloat16) - card.launch
    assert whole == pytest.approx(2 * rows * 256 * 4096 / rate, rel=1e-9)
    assert card.product_seconds(2 * rows, 256, 4096, torch.bfloat16) - card.launch == pytest.approx(2 * whole)
    more = card.product_seconds(rows + 1, 256, 4096, torch.bfloat16) - card.launch
    assert 1.2 * whole < more <= 2 * whole
    thin = card.product_seconds(16384, 16, 16, torch.bfloat16) - card.launch
    assert thin >= 2 * 16384 * 32 / card.copy
    assert device_named("cpu") is device_named("cpu") and device_named("cpu").product_rate(torch.float32) > 1e8


def test_forms(tmp_path: Path) -> None:
    found = of("plain", optimizer=torch.optim.SGD)
    shown = str(found)
    assert (
        "layers.0" in shown and "loss head" in shown and "alive at the peak" in shown and "predicted for cpu" in shown
    )
    again = Profile.from_json(found.to_json())
    assert again.to_json() == found.to_json() and again.layers == found.layers and again.peak == found.peak
    found.plot(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="without a timeline"):
        again.plot(tmp_path / "none.png")
    assert max(sum(moment.bytes) for moment in found.timeline) == found.peak
    times = [moment.seconds for moment in found.timeline]
    assert times == sorted(times) and [name for _, name in found.marks] == ["forward", "backward", "optimizer", "end"]
    assert sum(row.bytes for row in found.alive) == found.peak


def test_offloaded_inputs_are_not_on_the_gpu() -> None:
    """Eight layers have at most two inputs there at a time, in forward and in backward; on a CPU all, where nothing
    moves.
    """
    found = {}
    for offload in (False, True):
        model = nn.Sequential(*(nn.TransformerEncoderLayer(C, 2, C, dropout=0.0, batch_first=True) for _ in range(8)))
        model.insert(0, nn.Linear(C, C))
        assert ckptfused.convert(model, offload=offload).fused == 8
        found[offload] = profile(model, torch.ones(4, 256, C), device="h200")
        assert profile(model, torch.ones(4, 256, C), device="cpu").layers[0].saved == 4 * 256 * C * 4
    x = 4 * 256 * C * 4
    saved = [[layer.saved for layer in found[offload].layers] for offload in (False, True)]
    assert [a - b for a, b in zip(*saved, strict=True)] == [x] * 7 + [0]
    without, peaks = ({str(peak.phase): sum(peak.parts) for peak in found[offload].phases} for offload in (False, True))
    for i in range(8):
        more, phase = max(0, i - 1), f"forward of layer {i}"
        assert without[phase] - peaks[phase] == more * x, phase
        if i < 7:  # its own, on its way since the backward before it, and the next
            phase = f"backward of layer {i}"
            assert without[phase] - peaks[phase] == more * x, phase


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine_to_profile.py").write_text(
        "import torch\n"
        "def make():\n    return torch.nn.Sequential(torch.nn.Linear(8, 8)), torch.ones(2, 8)\n"
        "def alone():\n    return make()[0]\n"
    )
    monkeypatch.chdir(tmp_path)
    command = ["profile", "--device", "cpu", "--config"]
    picture = tmp_path / "a.png"
    assert main([*command, "mine_to_profile:make", "--json", "--plot", str(picture)]) == 0
    assert Profile.from_json(capsys.readouterr().out).weights == 4 * (64 + 8) + 64 and picture.exists()
    assert main([*command, "mine_to_profile:make"]) == 0
    assert "A step predicted for cpu" in capsys.readouterr().out
    assert main([*command, "mine_to_profile:alone"]) == 1
    assert "expected mine_to_profile:alone to return a model and a batch" in capsys.readouterr().err
    assert main([*command, "mine_to_profile:nothing"]) == 1
    assert "--config: expected module:factory" in capsys.readouterr().err
