"""`torch.nn`'s Transformer layers: calls of every form, and what is left to PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

import ckptfused
from ckptfused import FusedCheckpointBlock
from tests.accounting import CountOps
from tests.models.small import unfused
from tests.models.zoo import randomize
from tests.models.zoo_torch import HEADS, HIDDEN, WIDTH, padding, values

pytestmark = pytest.mark.each_torch

CAUSAL = nn.Transformer.generate_square_subsequent_mask(19)


def encoder(p: float = 0.0, **options: Any) -> tuple[Any, Any]:
    """A plain layer, and a converted one with the same weights."""
    plain = nn.Sequential(randomize(nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, p, **options)))
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    return plain[0], converted[0]


def decoder(**options: Any) -> tuple[Any, Any]:
    plain = nn.Sequential(randomize(nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, 0.0, **options)))
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    return plain[0], converted[0]


def gradients(layer: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> list[Tensor]:
    """The output, and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    y = layer(x, *args, **kwargs)
    return [y, *torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))]


def same(got: list[Tensor], want: list[Tensor]) -> None:
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5 * w.abs().max().item())


@pytest.mark.parametrize("batch_first", [False, True])
def test_one_sequence_without_a_batch_dimension(batch_first: bool) -> None:
    x, memory, hidden = values(19)[0], values(7, 2)[0], padding(19)[1]
    plain, converted = encoder(batch_first=batch_first)
    with unfused() as reasons:
        same(gradients(converted, x, None, hidden), gradients(plain, x, None, hidden))
        same(gradients(converted, x, CAUSAL, is_causal=True), gradients(plain, x, CAUSAL, is_causal=True))
        plain, converted = decoder(batch_first=batch_first)
        same(gradients(converted, x, memory), gradients(plain, x, memory))
    assert not reasons


@pytest.mark.parametrize(
    "masks",
    [
        {"src_mask": CAUSAL, "is_causal": True},
        {"src_mask": torch.ones(19, 19, dtype=torch.bool).triu(1)},
        {"src_mask": torch.ones(19, 19, dtype=torch.bool).triu(4), "src_key_padding_mask": padding(19)},
        # Beside padding PyTorch does not take the hint.
        {"src_mask": torch.zeros(19, 19), "src_key_padding_mask": padding(19).float() * -1e9, "is_causal": True},
    ],
    ids=["hint", "bool", "band-padding", "wrong-hint"],
)
def test_masks(masks: dict[str, Any]) -> None:
    plain, converted = encoder(batch_first=True)
    with unfused() as reasons:
        same(gradients(converted, values(19), **masks), gradients(plain, values(19), **masks))
    assert not reasons


def test_refused_calls_are_refused_by_pytorch() -> None:
    plain, converted = encoder(batch_first=True)
    for call in (
        lambda layer: layer(values(19), is_causal=True),
        lambda layer: layer(values(19), torch.zeros(3, 3)),
        lambda layer: layer(values(19)[..., :40]),
    ):
        with pytest.raises(Exception) as want:
            call(plain)
        with pytest.raises(type(want.value)) as got:
            call(converted)
        assert str(got.value) == str(want.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_evaluation_without_gradients_is_pytorchs() -> None:
    """Its fast path, bit for bit; nested tensors too."""
    plain, converted = encoder(0.5, batch_first=True)
    x = values(19)
    with torch.no_grad(), CountOps() as count:
        assert torch.equal(converted.eval()(x), plain.eval()(x))
        assert count.calls["ckptfused.block_fwd"] == 0
        stack = nn.TransformerEncoder(plain, 2)
        copied = copy.deepcopy(stack)
        ckptfused.convert(copied)
        hidden = padding(19)
        assert torch.equal(copied.eval()(x, src_key_padding_mask=hidden), stack.eval()(x, src_key_padding_mask=hidden))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_in_training_fail_as_before() -> None:
    plain, converted = encoder(batch_first=True)
    nested = torch.nested.nested_tensor([values(5)[0], values(7)[0]])
    with pytest.raises(Exception) as want:
        plain(nested)
    with pytest.raises(type(want.value)):
        converted(nested)


def test_evaluation_with_gradients_is_fused() -> None:
    plain, converted = encoder(0.5, batch_first=True)
    with CountOps() as count:
        got = gradients(converted.eval(), values(19))
    same(got, gradients(plain.eval(), values(19)))
    assert count.blocks == (1, 1)


def test_what_is_not_fused() -> None:
    class Scaled(nn.TransformerEncoderLayer):
        def _sa_block(self, *args: Any, **kwargs: Any) -> Tensor:
            return 2 * super()._sa_block(*args, **kwargs)

    reasons = {
        "activation": nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.0, activation=torch.tanh),
        "not the one that was read": Scaled(WIDTH, HEADS, HIDDEN, 0.0),
        "another width": nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.0),
        "AlphaDropout": nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.0),
    }
    reasons["another width"].self_attn = nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True)
    reasons["AlphaDropout"].dropout1 = nn.AlphaDropout(0.0)  # type: ignore[assignment]
    for why, layer in reasons.items():
        plain = nn.Sequential(randomize(layer))
        converted = copy.deepcopy(plain)
        report = ckptfused.convert(converted)
        assert report.layers[0].path == "generic" and why in report.layers[0].reason
        same(gradients(converted[0], values(19)), gradients(plain[0], values(19)))


def test_learned_mask() -> None:
    _, converted = encoder(batch_first=True)
    bias = torch.zeros(19, 19, requires_grad=True)
    with unfused() as reasons:
        converted(values(19), bias).sum().backward()
    assert [r.text for r in reasons] == ["a mask needs a gradient"]
    assert bias.grad is not None


def test_changes_between_calls_take_effect() -> None:
    plain, converted = encoder(0.5)
    for layer in (plain, converted):
        layer.norm_first = True
        layer.activation = F.gelu
        layer.dropout.p = layer.dropout1.p = layer.dropout2.p = layer.self_attn.dropout = 0.0
    same(gradients(converted, values(19)), gradients(plain, values(19)))


def test_own_blocks_are_left_alone() -> None:
    model = nn.Sequential(FusedCheckpointBlock(WIDTH, HEADS), FusedCheckpointBlock(WIDTH, HEADS))
    assert ckptfused.convert(model).layers == ()
    assert all("forward" not in vars(layer) for layer in model)


def test_transformer() -> None:
    """`nn.Transformer` as a whole, with dropout: the number of ops, and finite gradients."""
    torch.manual_seed(0)
    model = nn.Transformer(WIDTH, HEADS, 2, 2, HIDDEN, 0.1, batch_first=True)
    report = ckptfused.convert(model)
    assert [x.path for x in report.layers] == ["fused"] * 2 + ["part"] * 2
    with CountOps() as count:
        mask = nn.Transformer.generate_square_subsequent_mask(11)
        model(values(19), values(11, 2), tgt_mask=mask, tgt_is_causal=True).sum().backward()
    assert count.blocks == (2, 2)
    # What cross-attention reads is made again, and the first half with it, for which backward has then all it needs.
    assert count.calls["ckptfused.attention_block_fwd"] == 4
    assert count.calls["ckptfused.attention_block_bwd"] == count.calls["ckptfused.ffn_block_bwd"] == 2
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("what", ["encoder", "decoder"])
def test_compile(what: str) -> None:
    """No graph break."""
    plain, converted = encoder(batch_first=True) if what == "encoder" else decoder(batch_first=True)
    args = () if what == "encoder" else (values(7, 2),)
    compiled = torch.compile(converted, fullgraph=True, backend="aot_eager")
    same(gradients(compiled, values(19), *args), gradients(plain, values(19), *args))
