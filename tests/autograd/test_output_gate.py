"""The output gate, sigmoids of a projection that multiply what attention made, against attention written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptfused import FusedCheckpointBlock, functional
from ckptfused.explain import explain
from ckptfused.spec import KEEP_PRESETS, AttentionSpec, BlockSpec

B, T, C, H, G, D = 2, 150, 24, 4, 2, 6
DOUBLE = torch.float64
GATES: dict[str, dict[str, Any]] = {
    "entry": {"output_gate": "entry"},
    "head": {"output_gate": "head"},
    "in-q": {"output_gate": "entry", "gate_in_q": True},
}
ALL = pytest.mark.parametrize("gate", GATES)
TILED = pytest.mark.parametrize("scratch", [0, 1 << 12], ids=["whole", "tiles"])


def half(gate: str, scratch: int = 0, keep: str = "inputs", **options: Any) -> BlockSpec:
    attn = AttentionSpec(H, G, D, causal=True, **GATES[gate], **options)
    return BlockSpec(attn, scratch=scratch).with_keep(keep)


def made(gate: str, dtype: torch.dtype = DOUBLE) -> tuple[Tensor, dict[str, Tensor]]:
    """x and the parameters of an attention half."""
    draw = torch.Generator().manual_seed(2)
    shapes = {name: (out, into) for name, (into, out) in half(gate).attn.products(C).items()}  # type: ignore[union-attr]
    params = {
        f"attn.{name}_w": torch.randn(shape, generator=draw, dtype=DOUBLE).mul(0.5) for name, shape in shapes.items()
    }
    x = torch.randn(B, T, C, generator=draw, dtype=DOUBLE)
    return x.to(dtype).requires_grad_(), {name: t.to(dtype).requires_grad_() for name, t in params.items()}


def written_out(x: Tensor, params: dict[str, Tensor], gate: str) -> Tensor:
    """x + what gated heads make of it."""
    q = x @ params["attn.q_w"].mT
    if gate == "in-q":
        q, logit = (t.flatten(2) for t in q.view(B, T, H, 2 * D).chunk(2, -1))
    else:
        logit = x @ params["attn.gate_w"].mT
    k, v = (x @ params[f"attn.{name}_w"].mT for name in "kv")
    q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(H // G, 1) for t in (k, v))
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    o = (q @ k.mT / math.sqrt(D)).masked_fill(hidden, -torch.inf).softmax(-1) @ v
    o = o.transpose(1, 2).flatten(2) * logit.sigmoid().repeat_interleave(H * D // logit.size(-1), -1)
    return x + o @ params["attn.o_w"].mT


@ALL
@TILED
def test_values_and_gradients(gate: str, scratch: int) -> None:
    x, params = made(gate)
    y, expected = functional.attention_block(x, params, half(gate, scratch)), written_out(x, params, gate)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    leaves, dy = [x, *params.values()], torch.randn_like(y)
    found, wanted = (torch.autograd.grad(out, leaves, dy) for out in (y, expected))
    for name, a, b in zip(("x", *params), found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11, msg=name)


@ALL
@TILED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_the_same_whatever_is_kept(gate: str, scratch: int, dtype: torch.dtype) -> None:
    """A second backward reads what the first one did: what is kept is not written over."""
    x, params = made(gate, dtype)
    leaves, dy, first = [x, *params.values()], torch.randn(B, T, C).to(dtype), None
    for keep in KEEP_PRESETS:
        y = functional.attention_block(x, params, half(gate, scratch, keep))
        for retain in (True, False):
            grads = (y.detach(), *torch.autograd.grad(y, leaves, dy, retain_graph=retain))
            first = grads if first is None else first
            assert all(map(torch.equal, grads, first)), keep


@ALL
@TILED
@pytest.mark.parametrize("options", [{}, {"pre": "layernorm", "post": "rmsnorm"}, {"out": "layernorm"}], ids=str)
def test_one_projection_alone_is_trained(gate: str, scratch: int, options: dict[str, str]) -> None:
    x, params = made(gate)
    spec = half(gate, scratch, **options)
    y = functional.attention_block(x, params, spec)
    dy = torch.randn_like(y)
    for name, every in zip(params, torch.autograd.grad(y, list(params.values()), dy), strict=True):
        alone = {other: t if other == name else t.detach() for other, t in params.items()}
        (found,) = torch.autograd.grad(functional.attention_block(x.detach(), alone, spec), params[name], dy)
        assert every.any() and torch.equal(found, every), name


@ALL
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16], ids=str)
def test_a_gate_that_is_shut_or_wide_open(gate: str, dtype: torch.dtype) -> None:
    """Biases of +-1e4: sigmoids of 0 and 1, whose derivatives are 0 and not NaN."""
    x, params = made(gate, dtype)
    name = "attn.q_b" if gate == "in-q" else "attn.gate_b"
    for bias in (-1e4, 1e4):
        width = half(gate).attn.products(C)["q" if gate == "in-q" else "gate"][1]  # type: ignore[union-attr]
        beside = torch.zeros(width, dtype=dtype)
        (beside.view(H, 2, D)[:, 1] if gate == "in-q" else beside).fill_(bias)
        beside.requires_grad_()
        y = functional.attention_block(x, {**params, name: beside}, half(gate))
        grads = torch.autograd.grad(y.float().square().sum(), [x, beside, *params.values()])
        assert all(g.isfinite().all() for g in grads)
        gated = grads[1].view(H, 2, D)[:, 1] if gate == "in-q" else grads[1]
        assert not gated.any()
        assert torch.equal(y, x) == (bias < 0)


@pytest.mark.parametrize("gate", ["entry", "head"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_block_with_a_gate(gate: str, batch_first: bool) -> None:
    """The module, its parameters by name, and its attention as plain PyTorch."""
    torch.manual_seed(1)
    options: dict[str, Any] = {"num_kv_heads": 2, "rope": True, "output_gate": gate, "batch_first": batch_first}
    block = FusedCheckpointBlock(32, 4, 48, dropout=0.0, dtype=DOUBLE, **options)
    attention = block.self_attn
    assert attention.gate_proj.weight.shape == (32 if gate == "entry" else 4, 32)
    assert f"output_gate={gate}" in repr(attention)
    x = torch.randn(2, 9, 32, dtype=DOUBLE, requires_grad=True)
    y = block(x)
    first = block.norm1(x + attention(x)[0])
    expected = block.norm2(first + block.linear2(block.activation(block.linear1(first))))
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    leaves = [x, *block.parameters()]
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in (y, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_adapters_stand_beside_a_gate() -> None:
    peft = pytest.importorskip("peft")
    block = FusedCheckpointBlock(32, 4, 48, dropout=0.0, batch_first=True, output_gate="entry", num_kv_heads=2)
    names = {"fused": block}
    model = peft.get_peft_model(
        nn.ModuleDict(names), peft.LoraConfig(r=4, target_modules=["gate_proj", "out_proj"], init_lora_weights=False)
    )
    inner = model.base_model.model["fused"]
    x = torch.randn(2, 9, 32)
    assert explain(inner, x, show=False).saved  # of a call that is not fused it says none
    y = inner(x)
    attended = inner.norm1(x + inner.self_attn(x)[0])
    expected = inner.norm2(attended + inner.linear2(inner.activation(inner.linear1(attended))))
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    y.sum().backward()
    assert all(p.grad is not None for name, p in inner.named_parameters() if "lora" in name)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="output_gate: expected one of none, entry, head, got 'row'"):
        FusedCheckpointBlock(32, 4, 48, output_gate="row")
    with pytest.raises(ValueError, match=r"attn.gate_in_q: expected q apart from k and v and a gate of each entry"):
        AttentionSpec(H, G, D, gate_in_q=True)
    with pytest.raises(ValueError, match=r"attn.gate_in_q: .* joint=True"):
        AttentionSpec(H, G, D, gate_in_q=True, output_gate="entry", joint=True)
    x, params = made("head")
    params["attn.gate_w"] = torch.zeros(H + 1, C, dtype=DOUBLE)
    with pytest.raises(ValueError, match=r"params\['attn.gate_w'\]: expected .*4.*got.*5"):
        functional.attention_block(x, params, half("head"))
