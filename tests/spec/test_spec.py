"""The spec's text form, its checks, and what it says about keep sets and parameters."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from ckptfused.spec import (
    ACTIVATIONS,
    AUX_NAMES,
    GATED_ACTIVATIONS,
    KEEP_PRESETS,
    Adapter,
    AttentionSpec,
    BlockSpec,
    FFNSpec,
    keepable,
    param_names,
    param_shapes,
    resolve_keep,
)

ATTN = AttentionSpec(heads=4, kv_heads=2, head_dim=8)
FFN = FFNSpec("swiglu", 32)
PRE = BlockSpec(dataclasses.replace(ATTN, pre="rmsnorm"), dataclasses.replace(FFN, pre="rmsnorm"))
POST = BlockSpec(dataclasses.replace(ATTN, out="layernorm"), dataclasses.replace(FFN, out="layernorm"))
EVERYTHING = BlockSpec(
    AttentionSpec(
        heads=4,
        kv_heads=2,
        head_dim=8,
        pre="gemma",
        post="rmsnorm",
        pre_eps=1e-6,
        post_eps=1e-12,
        joint=True,
        transposed=True,
        scale=0.1,
        causal=True,
        window=17,
        softcap=30.0,
        rope="interleaved",
        rotary_dim=4,
        qk_norm="layernorm",
        qk_eps=3e-7,
        p_attn=0.1,
        p_res=1 / 3,
        m=0.22,
        mask="add",
        padding="drop",
    ),
    FFNSpec("geglu_tanh", 33, joint=True, transposed=True, pre="gemma", post="rmsnorm", p_hidden=1.0, p_res=1e-9),
    keep=("qkv", "out"),
    seq_first=True,
    compute="bfloat16",
)
SPECS = {
    "pre": PRE,
    "post": POST.with_keep("all"),
    "everything": EVERYTHING,
    "attention": BlockSpec(ATTN),
    "ffn": BlockSpec(ffn=FFN, keep=("gu",)),
    "parallel": BlockSpec(PRE.attn, PRE.ffn, parallel=True, keep=("attn",)),
    "shared": BlockSpec(PRE.attn, FFN, parallel="shared"),
    "interleaved": BlockSpec(AttentionSpec(heads=4, kv_heads=4, head_dim=8, joint=True, interleaved=True)),
    "adapters": BlockSpec(
        dataclasses.replace(ATTN, lora=(Adapter("v", 8, 1e20, 1e-5), Adapter("q", 1, -1 / 3), Adapter("q", 64, 2))),
        dataclasses.replace(FFN, lora=(Adapter("down", 16, 2.0, 0.05),)),
    ),
    "packed": BlockSpec(dataclasses.replace(ATTN, packed=True)),
}


@pytest.mark.parametrize("name", SPECS)
def test_text_round_trip(name: str) -> None:
    spec = SPECS[name]
    again = BlockSpec.parse(spec.to_string())
    assert again == spec
    assert again.to_string() == spec.to_string()
    assert hash(again) == hash(spec)
    assert pickle.loads(pickle.dumps(spec)).to_string() == spec.to_string()


def test_text_leaves_out_defaults() -> None:
    assert BlockSpec(ATTN).to_string() == "halves=attn attn.heads=4 attn.kv_heads=2 attn.head_dim=8"
    assert PRE.with_keep("mid").to_string() == (
        "halves=attn+ffn keep=mid attn.heads=4 attn.kv_heads=2 attn.head_dim=8 attn.pre=rmsnorm "
        "ffn.act=swiglu ffn.hidden=32 ffn.pre=rmsnorm"
    )


def test_text_is_canonical_whatever_the_number_type() -> None:
    whole = dataclasses.replace(ATTN, p_attn=1, m=2, softcap=30)
    assert BlockSpec(whole).to_string().endswith("attn.m=2.0 attn.softcap=30.0 attn.p_attn=1.0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("attn.heads=4", "expected halves="),
        ("halves=attn attn.heads=4 attn.kv_heads=4", "attn.head_dim"),
        ("halves=ffn ffn.act=relu ffn.hidden=8 ffn.colour=red", "unknown key 'ffn.colour'"),
        ("halves=ffn ffn.act=relu ffn.hidden=eight", "ffn.hidden: expected a value of type int, got 'eight'"),
        ("halves=ffn ffn.act=relu ffn.hidden=8 ffn.hidden=8", "each key once"),
        ("halves=ffn ffn.act=swiglu ffn.hidden=8 ffn.joint=yes", "expected a value of type bool, got 'yes'"),
        ("halves=ffn ffn", "key=value"),
        ("halves=ffn ffn.act=relu ffn.hidden=8 ffn.lora=up:8:1.0", "ffn.lora: expected target:rank:scale:p, got"),
        ("halves=ffn ffn.act=relu ffn.hidden=8 ffn.lora=up:x:1.0:0.0", "ffn.lora: expected target:rank:scale:p"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockSpec.parse(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, r"attn.kv_heads: expected a divisor of heads=3, got 2"),
        ({"head_dim": 257}, r"attn.head_dim: expected at most 256, got 257"),
        ({"heads": 0}, r"attn.heads: expected an integer of at least 1, got 0"),
        ({"p_attn": 1.5}, r"attn.p_attn: expected a number in \[0, 1\], got 1.5"),
        ({"p_res": -0.1}, r"attn.p_res: expected a number in \[0, 1\], got -0.1"),
        ({"p_res": float("nan")}, r"attn.p_res: expected a number in \[0, 1\], got nan"),
        (
            {"pre": "batchnorm"},
            r"attn.pre: expected one of none, layernorm, rmsnorm, gemma, layernorm1p, got 'batchnorm'",
        ),
        ({"rope": "half", "rotary_dim": 5}, r"attn.rotary_dim: expected an even number, got 5"),
        ({"rope": "half", "rotary_dim": 10}, r"attn.rotary_dim: expected at most head_dim=8, got 10"),
        ({"interleaved": True}, r"attn.interleaved: expected one tensor for q, k and v .* got joint=False"),
        ({"interleaved": True, "joint": True}, r"attn.interleaved: expected kv_heads=4, as heads, got 2"),
        ({"scale": 0.0}, r"attn.scale: expected a number other than 0"),
        ({"softcap": -1.0}, r"attn.softcap: expected a number of at least 0, got -1.0"),
        ({"window": -1}, r"attn.window: expected an integer of at least 0, got -1"),
        ({"mask": "yes"}, r"attn.mask: expected one of none, keep, drop, add, got 'yes'"),
        ({"lora": (Adapter("out", 8),)}, r"attn.lora\[0\].target: expected one of q, k, v, o, got 'out'"),
        ({"lora": (Adapter("v", 8),), "joint": True}, r"attn.lora\[0\].target: expected one of q, o, got 'v'"),
        ({"lora": (Adapter("q", 0),)}, r"attn.lora\[0\].rank: expected an integer of at least 1, got 0"),
        ({"lora": (Adapter("q", 8, p=2.0),)}, r"attn.lora\[0\].p: expected a number in \[0, 1\], got 2.0"),
        ({"lora": (Adapter("q", 8, float("inf")),)}, r"attn.lora\[0\].scale: expected a finite number, got inf"),
        ({"packed": True, "mask": "keep"}, r"attn.packed: packed sequences take no mask"),
        ({"pre_eps": -1e-5}, r"attn.pre_eps: expected a number of at least 0"),
    ],
)
def test_attention_spec_refuses(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ATTN, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 4.0}, r"attn.heads: expected an integer, got 4.0"),
        ({"lora": ("q",)}, r"attn.lora: expected a tuple of Adapter, got \('q',\)"),
        ({"causal": 1}, r"attn.causal: expected a bool, got 1"),
        ({"p_attn": "0.1"}, r"attn.p_attn: expected a number in \[0, 1\], got '0.1'"),
        ({"rope": True}, r"attn.rope: expected one of none, half, interleaved, got True"),
    ],
)
def test_attention_spec_refuses_types(changes: dict, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        dataclasses.replace(ATTN, **changes)


def test_ffn_and_block_specs_refuse() -> None:
    with pytest.raises(ValueError, match=r"ffn.act: expected one of .*, got 'tanh'"):
        FFNSpec("tanh", 8)
    with pytest.raises(ValueError, match=r"ffn.joint: expected a gated activation"):
        FFNSpec("relu", 8, joint=True)
    with pytest.raises(ValueError, match=r"ffn.lora\[0\].target: expected one of up, down, got 'gate'"):
        FFNSpec("relu", 8, lora=(Adapter("gate", 4),))
    with pytest.raises(ValueError, match=r"lora: expected at most 252 adapters in a block, got 300"):
        BlockSpec(ffn=FFNSpec("relu", 8, lora=(Adapter("up", 4),) * 300))
    with pytest.raises(ValueError, match=r"got neither"):
        BlockSpec()
    with pytest.raises(ValueError, match=r"both halves, got one half"):
        BlockSpec(ATTN, parallel=True)
    with pytest.raises(ValueError, match=r"no closing norm"):
        BlockSpec(POST.attn, POST.ffn, parallel=True)
    with pytest.raises(ValueError, match=r"expected ffn.pre='none', got 'rmsnorm'"):
        BlockSpec(PRE.attn, PRE.ffn, parallel="shared")
    with pytest.raises(ValueError, match=r"compute: expected one of .*, got 'int8'"):
        BlockSpec(ATTN, compute="int8")


def test_keep_names_that_exist() -> None:
    sandwich = BlockSpec(dataclasses.replace(ATTN, post="gemma"), dataclasses.replace(FFN, post="gemma"))
    assert keepable(PRE) == ("attn", "mid", "qkv", "gu")
    assert keepable(POST) == ("attn", "mid", "qkv", "gu", "out")
    assert keepable(sandwich) == ("attn", "mid", "proj", "qkv", "gu", "out")
    assert keepable(SPECS["parallel"]) == ("attn", "qkv", "gu")
    assert keepable(BlockSpec(ATTN)) == ("attn", "qkv")
    assert keepable(BlockSpec(POST.attn)) == ("attn", "mid", "qkv")
    assert keepable(BlockSpec(ffn=FFN)) == ("gu",)


def test_resolve_keep() -> None:
    assert resolve_keep(PRE, "inputs") == ()
    assert resolve_keep(PRE, "all") == ("attn", "mid", "qkv", "gu")
    assert resolve_keep(PRE, ("gu", "attn", "gu")) == ("attn", "gu")
    assert resolve_keep(PRE, {"mid"}) == ("mid",)
    # A preset skips what a block does not have; a name asked for must exist.
    assert resolve_keep(SPECS["parallel"], "attention+mid") == ("attn",)
    assert resolve_keep(BlockSpec(ffn=FFN), "attention+mid+qkv") == ()
    with pytest.raises(ValueError, match=r"keep: expected names among attn, qkv, gu .*, got 'mid'"):
        resolve_keep(SPECS["parallel"], ["mid"])
    with pytest.raises(ValueError, match=r"keep: expected a preset .*'inputs'.* got 'everything'"):
        resolve_keep(PRE, "everything")
    with pytest.raises(TypeError, match=r"keep: expected .*, got 3"):
        resolve_keep(PRE, 3)  # type: ignore[arg-type]


def test_presets_grow() -> None:
    sizes = [len(names) for names in KEEP_PRESETS.values()]
    assert next(iter(KEEP_PRESETS)) == "inputs"
    assert list(KEEP_PRESETS)[-1] == "all"
    assert sizes == sorted(sizes)


def test_param_slots() -> None:
    names = param_names(PRE)
    assert len(names) == 34
    assert names[:4] == ("attn.pre_w", "attn.pre_b", "attn.q_w", "attn.q_b")
    assert names[20:24] == ("attn.sinks", "ffn.pre_w", "ffn.pre_b", "ffn.gate_w")
    assert len(param_names(BlockSpec(ATTN))) == 21
    assert len(param_names(BlockSpec(ffn=FFN))) == 13
    assert AUX_NAMES == ("cos", "sin", "mask", "padding", "cu_seqlens", "q_scale")


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("transposed", [False, True])
def test_param_shapes(act: str, transposed: bool) -> None:
    spec = BlockSpec(dataclasses.replace(ATTN, transposed=transposed), FFNSpec(act, 48, transposed=transposed))
    shapes = param_shapes(spec, 16)
    assert set(shapes) <= set(param_names(spec))
    assert shapes["attn.q_w"] == ((16, 32) if transposed else (32, 16), True)
    assert shapes["attn.k_w"] == ((16, 16), True)
    assert shapes["ffn.down_w"] == ((48, 16) if transposed else (16, 48), True)
    assert ("ffn.gate_w" in shapes) == (act in GATED_ACTIVATIONS)
    assert shapes.get("ffn.coefficients") == (((4,), True) if act == "xielu" else None)
    joint = param_shapes(EVERYTHING, 16)
    assert joint["attn.q_w"] == ((16, 64), True)
    assert "attn.k_w" not in joint
    assert joint["ffn.gate_w"] == ((16, 66), True)
    assert "ffn.up_w" not in joint


def test_adapter_slots() -> None:
    spec, text = SPECS["adapters"], SPECS["adapters"].to_string()
    assert "attn.lora=v:8:1e20:1e-05+q:1:-0.3333333333333333:0.0+q:64:2.0:0.0" in text
    assert text.endswith("ffn.lora=down:16:2.0:0.05")
    names = param_names(spec)
    assert names[34:38] == ("attn.lora0.a", "attn.lora0.b", "attn.lora0.bias", "attn.lora1.a")
    assert names[-3:] == ("ffn.lora0.a", "ffn.lora0.b", "ffn.lora0.bias")
    shapes = param_shapes(spec, 24)
    assert shapes["attn.lora0.a"] == ((8, 24), True)
    assert shapes["attn.lora0.b"] == ((16, 8), True)
    assert shapes["ffn.lora0.a"] == ((16, 32), True)
    assert shapes["ffn.lora0.bias"] == ((24,), False)
    joint = BlockSpec(dataclasses.replace(ATTN, joint=True, transposed=True, lora=(Adapter("q", 4),)))
    assert param_shapes(joint, 24)["attn.lora0.b"] == ((64, 4), True)
    assert spec.has_dropout
    assert not spec.without_dropout().has_dropout


def test_variants_of_a_spec() -> None:
    called = PRE.with_inputs(mask="keep", padding="drop")
    assert called.attn is not None
    assert (called.attn.mask, called.attn.padding) == ("keep", "drop")
    assert EVERYTHING.has_dropout
    assert not EVERYTHING.without_dropout().has_dropout
    assert ".p_" not in EVERYTHING.without_dropout().to_string()
    with pytest.raises(ValueError, match="attention half, got none"):
        BlockSpec(ffn=FFN).with_inputs(mask="keep")
