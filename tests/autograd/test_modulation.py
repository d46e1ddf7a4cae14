"""Vectors of each batch element in the place of a norm's and LayerScale's own: DiT's adaLN-Zero, by its formula."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptfused import FusedCheckpointBlock, FusedCheckpointSequential, functional
from ckptfused.cost import backward_ledger, forward_ledger
from ckptfused.ops.call import Call
from ckptfused.spec import KEEP_PRESETS, AttentionSpec, BlockSpec, FFNSpec, param_shapes, parse, shape_in

B, T, C = 3, 150, 24
DOUBLE = torch.float64
LEDGERS = (forward_ledger, backward_ledger)
TILED = pytest.mark.parametrize("scratch", [0, 1 << 12], ids=["whole", "tiles"])
NORMED = pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "gemma"])


def block_of(norm: str = "layernorm", scratch: int = 0, keep: str = "inputs", **frame: Any) -> BlockSpec:
    options = {"pre": norm, "post": "layerscale", "modulated": True, **frame}
    return BlockSpec(AttentionSpec(4, 2, 6, **options), FFNSpec("gelu", 56, **options), scratch=scratch).with_keep(keep)  # type: ignore[arg-type]


def drawn(spec: BlockSpec, dtype: torch.dtype = DOUBLE, batch: int = B) -> tuple[Tensor, dict[str, Tensor]]:
    """x and the tensors of every slot."""
    draw = torch.Generator().manual_seed(2)
    shapes = {name: shape_in(shape, batch) for name, (shape, _) in param_shapes(spec, C).items()}
    params = {name: torch.randn(shape, generator=draw, dtype=DOUBLE).mul(0.3) for name, shape in shapes.items()}
    x = torch.randn(batch, T, C, generator=draw, dtype=DOUBLE)
    return x.to(dtype).requires_grad_(), {name: t.to(dtype).requires_grad_() for name, t in params.items()}


def element(params: dict[str, Tensor], n: int) -> dict[str, Tensor]:
    """The tensors of one batch element's own block, which is not modulated."""
    by_sample = {name for name in params if name.split(".")[1] in ("pre_w", "pre_b", "post_w")}
    return {name: t[n] if name in by_sample else t for name, t in params.items()}


@NORMED
@TILED
def test_each_batch_element_has_a_block_of_its_own(norm: str, scratch: int) -> None:
    """The same as a block with LayerScale for each, with vectors of its own. No kernel sees another difference, but the
    order in which the gradients of shared weights are added up."""
    spec = block_of(norm, scratch)
    x, params = drawn(spec)
    own = parse(block_of(norm).to_string().replace(" attn.modulated=1", "").replace(" ffn.modulated=1", ""))
    if norm != "layernorm":  # unmodulated norms of these kinds have no bias: with zeros here
        params = {name: torch.zeros_like(t).requires_grad_() if "pre_b" in name else t for name, t in params.items()}
    y = functional.block(x, params, spec)
    names = {name: t for name, t in params.items() if norm == "layernorm" or "pre_b" not in name}
    parts = [functional.block(x[n : n + 1], element(names, n), own) for n in range(B)]
    torch.testing.assert_close(y, torch.cat(parts), rtol=1e-12, atol=1e-12)
    leaves, dy = [x, *names.values()], torch.randn_like(y)
    found, wanted = (torch.autograd.grad(out, leaves, dy) for out in (y, torch.cat(parts)))
    for name, a, b in zip(("x", *names), found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11, msg=name)


@TILED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_the_same_whatever_is_kept(scratch: int, dtype: torch.dtype) -> None:
    x, params = drawn(block_of(), dtype)
    leaves, dy, first = [x, *params.values()], torch.randn(B, T, C).to(dtype), None
    for keep in KEEP_PRESETS:
        y = functional.block(x, params, block_of(scratch=scratch, keep=keep, p_res=0.2), generator=seeded())
        for retain in (True, False):
            grads = (y.detach(), *torch.autograd.grad(y, leaves, dy, retain_graph=retain))
            first = grads if first is None else first
            assert all(map(torch.equal, grads, first)), keep


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def test_dropout_decides_as_without_vectors() -> None:
    """A block of ones, and zeros to add, is LayerScale's block of ones, with the same masks of every batch element."""
    spec = block_of(p_res=0.4)
    plain = parse(spec.to_string().replace(" attn.modulated=1", "").replace(" ffn.modulated=1", ""))
    x, params = drawn(plain)
    with torch.no_grad():
        for name, t in params.items():
            if name.endswith(("pre_w", "post_w")):
                t.fill_(1)
            elif name.endswith("pre_b"):
                t.zero_()
    rows = {
        name: t.expand(B, C) if name.split(".")[1] in ("pre_w", "pre_b", "post_w") else t for name, t in params.items()
    }
    a, b = functional.block(x, rows, spec, generator=seeded()), functional.block(x, params, plain, generator=seeded())
    torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@TILED
@pytest.mark.parametrize("trained", ["attn.pre_w", "attn.pre_b", "attn.post_w", "ffn.pre_w", "ffn.pre_b", "ffn.post_w"])
def test_one_vector_alone_is_trained(trained: str, scratch: int) -> None:
    spec = block_of(scratch=scratch)
    x, params = drawn(spec)
    dy = torch.randn(B, T, C, dtype=DOUBLE)
    (every,) = torch.autograd.grad(functional.block(x, params, spec), params[trained], dy)
    alone = {name: t if name == trained else t.detach() for name, t in params.items()}
    (found,) = torch.autograd.grad(functional.block(x.detach(), alone, spec), params[trained], dy)
    torch.testing.assert_close(found, every, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batch", [0, 1])
def test_no_and_one_batch_element(batch: int) -> None:
    spec = block_of()
    x, params = drawn(spec, batch=batch)
    grads = torch.autograd.grad(functional.block(x, params, spec).sum(), [x, *params.values()])
    assert all(g.shape == t.shape and g.isfinite().all() for g, t in zip(grads, (x, *params.values()), strict=True))


def test_what_it_needs_is_counted_for_each_batch_element() -> None:
    """On a CPU a norm's launch is one for each element, and so is what it leaves of gradients."""
    for batch in (2, 5):
        forward, backward = (count(block_of(), batch, T, C, torch.float32).launches for count in LEDGERS)
        assert (forward["norm_fwd"], forward["residual_fwd"]) == (batch, 2 * batch)
        assert (backward["norm_bwd"], backward["residual_bwd"]) == (2 * batch, 2 * batch)


class DiT(nn.Module):
    """The formula, on the parameters of a block."""

    def __init__(self, block: FusedCheckpointBlock) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, m: Tensor) -> Tensor:
        """x + gate * f(norm(x) * (1 + scale) + shift), twice."""
        b = self.block
        shift, scale, gate, shift_2, scale_2, gate_2 = (t[:, None] for t in m.unbind(1))
        n = F.layer_norm(x, (x.size(-1),)) * (1 + scale) + shift
        q, k, v = F.linear(n, b.self_attn.in_proj_weight, b.self_attn.in_proj_bias).chunk(3, -1)
        heads = [t.unflatten(-1, (b.self_attn.num_heads, -1)).transpose(1, 2) for t in (q, k, v)]
        o = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + gate * b.self_attn.out_proj(o)
        n = F.layer_norm(x, (x.size(-1),)) * (1 + scale_2) + shift_2
        return x + gate_2 * b.linear2(F.gelu(b.linear1(n)))


def made(**options: Any) -> FusedCheckpointBlock:
    torch.manual_seed(0)
    every = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True, "modulated": True}
    return FusedCheckpointBlock(32, 4, 48, dtype=DOUBLE, **{**every, **options})


@pytest.mark.parametrize("generic", [False, True])
def test_the_block_is_dits(generic: bool) -> None:
    block = made()
    assert "modulated=True" in repr(block) and not [name for name in block.state_dict() if "norm" in name]
    x, m = (
        torch.randn(2, 9, 32, dtype=DOUBLE, requires_grad=True),
        torch.randn(2, 6, 32, dtype=DOUBLE, requires_grad=True),
    )
    if generic:
        block.linear1.register_forward_hook(lambda module, args, y: None)
    assert (block.generic_reason() is not None) == generic
    leaves = [x, m, *block.parameters()]
    found, wanted = (torch.autograd.grad(y.square().sum(), leaves) for y in (block(x, modulation=m), DiT(block)(x, m)))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_with_a_weight_runs_generically(norm: type[nn.Module]) -> None:
    """Its weight is read, and trained, though no op has a place for it beside the call's vectors."""
    block = made()
    block.norm1 = norm(32, dtype=DOUBLE)
    nn.init.normal_(block.norm1.weight)
    assert "weight of its own" in str(block.generic_reason())
    x, m = torch.randn(2, 9, 32, dtype=DOUBLE), torch.randn(2, 6, 32, dtype=DOUBLE)
    plain = made()
    plain.norm1 = block.norm1
    plain.linear1.register_forward_hook(lambda module, args, y: None)
    torch.testing.assert_close(block(x, modulation=m), plain(x, modulation=m))
    block(x, modulation=m).sum().backward()
    assert block.norm1.weight.grad is not None


def test_a_norm_of_another_kind_runs_generically() -> None:
    """It may have no weight to ask for."""
    block = made()
    block.norm1 = nn.Identity()  # type: ignore[assignment]
    x, m = torch.randn(2, 9, 32, dtype=DOUBLE), torch.zeros(2, 6, 32, dtype=DOUBLE)
    assert "unknown norm" in str(block.generic_reason())
    torch.testing.assert_close(block(x, modulation=m), x)  # gates of 0 let nothing through


@pytest.mark.parametrize(("name", "value"), [("norm_first", False), ("parallel", True), ("parallel", "shared")])
def test_what_is_changed_later_is_refused(name: str, value: Any) -> None:
    block = made()
    setattr(block, name, value)
    with pytest.raises(ValueError, match="modulated: expected norm_first=True"):
        block(torch.randn(2, 9, 32, dtype=DOUBLE), modulation=torch.randn(2, 6, 32, dtype=DOUBLE))


@pytest.mark.parametrize("types", [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)], ids=str)
def test_both_ways_take_vectors_of_another_type(types: tuple[torch.dtype, torch.dtype]) -> None:
    """The op, and the layers of a block that is hooked: each as near the formula in float64 as its type allows."""
    own, other = types
    block = made().to(own)
    x, m = torch.randn(2, 9, 32).to(own), torch.randn(2, 6, 32).to(other)
    true = DiT(copy.deepcopy(block).double())(x.double(), m.double())
    for fused in (True, False):
        assert isinstance(block.prepare(x, modulation=m), Call) == fused
        y = block(x, modulation=m)
        assert y.dtype == own
        assert (y - true).norm() <= 4 * torch.finfo(own).eps * true.norm()  # a dozen roundings, most of them of less
        block.linear1.register_forward_hook(lambda module, args, y: None)


def test_it_is_one_graph_for_the_compiler() -> None:
    block = made()
    x, m = (
        torch.randn(2, 9, 32, dtype=DOUBLE, requires_grad=True),
        torch.randn(2, 6, 32, dtype=DOUBLE, requires_grad=True),
    )
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    found, wanted = (torch.autograd.grad(f(x, modulation=m).square().sum(), [x, m]) for f in (compiled, block))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_second_derivatives() -> None:
    block = made()
    x, m = (
        torch.randn(2, 3, 32, dtype=DOUBLE, requires_grad=True),
        torch.randn(2, 6, 32, dtype=DOUBLE, requires_grad=True),
    )
    assert torch.autograd.gradgradcheck(lambda x, m: block(x, modulation=m), (x, m), fast_mode=True)


def test_what_does_not_fit_is_refused() -> None:
    block, x = made(), torch.randn(2, 9, 32, dtype=DOUBLE)
    with pytest.raises(
        ValueError, match=r"modulation: expected shape \[B, 6, C\] .*, got \[2, 192\] beside \[2, 9, 32\]"
    ):
        block(x, modulation=torch.randn(2, 192, dtype=DOUBLE))
    with pytest.raises(TypeError, match="modulation: expected a tensor"):
        block(x)
    with pytest.raises(TypeError, match="modulation: expected a floating-point tensor, got torch.int64"):
        block(x, modulation=torch.ones(2, 6, 32, dtype=torch.int64))
    with pytest.raises(ValueError, match="modulation: expected .* device"):
        block(x, modulation=torch.ones(2, 6, 32, dtype=DOUBLE, device="meta"))
    with pytest.raises(ValueError, match="called without modulation"):
        FusedCheckpointSequential(block, made())(x)
    with pytest.raises(ValueError, match="modulation: leave it out"):
        made(modulated=False)(x, modulation=torch.randn(2, 6, 32, dtype=DOUBLE))
    for wrong in ({"norm_first": False}, {"batch_first": False}, {"parallel": True}):
        with pytest.raises(ValueError, match="modulated: expected norm_first=True"):
            made(**wrong)
    with pytest.raises(ValueError, match="expected one of layernorm, rmsnorm, got 'gemma'"):
        made(norm="gemma")
    with pytest.raises(ValueError, match="attn.modulated: expected batch-first x"):
        BlockSpec(AttentionSpec(2, 2, 8, modulated=True), seq_first=True)
    spec = block_of()
    x, params = drawn(spec)
    with pytest.raises(ValueError, match=r"params\['attn.pre_w'\]: expected shape \[3, 24\], got \[2, 24\]"):
        functional.block(x, {**params, "attn.pre_w": torch.ones(2, C, dtype=DOUBLE)}, spec)
