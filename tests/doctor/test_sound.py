"""Models of many kinds whose checkpoints are right: certified, without a finding, and afterwards what they were."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import ckptfused
from ckptfused.doctor import doctor
from tests.doctor import models
from tests.doctor.models import WIDTH, Layer, Stack, batch, stack, torch_checkpoint
from tests.doctor.test_certificate import same, state

pytestmark = pytest.mark.once
ck = functools.partial(checkpoint, use_reentrant=False)


class Calls(nn.Module):
    """A forward of the test's, with modules by name."""

    def __init__(self, forward: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.run = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def with_buffers() -> nn.Module:
    """A module with buffers of kinds that few programs know."""
    model = stack(nn.Identity)
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("small", torch.ones(3).to(torch.float8_e4m3fn))
    model.register_buffer("none", None)
    model.register_buffer("expanded", torch.ones(3, 1).expand(3, 5))
    model.register_parameter("codes", nn.Parameter(torch.arange(5), requires_grad=False))
    model.layers[0].rate = float("nan")
    return model


def hooked() -> nn.Module:
    model = stack(lambda: nn.Dropout(0.2))
    model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.layers[1].register_forward_hook(lambda module, args, result: result * 1.5)
    for module in model.modules():
        module.register_full_backward_hook(lambda *_: None)
    return model


def tied(sparse: bool) -> nn.Module:
    def forward(self: Any, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        h = ck(lambda ids: self.layer(self.embed(ids)), input_ids)
        logits = F.linear(h, self.embed.weight.detach() if sparse else self.embed.weight)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    return Calls(forward, embed=nn.Embedding(10, WIDTH, sparse=sparse), layer=Layer(nn.Dropout(0.1)))


def nested_outputs() -> nn.Module:
    def part(self: Any, x: Tensor, also: Any = None) -> Any:
        return self.linear(x), None, {"twice": x * 2, "count": 3, "text": "x"}

    def forward(self: Any, x: Tensor) -> Any:
        h, _, more = ck(self.a, x)
        y, _, others = ck(self.b, h, also=more)
        return y + others["twice"] + more["twice"], h

    return Calls(forward, a=Calls(part, linear=linear()), b=Calls(part, linear=linear()))


def recurrent() -> nn.Module:
    lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3, batch_first=True)
    return Calls(lambda self, x: ck(self.lstm, x)[0], lstm=lstm)


def residual_network() -> nn.Module:
    part = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    return Calls(lambda self, x: self.norm(ckptfused.checkpoint(self.part, x)), part=part, norm=nn.BatchNorm2d(4))


def experts() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        made = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            row, column = (chosen == i).nonzero(as_tuple=True)
            if len(row):
                made.index_add_(0, row, expert(x[row]) * weights[row, column, None])
        return made

    return stack(lambda: Calls(forward, gate=linear(), experts=nn.ModuleList(linear() for _ in range(8))))


def complex_values() -> nn.Module:
    model = Calls(lambda self, x: ck(lambda t: self.linear(t).to(torch.cfloat) @ self.weight, x), linear=linear())
    model.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cfloat))
    return model


def compiled_layer() -> nn.Module:
    """One that is no container, and that asks the layer in it for its length."""
    model = stack(nn.Identity)
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    return model


def gradient_in_forward() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.stack(x)
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy + force.square().sum()

    return Calls(forward, stack=stack(nn.Identity))


def in_lower_precision() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.scaler.scale(self.stack(x).float())

    model = Calls(forward, stack=stack(lambda: nn.Dropout(0.1)))
    model.scaler = torch.amp.GradScaler("cpu")
    return model


def loss_of_each_row() -> nn.Module:
    return Calls(lambda self, x: SimpleNamespace(loss=ck(self.linear, x).square().mean(-1)), linear=linear())


def in_sequence() -> nn.Module:
    layers = nn.Sequential(*(Layer(nn.Dropout(0.1)) for _ in range(4)))
    return Calls(lambda self, x: checkpoint_sequential(self.layers, 2, x, use_reentrant=False), layers=layers)


def frozen_first() -> nn.Module:
    model = stack(lambda: nn.Dropout(0.1))
    model.first.requires_grad_(False)
    return model


def in_micro_batches() -> nn.Module:
    return Calls(lambda self, x: sum(self.stack(part) for part in x.chunk(2)), stack=stack(lambda: nn.Dropout(0.1)))


IDS = torch.arange(10).view(2, 5)
SOUND: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "buffers": (with_buffers, batch()),
    "hooks": (hooked, batch()),
    "tied weights": (lambda: tied(False), {"input_ids": IDS, "labels": IDS}),
    "no labels": (lambda: tied(False), {"input_ids": IDS}),
    "sparse gradients": (lambda: tied(True), {"input_ids": IDS, "labels": IDS}),
    "nested outputs": (nested_outputs, (batch(),)),
    "an LSTM": (recurrent, torch.randn(2, 5, WIDTH)),
    "batch norm": (residual_network, torch.randn(2, 3, 8, 8)),
    "experts": (experts, batch(7)),
    "complex values": (complex_values, batch()),
    "a compiled layer": (compiled_layer, batch()),
    "a gradient in forward": (gradient_in_forward, batch()),
    "autocast and a scaler": (in_lower_precision, batch()),
    "a loss of each row": (loss_of_each_row, batch()),
    "checkpoint_sequential": (in_sequence, batch()),
    "weight norm": (lambda: stack(lambda: torch.nn.utils.parametrizations.weight_norm(linear())), batch()),
    "a frozen layer": (frozen_first, batch()),
    "micro-batches": (in_micro_batches, batch(6)),
    "bfloat16": (lambda: stack(lambda: nn.Dropout(0.2)).bfloat16(), batch().bfloat16()),
    "no argument": (lambda: Calls(lambda self: ck(torch.sin, self.linear.weight), linear=linear()), ()),
    "a list": (lambda: Calls(lambda self, a, b: ck(self.linear, a) + b, linear=linear()), [batch(), batch()]),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_is_right_is_certified(name: str) -> None:
    make, given = SOUND[name]
    torch.manual_seed(0)
    model = make()
    before = state(model)
    found = doctor(model, given)
    assert not [f for f in found if f.severity != "advice"], found
    assert found.certificate.startswith("Certificate: loss, "), found
    same(state(model), before)


def test_a_wrong_sparse_gradient_is_seen() -> None:
    def forward(self: Any, ids: Tensor) -> Tensor:
        return checkpoint(
            lambda i: F.dropout(self.embed(i), 0.5) * 3, ids, use_reentrant=False, preserve_rng_state=False
        ).sin()

    model = Calls(forward, embed=nn.Embedding(10, WIDTH, sparse=True))
    found = doctor(model, IDS)
    assert [(f.severity, f.place) for f in found] == [("error", "the model")], found
    assert "the gradients are off by" in found[0].text and "drew its random numbers anew" in found[0].text


def test_a_model_in_inference_mode_is_left_alone() -> None:
    """Its step is one that trains, whatever surrounds it."""
    model = stack(lambda: nn.Dropout(0.2))
    with torch.inference_mode():
        found = doctor(model, batch())
    assert found.certificate.startswith("Certificate"), found
    with torch.no_grad():
        assert doctor(model, batch()).certificate.startswith("Certificate")


@pytest.mark.parametrize("traced", [False, True])
def test_scripted_layers_are_no_layers_of_convert(traced: bool) -> None:
    """TorchScript makes another exception of the one that ends a replay: that fails without the doctor, too."""
    scripted = torch.jit.trace(linear(), batch()) if traced else torch.jit.script(linear())
    right = doctor(Stack([scripted, scripted], None), batch())
    assert not len(right) and right.certificate.startswith("Certificate"), right
    wrong = doctor(Stack([scripted, scripted], torch_checkpoint()), batch())
    assert [("its backward fails under checkpointing only" in f.text, f.place) for f in wrong] == [(True, "layers.0")]


def test_no_object_stays() -> None:
    import gc
    import weakref

    for piece in (lambda: nn.Dropout(0.2), models.PythonDropout):
        model = stack(piece)
        reference = weakref.ref(model)
        found = doctor(model, batch())
        del model
        gc.collect()
        assert reference() is None and found.certificate
