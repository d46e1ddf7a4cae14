"""The oracle's block against nn.TransformerEncoderLayer, a Llama layer written out, and itself."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ckptfused.eager import dropout_masks, eager_block
from ckptfused.spec import AttentionSpec, BlockSpec, FFNSpec
from tests.cases import AXES, Case, all_pairs, impossible
from tests.oracle import make_inputs

C, H, F_, B, T = 16, 4, 24, 2, 7


def _layer_params(layer: nn.TransformerEncoderLayer, norm_first: bool) -> dict[str, Tensor]:
    place = "pre" if norm_first else "out"
    names = {
        "attn.q_w": "self_attn.in_proj_weight",
        "attn.q_b": "self_attn.in_proj_bias",
        "attn.o_w": "self_attn.out_proj.weight",
        "attn.o_b": "self_attn.out_proj.bias",
        "ffn.up_w": "linear1.weight",
        "ffn.up_b": "linear1.bias",
        "ffn.down_w": "linear2.weight",
        "ffn.down_b": "linear2.bias",
        f"attn.{place}_w": "norm1.weight",
        f"attn.{place}_b": "norm1.bias",
        f"ffn.{place}_w": "norm2.weight",
        f"ffn.{place}_b": "norm2.bias",
    }
    state = dict(layer.named_parameters())
    return {ours: state[theirs] for ours, theirs in names.items()}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("act", ["relu", "gelu"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_matches_the_encoder_layer(norm_first: bool, act: str, batch_first: bool, masked: bool) -> None:
    options = {"dropout": 0.0, "activation": act, "norm_first": norm_first, "batch_first": batch_first}
    layer = nn.TransformerEncoderLayer(C, H, F_, **options, dtype=torch.float64)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.4)
    norms = {"pre" if norm_first else "out": "layernorm"}
    kinds = {"mask": "add", "padding": "drop"} if masked else {}
    spec = BlockSpec(
        attn=AttentionSpec(H, H, C // H, joint=True, **norms, **kinds),
        ffn=FFNSpec(act, F_, **norms),
        seq_first=not batch_first,
    )
    x = torch.randn(B, T, C, dtype=torch.float64) if batch_first else torch.randn(T, B, C, dtype=torch.float64)
    mask = torch.randn(T, T, dtype=torch.float64) if masked else None
    padding = torch.arange(T) >= torch.tensor([[T], [4]]) if masked else None
    as_bias = None if padding is None else torch.zeros(B, T, dtype=torch.float64).masked_fill(padding, -torch.inf)
    expected = layer(x, mask, as_bias)
    aux = {} if mask is None else {"mask": mask[None, None], "padding": padding}
    torch.testing.assert_close(eager_block(x, _layer_params(layer, norm_first), spec, **aux), expected)


def test_matches_a_llama_layer() -> None:
    case = Case(act="swiglu", norm="rmsnorm", rope="half", heads="4/2", mask="causal", batch=2, tokens=5)
    inputs = make_inputs(case)
    w, x = inputs.params, inputs.x
    cos, sin = (torch.cat((inputs.aux[n],) * 2, -1) for n in ("cos", "sin"))

    def rms(v: Tensor, weight: Tensor) -> Tensor:
        return v / (v.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def turn(v: Tensor) -> Tensor:
        half = v.shape[-1] // 2
        return v * cos + torch.cat((-v[..., half:], v[..., :half]), -1) * sin

    def heads(name: str, n: int) -> Tensor:
        return (rms(x, w["attn.pre_w"]) @ w[f"attn.{name}_w"].T).view(2, 5, n, 8).transpose(1, 2)

    q, k, v = turn(heads("q", 4)), turn(heads("k", 2)), heads("v", 2)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = q @ k.mT / 8**0.5 + torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)
    o = (scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 5, 32)
    mid = x + o @ w["attn.o_w"].T
    n = rms(mid, w["ffn.pre_w"])
    gate, up = n @ w["ffn.gate_w"].T, n @ w["ffn.up_w"].T
    expected = mid + (gate * torch.sigmoid(gate) * up) @ w["ffn.down_w"].T
    torch.testing.assert_close(eager_block(x, w, case.spec(), **inputs.aux), expected)


def test_packed_is_each_sequence_alone() -> None:
    case = Case(mask="packed-causal", rope="half", drop="attn")
    inputs, spec = make_inputs(case), case.spec()
    masks = dropout_masks(spec, 1, case.tokens, case.width, torch.tensor([3, 0]), inputs.aux["cu_seqlens"])
    whole = eager_block(inputs.x, inputs.params, spec, **inputs.aux, masks=masks)
    assert spec.attn is not None
    alone = replace(spec, attn=replace(spec.attn, packed=False))
    bounds = inputs.aux["cu_seqlens"].tolist()
    for s, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        n = end - start
        tables = {name: inputs.aux[name][start:end] for name in ("cos", "sin")}
        part = {0: masks[0][s : s + 1, :, :n, :n]}
        y = eager_block(inputs.x[:, start:end], inputs.params, alone, **tables, masks=part)
        torch.testing.assert_close(whole[:, start:end], y)


@pytest.mark.parametrize("layout", ["parallel", "shared"])
def test_parallel_adds_both_halves(layout: str) -> None:
    case = Case(layout=layout, m=0.5)
    inputs, spec = make_inputs(case), case.spec()
    assert spec.attn is not None
    assert spec.ffn is not None
    params = dict(inputs.params)
    if layout == "shared":
        params |= {"ffn.pre_w": params["attn.pre_w"], "ffn.pre_b": params["attn.pre_b"]}
    attn = eager_block(inputs.x, params, BlockSpec(attn=spec.attn))
    ffn = eager_block(inputs.x, params, BlockSpec(ffn=replace(spec.ffn, pre="layernorm")))
    torch.testing.assert_close(eager_block(inputs.x, inputs.params, spec), attn + ffn - inputs.x)


def test_dropping_everything_leaves_the_residual() -> None:
    case = Case(drop="all")
    inputs, spec = make_inputs(case), case.spec()
    masks = dropout_masks(spec, case.batch, case.tokens, case.width, torch.tensor([3, 0]))
    none = {site: torch.zeros_like(mask) for site, mask in masks.items()}
    assert sorted(masks) == [0, 1, 2, 3]
    assert eager_block(inputs.x, inputs.params, spec, masks=none).equal(inputs.x)
    with pytest.raises(ValueError, match="rng_state: expected an int64"):
        eager_block(inputs.x, inputs.params, spec)


def test_cases_cover_every_possible_pair() -> None:
    cases = all_pairs()
    assert len(cases) >= 60
    assert len({case.id for case in cases}) == len(cases)
    for (a, first), (b, second) in itertools.combinations(AXES.items(), 2):
        covered = {(getattr(case, a), getattr(case, b)) for case in cases}
        for v, w in itertools.product(first, second):
            assert (v, w) in covered or impossible((a, v), (b, w)), (a, v, b, w)
