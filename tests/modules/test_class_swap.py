"""A class put in the place of one of torch.nn's, as one does in code that is not one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import transformer

from ckptfused import FusedCheckpointBlock

B, T, C, H, HIDDEN = 2, 6, 16, 4, 24
PLAIN = nn.TransformerEncoderLayer
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
]


@pytest.fixture(autouse=True)
def swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (nn, transformer):
        monkeypatch.setattr(module, "TransformerEncoderLayer", FusedCheckpointBlock)


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    made = nn.TransformerEncoderLayer(C, H, HIDDEN, **{"dropout": 0.0, "batch_first": True, **options})
    assert type(made) is FusedCheckpointBlock
    return made


def twin(block: nn.TransformerEncoderLayer, **options: Any) -> nn.TransformerEncoderLayer:
    """PyTorch's own layer with the same parameters."""
    plain = PLAIN(C, H, HIDDEN, **{"dropout": 0.0, "batch_first": True, **options})
    plain.load_state_dict(block.state_dict())
    return plain


def results(module: nn.Module, *inputs: Tensor, **arguments: Any) -> list[Tensor]:
    y = module(*inputs, **arguments)
    return [y, *torch.autograd.grad(y.square().sum(), [*inputs, *module.parameters()])]


def test_a_generic_call() -> None:
    block = layer(activation=torch.tanh)
    x = torch.randn(B, T, C, requires_grad=True)
    torch.testing.assert_close(results(block, x), results(twin(block, activation=torch.tanh), x))


def test_nested_tensors() -> None:
    block = layer().eval()
    plain = twin(block).eval()
    nested = torch.nested.nested_tensor([torch.randn(4, C), torch.randn(7, C)])
    with torch.no_grad():
        for one, other in zip(block(nested).unbind(), plain(nested).unbind(), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("training", [True, False])
def test_an_encoder(training: bool) -> None:
    """In evaluation it makes a nested tensor of a padded batch where it finds PyTorch's class or one derived of it."""
    block = layer()
    ours, theirs = (nn.TransformerEncoder(each, 2).train(training) for each in (block, twin(block)))
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[0, 4:] = True
    x = torch.randn(B, T, C, requires_grad=True)
    if training:
        torch.testing.assert_close(
            results(ours, x, src_key_padding_mask=padding), results(theirs, x, src_key_padding_mask=padding)
        )
        return
    with torch.no_grad():
        y, expected = ours(x, src_key_padding_mask=padding), theirs(x, src_key_padding_mask=padding)
    torch.testing.assert_close(y[~padding], expected[~padding])


@pytest.mark.parametrize("activation", [nn.functional.relu, torch.tanh])
def test_a_transformer(activation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"num_encoder_layers": 2, "num_decoder_layers": 1, "dim_feedforward": HIDDEN, "dropout": 0.0}
    ours = nn.Transformer(C, H, **made, activation=activation)
    assert {type(each) for each in ours.encoder.layers} == {FusedCheckpointBlock}
    monkeypatch.undo()
    theirs = nn.Transformer(C, H, **made, activation=activation)
    assert {type(each) for each in theirs.encoder.layers} == {PLAIN}
    theirs.load_state_dict(ours.state_dict())
    src, tgt = torch.randn(T, B, C, requires_grad=True), torch.randn(3, B, C, requires_grad=True)
    torch.testing.assert_close(results(ours, src, tgt), results(theirs, src, tgt))


def test_layers_are_taken_over_as_before() -> None:
    plain = PLAIN(C, H, HIDDEN)
    assert FusedCheckpointBlock.from_layer(plain).linear1 is plain.linear1
    with pytest.raises(TypeError, match="layer: expected an nn.TransformerEncoderLayer, got Linear"):
        FusedCheckpointBlock.from_layer(nn.Linear(2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["Linear", "LayerNorm", "Dropout", "MultiheadAttention"])
def test_a_subclass_in_place_of_an_inner_layer_computes_what_it_computes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Any = getattr(nn, name)
    calls = []

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original.forward(self, *args, **kwargs)

    monkeypatch.setattr(nn, name, type(name, (original,), {"forward": forward}))
    block = FusedCheckpointBlock(C, H, HIDDEN)
    assert block.generic_reason() is not None
    block(torch.randn(T, B, C))
    assert calls
