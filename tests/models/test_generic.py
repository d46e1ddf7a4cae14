"""Models that no adapter reads: which modules are taken for layers, and that checkpointing them changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers

import ckptfused
from tests.models.compare import close, gradients, run
from tests.models.small import twins, unfused
from tests.models.zoo import VOCABULARY, randomize, text_batch
from tests.models.zoo_torch import Output

pytestmark = pytest.mark.each_torch


class Mlp(nn.Module):
    """Takes keyword arguments, returns a tuple or a dict."""

    def __init__(self, result: str = "tensor") -> None:
        super().__init__()
        hidden = (nn.ReLU(inplace=True), nn.Softplus(), nn.Dropout(0.3))  # an activation that no block has
        self.inner = nn.Sequential(nn.Linear(16, 32), *hidden, nn.Linear(32, 16))
        self.result = result

    def forward(self, x: Tensor, *, scale: Tensor | None = None, extras: dict[str, Any] | None = None) -> Any:
        y = x + self.inner(x) * (1 if scale is None else scale)
        if extras is not None:
            y = y + extras["bias"] * len(extras["sizes"])
        return {"tensor": y, "tuple": (y, y.mean(), None, 3), "dict": {"x": y, "mean": y.mean()}}[self.result]


class Custom(nn.Module):
    def __init__(self, result: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(result) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(16))
        self.bias = nn.Parameter(torch.ones(16))
        self.result = result

    def forward(self, x: Tensor) -> Output:
        total = x.new_zeros(())
        for layer in self.layers:
            x = layer(x, scale=self.scale, extras={"bias": self.bias, "sizes": [1, 2]})
            if self.result == "tuple":
                x, mean, nothing, number = x
                assert nothing is None and number == 3
                total = total + mean
            if self.result == "dict":
                assert list(x) == ["x", "mean"]
                total, x = total + x["mean"], x["x"]
        return Output((total + x.square().mean()).sin())


def paths(report: Any) -> dict[str, str]:
    return {layer.name: layer.path for layer in report.layers}


def same_steps(plain: nn.Module, batch: dict[str, Tensor]) -> tuple[Any, Any]:
    """Two training steps of a model and of its converted copy, from the same random numbers, bit for bit."""
    converted = copy.deepcopy(plain)
    report = ckptfused.convert(converted)
    for seed in range(2):
        torch.manual_seed(seed)
        want, state = run(plain, batch), torch.get_rng_state()
        torch.manual_seed(seed)
        got = run(converted, batch)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
        assert torch.equal(torch.get_rng_state(), state)
    return converted, report


@pytest.mark.parametrize("result", ["tensor", "tuple", "dict"])
def test_custom_layers(result: str) -> None:
    """Dropout, an in-place module, keyword arguments that need gradients, results of any form."""
    _, report = same_steps(randomize(Custom(result)), {"x": torch.randn(5, 16)})
    assert paths(report) == {f"layers.{i}": "generic" for i in range(3)}
    assert all(x.reason.startswith("no adapter for this class; not derived: ") for x in report.layers)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.stages = nn.Sequential(
            nn.Sequential(Residual(8), Residual(8)),
            nn.Sequential(nn.Conv2d(8, 12, 1, stride=2), Residual(12), Residual(12)),
        )
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        x = self.stages(self.stem(x)).mean((2, 3))
        return Output(F.cross_entropy(self.head(x), labels))


def test_resnet() -> None:
    """Statistics of batch norms are updated once a step."""
    plain = randomize(ResNet())
    batch = {"x": torch.randn(4, 3, 8, 8), "labels": torch.tensor([0, 1, 2, 3])}
    converted, report = same_steps(plain, batch)
    assert list(paths(report)) == ["stages.0.0", "stages.0.1", "stages.1.1", "stages.1.2"]
    for (name, got), want in zip(converted.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(got, want), name


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return x + sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class MixtureModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: Tensor) -> Output:
        for layer in self.layers:
            x = layer(x)
        return Output(x.square().mean())


def test_only_the_outermost_layers_are_taken() -> None:
    _, report = same_steps(randomize(MixtureModel()), {"x": torch.randn(5, 16)})
    assert set(paths(report)) == {"layers.0", "layers.1"}


class Chain(nn.Module):
    """Nothing but leaves in a row: one product each is not worth a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        leaves = [nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)]
        self.net = nn.Sequential(*leaves)

    def forward(self, x: Tensor) -> Output:
        return Output(self.net(x).mean())


def test_leaves_are_no_layers() -> None:
    _, report = same_steps(randomize(Chain()), {"x": torch.randn(5, 16)})
    assert report.layers == ()
    assert str(report) == "ckptfused.convert: no layers found"


class Nested(nn.Module):
    """Lists in a list, as U-Nets have them: the lists themselves are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList(nn.ModuleList([Mlp(), Mlp(), nn.Linear(16, 16)]) for _ in range(2))
        self.shared = nn.ModuleList([Mlp()] * 2)
        self.again = self.shared

    def forward(self, x: Tensor) -> Output:
        for first, second, last in self.downs:
            x = last(second(first(x)))
        for layer in (*self.shared, *self.again):
            x = layer(x)
        return Output(x.square().mean())


def test_lists_of_lists_and_shared_layers() -> None:
    converted, report = same_steps(randomize(Nested()), {"x": torch.randn(5, 16)})
    assert list(paths(report)) == ["downs.0.0", "downs.0.1", "downs.1.0", "downs.1.1", "shared.0"]
    assert ckptfused.revert(converted) == 5


@pytest.mark.parametrize("extra", [False, True])
def test_modules_around_known_layers(extra: bool) -> None:
    """What mostly consists of layers with an adapter is no layer itself."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.out = nn.Linear(16, 16 * 16 * 16) if extra else nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.encoder(x))

    report = ckptfused.convert(nn.ModuleList(Stage() for _ in range(2)))
    inner = {f"{i}.encoder.layers.{j}": "fused" for i in range(2) for j in range(2)}
    assert paths(report) == ({"0": "generic", "1": "generic"} if extra else inner)


def hugging_face(name: str) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.AutoConfig.for_model(name, **sizes, intermediate_size=40, tie_word_embeddings=False)
    return randomize(transformers.AutoModelForMaskedLM.from_config(config)).train()


@pytest.mark.parametrize("name", ["electra", "convbert"])
def test_unknown_hugging_face_models(name: str, underived: None) -> None:
    """Their layers say what they are; dropout on."""
    converted, report = same_steps(hugging_face(name), text_batch())
    assert {x.path for x in report.layers} == {"generic"} and len(report.layers) == 2
    with unfused() as reasons, torch.no_grad():
        converted.eval()(**text_batch())
    assert len(reasons) == 2


def test_what_is_saved() -> None:
    """A generic layer saves its input."""
    plain = randomize(Custom("tensor")).train()
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    counts = []
    for model in (plain, converted):
        found: dict[int, Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, found=found: found.setdefault(t.data_ptr(), t), lambda t: t
        ):
            model(torch.randn(64, 16))
        owned = {p.data_ptr() for p in model.parameters()}
        counts.append(sum(t.untyped_storage().nbytes() for key, t in found.items() if key not in owned))
    # Three inputs, and what the loss saves of the last output.
    assert counts[1] <= 5 * 64 * 16 * 4 < counts[0]


def test_gradients_of_models_with_batch_statistics_and_eval() -> None:
    plain = randomize(ResNet()).eval()
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    batch = {"x": torch.randn(4, 3, 8, 8), "labels": torch.tensor([0, 1, 2, 3])}
    close(run(converted, batch), run(plain, batch), 1e-6)


@pytest.mark.parametrize("kind", ["forward", "pre", "kwargs"])
def test_hooks_taken_away_or_put_in_before_backward(kind: str) -> None:
    """The replay runs with those that the forward ran with."""
    scale, losses = torch.randn(48), []
    plain, model = twins()
    for one in (plain, model):
        mlp = one.model.layers[0].mlp

        def hook(inside: nn.Module, args: Any, *more: Any) -> Any:
            if kind == "forward":
                return more[0] * scale
            return (args[0] * scale,) if kind == "pre" else ((args[0] * scale,), more[0])

        register = mlp.register_forward_hook if kind == "forward" else mlp.register_forward_pre_hook
        handle = register(hook, **({"with_kwargs": True} if kind == "kwargs" else {}))
        losses.append(one(**text_batch()).loss)
        handle.remove()
        one.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    close(gradients(model), gradients(plain), 1e-5)
